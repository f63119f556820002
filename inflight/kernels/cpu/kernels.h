// The C functions that the library exports, and their structs. `library.py` declares the same for Python.
//
// Pointers are to rows of float or bfloat16 (`dtype`). Strides count elements. No kernel keeps a pointer or returns memory.
// No kernel starts threads of its own: it computes in the caller's OpenMP pool (threads.h), whose size the caller sets.
#pragma once

#include <cstdint>

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kFloat16 = 3 };

struct AttentionStep {  // the rows of a step, as in attention/metadata.py
    int32_t num_rows;
    int32_t block_size;            // a multiple of 16
    int32_t sliding_window;        // tokens that a query sees, itself included; 0: all
    int32_t table_stride;          // entries from one row of the block table to the next
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    const int32_t* num_computed_tokens;
    const int32_t* block_table;
    int64_t state_bytes;           // of one state of a recurrent layer
    int32_t num_states;            // states in a block; the one after the token at position p is number p % num_states
    // For each token of the step the position behind the last key that it sees in layers with `sees_whole_images`: at least its
    // own position + 1, at most the length of its row, and not less than that of the token before it. null: its own position + 1.
    const int32_t* ends;

    // Where the state after the tokens [0, num_tokens) of a row is, in bytes from the layer's first block.
    int64_t state_offset(int64_t row, int64_t num_tokens, int64_t block_stride) const {
        const int64_t last = num_tokens - 1;
        return block_of(row, num_tokens) * block_stride + last % num_states * state_bytes;
    }
    int64_t block_of(int64_t row, int64_t num_tokens) const { return block_table[row * table_stride + (num_tokens - 1) / block_size]; }
    // Whether the state after token `token` of a row is kept: it is the row's last, or the last of a block that keeps a state,
    // or a block has room for the states after all tokens of the row, which may be drafts.
    bool keeps_state(int64_t row, int64_t token) const {
        const int64_t row_tokens = query_start_loc[row + 1] - query_start_loc[row], end = num_computed_tokens[row] + token + 1;
        if (token == row_tokens - 1 || row_tokens <= num_states) return true;
        return end % block_size == 0 && block_of(row, end) != 0;
    }
};

struct HeadLayout {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;              // a multiple of 16
    int32_t value_dim;             // a multiple of 16; if it is not head_dim, values are the first elements of the keys
    int32_t dtype;                 // of queries, keys and values
    int32_t cache_dtype;           // the same as dtype, or kInt8, for which head_dim is at most 512
    int64_t block_stride;          // bytes from one block of the arena to the next
};

struct AttentionParams {  // what a layer's attention computes besides the products
    float scale;                   // of the scores; above 0
    float soft_cap;                // c: a score x becomes c * tanh(x / c); 0: it stays x
    const float* sinks;            // for each query head, one more logit in the denominator of the softmax; null: there is none
    // [num_heads, 2 * bias_radius + 1], or null: what is added to the score of a key that is d behind its query, at
    // bias_radius + d; a distance of more than bias_radius counts as bias_radius
    const float* position_bias;
    int32_t bias_radius;
    int32_t is_causal;             // if 0, a query also sees the keys behind its own: with a window, those less than it away
    int32_t sees_whole_images;     // if not 0, `AttentionStep::ends` says how far a query sees
};

struct LinearWeight {  // [out_features, in_features]; linear.h describes the layout of `packed`
    const void* packed;
    const float* bias;             // one number for each lane of each panel, or null
    int64_t in_features;           // a multiple of four
    int64_t out_features;          // if there is a gate, of both halves together
    int64_t group_size;            // divides in_features; a multiple of 32 in a weight of 4 bits
    float scale;                   // of an integer weight: multiplies the scales and offsets in `packed`
    int32_t bits;                  // 32: float, 16: bfloat16, 8 and 4: integers
    int32_t has_offsets;           // if 0, the middle of the integers' range means 0
    int32_t gate;                  // if not 0, the result is gate(first half of the features) * second half; 1: SiLU, 2: GELU in
                                   // its tanh form, 4: swiglu_oai, 5: GELU; see kernels/gate.py
    int32_t has_table;             // only with 4 bits and no offsets: a weight is its scale times table[its 4 bits]
    int32_t activation;            // if not 0, what each result goes through, without a gate; 1: SiLU, 2: GELU in its tanh form,
                                   // 5: GELU, 6: ReLU; see kernels/gate.py
    int8_t table[16];              // above -128
};

