// Products of linear layers by AMX. See linear_tiles.h.

#include "linear_tiles.h"

#include <type_traits>
#include <vector>

#include "linear_formats.h"
#include "linear_results.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)

namespace {

constexpr int64_t kUnitBytes = sizeof(uint32_t);
constexpr int64_t kTileRowBytes = kTileUnits * kUnitBytes;               // one row of a tile
constexpr int64_t kTileRows = 16;                                        // the most rows of a tile
constexpr int64_t kPanelRowBytes = kPanel * kUnitBytes;                  // from one unit of a panel to the next
constexpr int64_t kStepBytes = kTileUnits * kPanelRowBytes;              // of a panel: the weights of one step

// The tile registers: four sums (of the first and the second tile of rows, times the first and the second vector of the panel), two
// tiles of rows and two of weights. The intrinsics need the numbers as literals.
#define SUM_00 0
#define SUM_01 1
#define SUM_10 2
#define SUM_11 3
#define ROWS_0 4
#define ROWS_1 5
#define WEIGHTS_0 6
#define WEIGHTS_1 7

// GCC's intrinsics do not tell the compiler which memory they read. So this tells it that all that was written to `memory`, and to any
// memory that others can see, may be read now.
inline void complete_stores(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// Sets the shapes of this thread's tile registers for blocks of some number of rows. At its end the registers are released, so that the
// operating system need not save them.
class TileShapes {
  public:
    ~TileShapes() {
        if (num_rows_ != 0) _tile_release();
    }
    void set(int64_t num_rows) {
        if (num_rows == num_rows_) return;
        num_rows_ = num_rows;
        const uint8_t first = static_cast<uint8_t>(std::min(num_rows, kTileRows));
        const uint8_t second = static_cast<uint8_t>(std::max<int64_t>(1, num_rows - kTileRows));
        Shapes shapes;
        for (const int sum : {SUM_00, SUM_01, ROWS_0}) shapes.num_rows[sum] = first;
        for (const int sum : {SUM_10, SUM_11, ROWS_1}) shapes.num_rows[sum] = second;
        for (const int weights : {WEIGHTS_0, WEIGHTS_1}) shapes.num_rows[weights] = kTileUnits;
        for (int tile = 0; tile < 8; tile++) shapes.row_bytes[tile] = kTileRowBytes;
        complete_stores(&shapes);
        _tile_loadconfig(&shapes);
    }

  private:
    struct alignas(64) Shapes {  // as the instruction wants them
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t num_rows[16] = {};
    };
    int64_t num_rows_ = 0;
};

// Adds the products of two tiles to a sum: of bfloat16, or of signed bytes and unsigned bytes.
#define ADD_PRODUCTS(sum, rows, weights)                       \
    if constexpr (kIsInteger) _tile_dpbsud(sum, rows, weights); \
    else _tile_dpbf16ps(sum, rows, weights)

struct Prefetch {  // memory that is prefetched meanwhile: `bytes` with each step
    const char* at;
    int64_t bytes;

    void next() {
        for (int64_t line = 0; line < bytes; line += kLine) __builtin_prefetch(at + line);
        at += bytes;
    }
};

template <bool kIsInteger, bool kHasSecond>
inline void add_steps(const char* rows, int64_t rows_step, const char* weights, int64_t num_steps, Prefetch& prefetch) {
    for (int64_t step = 0; step < num_steps; step++, rows += rows_step, weights += kStepBytes) {
        prefetch.next();
        _tile_loadd(ROWS_0, rows, kTileRowBytes);
        _tile_loadd(WEIGHTS_0, weights, kPanelRowBytes);
        ADD_PRODUCTS(SUM_00, ROWS_0, WEIGHTS_0);
        _tile_loadd(WEIGHTS_1, weights + kTileRowBytes, kPanelRowBytes);
        ADD_PRODUCTS(SUM_01, ROWS_0, WEIGHTS_1);
        if constexpr (kHasSecond) {
            _tile_loadd(ROWS_1, rows + kTileRows * kTileRowBytes, kTileRowBytes);
            ADD_PRODUCTS(SUM_10, ROWS_1, WEIGHTS_0);
            ADD_PRODUCTS(SUM_11, ROWS_1, WEIGHTS_1);
        }
    }
}

template <typename T>
struct alignas(64) Sums {  // of a block and a panel
    T of[kBlockRows][kPanel];
};

// The sums of the products of some steps: float of bfloat16, int32 of bytes.
template <typename T>
void sum_steps(int64_t num_rows, const char* rows, const char* weights, int64_t num_steps, Prefetch& prefetch, Sums<T>& sums) {
    constexpr bool kIsInteger = std::is_same_v<T, int32_t>;
    const int64_t rows_step = num_rows * kTileRowBytes;
    complete_stores(weights);
    _tile_zero(SUM_00);
    _tile_zero(SUM_01);
    if (num_rows > kTileRows) {
        _tile_zero(SUM_10);
        _tile_zero(SUM_11);
        add_steps<kIsInteger, true>(rows, rows_step, weights, num_steps, prefetch);
        _tile_stored(SUM_10, sums.of[kTileRows], kPanelRowBytes);
        _tile_stored(SUM_11, sums.of[kTileRows] + kLanes, kPanelRowBytes);
    } else {
        add_steps<kIsInteger, false>(rows, rows_step, weights, num_steps, prefetch);
    }
    _tile_stored(SUM_00, sums.of[0], kPanelRowBytes);
    _tile_stored(SUM_01, sums.of[0] + kLanes, kPanelRowBytes);
}

// -- weights in whole tiles -------------------------------------------------------------------------------------------

struct Weights {  // of a panel: for each group, its tiles
    const char* tiles;
    int64_t group_bytes;  // from the tiles of one group to those of the next
};

bool has_whole_tiles(const LinearWeight& weight) { return weight.bits != 4 && units_per_group(weight) % kTileUnits == 0; }

// Writes 4 bits as bytes.
void unpack(const LinearWeight& weight, const char* from, int64_t num_units, char* to) {
    const VecU table = load_table(weight.table);
    for (int64_t unit = 0; unit < num_units; unit += 2, from += kPanelRowBytes, to += 2 * kPanelRowBytes)
        for (int64_t vector = 0; vector < kPanelRowBytes; vector += kTileRowBytes) {
            const VecU both = load_bytes(from + vector), low = low_nibbles(both), high = high_nibbles(both);
            store_units(reinterpret_cast<uint32_t*>(to + vector), weight.has_table ? look_up(table, low) : low);
            store_units(
                reinterpret_cast<uint32_t*>(to + kPanelRowBytes + vector), weight.has_table ? look_up(table, high) : high);
        }
}

// The tiles of a panel: the panel itself, or a copy of bytes with zeros behind the last unit of a group. A thread has one copy.
Weights whole_tiles(const LinearWeight& weight, const PanelLayout& layout, const char* panel) {
    if (has_whole_tiles(weight)) return {panel, layout.group_bytes};
    struct alignas(64) Step {
        char bytes[kStepBytes];
    };
    static thread_local std::vector<Step> memory;
    const int64_t steps = steps_per_group(weight), num_units = units_per_group(weight);
    if (static_cast<int64_t>(memory.size()) < layout.num_groups * steps) memory.resize(layout.num_groups * steps);
    char* to = memory.data()->bytes;
    for (int64_t group = 0; group < layout.num_groups; group++, to += steps * kStepBytes, panel += layout.group_bytes) {
        if (weight.bits == 4)
            unpack(weight, panel, num_units, to);
        else
            std::memcpy(to, panel, num_units * kPanelRowBytes);
        std::memset(to + num_units * kPanelRowBytes, 0, steps * kStepBytes - num_units * kPanelRowBytes);
    }
    return {memory.data()->bytes, steps * kStepBytes};
}

// -- formats ----------------------------------------------------------------------------------------------------------

struct Part {  // a block and a panel
    const Call& call;
    const PanelLayout& layout;
    Rows rows;  // of the block
    int64_t num_rows;
    const char* panel;
    Weights weights;
};

void multiply_bf16(const Part& part, Prefetch prefetch, Sums<float>& sums) {
    const char* rows = reinterpret_cast<const char*>(part.rows.units);
    sum_steps(part.num_rows, rows, part.weights.tiles, steps_per_group(part.call.weight), prefetch, sums);
}

// Computes the sums of `Grouped` in linear_formats.h, in the same order, so they are the same bit for bit.
template <int kBits, Zero kZeroAt>
void multiply_integers(const Part& part, Prefetch prefetch, Sums<float>& sums) {
    constexpr bool kHasOffsets = kZeroAt == Zero::kOffset;
    constexpr int kZero = kHasOffsets ? 0 : kZeroAt == Zero::kTable ? kTableZero : 1 << (kBits - 1);
    const PanelLayout& layout = part.layout;
    const int8_t* table = part.call.weight.table;
    const int64_t steps = steps_per_group(part.call.weight), num_rows = part.num_rows;
    const bool is_one_group = layout.num_groups == 1 && !kHasOffsets;
    bool has_outliers = false;
    for (int64_t row = 0; row < num_rows; row++) has_outliers |= part.rows.num_outliers[row] > 0;
    const char *rows = reinterpret_cast<const char*>(part.rows.units), *weights = part.weights.tiles;
    const char* scales = part.panel + layout.weight_bytes;
    const int32_t* group_sums = part.rows.group_sums;
    Sums<int32_t> integers;
    for (int64_t group = 0; group < layout.num_groups; group++) {
        sum_steps(num_rows, rows, weights, steps, prefetch, integers);
        Sums<float>& products = is_one_group ? sums : *reinterpret_cast<Sums<float>*>(&integers);
        for (int64_t row = 0; row < num_rows; row++)
            for (int lane = 0; lane < kPanel; lane += kLanes) {
                const VecI sum = load_bytes(integers.of[row] + lane);
                store(products.of[row] + lane, to_float(add(sum, splat_int(-kZero * group_sums[row]))));
            }
        if (is_one_group && has_outliers)
            add_outliers<kBits, kZeroAt, true>(layout, part.rows, num_rows, part.panel, table, products.of[0]);
        for (int lane = 0; lane < kPanel; lane += kLanes) {
            const VecF scale = load_scale(layout, scales, lane);
            const VecF offset = kHasOffsets ? load_scale(layout, scales, kPanel + lane) : zero();
            for (int64_t row = 0; row < num_rows; row++) {
                VecF sum = fma(load(products.of[row] + lane), scale, group == 0 ? zero() : load(sums.of[row] + lane));
                if constexpr (kHasOffsets) sum = fma(splat(-static_cast<float>(group_sums[row])), offset, sum);
                store(sums.of[row] + lane, sum);
            }
        }
        rows += steps * num_rows * kTileRowBytes;
        weights += part.weights.group_bytes;
        scales += layout.group_bytes;
        group_sums += num_rows;
    }
    if (!is_one_group && has_outliers)
        add_outliers<kBits, kZeroAt, false>(layout, part.rows, num_rows, part.panel, table, sums.of[0]);
}

using PartFunction = void (*)(const Part&, Prefetch, Sums<float>&);

PartFunction part_function(const LinearWeight& weight) {
    if (weight.bits == 16) return multiply_bf16;
    if (weight.bits == 8) return weight.has_offsets ? multiply_integers<8, Zero::kOffset> : multiply_integers<8, Zero::kMiddle>;
    if (weight.has_table) return multiply_integers<4, Zero::kTable>;
    return weight.has_offsets ? multiply_integers<4, Zero::kOffset> : multiply_integers<4, Zero::kMiddle>;
}

}  // namespace

void arrange_in_block(const uint32_t* units, const LinearWeight& weight, const Tile& block, int64_t row_in_block, uint32_t* to) {
    const int64_t num_units = units_per_group(weight), num_groups = weight.in_features / weight.group_size;
    to += row_in_block * kTileUnits;
    for (int64_t group = 0; group < num_groups; group++, units += num_units)
        for (int64_t first = 0; first < num_units; first += kTileUnits, to += block.count * kTileUnits) {
            const int64_t count = std::min<int64_t>(kTileUnits, num_units - first);
            if (count < kTileUnits) std::memset(to, 0, kTileRowBytes);
            std::memcpy(to, units + first, count * kUnitBytes);
        }
}

void multiply_by_tiles(
    const Call& call, const PanelLayout& layout, const Rows& rows, const Tiling& blocks, int64_t first_block, int64_t end_block,
    int64_t first, int64_t end) {
    const LinearWeight& weight = call.weight;
    const PartFunction multiply = part_function(weight);
    const int64_t row_units = units_in_block(weight), num_steps = row_units / kTileUnits, num_blocks = end_block - first_block;
    // one block prefetches its own panel, some lines ahead; several blocks share the prefetch of the next panel, and so does one
    // block whose panel is copied
    const bool is_own = num_blocks == 1 && has_whole_tiles(weight);
    const int64_t fetch_bytes = std::max<int64_t>(1, layout.panel_bytes / num_steps / num_blocks / kLine) * kLine;
    TileShapes shapes;
    Sums<float> sums;
    for (int64_t panel = first; panel < end; panel++) {
        const char* at = static_cast<const char*>(weight.packed) + panel * layout.panel_bytes;
        const char* ahead = is_own ? at + kAhead : panel + 1 < end ? at + layout.panel_bytes : at;
        const Weights weights = whole_tiles(weight, layout, at);
        for (int64_t i = 0; i < num_blocks; i++) {
            const Tile block = blocks.at(first_block + i);
            const Rows in_block = rows_of(call, layout, rows, block, row_units);
            shapes.set(block.count);
            multiply({call, layout, in_block, block.count, at, weights}, {ahead + i * num_steps * fetch_bytes, fetch_bytes}, sums);
            finish(call, in_block.scales, block.first, block.count, panel, sums.of[0]);
        }
    }
}

#endif
