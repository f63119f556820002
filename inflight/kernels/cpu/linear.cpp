// Linear layers: rows of activations times a packed weight (linear.h) of bfloat16, float, or integers of 8 or 4 bits.
//
// First the rows are copied into tiles of up to kTileRows rows, where the same unit (32 bits) of all rows is side by side. (A
// single row of floats stays where it is.) For integer weights the rows are also quantised (quantize_row.h): to integers with one
// scale per row, and a few outliers, which stay floats and are multiplied one by one. Then each thread multiplies a panel of the
// weight (a part of its output features) with all tiles, while the panel is in the cache. Sums stay in registers over all input
// features.
//
// Whatever the number of rows or threads, an output is one sum over the input features from first to last, and then over the
// row's outliers. So a row's result is the same bit for bit, whatever the other rows are. Where the processor has AMX, bfloat16 is
// multiplied by its tiles instead, also for any number of rows (linear_tiles.h).

#include <algorithm>
#include <utility>
#include <vector>

#include "linear_formats.h"
#include "linear_product.h"
#include "linear_results.h"
#include "linear_tiles.h"
#include "quantize_row.h"
#include "threads.h"

namespace {

constexpr int kTileRows = kRowsOfSums;             // rows of a tile: each needs two registers for its sums
constexpr int kGroupedTileRows = kRowsOfSums / 2;  // the same if rows have several groups, whose sums need registers, too
constexpr int64_t kCacheShare = (kHasTiles ? 768 : 256) << 10;  // bytes of a core's cache for weights, and as many for rows

int64_t units_per_row(const LinearWeight& weight) { return weight.in_features * (weight.bits <= 8 ? 8 : weight.bits) / 32; }

using TileFunction = void (*)(
    const Call&, const PanelLayout&, const Rows&, const Tile&, int64_t panel, const Fetch& fetch);

template <typename Format, int kRows>
void compute_tile(
    const Call& call, const PanelLayout& layout, const Rows& rows, const Tile& tile, int64_t panel, const Fetch& fetch) {
    const Rows in_tile = rows_of(call, layout, rows, tile, units_per_row(call.weight));
    alignas(64) float sums[kRows * kPanel];
    Format::template multiply<kRows>(
        call, layout, in_tile, static_cast<const char*>(call.weight.packed) + panel * layout.panel_bytes, fetch, sums);
    finish(call, in_tile.scales, tile.first, kRows, panel, sums);
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

int64_t most_rows(const LinearWeight& weight) {
    return weight.bits <= 8 && weight.group_size < weight.in_features ? kGroupedTileRows : kTileRows;
}

}  // namespace

void RowMemory::reserve(int64_t num_rows, const LinearWeight* weights, int64_t num_weights) {
    units_per_row_ = groups_per_row_ = 0;
    for (const LinearWeight* weight = weights; weight < weights + num_weights; weight++) {
        units_per_row_ = std::max(units_per_row_, units_per_row(*weight));
        if (uses_tiles(*weight, num_rows)) units_per_row_ = std::max(units_per_row_, units_in_block(*weight));
        if (weight->bits <= 8) groups_per_row_ = std::max(groups_per_row_, PanelLayout(*weight).num_groups);
    }
    units_per_row_ = (units_per_row_ + kTileUnits - 1) / kTileUnits * kTileUnits;
    at_least(units_, num_rows * units_per_row_ / kTileUnits);
    if (groups_per_row_ == 0) return;
    at_least(group_sums_, num_rows * groups_per_row_);
    at_least(scales_, num_rows);
    at_least(num_outliers_, num_rows);
    at_least(outliers_, num_rows * kMostOutliers);
}

Rows RowMemory::from(int64_t row) {
    return {
        units_.data()->units + row * units_per_row_, group_sums_.data() + row * groups_per_row_, scales_.data() + row,
        num_outliers_.data() + row, outliers_.data() + row * kMostOutliers};
}

Product::Product(const Call& call, const Rows& memory)
    : call_(call),
      layout_(call.weight),
      uses_tiles_(uses_tiles(call.weight, call.num_rows)),
      tiling_(call.num_rows, uses_tiles_ ? kBlockRows : most_rows(call.weight)),
      row_units_(uses_tiles_ ? units_in_block(call.weight) : units_per_row(call.weight)),
      rows_(memory),
      is_arranged_(call.weight.bits > 8 && call.num_rows == 1 && row_units_ == units_per_row(call.weight)) {
    if (is_arranged_) {
        const int64_t row = call.x_rows == nullptr ? 0 : *call.x_rows;
        rows_.units = reinterpret_cast<uint32_t*>(const_cast<char*>(call.x + row * call.x_stride));  // which is only read
    }
    // With many rows, a task is a part of the tiles and a part of the panels, so that both parts stay in the cache.
    const int64_t tile_bytes = (tiling_.base + 1) * row_units_ * static_cast<int64_t>(sizeof(uint32_t));
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
    uint32_t* const arranged = rows_.units + tile.first * row_units_;
    if (weight.bits > 8) {
        const uint32_t* units = reinterpret_cast<const uint32_t*>(from);
        if constexpr (kHasTiles) {
            if (uses_tiles_) return arrange_in_block(units, weight, tile, in_tile, arranged);
        }
        return arrange_row(units, row_units_, tile.count, arranged + in_tile);
    }
    static thread_local std::vector<uint32_t> memory;
    uint32_t* const units = uses_tiles_ ? at_least(memory, units_per_row(weight)) : arranged + in_tile;
    const int64_t step = uses_tiles_ ? 1 : tile.count;
    int32_t* sums = rows_.group_sums + tile.first * layout_.num_groups + in_tile;
    Outlier outliers[kMostOutliers];
    const auto quantize = [&](const auto* x) {
        const int64_t size = weight.in_features;
        const float factor = outlier_factor(size, weight.bits);
        return quantize_row(x, size, weight.group_size, factor, step, units, tile.count, sums, outliers);
    };
    const QuantizedRow quantized = call_.x_dtype == kFloat32 ? quantize(reinterpret_cast<const float*>(from))
                                                             : quantize(reinterpret_cast<const bf16*>(from));
    if constexpr (kHasTiles) {
        if (uses_tiles_) arrange_in_block(units, weight, tile, in_tile, arranged);
    }
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
    if constexpr (kHasTiles) {
        if (uses_tiles_) return multiply_by_tiles(call_, layout_, rows_, tiling_, first_tile, end_tile, first, end);
    }
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
