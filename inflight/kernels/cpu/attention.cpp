// Paged attention that reads keys and values directly from the block arena. A step may mix prompts, chunks and single tokens.
//
// The work is divided into tiles of up to kTileRows query rows. A query row is one query head of one token. The rows of a tile
// are tokens of one request, with the query heads of one key head. If these are few, a tile also has the query heads of the next
// key heads, whose cells (attention_cells.h) are neighbours in memory. A free thread computes the next tile: it goes over the keys
// in chunks: scores, softmax against the largest score so far, weighted sum of the values (online softmax, arXiv:1805.02867,
// arXiv:2205.14135). During each chunk it prefetches the next one.
//
// A row's result is the same bit for bit, whatever the batch, the chunking of prompts and the number of threads: chunks and
// splits (attention_tiles.h) begin at fixed positions of the sequence, and splits are merged in order.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>

#include "attention_cells.h"
#include "attention_tiles.h"
#include "attention_write.h"
#include "kernels.h"
#include "threads.h"

namespace {

constexpr int kParallelWork = 1 << 9;       // with fewer query rows x keys, one thread is faster
constexpr int kParallelWrites = 64;         // with fewer segments x key heads to write, one thread is faster
constexpr int kChunkBytes = 256 << 10;      // keys and values of a chunk: two chunks fit into the second-level cache
constexpr int kFewRows = 12;                // with at most so many rows per key head, a tile has several key heads
constexpr float kLog2E = 1.44269504f;

struct Queries {
    const uint32_t* rows[kTileRows];
    // a row's sums of products times its factor are its scores: as exponents of 2, or divided by the soft cap
    float factors[kTileRows];
};

// The part of a chunk that some row of a tile sees.
struct Chunk {
    int origin;              // the position of the chunk's first key; `first` and `end` count from here
    int first, end;          // the keys that some row sees; `first` is rounded down to the beginning of a group
    const char* keys[kChunkKeys / kGroupKeys];  // each group of keys, in the cell of key head 0

    int first_group() const { return first / kGroupKeys; }
    int end_group() const { return (end + kGroupKeys - 1) / kGroupKeys; }
};

template <typename T, typename Cells>
struct Attention {
    const StepTensors<T>& tensors;
    char* cache;
    const AttentionStep& step;
    const HeadLayout& layout;
    const AttentionParams& params;
    typename Cells::Unit* own_values = nullptr;  // of the calling thread, if values are a part of the keys: those of a chunk

    using Unit = typename Cells::Unit;
    using Weight = typename Cells::Weight;

    bool has_values() const { return layout.value_dim == layout.head_dim; }  // in cells of their own
    int per_head() const { return layout.num_heads / layout.num_kv_heads; }
    int64_t group_bytes() const { return Cells::group_bytes(layout.head_dim); }
    int64_t cell_bytes() const { return step.block_size / kGroupKeys * group_bytes(); }
    const int32_t* table(int row) const { return step.block_table + static_cast<int64_t>(row) * step.table_stride; }

    // The group that contains the position, in the cell of key head 0.
    char* group(int row, int position) const {
        const int block = position / step.block_size;
        return cache + table(row)[block] * layout.block_stride +
               (position - block * step.block_size) / kGroupKeys * group_bytes();
    }

    int position(int row, int query_row) const { return step.num_computed_tokens[row] + query_row / per_head(); }

    int first_key(int row, int query_row) const {
        return step.sliding_window == 0 ? 0 : std::max(0, position(row, query_row) - step.sliding_window + 1);
    }

    // The position behind the last key that the query row sees. It is not less than that of the query row before.
    int end_key(int row, int query_row) const {
        const int behind = position(row, query_row) + 1, end = step.seq_lens[row];
        if (params.sees_whole_images && step.ends != nullptr)
            return step.ends[step.query_start_loc[row] + query_row / per_head()];
        if (params.is_causal) return behind;
        return step.sliding_window == 0 ? end : std::min(end, behind + step.sliding_window - 1);
    }

