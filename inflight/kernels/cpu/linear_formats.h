// The products of a tile of rows and one panel, for each format of the weights: floats, bfloat16, and integers of 8 or 4 bits.
#pragma once

#include "linear_product.h"
#include "quantize_row.h"

constexpr int kLine = 64;
constexpr int64_t kAhead = 4096;                         // how many bytes a prefetch is ahead of the computation

// Prefetches memory during a computation. `at` is the address. It moves on by `step` bytes with each vector of the panel. The
// prefetch goes to the first-level cache, because a panel is read soon, and in the order of its addresses. (Attention prefetches
// into the second-level cache. Here this would make a product of one row up to 7 % slower in 8 bits, and 2 % in bfloat16,
// measured on an AMD EPYC.)
struct Fetch {
    const char* at;
    int64_t step;

    void next(int64_t i) const {
        __builtin_prefetch(at + i * step);
        if constexpr (kLanes == 16) __builtin_prefetch(at + i * step + kLine);
    }
};

// What the integers of a weight mean.
enum class Zero {
    kMiddle,  // the middle of their range means 0
    kOffset,  // each group has an offset, which is subtracted
    kTable,   // 4 bits are a place in the weight's table
};

// The arranged rows of a tile. `row_units`: the units of a row when it is arranged.
inline Rows rows_of(const Call& call, const PanelLayout& layout, const Rows& rows, const Tile& tile, int64_t row_units) {
    Rows part{rows.units + tile.first * row_units, nullptr, nullptr, nullptr, nullptr};
    if (call.weight.bits > 8) return part;
    part.group_sums = rows.group_sums + tile.first * layout.num_groups;
    part.scales = rows.scales + tile.first;
    part.num_outliers = rows.num_outliers + tile.first;
    part.outliers = rows.outliers + tile.first * kMostOutliers;
    return part;
}

// -- outliers ---------------------------------------------------------------------------------------------------------

inline VecF load_scale(const PanelLayout& layout, const char* scales, int i) {
    if (layout.scale_bytes == sizeof(float)) return load(reinterpret_cast<const float*>(scales) + i);
    return load(reinterpret_cast<const fp16*>(scales) + i);
}

// The weights of an outlier in one vector of a panel. If the weight is one group, they are not multiplied by their scales.
template <int kBits, Zero kZeroAt, bool kIsOneGroup>
inline VecF weights_of(
    const PanelLayout& layout, const PlacedOutlier& outlier, const char* panel, int vector, const int8_t* table) {
    constexpr bool kHasOffsets = kZeroAt == Zero::kOffset;
    const VecU units = load_bytes(panel + outlier.weights + vector * kLanes * sizeof(uint32_t));
    VecI integers;
    if constexpr (kZeroAt == Zero::kTable)
        integers = looked_up_at(load_table(table), units, outlier.first_bit);
    else
        integers = bits_at<kBits>(units, outlier.first_bit, kHasOffsets ? 0 : 1 << (kBits - 1));
    const VecF values = to_float(integers);
    if constexpr (kIsOneGroup) return values;
    const char* scales = panel + outlier.scales;
    const VecF products = mul(values, load_scale(layout, scales, vector * kLanes));
    return kHasOffsets ? sub(products, load_scale(layout, scales, kPanel + vector * kLanes)) : products;
}

// Adds the products of a tile's outliers and one panel to `sums` [row][kPanel].
template <int kBits, Zero kZeroAt, bool kIsOneGroup>
__attribute__((noinline)) void add_outliers(
    const PanelLayout& layout, const Rows& tile, int64_t num_rows, const char* panel, const int8_t* table, float* sums) {
    constexpr auto weights = weights_of<kBits, kZeroAt, kIsOneGroup>;
    for (int64_t row = 0; row < num_rows; row++) {
        const PlacedOutlier *outlier = tile.outliers + row * kMostOutliers, *const end = outlier + tile.num_outliers[row];
        if (outlier == end) continue;
        float* to = sums + row * kPanel;
        VecF first = load(to), second = load(to + kLanes);
        for (; outlier < end; outlier++) {
            const VecF value = splat(outlier->value);
            first = fma(weights(layout, *outlier, panel, 0, table), value, first);
            second = fma(weights(layout, *outlier, panel, 1, table), value, second);
        }
        store(to, first);
        store(to + kLanes, second);
    }
}

