"""The engines of the comparison, each in a process of its own: one line of JSON in, one line out, until the input ends.

A request is `{"ids": [token ids], "new": tokens}`: the seconds from ids handed over to the first token's logits where `new` is 0, else the
seconds that `new` tokens take after the prompt and the first token. Loading and tokenising are never part of it. The first line out says
what the engine is. This file imports nothing of quaff for the peers, so that it runs in an environment that lacks it.

    python benchmarks/engines.py llama-cpp-python model.gguf --threads 2 --context 1024
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Protocol

BATCH_TOKENS = 2048


class Engine(Protocol):
    about: str

    def prefill(self, ids: list[int]) -> float: ...
    def decode(self, ids: list[int], new: int) -> float: ...


class Quaff:
    def __init__(self, model: str, threads: int, context: int) -> None:
        import quaff
        from quaff import _native

        self.llm = quaff.load(model, threads=threads, context=context)
        self.params = quaff.SamplingParams
        self.about = f"isa {_native.isa()}, chunk {self.llm.chunk}"

    def prefill(self, ids: list[int]) -> float:
        begin = time.perf_counter()
        result = self.llm.prefill(ids)
        seconds = time.perf_counter() - begin
        result.state.close()
        return seconds

    def decode(self, ids: list[int], new: int) -> float:
        timings = self.llm.generate(ids, self.params(max_tokens=new + 1, ignore_eos=True)).timings
        check_count(timings.decode_tokens, new)
        return timings.decode_seconds


class Xllamacpp:
    """The portable wheel, through its server; the server's own clock leaves HTTP out. Attention and batches as llama.cpp chooses them."""

    def __init__(self, model: str, threads: int, context: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx = context
        params.n_parallel = 1
        params.n_batch = BATCH_TOKENS
        params.n_ctx_checkpoints = 0
        params.cache_ram_mib = 0
        params.verbosity = 0
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        self.server = xllamacpp.Server(params)
        self.about = " ".join(xllamacpp.get_system_info().split())

    def _timings(self, ids: list[int], new: int) -> dict[str, Any]:
        request = {"prompt": ids, "n_predict": new, "temperature": 0, "cache_prompt": False, "ignore_eos": True}
        body, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(f"{self.server.listening_address}/completion", body, headers)) as reply:
            timings: dict[str, Any] = json.load(reply)["timings"]
        check_count(timings["prompt_n"], len(ids))
        check_count(timings["predicted_n"], new)
        return timings

    def prefill(self, ids: list[int]) -> float:
        return float(self._timings(ids, 1)["prompt_ms"]) / 1000

    def decode(self, ids: list[int], new: int) -> float:
        return float(self._timings(ids, new + 1)["predicted_ms"]) / 1000  # counted from the first token on


class LlamaCppPython:
    """llama.cpp built for this machine, as llama-bench drives it: no sampling. For each length of prompt, and for decode, its parameters
    (rows of a physical batch, flash attention) are tried once and the fastest are kept."""

    def __init__(self, model: str, threads: int, context: int) -> None:
        import llama_cpp

        self.lib = llama_cpp
        self.threads, self.context = threads, context
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(model), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError("llama.cpp could not load the model")
        self.contexts: dict[tuple[int, bool], Any] = {}
        self.best: dict[tuple[int, int], tuple[int, bool]] = {}
        self.about = f"{llama_cpp.__version__}: " + " ".join(llama_cpp.llama_print_system_info().decode().split())

    def _context(self, rows: int, flash: bool) -> Any:
        if (rows, flash) not in self.contexts:
            params = self.lib.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch = self.context, BATCH_TOKENS, rows
            params.n_threads = params.n_threads_batch = self.threads
            params.flash_attn_type = self.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else self.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            context = self.lib.llama_init_from_model(self.model, params)
            if not context:
                raise RuntimeError("llama.cpp could not make a context")
            self.contexts[rows, flash] = context
            self._run((rows, flash), [0] * 32, 0)  # touches its buffers
        return self.contexts[rows, flash]

    def _eval(self, context: Any, ids: Sequence[int]) -> None:
        tokens = (self.lib.llama_token * len(ids))(*ids)
        if self.lib.llama_decode(context, self.lib.llama_batch_get_one(tokens, len(ids))) != 0:
            raise RuntimeError("llama_decode failed")

    def _run(self, variant: tuple[int, bool], ids: list[int], new: int) -> float:
        context = self._context(*variant)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), False)
        begin = time.perf_counter()
        for start in range(0, len(ids), BATCH_TOKENS):
            self._eval(context, ids[start : start + BATCH_TOKENS])
        self.lib.llama_synchronize(context)
        if new:
            begin = time.perf_counter()
            for i in range(new):
                self._eval(context, [ids[i % len(ids)]])
            self.lib.llama_synchronize(context)
        return time.perf_counter() - begin

    def _measure(self, ids: list[int], new: int) -> float:
        key = (len(ids), new)
        if key not in self.best:
            variants = [(rows, flash) for rows in (512, 2048) for flash in (True, False) if rows == 512 or len(ids) > 512]
            for variant in variants:
                self._context(*variant)
            self.best[key] = min(variants, key=lambda v: self._run(v, ids[:BATCH_TOKENS], new))
            rows, flash = self.best[key]
            print(f"{len(ids)} tokens, {new} new: {rows} rows, flash attention {'on' if flash else 'off'}", file=sys.stderr)
        return self._run(self.best[key], ids, new)

    def prefill(self, ids: list[int]) -> float:
        return self._measure(ids, 0)

    def decode(self, ids: list[int], new: int) -> float:
        return self._measure(ids, new)


class OpenVino:
    """OpenVINO GenAI reads the GGUF itself. Its prefix cache is on by default, so every prompt must be a new one."""

    def __init__(self, model: str, threads: int, context: int) -> None:
        import numpy
        import openvino
        import openvino_genai

        self.genai = openvino_genai
        self.tensor = lambda ids: openvino.Tensor(numpy.array([ids], dtype=numpy.int64))
        self.pipeline = openvino_genai.LLMPipeline(model, "CPU", INFERENCE_NUM_THREADS=threads)
        self.about = openvino_genai.__version__

    def _generate(self, ids: list[int], new: int) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        metrics = self.pipeline.generate(self.tensor(ids), config).perf_metrics
        check_count(metrics.get_num_input_tokens(), len(ids))
        check_count(metrics.get_num_generated_tokens(), new)
        return metrics

    def prefill(self, ids: list[int]) -> float:
        return float(self._generate(ids, 1).get_ttft().mean) / 1000

    def decode(self, ids: list[int], new: int) -> float:
        return float(self._generate(ids, new + 1).get_tpot().mean) / 1000 * new


ENGINES: dict[str, Callable[[str, int, int], Engine]] = {
    "quaff": Quaff,
    "xllamacpp": Xllamacpp,
    "llama-cpp-python": LlamaCppPython,
    "openvino": OpenVino,
}


def check_count(got: int, wanted: int) -> None:
    if got != wanted:
        raise RuntimeError(f"the engine counted {got} tokens instead of {wanted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="most tokens of a request, new ones included")
    args = parser.parse_args()
    # Whatever an engine prints goes to stderr; answers keep the real output to themselves.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = ENGINES[args.engine](args.model, args.threads, args.context)
    print(json.dumps({"about": engine.about}), file=out)
    for line in sys.stdin:
        request = json.loads(line)
        ids, new = request["ids"], request["new"]
        try:
            answer: dict[str, Any] = {"seconds": engine.decode(ids, new) if new else engine.prefill(ids)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out)


if __name__ == "__main__":
    main()
