"""Errors as HTTP answers: a status and the JSON that each API's clients know how to read."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import ValidationError

from quaff.errors import ClosedError, ConfigError, MemoryBudgetError, PromptError, QuaffError, QueueFullError, UnsupportedError

Shape = Literal["openai", "anthropic"]

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The "type" of an error by its status; any other is an "api_error"."""

RETRY_SECONDS = {"Retry-After": "5"}
"""When to come back to a server that is starting, or whose successor is."""
REFUSED = (PromptError, ConfigError, UnsupportedError, MemoryBudgetError)
"""Errors of the engine that the request itself causes: 400. Every other QuaffError is the server's: 500."""


UNION_TAGS = frozenset({"str", "int", "float", "bool"})
"""Steps in the place of an invalid value that are types and look like names."""


class ApiError(QuaffError):
    """An answer with an error status. `code` is the machine-readable reason, `param` the field of the body that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers)

    @property
    def kind(self) -> str:
        return KINDS.get(self.status, "api_error")

    def body(self, shape: Shape) -> dict[str, Any]:
        """The JSON of the error as the official clients of that API expect it."""
        if shape == "anthropic":
            return {"type": "error", "error": {"type": self.kind, "message": str(self)}}
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def context_exceeded(prompt_tokens: int, context: int, param: str) -> ApiError:
    """A prompt that leaves no room for an answer is refused with both counts, never cut."""
    return ApiError(
        400,
        f"the prompt has {prompt_tokens} tokens, the context is {context} tokens; shorten the prompt",
        code="context_length_exceeded",
        param=param,
    )


def as_api_error(error: BaseException) -> ApiError | None:
    """What an exception is to a client; None for one that is a fault of ours, which a client learns nothing about."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _invalid_body(error)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after_seconds)})
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), headers=RETRY_SECONDS)
    if isinstance(error, REFUSED):
        return ApiError(400, str(error))
    if isinstance(error, QuaffError):
        return ApiError(500, str(error))
    return None


def _invalid_body(error: ValidationError) -> ApiError:
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the forms that a field may have, the one that the value came closest to.
    first = max((e for e in found if e["loc"][:1] == found[0]["loc"][:1]), key=lambda e: len(e["loc"]))
    message = str(first["msg"])[:1].lower() + str(first["msg"])[1:]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {message.removeprefix('invalid JSON: ')}")
    # Tags of unions are pydantic's words, not names of fields: only names and indices make a path a client knows.
    known = [p for p in first["loc"] if isinstance(p, int) or (p.isidentifier() and p[0].islower() and p not in UNION_TAGS)]
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in known).lstrip(".")
    return ApiError(400, f"{path}: {message}" if path else message, param=path or None)


def shape_of(path: str) -> Shape:
    """The API that a path belongs to."""
    return "anthropic" if path == "/v1/messages" or path.startswith("/v1/messages/") else "openai"
