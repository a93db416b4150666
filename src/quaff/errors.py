"""Errors that are the user's to act on: each is one line that says what is wrong, where, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager


def one_line(text: str) -> str:
    """`text` with line breaks, control characters and lone surrogates escaped, so that a file's own bytes cannot break a message."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii") for c in text)


def quote(text: str, limit: int = 80) -> str:
    """`text` in single quotes for a message: escaped, and cut in the middle when longer than `limit` characters."""
    if len(text) > limit:
        text = text[: limit // 2] + "..." + text[-(limit // 4) :]
    return f"'{one_line(text)}'"


class QuaffError(Exception):
    """Anything that goes wrong through input, files, options or limits. `str(error)` is one line; the command line prints it."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


@contextmanager
def located(where: object) -> Iterator[None]:
    """Puts `where` (a file, most often) in front of the message of a QuaffError raised inside, unless it is there already."""
    try:
        yield
    except QuaffError as error:
        prefix = one_line(f"{where}: ")
        if str(error).startswith(prefix):
            raise
        raise type(error)(f"{prefix}{error}") from None


class CheckpointError(QuaffError):
    """A model file is missing, damaged, or says things that cannot be true."""


class UnsupportedError(QuaffError):
    """A sound file or option that this version does not support; the message lists what is supported."""


class ConfigError(QuaffError):
    """Model metadata or engine options that are missing, of the wrong type, or out of range."""


class PromptError(QuaffError):
    """A prompt that cannot be run: empty, longer than the context, or with token ids outside the vocabulary."""


class MemoryBudgetError(QuaffError):
    """The work would need more memory than the budget, or the system, gives; raised before the memory is taken."""


class ScheduleError(QuaffError):
    """An order of cells that breaks a dependency of the grid."""


class NonFiniteError(QuaffError):
    """A computation became infinite or NaN: the request fails and nothing of it is kept."""


class HubError(QuaffError):
    """A model could not be found by its name, fetched, or written to the cache folder."""


class ClosedError(QuaffError):
    """Whoever does the work is on the way out, and takes no more of it."""


class QueueFullError(QuaffError):
    """More requests wait than the queue takes. `retry_after_seconds`: when there may be room."""

    def __init__(self, message: str, retry_after_seconds: int = 1) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds
