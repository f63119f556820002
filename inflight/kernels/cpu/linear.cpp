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

#include "linear.h"
#include "quantize_row.h"
#include "threads.h"

namespace {

constexpr int kTileRows = kLanes == 16 ? 12 : 4;         // rows of a tile: each needs two registers for its sums
constexpr int kGroupedTileRows = kLanes == 16 ? 6 : 2;   // the same if rows have several groups, whose sums need registers, too
constexpr int64_t kParallelWork = 1 << 17;               // with fewer multiplications, one thread is faster
constexpr int64_t kCacheShare = 256 << 10;               // bytes of a core's cache for weights, and as many for rows
constexpr int kLine = 64;
constexpr int64_t kAhead = 4096;                         // how many bytes a prefetch is ahead of the computation

struct Call {
    const char* x;
    int64_t x_stride;  // bytes
    int32_t x_dtype;
    char* out;
    int64_t out_stride;  // elements
    int32_t out_dtype;
    int64_t num_rows;
    const LinearWeight& weight;
};

struct PlacedOutlier {  // an outlier of a row, with the place of its weights in a panel
    int32_t weights;    // bytes from the panel's beginning to the two vectors that hold them
    int32_t scales;     // and to their group's scales
    int32_t first_bit;  // of its weight in each unit of the vectors
    float value;        // relative to the row's scale
};

struct Rows {  // copied into tiles; a tile's part of an array begins where the rows before the tile end
    const uint32_t* units;  // [num_rows * units per row]; within a tile: [unit][row]
    // only if the weight is of integers
    const int32_t* group_sums;      // [num_rows * num_groups]; within a tile: [group][row]
    const float* scales;            // [num_rows]
    const int32_t* num_outliers;    // [num_rows]
    const PlacedOutlier* outliers;  // [num_rows][kMostOutliers]
};

struct Tile {
    int64_t first, count;  // rows
};

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

struct Tiling {
    int64_t num_tiles, base, longer;  // the first `longer` tiles have base + 1 rows

