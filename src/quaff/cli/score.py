"""`quaff score`: how well a model foretells a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quaff.cli.console import Bar, note, print_json, read_prompt, reading
from quaff.cli.options import MOST_COUNTED, Chunk, Json, Memory, Model, Quantize, Schedule, Threads


def score(
    model: Model,
    file: Annotated[Path | None, typer.Argument(help="A text file; without it, standard input.", show_default=False)] = None,
    each: Annotated[bool, typer.Option("--each", help="Print every token with its log-probability.")] = False,
    threads: Threads = None,
    chunk: Chunk = None,
    schedule: Schedule = None,
    memory: Memory = None,
    quantize: Quantize = None,
    as_json: Json = False,
) -> None:
    """Perplexity and log-probabilities of a text."""
    from quaff.config import Workload
    from quaff.errors import one_line
    from quaff.llm import load

    text = read_prompt(None, file)
    # Every row's logits in one pass, if there is room for them.
    workload = Workload(lambda tokenizer: len(tokenizer.encode(text)), logits_rows=MOST_COUNTED)
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
            progress=bar.step,
        ) as llm,
    ):
        result = llm.score(text, progress=reading(bar, llm, "scoring"))
        if as_json:
            print_json(
                {
                    "perplexity": result.perplexity,
                    "tokens": list(result.tokens),
                    "logprobs": list(result.logprobs),
                    "seconds": result.seconds,
                    "memory": llm.plan and llm.plan.as_dict(),
                    "streaming": llm.streaming and llm.streaming.as_dict(),
                }
            )
            return
        if each:
            for token, logprob in zip(result.tokens[1:], result.logprobs, strict=True):
                print(f"{logprob:10.4f}  {token:>7}  {one_line(llm.tokenizer.token_text(token))}")
        print(f"tokens       {len(result.tokens):,}, the first one given")
        print(f"log-prob     {sum(result.logprobs) / len(result.logprobs):.6f} nats per token")
        print(f"perplexity   {result.perplexity:.4f}")
        if llm.streaming is not None:
            note(llm.streaming.sentence())
