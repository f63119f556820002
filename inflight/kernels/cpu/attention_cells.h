// The layout of keys and values in the cache, and the two inner loops of attention: scores, and the weighted sum of the values.
//
// A layer's part of a block has one cell for each key head, then one cell for each value head. A cell is a sequence of *groups*
// of 16 tokens. A group is laid out so that every load is a full vector, and no sum runs across the lanes of a vector:
//
//     group of keys    [head_dim in units][16]      a vector: one unit of the head, of neighbouring keys
//     group of values  [16 in units][head_dim]      a vector: one unit of the keys, of neighbouring dimensions
//
// If the cache has the type of the model, a unit is one float or two bfloat16 (simd.h). In an int8 cache, a unit is two
// neighbouring int8, and a group ends with a float for each token: its scale, by which its int8 are multiplied. In this case
// queries and softmax weights are converted to 16-bit integers, and products are summed exactly, in 32-bit integers.
//
// If values are the first elements of the keys, there are no cells of values. A thread copies these elements of the keys of a
// chunk into groups of values when it needs them (`values_of_keys`).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

constexpr int kGroupKeys = 16;     // block sizes are multiples of it
constexpr int kChunkKeys = 128;    // a tile goes over the keys in chunks: a multiple of kGroupKeys
constexpr int kChunkVectors = kChunkKeys / kLanes;
constexpr int kMostHeadDim = 512;  // largest head_dim of an int8 cache: sums of products still fit into 32 bits
constexpr int kRowsAtOnce = 6;     // query rows whose sums are held in registers
constexpr int kRowsThatWait = 4;   // with at most so many rows, a thread waits for memory, so it prefetches
constexpr int kVectorsAtOnce = kLanes == 16 ? 4 : 2;

// Prefetches memory that will be read soon, a few cache lines at a time, in the order of `add`. It prefetches into the
// second-level cache. With the first-level cache the bandwidth is half, because a line that is on its way occupies one of the
// few miss buffers of this cache.
class Ahead {
  public:
    void clear() { count_ = next_ = num_lines_ = 0; }

    void add(const char* begin, int64_t size) {
        num_lines_ += static_cast<int>((size + 63) / 64);
        if (count_ > 0 && pieces_[count_ - 1].end == begin) {
            pieces_[count_ - 1].end += size;
        } else if (count_ < kMostPieces) {
            pieces_[count_++] = {begin, begin + size};
        }
    }

    int num_lines() const { return num_lines_; }

    void fetch(int num_lines) {
        for (; num_lines > 0 && next_ < count_; num_lines--) {
            Piece& piece = pieces_[next_];
            __builtin_prefetch(piece.begin, 0, 2);
            piece.begin += 64;
            if (piece.begin >= piece.end) next_++;
        }
    }

  private:
    struct Piece {
        const char *begin, *end;
    };
    static constexpr int kMostPieces = 256;
    Piece pieces_[kMostPieces];
    int count_ = 0, next_ = 0, num_lines_ = 0;
};

// Keys and values in the type of the model.
template <typename T>
struct PlainCells {
    using Unit = uint32_t;
    using Weight = T;
    using Sum = VecF;
    static constexpr int kPerUnit = kElementsPerUnit<T>;
    static constexpr bool kScaled = false;

    static int64_t group_bytes(int head_dim) { return static_cast<int64_t>(kGroupKeys) * head_dim * sizeof(T); }
    static Sum nothing() { return zero(); }
    static VecU load(const Unit* p) { return load_units(p); }
    static Sum dot(Sum sums, VecU a, VecU b) { return ::dot<T>(sums, a, b); }
    static VecF floats(Sum sums) { return sums; }
};

// Keys and values in int8, with one scale per token.
struct Int8Cells {
    using Unit = uint16_t;
    using Weight = int16_t;
    using Sum = VecU;  // int32
    static constexpr int kPerUnit = 2;
    static constexpr bool kScaled = true;

    static int64_t group_bytes(int head_dim) { return kGroupKeys * (head_dim + static_cast<int64_t>(sizeof(float))); }
    static float* scales(char* group, int head_dim) { return reinterpret_cast<float*>(group + kGroupKeys * head_dim); }
    static const float* scales(const char* group, int head_dim) {
        return reinterpret_cast<const float*>(group + kGroupKeys * head_dim);
    }
    static Sum nothing() { return no_units(); }
    static VecU load(const Unit* p) { return widen_int8(p); }
    // a product has at most 15 + 7 bits, so 512 of them fit into 32 bits; head_dim and kChunkKeys are at most 512
    static Sum dot(Sum sums, VecU a, VecU b) { return dot_int16(sums, a, b); }
    static VecF floats(Sum sums) { return to_floats(sums); }
};

// Cache lines that one step of the loops below reads, at least 1. Each step prefetches as many.
template <typename Cells, int kVectors>
constexpr int kLinesRead = std::max<int>(1, kVectors* kLanes * sizeof(typename Cells::Unit) / 64);

