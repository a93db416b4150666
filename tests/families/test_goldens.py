"""Every family's Hugging Face folder against float32 logits of an independent implementation; then the laws on the same model as GGUF."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.families.cases import FAMILIES
from tests.goldens.make_families import GOLDENS
from tests.laws.paths import ISAS, WHOLE, Tinyrun

import quaff
from quaff import _native
from quaff.models import FAMILIES as REGISTRY
from quaff.models.convert import convert
from quaff.schedule import Order

Matrix = NDArray[np.float32]

FLOAT_BOUND = 1e-4
"""Largest error of a logit with float weights, activations and KV state, as a share of the range of all logits."""
LLAMA_CPP_BOUND = 5e-3
INT8_BOUND = 0.998


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(autouse=True)
def same_isa_afterwards() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.set_isa(before)


def folder(root: Path, name: str) -> Path:
    path = root / name
    return path if path.exists() else FAMILIES[name].write(path)


def converted(root: Path, name: str) -> Path:
    path = root / f"{name}.gguf"
    if not path.exists():
        convert(folder(root, name), path, "f32")
    return path


def logits(path: Path, tokens: list[int], **options: object) -> Matrix:
    with quaff.load(path, threads=1, **options) as llm:  # type: ignore[arg-type]
        rows = llm.prefill(tokens, logits="all").logits
    assert rows is not None
    return rows


FLOAT = {"activations": "float32", "kv_dtype": "float32"}


@pytest.mark.parametrize("name", FAMILIES)
def test_float_logits_are_those_of_the_oracle(name: str, root: Path) -> None:
    case = FAMILIES[name]
    golden = np.load(GOLDENS / f"{name}.npz")
    assert str(golden["sha256"]) == case.sha256(), "the tiny model changed: make its golden again"
    tokens = golden["tokens"].tolist()
    ours = logits(folder(root, name), tokens, quantize="none", **FLOAT)
    # The file's own claim is checked too: rows of a wrong span would make any bound easy.
    assert 0.5 * golden["span"] < np.ptp(golden["logits"]) <= golden["span"]
    error = np.abs(ours[golden["rows"]] - golden["logits"]).max() / golden["span"]
    assert error <= FLOAT_BOUND
    # Negative control: the neighbouring rows are far away.
    assert np.abs(np.roll(ours, 1, axis=0)[golden["rows"]] - golden["logits"]).max() / golden["span"] > 100 * FLOAT_BOUND
    assert logits(converted(root, name), tokens, **FLOAT).tobytes() == ours.tobytes(), "the converted file differs from its folder"


LLAMA_CPP = sorted(path.name.removesuffix(".llama_cpp.npz") for path in GOLDENS.glob("*.llama_cpp.npz"))


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_the_converted_file_means_the_same_to_llama_cpp(name: str, root: Path) -> None:
    """Its KV state is rounded here and there, to 13 bits and to f16; llama.cpp rounds more on the way."""
    golden = np.load(GOLDENS / f"{name}.llama_cpp.npz")
    assert str(golden["sha256"]) == FAMILIES[name].sha256(), "the tiny model changed: make its golden again"
    ours = logits(converted(root, name), golden["tokens"].tolist(), activations="float32")
    span = np.ptp(golden["logits"])
    assert np.abs(ours[golden["rows"]] - golden["logits"]).max() <= LLAMA_CPP_BOUND * span
    assert np.abs(np.roll(ours, 1, axis=0)[golden["rows"]] - golden["logits"]).max() > 10 * LLAMA_CPP_BOUND * span, "negative control"


@pytest.mark.parametrize("name", FAMILIES)
def test_int8_stays_close(name: str, root: Path) -> None:
    golden = np.load(GOLDENS / f"{name}.npz")
    ours = logits(folder(root, name), golden["tokens"].tolist())[golden["rows"]].astype(np.float64).reshape(-1)
    theirs = golden["logits"].astype(np.float64).reshape(-1)
    assert ours @ theirs / np.sqrt((ours @ ours) * (theirs @ theirs)) >= INT8_BOUND


@pytest.mark.parametrize("name", FAMILIES)
def test_every_path_gives_the_same_bits(name: str, root: Path) -> None:
    """The star of paths around a whole prompt: schedules, chunks, threads, instruction sets; logits and KV state."""
    path = root / f"{name}-q8_0.gguf"
    convert(folder(root, name), path, "q8_0")
    model = Tinyrun(None, path)
    tokens = FAMILIES[name].tokens(150)
    model.use("scalar", 1)
    expected = model.read(tokens)
    paths = [Order("token"), *(Order("chunk", n) for n in (1, 7, 33, 64)), Order("layer", 40), WHOLE]
    for isa in ISAS:
        for threads, order in enumerate(paths):
            model.use(isa, 1 + threads % 3)
            assert not model.read(tokens, order).difference(expected), f"{isa}, {1 + threads % 3} threads, {order}"
    assert not model.read(tokens, cuts=[70, 71, 100]).difference(expected)
    assert model.read(tokens[::-1]).difference(expected), "negative control"


def test_what_quaff_models_claims_has_a_golden() -> None:
    """Every family and every kind of folder has an entry, and a family names exactly the oracles whose goldens are there."""
    goldens: dict[str, set[str]] = {}
    for name, case in FAMILIES.items():
        found = {"transformers"} if (GOLDENS / f"{name}.npz").exists() else set()
        found |= {"llama.cpp"} if name in LLAMA_CPP else set()
        goldens.setdefault(str(case.config["model_type"]), set()).update(found)
    for family in REGISTRY.values():
        assert family.huggingface is not None, f"{family.name} cannot be read from a folder, so nothing compares it"
        assert family.tolerance == FLOAT_BOUND
        kinds = family.huggingface.model_types
        assert goldens.keys() >= set(kinds), f"tests/families/cases.py has no case of {set(kinds) - goldens.keys()}"
        assert set(family.oracle.split(", ")) == set.union(*(goldens[kind] for kind in kinds)), family.name
