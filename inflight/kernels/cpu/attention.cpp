// Paged attention straight on the block arena, for any mix of prompts, chunks and single tokens.
//
// A layer's part of a block has a cell per key head, then a cell per value head. Cells are laid out so that every load is a
// full vector and no sum runs across lanes (a unit is one float or two bfloat16, see simd.h):
//
//     key cell    [head_dim in units][block_size]     a vector: one unit of the head, of neighbouring keys
//     value cell  [block_size in units][head_dim]     a vector: one unit of the keys, of neighbouring dimensions
//
// Work is cut into tiles of up to kTileRows query rows that share a key head (tokens of one request x heads of the group),
// taken by whichever thread is free. A tile goes over the keys in chunks: scores, softmax against the largest score so far,
// weighted sum of the values (online softmax, arXiv:1805.02867, arXiv:2205.14135). What does not change with the batch, the
// chunking of prompts or the number of threads: chunks and splits begin at fixed positions of the sequence, and splits are
// merged in order. So a row's result is the same bit for bit in whatever company it is computed.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels.h"
#include "simd.h"

namespace {

constexpr int kTileRows = 48;
constexpr int kChunkKeys = 128;
constexpr int kSplitKeys = 1024;        // several threads may share a sequence in pieces of so many keys
constexpr int kMinBlock = 16;           // block sizes are multiples of it
constexpr int kParallelWork = 1 << 15;  // query rows x keys below which one thread is faster
constexpr int kRowsAtOnce = 6;          // query rows whose sums are held in registers
constexpr int kRowsThatWait = 4;       // with so few, memory is slower than arithmetic: the next block is fetched ahead
constexpr int kVectorsAtOnce = kLanes == 16 ? 4 : 2;
constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Segment {  // tokens of one request that fall into one block
    int row, first_position, end_position;
};

struct Tile {
    int row, kv_head;
    int first, end;              // query rows: token * (heads per key head) + head
    int first_split, end_split;  // the keys that it goes over, in kSplitKeys
    int partial;                 // where its result waits to be merged; -1: it is the whole result
};

// Running softmax of one tile over some keys.
struct State {
    float* largest;  // [kTileRows]
    float* sum;      // [kTileRows]
    float* values;   // [kTileRows][head_dim]
};

template <typename T, int kRows, int kVectors>
inline void score(
    const uint32_t* const* query, const uint32_t* const* keys, int64_t key_step, int num_units, float scale, float* scores) {
    VecF sums[kRows][kVectors];
    for (int i = 0; i < kRows; i++)
        for (int j = 0; j < kVectors; j++) sums[i][j] = zero();
    for (int unit = 0; unit < num_units; unit++) {
        VecU k[kVectors];
        for (int j = 0; j < kVectors; j++) {
            k[j] = load_units(keys[j] + unit * key_step);
            if constexpr (kRows <= kRowsThatWait) __builtin_prefetch(keys[j + kVectors] + unit * key_step);
        }
        for (int i = 0; i < kRows; i++) {
            const VecU q = splat_unit(query[i][unit]);
            for (int j = 0; j < kVectors; j++) sums[i][j] = dot<T>(sums[i][j], q, k[j]);
        }
    }
    for (int i = 0; i < kRows; i++)
        for (int j = 0; j < kVectors; j++) store(scores + i * kChunkKeys + j * kLanes, mul(sums[i][j], splat(scale)));
}

template <typename T, int kRows, int kVectors>
inline void weigh(
    const uint32_t* weights, const uint32_t* const* blocks, int first_unit, int end_unit, int units_per_block, int head_dim,
    const float* factors, float* values) {
    VecF sums[kRows][kVectors];
    for (int i = 0; i < kRows; i++)
        for (int j = 0; j < kVectors; j++) sums[i][j] = mul(load(values + i * head_dim + j * kLanes), splat(factors[i]));
    for (int unit = first_unit; unit < end_unit;) {
        const int block = unit / units_per_block, end = std::min(end_unit, (block + 1) * units_per_block);
        const uint32_t* v = blocks[block] + static_cast<int64_t>(unit - block * units_per_block) * head_dim;
        const int64_t ahead = blocks[block + 1] - blocks[block];  // the same place in the next block
        for (; unit < end; unit++, v += head_dim) {
            VecU vectors[kVectors];
            for (int j = 0; j < kVectors; j++) {
                vectors[j] = load_units(v + j * kLanes);
                if constexpr (kRows <= kRowsThatWait) __builtin_prefetch(v + j * kLanes + ahead);
            }
            for (int i = 0; i < kRows; i++) {
                const VecU weight = splat_unit(weights[i * kChunkKeys + unit]);
                for (int j = 0; j < kVectors; j++) sums[i][j] = dot<T>(sums[i][j], weight, vectors[j]);
            }
        }
    }
    for (int i = 0; i < kRows; i++)
        for (int j = 0; j < kVectors; j++) store(values + i * head_dim + j * kLanes, sums[i][j]);
}

// Calls `work.template run<rows>(first row)` over all rows, kRowsAtOnce at a time; the rest in one smaller call.
template <typename Work, int kRows = kRowsAtOnce>
inline void in_groups_of_rows(const Work& work, int first, int num_rows) {
    for (; num_rows - first >= kRows; first += kRows) work.template run<kRows>(first);
    if constexpr (kRows > 1) {
        if (first < num_rows) in_groups_of_rows<Work, kRows - 1>(work, first, num_rows);
    }
}

template <typename T, int kVectors>
struct Scoring {
    const uint32_t* const* query;
    const uint32_t* const* keys;
    int64_t key_step;
    int num_units;
    float scale;
    float* scores;

