// The gated delta rule with all that belongs to it between the two projections of a layer: the short convolution, the norms of
// queries and keys, the decay, the recurrence, and the gated norm. kernels/gated_delta.py has the formulas and the sources.
//
// A task is one key head of one row, with all its value heads. It goes through the row in pieces. For each piece it first computes
// the queries, keys and values of the heads, then the recurrence. In the recurrence the columns of a state do not depend on each
// other. So a state is divided into tiles of a few columns, and a tile stays in the first-level cache for a whole piece.

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int64_t kPiece = 32;             // tokens
constexpr int kTile = 2 * kLanes;          // columns
constexpr float kSmallestSquares = 1e-6f;  // added to the squares of a query or key

struct Row {  // one row of a step
    int64_t index, first_token, num_tokens, num_computed;
};

struct Channels {  // neighbouring channels of the convolution
    int64_t first, size;
    int64_t place;  // of the first one, among all channels of the task
};

template <typename T>
struct Task {
    const GatedDelta& layer;
    const T* x;        // the first token of the step
    int64_t x_stride;
    T* out;
    char* states;
    const AttentionStep& step;
    Row row;
    int64_t key_head;
    T* before;  // the inputs of the convolution before the row, for the channels of the task: [kernel_size - 1, num_own_channels]

    int64_t values_per_key() const { return layer.num_value_heads / layer.num_key_heads; }
    int64_t num_keys() const { return layer.num_key_heads * layer.key_dim; }
    int64_t num_channels() const { return 2 * num_keys() + layer.num_value_heads * layer.value_dim; }
    int64_t num_own_channels() const { return num_channels() / layer.num_key_heads; }
    Channels own_queries() const { return {key_head * layer.key_dim, layer.key_dim, 0}; }
    Channels own_keys() const { return {num_keys() + key_head * layer.key_dim, layer.key_dim, layer.key_dim}; }
    Channels own_values() const {
        const int64_t size = values_per_key() * layer.value_dim;
        return {2 * num_keys() + key_head * size, size, 2 * layer.key_dim};
    }
    Channels own_values(int64_t head) const {  // of one value head of the task
        const Channels all = own_values();
        return {all.first + head * layer.value_dim, layer.value_dim, all.place + head * layer.value_dim};
    }
    char* state_before(int64_t position) const { return states + step.state_offset(row.index, position, layer.block_stride); }
    float* matrix_of(char* state, int64_t value_head) const {
        return reinterpret_cast<float*>(state) + value_head * layer.key_dim * layer.value_dim;
    }
    // The inputs of the convolution before the next token: [kernel_size - 1, num_channels].
    T* inputs_of(char* state) const { return reinterpret_cast<T*>(state + layer.inputs_offset); }

    // The inputs of the convolution at a token of the row, which may be before the first.
    const T* inputs_at(int64_t token, const Channels& channels) const {
        if (token >= 0) return x + (row.first_token + token) * x_stride + channels.first;
        return before + (layer.kernel_size - 1 + token) * num_own_channels() + channels.place;
    }

    void load_inputs_before() const {
        std::fill_n(before, (layer.kernel_size - 1) * num_own_channels(), from_float<T>(0.0f));
        if (row.num_computed == 0) return;
        const T* inputs = inputs_of(state_before(row.num_computed));
        for (const Channels& channels : {own_queries(), own_keys(), own_values()})
            for (int64_t k = 0; k < layer.kernel_size - 1; k++)
                std::copy_n(
                    inputs + k * num_channels() + channels.first, channels.size,
                    before + k * num_own_channels() + channels.place);
    }

    // Keeps the inputs before `token` in a state.
    void store_inputs(char* state, int64_t token) const {
        const int64_t num_kept = layer.kernel_size - 1;
        for (const Channels& channels : {own_queries(), own_keys(), own_values()})
            for (int64_t k = 0; k < num_kept; k++)
                std::copy_n(
                    inputs_at(token - num_kept + k, channels), channels.size,
                    inputs_of(state) + k * num_channels() + channels.first);
    }

