// RMSNorm, and QK-norm with rotary embedding. Both compute in float, whatever the type of the rows. Also the selection of rows.

#include <cmath>
#include <cstring>

#include "kernels.h"
#include "simd.h"

namespace {

constexpr int64_t kParallelElements = 1 << 14;  // with fewer, waking the other threads costs more than they save

template <typename T>
float sum_of_squares(const T* x, int64_t size) {
    VecF even = zero(), odd = zero();
    int64_t i = 0;
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
        const VecF a = load(x + i), b = load(x + i + kLanes);
        even = fma(a, a, even);
        odd = fma(b, b, odd);
    }
    float total = 0;
    for (; i < size; i++) total += to_float(x[i]) * to_float(x[i]);
    return sum(add(even, odd)) + total;
}

template <typename T>
void add_row(T* x, const T* delta, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(x + i, add(load(x + i), load(delta + i)));
    for (; i < size; i++) x[i] = from_float<T>(to_float(x[i]) + to_float(delta[i]));
}

template <typename T>
void rms_norm(
    T* x, int64_t x_stride, const T* delta, int64_t delta_stride, const T* weight, T* out, int64_t num_rows, int64_t size,
    float eps) {
#pragma omp parallel for schedule(static) if (num_rows * size >= kParallelElements)
    for (int64_t row = 0; row < num_rows; row++) {
        T* from = x + row * x_stride;
        T* to = out + row * size;
        if (delta != nullptr) add_row(from, delta + row * delta_stride, size);
        const float scale = 1.0f / std::sqrt(sum_of_squares(from, size) / static_cast<float>(size) + eps);
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes)
            store(to + i, mul(mul(load(from + i), splat(scale)), load(weight + i)));
        for (; i < size; i++) to[i] = from_float<T>(to_float(from[i]) * scale * to_float(weight[i]));
    }
}

// One head: `head_dim` elements at x, changed in place.
template <typename T>
void norm_and_rotate_head(T* x, const T* weight, const T* cos, const T* sin, int64_t head_dim, float eps) {
    const int64_t half = head_dim / 2;
    const float scale =
        weight == nullptr ? 1.0f : 1.0f / std::sqrt(sum_of_squares(x, head_dim) / static_cast<float>(head_dim) + eps);
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        VecF a = load(x + i), b = load(x + half + i);
        if (weight != nullptr) {
            a = mul(mul(a, splat(scale)), load(weight + i));
            b = mul(mul(b, splat(scale)), load(weight + half + i));
        }
        store(x + i, fma(a, load(cos + i), mul(b, load(sin + i))));
        store(x + half + i, fma(b, load(cos + half + i), mul(a, load(sin + half + i))));
    }
    for (; i < half; i++) {
        float a = to_float(x[i]), b = to_float(x[half + i]);
        if (weight != nullptr) {
            a *= scale * to_float(weight[i]);
            b *= scale * to_float(weight[half + i]);
        }
        x[i] = from_float<T>(a * to_float(cos[i]) + b * to_float(sin[i]));
        x[half + i] = from_float<T>(b * to_float(cos[half + i]) + a * to_float(sin[half + i]));
    }
}

template <typename T>
void norm_and_rotate(
    T* heads, int64_t token_stride, const T* weight, const T* cos, const T* sin, int64_t num_tokens, int64_t num_heads,
    int64_t head_dim, float eps) {
#pragma omp parallel for schedule(static) if (num_tokens * num_heads * head_dim >= kParallelElements)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t head = 0; head < num_heads; head++)
            norm_and_rotate_head(
                heads + token * token_stride + head * head_dim, weight == nullptr ? nullptr : weight + head * head_dim,
                cos + token * head_dim, sin + token * head_dim, head_dim, eps);
}

template <typename T>
void multiply_sigmoid(T* x, int64_t x_stride, const T* gate, int64_t gate_stride, int64_t num_rows, int64_t size) {
#pragma omp parallel for schedule(static) if (num_rows * size >= kParallelElements)
    for (int64_t row = 0; row < num_rows; row++) {
        T* to = x + row * x_stride;
        const T* from = gate + row * gate_stride;
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes)
            store(to + i, div(load(to + i), add(splat(1.0f), exponential(sub(zero(), load(from + i))))));
        for (; i < size; i++) to[i] = from_float<T>(to_float(to[i]) / (1.0f + std::exp(-to_float(from[i]))));
    }
}

}  // namespace

#define INFLIGHT_STRING(x) #x
#define INFLIGHT_STRING_OF(x) INFLIGHT_STRING(x)

extern "C" {

const char* inflight_source_hash() { return INFLIGHT_STRING_OF(INFLIGHT_SOURCE_HASH); }

void inflight_rms_norm(
    void* x, int64_t x_stride, const void* delta, int64_t delta_stride, const void* weight, void* out, int64_t num_rows,
    int64_t size, float eps, int32_t dtype) {
    if (dtype == kFloat32)
        rms_norm(
            static_cast<float*>(x), x_stride, static_cast<const float*>(delta), delta_stride,
            static_cast<const float*>(weight), static_cast<float*>(out), num_rows, size, eps);
    else
        rms_norm(
            static_cast<bf16*>(x), x_stride, static_cast<const bf16*>(delta), delta_stride,
            static_cast<const bf16*>(weight), static_cast<bf16*>(out), num_rows, size, eps);
}

void inflight_norm_and_rotate(
    void* heads, int64_t token_stride, const void* weight, const void* cos, const void* sin, int64_t num_tokens,
    int64_t num_heads, int64_t head_dim, float eps, int32_t dtype) {
    if (dtype == kFloat32)
        norm_and_rotate(
            static_cast<float*>(heads), token_stride, static_cast<const float*>(weight), static_cast<const float*>(cos),
            static_cast<const float*>(sin), num_tokens, num_heads, head_dim, eps);
    else
        norm_and_rotate(
            static_cast<bf16*>(heads), token_stride, static_cast<const bf16*>(weight), static_cast<const bf16*>(cos),
            static_cast<const bf16*>(sin), num_tokens, num_heads, head_dim, eps);
}

void inflight_multiply_sigmoid(
    void* x, int64_t x_stride, const void* gate, int64_t gate_stride, int64_t num_rows, int64_t size, int32_t dtype) {
    if (dtype == kFloat32)
        multiply_sigmoid(
            static_cast<float*>(x), x_stride, static_cast<const float*>(gate), gate_stride, num_rows, size);
    else
        multiply_sigmoid(
            static_cast<bf16*>(x), x_stride, static_cast<const bf16*>(gate), gate_stride, num_rows, size);
}

void inflight_select_rows(
    const void* x, int64_t x_stride_bytes, const int64_t* rows, void* out, int64_t num_rows, int64_t row_bytes) {
    for (int64_t i = 0; i < num_rows; i++)
        std::memcpy(static_cast<char*>(out) + i * row_bytes, static_cast<const char*>(x) + rows[i] * x_stride_bytes, row_bytes);
}
}
