// All decoder layers in one call. Returning to Python between two kernels would be slow: another thread may hold the
// interpreter's lock, and the weights have displaced the interpreter's memory from the cache.

#include <cstring>

#include "kernels.h"

namespace {

void copy_rows(const char* from, int64_t row_bytes, const int64_t* rows, int64_t num_rows, char* to) {
    for (int64_t i = 0; i < num_rows; i++) std::memcpy(to + i * row_bytes, from + rows[i] * row_bytes, row_bytes);
}

void run_layer(const DecoderLayer& layer, const DecoderStep& step, bool has_delta, bool is_last) {
    const HeadLayout& layout = step.layout;
    const int32_t dtype = step.dtype;
    const int64_t element = dtype == kFloat32 ? sizeof(float) : sizeof(uint16_t);
    const int64_t hidden_size = layer.qkv_proj->in_features, intermediate_size = layer.down_proj->in_features;
    const int64_t query_size = static_cast<int64_t>(layout.num_heads) * layout.head_dim;
    const int64_t key_size = static_cast<int64_t>(layout.num_kv_heads) * layout.head_dim;
    const int64_t heads_size = query_size + 2 * key_size;
    inflight_rms_norm(
        step.residual, hidden_size, has_delta ? step.delta : nullptr, hidden_size, layer.input_norm, step.hidden,
        step.num_tokens, hidden_size, step.eps, dtype);
    inflight_linear(
        step.hidden, hidden_size, dtype, step.heads, heads_size, dtype, step.num_tokens, layer.qkv_proj);
    inflight_norm_and_rotate(
        step.heads, heads_size, layer.qk_norm, step.cos, step.sin, step.num_tokens, layout.num_heads + layout.num_kv_heads,
        layout.head_dim, step.qk_eps, dtype);
    const char* query = static_cast<const char*>(step.heads);
    const char *key = query + query_size * element, *value = key + key_size * element;
    inflight_paged_attention(
        query, heads_size, key, heads_size, value, heads_size, step.attended, layer.kv_cache,
        step.kv_groups[layer.kv_group], &layout, &layer.attention);
    int64_t num_rows = step.num_tokens;
    const void* attended = step.attended;
    if (is_last && step.num_rows >= 0) {  // `heads` and `hidden` are not needed any more, so they are used as buffers
        num_rows = step.num_rows;
        attended = step.heads;
        copy_rows(static_cast<char*>(step.attended), query_size * element, step.rows, num_rows, static_cast<char*>(step.heads));
        copy_rows(static_cast<char*>(step.residual), hidden_size * element, step.rows, num_rows, static_cast<char*>(step.hidden));
        std::memcpy(step.residual, step.hidden, num_rows * hidden_size * element);
    }
    inflight_linear(attended, query_size, dtype, step.delta, hidden_size, dtype, num_rows, layer.o_proj);
    inflight_rms_norm(
        step.residual, hidden_size, step.delta, hidden_size, layer.post_attention_norm, step.hidden, num_rows, hidden_size,
        step.eps, dtype);
    inflight_linear(step.hidden, hidden_size, dtype, step.gated, intermediate_size, dtype, num_rows, layer.gate_up_proj);
    inflight_linear(step.gated, intermediate_size, dtype, step.delta, hidden_size, dtype, num_rows, layer.down_proj);
}

}  // namespace

extern "C" void inflight_decoder_layers(const DecoderLayer* layers, int64_t num_layers, const DecoderStep* step) {
    for (int64_t i = 0; i < num_layers; i++)
        run_layer(layers[i], *step, i > 0 || step->has_delta != 0, i + 1 == num_layers);
}
