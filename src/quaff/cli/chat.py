"""`quaff chat`: a conversation that keeps what it has read."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quaff.cli.console import Bar, argument_text, decode, note, reading
from quaff.cli.options import MaxTokens, Memory, Model, Quantize, Seed, Temperature, Threads
from quaff.errors import PromptError


def chat(
    model: Model,
    system: Annotated[str | None, typer.Option("--system", help="Instructions that come first.", show_default=False)] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    memory: Memory = None,
    quantize: Quantize = None,
) -> None:
    """Talk with a model, a line at a time; an empty line or the end of input leaves."""
    from quaff.config import Workload
    from quaff.engine.sampler import SamplingParams
    from quaff.llm import STREAMED_DRAFTS, load

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    messages = [{"role": "system", "content": argument_text(system, "the text of --system")}] if system else []
    # The prompt that is kept and the answer that goes on from it.
    workload = Workload(sequences=2, logits_rows=1 + STREAMED_DRAFTS)
    with Bar() as bar, load(model, quantize=quantize, threads=threads, memory=memory, workload=workload, progress=bar.step) as llm:
        if llm.tokenizer.chat_template is None:
            raise PromptError(f"{model} has no chat template; use quaff run")
        state = None
        while line := ask(sum(message["role"] == "user" for message in messages) + 1):
            messages.append({"role": "user", "content": line})
            tokens = llm.encode_chat(messages)
            # Read into a state of its own, so that the next turn starts where this one's prompt ended.
            read = llm.prefill(tokens, logits="none", state=state, progress=reading(bar, llm))
            bar.close()
            if state is not None:
                state.close()
            state = read.state
            stream = llm.stream(tokens, params, state=state)
            for piece in stream:
                sys.stdout.write(piece)
                sys.stdout.flush()
            print(flush=True)
            messages.append({"role": "assistant", "content": stream.completion.text})


def ask(number: int) -> str:
    """Line `number` from the person; empty at the end of input. The prompt sign goes to stderr, where the answer does not."""
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = decode(sys.stdin.buffer.readline(), f"line {number} of standard input")
    if not line and sys.stdin.isatty():
        note()
    return line.strip()
