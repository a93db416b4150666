"""Make qwen2.json: logits of a tiny Qwen2 model with float weights, as llama.cpp computes them. Needs llama-cpp-python, which tests do not.

python -m tests.goldens.make_qwen2
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import numpy as np
from tests.tiny import Tiny, prompt

GOLDEN = Path(__file__).parent / "logits" / "qwen2.json"
MODEL = Tiny("qwen2", dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, types={"": "F32"}, embedding="F32", seed=11)
TOKENS = prompt(MODEL.vocab, 90, seed=11)
ROWS = (40, 89)


def main() -> None:
    import llama_cpp

    with tempfile.TemporaryDirectory() as folder:
        path = MODEL.write(Path(folder) / "qwen2.gguf")
        model = llama_cpp.Llama(str(path), n_ctx=128, n_batch=128, logits_all=True, verbose=False)
        model.eval(TOKENS)
        logits = np.array([model.scores[row] for row in ROWS], dtype=np.float64).round(4)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    GOLDEN.write_text(
        json.dumps({"made_by": f"llama-cpp-python {llama_cpp.__version__}", "sha256": digest, "logits": logits.tolist()}) + "\n"
    )


if __name__ == "__main__":
    main()