    // Writes the keys and values of one head for the tokens [first, end) of a request. All of them belong to one group.
    void write(int row, int first, int end, int head) const {
        char* keys = group(row, first) + head * cell_bytes();
        const int token = step.query_start_loc[row] + first - step.num_computed_tokens[row];
        const T* key = tensors.key + token * tensors.key_stride + head * layout.head_dim;
        const T* value = tensors.value + token * tensors.value_stride + head * layout.head_dim;
        char* values = has_values() ? keys + layout.num_kv_heads * cell_bytes() : nullptr;
        GroupWriter<T, Cells>{layout.head_dim, first % kGroupKeys, end - first}.write(
            keys, key, tensors.key_stride, values, value, tensors.value_stride);
    }

    Chunk chunk_at(const Tile& tile, int begin, int end) const {
        Chunk chunk;
        chunk.origin = begin / kChunkKeys * kChunkKeys;
        chunk.first = (begin - chunk.origin) / kGroupKeys * kGroupKeys;
        chunk.end = std::min(end - chunk.origin, kChunkKeys);
        for (int i = chunk.first_group(); i < chunk.end_group(); i++)
            chunk.keys[i] = group(tile.row, chunk.origin + i * kGroupKeys);
        return chunk;
    }

    void look_ahead(const Tile& tile, const Chunk& chunk, Ahead& ahead) const {
        ahead.clear();
        for (int first_cell = tile.first_head; first_cell < (has_values() ? 2 : 1) * layout.num_kv_heads;
             first_cell += layout.num_kv_heads)
            for (int i = chunk.first_group(); i < chunk.end_group(); i++)
                for (int head = 0; head < tile.end_head - tile.first_head; head++)
                    ahead.add(chunk.keys[i] + (first_cell + head) * cell_bytes(), group_bytes());
    }

    void attend_chunk(const Tile& tile, const Chunk& chunk, const Queries& queries, const State& state, Ahead& ahead) const {
        alignas(64) static thread_local float scores[kTileRows * kChunkKeys];
        alignas(64) static thread_local Weight weights[kTileRows * kChunkKeys];
        const int rows_of_head = tile.rows_of_head();
        const int first = chunk.first / kLanes, end = chunk.end_group() * kGroupKeys / kLanes;  // of vectors
        for (int head = tile.first_head; head < tile.end_head; head++) {
            const Unit *keys[kChunkVectors], *values[kChunkKeys / kGroupKeys];
            const float *key_scales[kChunkVectors], *value_scales[kChunkVectors];
            for (int i = first; i < end; i++) {
                const int group = i * kLanes / kGroupKeys, lane = i * kLanes % kGroupKeys;
                const char* at = chunk.keys[group] + head * cell_bytes();
                const char* value_at = has_values() ? at + layout.num_kv_heads * cell_bytes() : at;
                keys[i] = reinterpret_cast<const Unit*>(at) + lane;
                if (has_values()) {
                    values[group] = reinterpret_cast<const Unit*>(value_at);
                } else if (lane == 0) {
                    Unit* copy = own_values + static_cast<int64_t>(group) * kGroupKeys / Cells::kPerUnit * layout.value_dim;
                    values_of_keys<Cells>(keys[i], std::min(kGroupKeys, chunk.end - group * kGroupKeys), layout.value_dim, copy);
                    values[group] = copy;
                }
                if constexpr (Cells::kScaled) {
                    key_scales[i] = Cells::scales(at, layout.head_dim) + lane;
                    value_scales[i] = Cells::scales(value_at, layout.head_dim) + lane;
                }
            }
            const int row = (head - tile.first_head) * rows_of_head, end_row = row + rows_of_head;
            score(queries, keys, key_scales, first, end, row, end_row, scores, ahead);
            if (params.soft_cap > 0) cap_scores(scores, first, end, row, end_row);
            if (params.position_bias != nullptr) add_position_bias(tile, chunk, scores, first, end, row, end_row);
            float factors[kTileRows], weight_scales[kTileRows];
            for (int i = row; i < end_row; i++) {
                const int query_row = tile.first + i - row;
                const int from = first_key(tile.row, query_row) - chunk.origin;
                const int to = std::min(end_key(tile.row, query_row) - chunk.origin, chunk.end);
                const Softened softened = soften<Cells>(
                    scores + i * kChunkKeys, weights + i * kChunkKeys, value_scales, first, end, from, to,
                    state.largest[i], state.sum[i]);
                factors[i] = softened.factor;
                weight_scales[i] = softened.weight_scale;
            }
            weigh(chunk, values, row, end_row, weights, weight_scales, factors, state.values, ahead);
        }
    }