    template <int kRows>
    void run(int row) const {
        score<T, kRows, kVectors>(query + row, keys, key_step, num_units, scale, scores + row * kChunkKeys);
    }
};

template <typename T, int kVectors>
struct Weighing {
    const uint32_t* weights;
    const uint32_t* const* blocks;
    int first_unit, end_unit, units_per_block, head_dim;
    const float* factors;
    float* values;

    template <int kRows>
    void run(int row) const {
        weigh<T, kRows, kVectors>(
            weights + row * kChunkKeys, blocks, first_unit, end_unit, units_per_block, head_dim, factors + row,
            values + row * head_dim);
    }
};

inline float exponential_of(float x) {
    alignas(64) float lanes[kLanes];
    store(lanes, exponential(splat(x)));
    return lanes[0];
}

// One row of scores of a chunk, of which it sees the keys [from, to): to weights, with `largest` and `sum` brought up to date.
// Returns what the values summed so far have to be multiplied with.
template <typename T>
float soften(const float* scores, T* weights, int first, int end, int from, int to, float& largest_score, float& sum_so_far) {
    VecF most = splat(kNever);
    for (int i = first; i < end; i += kLanes) {
        VecF x = load(scores + i);
        if (i < from || i + kLanes > to) x = keep(x, from - i, to - i, splat(kNever));
        most = max(most, x);
    }
    const float now = std::max(largest_score, largest(most));
    if (now == kNever) {
        for (int i = first; i < end; i += kLanes) store(weights + i, zero());
        return 1.0f;
    }
    VecF total = zero();
    for (int i = first; i < end; i += kLanes) {
        VecF x = exponential(sub(load(scores + i), splat(now)));
        if (i < from || i + kLanes > to) x = keep(x, from - i, to - i, zero());
        total = add(total, x);
        store(weights + i, x);
    }
    const float factor = now == largest_score ? 1.0f : exponential_of(largest_score - now);
    sum_so_far = sum_so_far * factor + sum(total);
    largest_score = now;
    return factor;
}

// Adds the keys and values behind `from` to those behind `into`. Into an empty state it is a copy, bit for bit.
void merge(const State& into, const State& from, int num_rows, int head_dim) {
    for (int row = 0; row < num_rows; row++) {
        const float now = std::max(into.largest[row], from.largest[row]);
        if (now == kNever) continue;
        const float a = exponential_of(into.largest[row] - now), b = exponential_of(from.largest[row] - now);
        float* x = into.values + row * head_dim;
        const float* y = from.values + row * head_dim;
        for (int d = 0; d < head_dim; d += kLanes) store(x + d, fma(load(y + d), splat(b), mul(load(x + d), splat(a))));
        into.sum[row] = into.sum[row] * a + from.sum[row] * b;
        into.largest[row] = now;
    }
}

template <typename T>
struct Attention {
    const char* query;  // bytes, as are the strides
    int64_t query_stride;
    const char* key;
    int64_t key_stride;
    const char* value;
    int64_t value_stride;
    T* out;
    char* cache;
    const AttentionStep& step;
    const HeadLayout& layout;
    float scale;

