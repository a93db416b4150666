"""Make families/NAME.npz: float32 logits of tests/families/cases.py, computed by transformers. Needs torch too; tests need neither.

python -m tests.goldens.make_families NAME...
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from tests.families.cases import FAMILIES

GOLDENS = Path(__file__).parent / "families"
ROWS = (0, 1, 31, 63, 64, 90, 109)


def make(name: str) -> None:
    import torch
    import transformers

    case = FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        case.write(Path(folder))
        # Kimi K2 names a model type of its own and runs DeepSeek V3's code.
        config = dict(case.config) | ({"model_type": "deepseek_v3"} if case.config["model_type"] == "kimi_k2" else {})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    left = {key: value for key, value in report.items() if value}
    if left:
        raise SystemExit(f"{name}: transformers did not load the weights as they are: {left}")
    tokens = case.tokens()
    with torch.no_grad():
        logits = model.eval()(torch.tensor([tokens])).logits[0].numpy().astype(np.float32)
    span = np.ptp(logits)
    if not np.isfinite(logits).all() or span < 1:
        raise SystemExit(f"{name}: logits span {span}: not a useful golden")
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    GOLDENS.mkdir(exist_ok=True)
    np.savez_compressed(
        GOLDENS / f"{name}.npz",
        tokens=np.array(tokens, np.int32),
        rows=np.array(ROWS, np.int32),
        logits=logits[list(ROWS)],
        span=span,
        sha256=case.sha256(),
        made_by=made_by,
    )
    print(f"{name}: {len(tokens)} tokens, logits span {span:.2f}, {made_by}")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        make(name)
