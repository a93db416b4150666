"""`quaff run`: read a prompt, stream the answer, show where the time went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quaff.cli.console import Bar, note, print_json, read_prompt, reading
from quaff.cli.options import Chunk, Json, MaxTokens, Memory, Model, Quantize, Raw, Schedule, Seed, Store, Temperature, Threads

if TYPE_CHECKING:
    from quaff.llm import LLM, Completion
    from quaff.tokenizer import Tokenizer


def run(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it and --file, standard input.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    chunk: Chunk = None,
    schedule: Schedule = None,
    memory: Memory = None,
    store: Store = "off",
    raw: Raw = False,
    quantize: Quantize = None,
    as_json: Json = False,
) -> None:
    """Read a prompt and stream the answer."""
    from quaff.config import Workload
    from quaff.engine.sampler import SamplingParams
    from quaff.llm import STREAMED_DRAFTS, load
    from quaff.measure.phases import phase_table

    text = read_prompt(prompt, file)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    workload = Workload(lambda tokenizer: len(prompt_tokens(tokenizer, text, raw)) + max_tokens, logits_rows=1 + STREAMED_DRAFTS)
    with (
        Bar() as bar,
        load(
            model,
            quantize=quantize,
            threads=threads,
            chunk=chunk,
            schedule=schedule,
            memory=memory,
            workload=workload,
            # As much as there is: the prompt itself goes before.
            prefix_cache_bytes=0 if store == "off" else 1 << 40,
            store={"on": True, "off": False}.get(store, store),
            progress=bar.step,
        ) as llm,
    ):
        stream = llm.stream(prompt_tokens(llm.tokenizer, text, raw), params, progress=reading(bar, llm))
        for piece in stream:
            bar.close()
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
        if as_json:
            print_json(report(llm, stream.completion))
        else:
            print(flush=True)
            note()
            note(phase_table(phases(llm, stream.completion)))
            if stream.completion.cached_tokens:
                note(f"{stream.completion.cached_tokens:,} of {stream.completion.prompt_tokens:,} tokens came from disk")
            if llm.streaming is not None:
                note(llm.streaming.sentence())


def prompt_tokens(tokenizer: Tokenizer, text: str, raw: bool) -> list[int]:
    """Ids of one user message in the model's chat template, or of the text as it is (`raw`, or a model without a template)."""
    if raw or tokenizer.chat_template is None:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


def phases(llm: LLM, completion: Completion) -> list[Any]:
    from quaff.measure.phases import Phase

    t = completion.timings
    return [
        Phase("load", llm.load_seconds),
        Phase("prefill", t.prefill_seconds, t.prefill_tokens),
        Phase("decode", t.decode_seconds, t.decode_tokens),
    ]


def report(llm: LLM, completion: Completion) -> dict[str, Any]:
    """The JSON of one run. Speeds are tokens per second; decode counts the tokens after the first over the time they took."""
    t = completion.timings
    return {
        "text": completion.text,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.cached_tokens,
        "completion_tokens": completion.completion_tokens,
        "finish_reason": completion.finish_reason,
        "timings": {
            "load_seconds": llm.load_seconds,
            "prefill_seconds": t.prefill_seconds,
            "prefill_tokens_per_second": t.prefill_tokens_per_second,
            "ttft_seconds": t.ttft_seconds,
            "decode_tokens_per_second": t.decode_tokens_per_second,
        },
        "memory": llm.plan and llm.plan.as_dict(),
        "streaming": llm.streaming and llm.streaming.as_dict(),
    }