    static constexpr int kPerUnit = kElementsPerUnit<T>;

    int per_head() const { return layout.num_heads / layout.num_kv_heads; }
    int64_t cell_bytes() const { return static_cast<int64_t>(step.block_size) * layout.head_dim * sizeof(T); }
    const int32_t* table(int row) const { return step.block_table + static_cast<int64_t>(row) * step.table_stride; }

    uint32_t* cell(int block_id, int head) const {  // value heads come after key heads
        return reinterpret_cast<uint32_t*>(cache + block_id * layout.block_stride + head * cell_bytes());
    }

    // -- writing ---------------------------------------------------------------------------------------------------

    void write(const Segment& segment, int head) const {
        const int block = segment.first_position / step.block_size, block_id = table(segment.row)[block];
        const int first = segment.first_position - block * step.block_size;
        const int count = segment.end_position - segment.first_position;
        const int token =
            step.query_start_loc[segment.row] + segment.first_position - step.num_computed_tokens[segment.row];
        uint32_t* keys = cell(block_id, head);
        uint32_t* values = cell(block_id, layout.num_kv_heads + head);
        const int num_units = layout.head_dim / kPerUnit;
        for (int i = 0; i < count; i++) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(key + (token + i) * key_stride) + head * num_units;
            uint32_t* to = keys + first + i;
            for (int unit = 0; unit < num_units; unit++) to[static_cast<int64_t>(unit) * step.block_size] = from[unit];
        }
        write_values(values, first, count, value + token * value_stride + head * layout.head_dim * sizeof(T));
    }

    void write_values(uint32_t* cell, int first, int count, const char* from) const {
        const int size = layout.head_dim;
        if constexpr (kPerUnit == 1) {
            for (int i = 0; i < count; i++)
                std::memcpy(cell + static_cast<int64_t>(first + i) * size, from + i * value_stride, size * sizeof(T));
        } else {
            for (int i = 0; i < count;) {
                uint32_t* to = cell + static_cast<int64_t>((first + i) / 2) * size;
                const T* a = reinterpret_cast<const T*>(from + i * value_stride);
                if ((first + i) % 2 == 1) {
                    for (int d = 0; d < size; d += kLanes)
                        store_units(to + d, replace_second(load_units(to + d), a + d));
                    i++;
                    continue;
                }
                const bool both = i + 1 < count;  // else the next one's place, which this one's unit shares, is zero until it comes
                const T* b = reinterpret_cast<const T*>(from + (i + 1) * value_stride);
                alignas(64) static const T nothing[kLanes] = {};
                for (int d = 0; d < size; d += kLanes) store_units(to + d, pair_up(a + d, both ? b + d : nothing));
                i += 2;
            }
        }
    }

    // -- attending -------------------------------------------------------------------------------------------------

    int position(int row, int query_row) const { return step.num_computed_tokens[row] + query_row / per_head(); }

    int first_key(int row, int query_row) const {
        return step.sliding_window == 0 ? 0 : std::max(0, position(row, query_row) - step.sliding_window + 1);
    }

