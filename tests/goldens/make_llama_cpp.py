"""Make families/NAME.llama_cpp.npz: logits of tests/families/cases.py as GGUF, computed by llama.cpp. Needs llama-cpp-python.

python -m tests.goldens.make_llama_cpp NAME...
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from tests.families.cases import FAMILIES
from tests.goldens.make_families import GOLDENS

from quaff.models.convert import convert

ROWS = (30, 64, 109)


def make(name: str) -> None:
    import llama_cpp

    case = FAMILIES[name]
    tokens = case.tokens()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.gguf"
        convert(case.write(Path(folder) / name), path, "f32")
        model = llama_cpp.Llama(str(path), n_ctx=128, n_batch=128, n_ubatch=128, logits_all=True, verbose=False)
        model.eval(tokens)
        logits = np.array([model.scores[row] for row in ROWS], dtype=np.float32)
    made_by = f"llama-cpp-python {llama_cpp.__version__}"
    np.savez_compressed(
        GOLDENS / f"{name}.llama_cpp.npz",
        tokens=np.array(tokens, np.int32),
        rows=np.array(ROWS, np.int32),
        logits=logits,
        sha256=case.sha256(),
        made_by=made_by,
    )
    print(f"{name}: {made_by}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        make(name)
