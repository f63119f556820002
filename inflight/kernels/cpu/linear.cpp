// Linear layers: rows of activations times a packed weight (linear.h) of bfloat16, float, or integers of 8 or 4 bits.
//
// First the rows are copied into tiles of up to kTileRows rows, where the same unit (32 bits) of all rows is side by side. (A
// single row of floats stays where it is.) For integer weights the rows are also quantised (quantize_row.h): to integers with one
// scale per row, and a few outliers, which stay floats and are multiplied one by one. Then each thread multiplies a panel of the
// weight (a part of its output features) with all tiles, while the panel is in the cache. Sums stay in registers over all input
// features.
//
// Whatever the number of rows or threads, an output is one sum over the input features from first to last, and then over the
// row's outliers. So a row's result is the same bit for bit, whatever the other rows are.

#include <algorithm>
#include <utility>
#include <vector>

#include "linear_product.h"
#include "quantize_row.h"
#include "threads.h"

namespace {

constexpr int kTileRows = kLanes == 16 ? 12 : 4;         // rows of a tile: each needs two registers for its sums
constexpr int kGroupedTileRows = kLanes == 16 ? 6 : 2;   // the same if rows have several groups, whose sums need registers, too
constexpr int64_t kCacheShare = 256 << 10;               // bytes of a core's cache for weights, and as many for rows
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

// -- outliers ---------------------------------------------------------------------------------------------------------

inline VecF load_scale(const PanelLayout& layout, const char* scales, int i) {
    if (layout.scale_bytes == sizeof(float)) return load(reinterpret_cast<const float*>(scales) + i);
    return load(reinterpret_cast<const f16*>(scales) + i);
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

template <typename T>
struct Plain {
    template <int kRows>
    static void multiply(
        const Call& call, const PanelLayout&, const Rows& tile, const char* panel, const Fetch& fetch,
        VecF (&sums)[kRows][2]) {
        const uint32_t* x = tile.units;
        const uint32_t* w = reinterpret_cast<const uint32_t*>(panel);
        const int64_t num_units = call.weight.in_features / kElementsPerUnit<T>;
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) sums[r][0] = sums[r][1] = zero();
#pragma GCC unroll 2
        for (int64_t unit = 0; unit < num_units; unit++, w += kPanel, x += kRows) {
            const VecU w0 = load_units(w), w1 = load_units(w + kLanes);
            fetch.next(unit);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                const VecU a = splat_unit(x[r]);
                sums[r][0] = dot<T>(sums[r][0], a, w0);
                sums[r][1] = dot<T>(sums[r][1], a, w1);
            }
        }
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
    const Fetch& fetch, VecF (&out)[kRows][2]) {
    VecI sums[kRows][2];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) sums[r][0] = sums[r][1] = splat_int(-zero_point * group_sums[r]);
    add_group<kBits, kZeroAt, kRows>(x, panel, group_size, table, fetch, sums);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) out[r][j] = to_float(sums[r][j]);
}

template <int kBits, Zero kZeroAt>
struct Grouped {
    static constexpr bool kHasOffsets = kZeroAt == Zero::kOffset;