// -- formats: the products of one tile and one panel ------------------------------------------------------------------

template <int kRows>
inline void store_rows(const VecF (&from)[kRows][2], float* to) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
        store(to + r * kPanel, from[r][0]);
        store(to + r * kPanel + kLanes, from[r][1]);
    }
}

// `multiply` writes the sums of a tile's rows to `sums` [kRows][kPanel].
template <typename T>
struct Plain {
    template <int kRows>
    static void multiply(
        const Call& call, const PanelLayout&, const Rows& tile, const char* panel, const Fetch& fetch, float* sums) {
        const uint32_t* x = tile.units;
        const uint32_t* w = reinterpret_cast<const uint32_t*>(panel);
        const int64_t num_units = call.weight.in_features / kElementsPerUnit<T>;
        VecF in_registers[kRows][2];
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) in_registers[r][0] = in_registers[r][1] = zero();
#pragma GCC unroll 2
        for (int64_t unit = 0; unit < num_units; unit++, w += kPanel, x += kRows) {
            const VecU w0 = load_units(w), w1 = load_units(w + kLanes);
            fetch.next(unit);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                const VecU a = splat_unit(x[r]);
                in_registers[r][0] = dot<T>(in_registers[r][0], a, w0);
                in_registers[r][1] = dot<T>(in_registers[r][1], a, w1);
            }
        }
        store_rows<kRows>(in_registers, sums);
    }
};

// Adds the integer products of one group to `sums`.
template <int kBits, Zero kZeroAt, int kRows>
inline void add_group(
    const uint32_t* x, const char* panel, int64_t group_size, const int8_t* table, const Fetch& fetch, VecI (&out)[kRows][2]) {
    constexpr int kUnits = 8 / kBits;  // each vector holds this many units of a feature
    VecI sums[kRows][2];               // no pointer to these exists, so they can be registers
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
        sums[r][0] = out[r][0];
        sums[r][1] = out[r][1];
    }
    const int64_t num_vectors = group_size / (4 * kUnits);
    for (int64_t i = 0; i < num_vectors; i++) {
        const VecU w0 = load_bytes(panel), w1 = load_bytes(panel + kLanes * sizeof(uint32_t));
        fetch.next(i);
#pragma GCC unroll 2
        for (int unit = 0; unit < kUnits; unit++) {
            VecU part0 = kBits == 8 ? w0 : unit == 0 ? low_nibbles(w0) : high_nibbles(w0);
            VecU part1 = kBits == 8 ? w1 : unit == 0 ? low_nibbles(w1) : high_nibbles(w1);
            if constexpr (kZeroAt == Zero::kTable) {
                const VecU integers = load_table(table);
                part0 = look_up(integers, part0);
                part1 = look_up(integers, part1);
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                const VecU a = splat_unit(x[unit * kRows + r]);
                if constexpr (kZeroAt == Zero::kTable) {
                    sums[r][0] = dot_looked_up(sums[r][0], part0, a);
                    sums[r][1] = dot_looked_up(sums[r][1], part1, a);
                } else {
                    sums[r][0] = dot_bytes<kBits>(sums[r][0], part0, a);
                    sums[r][1] = dot_bytes<kBits>(sums[r][1], part1, a);
                }
            }
        }
        panel += kPanel * sizeof(uint32_t);
        x += kUnits * kRows;
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) {
        out[r][0] = sums[r][0];
        out[r][1] = sums[r][1];
    }
}

// Like `add_group`, for a weight with one group. As a function of its own it has no other sums, so these get all the registers.
template <int kBits, Zero kZeroAt, int kRows>
__attribute__((noinline)) void sum_only_group(
    const uint32_t* x, int32_t zero_point, const int32_t* group_sums, const char* panel, int64_t group_size, const int8_t* table,
    const Fetch& fetch, float* out) {
    VecI sums[kRows][2];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) sums[r][0] = sums[r][1] = splat_int(-zero_point * group_sums[r]);
    add_group<kBits, kZeroAt, kRows>(x, panel, group_size, table, fetch, sums);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) store(out + r * kPanel + j * kLanes, to_float(sums[r][j]));
}

