"""`quaff run`: read a prompt, stream the answer, show where the time went."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quaff.cli.console import Bar, note, print_json, read_prompt
from quaff.cli.options import Chunk, Json, MaxTokens, Model, Quantize, Raw, Schedule, Seed, Temperature, Threads

if TYPE_CHECKING:
    from quaff.llm import LLM, Completion


def run(
    model: Model,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it and --file, standard input.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    chunk: Chunk = None,
    schedule: Schedule = "chunk",
    raw: Raw = False,
    quantize: Quantize = None,
    as_json: Json = False,
) -> None:
    """Read a prompt and stream the answer."""
    from quaff.engine.sampler import SamplingParams
    from quaff.llm import load
    from quaff.measure.phases import phase_table

    text = read_prompt(prompt, file)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with Bar() as bar, load(model, quantize=quantize, threads=threads, chunk=chunk, schedule=schedule, progress=bar.step) as llm:
        stream = llm.stream(prompt_tokens(llm, text, raw), params, progress=lambda done, total: bar.step("reading the prompt", done, total))
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


def prompt_tokens(llm: LLM, text: str, raw: bool) -> list[int]:
    """Ids of one user message in the model's chat template, or of the text as it is (`raw`, or a model without a template)."""
    if raw or llm.tokenizer.chat_template is None:
        return llm.encode(text)
    return llm.encode_chat([{"role": "user", "content": text}])


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
        "completion_tokens": completion.completion_tokens,
        "finish_reason": completion.finish_reason,
        "timings": {
            "load_seconds": llm.load_seconds,
            "prefill_seconds": t.prefill_seconds,
            "prefill_tokens_per_second": t.prefill_tokens_per_second,
            "ttft_seconds": t.ttft_seconds,
            "decode_tokens_per_second": t.decode_tokens_per_second,
        },
    }