    template <int kRows>
    static void multiply(
        const Call& call, const PanelLayout& layout, const Rows& tile, const char* const first_group, Fetch fetch,
        VecF (&sums)[kRows][2]) {
        constexpr int kZero = kHasOffsets ? 0 : kZeroAt == Zero::kTable ? kTableZero : 1 << (kBits - 1);
        const int8_t* table = call.weight.table;
        const bool is_one_group = layout.num_groups == 1 && !kHasOffsets;
        const uint32_t* x = tile.units;
        const int32_t* group_sums = tile.group_sums;
        const char* panel = first_group;
        bool has_outliers = false;
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) has_outliers |= tile.num_outliers[r] > 0;
        const int64_t group_size = call.weight.group_size;
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++) sums[r][0] = sums[r][1] = zero();
        for (int64_t group = 0; group < layout.num_groups; group++, group_sums += kRows) {
            VecF products[kRows][2];
            if (layout.num_groups == 1) {
                sum_only_group<kBits, kZeroAt, kRows>(x, kZero, group_sums, panel, group_size, table, fetch, products);
                if (is_one_group && has_outliers)
                    add_outliers<kBits, kZeroAt, true>(layout, tile, kRows, panel, table, reinterpret_cast<float*>(products));
            } else {
                VecI in_group[kRows][2];
#pragma GCC unroll 12
                for (int r = 0; r < kRows; r++) in_group[r][0] = in_group[r][1] = splat_int(-kZero * group_sums[r]);
                add_group<kBits, kZeroAt, kRows>(x, panel, group_size, table, fetch, in_group);
#pragma GCC unroll 12
                for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
                    for (int j = 0; j < 2; j++) products[r][j] = to_float(in_group[r][j]);
            }
            x += group_size / 4 * kRows;
            fetch.at += layout.group_bytes * fetch.step / static_cast<int64_t>(kPanel * sizeof(uint32_t));
            const char* scales = panel + layout.weight_bytes;
            const VecF s0 = load_scale(layout, scales, 0), s1 = load_scale(layout, scales, kLanes);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                sums[r][0] = fma(products[r][0], s0, sums[r][0]);
                sums[r][1] = fma(products[r][1], s1, sums[r][1]);
            }
            if constexpr (kHasOffsets) {
                const VecF o0 = load_scale(layout, scales, kPanel), o1 = load_scale(layout, scales, kPanel + kLanes);
#pragma GCC unroll 12
                for (int r = 0; r < kRows; r++) {
                    const VecF weight = splat(-static_cast<float>(group_sums[r]));
                    sums[r][0] = fma(weight, o0, sums[r][0]);
                    sums[r][1] = fma(weight, o1, sums[r][1]);
                }
            }
            panel += layout.group_bytes;
        }
        if (!is_one_group && has_outliers) {
            VecF in_memory[kRows][2];  // no pointer to `sums` exists, so they can be registers
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                in_memory[r][0] = sums[r][0];
                in_memory[r][1] = sums[r][1];
            }
            add_outliers<kBits, kZeroAt, false>(
                layout, tile, kRows, first_group, table, reinterpret_cast<float*>(in_memory));
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                sums[r][0] = in_memory[r][0];
                sums[r][1] = in_memory[r][1];
            }
        }
    }
};

// -- results ----------------------------------------------------------------------------------------------------------

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

using TileFunction = void (*)(
    const Call&, const PanelLayout&, const Rows&, const Tile&, int64_t panel, const Fetch& fetch);

template <typename Format, int kRows>
void compute_tile(
    const Call& call, const PanelLayout& layout, const Rows& rows, const Tile& tile, int64_t panel, const Fetch& fetch) {
    const int64_t units_per_row = call.weight.in_features * (call.weight.bits <= 8 ? 8 : call.weight.bits) / 32;
    Rows in_tile{rows.units + tile.first * units_per_row, nullptr, nullptr, nullptr, nullptr};
    if (call.weight.bits <= 8) {
        in_tile.group_sums = rows.group_sums + tile.first * layout.num_groups;
        in_tile.scales = rows.scales + tile.first;
        in_tile.num_outliers = rows.num_outliers + tile.first;
        in_tile.outliers = rows.outliers + tile.first * kMostOutliers;
    }
    VecF sums[kRows][2];
    Format::template multiply<kRows>(
        call, layout, in_tile, static_cast<const char*>(call.weight.packed) + panel * layout.panel_bytes, fetch, sums);
    finish<kRows>(call, in_tile.scales, tile.first, panel, sums);
}

template <typename Format, size_t... kIndex>
TileFunction tile_function(int64_t num_rows, std::index_sequence<kIndex...>) {
    static constexpr TileFunction functions[] = {compute_tile<Format, kIndex + 1>...};
    return functions[num_rows - 1];
}

TileFunction tile_function(const LinearWeight& weight, int64_t num_rows) {
    constexpr std::make_index_sequence<kTileRows> sizes;
    if (weight.bits == 32) return tile_function<Plain<float>>(num_rows, sizes);
    if (weight.bits == 16) return tile_function<Plain<bf16>>(num_rows, sizes);
    if (weight.bits == 8)
        return weight.has_offsets ? tile_function<Grouped<8, Zero::kOffset>>(num_rows, sizes)
                                  : tile_function<Grouped<8, Zero::kMiddle>>(num_rows, sizes);
    if (weight.has_table) return tile_function<Grouped<4, Zero::kTable>>(num_rows, sizes);
    return weight.has_offsets ? tile_function<Grouped<4, Zero::kOffset>>(num_rows, sizes)
                              : tile_function<Grouped<4, Zero::kMiddle>>(num_rows, sizes);
}