    void score(
        const Queries& queries, const Unit* const* keys, const float* const* key_scales, int first, int end, int row,
        int end_row, float* scores, Ahead& ahead) const {
        const int num_units = layout.head_dim / Cells::kPerUnit;
        int i = first;
        for (; i + kVectorsAtOnce <= end; i += kVectorsAtOnce)
            in_groups_of_rows(
                Scoring<Cells, kVectorsAtOnce>{
                    queries.rows, queries.factors, keys + i, key_scales + i, num_units, scores + i * kLanes, ahead},
                row, end_row);
        for (; i < end; i++)
            in_groups_of_rows(
                Scoring<Cells, 1>{
                    queries.rows, queries.factors, keys + i, key_scales + i, num_units, scores + i * kLanes, ahead},
                row, end_row);
    }

    // Turns scores that are divided by the soft cap into capped scores, as exponents of 2.
    __attribute__((noinline)) void cap_scores(float* scores, int first, int end, int row, int end_row) const {
        const VecF cap = splat(params.soft_cap * kLog2E);
        for (int i = row; i < end_row; i++)
            for (float *at = scores + i * kChunkKeys + first * kLanes, *to = scores + i * kChunkKeys + end * kLanes; at < to;
                 at += kLanes)
                store(at, mul(cap, hyperbolic_tangent(load(at))));
    }

    // Adds the bias of each key's distance from the query to scores that are exponents of 2.
    __attribute__((noinline)) void add_position_bias(
        const Tile& tile, const Chunk& chunk, float* scores, int first, int end, int row, int end_row) const {
        const int radius = params.bias_radius, size = 2 * radius + 1;
        const VecF factor = splat(kLog2E);
        for (int i = row; i < end_row; i++) {
            const float* bias = params.position_bias + static_cast<int64_t>(query_head(tile, i)) * size;
            const int query = position(tile.row, tile.first + i % tile.rows_of_head());
            for (int vector = first; vector < end; vector++) {
                float* at = scores + i * kChunkKeys + vector * kLanes;
                const int place = chunk.origin + vector * kLanes - query + radius;  // of the vector's first key, in `bias`
                if (place >= 0 && place + kLanes <= size) {
                    store(at, fma(load(bias + place), factor, load(at)));
                    continue;
                }
                for (int lane = 0; lane < kLanes; lane++)
                    at[lane] = std::fma(bias[std::clamp(place + lane, 0, size - 1)], kLog2E, at[lane]);
            }
        }
    }

    void weigh(
        const Chunk& chunk, const Unit* const* values, int row, int end_row, const Weight* weights,
        const float* weight_scales, const float* factors, float* sums, Ahead& ahead) const {
        const int size = layout.value_dim;
        const int first = chunk.first / Cells::kPerUnit, end = (chunk.end + Cells::kPerUnit - 1) / Cells::kPerUnit;
        const Unit* groups[kChunkKeys / kGroupKeys];
        const auto weigh_vectors = [&](auto vectors, int d) {  // from dimension d on; `vectors`: an integral_constant, how many
            for (int i = chunk.first_group(); i < chunk.end_group(); i++) groups[i] = values[i] + d;
            in_groups_of_rows(
                Weighing<Cells, vectors()>{
                    weights, weight_scales, groups, first, end, size, layout.head_dim, factors, sums + d, ahead},
                row, end_row);
            return d + vectors() * kLanes;
        };
        for (int d = 0; d < size;) {
            const int num_vectors = (size - d) / kLanes;
            if (num_vectors >= kVectorsAtOnce)
                d = weigh_vectors(std::integral_constant<int, kVectorsAtOnce>(), d);
            else if (kVectorsAtOnce > 2 && num_vectors >= 2)
                d = weigh_vectors(std::integral_constant<int, 2>(), d);
            else
                d = weigh_vectors(std::integral_constant<int, 1>(), d);
        }
    }

