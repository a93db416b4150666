"""Models of every attention kind, made once; the instruction set is put back after each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.laws.paths import Tinyrun, tiny_run
from tests.tiny import CASES

from quaff import _native


@pytest.fixture(autouse=True)
def same_isa_afterwards() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.set_isa(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="session")
def models(folder: Path) -> dict[str, Tinyrun]:
    return {name: tiny_run(name, folder) for name in CASES}


@pytest.fixture(params=list(CASES))
def model(request: pytest.FixtureRequest, models: dict[str, Tinyrun]) -> Tinyrun:
    """Each attention kind in turn: grouped, multi-query and full heads, biases, scaled RoPE, sliding windows below and above a page."""
    return models[request.param]