template <int kBits, Zero kZeroAt>
struct Grouped {
    static constexpr bool kHasOffsets = kZeroAt == Zero::kOffset;
    static constexpr int kZero = kHasOffsets ? 0 : kZeroAt == Zero::kTable ? kTableZero : 1 << (kBits - 1);

    template <int kRows>
    static void multiply(
        const Call& call, const PanelLayout& layout, const Rows& tile, const char* panel, const Fetch& fetch, float* sums) {
        bool has_outliers = false;
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) has_outliers |= tile.num_outliers[r] > 0;
        if (layout.num_groups == 1)
            multiply_only_group<kRows>(call, layout, tile, panel, fetch, has_outliers, sums);
        else
            multiply_groups<kRows>(call, layout, tile, panel, fetch, sums);
        if (has_outliers && (kHasOffsets || layout.num_groups > 1))
            add_outliers<kBits, kZeroAt, false>(layout, tile, kRows, panel, call.weight.table, sums);
    }

    template <int kRows>
    static void multiply_only_group(
        const Call& call, const PanelLayout& layout, const Rows& tile, const char* panel, const Fetch& fetch, bool has_outliers,
        float* sums) {
        const int8_t* table = call.weight.table;
        sum_only_group<kBits, kZeroAt, kRows>(
            tile.units, kZero, tile.group_sums, panel, call.weight.group_size, table, fetch, sums);
        if (has_outliers && !kHasOffsets) add_outliers<kBits, kZeroAt, true>(layout, tile, kRows, panel, table, sums);
        const char* scales = panel + layout.weight_bytes;
        for (int j = 0; j < kPanel; j += kLanes) {
            const VecF scale = load_scale(layout, scales, j);
            for (int r = 0; r < kRows; r++) {
                VecF sum = mul(load(sums + r * kPanel + j), scale);
                if constexpr (kHasOffsets)
                    sum = fma(splat(-static_cast<float>(tile.group_sums[r])), load_scale(layout, scales, kPanel + j), sum);
                store(sums + r * kPanel + j, sum);
            }
        }
    }

    template <int kRows>
    static void multiply_groups(
        const Call& call, const PanelLayout& layout, const Rows& tile, const char* panel, Fetch fetch, float* sums) {
        const int64_t group_size = call.weight.group_size;
        const int8_t* table = call.weight.table;
        const uint32_t* x = tile.units;
        const int32_t* group_sums = tile.group_sums;
        VecF in_registers[kRows][2];
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) in_registers[r][0] = in_registers[r][1] = zero();
        for (int64_t group = 0; group < layout.num_groups; group++, group_sums += kRows) {
            VecI in_group[kRows][2];
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) in_group[r][0] = in_group[r][1] = splat_int(-kZero * group_sums[r]);
            add_group<kBits, kZeroAt, kRows>(x, panel, group_size, table, fetch, in_group);
            x += group_size / 4 * kRows;
            fetch.at += layout.group_bytes * fetch.step / static_cast<int64_t>(kPanel * sizeof(uint32_t));
            const char* scales = panel + layout.weight_bytes;
            const VecF s0 = load_scale(layout, scales, 0), s1 = load_scale(layout, scales, kLanes);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                in_registers[r][0] = fma(to_float(in_group[r][0]), s0, in_registers[r][0]);
                in_registers[r][1] = fma(to_float(in_group[r][1]), s1, in_registers[r][1]);
            }
            if constexpr (kHasOffsets) {
                const VecF o0 = load_scale(layout, scales, kPanel), o1 = load_scale(layout, scales, kPanel + kLanes);
#pragma GCC unroll 12
                for (int r = 0; r < kRows; r++) {
                    const VecF weight = splat(-static_cast<float>(group_sums[r]));
                    in_registers[r][0] = fma(weight, o0, in_registers[r][0]);
                    in_registers[r][1] = fma(weight, o1, in_registers[r][1]);
                }
            }
            panel += layout.group_bytes;
        }
        store_rows<kRows>(in_registers, sums);
    }
};