    // The tile's rows over the keys [begin, end), which lie in one chunk.
    void attend_chunk(const Tile& tile, int begin, int end, const uint32_t* const* query, const State& state) const {
        alignas(64) static thread_local float scores[kTileRows * kChunkKeys];
        alignas(64) static thread_local uint32_t weights[kTileRows * kChunkKeys];
        const int num_rows = tile.end - tile.first;
        const int origin = begin / kChunkKeys * kChunkKeys;  // indices below count from here
        // a block that no row sees is not touched: its id may be stale
        const int first = std::max(begin / step.block_size * step.block_size, origin) - origin;
        const int padded_end = (end - origin + kLanes - 1) / kLanes * kLanes;
        const int32_t* blocks = table(tile.row);
        const uint32_t* keys[kChunkKeys / kLanes + kVectorsAtOnce];  // then the first value cells, to be fetched ahead
        for (int i = first; i < padded_end; i += kLanes) {
            const int block = (origin + i) / step.block_size;
            keys[i / kLanes] = cell(blocks[block], tile.kv_head) + (origin + i - block * step.block_size);
        }
        for (int j = 0; j < kVectorsAtOnce; j++)
            keys[padded_end / kLanes + j] = cell(
                blocks[std::min((origin + first) / step.block_size + j, (end - 1) / step.block_size)],
                layout.num_kv_heads + tile.kv_head);
        score_all(query, keys, first, padded_end, num_rows, scores);

        float factors[kTileRows];
        for (int row = 0; row < num_rows; row++) {
            const int from = first_key(tile.row, tile.first + row) - origin;
            const int to = std::min(position(tile.row, tile.first + row) + 1, end) - origin;
            factors[row] = soften(
                scores + row * kChunkKeys, reinterpret_cast<T*>(weights + row * kChunkKeys), first, padded_end, from, to,
                state.largest[row], state.sum[row]);
        }
        weigh_all(tile, origin, first, end - origin, weights, factors, state.values);
    }

    void score_all(
        const uint32_t* const* query, const uint32_t* const* keys, int first, int end, int num_rows, float* scores) const {
        const int num_units = layout.head_dim / kPerUnit;
        int i = first;
        for (; i + kVectorsAtOnce * kLanes <= end; i += kVectorsAtOnce * kLanes)
            in_groups_of_rows(
                Scoring<T, kVectorsAtOnce>{query, keys + i / kLanes, step.block_size, num_units, scale, scores + i}, 0,
                num_rows);
        for (; i < end; i += kLanes)
            in_groups_of_rows(
                Scoring<T, 1>{query, keys + i / kLanes, step.block_size, num_units, scale, scores + i}, 0, num_rows);
    }

    void weigh_all(
        const Tile& tile, int origin, int first, int end, const uint32_t* weights, const float* factors, float* values) const {
        // blocks may be larger than a chunk: `shift` is where the chunk begins in its first block
        const int first_block = origin / step.block_size, shift = origin - first_block * step.block_size;
        const int num_blocks = (shift + end + step.block_size - 1) / step.block_size;
        const uint32_t* blocks[kChunkKeys / kMinBlock + 2];
        const int num_rows = tile.end - tile.first, size = layout.head_dim;
        for (int d = 0; d < size;) {
            const bool wide = d + kVectorsAtOnce * kLanes <= size;
            for (int i = (shift + first) / step.block_size; i < num_blocks; i++)
                blocks[i] = cell(table(tile.row)[first_block + i], layout.num_kv_heads + tile.kv_head) + d;
            blocks[num_blocks] = blocks[num_blocks - 1];
            // weights are indexed from the chunk's origin, blocks from the first block's: shift the weights' base
            const uint32_t* base = weights - shift / kPerUnit;
            const int from = (shift + first) / kPerUnit, to = (shift + end + kPerUnit - 1) / kPerUnit;
            const int per_block = step.block_size / kPerUnit;
            if (wide)
                in_groups_of_rows(
                    Weighing<T, kVectorsAtOnce>{base, blocks, from, to, per_block, size, factors, values + d}, 0, num_rows);
            else
                in_groups_of_rows(Weighing<T, 1>{base, blocks, from, to, per_block, size, factors, values + d}, 0, num_rows);
            d += wide ? kVectorsAtOnce * kLanes : kLanes;
        }
    }

