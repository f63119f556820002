// Grammar masks: forbidden logits become -inf, in one pass that skips the words (32 tokens each) that allow all tokens.

#include <cstdint>
#include <limits>

#include "kernels.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int64_t kWordBits = 32;
constexpr uint32_t kAll = 0xffffffffu;
constexpr int64_t kParallelElements = 1 << 15;  // with fewer, waking the other threads costs more than they save

void apply_mask(float* logits, int64_t vocab_size, const uint32_t* mask) {
    constexpr float kNever = -std::numeric_limits<float>::infinity();
    const VecF never = splat(kNever);
    const int64_t num_whole = vocab_size / kWordBits;
    for (int64_t word = 0; word < num_whole; word++) {
        const uint32_t forbidden = ~mask[word];
        float* const at = logits + word * kWordBits;
        if (forbidden == kAll)
            for (int i = 0; i < kWordBits; i += kLanes) store(at + i, never);
        else if (forbidden != 0)
            for (int i = 0; i < kWordBits; i += kLanes) store_where(at + i, forbidden >> i, never);
    }
    for (int64_t token = num_whole * kWordBits; token < vocab_size; token++)
        if ((mask[num_whole] >> (token % kWordBits) & 1) == 0) logits[token] = kNever;
}

}  // namespace

extern "C" {

void inflight_apply_token_masks(
    float* logits, int64_t vocab_size, const int64_t* rows, const uint32_t* masks, int64_t num_masks) {
    const int64_t num_words = (vocab_size + kWordBits - 1) / kWordBits;
    share_each(num_masks, num_masks * vocab_size >= kParallelElements, [&](int64_t i) {
        apply_mask(logits + rows[i] * vocab_size, vocab_size, masks + i * num_words);
    });
}
}
