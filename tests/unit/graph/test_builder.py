"""What the builder emits, its checks, its fusions and the exact counts of a stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiny import CASES, Tiny, opened

from quaff.config import ModelConfig
from quaff.errors import ConfigError, UnsupportedError
from quaff.graph.builder import Shared, StageBuilder, build_graph
from quaff.graph.fuse import fuse, share_buffers
from quaff.graph.program import F32, INT8, NONE, SCRATCH, SLOT_F32, SLOT_INT8, Graph, Op, OpKind, ProgramSpec, visible_positions
from quaff.models import family
from quaff.models.family import Tensors, WeightRef

IN_PLACE = (OpKind.ROPE, OpKind.SCALE, OpKind.UNIT_NORM, OpKind.DELTA_GATES, OpKind.GATE)


def load(path: Path, tiny: Tiny) -> tuple[ModelConfig, Tensors]:
    _, config, tensors, _ = opened(tiny.write(path / "m.gguf"))
    return config, tensors


def graph(path: Path, name: str, activations: str = "int8", fuse: bool = True) -> Graph:
    config, tensors = load(path, CASES[name])
    return build_graph(config, family(config.architecture), tensors, activations, fuse)  # type: ignore[arg-type]


def kinds(program: ProgramSpec) -> str:
    return " ".join(op.kind.name for op in program.ops)


def test_llama_stages(tmp_path: Path) -> None:
    g = graph(tmp_path, "llama-gqa")
    names = [(s.kind, s.layer) for s in g.stages]
    assert names == [("embed", -1), ("mixer", 0), ("ffn", 0), ("mixer", 1), ("attend", 1), ("ffn", 1), ("head", -1)]
    embed, mixer, ffn, last_mixer, attend, last_ffn, head = g.stages
    assert kinds(embed.program) == "EMBED"
    assert kinds(mixer.program) == "RMS_NORM LINEAR ROPE ROPE KV_WRITE ATTEND QUANTIZE LINEAR"
    assert kinds(ffn.program) == "RMS_NORM LINEAR GLU LINEAR"
    assert kinds(head.program) == "RMS_NORM LINEAR"
    assert kinds(last_mixer.program) == "RMS_NORM LINEAR ROPE KV_WRITE"
    assert kinds(attend.program) == "RMS_NORM LINEAR ROPE ATTEND QUANTIZE LINEAR"
    assert last_mixer.weights == ("blk.1.attn_norm.weight", "blk.1.attn_k.weight", "blk.1.attn_v.weight")
    assert last_mixer.macs_per_row + attend.macs_per_row == mixer.macs_per_row
    assert ffn.program == last_ffn.program, "equal stages share one program"
    assert head.weights == ("output_norm.weight", "token_embd.weight"), "tied"


def test_gemma3_stages(tmp_path: Path) -> None:
    g = graph(tmp_path, "gemma3-wide")
    mixer, ffn = g.stages[1], g.stages[2]
    assert kinds(mixer.program) == "RMS_NORM LINEAR RMS_NORM RMS_NORM ROPE ROPE KV_WRITE ATTEND QUANTIZE LINEAR RMS_NORM ADD"
    assert kinds(ffn.program) == "RMS_NORM LINEAR GLU LINEAR RMS_NORM ADD"
    assert [(k.name, k.layers, k.window) for k in g.kv_kinds] == [("sliding", (0, 1, 2, 3, 4, 6), 80), ("full", (5,), 0)]
    assert [(r.theta, r.factors) for r in g.ropes] == [(10000.0, ()), (1e6, (8.0,) * 8)]
    attends = [op.ints[:2] for s in g.stages for op in s.program.ops if op.kind == OpKind.ATTEND]
    assert attends == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (0, 5)]


def test_gemma4_layers_that_borrow_keys_run_for_wanted_rows_alone(tmp_path: Path) -> None:
    g = graph(tmp_path, "gemma4")
    kinds_of = [(s.kind, s.layer) for s in g.stages]
    mixers = [("mixer", 0), ("ffn", 0), ("mixer", 1), ("ffn", 1), ("mixer", 2)]
    assert kinds_of == [
        ("embed", -1),
        *mixers,
        ("attend", 2),
        ("ffn", 2),
        ("attend", 3),
        ("ffn", 3),
        ("attend", 4),
        ("ffn", 4),
        ("head", -1),
    ]
    assert [(k.name, k.layers, k.dim) for k in g.kv_kinds] == [("sliding", (0, 2), 16), ("full", (1,), 32)]
    read = {s.layer: op.ints[:2] for s in g.stages for op in s.program.ops if op.kind == OpKind.ATTEND}
    assert read == {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (0, 1), 4: (1, 0)}, "layer 3 reads layer 2, layer 4 reads layer 1"
    assert not any(op.kind == OpKind.KV_WRITE for s in g.stages for op in s.program.ops if s.kind == "attend")
    ffn = next(s for s in g.stages if (s.kind, s.layer) == ("ffn", 4))
    assert ffn.tables == ("token_embd.weight", "blk.4.per_layer_token_embd.weight")
    assert "token_embd.weight" not in ffn.small_weights + ffn.linear_weights
    assert [op.outputs for op in ffn.program.ops if op.kind == OpKind.SCALE][-1] == (0,), "the residual, by the layer's scale"


def test_a_sum_in_scratch_is_not_folded_into_the_residual() -> None:
    ops = (
        Op(OpKind.LINEAR, (NONE, 3), (2,), (0, NONE), (1, 0)),
        Op(OpKind.ADD, (2,), (3,), floats=(1.0,)),
        Op(OpKind.ADD, (3,), (0,), floats=(1.0,)),
    )
    assert fuse(ProgramSpec(((32, F32), (32, F32)), ops)).ops == ops


def test_a_layer_keeps_keys_or_borrows_them(tmp_path: Path) -> None:
    config, _ = load(tmp_path, CASES["gemma4"])
    kept, borrowing = (StageBuilder(config, Shared([], []), layer, "int8") for layer in (0, 3))
    for g in (kept, borrowing):
        q = g.linear(g.residual, WeightRef("w", (64, 64), False))
        k = g.linear(g.residual, WeightRef("w", (32, 64), False))
        arguments = (q, k, k) if g is borrowing else (q, None, None)
        with pytest.raises(ConfigError, match="not both"):
            g.attention(*arguments, config.layers[g.layer].attention)
    with pytest.raises(ConfigError, match="layer 2 has no keys and values"):
        borrowing.attention(borrowing.linear(borrowing.residual, WeightRef("w", (64, 64), False)), None, None, config.layers[3].attention)


def test_a_mixture_routes_gathers_and_combines(tmp_path: Path) -> None:
    ffn = graph(tmp_path, "qwen2moe").stages[2]
    routed = "RMS_NORM LINEAR ROUTE GATHER EXPERT_LINEAR GLU EXPERT_LINEAR COMBINE"
    assert kinds(ffn.program) == f"{routed} LINEAR GLU LINEAR GATE ADD"
    tiny = CASES["qwen2moe"]
    by_slots = [width for width, kind in ffn.program.buffers if kind in (SLOT_F32, SLOT_INT8)]
    assert ffn.program.slots == tiny.used and {tiny.dim, tiny.expert_dim} <= set(by_slots)
    assert ffn.experts == (tiny.experts, tiny.used)
    assert ffn.expert_weights == tuple(f"blk.0.ffn_{r}_exps.weight" for r in ("gate", "up", "down"))
    assert not {*ffn.expert_weights} & {*ffn.linear_weights, *ffn.small_weights}
    assert ffn.macs_per_row == tiny.dim * (tiny.experts + 3 * tiny.used * tiny.expert_dim + 3 * tiny.shared_dim)
    mixed = graph(tmp_path, "mixtral").stages[2]
    assert kinds(mixed.program) == "RMS_NORM LINEAR ROUTE GATHER GATHER EXPERT_LINEAR GLU EXPERT_LINEAR COMBINE", "up is F16, gate is not"


def test_a_quantised_router_is_refused(tmp_path: Path) -> None:
    config, tensors = load(tmp_path, CASES["qwen3moe"])
    name = "blk.0.ffn_gate_inp.weight"
    with pytest.raises(UnsupportedError, match="router blk.0.ffn_gate_inp.weight is quantised"):
        build_graph(config, family("qwen3moe"), {**tensors, name: (tensors[name][0], 8)})


def test_unfused_is_one_op_per_step(tmp_path: Path) -> None:
    g = graph(tmp_path, "llama-gqa", fuse=False)
    assert kinds(g.stages[2].program) == "RMS_NORM QUANTIZE LINEAR QUANTIZE LINEAR GLU QUANTIZE LINEAR ADD"
    assert all(op.ints == (1, 0) for s in g.stages for op in s.program.ops if op.kind == OpKind.LINEAR)


def test_float_activations_quantise_nothing(tmp_path: Path) -> None:
    for name in CASES:
        g = graph(tmp_path, name, activations="float32")
        assert not any(kind == INT8 for s in g.stages for _, kind in s.program.buffers)
        assert all(op.inputs[0] == NONE for s in g.stages for op in s.program.ops if op.kind == OpKind.LINEAR)


def test_mixed_types_share_one_launch(tmp_path: Path) -> None:
    """llama-mqa: gate is integer, up is F16; both inputs are bound and the norm keeps its f32 result for up."""
    ffn = graph(tmp_path, "llama-mqa").stages[2]
    norm, linear = ffn.program.ops[:2]
    assert linear.kind == OpKind.LINEAR and linear.ints == (2, 0)
    assert linear.inputs == (norm.outputs[1], norm.outputs[0]) and NONE not in norm.outputs


def test_buffers_never_alias_while_alive(tmp_path: Path) -> None:
    for name in CASES:
        for fused in (True, False):
            for stage in graph(tmp_path, name, fuse=fused).stages:
                used = {b for op in stage.program.ops for b in (*op.inputs, *op.outputs) if b >= SCRATCH}
                assert used == {SCRATCH + i for i in range(len(stage.program.buffers))}, "no buffer is unused"
                for op in stage.program.ops:
                    assert op.kind in IN_PLACE or not set(op.outputs) & set(op.inputs) - {NONE, 0}


def test_fusion_saves_launches_and_scratch(tmp_path: Path) -> None:
    fused, plain = graph(tmp_path, "llama-gqa"), graph(tmp_path, "llama-gqa", fuse=False)
    for a, b in zip(fused.stages, plain.stages, strict=True):
        assert a.weights == b.weights and a.macs_per_row == b.macs_per_row
        assert a.launches <= b.launches and a.program.scratch_bytes_per_row <= b.program.scratch_bytes_per_row
    assert sum(s.launches for s in fused.stages) < sum(s.launches for s in plain.stages)


def test_codes_of_a_rewritten_buffer_are_not_reused() -> None:
    """RoPE turns buffer 2 in place between two quantisations: they must stay two."""
    ops = (
        Op(OpKind.RMS_NORM, (0,), (2, NONE), (0,), (1,), (1e-5,)),
        Op(OpKind.QUANTIZE, (2,), (3,), ints=(1,)),
        Op(OpKind.LINEAR, (3, NONE), (4,), (1, NONE), (1, 0)),
        Op(OpKind.ROPE, (2,), (2,), (), (0, 2, 16, 0)),
        Op(OpKind.QUANTIZE, (2,), (5,), ints=(1,)),
        Op(OpKind.LINEAR, (5, NONE), (6,), (2, NONE), (1, 0)),
        Op(OpKind.GLU, (4, 6), (7, NONE), (), (0,)),
        Op(OpKind.ADD, (7,), (0,), floats=(1.0,)),
    )
    program = ProgramSpec(((32, F32), (32, INT8), (32, F32), (32, INT8), (32, F32), (32, F32)), ops)
    fused = share_buffers(fuse(program))
    assert kinds(fused) == "RMS_NORM LINEAR ROPE QUANTIZE LINEAR GLU ADD"


def test_codes_of_parts_are_not_those_of_the_row() -> None:
    """Parts have outliers of their own, and a producer that quantises its result quantises it as one."""
    ops = (
        Op(OpKind.RMS_NORM, (0,), (2, NONE), (0,), (1,), (1e-5,)),
        Op(OpKind.QUANTIZE, (2,), (3,), ints=(2,)),
        Op(OpKind.HEAD_LINEAR, (3, NONE), (4,), (1, NONE), (1, 0, 2)),
        Op(OpKind.QUANTIZE, (2,), (5,), ints=(1,)),
        Op(OpKind.LINEAR, (5, NONE), (6,), (2, NONE), (1, 0)),
        Op(OpKind.GLU, (4, 6), (7, NONE), (), (0,)),
        Op(OpKind.ADD, (7,), (0,), floats=(1.0,)),
    )
    program = ProgramSpec(((64, F32), (64, INT8), (64, F32), (64, INT8), (64, F32), (64, F32)), ops)
    fused = share_buffers(fuse(program))
    assert kinds(fused) == "RMS_NORM QUANTIZE HEAD_LINEAR LINEAR GLU ADD"
    assert program.scratch_bytes_per_row == 4 * 64 * 4 + 2 * (64 + 64 + 256) + 8 * 3


def test_scratch_has_room_for_the_most_outliers_of_a_shared_buffer() -> None:
    """Two parts of 1,536 have four, three of 1,024 have three: the most parts need not have the most."""
    ops = tuple(Op(OpKind.QUANTIZE, (2,), (3,), ints=(parts,)) for parts in (2, 3))
    program = ProgramSpec(((3072, F32), (3072, INT8)), ops)
    assert program.scratch_bytes_per_row == 3072 * 4 + (3072 + 64 + 6 * 256) + 8 * 4


def test_a_linear_result_read_twice_is_not_folded_into_the_residual() -> None:
    ops = (
        Op(OpKind.LINEAR, (NONE, 0), (2,), (0, NONE), (1, 0)),
        Op(OpKind.ADD, (2,), (0,), floats=(1.0,)),
        Op(OpKind.LINEAR, (NONE, 2), (1,), (1, NONE), (1, 0)),
    )
    assert fuse(ProgramSpec(((32, F32),), ops)).ops == ops


def test_counts(tmp_path: Path) -> None:
    tiny = CASES["llama-gqa"]
    g = graph(tmp_path, "llama-gqa")
    q, kv = tiny.heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    embed, mixer, ffn, *_, head = g.stages
    assert embed.macs_per_row == 0
    assert mixer.macs_per_row == tiny.dim * (2 * q + 2 * kv)
    assert ffn.macs_per_row == 3 * tiny.dim * tiny.ffn_dim
    assert head.macs_per_row == tiny.dim * tiny.vocab
    assert mixer.linear_weights == tuple(f"blk.0.attn_{r}.weight" for r in ("q", "k", "v", "output"))
    assert mixer.small_weights == ("blk.0.attn_norm.weight",) and embed.small_weights == embed.linear_weights == ()
    assert mixer.kv_bytes_per_row(2) == 2 * 2 * kv + 4 * tiny.kv_heads and mixer.kv_bytes_per_row(4) == 2 * 4 * kv
    assert mixer.attention_macs(10, 3) == 2 * q * (11 + 12 + 13)
    assert set(g.weight_names) == set(tiny.tensors())


def test_visible_positions_count_the_mask() -> None:
    for window in (0, 1, 5, 64, 1000):
        for start in (0, 3, 5, 70):
            for rows in (0, 1, 7, 100):
                counted = sum(1 for i in range(start, start + rows) for j in range(i + 1) if not window or j > i - window)
                assert visible_positions(start, rows, window) == counted


def test_width_errors_name_the_weight(tmp_path: Path) -> None:
    config, tensors = load(tmp_path, CASES["llama-gqa"])
    g = StageBuilder(config, Shared([], []), 0, "int8")
    for wrong in ((64, 32), (64,)):
        with pytest.raises(ConfigError, match="weight w of shape"):
            g.linear(g.residual, WeightRef("w", wrong, True))
    with pytest.raises(ConfigError, match="norm weight w"):
        g.rms_norm(g.residual, WeightRef("w", (48,), False), 1e-5)
    with pytest.raises(ConfigError, match="queries of layer 0 are 64 wide; 8 heads"):
        attention = replace(config.layers[0].attention, heads=8)
        g.attention(g.residual, g.residual, g.residual, attention)
    narrow = g.linear(g.residual, WeightRef("w", (32, 64), False))
    with pytest.raises(ConfigError, match="width 32 cannot be added"):
        g.residual += narrow
    with pytest.raises(ConfigError, match="gate of width 64 and up of width 32"):
        g.swiglu(g.residual, narrow)
    with pytest.raises(ConfigError, match="the residual can only be added to"):
        g.residual = narrow
    with pytest.raises(ConfigError, match="head w has 299 rows"):
        g.logits(g.residual, WeightRef("w", (299, 64), False))
    del tensors


def test_quantised_widths_must_fill_groups(tmp_path: Path) -> None:
    tiny = Tiny(dim=40, heads=3, kv_heads=3, ffn_dim=72, types={"": "F16"}, embedding="F16")
    config, tensors = load(tmp_path, tiny)
    name = "blk.0.ffn_up.weight"
    with pytest.raises(UnsupportedError, match=f"{name} is quantised and 40 wide"):
        build_graph(config, family("llama"), {**tensors, name: (tensors[name][0], 8)})


def test_strict_table_is_checked_first(tmp_path: Path) -> None:
    config, tensors = load(tmp_path, CASES["llama-gqa"])
    with pytest.raises(ConfigError, match="missing tensor output_norm.weight"):
        build_graph(config, family("llama"), {k: v for k, v in tensors.items() if k != "output_norm.weight"})
