"""Law: where weights are kept never shows: in memory, or read from the file in any number of slots, pins and blocks."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.laws.paths import WHOLE, Tinyrun, Trace, prompt
from tests.laws.test_packed import packed
from tests.streaming import PLANS, plan
from tests.tiny import CASES

from quaff.batch import Batch
from quaff.errors import CheckpointError
from quaff.schedule import Order

LENGTH = 70
ORDERS = [WHOLE, Order("layer", 33, cut=True), Order("chunk", 33)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Trace]:
    """What the same file leaves with all weights in memory."""
    return {}


def resident(name: str, folder: Path, expected: dict[str, Trace]) -> Trace:
    if name not in expected:
        model = Tinyrun(CASES[name], folder / f"streamed-{name}.gguf")
        expected[name] = model.read(prompt(model.vocab, LENGTH))
        model.weights.close()
    return expected[name]


def streamed(path: Path, which: str) -> Tinyrun:
    return Tinyrun(None, path, stream=PLANS[which])


@pytest.mark.parametrize("which", list(PLANS))
@pytest.mark.parametrize("name", list(CASES))
def test_streamed_weights_give_the_same_bits(name: str, which: str, folder: Path, expected: dict[str, Trace]) -> None:
    whole = resident(name, folder, expected)
    model = streamed(folder / f"streamed-{name}.gguf", which)
    tokens = prompt(model.vocab, LENGTH)
    for threads, order in zip((1, 2, 2), ORDERS, strict=True):
        model.use(threads=threads)
        difference = model.read(tokens, order).difference(whole)
        assert not difference, f"{order}: {difference}"
    one_by_one = model.read(tokens, cuts=range(LENGTH - 4, LENGTH))
    assert not one_by_one.difference(Trace([np.concatenate(whole.logits)], whole.kv, whole.states))
    counters = model.weights.stream_counters()  # type: ignore[union-attr]
    assert counters.disk_bytes > 0 and counters.passes == 1 + 1 + 3 + 5
    model.weights.close()


@pytest.mark.parametrize("name", list(CASES))
def test_packed_files_are_streamed_with_the_same_bits(name: str, folder: Path, expected: dict[str, Trace]) -> None:
    whole = resident(name, folder, expected)
    path = packed(folder / f"streamed-{name}.gguf")
    for which, order in zip(PLANS, [*ORDERS, *ORDERS], strict=False):
        model = streamed(path, which)
        difference = model.read(prompt(model.vocab, LENGTH), order).difference(whole)
        assert not difference, f"{which}, {order}: {difference}"
        assert model.weights.stream_counters().pack_seconds == 0.0  # type: ignore[union-attr]
        model.weights.close()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return CASES["llama-mqa"].write(tmp_path / "model.gguf")


def flip(path: Path, offset: int, keep_time: bool) -> None:
    """Turn one bit of a weight, and set the time of modification back if asked to."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))
        file.flush()
        os.fsync(file.fileno())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns if keep_time else before.st_mtime_ns + 10**9))


def place(path: Path, tensor: str) -> int:
    from quaff.checkpoint import open_checkpoint
    from quaff.models import read_model
    from quaff.weights.layout import model_layout

    with open_checkpoint(path) as checkpoint:
        return model_layout(read_model(checkpoint).views).tensors[tensor].offset


def test_another_byte_in_the_file_gives_other_bits(small: Path) -> None:
    """Negative control: weights do come from the file, in every pass."""
    model = streamed(small, "two slots")
    tokens = prompt(model.vocab, 20)
    first = model.read(tokens)
    assert not model.read(tokens).difference(first)
    flip(small, place(small, "blk.1.ffn_up.weight") + 9, keep_time=True)
    assert model.read(tokens).difference(first)