    int query_head(const Tile& tile, int row) const {
        const int query_row = tile.first + row % tile.rows_of_head();
        return (tile.first_head + row / tile.rows_of_head()) * per_head() + query_row % per_head();
    }

    int64_t offset(const Tile& tile, int row, int64_t token_stride, int size_of_head) const {
        const int token = step.query_start_loc[tile.row] + (tile.first + row % tile.rows_of_head()) / per_head();
        return token * token_stride + static_cast<int64_t>(query_head(tile, row)) * size_of_head;
    }

    // `space`: [kTileRows][head_dim]. If the cache is int8, queries are quantised into it; otherwise they stay where they are.
    Queries queries_of(const Tile& tile, int16_t* space) const {
        Queries queries;
        for (int i = 0; i < tile.num_rows(); i++) {
            const T* query = tensors.query + offset(tile, i, tensors.query_stride, layout.head_dim);
            queries.factors[i] = params.soft_cap > 0 ? params.scale / params.soft_cap : params.scale * kLog2E;
            if constexpr (Cells::kScaled) {
                int16_t* integers = space + i * layout.head_dim;
                queries.factors[i] *= quantise(query, integers, layout.head_dim);
                queries.rows[i] = reinterpret_cast<const uint32_t*>(integers);
            } else {
                queries.rows[i] = reinterpret_cast<const uint32_t*>(query);
            }
        }
        return queries;
    }

    int begin_of(const Tile& tile) const {
        return std::max(first_key(tile.row, tile.first), tile.first_split * kSplitKeys);
    }
    int end_of(const Tile& tile) const {
        return std::min(end_key(tile.row, tile.end - 1), tile.end_split * kSplitKeys);
    }
    static bool waits(const Tile& tile) { return tile.rows_of_head() <= kRowsThatWait; }

    // Attends to all keys of the tile's splits, into `state`. `work` has the same size and is overwritten. `space`: see
    // `queries_of`. `is_fetched`: the tile's first chunk was prefetched. During the tile's last chunk, the first chunk of
    // `following` is prefetched, if there is a following tile.
    void attend(
        const Tile& tile, bool is_fetched, const Tile* following, const State& state, const State& work,
        int16_t* space) const {
        const Queries queries = queries_of(tile, space);
        const int num_rows = tile.num_rows(), begin = begin_of(tile), end = end_of(tile);
        Chunk chunk = chunk_at(tile, begin, end);
        Ahead ahead;
        if (waits(tile) && !is_fetched) {
            look_ahead(tile, chunk, ahead);
            ahead.fetch(ahead.num_lines());
        }
        clear(state, num_rows, layout.head_dim);
        for (int split = begin / kSplitKeys; chunk.origin < end;) {
            const Chunk now = chunk;
            const int next = now.origin + kChunkKeys;
            ahead.clear();
            if (next < end) {
                chunk = chunk_at(tile, next, end);
                if (waits(tile)) look_ahead(tile, chunk, ahead);
            } else if (following != nullptr && waits(*following)) {
                look_ahead(*following, chunk_at(*following, begin_of(*following), end_of(*following)), ahead);
            }
            const bool is_first = split == begin / kSplitKeys;
            if (!is_first && now.origin == split * kSplitKeys) clear(work, num_rows, layout.head_dim);
            attend_chunk(tile, now, queries, is_first ? state : work, ahead);
            if (next >= end || next % kSplitKeys == 0) {
                if (!is_first) merge(state, work, num_rows, layout.head_dim);
                split++;
            }
            if (next >= end) break;
        }
    }