constexpr int64_t kMaxConvolution = 8;

struct GatedDelta {  // a layer of gated_delta.cpp, on this rank
    int64_t num_key_heads;
    int64_t num_value_heads;       // a multiple of num_key_heads
    int64_t key_dim;               // a multiple of 16
    int64_t value_dim;             // a multiple of 32
    int64_t kernel_size;           // of the convolution; at most kMaxConvolution
    int64_t block_stride;          // bytes from one block of the arena to the next
    int64_t inputs_offset;         // bytes of the state, behind which the block has the inputs of the convolution
    const float* conv_weight;      // [kernel_size, channels]
    const float* rates;            // [num_value_heads]
    const float* step_bias;        // [num_value_heads]
    const float* norm_weight;      // [value_dim]
    float eps;
    int32_t dtype;                 // of the rows and of the inputs of the convolution
};

struct ShortConv {  // a layer of short_conv.cpp, on this rank
    int64_t num_channels;          // a multiple of 16
    int64_t kernel_size;           // at most kMaxConvolution
    int64_t block_stride;          // bytes from one block of the arena to the next
    const float* weight;           // [kernel_size, num_channels]
    const float* bias;             // [num_channels], or null
    int32_t dtype;                 // of the rows and of the state
};

constexpr int64_t kMostExperts = 1024;

struct ExpertRouter {  // as in config/experts.py
    int64_t num_experts;           // at most kMostExperts
    int64_t top_k;
    int64_t num_groups;            // of equal size; 1: no groups
    int64_t top_groups;
    const float* choice_bias;      // [num_experts], or null
    const float* expert_scale;     // [num_experts]: by what the weight of an expert is multiplied; or null
    float scale;
    float sum_offset;              // is added to the sum of the scores, if weights are renormalized
    float jitter;
    int32_t scoring;               // 0: softmax, 1: sigmoid, 2: sparse mixer
    int32_t group_scoring;         // 0: the highest score, 1: the sum of the two highest
    int32_t renormalizes;
    int32_t num_shared;            // places of the shared expert behind the chosen ones: one for each part of it, 0: none
    int32_t has_shared_gate;       // whether the shared expert has a logit
};

// Which ranks have which experts of a layer, and how much is computed. The kernels add to `pairs`, `num_blocks` and `busiest_blocks`,
// and set `is_agreed`. expert_exchange.cpp says more.
struct ExpertBalance {
    const uint8_t* holders;        // [2, routed experts, ranks]: whether a rank has an expert, now and next. Each expert has a rank
    int64_t* pairs;                // [routed experts]: the pairs (row, expert) of all ranks so far
    int64_t num_blocks;            // blocks of pairs that all ranks have computed
    int64_t busiest_blocks;        // the blocks of the rank with the most of them in a call, added up over the calls
    int64_t is_ready_for;          // names the next holders, if this rank is ready for them; 0: it is not
    int64_t is_agreed;             // whether all ranks were ready for the same ones in the last call, which has used them
};

struct Experts {  // a layer of experts.cpp, on this rank
    const LinearWeight* gate_up;   // of each expert, with a gate; `packed` is null if this rank does not have the expert
    const LinearWeight* down;      // of each expert
    ExpertBalance* balance;        // null: no expert is on several ranks, and nothing is counted
    int64_t num_experts;           // with the parts of the shared one
    int64_t num_routed;            // without them
    int64_t choices_per_row;
    int64_t hidden_size;
    int64_t inner_size;            // the largest number of results of a gate
    int32_t dtype;                 // of the rows, and of the results of gates
};

