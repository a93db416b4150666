"""The reader on real files, against the gguf package."""

import numpy as np
import pytest
from gguf import GGUFReader

from quaff import hub
from quaff.checkpoint import open_checkpoint

pytestmark = pytest.mark.models


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_equal_to_the_gguf_package(name: str) -> None:
    path = hub.resolve(name)
    theirs = GGUFReader(path)
    with open_checkpoint(path) as ours:
        fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
        assert set(ours.metadata) == set(fields)
        for key, field in fields.items():
            value = ours.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
        assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
        for tensor in theirs.tensors:
            view = ours.tensors[tensor.name]
            assert (view.shape, view.type_name) == (tuple(reversed(tensor.shape.tolist())), tensor.tensor_type.name)
            assert np.array_equal(view.data, tensor.data.reshape(-1).view(np.uint8))


def test_a_large_vocabulary_is_opened() -> None:
    with open_checkpoint(hub.resolve("gemma3")) as ours:
        assert len(ours.metadata["tokenizer.ggml.tokens"]) == 262144
