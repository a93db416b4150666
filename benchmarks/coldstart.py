"""One prompt, cold, in a process of its own: from the path of a model to the logits of the prompt's last token. Prints one JSON object.

`first_token_seconds` begin before the model is loaded and end with the last row's logits. This file imports nothing of quaff for the peer,
so that it runs in an environment that lacks it.

    python benchmarks/coldstart.py quaff model.gguf --tokens 512 --memory 1GiB
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

UBATCH_ROWS = 512


def ids(tokens: int, vocab: int, seed: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(vocab) for _ in range(tokens)]


def quaff(args: argparse.Namespace) -> dict[str, Any]:
    from quaff.config import Workload
    from quaff.engine.sampler import SamplingParams
    from quaff.llm import load

    began = time.perf_counter()
    positions = args.positions or args.tokens + args.decode
    options: dict[str, Any] = {"threads": args.threads, "schedule": args.schedule, "context": positions}
    if args.memory is not None:
        # The prompt's state is kept while the answer goes on from it.
        workload = Workload(positions, sequences=2 if args.decode else 1, logits_rows=1)
        options |= {"memory": args.memory, "workload": workload}
    with load(args.model, **options) as llm:
        loaded = time.perf_counter()
        prompt = ids(args.tokens, llm.config.vocab, args.seed)
        result = llm.prefill(prompt, logits="last")
        done = time.perf_counter()
        assert result.logits is not None
        out: dict[str, Any] = {
            "load_seconds": loaded - began,
            "prefill_seconds": done - loaded,
            "logits_sha256": sha256(result.logits.tobytes()).hexdigest(),
            "kv_sha256": result.kv_sha256,
            "weight_bytes": llm.weight_bytes,
            "plan": llm.plan and llm.plan.as_dict(),
        }
        if args.decode:
            answer = llm.generate(prompt, SamplingParams(max_tokens=args.decode, ignore_eos=True), state=result.state)
            out |= {"decode_tokens_per_second": answer.timings.decode_tokens_per_second, "answer": list(answer.tokens)}
        result.state.close()
        return out | {"streaming": llm.streaming and llm.streaming.as_dict()}


def llama_cpp(args: argparse.Namespace) -> dict[str, Any]:
    """llama.cpp with the model mapped, rows by the five hundred and twelve. Repacking, which takes memory for all weights, is off."""
    import llama_cpp as lib

    began = time.perf_counter()
    lib.llama_backend_init()
    options = lib.llama_model_default_params()
    options.load_mode, options.use_extra_bufts = lib.LLAMA_LOAD_MODE_MMAP, False
    model = lib.llama_model_load_from_file(os.fsencode(args.model), options)
    if not model:
        raise SystemExit("llama.cpp could not load the model")
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = args.tokens + 64, args.tokens, UBATCH_ROWS
    params.n_threads = params.n_threads_batch = args.threads
    context = lib.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp could not make a context")
    loaded = time.perf_counter()
    prompt = ids(args.tokens, lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)), args.seed)
    tokens = (lib.llama_token * len(prompt))(*prompt)
    if lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(prompt))) != 0:
        raise SystemExit("llama_decode failed")
    lib.llama_synchronize(context)
    done = time.perf_counter()
    return {"load_seconds": loaded - began, "prefill_seconds": done - loaded, "about": lib.__version__}


ENGINES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"quaff": quaff, "llama.cpp": llama_cpp}


def process() -> dict[str, Any]:
    """What the kernel counted: bytes from the disk, processor seconds, the peak of resident memory."""
    read = next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes:"))
    peak = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"read_bytes": read, "user_seconds": used.ru_utime, "system_seconds": used.ru_stime, "peak_rss_bytes": peak * 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--decode", type=int, default=0, help="tokens to generate afterwards")
    parser.add_argument("--positions", type=int, help="tokens that the budget is planned for (default: those of prompt and answer)")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--memory")
    parser.add_argument("--schedule")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    result = ENGINES[args.engine](args)
    result["first_token_seconds"] = result["load_seconds"] + result["prefill_seconds"]
    print(json.dumps(result | process()))


if __name__ == "__main__":
    main()
