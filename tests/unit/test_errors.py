"""Messages stay one line, whatever they quote."""

import pytest

from quaff import errors
from quaff.errors import CheckpointError, ConfigError, QuaffError, located, one_line, quote

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, QuaffError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_is_a_quaff_error_of_one_line(kind: type[QuaffError]) -> None:
    error = kind("a\nb\r\tc\x1b[31m\x00\u2028\udcff é 漢")
    assert str(error) == r"a\nb\r\tc\x1b[31m\x00\u2028\udcff é 漢"
    assert isinstance(error, QuaffError)


def test_one_line_leaves_plain_text_alone() -> None:
    assert one_line("plain text, ünï, 漢字, 'quotes' and \\") == "plain text, ünï, 漢字, 'quotes' and \\"


def test_quote_cuts_the_middle() -> None:
    assert quote("name") == "'name'"
    assert quote("a\nb") == r"'a\nb'"
    assert quote("x" * 50 + "y" * 100, 40) == "'" + "x" * 20 + "..." + "y" * 10 + "'"


def test_located_names_the_place_once() -> None:
    with pytest.raises(ConfigError, match=r"^m\.gguf: wrong$"), located("m.gguf"), located("m.gguf"):
        raise ConfigError("wrong")
    with pytest.raises(CheckpointError, match=r"^a\\nb: wrong$"), located("a\nb"), located("a\nb"):
        raise CheckpointError("wrong")
    with pytest.raises(KeyError), located("m.gguf"):
        raise KeyError("another kind passes")
