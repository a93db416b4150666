"""The ledger: one JSON line per bench, appended and never changed. A figure may be published once its line is committed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any

from quaff.errors import QuaffError
from quaff.release import release

Entry = dict[str, Any]

_NUMBER = (int, float)
_RESULT = {
    "test": (str,),
    "threads": (int,),
    "schedule": (str,),
    "chunk": (int,),
    "median_tokens_per_second": _NUMBER,
    "spread": _NUMBER,
    "samples": [_NUMBER],
}
_MACHINE = {"cpu": (str,), "isa": (str,), "load_average_before": _NUMBER, "load_average_after": _NUMBER}
_SHAPE: Mapping[str, Any] = {
    "utc": (str,),
    "commit": (str, NoneType),
    "dirty": (bool, NoneType),
    "quaff": (str,),
    "numerics": (int,),
    "machine": _MACHINE,
    "model": {"file": (str,), "bytes": (int,), "sha256": (str,)},
    "results": [_RESULT],
}
"""Every key of a line with the types that it may have: no more keys, no fewer. Results are those of `bench_json`."""

_SOURCES = ("src", "native", "CMakeLists.txt", "pyproject.toml")


class LedgerError(QuaffError):
    """A ledger line that is damaged, or that this version does not know how to read."""


def installed() -> str:
    """The version of quaff that is installed; LedgerError where none is."""
    version = release()
    if version is None:
        raise LedgerError("a ledger line names the version of quaff, and none is installed here; install it first: pip install .")
    return version


def entry(report: Mapping[str, Any]) -> Entry:
    """The line of a report by `bench_json`: what ran (commit, versions), where, on which bytes, and the figures with their spread."""
    from quaff import _native

    commit, dirty = checkout(Path(__file__))
    return {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": dirty,
        "quaff": installed(),
        "numerics": _native.NUMERICS_VERSION,
        "machine": {"cpu": cpu_model()} | {key: report[key] for key in _MACHINE if key != "cpu"},
        "model": model_file(Path(report["model"])),
        "results": [{key: result[key] for key in _RESULT} for result in report["results"]],
    }


def append(path: Path, line: Entry) -> None:
    """Add one line, whole or not at all, also beside other writers. LedgerError when the file's last line is not complete."""
    import fcntl

    data = (json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n").encode()
    with path.open("a+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
            raise LedgerError(f"{path}: the last line is cut off; restore the committed file")
        try:
            if file.write(data) != len(data):
                raise OSError(f"{path}: the line could not be written whole")
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise


def read(path: Path) -> list[Entry]:
    """All lines, oldest first; a file that is not there has none. LedgerError names the first line that is not exactly as `_SHAPE` says."""
    data = path.read_bytes() if path.exists() else b""
    lines = data.split(b"\n")
    if lines.pop():
        raise LedgerError(f"{path}, line {len(lines) + 1}: cut off; restore the committed file")
    out = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line, parse_constant=_refuse)
            _check(value, _SHAPE, "line")
        except (ValueError, RecursionError) as error:
            raise LedgerError(f"{path}, line {number}: {error}") from None
        out.append(value)
    return out


def _check(value: Any, shape: Any, name: str) -> None:
    if isinstance(shape, list):
        if not isinstance(value, list) or not value:
            raise ValueError(f"{name} must be a list with something in it")
        for item in value:
            _check(item, shape[0], name)
    elif isinstance(shape, Mapping):
        if not isinstance(value, dict) or value.keys() != shape.keys():
            raise ValueError(f"{name} must be an object with the keys {', '.join(shape)}")
        for key, inner in shape.items():
            _check(value[key], inner, key)
    elif type(value) not in shape:
        raise ValueError(f"{name} has the wrong type")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a figure")


def model_file(path: Path) -> dict[str, Any]:
    """Name, bytes and SHA-256 of a model's file."""
    with path.open("rb") as file:
        return {"file": path.name, "bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def cpu_model() -> str:
    """The processor's name as the kernel gives it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "") or platform.machine()


def checkout(file: Path) -> tuple[str | None, bool | None]:
    """Commit that `file` belongs to, and whether sources differ from it; (None, None) when no git repository tracks `file`."""
    git = ["git", "-C", str(file.parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", file.name], check=True, capture_output=True)
        top = _output([*git, "rev-parse", "--show-toplevel"])
        changes = _output(["git", "-C", top, "status", "--porcelain", "--", *_SOURCES])
        return _output([*git, "rev-parse", "HEAD"]), bool(changes)
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