// -- rows -------------------------------------------------------------------------------------------------------------

void arrange_row(const uint32_t* from, int64_t num_units, int64_t step, uint32_t* to) {
    for (int64_t i = 0; i < num_units; i++) to[i * step] = from[i];
}

PlacedOutlier place(const LinearWeight& weight, const PanelLayout& layout, const Outlier& outlier, float scale) {
    const uint32_t feature = outlier.feature, group_size = weight.group_size;
    const uint32_t group = layout.num_groups == 1 ? 0 : feature / group_size, unit = (feature - group * group_size) / 4;
    const bool is_paired = weight.bits == 4;  // two units are in one vector
    const int32_t start = static_cast<int32_t>(group * layout.group_bytes);
    const int32_t vector = static_cast<int32_t>((is_paired ? unit / 2 : unit) * kPanel * sizeof(uint32_t));
    const int32_t first_bit = static_cast<int32_t>(feature % 4 * 8 + (is_paired ? unit % 2 * 4 : 0));
    return {start + vector, start + static_cast<int32_t>(layout.weight_bytes), first_bit, outlier.value / scale};
}

template <typename T>
T* at_least(std::vector<T>& memory, int64_t count) {
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
    return memory.data();
}

int64_t units_per_row(const LinearWeight& weight) { return weight.in_features * (weight.bits <= 8 ? 8 : weight.bits) / 32; }

}  // namespace

void RowMemory::reserve(int64_t num_rows, const LinearWeight* weights, int64_t num_weights) {
    units_per_row_ = groups_per_row_ = 0;
    for (const LinearWeight* weight = weights; weight < weights + num_weights; weight++) {
        units_per_row_ = std::max(units_per_row_, units_per_row(*weight));
        if (weight->bits <= 8) groups_per_row_ = std::max(groups_per_row_, PanelLayout(*weight).num_groups);
    }
    at_least(units_, num_rows * units_per_row_);
    if (groups_per_row_ == 0) return;
    at_least(group_sums_, num_rows * groups_per_row_);
    at_least(scales_, num_rows);
    at_least(num_outliers_, num_rows);
    at_least(outliers_, num_rows * kMostOutliers);
}

Rows RowMemory::from(int64_t row) {
    return {
        units_.data() + row * units_per_row_, group_sums_.data() + row * groups_per_row_, scales_.data() + row,
        num_outliers_.data() + row, outliers_.data() + row * kMostOutliers};
}

Product::Product(const Call& call, const Rows& memory)
    : call_(call),
      layout_(call.weight),
      tiling_(call.num_rows, call.weight.bits <= 8 && layout_.num_groups > 1 ? kGroupedTileRows : kTileRows),
      rows_(memory),
      is_arranged_(call.weight.bits > 8 && call.num_rows == 1) {
    if (is_arranged_) {
        const int64_t row = call.x_rows == nullptr ? 0 : *call.x_rows;
        rows_.units = reinterpret_cast<uint32_t*>(const_cast<char*>(call.x + row * call.x_stride));  // which is only read
    }
    // With many rows, a task is a part of the tiles and a part of the panels, so that both parts stay in the cache.
    const int64_t tile_bytes = (tiling_.base + 1) * units_per_row(call.weight) * static_cast<int64_t>(sizeof(uint32_t));
    tiles_at_once_ = std::max<int64_t>(1, kCacheShare / tile_bytes);
    num_row_cuts_ = (tiling_.num_tiles + tiles_at_once_ - 1) / tiles_at_once_;
    panels_at_once_ = std::max<int64_t>(1, kCacheShare / layout_.panel_bytes);
    num_tasks_ = num_row_cuts_ == 1 ? layout_.num_panels
                                    : num_row_cuts_ * ((layout_.num_panels + panels_at_once_ - 1) / panels_at_once_);
}