    Tiling(int64_t num_rows, int64_t most) {
        num_tiles = (num_rows + most - 1) / most;
        base = num_rows / num_tiles;
        longer = num_rows % num_tiles;
    }
    Tile at(int64_t i) const { return {i * base + std::min(i, longer), base + (i < longer)}; }
    Tile of_row(int64_t row) const {
        const int64_t in_longer = longer * (base + 1);
        return at(row < in_longer ? row / (base + 1) : longer + (row - in_longer) / base);
    }
};

// -- outliers ---------------------------------------------------------------------------------------------------------

inline VecF load_scale(const PanelLayout& layout, const char* scales, int i) {
    if (layout.scale_bytes == sizeof(float)) return load(reinterpret_cast<const float*>(scales) + i);
    return load(reinterpret_cast<const f16*>(scales) + i);
}

// The weights of an outlier in one vector of a panel. If the weight is one group, they are not multiplied by their scales.
template <int kBits, bool kHasOffsets, bool kIsOneGroup>
inline VecF weights_of(const PanelLayout& layout, const PlacedOutlier& outlier, const char* panel, int vector) {
    const VecU units = load_bytes(panel + outlier.weights + vector * kLanes * sizeof(uint32_t));
    const VecF values = to_float(bits_at<kBits>(units, outlier.first_bit, kHasOffsets ? 0 : 1 << (kBits - 1)));
    if constexpr (kIsOneGroup) return values;
    const char* scales = panel + outlier.scales;
    const VecF products = mul(values, load_scale(layout, scales, vector * kLanes));
    return kHasOffsets ? sub(products, load_scale(layout, scales, kPanel + vector * kLanes)) : products;
}

// Adds the products of a tile's outliers and one panel to `sums` [row][kPanel].
template <int kBits, bool kHasOffsets, bool kIsOneGroup>
__attribute__((noinline)) void add_outliers(
    const PanelLayout& layout, const Rows& tile, int64_t num_rows, const char* panel, float* sums) {
    constexpr auto weights = weights_of<kBits, kHasOffsets, kIsOneGroup>;
    for (int64_t row = 0; row < num_rows; row++) {
        const PlacedOutlier *outlier = tile.outliers + row * kMostOutliers, *const end = outlier + tile.num_outliers[row];
        if (outlier == end) continue;
        float* to = sums + row * kPanel;
        VecF first = load(to), second = load(to + kLanes);
        for (; outlier < end; outlier++) {
            const VecF value = splat(outlier->value);
            first = fma(weights(layout, *outlier, panel, 0), value, first);
            second = fma(weights(layout, *outlier, panel, 1), value, second);
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
template <int kBits, int kRows>
inline void add_group(const uint32_t* x, const char* panel, int64_t group_size, const Fetch& fetch, VecI (&out)[kRows][2]) {
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
            const VecU part0 = kBits == 8 ? w0 : unit == 0 ? low_nibbles(w0) : high_nibbles(w0);
            const VecU part1 = kBits == 8 ? w1 : unit == 0 ? low_nibbles(w1) : high_nibbles(w1);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; r++) {
                const VecU a = splat_unit(x[unit * kRows + r]);
                sums[r][0] = dot_bytes<kBits>(sums[r][0], part0, a);
                sums[r][1] = dot_bytes<kBits>(sums[r][1], part1, a);
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
template <int kBits, int kRows>
__attribute__((noinline)) void sum_only_group(
    const uint32_t* x, int32_t zero_point, const int32_t* group_sums, const char* panel, int64_t group_size, const Fetch& fetch,
    VecF (&out)[kRows][2]) {
    VecI sums[kRows][2];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++) sums[r][0] = sums[r][1] = splat_int(-zero_point * group_sums[r]);
    add_group<kBits, kRows>(x, panel, group_size, fetch, sums);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) out[r][j] = to_float(sums[r][j]);
}

template <int kBits, bool kHasOffsets>
struct Grouped {
    template <int kRows>
    static void multiply(
        const Call& call, const PanelLayout& layout, const Rows& tile, const char* const first_group, Fetch fetch,
        VecF (&sums)[kRows][2]) {
        constexpr int kZero = kHasOffsets ? 0 : 1 << (kBits - 1);
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
                sum_only_group<kBits, kRows>(x, kZero, group_sums, panel, group_size, fetch, products);
                if (is_one_group && has_outliers)
                    add_outliers<kBits, kHasOffsets, true>(layout, tile, kRows, panel, reinterpret_cast<float*>(products));
            } else {
                VecI in_group[kRows][2];
#pragma GCC unroll 12
                for (int r = 0; r < kRows; r++) in_group[r][0] = in_group[r][1] = splat_int(-kZero * group_sums[r]);
                add_group<kBits, kRows>(x, panel, group_size, fetch, in_group);
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
            add_outliers<kBits, kHasOffsets, false>(layout, tile, kRows, first_group, reinterpret_cast<float*>(in_memory));
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
        if (weight.gate != 0) {
            const int64_t column = panel * kLanes;
            const VecF gated = mul(weight.gate == 1 ? silu(a) : gelu(a), b);
            store_result(call, first_row + r, column, gated, weight.out_features / 2 - column);
        } else {
            const int64_t column = panel * kPanel;
            store_result(call, first_row + r, column, a, weight.out_features - column);
            store_result(call, first_row + r, column + kLanes, b, weight.out_features - column - kLanes);
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
        return weight.has_offsets ? tile_function<Grouped<8, true>>(num_rows, sizes)
                                  : tile_function<Grouped<8, false>>(num_rows, sizes);
    return weight.has_offsets ? tile_function<Grouped<4, true>>(num_rows, sizes)
                              : tile_function<Grouped<4, false>>(num_rows, sizes);
}

// -- rows -------------------------------------------------------------------------------------------------------------

void arrange_row(const uint32_t* from, int64_t num_units, int64_t step, uint32_t* to) {
    for (int64_t i = 0; i < num_units; i++) to[i * step] = from[i];
}

struct Memory {  // of the calling thread, kept from call to call
    std::vector<uint32_t> units;
    std::vector<int32_t> group_sums;
    std::vector<float> scales;
    std::vector<int32_t> num_outliers;
    std::vector<PlacedOutlier> outliers;
};

PlacedOutlier place(const LinearWeight& weight, const PanelLayout& layout, const Outlier& outlier, float scale) {
    const uint32_t feature = outlier.feature, group_size = weight.group_size;
    const uint32_t group = layout.num_groups == 1 ? 0 : feature / group_size, unit = (feature - group * group_size) / 4;
    const bool is_paired = weight.bits == 4;  // two units are in one vector
    const int32_t start = static_cast<int32_t>(group * layout.group_bytes);
    const int32_t vector = static_cast<int32_t>((is_paired ? unit / 2 : unit) * kPanel * sizeof(uint32_t));
    const int32_t first_bit = static_cast<int32_t>(feature % 4 * 8 + (is_paired ? unit % 2 * 4 : 0));
    return {start + vector, start + static_cast<int32_t>(layout.weight_bytes), first_bit, outlier.value / scale};
}

void arrange(const Call& call, const PanelLayout& layout, const Tiling& tiling, int64_t row, Memory& memory) {
    const LinearWeight& weight = call.weight;
    const Tile tile = tiling.of_row(row);
    const int64_t in_tile = row - tile.first;
    const char* from = call.x + row * call.x_stride;
    if (weight.bits > 8) {
        const int64_t num_units = weight.in_features * weight.bits / 32;
        arrange_row(
            reinterpret_cast<const uint32_t*>(from), num_units, tile.count, memory.units.data() + tile.first * num_units + in_tile);
        return;
    }
    uint32_t* units = memory.units.data() + tile.first * (weight.in_features / 4) + in_tile;
    int32_t* sums = memory.group_sums.data() + tile.first * layout.num_groups + in_tile;
    Outlier outliers[kMostOutliers];
    const auto quantize = [&](const auto* x) {
        const int64_t size = weight.in_features;
        return quantize_row(x, size, weight.group_size, outlier_factor(size, weight.bits), tile.count, units, sums, outliers);
    };
    const QuantizedRow quantized = call.x_dtype == kFloat32 ? quantize(reinterpret_cast<const float*>(from))
                                                            : quantize(reinterpret_cast<const bf16*>(from));
    memory.scales[row] = quantized.scale;
    memory.num_outliers[row] = quantized.num_outliers;
    for (int32_t i = 0; i < quantized.num_outliers; i++)
        memory.outliers[row * kMostOutliers + i] = place(weight, layout, outliers[i], quantized.scale);
}

template <typename T>
T* at_least(std::vector<T>& memory, int64_t count) {
    if (static_cast<int64_t>(memory.size()) < count) memory.resize(count);
    return memory.data();
}

// -- the work ---------------------------------------------------------------------------------------------------------

// Multiplies the tiles [first_tile, end_tile) with the panels [first, end), and prefetches the next panel meanwhile.
void multiply(
    const Call& call, const PanelLayout& layout, const Rows& rows, const Tiling& tiling, int64_t first_tile, int64_t end_tile,
    int64_t first, int64_t end) {
    const char* weights = static_cast<const char*>(call.weight.packed);
    for (int64_t panel = first; panel < end; panel++) {
        const char* at = weights + panel * layout.panel_bytes;
        // one tile prefetches its own panel, some lines ahead; several tiles share the prefetch of the next panel
        const int64_t num_tiles = end_tile - first_tile;
        const char* ahead = num_tiles == 1 ? at + kAhead : panel + 1 < end ? at + layout.panel_bytes : at;
        for (int64_t i = 0; i < num_tiles; i++) {
            const Tile tile = tiling.at(first_tile + i);
            const Fetch fetch{ahead + i * layout.panel_bytes / num_tiles, static_cast<int64_t>(kPanel * sizeof(uint32_t)) / num_tiles};
            tile_function(call.weight, tile.count)(call, layout, rows, tile, panel, fetch);
        }
    }
}

void run(const Call& call) {
    static thread_local Memory memory;  // thread-local; through references all threads use the caller's
    const LinearWeight& weight = call.weight;
    const PanelLayout layout(weight);
    const Tiling tiling(call.num_rows, weight.bits <= 8 && layout.num_groups > 1 ? kGroupedTileRows : kTileRows);
    const bool is_integer = weight.bits <= 8, is_arranged = !is_integer && call.num_rows == 1;
    const int64_t units_per_row = weight.in_features * (is_integer ? 8 : weight.bits) / 32;
    Rows rows{reinterpret_cast<const uint32_t*>(call.x), nullptr, nullptr, nullptr, nullptr};
    if (!is_arranged) rows.units = at_least(memory.units, call.num_rows * units_per_row);
    if (is_integer) {
        rows.group_sums = at_least(memory.group_sums, call.num_rows * layout.num_groups);
        rows.scales = at_least(memory.scales, call.num_rows);
        rows.num_outliers = at_least(memory.num_outliers, call.num_rows);
        rows.outliers = at_least(memory.outliers, call.num_rows * kMostOutliers);
    }
    Memory& shared = memory;
    const int64_t work = call.num_rows * weight.in_features * weight.out_features;
    const bool is_shared = work >= kParallelWork;
    // With many rows, a task is a part of the tiles and a part of the panels, so that both parts stay in the cache.
    const int64_t tile_bytes = (tiling.base + 1) * units_per_row * static_cast<int64_t>(sizeof(uint32_t));
    const int64_t tiles_at_once = std::max<int64_t>(1, kCacheShare / tile_bytes);
    const int64_t num_row_cuts = (tiling.num_tiles + tiles_at_once - 1) / tiles_at_once;
    const int64_t panels_at_once = std::max<int64_t>(1, kCacheShare / layout.panel_bytes);
    const int64_t num_tasks =
        num_row_cuts == 1 ? layout.num_panels : num_row_cuts * ((layout.num_panels + panels_at_once - 1) / panels_at_once);
    if (!is_arranged)
        share_each(call.num_rows, is_shared && call.num_rows > 1, [&](int64_t row) { arrange(call, layout, tiling, row, shared); });
    if (num_row_cuts == 1) {
        // a range is several neighbouring panels, one stream of memory
        share(num_tasks, is_shared, num_tasks, [&](int64_t first, int64_t end) {
            multiply(call, layout, rows, tiling, 0, tiling.num_tiles, first, end);
        });
    } else {
        share(num_tasks, is_shared, 1, [&](int64_t task, int64_t) {
            const int64_t first = task / num_row_cuts * panels_at_once, first_tile = task % num_row_cuts * tiles_at_once;
            multiply(
                call, layout, rows, tiling, first_tile, std::min(tiling.num_tiles, first_tile + tiles_at_once), first,
                std::min(layout.num_panels, first + panels_at_once));
        });
    }
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
