"""Kernels on every instruction set of this machine; the set is put back after each test."""

from collections.abc import Iterator

import pytest

from quaff import _native


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)
