// Norms of rows, QK-norm with rotary embedding, activations. They compute in float, whatever the type of the rows. Also the
// selection of rows.

#include <cmath>
#include <cstring>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

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

// x = function(x, y)
template <typename T, typename Function>
void change_row(T* x, const T* y, int64_t size, const Function& function) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(x + i, function(load(x + i), load(y + i)));
    if (i == size) return;
    T a[kLanes] = {}, b[kLanes] = {};
    std::memcpy(a, x + i, (size - i) * sizeof(T));
    std::memcpy(b, y + i, (size - i) * sizeof(T));
    store(a, function(load(a), load(b)));
    std::memcpy(x + i, a, (size - i) * sizeof(T));
}

template <typename T, typename Function>
void change_rows(
    T* x, int64_t x_stride, const T* y, int64_t y_stride, int64_t num_rows, int64_t size, const Function& function) {
    share_each(num_rows, num_rows * size >= kParallelElements, [&](int64_t row) {
        change_row(x + row * x_stride, y + row * y_stride, size, [&](VecF a, VecF b) { return function(row, a, b); });
    });
}

template <typename T>
void rms_norm(
    T* x, int64_t x_stride, const T* delta, int64_t delta_stride, const T* weight, T* out, int64_t num_rows, int64_t size,
    float eps) {
    share_each(num_rows, num_rows * size >= kParallelElements, [&](int64_t row) {
        T* from = x + row * x_stride;
        T* to = out + row * size;
        if (delta != nullptr) change_row(from, delta + row * delta_stride, size, [](VecF a, VecF b) { return add(a, b); });
        const float scale = 1.0f / std::sqrt(sum_of_squares(from, size) / static_cast<float>(size) + eps);
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes)
            store(to + i, mul(mul(load(from + i), splat(scale)), load(weight + i)));
        for (; i < size; i++) to[i] = from_float<T>(to_float(from[i]) * scale * to_float(weight[i]));
    });
}

template <typename T>
float sum_of_elements(const T* x, int64_t size) {
    VecF even = zero(), odd = zero();
    int64_t i = 0;
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
        even = add(even, load(x + i));
        odd = add(odd, load(x + i + kLanes));
    }
    float total = 0;
    for (; i < size; i++) total += to_float(x[i]);
    return sum(add(even, odd)) + total;
}

template <typename T>
float sum_of_squared_distances(const T* x, int64_t size, float mean) {
    VecF squares = zero();
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const VecF distance = sub(load(x + i), splat(mean));
        squares = fma(distance, distance, squares);
    }
    float total = 0;
    for (; i < size; i++) total += (to_float(x[i]) - mean) * (to_float(x[i]) - mean);
    return sum(squares) + total;
}

template <typename T>
void layer_norm(
    void* x, int64_t x_stride, const void* delta, int64_t delta_stride, const T* weight, const T* bias, void* out,
    int64_t num_rows, int64_t size, float eps) {
    share_each(num_rows, num_rows * size >= kParallelElements, [&](int64_t row) {
        T* from = static_cast<T*>(x) + row * x_stride;
        T* to = static_cast<T*>(out) + row * size;
        if (delta != nullptr)
            change_row(from, static_cast<const T*>(delta) + row * delta_stride, size, [](VecF a, VecF b) { return add(a, b); });
        const float mean = sum_of_elements(from, size) / static_cast<float>(size);
        const float variance = sum_of_squared_distances(from, size, mean) / static_cast<float>(size);
        const float scale = 1.0f / std::sqrt(variance + eps);
        int64_t i = 0;
        for (; i + kLanes <= size; i += kLanes) {
            const VecF normed = mul(mul(sub(load(from + i), splat(mean)), splat(scale)), load(weight + i));
            store(to + i, bias == nullptr ? normed : add(normed, load(bias + i)));
        }
        for (; i < size; i++) {
            const float normed = (to_float(from[i]) - mean) * scale * to_float(weight[i]);
            to[i] = from_float<T>(bias == nullptr ? normed : normed + to_float(bias[i]));
        }
    });
}

template <typename T>
void activate(void* x, int64_t x_stride, int64_t num_rows, int64_t size, int32_t activation) {
    T* rows = static_cast<T*>(x);
    const auto change = [&](const auto& function) {
        change_rows(rows, x_stride, rows, x_stride, num_rows, size, [&](int64_t, VecF a, VecF) { return function(a); });
    };
    if (activation == 1)
        change(silu);
    else if (activation == 2)
        change(gelu);
    else if (activation == 5)
        change(gelu_exact);
    else
        change(relu);
}

template <typename T>
void norm_head(T* x, const T* weight, int64_t head_dim, float eps) {
    const VecF scale = splat(1.0f / std::sqrt(sum_of_squares(x, head_dim) / static_cast<float>(head_dim) + eps));
    change_row(x, weight, head_dim, [&](VecF a, VecF b) { return mul(mul(a, scale), b); });
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
    T* heads, int64_t token_stride, int64_t head_stride, const T* weight, const T* cos, const T* sin, int64_t num_tokens,
    int64_t num_heads, int64_t head_dim, float eps) {
    share_each(num_tokens, num_tokens * num_heads * head_dim >= kParallelElements, [&](int64_t token) {
        for (int64_t head = 0; head < num_heads; head++)
            if (cos == nullptr)
                norm_head(heads + token * token_stride + head * head_stride, weight + head * head_dim, head_dim, eps);
            else
                norm_and_rotate_head(
                    heads + token * token_stride + head * head_stride,
                    weight == nullptr ? nullptr : weight + head * head_dim, cos + token * head_dim, sin + token * head_dim,
                    head_dim, eps);
    });
}

