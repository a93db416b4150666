"""The sampling fields that OpenAI's, llama.cpp's and vLLM's clients send, as sampling parameters."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

from pydantic import AliasChoices, Field

from quaff.engine.sampler import SamplingParams
from quaff.serve.errors import ApiError
from quaff.serve.settings import Settings
from quaff.serve.wire import Body, Items

MOST_CHOICES = 16
MOST_LOGPROBS = 20
StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class StreamOptions(Body):
    include_usage: bool = False


class Sampling(Body):
    """Fields that all kinds of completions share. null is as good as nothing."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = Field(default=None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"))
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 64)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stop: StopText | Annotated[Items[StopText], Field(max_length=16)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def params(self, settings: Settings, max_tokens: int | None, **more: Any) -> SamplingParams:
        """Sampling parameters; ConfigError names a value out of range. Without a seed one is drawn: two answers differ, as with OpenAI."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "ignore_eos": self.ignore_eos,
            "stop": self.stop,
        } | more
        defaults = {"temperature": settings.temperature}
        return SamplingParams(
            max_tokens=settings.max_tokens if max_tokens is None else max_tokens,
            seed=secrets.randbits(63) if self.seed is None else self.seed % (1 << 64),
            logit_bias=self._bias(),
            **defaults | {name: value for name, value in given.items() if value is not None},
        )

    def _bias(self) -> dict[int, Any]:
        """Biases by token id, which JSON can write as a string only; whether they are numbers is checked with the other parameters."""
        biases = self.logit_bias or {}
        bad = next((key for key in biases if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
        if bad is not None:
            raise ApiError(400, "logit_bias: keys are token ids", param="logit_bias")
        return {int(key): value for key, value in biases.items()}
