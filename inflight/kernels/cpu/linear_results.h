// What becomes of the sums of a product before they are stored: scales, the bias, factors, and the gate.
#pragma once

#include "linear_product.h"

template <typename T>
inline void store_some(T* to, VecF v, int64_t count) {
    if (count >= kLanes) {
        store(to, v);
    } else if (count > 0) {
        alignas(64) T lanes[kLanes];
        store(lanes, v);
        std::memcpy(to, lanes, count * sizeof(T));
    }
}

inline void store_result(const Call& call, int64_t row, int64_t column, VecF v, int64_t count) {
    const int64_t at = row * call.out_stride + column;
    if (call.out_dtype == kFloat32)
        store_some(reinterpret_cast<float*>(call.out) + at, v, count);
    else
        store_some(reinterpret_cast<bf16*>(call.out) + at, v, count);
}

// The gate of kernels/gate.py. If an argument of `min` or `max` is NaN, the result is the second one, so NaN stays NaN.
inline VecF swiglu_oai(VecF gate, VecF up) {
    const VecF limit = splat(7.0f);
    gate = min(limit, gate);
    up = max(splat(-7.0f), min(limit, up));
    return mul(mul(gate, sigmoid(mul(gate, splat(1.702f)))), add(up, splat(1.0f)));
}

inline VecF gated(const LinearWeight& weight, VecF a, VecF b) {
    if (weight.gate == 4) return swiglu_oai(a, b);
    if (weight.gate == 5) return mul(gelu_exact(a), b);
    return mul(weight.gate == 1 ? silu(a) : gelu(a), b);
}

// `scales`: of the tile's rows, if the weight is of integers.
template <int kRows>
__attribute__((always_inline)) inline void finish(
    const Call& call, const float* scales, int64_t first_row, int64_t panel, VecF (&sums)[kRows][2]) {
    const LinearWeight& weight = call.weight;
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
        VecF a = sums[r][0], b = sums[r][1];
        if (weight.bits <= 8) {
            const VecF scale = splat(scales[r] * weight.scale);
            a = mul(a, scale);
            b = mul(b, scale);
        }
        if (weight.bias != nullptr) {
            a = add(a, load(weight.bias + panel * kPanel));
            b = add(b, load(weight.bias + panel * kPanel + kLanes));
        }
        if (call.factors != nullptr) {
            const VecF factor = splat(call.factors[first_row + r]);
            a = mul(a, factor);
            b = mul(b, factor);
        }
        const int64_t row = call.out_rows == nullptr ? first_row + r : call.out_rows[first_row + r];
        if (weight.gate != 0) {
            const int64_t column = panel * kLanes;
            store_result(call, row, column, gated(weight, a, b), weight.out_features / 2 - column);
        } else {
            const int64_t column = panel * kPanel;
            store_result(call, row, column, a, weight.out_features - column);
            store_result(call, row, column + kLanes, b, weight.out_features - column - kLanes);
        }
    }
}
