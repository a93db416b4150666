"""The token ids of replies, found again by the text they continued: text that was generated is never cut into tokens anew.

A reply is known by a digest of the whole text up to its end, so that its ids can only return where every character before it is the same.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
import zlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from quaff.errors import one_line

log = logging.getLogger("quaff.serve")

MAX_REPLIES = 4096
MAX_IDS = 8 << 20
"""Ids of all replies that are kept, 4 bytes each."""
SPARE_LINES = 64
"""The file may have twice as many lines as there are replies, and so many more, before it is written anew."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Characters `start` .. `end` - 1 of a text are `ids`. `call`: id of the first tool call in it, or ""."""

    start: int
    end: int
    ids: array[int]
    call: str = ""


class Replies:
    """The last replies, also in a file where one is given. For any thread."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: one line of JSON per reply, appended. Lines that are damaged are skipped."""
        self._lock = threading.Lock()
        self._path = path
        self._replies: OrderedDict[bytes, Reply] = OrderedDict()
        self._by_call: dict[str, bytes] = {}
        self._held = 0
        self._lines = 0
        if path is not None:
            self._load(path)

    def keep(self, prompt: str, text: str, ids: tuple[int, ...], call: str = "") -> None:
        """`text`, written as `ids`, followed `prompt`."""
        if not ids or not text or len(ids) > MAX_IDS:
            return
        digest = _digest(prompt + text)
        reply = Reply(len(prompt), len(prompt) + len(text), array("i", ids), call)
        with self._lock:
            if self._replies.get(digest) == reply:
                self._replies.move_to_end(digest)
                return
            self._add(digest, reply)
            if self._path is not None:
                self._append(self._path, [_line(digest, reply)])
                self._lines += 1
                if self._lines > 2 * len(self._replies) + SPARE_LINES:
                    self._rewrite(self._path)

    def find(self, text: str) -> list[Reply]:
        """The replies that `text` holds, in order, none inside another."""
        with self._lock:
            lengths = sorted({reply.end for reply in self._replies.values() if reply.end <= len(text)})
            digest, at, found = blake2b(digest_size=16), 0, list[Reply]()
            for length in lengths:
                digest.update(text[at:length].encode("utf-8", "surrogatepass"))
                at = length
                key = digest.copy().digest()
                reply = self._replies.get(key)
                if reply is not None and reply.end == length and reply.start >= (found[-1].end if found else 0):
                    self._replies.move_to_end(key)
                    found.append(reply)
            return found

    def with_call(self, call: str) -> Reply | None:
        """The reply whose first tool call has this id."""
        with self._lock:
            digest = self._by_call.get(call)
            return None if digest is None else self._replies.get(digest)

    def _add(self, digest: bytes, reply: Reply) -> None:
        self._remove(digest)
        self._replies[digest] = reply
        self._held += len(reply.ids)
        if reply.call:
            self._by_call[reply.call] = digest
        while len(self._replies) > MAX_REPLIES or self._held > MAX_IDS:
            self._remove(next(iter(self._replies)))

    def _remove(self, digest: bytes) -> None:
        reply = self._replies.pop(digest, None)
        if reply is not None:
            self._held -= len(reply.ids)
            if self._by_call.get(reply.call) == digest:
                del self._by_call[reply.call]

    # The file

    def _load(self, path: Path) -> None:
        try:
            lines = [line for line in path.read_bytes().splitlines() if line] if path.exists() else []
        except OSError as error:
            log.warning("replies of earlier runs cannot be read: %s", one_line(str(error)))
            return
        damaged = 0
        for line in lines:
            entry = _parsed(line)
            if entry is None:
                damaged += 1
            else:
                self._add(*entry)
        if damaged:
            log.warning("%s: %d of %d lines are damaged and were skipped", one_line(str(path)), damaged, len(lines))
        self._lines = len(lines)
        if damaged or len(lines) > 2 * len(self._replies) + SPARE_LINES:
            self._rewrite(path)

    def _rewrite(self, path: Path) -> None:
        """Only what is still kept, by a new file in place of the old one."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
        temporary.unlink(missing_ok=True)
        self._lines = len(self._replies)
        try:
            if self._append(temporary, [_line(digest, reply) for digest, reply in self._replies.items()]):
                os.replace(temporary, path)
        except OSError as error:
            log.warning("replies cannot be written: %s", one_line(str(error)))

    def _append(self, path: Path, lines: list[bytes]) -> bool:
        """One write at the end of the file; a full disk costs what a restart would have found, nothing else. True when all is written."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                # A line that a crash cut short must not swallow the next one.
                data = b"\n" + b"\n".join(lines) + b"\n"
                return os.write(file, data) == len(data)
            finally:
                os.close(file)
        except OSError as error:
            log.warning("replies cannot be written: %s", one_line(str(error)))
            return False


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _line(digest: bytes, reply: Reply) -> bytes:
    ids = base64.b64encode(np.array(reply.ids, dtype="<i4").tobytes()).decode()
    body = json.dumps([digest.hex(), reply.start, reply.end, ids, reply.call])
    return json.dumps([zlib.crc32(body.encode()), body]).encode()


def _parsed(line: bytes) -> tuple[bytes, Reply] | None:
    """The entry of a line; None when it is damaged or foreign."""
    try:
        check, body = json.loads(line)
        if zlib.crc32(body.encode()) != check:
            return None
        digest, start, end, ids, call = json.loads(body)
        return bytes.fromhex(digest), Reply(start, end, array("i", np.frombuffer(base64.b64decode(ids), dtype="<i4").tolist()), call)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