    void clear(const State& state, int num_rows) const {
        std::fill_n(state.largest, num_rows, kNever);
        std::fill_n(state.sum, num_rows, 0.0f);
        std::fill_n(state.values, num_rows * layout.head_dim, 0.0f);
    }

    // `state`: all keys of the tile's splits. `work`: of the same size, overwritten.
    void attend(const Tile& tile, const State& state, const State& work) const {
        const uint32_t* rows[kTileRows];
        const int num_rows = tile.end - tile.first;
        for (int i = 0; i < num_rows; i++) {
            const int token = step.query_start_loc[tile.row] + (tile.first + i) / per_head();
            const int head = tile.kv_head * per_head() + (tile.first + i) % per_head();
            rows[i] = reinterpret_cast<const uint32_t*>(query + token * query_stride + head * layout.head_dim * sizeof(T));
        }
        const int begin = first_key(tile.row, tile.first), end = position(tile.row, tile.end - 1) + 1;
        clear(state, num_rows);
        for (int split = tile.first_split; split < tile.end_split; split++) {
            const State& into = split == tile.first_split ? state : work;
            if (split != tile.first_split) clear(work, num_rows);
            int key = std::max(begin, split * kSplitKeys);
            const int last = std::min(end, (split + 1) * kSplitKeys);
            while (key < last) {
                const int chunk_end = std::min(last, (key / kChunkKeys + 1) * kChunkKeys);
                attend_chunk(tile, key, chunk_end, rows, into);
                key = chunk_end;
            }
            if (split != tile.first_split) merge(state, work, num_rows, layout.head_dim);
        }
    }

    void finish(const Tile& tile, const State& state) const {
        const int size = layout.head_dim;
        for (int i = 0; i < tile.end - tile.first; i++) {
            const int token = step.query_start_loc[tile.row] + (tile.first + i) / per_head();
            const int head = tile.kv_head * per_head() + (tile.first + i) % per_head();
            T* to = out + (static_cast<int64_t>(token) * layout.num_heads + head) * size;
            const VecF inverse = splat(1.0f / state.sum[i]);
            for (int d = 0; d < size; d += kLanes) store(to + d, mul(load(state.values + i * size + d), inverse));
        }
    }
};

struct Memory {  // of one thread, kept from call to call
    std::vector<float> floats;
    std::vector<Segment> segments;
    std::vector<Tile> tiles;

    float* at_least(size_t count) {
        if (floats.size() < count) floats.resize(count);
        return floats.data();
    }
};

size_t state_floats(int head_dim) { return static_cast<size_t>(kTileRows) * (head_dim + 2); }

State state_at(float* memory, int head_dim) {
    return State{memory + kTileRows * head_dim, memory + kTileRows * (head_dim + 1), memory};
}

