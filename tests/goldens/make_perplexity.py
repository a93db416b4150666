"""Make the perplexity goldens: llama.cpp's negative log-likelihood of `perplexity/text.txt`, token by token.

Method: the whole text is one window (no sliding, nothing dropped). Special tokens are not parsed; a BOS comes first when the vocabulary
asks for it. Every token but the first of the window is scored, so a BOS is context only, and without one the first token of the text is.
Perplexity is exp(mean NLL). llama.cpp quantises activations in its own way and keeps KV in f16. Log-softmax is taken in float64 here.

Needs llama-cpp-python (a build of llama.cpp that gives the logits of every row), which the test run does not.

    python tests/goldens/make_perplexity.py smollm2 path/to/SmolLM2-135M-Instruct.Q4_1.gguf
    python tests/goldens/make_perplexity.py gemma3 path/to/gemma-3-270m-q4_k_m.gguf
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path

import llama_cpp
import numpy as np

HERE = Path(__file__).parent / "perplexity"
BATCH = 512


def score(model: llama_cpp.Llama, tokens: list[int]) -> list[float]:
    """Negative log-likelihood of tokens[1:], each given all tokens before it."""
    vocab = model.n_vocab()
    nll: list[float] = []
    model.reset()
    for begin in range(0, len(tokens), BATCH):
        rows = tokens[begin : begin + BATCH]
        model.eval(rows)
        logits = np.ctypeslib.as_array(model._ctx.get_logits(), shape=(len(rows) * vocab,)).reshape(len(rows), vocab)
        for row, target in zip(logits, tokens[begin + 1 : begin + 1 + len(rows)], strict=False):
            x = row.astype(np.float64)
            top = x.max()
            nll.append(float(top + np.log(np.exp(x - top).sum()) - x[target]))
    return nll


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="golden to write: perplexity/NAME.json")
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    model = llama_cpp.Llama(
        str(args.model),
        n_ctx=4096,
        n_batch=BATCH,
        n_ubatch=BATCH,
        logits_all=True,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        verbose=False,
    )
    text = (HERE / "text.txt").read_bytes()
    tokens = model.tokenize(text, add_bos=True, special=False)
    nll = score(model, tokens)
    golden = {
        "text_sha256": hashlib.sha256(text).hexdigest(),
        "model_sha256": hashlib.sha256(args.model.read_bytes()).hexdigest(),
        "made_with": f"llama-cpp-python {llama_cpp.__version__}",
        "method": "one window; BOS where the vocabulary adds it; every token but the first scored; exp(mean NLL)",
        "perplexity": round(math.exp(sum(nll) / len(nll)), 6),
        "positions_scored": len(nll),
        "tokens": tokens,
        "nll": [round(v, 4) for v in nll],
    }
    out = HERE / f"{args.name}.json"
    out.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in golden.items()) + "\n}\n")
    print(f"{out}: {len(tokens)} tokens, perplexity {golden['perplexity']}")


if __name__ == "__main__":
    main()