// The memory in which ranks that have different experts of a layer exchange rows, and the place of this rank. All ranks have the same
// `chunk_rows` and the same places in the memory, where each replica has room for `chunk_rows` rows. expert_exchange.cpp says more.
struct ExpertExchange {
    struct RankGroup* group;       // its ranks: those of the first replica, then those of the second one, ...
    char* memory;                  // shared by all ranks
    int64_t chunk_rows;            // the most rows of a replica that are exchanged at once
    int64_t results_at;            // float [replicas, chunk_rows, choices per row, hidden_size]
    int64_t sums_at;               // [replicas, chunk_rows, hidden_size]
    int64_t choices_at;            // as `choices` of inflight_experts, [replicas, chunk_rows, choices per row]
    int64_t inputs_at;             // [replicas, chunk_rows, hidden_size]
    int32_t num_replicas;
    int32_t replica;
    int32_t tp_size;               // the ranks of a replica, which all have the same rows
    int32_t tp_rank;
};

constexpr int32_t kTapeArguments = 11;  // the most that a function on a tape has

struct TapeCall {
    int32_t function;              // an index into `kFunctions` in tape.cpp
    int32_t num_patches;
    int64_t arguments[kTapeArguments];  // a float is in the first bytes; what differs from step to step is patched
};

struct TapePatch {  // argument = values[base] + values[count] * per_count + offset
    int32_t argument;
    int32_t base;
    int32_t count;
    int64_t per_count;
    int64_t offset;
};

struct RankGroup {  // one rank's end of a group of ranks; only the memory is shared
    void* memory;                  // inflight_group_memory_bytes(), zero at the beginning except for the first 64 bytes, which the
                                   // collectives do not use
    const int32_t* pidfds;         // for each rank, a descriptor of its process
    int64_t piece_bytes;           // a multiple of 64
    int64_t timeout_ns;            // the longest wait for a peer
    int32_t size;
    int32_t rank;
    uint32_t num_pieces;           // how many pieces this rank has exchanged; 0 at the beginning
    int32_t is_waiting;            // not 0 while this rank waits for a peer
};

// How a group ends. A collective returns 0, or such a number plus 256 times the rank that caused the end.
enum EndOfGroup : int32_t { kLeft = 1, kDead = 2, kSilent = 3 };

#define INFLIGHT_EXPORT __attribute__((visibility("default")))

