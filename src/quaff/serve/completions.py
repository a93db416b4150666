"""/v1/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quaff.engine.sampler import TokenLogprobs
from quaff.llm import LLM
from quaff.serve.errors import ApiError
from quaff.serve.generation import Generation, Job, Progress, Result
from quaff.serve.openai import DONE, envelope, merged, progress_block, usage
from quaff.serve.sampling import MOST_LOGPROBS, Sampling
from quaff.serve.service import service_of
from quaff.serve.wire import EventStream, Items, collect, read_body, sse

MOST_PROMPTS = 64


def routes() -> list[Route]:
    return [Route("/v1/completions", completions, methods=["POST"])]


class CompletionBody(Sampling):
    """`prompt` is a text, a list of token ids, or a list of either; control tokens written in a text become those tokens."""

    prompt: str | Items[int] | Items[str] | Items[Items[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one; ApiError when there are none or too many."""
        one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        prompts: Any = [self.prompt] if one else self.prompt
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise ApiError(400, f"expected 1 to {MOST_PROMPTS} prompts, not {len(prompts)}", param="prompt")
        return list(prompts)


class Prompt:
    """A prompt's ids, and its text where it is to be echoed."""

    def __init__(self, llm: LLM, given: str | list[int], echo: bool) -> None:
        ids = llm.tokenizer.encode(given, parse_special=True) if isinstance(given, str) else given
        self.tokens = ids
        self.text = given if isinstance(given, str) else llm.tokenizer.decode(ids, skip_special=False) if echo else ""


async def completions(request: Request) -> Response:
    service = service_of(request)
    llm = service.llm
    body = await read_body(request, CompletionBody)
    if body.suffix:
        raise ApiError(400, "suffix is not supported: no model here fills in the middle", param="suffix")
    if body.best_of is not None and body.best_of != body.choices:
        raise ApiError(400, "best_of is not supported: ask for n completions", param="best_of")
    echo = bool(body.echo)
    params = body.params(service.settings, body.max_tokens, logprobs=body.logprobs, prompt_logprobs=body.logprobs if echo else None)
    prompts = [await service.blocking(Prompt, llm, given, echo) for given in body.prompts()]
    generations: list[Generation] = []
    try:
        for prompt in prompts:
            job = Job(prompt.tokens, params, progress=bool(body.return_progress), salt=body.cache_salt or "")
            generations += await service.start(job, body.choices, "prompt")
    except BaseException:
        for generation in generations:
            generation.cancel()
        raise
    head = envelope(service.settings.name, llm, "cmpl", "text_completion")
    if body.stream:
        return EventStream(request, generations, _events(llm, body, head, prompts, generations))
    return await service.blocking(_answer, llm, body, head, prompts, await collect(request, generations))


def _answer(llm: LLM, body: CompletionBody, head: dict[str, Any], prompts: Sequence[Prompt], results: Sequence[Result]) -> Response:
    choices = [_choice(llm, body, i, prompts[i // body.choices], result) for i, result in enumerate(results)]
    return JSONResponse(
        head | {"choices": choices, "usage": usage(results[:: body.choices], results), "timings": results[0].llama_timings()}
    )


def _choice(llm: LLM, body: CompletionBody, index: int, prompt: Prompt, result: Result) -> dict[str, Any]:
    logprobs = None
    if body.logprobs is not None:
        table = LogprobTable(llm, body)
        if body.echo:
            table.add_prompt(prompt.tokens, result.prompt_logprobs)
        table.add(result.logprobs)
        logprobs = table.take()
    text = prompt.text + result.text if body.echo else result.text
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": result.finish_reason}


async def _events(
    llm: LLM, body: CompletionBody, base: dict[str, Any], prompts: Sequence[Prompt], generations: Sequence[Generation]
) -> AsyncIterator[bytes]:
    more: dict[str, Any] = {"usage": None} if body.include_usage else {}
    tables = [LogprobTable(llm, body) for _ in generations]
    spoken: set[int] = set()

    def chunk(index: int, text: str, logprobs: Any = None, reason: str | None = None, **extra: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return sse(base | {"choices": [choice]} | more | extra)

    async for index, item in merged(generations):
        prompt, table, generation = prompts[index // body.choices], tables[index], generations[index]
        if isinstance(item, Progress):
            yield chunk(index, "", prompt_progress=progress_block(item))
            continue
        if body.echo and index not in spoken:
            spoken.add(index)
            table.add_prompt(prompt.tokens, generation.prompt_logprobs)
            yield chunk(index, prompt.text, table.take())
        if item is not None:
            table.add(item.logprobs)
            logprobs = table.take()
            if item.text or (logprobs and logprobs["tokens"]):
                yield chunk(index, item.text, logprobs)
        elif (result := generation.result) is not None:
            yield chunk(index, "", None, result.finish_reason, timings=result.llama_timings())
    if body.include_usage:
        results = [g.result for g in generations if g.result is not None]
        yield sse(base | {"choices": [], "usage": usage(results[:: body.choices], results)})
    yield DONE


class LogprobTable:
    """The columns of a completion's `logprobs`, filled token by token. Offsets are in characters of the tokens' texts."""

    def __init__(self, llm: LLM, body: CompletionBody) -> None:
        self._llm = llm
        self._wanted = body.logprobs
        self._silent = frozenset() if body.ignore_eos else llm.tokenizer.end_ids
        self._offset = 0
        self._rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add_prompt(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        """The prompt, whose first token follows nothing and has no probability."""
        self._add(tokens[0], None, None)
        for token in logprobs:
            self._add(token.id, token.logprob, token.top)

    def add(self, logprobs: Sequence[TokenLogprobs]) -> None:
        for token in logprobs:
            if token.id not in self._silent:
                self._add(token.id, token.logprob, token.top)

    def _add(self, id: int, logprob: float | None, top: Sequence[tuple[int, float]] | None) -> None:
        text = self._llm.tokenizer.token_text(id)
        # Of several tokens that read alike the likeliest counts.
        named = {self._llm.tokenizer.token_text(t): p for t, p in reversed(top)} if top is not None else None
        self._rows.append((text, logprob, named, self._offset))
        self._offset += len(text)

    def take(self) -> dict[str, Any] | None:
        """The rows since the last call as columns; None where no log-probabilities are wanted."""
        if self._wanted is None:
            return None
        rows, self._rows = self._rows, []
        return {
            "tokens": [r[0] for r in rows],
            "token_logprobs": [r[1] for r in rows],
            "top_logprobs": [r[2] for r in rows],
            "text_offset": [r[3] for r in rows],
        }