def test_a_file_that_was_written_to_is_refused(small: Path) -> None:
    model = streamed(small, "two slots")
    tokens = prompt(model.vocab, 20)
    first = model.read(tokens)
    before = small.stat()
    os.utime(small, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match="written to since it was opened"):
        model.read(tokens)
    os.utime(small, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not model.read(tokens).difference(first), "an error leaves nothing behind"


def test_a_file_that_was_cut_short_is_refused(small: Path) -> None:
    model = streamed(small, "least")
    os.truncate(small, small.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="bytes when it was opened|bytes, but had"):
        model.read(prompt(model.vocab, 20))


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = CASES["llama-gqa"].write(tmp_path / "model.gguf")
    offset = place(path, "blk.1.ffn_down.weight")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff\x7f")  # the scale of the first block
    model = streamed(path, "two slots")
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_down\.weight.*row 0 holds a scale that is not finite"):
        model.read(prompt(model.vocab, 20))


def test_a_pass_reads_every_byte_once(small: Path) -> None:
    """However long the prompt, however many cells: and the token-major control reads everything for each token."""
    model = streamed(small, "two slots")
    size = sum(nbytes for name, nbytes in model.weights.nbytes.items() if name != "token_embd.weight" and "norm" not in name)
    sector, pieces = 4096, 2 * 7 + 20
    for n, order, passes in ((64, Order("layer", 16), 1), (12, Order("token"), 12)):
        spent = model.step([(model.cache.create(), prompt(model.vocab, n))], order, [Trace()])
        assert passes * 0.9 * size < spent.weight_bytes_loaded < passes * (size + (pieces + n) * 2 * sector)
    counters = model.weights.stream_counters()  # type: ignore[union-attr]
    assert counters.passes == 13 and counters.disk_bytes == model.counters.weight_bytes_loaded


def test_pinned_weights_are_read_once(small: Path) -> None:
    model = streamed(small, "all pinned")
    tokens = prompt(model.vocab, 20)
    first = model.step([(model.cache.create(), tokens)], WHOLE, [Trace()]).weight_bytes_loaded
    assert first > 0
    assert model.step([(model.cache.create(), tokens)], WHOLE, [Trace()]).weight_bytes_loaded == 0


def test_only_experts_that_were_chosen_are_read(tmp_path: Path) -> None:
    """Three tokens choose 12 of 16 experts of a layer at most."""
    path = CASES["qwen3moe"].write(tmp_path / "model.gguf")
    model = Tinyrun(None, path, stream=plan(expert_slot_bytes=1 << 16))
    few = model.step([(model.cache.create(), [5])], WHOLE, [Trace()])
    many = model.step([(model.cache.create(), prompt(model.vocab, 200))], WHOLE, [Trace()])
    assert few.experts_touched == 3 * 4 and many.experts_touched == 3 * 16
    experts = sum(n for name, n in model.weights.nbytes.items() if "_exps" in name)
    assert many.weight_bytes_loaded - few.weight_bytes_loaded > 0.7 * experts


def test_a_cancelled_step_leaves_nothing_half_done(small: Path) -> None:
    """Cancelled before it begins and in the middle; the next step starts anew, with the same bits."""
    model = streamed(small, "two slots")
    tokens = prompt(model.vocab, 40)
    first = model.read(tokens)
    for delay in (0.0, 0.0005, 0.001, 0.002, 0.004):
        sequence = model.cache.create()
        batch = Batch((model.cache.segment(sequence, np.array(tokens, np.int32), (len(tokens) - 1,)),))
        model.runner.control.reset()
        timer = threading.Timer(delay, model.runner.control.cancel)
        timer.start()
        result = model.runner.run(batch, Order("token"))
        timer.join()
        assert 0 <= result.finished[0] <= len(tokens)
        model.runner.control.reset()
        model.cache.free(sequence)
        assert not model.read(tokens).difference(first)


def test_steps_fail_after_the_weights_were_closed(small: Path) -> None:
    model = streamed(small, "two slots")
    model.weights.close()
    with pytest.raises(CheckpointError, match="closed"):
        model.read(prompt(model.vocab, 5))
