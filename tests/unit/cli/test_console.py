"""What the verbs share: prompts from three places, one line per error, a bar only where someone watches."""

import io
import sys
from pathlib import Path

import pytest

from quaff.cli import console
from quaff.errors import PromptError


class Stdin(io.TextIOWrapper):
    def __init__(self, data: bytes, terminal: bool = False) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def test_prompt_comes_from_argument_file_or_stdin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("Grüße 🌊\r\n".encode())
    monkeypatch.setattr(sys, "stdin", Stdin("標準入力".encode()))
    assert console.read_prompt("text", None) == "text"
    assert console.read_prompt(None, file) == "Grüße 🌊\r\n"  # as it is: line ends are the user's
    assert console.read_prompt(None, None) == "標準入力"


def test_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfhello")
    assert console.read_text(file) == "hello"


@pytest.mark.parametrize(
    ("argument", "data", "message"),
    [
        ("", b"", "the prompt is empty"),
        (None, b"", "the prompt is empty"),
        (None, b"ok \xff\xfe", "standard input is not UTF-8 text: byte 3 is 0xff"),
        ("\udcff", b"", "the prompt on the command line is not UTF-8 text: byte 0 is 0xff"),
    ],
)
def test_bad_prompts_are_named(argument: str | None, data: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    with pytest.raises(PromptError, match=message):
        console.read_prompt(argument, None)


def test_no_prompt_and_two_prompts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(b"", terminal=True))
    with pytest.raises(PromptError, match="no prompt"):
        console.read_prompt(None, None)
    with pytest.raises(PromptError, match="not both"):
        console.read_prompt("a", tmp_path / "b")


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.fail("first\nsecond\x1b[31m")
    assert capsys.readouterr() == ("", "error: first\\nsecond\\x1b[31m\n")


def test_bar_appears_only_on_a_terminal_and_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    monkeypatch.setattr(console.Bar, "_open", lambda bar: opened.append(True))
    monkeypatch.setattr(console, "BAR_AFTER_SECONDS", 0.0)
    bar = console.Bar("work")
    bar.step("work", 1, 10)
    assert opened == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar.step("work", 10, 10)
    assert opened == []
    bar.step("work", 2, 10)
    bar.step("work", 2, 0)
    assert opened == [True, True]
    monkeypatch.setattr(console, "BAR_AFTER_SECONDS", 60.0)
    opened.clear()
    console.Bar("work").step("work", 2, 10)
    assert opened == []
