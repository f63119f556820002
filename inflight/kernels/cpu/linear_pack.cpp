// Packs weights of linear layers in the layout of linear.h, and quantizes floats to integers of 8 or 4 bits. This happens once,
// when a model is loaded, on all cores.

#include <algorithm>
#include <cmath>

#include "linear.h"

namespace {

void pack_plain(const char* const* rows, const LinearWeight& weight, const PanelLayout& layout, int64_t panel) {
    constexpr int64_t kUnitsAtOnce = 16;  // a cache line of each row
    const int64_t num_units = weight.in_features * weight.bits / 32;
    uint32_t* to = reinterpret_cast<uint32_t*>(
        static_cast<char*>(const_cast<void*>(weight.packed)) + panel * layout.panel_bytes);
    for (int64_t first = 0; first < num_units; first += kUnitsAtOnce) {
        const int64_t end = std::min(num_units, first + kUnitsAtOnce);
        for (int lane = 0; lane < kPanel; lane++) {
            const int64_t feature = PanelLayout::feature(weight, panel, lane);
            const uint32_t* row = feature < 0 ? nullptr : reinterpret_cast<const uint32_t*>(rows[feature]);
            for (int64_t unit = first; unit < end; unit++) to[unit * kPanel + lane] = row == nullptr ? 0 : row[unit];
        }
    }
}

void store_scale(const PanelLayout& layout, char* scales, int i, float scale) {
    if (layout.scale_bytes == sizeof(float))
        reinterpret_cast<float*>(scales)[i] = scale;
    else
        reinterpret_cast<fp16*>(scales)[i] = to_fp16(scale);
}

// Packs one group of one output feature: its units become to[0], to[kPanel], to[2 * kPanel], ...
void pack_group(const uint8_t* values, bool is_signed, const LinearWeight& weight, uint32_t* to) {
    const int64_t num_units = weight.group_size / 4;
    const uint32_t flip = is_signed ? 0x80808080u : 0;  // from [-128, 127] to [0, 255]
    for (int64_t unit = 0; unit < num_units; unit += weight.bits == 4 ? 2 : 1) {
        uint32_t low, high = 0;
        std::memcpy(&low, values + 4 * unit, sizeof low);
        if (weight.bits == 4) std::memcpy(&high, values + 4 * unit + 4, sizeof high);
        *to = weight.bits == 4 ? (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4 : low ^ flip;
        to += kPanel;
    }
}

void pack_integers(
    const char* const* rows, bool is_signed, const float* scales, const float* offsets, const LinearWeight& weight,
    const PanelLayout& layout, int64_t panel) {
    char* at = static_cast<char*>(const_cast<void*>(weight.packed)) + panel * layout.panel_bytes;
    if (rows != nullptr) std::memset(at, 0, layout.panel_bytes);
    for (int64_t group = 0; group < layout.num_groups; group++, at += layout.group_bytes) {
        char* to_scales = at + layout.weight_bytes;
        for (int lane = 0; lane < kPanel; lane++) {
            const int64_t feature = PanelLayout::feature(weight, panel, lane);
            if (feature < 0) continue;
            if (rows != nullptr)
                pack_group(
                    reinterpret_cast<const uint8_t*>(rows[feature]) + group * weight.group_size, is_signed, weight,
                    reinterpret_cast<uint32_t*>(at) + lane);
            store_scale(layout, to_scales, lane, scales[feature * layout.num_groups + group]);
            if (weight.has_offsets)
                store_scale(layout, to_scales, kPanel + lane, offsets[feature * layout.num_groups + group]);
        }
    }
}

// -- quantising -------------------------------------------------------------------------------------------------------

template <typename T>
void quantize_symmetric(const T* row, int64_t size, uint8_t* values, float* scale) {
    float most = 0;
    for (int64_t i = 0; i < size; i++) most = std::max(most, std::fabs(to_float(row[i])));
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    for (int64_t i = 0; i < size; i++)
        values[i] = static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(to_float(row[i]) * inverse)));
    *scale = most / 127.0f;
}