    // to [., channels.size] = silu(convolution) at tokens [from, until) of the row
    void convolve(const Channels& channels, int64_t from, int64_t until, float* to) const {
        const float* const weight = layer.conv_weight + channels.first;
        for (int64_t token = from; token < until; token++, to += channels.size) {
            const T* taps[kMaxConvolution];
            for (int64_t k = 0; k < layer.kernel_size; k++) taps[k] = inputs_at(token - layer.kernel_size + 1 + k, channels);
            for (int64_t i = 0; i < channels.size; i += kLanes) {
                VecF total = zero();
                for (int64_t k = 0; k < layer.kernel_size; k++)
                    total = fma(load(taps[k] + i), load(weight + k * num_channels() + i), total);
                store(to + i, silu(total));
            }
        }
    }

    static void scale_to_length(float* rows, int64_t num_rows, int64_t size, float length) {
        for (int64_t row = 0; row < num_rows; row++, rows += size) {
            VecF squares = zero();
            for (int64_t i = 0; i < size; i += kLanes) squares = fma(load(rows + i), load(rows + i), squares);
            const VecF scale = splat(length / std::sqrt(sum(squares) + kSmallestSquares));
            for (int64_t i = 0; i < size; i += kLanes) store(rows + i, mul(load(rows + i), scale));
        }
    }

    // `tile`: [key_dim, kTile]. Changes `values` [num_tokens, value_dim], of which it uses kTile columns, to the results.
    void recur(float* tile, const float* queries, const float* keys, float* values, const float* decays, const float* betas,
               int64_t num_tokens) const {
        const int64_t size = layer.key_dim;
        for (int64_t token = 0; token < num_tokens; token++) {
            const float* key = keys + token * size;
            const float* query = queries + token * size;
            float* value = values + token * layer.value_dim;
            const VecF decay = splat(decays[token]), beta = splat(betas[token]);
            VecF even[2] = {zero(), zero()}, odd[2] = {zero(), zero()};
            for (int64_t i = 0; i < size; i += 2) {
                const VecF a = splat(key[i]), b = splat(key[i + 1]);
                for (int half = 0; half < 2; half++) {
                    even[half] = fma(a, load(tile + i * kTile + half * kLanes), even[half]);
                    odd[half] = fma(b, load(tile + (i + 1) * kTile + half * kLanes), odd[half]);
                }
            }
            VecF delta[2];
            for (int half = 0; half < 2; half++) {
                const VecF known = mul(decay, add(even[half], odd[half]));
                delta[half] = mul(beta, sub(load(value + half * kLanes), known));
                even[half] = odd[half] = zero();
            }
            for (int64_t i = 0; i < size; i += 2) {
                for (int half = 0; half < 2; half++) {
                    float* first = tile + i * kTile + half * kLanes;
                    float* second = first + kTile;
                    const VecF a = fma(splat(key[i]), delta[half], mul(decay, load(first)));
                    const VecF b = fma(splat(key[i + 1]), delta[half], mul(decay, load(second)));
                    store(first, a);
                    store(second, b);
                    even[half] = fma(splat(query[i]), a, even[half]);
                    odd[half] = fma(splat(query[i + 1]), b, odd[half]);
                }
            }
            for (int half = 0; half < 2; half++) store(value + half * kLanes, add(even[half], odd[half]));
        }
    }

