// See linear_results.h. A loop over rows has no branches but those that the whole call decides: so little time as a row takes here,
// the time counts if a product has few input features.

#include "linear_results.h"

namespace {

// The gate of kernels/gate.py. If an argument of `min` or `max` is NaN, the result is the second one, so NaN stays NaN.
inline VecF swiglu_oai(VecF gate, VecF up) {
    const VecF limit = splat(7.0f);
    gate = min(limit, gate);
    up = max(splat(-7.0f), min(limit, up));
    return mul(mul(gate, sigmoid(mul(gate, splat(1.702f)))), add(up, splat(1.0f)));
}

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

struct Sums {  // of the rows of a tile and a panel
    const Call& call;
    const float* scales;
    int64_t first_row, num_rows, panel;
    const float* sums;

    // Calls store(row of out, a, b) for each row with its two vectors.
    template <typename T, typename Store>
    void each(const Store& store) const {
        T* const out = reinterpret_cast<T*>(call.out);
        const int64_t out_stride = call.out_stride, end = num_rows;
        const int32_t* const out_rows = call.out_rows == nullptr ? nullptr : call.out_rows + first_row;
        const float* const factors = call.factors == nullptr ? nullptr : call.factors + first_row;
        const float *const row_scales = call.weight.bits <= 8 ? scales : nullptr, *const from = sums;
        const float weight_scale = call.weight.scale;
        const bool has_bias = call.weight.bias != nullptr;
        const VecF bias_a = has_bias ? load(call.weight.bias + panel * kPanel) : zero();
        const VecF bias_b = has_bias ? load(call.weight.bias + panel * kPanel + kLanes) : zero();
        const int64_t first = first_row;
        for (int64_t row = 0; row < end; row++) {
            VecF a = load(from + row * kPanel), b = load(from + row * kPanel + kLanes);
            if (row_scales != nullptr) {
                const VecF scale = splat(row_scales[row] * weight_scale);
                a = mul(a, scale);
                b = mul(b, scale);
            }
            if (has_bias) {
                a = add(a, bias_a);
                b = add(b, bias_b);
            }
            if (factors != nullptr) {
                const VecF factor = splat(factors[row]);
                a = mul(a, factor);
                b = mul(b, factor);
            }
            store(out + (out_rows == nullptr ? first + row : out_rows[row]) * out_stride, a, b);
        }
    }

    template <typename T, typename Gate>
    void store_gated(const Gate& gate) const {
        const int64_t column = panel * kLanes, count = call.weight.out_features / 2 - column;
        each<T>([=](T* to, VecF a, VecF b) { store_some(to + column, gate(a, b), count); });
    }

    template <typename T, typename Activation>
    void store_all(const Activation& activation) const {
        const int64_t column = panel * kPanel, count = call.weight.out_features - column;
        if (count >= kPanel)
            return each<T>([=](T* to, VecF a, VecF b) {
                store(to + column, activation(a));
                store(to + column + kLanes, activation(b));
            });
        each<T>([=](T* to, VecF a, VecF b) {
            store_some(to + column, activation(a), count);
            store_some(to + column + kLanes, activation(b), count - kLanes);
        });
    }

    template <typename T>
    void store_as() const {
        const LinearWeight& weight = call.weight;
        if (weight.gate == 1) return store_gated<T>([](VecF a, VecF b) { return mul(silu(a), b); });
        if (weight.gate == 2) return store_gated<T>([](VecF a, VecF b) { return mul(gelu(a), b); });
        if (weight.gate == 4) return store_gated<T>([](VecF a, VecF b) { return swiglu_oai(a, b); });
        if (weight.gate == 5) return store_gated<T>([](VecF a, VecF b) { return mul(gelu_exact(a), b); });
        if (weight.activation == 1) return store_all<T>([](VecF a) { return silu(a); });
        if (weight.activation == 2) return store_all<T>([](VecF a) { return gelu(a); });
        if (weight.activation == 5) return store_all<T>([](VecF a) { return gelu_exact(a); });
        if (weight.activation == 6) return store_all<T>([](VecF a) { return relu(a); });
        store_all<T>([](VecF a) { return a; });
    }
};

}  // namespace

void finish(const Call& call, const float* scales, int64_t first_row, int64_t num_rows, int64_t panel, const float* sums) {
    const Sums all{call, scales, first_row, num_rows, panel, sums};
    if (call.out_dtype == kFloat32)
        all.store_as<float>();
    else
        all.store_as<bf16>();
}
