// The vectors of integer.h for ARM. With the extension I8MM one instruction multiplies unsigned with signed bytes, with DOTPROD
// signed with signed ones; without them products are added up in 16 bits. All sums are exact, so results are the same.
#pragma once

#include "simd_neon.h"

using VecI = VecU;

static inline int32x4_t as_signed(uint32x4_t v) { return vreinterpretq_s32_u32(v); }
static inline VecI splat_int(int32_t x) { return splat_unit(static_cast<uint32_t>(x)); }
static inline VecF to_float(VecI v) { return to_floats(v); }
static inline VecI to_int(VecF v) {
    return {vreinterpretq_u32_s32(vcvtnq_s32_f32(v.low)), vreinterpretq_u32_s32(vcvtnq_s32_f32(v.high))};
}
static inline VecI add(VecI a, VecI b) { return {vaddq_u32(a.low, b.low), vaddq_u32(a.high, b.high)}; }
static inline VecI sub(VecI a, VecI b) { return {vsubq_u32(a.low, b.low), vsubq_u32(a.high, b.high)}; }
static inline int32_t sum(VecI v) { return vaddvq_s32(as_signed(vaddq_u32(v.low, v.high))); }
static inline void store_as_bytes(uint32_t* p, VecI v) {
    const uint8x8_t bytes = vmovn_u16(vmovn_high_u32(vmovn_u32(v.low), v.high));
    vst1_u32(p, vreinterpret_u32_u8(bytes));
}
static inline VecU load_bytes(const void* p) { return load_units(static_cast<const uint32_t*>(p)); }

static inline uint8x16_t bytes_of(uint32x4_t v) { return vreinterpretq_u8_u32(v); }
static inline VecU from_bytes(uint8x16_t low, uint8x16_t high) {
    return {vreinterpretq_u32_u8(low), vreinterpretq_u32_u8(high)};
}
static inline VecU low_nibbles(VecU v) {
    return from_bytes(vandq_u8(bytes_of(v.low), vdupq_n_u8(15)), vandq_u8(bytes_of(v.high), vdupq_n_u8(15)));
}
static inline VecU high_nibbles(VecU v) { return from_bytes(vshrq_n_u8(bytes_of(v.low), 4), vshrq_n_u8(bytes_of(v.high), 4)); }

// The bits of each unit from bit `first` on, as many as `mask` has.
static inline VecU bits_of(VecU v, int32_t first, uint32_t mask) {
    const int32x4_t shift = vdupq_n_s32(-first);
    const uint32x4_t kept = vdupq_n_u32(mask);
    return {vandq_u32(vshlq_u32(v.low, shift), kept), vandq_u32(vshlq_u32(v.high, shift), kept)};
}
template <int kBits>
static inline VecI bits_at(VecU v, int32_t first, int32_t zero_point) {
    return sub(bits_of(v, first, (1 << kBits) - 1), splat_int(zero_point));
}

static inline VecF magnitude(VecF v) { return {vabsq_f32(v.low), vabsq_f32(v.high)}; }
static inline VecF unless_above(VecF v, VecF limit) {
    const VecF size = magnitude(v);
    return select({vcleq_f32(size.low, limit.low), vcleq_f32(size.high, limit.high)}, v, zero());
}
static inline uint32_t lanes_above(VecF v, VecF limit) {
    const VecU bits = lane_bits();
    return vaddvq_u32(vorrq_u32(
        vandq_u32(vcgtq_f32(v.low, limit.low), bits.low), vandq_u32(vcgtq_f32(v.high, limit.high), bits.high)));
}

static inline int8x16_t signed_bytes_of(uint32x4_t v) { return vreinterpretq_s8_u32(v); }

// Adds to each sum the products of four neighbouring bytes. Bytes of `b` are above -128.
static inline uint32x4_t dot_signed(uint32x4_t sums, uint32x4_t a, uint32x4_t b) {
    const int8x16_t x = signed_bytes_of(a), y = signed_bytes_of(b);
#if defined(__ARM_FEATURE_DOTPROD)
    return vreinterpretq_u32_s32(vdotq_s32(as_signed(sums), x, y));
#else
    // a product is at most 128 * 127, so two of them fit 16 bits
    const int16x8_t pairs = vpaddq_s16(vmull_s8(vget_low_s8(x), vget_low_s8(y)), vmull_high_s8(x, y));
    return vreinterpretq_u32_s32(vpadalq_s16(as_signed(sums), pairs));
#endif
}

static inline VecI dot_signed(VecI sums, VecU a, VecU b) {
    return {dot_signed(sums.low, a.low, b.low), dot_signed(sums.high, a.high, b.high)};
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
static inline uint32x4_t dot_unsigned_signed(uint32x4_t sums, uint32x4_t a, uint32x4_t b) {
    return vreinterpretq_u32_s32(vusdotq_s32(as_signed(sums), bytes_of(a), signed_bytes_of(b)));
}
#else
// The bytes of `a` are x + 128 with signed x: the product of x is added, and that of 128.
static inline uint32x4_t dot_unsigned_signed(uint32x4_t sums, uint32x4_t a, uint32x4_t b) {
    const uint32x4_t top = vdupq_n_u32(0x80808080u);
    return vsubq_u32(dot_signed(sums, veorq_u32(a, top), b), dot_signed(vdupq_n_u32(0), top, b));
}
#endif

template <int kBits>
static inline VecI dot_bytes(VecI sums, VecU a, VecU b) {
    if constexpr (kBits <= 7) return dot_signed(sums, a, b);
    return {dot_unsigned_signed(sums.low, a.low, b.low), dot_unsigned_signed(sums.high, a.high, b.high)};
}

constexpr int32_t kTableZero = 0;  // the bytes of a table are signed
static inline VecU load_table(const int8_t* table) {
    const uint8x16_t bytes = vreinterpretq_u8_s8(vld1q_s8(table));
    return from_bytes(bytes, bytes);
}
static inline VecU look_up(VecU table, VecU nibbles) {
    const uint8x16_t integers = bytes_of(table.low);
    return from_bytes(vqtbl1q_u8(integers, bytes_of(nibbles.low)), vqtbl1q_u8(integers, bytes_of(nibbles.high)));
}
static inline VecI looked_up_at(VecU table, VecU v, int32_t first) {
    const VecU found = look_up(table, bits_of(v, first, 15));
    const auto extend = [](uint32x4_t x) { return vreinterpretq_u32_s32(vshrq_n_s32(as_signed(vshlq_n_u32(x, 24)), 24)); };
    return {extend(found.low), extend(found.high)};
}
static inline VecI dot_looked_up(VecI sums, VecU a, VecU b) { return dot_signed(sums, a, b); }
