// The kernel table of one instruction set: every kernel over its Vec and its Dot.
#pragma once
#include "../kernels/activation.h"
#include "../kernels/attention.h"
#include "../kernels/conv.h"
#include "../kernels/delta.h"
#include "../kernels/linear.h"
#include "../kernels/norm.h"
#include "../kernels/quantize.h"
#include "../kernels/rope.h"
#include "../kernels/spin.h"
#include "../kernels/table.h"
#include "../kernels/vocab.h"

namespace quaff::isa {

template <class D> static constexpr KernelTable make_table(const char* isa) {
    using V = typename D::V;
    return {
        .isa = isa,
        .rms_norm = kernels::rms_norm<V>,
        .quantize_row = kernels::quantize_row<V>,
        .rope = kernels::rope<V>,
        .swiglu = kernels::swiglu<V>,
        .geglu_tanh = kernels::geglu_tanh<V>,
        .sigmoid_gate = kernels::sigmoid_gate<V>,
        .conv = kernels::conv<V>,
        .unit_norm = kernels::unit_norm<V>,
        .decay = kernels::decay_row<V>,
        .delta = kernels::delta<V>,
        .swiglu_clamped = kernels::swiglu_clamped<V>,
        .add = kernels::add_row<V>,
        .add_scaled = kernels::add_scaled_row<V>,
        .scale = kernels::scale_row<V>,
        .soft_cap = kernels::soft_cap_row<V>,
        .dot16 = kernels::dot16<V>,
        .combine = kernels::combine<V>,
        .kv_write = kernels::kv_write<V>,
        .attend = kernels::attend<V>,
        .kv_write_f32 = kernels::kv_write_f32<V>,
        .attend_f32 = kernels::attend<V, float>,
        .attend_parts = kernels::attend_parts<V>,
        .attend_merge = kernels::attend_merge<V>,
        .attend_tile = kTilesTogether * V::kAttendRows,
        .linear_int = linear::linear_int<D>,
        .linear_float = linear::linear_float<D>,
        .row_max = kernels::row_max<V>,
        .probabilities = kernels::probabilities<V>,
        .sum16 = kernels::sum16<V>,
        .exp_row = kernels::exp_row<V>,
        .sigmoid_row = kernels::sigmoid_row<V>,
        .tanh_row = kernels::tanh_row<V>,
        .spin_int8 = kernels::spin_int8<D>,
        .spin_int16 = kernels::spin_int16<V>,
        .spin_fma = kernels::spin_fma<V>,
        .read = kernels::read<V>,
    };
}

} // namespace quaff::isa