// -- scores: query rows x neighbouring keys --------------------------------------------------------------------------------

template <typename Cells, int kVectors>
struct Scoring {
    const uint32_t* const* query;        // the units of each row
    const float* factors;                // of each row: a score is a sum of products times this
    const typename Cells::Unit* const* keys;
    const float* const* key_scales;      // used if Cells::kScaled
    int num_units;
    float* scores;                       // rows of kChunkKeys
    Ahead& ahead;

    template <int kRows>
    __attribute__((noinline)) void run(int row) const {  // if it were inlined, `sums` would not stay in registers
        typename Cells::Sum sums[kRows][kVectors];
        for (int i = 0; i < kRows; i++)
            for (int j = 0; j < kVectors; j++) sums[i][j] = Cells::nothing();
        for (int unit = 0; unit < num_units; unit++) {
            VecU k[kVectors];
            for (int j = 0; j < kVectors; j++) k[j] = Cells::load(keys[j] + unit * kGroupKeys);
            if constexpr (kRows <= kRowsThatWait) ahead.fetch(kLinesRead<Cells, kVectors>);
            for (int i = 0; i < kRows; i++) {
                const VecU q = splat_unit(query[row + i][unit]);
                for (int j = 0; j < kVectors; j++) sums[i][j] = Cells::dot(sums[i][j], q, k[j]);
            }
        }
        for (int i = 0; i < kRows; i++)
            for (int j = 0; j < kVectors; j++) {
                VecF score = mul(Cells::floats(sums[i][j]), splat(factors[row + i]));
                if constexpr (Cells::kScaled) score = mul(score, ::load(key_scales[j]));
                store(scores + (row + i) * kChunkKeys + j * kLanes, score);
            }
    }
};

// -- the weighted sum: query rows x neighbouring dimensions ----------------------------------------------------------------

template <typename Cells, int kVectors>
struct Weighing {
    const typename Cells::Weight* weights;          // rows of kChunkKeys
    const float* weight_scales;                     // of each row; used if Cells::kScaled
    const typename Cells::Unit* const* groups;      // the chunk's groups of values, from the first dimension to sum
    int first_unit, end_unit;                       // units of the chunk's keys that some row sees
    int value_dim;
    int head_dim;
    const float* factors;                           // of each row: multiplies the values that are summed so far
    float* values;                                  // rows of head_dim, of which value_dim are used
    Ahead& ahead;

    template <int kRows>
    __attribute__((noinline)) void run(int row) const {  // if it were inlined, `sums` would not stay in registers
        constexpr int kUnits = kGroupKeys / Cells::kPerUnit;  // of a group
        typename Cells::Sum sums[kRows][kVectors];
        for (int i = 0; i < kRows; i++)
            for (int j = 0; j < kVectors; j++) sums[i][j] = Cells::nothing();
        constexpr int kRowUnits = kChunkKeys / Cells::kPerUnit;
        const uint32_t* weight = reinterpret_cast<const uint32_t*>(weights + row * kChunkKeys);
        for (int unit = first_unit; unit < end_unit;) {
            const int group = unit / kUnits, end = std::min(end_unit, (group + 1) * kUnits);
            const typename Cells::Unit* v = groups[group] + static_cast<int64_t>(unit - group * kUnits) * value_dim;
            for (; unit < end; unit++, v += value_dim) {
                VecU vectors[kVectors];
                for (int j = 0; j < kVectors; j++) vectors[j] = Cells::load(v + j * kLanes);
                if constexpr (kRows <= kRowsThatWait) ahead.fetch(kLinesRead<Cells, kVectors>);
                for (int i = 0; i < kRows; i++) {
                    const VecU w = splat_unit(weight[i * kRowUnits + unit]);
                    for (int j = 0; j < kVectors; j++) sums[i][j] = Cells::dot(sums[i][j], w, vectors[j]);
                }
            }
        }
        for (int i = 0; i < kRows; i++)
            for (int j = 0; j < kVectors; j++) {
                float* to = values + (row + i) * head_dim + j * kLanes;
                VecF sum = Cells::floats(sums[i][j]);
                if constexpr (Cells::kScaled) sum = mul(sum, splat(weight_scales[row + i]));
                store(to, fma(::load(to), splat(factors[row + i]), sum));
            }
    }
};

// Calls `work.template run<count>(row)` for all rows in [first, end), with kRowsAtOnce rows in each call and fewer in the last.
template <typename Work, int kRows = kRowsAtOnce>
inline void in_groups_of_rows(const Work& work, int first, int end) {
    for (; end - first >= kRows; first += kRows) work.template run<kRows>(first);
    if constexpr (kRows > 1) {
        if (first < end) in_groups_of_rows<Work, kRows - 1>(work, first, end);
    }
}

