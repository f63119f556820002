// Short convolutions over the tokens of a sequence, per channel, between two gates. kernels/short_conv.py has the formula.

#include <cstring>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace {

template <typename T>
VecF rounded(VecF x) {  // as a tensor of this type would keep it
    T kept[kLanes];
    store(kept, x);
    return load(kept);
}

// One row of the step, kLanes channels from `channel` on. The state is [kernel_size - 1, num_channels].
template <typename T>
void convolve(
    const T* x, int64_t x_stride, T* out, char* states, const AttentionStep& step, const ShortConv& layer, int64_t row,
    int64_t channel) {
    const int64_t size = layer.num_channels, num_kept = layer.kernel_size - 1;
    const int64_t first = step.query_start_loc[row], num_tokens = step.query_start_loc[row + 1] - first;
    const int64_t num_computed = step.num_computed_tokens[row];
    const auto state_before = [&](int64_t position) {
        return reinterpret_cast<T*>(states + step.state_offset(row, position, layer.block_stride)) + channel;
    };
    VecF weights[kMaxConvolution], taps[kMaxConvolution];  // the last tap is the token's
    for (int64_t k = 0; k < layer.kernel_size; k++) {
        weights[k] = load(layer.weight + k * size + channel);
        taps[k] = k == 0 || num_computed == 0 ? zero() : load(state_before(num_computed) + (k - 1) * size);
    }
    const VecF bias = layer.bias == nullptr ? zero() : load(layer.bias + channel);
    for (int64_t token = 0; token < num_tokens; token++) {
        const T* from = x + (first + token) * x_stride + channel;
        for (int64_t k = 0; k < num_kept; k++) taps[k] = taps[k + 1];
        taps[num_kept] = rounded<T>(mul(load(from), load(from + 2 * size)));
        VecF total = bias;
        for (int64_t k = 0; k < layer.kernel_size; k++) total = fma(weights[k], taps[k], total);
        store(out + (first + token) * size + channel, mul(load(from + size), rounded<T>(total)));
        if (step.keeps_state(row, token))
            for (int64_t k = 0; k < num_kept; k++) store(state_before(num_computed + token + 1) + k * size, taps[k + 1]);
    }
}

template <typename T>
void short_conv(const T* x, int64_t x_stride, T* out, char* states, const AttentionStep& step, const ShortConv& layer) {
    const int64_t num_groups = layer.num_channels / kLanes;
    share_each(step.num_rows * num_groups, true, [&](int64_t i) {
        convolve(x, x_stride, out, states, step, layer, i / num_groups, i % num_groups * kLanes);
    });
}

}  // namespace

extern "C" void inflight_short_conv(
    const void* x, int64_t x_stride, void* out, void* states, const AttentionStep* step, const ShortConv* layer) {
    char* const bytes = static_cast<char*>(states);
    if (layer->dtype == kFloat32)
        short_conv(static_cast<const float*>(x), x_stride, static_cast<float*>(out), bytes, *step, *layer);
    else
        short_conv(static_cast<const bf16*>(x), x_stride, static_cast<bf16*>(out), bytes, *step, *layer);
}
