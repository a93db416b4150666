"""The model files of the comparison, by name: made once into the cache folder, by programs that run where the peers are installed."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from quaff.checkpoint import open_checkpoint
from quaff.hub import cache_dir, resolve

HERE = Path(__file__).parent
# Part of the names of made files: raise it when make_model.py gives other bytes for the same arguments.
REVISION = 1


@dataclass(frozen=True)
class Source:
    """Where a file comes from: `alias` as it is, `alias` requantised to `kind`, or random weights of the shapes `shape`."""

    alias: str = ""
    kind: str = ""
    shape: str = ""


FILES = {
    "smollm2-q8_0": Source(alias="smollm2", kind="q8_0"),
    "smollm2-q4_0": Source(alias="smollm2", kind="q4_0"),
    "smollm2-q4_k_m": Source(alias="smollm2", kind="q4_k_m"),
    "qwen2-1.5b-q8_0": Source(shape="qwen2-1.5b", kind="q8_0"),
    "qwen2-1.5b-q4_0": Source(shape="qwen2-1.5b", kind="q4_0"),
    "qwen2-1.5b-q4_k_m": Source(shape="qwen2-1.5b", kind="q4_k_m"),
    "qwen3-moe-q8_0": Source(shape="qwen3-moe", kind="q8_0"),
    "qwen3-moe-q4_0": Source(shape="qwen3-moe", kind="q4_0"),
    "gemma3-270m-q4_k_m": Source(alias="gemma3"),
    "lfm2-350m-q8_0": Source(shape="lfm2-350m", kind="q8_0"),
    "lfm2-350m-q4_0": Source(shape="lfm2-350m", kind="q4_0"),
    "kimi-linear-q8_0": Source(shape="kimi-linear", kind="q8_0"),
    "qwen3.5-0.8b-q8_0": Source(shape="qwen3.5-0.8b", kind="q8_0"),
}
# Four gigabytes each: for streaming, and made only when they are asked for by name.
LARGE_FILES = {
    "llama2-7b-q4_0": Source(shape="llama2-7b", kind="q4_0"),
    "mistral-7b-q4_0": Source(shape="mistral-7b", kind="q4_0"),
}


def model_file(name: str, python: str) -> Path:
    """The file of a name above, made with the interpreter `python` if need be; any other name is one that quaff resolves."""
    source = {**FILES, **LARGE_FILES}.get(name)
    if source is None or not source.kind:
        return resolve(source.alias if source else name)
    path = cache_dir() / "benchmarks" / f"{name}{f'-r{REVISION}' if source.shape else ''}.gguf"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"making {path}", file=sys.stderr)
    if source.shape:
        command = [python, str(HERE / "make_model.py"), source.shape, str(path), "--type", source.kind]
    else:
        command = [python, str(HERE / "requantize.py"), str(resolve(source.alias)), str(path), "--type", source.kind]
    made = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if made.returncode != 0 or not path.exists():
        raise SystemExit(f"error: {name} could not be made:\n{made.stdout[-2000:]}")
    return path


@dataclass(frozen=True)
class Content:
    """`types`: bytes per ggml type. `token_bytes`: bytes of weights that one decoded token needs, the norms and the head included, and of
    experts those that it goes through."""

    vocab: int
    types: Counter[str]
    token_bytes: int

    def __str__(self) -> str:
        total = sum(self.types.values())
        return ", ".join(f"{t} {100 * n / total:.0f} %" for t, n in self.types.most_common() if n * 200 >= total)


def content(path: Path) -> Content:
    with open_checkpoint(path) as checkpoint:
        types: Counter[str] = Counter()
        for view in checkpoint.tensors.values():
            types[view.type_name] += view.nbytes
        table = checkpoint.tensors["token_embd.weight"]
        unused = table.nbytes if "output.weight" in checkpoint.tensors else 0
        used, count = (checkpoint.metadata.get(f"{checkpoint.architecture}.expert_{key}", 1) for key in ("used_count", "count"))
        stacks = sum(view.nbytes for view in checkpoint.tensors.values() if len(view.shape) == 3)
        unused += stacks - stacks * used // max(1, count)
        return Content(table.shape[0], types, sum(types.values()) - unused)