    void finish(const Tile& tile, const State& state) const {
        const int size = layout.value_dim;
        for (int i = 0; i < tile.num_rows(); i++) {
            T* to = tensors.out + offset(tile, i, static_cast<int64_t>(layout.num_heads) * size, size);
            // The sink is added last, not as the first key: the merged splits, and so the bits, are those of a row without one.
            const float factor = params.sinks == nullptr
                ? 1.0f / state.sum[i]
                : factor_with_sink(state.largest[i], state.sum[i], params.sinks[query_head(tile, i)] * kLog2E);
            const VecF inverse = splat(factor);
            for (int d = 0; d < size; d += kLanes) store(to + d, mul(load(state.values + i * layout.head_dim + d), inverse));
        }
    }
};

// -- division of the work ----------------------------------------------------------------------------------------------------

template <typename T, typename Cells>
int heads_at_once(const Attention<T, Cells>& attention, int rows_of_head, int num_threads) {
    if (rows_of_head > kFewRows) return 1;
    const int num_heads = attention.layout.num_kv_heads, num_rows = attention.step.num_rows;
    const int64_t chunk_bytes = 2 * kChunkKeys / kGroupKeys * attention.group_bytes();
    const int fit = std::min<int64_t>(kTileRows / rows_of_head, std::max<int64_t>(1, kChunkBytes / chunk_bytes));
    const int shared = std::max(1, num_heads * num_rows / num_threads);  // every thread gets a tile
    return std::min({num_heads, fit, shared});
}

template <typename T, typename Cells>
void cut_into_tiles(const Attention<T, Cells>& attention, Work& work) {
    const AttentionStep& step = attention.step;
    const int num_heads = attention.layout.num_kv_heads;
    work.segments.clear();
    work.tiles.clear();
    int64_t num_products = 0;
    for (int row = 0; row < step.num_rows; row++) {
        const int start = step.num_computed_tokens[row], end = step.seq_lens[row];
        for (int position = start; position < end;) {
            const int next = std::min(end, (position / kGroupKeys + 1) * kGroupKeys);
            work.segments.push_back({row, position, next});
            position = next;
        }
        num_products += static_cast<int64_t>(end - start) * attention.layout.num_heads * end;
    }
    work.num_threads = num_products < kParallelWork ? 1 : max_threads();
    for (int row = 0; row < step.num_rows; row++) {
        const int num_rows = (step.seq_lens[row] - step.num_computed_tokens[row]) * attention.per_head();
        if (num_rows == 0) continue;
        const int at_once = heads_at_once(attention, std::min(num_rows, kTileRows), work.num_threads);
        for (int head = 0; head < num_heads; head += at_once)
            // the last tile sees the most keys if attention is causal: it comes first, because the longest work should begin first
            for (int first = (num_rows - 1) / kTileRows * kTileRows; first >= 0; first -= kTileRows) {
                const int end = std::min(num_rows, first + kTileRows);
                Tile tile{row, head, std::min(num_heads, head + at_once), first, end, 0, 0, -1};
                tile.first_split = attention.first_key(row, first) / kSplitKeys;
                tile.end_split = (attention.end_key(row, end - 1) - 1) / kSplitKeys + 1;
                work.tiles.push_back(tile);
            }
    }
    work.num_whole = work.tiles.size();
}

template <typename T, typename Cells>
void run(const Attention<T, Cells>& attention) {
    static thread_local Work of_caller;
    static thread_local Space space_of_caller;
    const int head_dim = attention.layout.head_dim, num_kv_heads = attention.layout.num_kv_heads;
    Work& work = of_caller;  // `of_caller` is thread-local; through this reference all threads use the caller's
    cut_into_tiles(attention, work);
    share_tiles(work, head_dim);
    float* partials = space_of_caller.at_least(work.partial_floats);
    const auto partial_state = [&](const Tile& tile, int part) {
        const int num_rows = tile.num_rows();
        return state_at(partials + tile.partial + part * state_floats(num_rows, head_dim), num_rows, head_dim);
    };
    const int num_writes = attention.tensors.key == nullptr ? 0 : static_cast<int>(work.segments.size()) * num_kv_heads;
    share_each(num_writes, work.num_threads > 1 && num_writes >= kParallelWrites, [&](int64_t i) {
        const Segment& segment = work.segments[i / num_kv_heads];
        attention.write(segment.row, segment.first_position, segment.end_position, static_cast<int>(i % num_kv_heads));
    });
    const size_t num_tiles = work.tiles.size();
    std::atomic<size_t> next_tile{work.first_splits > 0 ? work.num_whole : 0};
    parallel(work.num_threads > 1, [&] {
        static thread_local Space own;
        const int64_t most_floats = state_floats(kTileRows, head_dim);
        float* memory = own.at_least(3 * most_floats + (attention.has_values() ? 0 : kChunkKeys * head_dim));
        Attention<T, Cells> mine = attention;
        mine.own_values = reinterpret_cast<typename Cells::Unit*>(memory + 3 * most_floats);
        const State state = state_at(memory, kTileRows, head_dim), spare = state_at(memory + most_floats, kTileRows, head_dim);
        int16_t* space = reinterpret_cast<int16_t*>(memory + 2 * most_floats);
        const auto take = [&] { return next_tile.fetch_add(1, std::memory_order_relaxed); };
        const Tile* following = nullptr;
        for (size_t i = take(); i < num_tiles;) {
            const Tile& tile = work.tiles[i];
            const bool is_fetched = following != nullptr;
            // while many tiles are left, a thread chooses its next tile before it computes this one, to prefetch that one
            const bool is_early = i + 4 * work.num_threads < num_tiles;
            if (is_early) i = take();
            following = is_early && i < num_tiles ? &work.tiles[i] : nullptr;
            if (tile.partial >= 0) {
                mine.attend(tile, is_fetched, following, partial_state(tile, 0), spare, space);
            } else {
                mine.attend(tile, is_fetched, following, state, spare, space);
                attention.finish(tile, state);
            }
            if (!is_early) i = take();
        }
    });
    if (work.partial_floats == 0) return;
    share(static_cast<int64_t>(work.num_whole), true, 1, [&](int64_t i, int64_t) {
        const Tile& tile = work.tiles[i];
        if (tile.partial < 0) return;
        const State into = partial_state(tile, 0);
        for (int part = 1; part < work.num_parts(tile); part++)
            merge(into, partial_state(tile, part), tile.num_rows(), head_dim);
        attention.finish(tile, into);
    });
}

}  // namespace

extern "C" int64_t inflight_attention_scratch_bytes(int32_t head_dim, int32_t num_threads) {
    const int64_t floats = 3 * state_floats(kTileRows, head_dim) + kChunkKeys * head_dim;
    return num_threads * (kPartialBytes + floats * static_cast<int64_t>(sizeof(float)));
}

extern "C" void inflight_paged_attention(
    const void* query, int64_t query_stride, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
    void* out, void* cache, const AttentionStep* step, const HeadLayout* layout,
    const AttentionParams* params) {
    const auto run_as = [&](auto type) {
        using T = decltype(type);
        const StepTensors<T> tensors{
            static_cast<const T*>(query), query_stride, static_cast<const T*>(key), key_stride,
            static_cast<const T*>(value), value_stride, static_cast<T*>(out)};
        char* arena = static_cast<char*>(cache);
        if (layout->cache_dtype == kInt8)
            run(Attention<T, Int8Cells>{tensors, arena, *step, *layout, *params});
        else
            run(Attention<T, PlainCells<T>>{tensors, arena, *step, *layout, *params});
    };
    if (layout->dtype == kFloat32)
        run_as(float{});
    else
        run_as(bf16{});
}