// -- softmax of one row's scores of a chunk --------------------------------------------------------------------------------

constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Softened {
    float factor;        // the values that are summed so far have to be multiplied with it
    float weight_scale;  // used if Cells::kScaled: the scale of the integer weights
};

inline bool has_nan(const float* scores, int from, int to) {
    for (int i = from; i < to; i++)
        if (std::isnan(scores[i])) return true;
    return false;
}

// Turns the scores (exponents of 2) of a chunk's vectors [first, end) into weights, and updates `largest_score` and `sum_so_far`.
// The row sees the keys [from, to) only. `value_scales`: the scales of the chunk's vectors, if Cells::kScaled. If a score or a
// scale is NaN, the sum becomes NaN, and so does the row's result. (The maximum may lose a NaN, but the sum keeps it.)
template <typename Cells>
Softened soften(
    float* scores, typename Cells::Weight* weights, const float* const* value_scales, int first, int end, int from, int to,
    float& largest_score, float& sum_so_far) {
    VecF most = splat(kNever);
    const auto is_cut = [&](int vector) { return vector * kLanes < from || (vector + 1) * kLanes > to; };
    const auto cut = [&](VecF x, int vector, float other) {
        return keep(x, from - vector * kLanes, to - vector * kLanes, splat(other));
    };
    for (int i = first; i < end; i++) {
        VecF x = load(scores + i * kLanes);
        if (is_cut(i)) x = cut(x, i, kNever);
        most = max(most, x);
    }
    float now = std::max(largest_score, largest(most));
    if (now == kNever) {  // the row sees no key here, or each of its scores is NaN or minus infinity
        if (!has_nan(scores, std::max(from, first * kLanes), std::min(to, end * kLanes))) {
            std::fill(weights + first * kLanes, weights + end * kLanes, typename Cells::Weight{});
            return {1.0f, 0.0f};
        }
        now = 0.0f;  // any number will do, because the sum becomes NaN
    }
    VecF total = zero();
    most = zero();
    for (int i = first; i < end; i++) {
        VecF x = power_of_2(sub(load(scores + i * kLanes), splat(now)));
        if (is_cut(i)) x = cut(x, i, 0.0f);
        total = add(total, x);
        if constexpr (Cells::kScaled) {
            x = mul(x, load(value_scales[i]));
            if (is_cut(i)) x = cut(x, i, 0.0f);  // behind the last token a scale may have any value
            most = max(most, x);
            total = fma(x, zero(), total);  // adds 0, or NaN if x is not finite
            store(scores + i * kLanes, x);
        } else {
            store(weights + i * kLanes, x);
        }
    }
    float weight_scale = 0.0f;
    if constexpr (Cells::kScaled) {
        const float top = largest(most);
        weight_scale = top / 32767.0f;
        const VecF inverse = splat(top > 0.0f ? 32767.0f / top : 0.0f);
        for (int i = first; i < end; i++) store_int16(weights + i * kLanes, mul(load(scores + i * kLanes), inverse));
    }
    const float factor = now == largest_score ? 1.0f : power_of_2(largest_score - now);
    sum_so_far = sum_so_far * factor + sum(total);
    largest_score = now;
    return {factor, weight_scale};
}

// -- the state of a tile ----------------------------------------------------------------------------------------------------

// The running softmax of one tile over some keys. The rows of the tile's first head come first, then those of the next head.
struct State {
    float* largest;  // [num_rows]
    float* sum;      // [num_rows]
    float* values;   // [num_rows][head_dim]
};

// Merges `from` into `into`: the result covers the keys of both. If `into` is empty, it becomes a copy of `from`, bit for bit.
inline void merge(const State& into, const State& from, int num_rows, int head_dim) {
    for (int row = 0; row < num_rows; row++) {
        const float now = std::max(into.largest[row], from.largest[row]);
        if (now == kNever) continue;
        const float a = power_of_2(into.largest[row] - now), b = power_of_2(from.largest[row] - now);
        float* x = into.values + row * head_dim;
        const float* y = from.values + row * head_dim;
        for (int d = 0; d < head_dim; d += kLanes) store(x + d, fma(load(y + d), splat(b), mul(load(x + d), splat(a))));
        into.sum[row] = into.sum[row] * a + from.sum[row] * b;
        into.largest[row] = now;
    }
}

// Returns what the values are multiplied with at the end if the softmax has one more logit, without a value. All logits are
// exponents of 2.
inline float factor_with_sink(float largest, float sum, float sink) {
    const float now = std::max(largest, sink), a = power_of_2(largest - now);
    return a / (sum * a + power_of_2(sink - now));
}

inline void clear(const State& state, int num_rows, int head_dim) {
    std::fill_n(state.largest, num_rows, kNever);
    std::fill_n(state.sum, num_rows, 0.0f);
    std::fill_n(state.values, num_rows * head_dim, 0.0f);
}
