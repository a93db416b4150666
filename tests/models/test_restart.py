"""A real model after a restart: what it read before comes from the disk, with the bits of a cold run."""

from pathlib import Path

import pytest

import quaff
from quaff import SamplingParams

pytestmark = pytest.mark.models

TEXT = (Path(__file__).parents[2] / "examples" / "waterworks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_a_prompt_goes_on_after_a_restart(name: str, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=8, seed=1, temperature=0.7)
    with quaff.load(name) as cold:
        tokens = cold.encode(TEXT)[:700]
        expected, answer = cold.prefill(tokens), cold.generate(tokens, params)
        assert expected.logits is not None
        logits, state = expected.logits.tobytes(), expected.kv_sha256
    with quaff.load(name, prefix_cache_bytes=1 << 30, store=tmp_path) as before:
        before.prefill(tokens[:600], logits="none").state.close()
    with quaff.load(name, prefix_cache_bytes=1 << 30, store=tmp_path) as after:
        result = after.prefill(tokens)
        assert result.cached_tokens == 600
        assert result.logits is not None
        assert (result.logits.tobytes(), result.kv_sha256) == (logits, state)
        assert after.generate(tokens, params).tokens == answer.tokens