template <typename T>
void multiply_activation(
    void* x, int64_t x_stride, const void* gate, int64_t gate_stride, int64_t num_rows, int64_t size, int32_t activation) {
    const auto multiply = [&](const auto& function) {
        change_rows(
            static_cast<T*>(x), x_stride, static_cast<const T*>(gate), gate_stride, num_rows, size,
            [&](int64_t, VecF a, VecF b) { return mul(a, function(b)); });
    };
    if (activation == 1)
        multiply(silu);
    else if (activation == 2)
        multiply(gelu);
    else
        multiply(sigmoid);
}

template <typename T>
void add_and_scale(
    void* x, int64_t x_stride, const void* delta, int64_t delta_stride, const float* factor, int64_t factor_stride,
    int64_t num_rows, int64_t size) {
    const auto scale = [&](int64_t row) { return splat(factor == nullptr ? 1.0f : factor[row * factor_stride]); };
    T* rows = static_cast<T*>(x);
    if (delta == nullptr)
        change_rows(
            rows, x_stride, rows, x_stride, num_rows, size, [&](int64_t row, VecF a, VecF) { return mul(a, scale(row)); });
    else
        change_rows(
            rows, x_stride, static_cast<const T*>(delta), delta_stride, num_rows, size,
            [&](int64_t row, VecF a, VecF b) { return mul(add(a, b), scale(row)); });
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

void inflight_layer_norm(
    void* x, int64_t x_stride, const void* delta, int64_t delta_stride, const void* weight, const void* bias, void* out,
    int64_t num_rows, int64_t size, float eps, int32_t dtype) {
    const auto norm = [&](auto type) {
        using T = decltype(type);
        layer_norm(
            x, x_stride, delta, delta_stride, static_cast<const T*>(weight), static_cast<const T*>(bias), out, num_rows, size,
            eps);
    };
    if (dtype == kFloat32)
        norm(float{});
    else
        norm(bf16{});
}

void inflight_activate(void* x, int64_t x_stride, int64_t num_rows, int64_t size, int32_t activation, int32_t dtype) {
    const auto compute = dtype == kFloat32 ? activate<float> : activate<bf16>;
    compute(x, x_stride, num_rows, size, activation);
}

void inflight_norm_and_rotate(
    void* heads, int64_t token_stride, int64_t head_stride, const void* weight, const void* cos, const void* sin,
    int64_t num_tokens, int64_t num_heads, int64_t head_dim, float eps, int32_t dtype) {
    if (dtype == kFloat32)
        norm_and_rotate(
            static_cast<float*>(heads), token_stride, head_stride, static_cast<const float*>(weight),
            static_cast<const float*>(cos), static_cast<const float*>(sin), num_tokens, num_heads, head_dim, eps);
    else
        norm_and_rotate(
            static_cast<bf16*>(heads), token_stride, head_stride, static_cast<const bf16*>(weight),
            static_cast<const bf16*>(cos), static_cast<const bf16*>(sin), num_tokens, num_heads, head_dim, eps);
}

void inflight_multiply_activation(
    void* x, int64_t x_stride, const void* gate, int64_t gate_stride, int64_t num_rows, int64_t size, int32_t activation,
    int32_t dtype) {
    const auto multiply = dtype == kFloat32 ? multiply_activation<float> : multiply_activation<bf16>;
    multiply(x, x_stride, gate, gate_stride, num_rows, size, activation);
}

void inflight_add_and_scale(
    void* x, int64_t x_stride, const void* delta, int64_t delta_stride, const float* factor, int64_t factor_stride,
    int64_t num_rows, int64_t size, int32_t dtype) {
    const auto compute = dtype == kFloat32 ? add_and_scale<float> : add_and_scale<bf16>;
    compute(x, x_stride, delta, delta_stride, factor, factor_stride, num_rows, size);
}

void inflight_copy_heads(
    const void* x, int64_t x_stride, int64_t x_head_stride, void* out, int64_t out_stride, int64_t out_head_stride,
    int64_t num_rows, int64_t num_heads, int64_t size, int32_t dtype) {
    const int64_t element = dtype == kFloat32 ? sizeof(float) : sizeof(bf16);
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t head = 0; head < num_heads; head++)
            std::memcpy(
                static_cast<char*>(out) + (row * out_stride + head * out_head_stride) * element,
                static_cast<const char*>(x) + (row * x_stride + head * x_head_stride) * element, size * element);
}

void inflight_select_rows(
    const void* x, int64_t x_stride_bytes, const int64_t* rows, void* out, int64_t num_rows, int64_t row_bytes) {
    for (int64_t i = 0; i < num_rows; i++)
        std::memcpy(static_cast<char*>(out) + i * row_bytes, static_cast<const char*>(x) + rows[i] * x_stride_bytes, row_bytes);
}
}