    // The gated norm of one value head at a token; `from`: [value_dim]
    void finish(const float* from, const T* gate, T* to) const {
        VecF squares = zero();
        for (int64_t i = 0; i < layer.value_dim; i += kLanes) squares = fma(load(from + i), load(from + i), squares);
        const VecF scale = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(layer.value_dim) + layer.eps));
        for (int64_t i = 0; i < layer.value_dim; i += kLanes)
            store(to + i, mul(mul(mul(load(from + i), scale), load(layer.norm_weight + i)), silu(load(gate + i))));
    }

    void copy_state(float* state, float* tiles, bool is_load) const {
        for (int64_t column = 0; column < layer.value_dim; column += kTile)
            for (int64_t i = 0; i < layer.key_dim; i++, tiles += kTile)
                for (int half = 0; half < 2; half++) {
                    float* at = state + i * layer.value_dim + column + half * kLanes;
                    if (is_load)
                        store(tiles + half * kLanes, load(at));
                    else
                        store(at, load(tiles + half * kLanes));
                }
    }

    static int64_t scratch_floats(const GatedDelta& layer) {
        const int64_t num_heads = layer.num_value_heads / layer.num_key_heads;
        return num_heads * layer.key_dim * layer.value_dim + kPiece * (2 * layer.key_dim + layer.value_dim + 2);
    }

    void run(float* scratch) const {
        const int64_t key_dim = layer.key_dim, value_dim = layer.value_dim, num_heads = values_per_key();
        const int64_t first_head = key_head * num_heads, state_size = key_dim * value_dim;
        float* const tiles = scratch;
        float* const queries = tiles + num_heads * state_size;
        float* const keys = queries + kPiece * key_dim;
        float* const values = keys + kPiece * key_dim;
        float* const decays = values + kPiece * value_dim;
        float* const betas = decays + kPiece;
        load_inputs_before();
        for (int64_t head = 0; head < num_heads; head++) {
            if (row.num_computed == 0)
                std::fill_n(tiles + head * state_size, state_size, 0.0f);
            else
                copy_state(matrix_of(state_before(row.num_computed), first_head + head), tiles + head * state_size, true);
        }
        const int64_t first_gate = num_channels(), first_beta = first_gate + layer.num_value_heads * value_dim;
        for (int64_t token = 0; token < row.num_tokens;) {
            const int64_t position = row.num_computed + token, in_block = step.block_size - position % step.block_size;
            const int64_t longest = step.keeps_state(row.index, token) ? 1 : std::min(kPiece, in_block);
            const int64_t until = std::min(row.num_tokens, token + longest), count = until - token;
            convolve(own_queries(), token, until, queries);
            convolve(own_keys(), token, until, keys);
            scale_to_length(queries, count, key_dim, 1.0f / std::sqrt(static_cast<float>(key_dim)));
            scale_to_length(keys, count, key_dim, 1.0f);
            for (int64_t i = 0; i < num_heads; i++) {
                const int64_t head = first_head + i;
                convolve(own_values(i), token, until, values);
                const T* first = x + (row.first_token + token) * x_stride;
                for (int64_t t = 0; t < count; t++) {
                    const T* extra = first + t * x_stride + first_beta;
                    const float step = to_float(extra[layer.num_value_heads + head]) + layer.step_bias[head];
                    const float softplus = step > 20.0f ? step : std::log1p(std::exp(step));
                    decays[t] = std::exp(-layer.rates[head] * softplus);
                    betas[t] = 1.0f / (1.0f + std::exp(-to_float(extra[head])));
                }
                for (int64_t column = 0; column < value_dim; column += kTile)
                    recur(tiles + i * state_size + column * key_dim, queries, keys, values + column, decays, betas, count);
                for (int64_t t = 0; t < count; t++)
                    finish(
                        values + t * value_dim, first + t * x_stride + first_gate + head * value_dim,
                        out + ((row.first_token + token + t) * layer.num_value_heads + head) * value_dim);
            }
            token = until;
            if (!step.keeps_state(row.index, token - 1)) continue;
            char* const state = state_before(row.num_computed + token);
            for (int64_t i = 0; i < num_heads; i++) copy_state(matrix_of(state, first_head + i), tiles + i * state_size, false);
            store_inputs(state, token);
        }
    }
};

template <typename T>
void gated_delta(const T* x, int64_t x_stride, T* out, char* states, const AttentionStep& step, const GatedDelta& layer) {
    const int64_t num_tasks = static_cast<int64_t>(step.num_rows) * layer.num_key_heads;
    share(num_tasks, num_tasks > 1, 1, [&](int64_t i, int64_t) {
        thread_local std::vector<float> scratch;
        thread_local std::vector<T> before;
        const int64_t row = i / layer.num_key_heads, key_head = i % layer.num_key_heads;
        const int64_t first = step.query_start_loc[row];
        const Row all = {row, first, step.query_start_loc[row + 1] - first, step.num_computed_tokens[row]};
        if (all.num_tokens == 0) return;
        scratch.resize(Task<T>::scratch_floats(layer));
        const int64_t values = layer.num_value_heads / layer.num_key_heads * layer.value_dim;
        before.resize((layer.kernel_size - 1) * (2 * layer.key_dim + values));
        Task<T>{layer, x, x_stride, out, states, step, all, key_head, before.data()}.run(scratch.data());
    });
}

}  // namespace

extern "C" void inflight_gated_delta(
    const void* x, int64_t x_stride, void* out, void* states, const AttentionStep* step, const GatedDelta* layer) {
    char* const bytes = static_cast<char*>(states);
    if (layer->dtype == kFloat32)
        gated_delta(static_cast<const float*>(x), x_stride, static_cast<float*>(out), bytes, *step, *layer);
    else
        gated_delta(static_cast<const bf16*>(x), x_stride, static_cast<bf16*>(out), bytes, *step, *layer);
}