extern "C" {

INFLIGHT_EXPORT const char* inflight_source_hash();

// Binds thread i of the caller's OpenMP pool, which gets `num_threads` threads, to cores[i]. The caller is thread 0. Returns 0, or
// the errno of a failure, after which some threads may be bound.
INFLIGHT_EXPORT int32_t inflight_bind_threads(const int32_t* cores, int32_t num_threads);

// out = x / sqrt(mean(x^2) + eps) * weight, computed in float. If `delta` is not null, x += delta is done first, in x's type.
INFLIGHT_EXPORT void inflight_rms_norm(
    void* x, int64_t x_stride, const void* delta, int64_t delta_stride, const void* weight, void* out, int64_t num_rows,
    int64_t size, float eps, int32_t dtype);

// out = (x - mean) / sqrt(variance + eps) * weight + bias, computed in float. `bias` may be null. `delta` as above.
INFLIGHT_EXPORT void inflight_layer_norm(
    void* x, int64_t x_stride, const void* delta, int64_t delta_stride, const void* weight, const void* bias, void* out,
    int64_t num_rows, int64_t size, float eps, int32_t dtype);

// Changes the first `num_heads` heads of every token in place: RMSNorm with a weight row per head, if there is a weight; then,
// if there are cos and sin, head = head * cos + (head with its halves swapped) * sin. cos and sin are [num_tokens, head_dim].
INFLIGHT_EXPORT void inflight_norm_and_rotate(
    void* heads, int64_t token_stride, int64_t head_stride, const void* weight, const void* cos, const void* sin,
    int64_t num_tokens, int64_t num_heads, int64_t head_dim, float eps, int32_t dtype);

// x *= activation(gate); 1: SiLU, 2: GELU in its tanh form, 3: sigmoid
INFLIGHT_EXPORT void inflight_multiply_activation(
    void* x, int64_t x_stride, const void* gate, int64_t gate_stride, int64_t num_rows, int64_t size, int32_t activation,
    int32_t dtype);

// x = activation(x); 1: SiLU, 2: GELU in its tanh form, 5: GELU, 6: ReLU
INFLIGHT_EXPORT void inflight_activate(
    void* x, int64_t x_stride, int64_t num_rows, int64_t size, int32_t activation, int32_t dtype);

// x = (x + delta) * factor. Without `delta` nothing is added, without `factor` the sum is not multiplied. `factor_stride` is 1 if
// each row has a factor of its own, 0 if there is one for all.
INFLIGHT_EXPORT void inflight_add_and_scale(
    void* x, int64_t x_stride, const void* delta, int64_t delta_stride, const float* factor, int64_t factor_stride,
    int64_t num_rows, int64_t size, int32_t dtype);

// out = x, both [num_rows, num_heads, size], with strides from one row, and from one head, to the next.
INFLIGHT_EXPORT void inflight_copy_heads(
    const void* x, int64_t x_stride, int64_t x_head_stride, void* out, int64_t out_stride, int64_t out_head_stride,
    int64_t num_rows, int64_t num_heads, int64_t size, int32_t dtype);

// Copies the rows `rows` of x, each of `row_bytes` bytes, to `out`.
INFLIGHT_EXPORT void inflight_select_rows(
    const void* x, int64_t x_stride_bytes, const int64_t* rows, void* out, int64_t num_rows, int64_t row_bytes);

// out = x times the weight, plus the bias. x has the weight's type; if the weight is of integers, float or bfloat16.
INFLIGHT_EXPORT void inflight_linear(
    const void* x, int64_t x_stride, int32_t x_dtype, void* out, int64_t out_stride, int32_t out_dtype, int64_t num_rows,
    const LinearWeight* weight);

// The same for each head, which has a weight of its own: x [num_rows, num_heads, in_features], out [num_rows, num_heads,
// out_features]. x and out have the dtype `dtype`. Head strides are those from one head to the next.
INFLIGHT_EXPORT void inflight_linear_of_heads(
    const void* x, int64_t x_stride, int64_t x_head_stride, void* out, int64_t out_stride, int64_t out_head_stride, int32_t dtype,
    int64_t num_rows, int64_t num_heads, const LinearWeight* weights);

// Chooses the experts of each row. logits: [num_rows, experts], strided; out: [num_rows, choices per row], each an int32, the
// expert, and a float, its weight.
INFLIGHT_EXPORT void inflight_choose_experts(
    const float* logits, int64_t logits_stride, void* out, int64_t num_rows, const ExpertRouter* router);

// The results of the chosen experts, times their weights: x [num_rows, hidden_size], out [num_rows, choices per row, hidden_size].
INFLIGHT_EXPORT void inflight_experts(
    const void* x, int64_t x_stride, const void* choices, float* out, int64_t num_rows, const Experts* layer);

// out [num_rows, size] = the sum of `results` [num_rows, per_row, size] over the second dimension, from first to last.
INFLIGHT_EXPORT void inflight_add_experts(
    const float* results, void* out, int64_t num_rows, int64_t per_row, int64_t size, int32_t dtype);

// The same as inflight_experts and inflight_add_experts, if other ranks have some of the experts. All ranks of the group must call
// this, but replicas may have different numbers of rows, also none. Returns 0, or how the group has ended.
INFLIGHT_EXPORT int32_t inflight_exchange_experts(
    const void* x, int64_t x_stride, const void* choices, void* out, int64_t num_rows, const Experts* layer,
    const ExpertExchange* exchange);

// Returns the size of weight->packed in bytes, and the number of lanes of all its panels.
INFLIGHT_EXPORT void inflight_packed_size(const LinearWeight* weight, int64_t* num_bytes, int64_t* num_lanes);

// Returns the output feature of each lane of all panels, or -1 for a lane without a feature.
INFLIGHT_EXPORT void inflight_packed_features(const LinearWeight* weight, int64_t* features);

// Packs a weight into weight->packed. Row i of [out_features, in_features] starts at rows[i]. It is of floats, bfloat16, or the
// bytes of an integer weight: int8 if `is_signed`, otherwise uint8. scales and offsets: float [out_features, num_groups].
// If `rows` is null, only scales and offsets are written, to an integer weight that is packed already.
INFLIGHT_EXPORT void inflight_pack_linear(
    const char* const* rows, int32_t is_signed, const float* scales, const float* offsets, const LinearWeight* weight);

// Quantizes rows of floats or bfloat16: to 8 bits, symmetric, with one group per row, or to 4 bits with offsets.
INFLIGHT_EXPORT void inflight_quantize_weight(
    const void* rows, int64_t row_stride, int32_t dtype, int64_t num_rows, int64_t size, int64_t group_size, int32_t bits,
    uint8_t* values, float* scales, float* offsets);

// Sets the logits of forbidden tokens to -inf. logits: [., vocab_size], contiguous. Mask i is for row rows[i]; no row is there
// twice. Bit t % 32 of word t / 32 of a mask is 1 if token t is allowed. Bits beyond the vocabulary are ignored.
INFLIGHT_EXPORT void inflight_apply_token_masks(
    float* logits, int64_t vocab_size, const int64_t* rows, const uint32_t* masks, int64_t num_masks);

// Writes the step's keys and values to the cache, then attends. `out` is [num_tokens, num_heads, value_dim].
INFLIGHT_EXPORT void inflight_paged_attention(
    const void* query, int64_t query_stride, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
    void* out, void* cache, const AttentionStep* step, const HeadLayout* layout,
    const AttentionParams* params);

// out [num_tokens, num_value_heads, value_dim] = the gated delta rule of rows x. A row of x has the queries and keys of all key heads,
// then for all value heads: values, gates, one beta each, and one step each. states: the first block of the layer's states.
INFLIGHT_EXPORT void inflight_gated_delta(
    const void* x, int64_t x_stride, void* out, void* states, const AttentionStep* step, const GatedDelta* layer);

// The layer of short_conv.cpp. x is [tokens, 3 * num_channels], out [tokens, num_channels].
INFLIGHT_EXPORT void inflight_short_conv(
    const void* x, int64_t x_stride, void* out, void* states, const AttentionStep* step, const ShortConv* layer);

// The most memory, in bytes, that `inflight_paged_attention` keeps from call to call, if one thread calls it whose
// OpenMP pool has `num_threads` threads.
INFLIGHT_EXPORT int64_t inflight_attention_scratch_bytes(int32_t head_dim, int32_t num_threads);

// The size of the memory that the ranks of a group share, or 0 if the group has too many ranks.
INFLIGHT_EXPORT int64_t inflight_group_memory_bytes(int32_t size, int64_t piece_bytes);

// Collectives, which all ranks of a group call in the same order, from one thread at a time. After an error all fail.
// x = the sum over the ranks, of `count` elements. It is computed in float, in rank order, so all ranks get the same bits.
INFLIGHT_EXPORT int32_t inflight_all_reduce(RankGroup* group, void* x, int64_t count, int32_t dtype);
// x: [num_rows, row_bytes]; out: [num_rows, size, row_bytes]
INFLIGHT_EXPORT int32_t inflight_all_gather(
    RankGroup* group, const void* x, void* out, int64_t num_rows, int64_t row_bytes);
// x = the x of rank 0
INFLIGHT_EXPORT int32_t inflight_broadcast(RankGroup* group, void* x, int64_t num_bytes);

// Lets the collectives of all ranks fail, now and later. Any thread may call it.
INFLIGHT_EXPORT void inflight_leave_group(const RankGroup* group);

// Makes the calls, whose patches follow each other in `patches`. Ends with the first call that returns an error, and returns it.
INFLIGHT_EXPORT int32_t inflight_replay(
    const TapeCall* calls, int64_t num_calls, const TapePatch* patches, const int64_t* values);
}