void Product::arrange(int64_t row) const {
    const LinearWeight& weight = call_.weight;
    const Tile tile = tiling_.of_row(row);
    const int64_t in_tile = row - tile.first;
    const char* from = call_.x + (call_.x_rows == nullptr ? row : call_.x_rows[row]) * call_.x_stride;
    uint32_t* units = rows_.units + tile.first * units_per_row(weight) + in_tile;
    if (weight.bits > 8) return arrange_row(reinterpret_cast<const uint32_t*>(from), units_per_row(weight), tile.count, units);
    int32_t* sums = rows_.group_sums + tile.first * layout_.num_groups + in_tile;
    Outlier outliers[kMostOutliers];
    const auto quantize = [&](const auto* x) {
        const int64_t size = weight.in_features;
        return quantize_row(x, size, weight.group_size, outlier_factor(size, weight.bits), tile.count, units, sums, outliers);
    };
    const QuantizedRow quantized = call_.x_dtype == kFloat32 ? quantize(reinterpret_cast<const float*>(from))
                                                             : quantize(reinterpret_cast<const bf16*>(from));
    rows_.scales[row] = quantized.scale;
    rows_.num_outliers[row] = quantized.num_outliers;
    for (int32_t i = 0; i < quantized.num_outliers; i++)
        rows_.outliers[row * kMostOutliers + i] = place(weight, layout_, outliers[i], quantized.scale);
}

void Product::compute(int64_t first_task, int64_t end_task) const {
    if (num_row_cuts_ == 1) return multiply(0, tiling_.num_tiles, first_task, end_task);
    for (int64_t task = first_task; task < end_task; task++) {
        const int64_t first = task / num_row_cuts_ * panels_at_once_, first_tile = task % num_row_cuts_ * tiles_at_once_;
        multiply(
            first_tile, std::min(tiling_.num_tiles, first_tile + tiles_at_once_), first,
            std::min(layout_.num_panels, first + panels_at_once_));
    }
}

// Multiplies the tiles [first_tile, end_tile) with the panels [first, end), and prefetches the next panel meanwhile.
void Product::multiply(int64_t first_tile, int64_t end_tile, int64_t first, int64_t end) const {
    const char* weights = static_cast<const char*>(call_.weight.packed);
    for (int64_t panel = first; panel < end; panel++) {
        const char* at = weights + panel * layout_.panel_bytes;
        // one tile prefetches its own panel, some lines ahead; several tiles share the prefetch of the next panel
        const int64_t num_tiles = end_tile - first_tile;
        const char* ahead = num_tiles == 1 ? at + kAhead : panel + 1 < end ? at + layout_.panel_bytes : at;
        for (int64_t i = 0; i < num_tiles; i++) {
            const Tile tile = tiling_.at(first_tile + i);
            const Fetch fetch{ahead + i * layout_.panel_bytes / num_tiles, static_cast<int64_t>(kPanel * sizeof(uint32_t)) / num_tiles};
            tile_function(call_.weight, tile.count)(call_, layout_, rows_, tile, panel, fetch);
        }
    }
}

namespace {

void run(const Call& call) {
    static thread_local RowMemory memory;  // the product has pointers to it, so that all threads use the caller's
    memory.reserve(call.num_rows, &call.weight, 1);
    const Product product(call, memory.from(0));
    const bool is_shared = product.num_multiplications() >= kParallelWork;
    if (product.needs_arranging())
        share_each(call.num_rows, is_shared && call.num_rows > 1, [&](int64_t row) { product.arrange(row); });
    // a range is several neighbouring panels, one stream of memory
    const int64_t most = product.is_stream() ? product.num_tasks() : 1;
    share(product.num_tasks(), is_shared, most, [&](int64_t first, int64_t end) { product.compute(first, end); });
}

}  // namespace

extern "C" void inflight_linear(
    const void* x, int64_t x_stride, int32_t x_dtype, void* out, int64_t out_stride, int32_t out_dtype, int64_t num_rows,
    const LinearWeight* weight) {
    const int64_t element = x_dtype == kFloat32 ? sizeof(float) : sizeof(bf16);
    if (num_rows > 0)
        run(Call{
            static_cast<const char*>(x), x_stride * element, x_dtype, static_cast<char*>(out), out_stride, out_dtype, num_rows,
            *weight});
}

extern "C" void inflight_linear_of_heads(
    const void* x, int64_t x_stride, int64_t x_head_stride, void* out, int64_t out_stride, int64_t out_head_stride, int32_t dtype,
    int64_t num_rows, int64_t num_heads, const LinearWeight* weights) {
    const int64_t element = dtype == kFloat32 ? sizeof(float) : sizeof(bf16);
    share(num_heads, true, 1, [&](int64_t head, int64_t) {
        inflight_linear(
            static_cast<const char*>(x) + head * x_head_stride * element, x_stride, dtype,
            static_cast<char*>(out) + head * out_head_stride * element, out_stride, dtype, num_rows, weights + head);
    });
}