template <typename T>
void run(const Attention<T>& attention) {
    static thread_local Memory caller;  // the threads below reach it through these references
    std::vector<Segment>& segments = caller.segments;
    std::vector<Tile>& tiles = caller.tiles;
    const AttentionStep& step = attention.step;
    const int head_dim = attention.layout.head_dim, num_kv_heads = attention.layout.num_kv_heads;
    segments.clear();
    tiles.clear();
    int64_t work = 0;
    int most_splits = 1;
    for (int row = 0; row < step.num_rows; row++) {
        const int start = step.num_computed_tokens[row], end = step.seq_lens[row];
        for (int position = start; position < end;) {
            const int next = std::min(end, (position / step.block_size + 1) * step.block_size);
            segments.push_back({row, position, next});
            position = next;
        }
        const int num_rows = (end - start) * attention.per_head();
        work += static_cast<int64_t>(num_rows) * end;
        // the last tile sees the most keys: the longest work comes first
        for (int first = (num_rows - 1) / kTileRows * kTileRows; first >= 0; first -= kTileRows)
            for (int head = 0; head < num_kv_heads; head++) {
                Tile tile{row, head, first, std::min(num_rows, first + kTileRows), 0, 0, -1};
                tile.first_split = attention.first_key(row, tile.first) / kSplitKeys;
                tile.end_split = attention.position(row, tile.end - 1) / kSplitKeys + 1;
                most_splits = std::max(most_splits, tile.end_split - tile.first_split);
                tiles.push_back(tile);
            }
    }
    const int num_threads = work * num_kv_heads < kParallelWork ? 1 : omp_get_max_threads();
    const size_t num_whole = tiles.size();
    int num_partials = 0;
    if (most_splits > 1 && num_whole < static_cast<size_t>(4 * num_threads)) {
        // Too few tiles for the threads: each split becomes a tile of its own. The whole ones stay in front, to merge by.
        for (size_t i = 0; i < num_whole; i++) {
            const Tile whole = tiles[i];
            tiles[i].partial = num_partials;
            for (int split = whole.first_split; split < whole.end_split; split++) {
                tiles.push_back({whole.row, whole.kv_head, whole.first, whole.end, split, split + 1, num_partials});
                num_partials++;
            }
        }
    }
    const size_t first_tile = num_partials > 0 ? num_whole : 0, num_tiles = tiles.size();
    float* partials = caller.at_least(num_partials * state_floats(head_dim));
    const int num_segments = static_cast<int>(segments.size());
    std::atomic<size_t> next_tile{first_tile}, next_merge{0};

#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(static)
        for (int i = 0; i < num_segments * num_kv_heads; i++)
            attention.write(segments[i / num_kv_heads], i % num_kv_heads);
        // every key is written: the loop ends with a barrier
        static thread_local Memory own;
        float* memory = own.at_least(2 * state_floats(head_dim));
        const State state = state_at(memory, head_dim), spare = state_at(memory + state_floats(head_dim), head_dim);
        for (size_t i; (i = next_tile.fetch_add(1, std::memory_order_relaxed)) < num_tiles;) {
            const Tile& tile = tiles[i];
            if (tile.partial >= 0) {
                attention.attend(tile, state_at(partials + tile.partial * state_floats(head_dim), head_dim), spare);
            } else {
                attention.attend(tile, state, spare);
                attention.finish(tile, state);
            }
        }
        if (num_partials > 0) {
#pragma omp barrier
            for (size_t i; (i = next_merge.fetch_add(1, std::memory_order_relaxed)) < num_whole;) {
                const Tile& tile = tiles[i];
                const State into = state_at(partials + tile.partial * state_floats(head_dim), head_dim);
                for (int split = 1; split < tile.end_split - tile.first_split; split++)
                    merge(
                        into, state_at(partials + (tile.partial + split) * state_floats(head_dim), head_dim),
                        tile.end - tile.first, head_dim);
                attention.finish(tile, into);
            }
        }
    }
}

}  // namespace

extern "C" void inflight_paged_attention(
    const void* query, int64_t query_stride, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
    void* out, void* cache, const AttentionStep* step, const HeadLayout* layout, float scale) {
    const int64_t size = layout->dtype == kFloat32 ? sizeof(float) : sizeof(bf16);
    const char *q = static_cast<const char*>(query), *k = static_cast<const char*>(key), *v = static_cast<const char*>(value);
    if (layout->dtype == kFloat32)
        run(Attention<float>{
            q, query_stride * size, k, key_stride * size, v, value_stride * size, static_cast<float*>(out),
            static_cast<char*>(cache), *step, *layout, scale});
    else
        run(Attention<bf16>{
            q, query_stride * size, k, key_stride * size, v, value_stride * size, static_cast<bf16*>(out),
            static_cast<char*>(cache), *step, *layout, scale});
}
