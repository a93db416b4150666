"""docs/flow.md names every source file, and nothing that is gone."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_flow_names_every_source_file_and_no_other() -> None:
    named = set(re.findall(r"`([\w/.]+\.(?:pyi?|txt|h|cpp|sh))`", (ROOT / "docs/flow.md").read_text(encoding="utf-8")))
    there = set()
    for base in (ROOT / "src/quaff", ROOT / "native"):
        there |= {
            str(f.relative_to(base))
            for f in base.rglob("*")
            if f.suffix in (".py", ".pyi", ".txt", ".h", ".cpp", ".sh") and "__pycache__" not in f.parts
        }
    elsewhere = {name for name in named - there if (ROOT / name).is_file()}
    assert named - elsewhere == there
