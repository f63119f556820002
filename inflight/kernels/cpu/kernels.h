// What the library exports, as C functions: `library.py` declares the same.
//
// Pointers are to rows of float or bfloat16, by `dtype`; strides count elements. No kernel keeps a pointer, allocates what the
// caller sees, or starts a thread of its own: parallel regions run in the process's OpenMP pool, whose size the caller sets.
#pragma once

#include <cstdint>

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

struct AttentionStep {  // the rows of a step, as in attention/metadata.py
    int32_t num_rows;
    int32_t block_size;            // a multiple of 16
    int32_t sliding_window;        // tokens a query sees, itself included; 0: all
    int32_t table_stride;          // entries from one row of the block table to the next
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    const int32_t* num_computed_tokens;
    const int32_t* block_table;
};

struct HeadLayout {
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;              // a multiple of 16
    int32_t dtype;                 // of queries, keys and values
    int32_t cache_dtype;           // the same, or kInt8: head_dim is at most 512
    int64_t block_stride;          // bytes from one block of the arena to the next
};

struct LinearWeight {  // of out_features x in_features; the layout of `packed` is in linear.h
    const void* packed;
    const float* bias;             // a number for every lane of every panel, or null
    int64_t in_features;           // a multiple of four
    int64_t out_features;          // with a gate, of both halves
    int64_t group_size;            // divides in_features; a multiple of 32 in a weight of 4 bits
    float scale;                   // of an integer weight, times the scales and offsets in `packed`
    int32_t bits;                  // 32: float, 16: bfloat16, 8 and 4: integers
    int32_t has_offsets;           // else the middle of the range is zero
    int32_t is_gated;              // the result is silu(first half of the features) * second half
};

struct DecoderLayer {  // a pre-norm layer with grouped queries and a gated MLP, as in models/llama.py
    const void* input_norm;
    const LinearWeight* qkv_proj;
    const void* qk_norm;           // of each query and key head, or null
    const LinearWeight* o_proj;
    const void* post_attention_norm;
    const LinearWeight* gate_up_proj;
    const LinearWeight* down_proj;
    void* kv_cache;
    int32_t kv_group;
};

struct DecoderStep {  // buffers are contiguous rows, one a token
    const AttentionStep* const* kv_groups;
    int64_t num_tokens;
    const int64_t* rows;           // the tokens that leave the last layer, at most num_tokens
    int64_t num_rows;              // -1: all
    void* residual;                // [num_tokens, hidden_size]; its first num_rows are the result's
    void* delta;                   // the same; what the layer before left to be added, and the result
    int32_t has_delta;             // whether there is a layer before
    int32_t dtype;
    const void* cos;               // [num_tokens, head_dim]
    const void* sin;
    void* hidden;                  // [num_tokens, hidden_size]
    void* heads;                   // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    void* attended;                // [num_tokens, num_heads * head_dim]
    void* gated;                   // [num_tokens, intermediate_size]
    HeadLayout layout;
    float scale;
    float eps;
    float qk_eps;
};

#define INFLIGHT_EXPORT __attribute__((visibility("default")))

extern "C" {

INFLIGHT_EXPORT const char* inflight_source_hash();

// Binds thread i of the caller's pool, which is made as large as that, to cores[i]; the caller is thread 0. Returns 0, or the errno
// of what failed; threads may then be bound or not.
INFLIGHT_EXPORT int32_t inflight_bind_threads(const int32_t* cores, int32_t num_threads);

// out = x / sqrt(mean(x^2) + eps) * weight, in float until the end. With `delta`, x += delta comes first, rounded to x's type.
INFLIGHT_EXPORT void inflight_rms_norm(
    void* x, int64_t x_stride, const void* delta, int64_t delta_stride, const void* weight, void* out, int64_t num_rows,
    int64_t size, float eps, int32_t dtype);

// Of every token's first `num_heads` heads, in place: RMSNorm with a weight row per head, if there is a weight; then
// head = head * cos + (head with its halves swapped) * sin. cos and sin are [num_tokens, head_dim].
INFLIGHT_EXPORT void inflight_norm_and_rotate(
    void* heads, int64_t token_stride, const void* weight, const void* cos, const void* sin, int64_t num_tokens,
    int64_t num_heads, int64_t head_dim, float eps, int32_t dtype);

// out = x times the weight, plus the bias. x has the weight's type, or any if that is an integer one.
INFLIGHT_EXPORT void inflight_linear(
    const void* x, int64_t x_stride, int32_t x_dtype, void* out, int64_t out_stride, int32_t out_dtype, int64_t num_rows,
    const LinearWeight* weight);

// Bytes of weight->packed, and the number of lanes of all its panels.
INFLIGHT_EXPORT void inflight_packed_size(const LinearWeight* weight, int64_t* num_bytes, int64_t* num_lanes);

// For each lane of all panels its output feature, or -1.
INFLIGHT_EXPORT void inflight_packed_features(const LinearWeight* weight, int64_t* features);

// Into weight->packed. rows[i] is where row i of [out_features, in_features] starts: floats or bfloat16, or bytes of an integer
// weight (`is_signed`: with the middle at zero); scales and offsets [out_features, num_groups] float.
INFLIGHT_EXPORT void inflight_pack_linear(
    const char* const* rows, int32_t is_signed, const float* scales, const float* offsets, const LinearWeight* weight);

// Rows of floats or bfloat16 to integers: 8 bits, one group, symmetric, or 4 bits with offsets.
INFLIGHT_EXPORT void inflight_quantize_weight(
    const void* rows, int64_t row_stride, int32_t dtype, int64_t num_rows, int64_t size, int64_t group_size, int32_t bits,
    uint8_t* values, float* scales, float* offsets);

// logits [., vocab_size], contiguous: in row rows[i], distinct, token t becomes -inf where bit t % 32 of word t / 32 of
// masks[i] is 0. The mask's bits beyond the vocabulary count for nothing.
INFLIGHT_EXPORT void inflight_apply_token_masks(
    float* logits, int64_t vocab_size, const int64_t* rows, const uint32_t* masks, int64_t num_masks);

// Write the step's keys and values to the cache, then attend. `out` is [num_tokens, num_heads, head_dim].
INFLIGHT_EXPORT void inflight_paged_attention(
    const void* query, int64_t query_stride, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
    void* out, void* cache, const AttentionStep* step, const HeadLayout* layout, float scale);

// The most memory, in bytes, that `inflight_paged_attention` keeps from call to call. Assumes that one thread calls it, whose
// OpenMP pool has `num_threads` threads.
INFLIGHT_EXPORT int64_t inflight_attention_scratch_bytes(int32_t head_dim, int32_t num_threads);

// All layers, one after the other, as the functions above compute them.
INFLIGHT_EXPORT void inflight_decoder_layers(const DecoderLayer* layers, int64_t num_layers, const DecoderStep* step);
}
