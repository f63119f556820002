// Writes the keys and values of a step into their groups of the cache (attention_cells.h).
#pragma once

#include "attention_cells.h"

template <typename T>
struct StepTensors {  // strides in elements, from one token to the next
    const T* query;
    int64_t query_stride;
    const T* key;  // null: the cache has all keys and values already
    int64_t key_stride;
    const T* value;
    int64_t value_stride;
    T* out;
};

// Converts x to integers and returns the scale: x = scale * integers. The largest absolute value becomes the largest integer of
// the type. If an element is infinite or NaN, the scale is NaN, so that everything computed from the row is NaN. `size` is a
// multiple of 16. Each row has its own scale, so a row's result does not depend on the other rows of the step.
template <typename T, typename Integer>
inline float quantise(const T* x, Integer* integers, int size) {
    constexpr float kTop = sizeof(Integer) == 1 ? 127.0f : 32767.0f;
    VecF most = zero(), broken = zero();  // `broken` becomes NaN if an element is not finite; `most` can lose a NaN
    for (int i = 0; i < size; i += kLanes) {
        const VecF values = load(x + i);
        most = max(most, max(values, sub(zero(), values)));
        broken = fma(values, zero(), broken);
    }
    const float top = largest(most);
    const bool is_zero = !(top > 1e-30f);
    const VecF inverse = splat(is_zero ? 0.0f : kTop / top);
    for (int i = 0; i < size; i += kLanes) {
        const VecF values = mul(load(x + i), inverse);
        if constexpr (sizeof(Integer) == 1)
            store_int8(integers + i, values);
        else
            store_int16(integers + i, values);
    }
    return (is_zero ? 0.0f : top / kTop) + sum(broken);
}

// Copies the first `value_dim` elements of a group's first `count` keys into the layout of a group of values. Later values are 0.
template <typename Cells>
inline void values_of_keys(const typename Cells::Unit* keys, int count, int value_dim, typename Cells::Unit* values) {
    using Unit = typename Cells::Unit;
    constexpr int kPerUnit = Cells::kPerUnit, kBits = 8 * sizeof(Unit) / kPerUnit;
    constexpr Unit kLow = static_cast<Unit>(~Unit{0}) >> (kPerUnit == 1 ? 0 : kBits);
    constexpr int kBlock = 32;  // units that are read together, so that they stay in the first-level cache
    for (int block = 0; block < value_dim / kPerUnit; block += kBlock) {
        const int end = std::min(block + kBlock, value_dim / kPerUnit);
        for (int key = 0; key < kGroupKeys; key += kPerUnit) {
            Unit* to = values + key / kPerUnit * value_dim;
            for (int unit = block; unit < end; unit++) {
                const Unit* from = keys + unit * kGroupKeys + key;
                const Unit first = key < count ? from[0] : Unit{0};
                if constexpr (kPerUnit == 1) {
                    to[unit] = first;
                } else {
                    const Unit second = key + 1 < count ? from[1] : Unit{0};
                    to[2 * unit] = static_cast<Unit>((first & kLow) | (second << kBits));
                    to[2 * unit + 1] = static_cast<Unit>((first >> kBits) | (second & static_cast<Unit>(~kLow)));
                }
            }
        }
    }
}

// Writes `count` tokens into one group, to its places [first, first + count). If `value_group` is null, only their keys.
template <typename T, typename Cells>
struct GroupWriter {
    int head_dim, first, count;

    void write(
        char* key_group, const T* key, int64_t key_stride, char* value_group, const T* value, int64_t value_stride) const {
        using Unit = typename Cells::Unit;
        Unit* keys = reinterpret_cast<Unit*>(key_group) + first;
        Unit* values = reinterpret_cast<Unit*>(value_group);
        if constexpr (Cells::kScaled) {
            for (int i = 0; i < count; i++) {
                alignas(64) int8_t row[kMostHeadDim];
                Cells::scales(key_group, head_dim)[first + i] = quantise(key + i * key_stride, row, head_dim);
                write_key(keys + i, reinterpret_cast<const Unit*>(row));
                if (value_group == nullptr) continue;
                Cells::scales(value_group, head_dim)[first + i] = quantise(value + i * value_stride, row, head_dim);
                write_value(values + (first + i) / 2 * head_dim, row, (first + i) % 2);
            }
        } else {
            for (int i = 0; i < count; i++)
                write_key(keys + i, reinterpret_cast<const Unit*>(key + i * key_stride));
            if (value_group != nullptr) write_values(values, value, value_stride);
        }
    }

  private:
    template <typename Unit>
    void write_key(Unit* to, const Unit* from) const {
        for (int unit = 0; unit < head_dim / Cells::kPerUnit; unit++) to[unit * kGroupKeys] = from[unit];
    }

    void write_value(uint16_t* to, const int8_t* from, int half) const {
        for (int d = 0; d < head_dim; d++) {
            const uint16_t byte = static_cast<uint8_t>(from[d]);
            to[d] = half == 0 ? byte : static_cast<uint16_t>((to[d] & 0xff) | (byte << 8));
        }
    }

    void write_values(uint32_t* values, const T* from, int64_t stride) const {
        if constexpr (Cells::kPerUnit == 1) {
            for (int i = 0; i < count; i++)
                std::memcpy(values + (first + i) * head_dim, from + i * stride, head_dim * sizeof(T));
        } else {
            for (int i = 0; i < count;) {
                uint32_t* to = values + (first + i) / 2 * head_dim;
                const T* a = from + i * stride;
                if ((first + i) % 2 == 1) {
                    for (int d = 0; d < head_dim; d += kLanes)
                        store_units(to + d, replace_second(load_units(to + d), a + d));
                    i++;
                    continue;
                }
                const bool is_pair = i + 1 < count;  // an unpaired last token leaves the other half of its unit zero
                const T* b = from + (i + 1) * stride;
                alignas(64) static const T nothing[kLanes] = {};
                for (int d = 0; d < head_dim; d += kLanes) store_units(to + d, pair_up(a + d, is_pair ? b + d : nothing));
                i += 2;
            }
        }
    }
};
