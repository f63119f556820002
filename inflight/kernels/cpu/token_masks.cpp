// Grammar masks: forbidden logits become -inf, in one pass that reads no logit.

#include <cstdint>
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace {

constexpr int64_t kWordBits = 32;
constexpr uint32_t kAll = 0xffffffffu;
constexpr int64_t kParallelElements = 1 << 15;  // with fewer, waking the other threads costs more than they save

// Of at most kWordBits logits, those whose bit in `forbidden` is set; nothing else is touched.
void forbid(float* logits, uint32_t forbidden, VecF never) {
    for (int i = 0; i < kWordBits; i += kLanes) store_where(logits + i, forbidden >> i, never);
}

void apply_mask(float* logits, int64_t vocab_size, const uint32_t* mask) {
    const VecF never = splat(-std::numeric_limits<float>::infinity());
    const int64_t whole = vocab_size / kWordBits;
    for (int64_t word = 0; word < whole; word++) {
        const uint32_t forbidden = ~mask[word];
        float* const at = logits + word * kWordBits;
        if (forbidden == kAll)
            for (int i = 0; i < kWordBits; i += kLanes) store(at + i, never);
        else if (forbidden != 0)
            forbid(at, forbidden, never);
    }
    const int64_t rest = vocab_size % kWordBits;
    if (rest != 0) forbid(logits + whole * kWordBits, ~mask[whole] & ((1u << rest) - 1), never);
}

}  // namespace

extern "C" {

void inflight_apply_token_masks(
    float* logits, int64_t vocab_size, const int64_t* rows, const uint32_t* masks, int64_t num_masks) {
    const int64_t num_words = (vocab_size + kWordBits - 1) / kWordBits;
#pragma omp parallel for schedule(static) if (num_masks * vocab_size >= kParallelElements)
    for (int64_t i = 0; i < num_masks; i++)
        apply_mask(logits + rows[i] * vocab_size, vocab_size, masks + i * num_words);
}
}