// Quantizes to [0, 15]. It tries the range from the smallest to the largest weight and four narrower ones, and uses the range
// with the least squared error.
template <typename T>
void quantize_group(const T* group, int64_t size, uint8_t* values, float* scale, float* offset) {
    constexpr float kShrink[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f};
    float low = 0, high = 0;  // zero stays in the range
    for (int64_t i = 0; i < size; i++) {
        low = std::min(low, to_float(group[i]));
        high = std::max(high, to_float(group[i]));
    }
    float best = -1;
    for (const float shrink : kShrink) {
        const float step = std::max((high - low) * shrink / 15.0f, 1e-30f), start = low * shrink, inverse = 1.0f / step;
        VecF errors = zero();
        for (int64_t i = 0; i < size; i += kLanes) {
            const VecF x = load(group + i);
            const VecF q = min(splat(15.0f), max(zero(), round_to_integer(mul(sub(x, splat(start)), splat(inverse)))));
            const VecF error = sub(fma(q, splat(step), splat(start)), x);
            errors = fma(error, error, errors);
        }
        const float total = sum(errors);
        if (best >= 0 && total >= best) continue;
        best = total;
        *scale = step;
        *offset = -start;
    }
    const float inverse = 1.0f / *scale;
    for (int64_t i = 0; i < size; i++)
        values[i] = static_cast<uint8_t>(
            std::min(15.0f, std::max(0.0f, std::nearbyint((to_float(group[i]) + *offset) * inverse))));
}

template <typename T>
void quantize(
    const T* rows, int64_t row_stride, int64_t num_rows, int64_t size, int64_t group_size, int32_t bits, uint8_t* values,
    float* scales, float* offsets) {
    const int64_t num_groups = size / group_size;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < num_rows; row++) {
        if (bits == 8) {
            quantize_symmetric(rows + row * row_stride, size, values + row * size, scales + row);
            continue;
        }
        for (int64_t group = 0; group < num_groups; group++)
            quantize_group(
                rows + row * row_stride + group * group_size, group_size, values + row * size + group * group_size,
                scales + row * num_groups + group, offsets + row * num_groups + group);
    }
}

}  // namespace

extern "C" {

void inflight_packed_size(const LinearWeight* weight, int64_t* num_bytes, int64_t* num_lanes) {
    const PanelLayout layout(*weight);
    *num_bytes = layout.num_panels * layout.panel_bytes;
    *num_lanes = layout.num_panels * kPanel;
}

void inflight_packed_features(const LinearWeight* weight, int64_t* features) {
    const PanelLayout layout(*weight);
    for (int64_t panel = 0; panel < layout.num_panels; panel++)
        for (int lane = 0; lane < kPanel; lane++)
            features[panel * kPanel + lane] = PanelLayout::feature(*weight, panel, lane);
}

void inflight_pack_linear(
    const char* const* rows, int32_t is_signed, const float* scales, const float* offsets, const LinearWeight* weight) {
    const PanelLayout layout(*weight);
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < layout.num_panels; panel++) {
        if (weight->bits > 8)
            pack_plain(rows, *weight, layout, panel);
        else
            pack_integers(rows, is_signed != 0, scales, offsets, *weight, layout, panel);
    }
}

void inflight_quantize_weight(
    const void* rows, int64_t row_stride, int32_t dtype, int64_t num_rows, int64_t size, int64_t group_size, int32_t bits,
    uint8_t* values, float* scales, float* offsets) {
    if (dtype == kFloat32)
        quantize(static_cast<const float*>(rows), row_stride, num_rows, size, group_size, bits, values, scales, offsets);
    else
        quantize(static_cast<const bf16*>(rows), row_stride, num_rows, size, group_size, bits, values, scales, offsets);
}
}
