// The vectors of simd.h for ARM: eight floats in two registers of NEON, which every 64-bit ARM processor has.
//
// Everything is laid out and computed as for AVX2: minimum and maximum return their second argument if one is NaN, and sums across
// lanes are added in the same order. With the extension BF16, products of bfloat16 are rounded in another way.
#pragma once

#include <arm_neon.h>

constexpr int kLanes = 8;
constexpr int kRowsOfSums = 6;

struct VecF {
    float32x4_t low, high;
};
struct VecU {  // kLanes units
    uint32x4_t low, high;
};

static inline VecF zero() { return {vdupq_n_f32(0), vdupq_n_f32(0)}; }
static inline VecF splat(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
static inline VecF load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline void store(float* p, VecF v) {
    vst1q_f32(p, v.low);
    vst1q_f32(p + 4, v.high);
}
static inline VecF select(VecU mask, VecF a, VecF b) {
    return {vbslq_f32(mask.low, a.low, b.low), vbslq_f32(mask.high, a.high, b.high)};
}
static inline VecU lane_bits() {
    constexpr uint32_t kBits[kLanes] = {1, 2, 4, 8, 16, 32, 64, 128};
    return {vld1q_u32(kBits), vld1q_u32(kBits + 4)};
}
static inline void store_where(float* p, uint32_t lanes, VecF v) {
    const uint32x4_t wanted = vdupq_n_u32(lanes);
    const VecU bits = lane_bits();
    store(p, select({vtstq_u32(wanted, bits.low), vtstq_u32(wanted, bits.high)}, v, load(p)));
}
static inline VecF add(VecF a, VecF b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
static inline VecF sub(VecF a, VecF b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
static inline VecF mul(VecF a, VecF b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
static inline VecF div(VecF a, VecF b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
static inline VecF fma(VecF a, VecF b, VecF c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
static inline float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline VecF max(VecF a, VecF b) { return {max(a.low, b.low), max(a.high, b.high)}; }
static inline VecF min(VecF a, VecF b) { return {min(a.low, b.low), min(a.high, b.high)}; }

static inline float sum(VecF v) {
    const float32x4_t four = vaddq_f32(v.low, v.high);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

static inline float largest(VecF v) {
    const float32x4_t four = max(v.low, v.high), two = max(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(max(two, vdupq_laneq_f32(two, 1)), 0);
}

static inline VecF keep(VecF v, int from, int to, VecF other) {
    constexpr int32_t kLane[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7};
    const auto is_kept = [&](int32x4_t lane) {
        return vandq_u32(vcgeq_s32(lane, vdupq_n_s32(from)), vcltq_s32(lane, vdupq_n_s32(to)));
    };
    return select({is_kept(vld1q_s32(kLane)), is_kept(vld1q_s32(kLane + 4))}, v, other);
}

static inline uint16x8_t load_16_bits(const bf16* p) { return vld1q_u16(reinterpret_cast<const uint16_t*>(p)); }

// Units whose second halves are the numbers, and whose first halves are 0: the numbers as floats.
static inline VecF load(const bf16* p) {
    const uint16x8_t numbers = load_16_bits(p), nothing = vdupq_n_u16(0);
    return {vreinterpretq_f32_u16(vzip1q_u16(nothing, numbers)), vreinterpretq_f32_u16(vzip2q_u16(nothing, numbers))};
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
static inline void store(bf16* p, VecF v) {
    vst1q_bf16(reinterpret_cast<__bf16*>(p), vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.low), v.high));
}
#else
static inline uint32x4_t rounded_to_bf16(float32x4_t v) {  // in the upper halves
    const uint32x4_t bits = vreinterpretq_u32_f32(v), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
    return vbslq_u32(vceqq_f32(v, v), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
}
static inline void store(bf16* p, VecF v) {
    const uint16x4_t low = vshrn_n_u32(rounded_to_bf16(v.low), 16);
    vst1q_u16(reinterpret_cast<uint16_t*>(p), vshrn_high_n_u32(low, rounded_to_bf16(v.high), 16));
}
#endif

static inline fp16 to_fp16(float x) { return fp16{vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0)}; }

static inline VecF load(const fp16* p) {
    const float16x8_t numbers = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
    return {vcvt_f32_f16(vget_low_f16(numbers)), vcvt_high_f32_f16(numbers)};
}

static inline void store(fp16* p, VecF v) {
    const float16x8_t numbers = vcvt_high_f16_f32(vcvt_f16_f32(v.low), v.high);
    vst1q_u16(reinterpret_cast<uint16_t*>(p), vreinterpretq_u16_f16(numbers));
}

static inline VecU load_units(const uint32_t* p) { return {vld1q_u32(p), vld1q_u32(p + 4)}; }
static inline void store_units(uint32_t* p, VecU v) {
    vst1q_u32(p, v.low);
    vst1q_u32(p + 4, v.high);
}
static inline VecU splat_unit(uint32_t x) { return {vdupq_n_u32(x), vdupq_n_u32(x)}; }

static inline VecU pair_up(const bf16* first, const bf16* second) {
    const uint16x8_t a = load_16_bits(first), b = load_16_bits(second);
    return {vreinterpretq_u32_u16(vzip1q_u16(a, b)), vreinterpretq_u32_u16(vzip2q_u16(a, b))};
}

static inline VecU replace_second(VecU into, const bf16* second) {
    const uint16x8_t b = load_16_bits(second);
    return {vsliq_n_u32(into.low, vmovl_u16(vget_low_u16(b)), 16), vsliq_n_u32(into.high, vmovl_high_u16(b), 16)};
}

template <typename T>
static inline VecF dot(VecF sums, VecU a, VecU b);

template <>
inline VecF dot<float>(VecF sums, VecU a, VecU b) {
    return {
        vfmaq_f32(sums.low, vreinterpretq_f32_u32(b.low), vreinterpretq_f32_u32(a.low)),
        vfmaq_f32(sums.high, vreinterpretq_f32_u32(b.high), vreinterpretq_f32_u32(a.high))};
}

static inline float32x4_t dot_bf16(float32x4_t sums, uint32x4_t a, uint32x4_t b) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return vbfdotq_f32(sums, vreinterpretq_bf16_u32(b), vreinterpretq_bf16_u32(a));
#else
    const uint32x4_t upper = vdupq_n_u32(0xffff0000u);
    sums = vfmaq_f32(sums, vreinterpretq_f32_u32(vshlq_n_u32(b, 16)), vreinterpretq_f32_u32(vshlq_n_u32(a, 16)));
    return vfmaq_f32(sums, vreinterpretq_f32_u32(vandq_u32(b, upper)), vreinterpretq_f32_u32(vandq_u32(a, upper)));
#endif
}

template <>
inline VecF dot<bf16>(VecF sums, VecU a, VecU b) {
    return {dot_bf16(sums.low, a.low, b.low), dot_bf16(sums.high, a.high, b.high)};
}

static inline VecF round_to_integer(VecF v) { return {vrndnq_f32(v.low), vrndnq_f32(v.high)}; }

// Exact for results that are normal numbers: the exponent is in [-126, 127].
static inline VecF times_power_of_2(VecF v, VecF exponent) {
    const auto times = [](float32x4_t x, float32x4_t power) {
        return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(power), vdupq_n_s32(127)), 23)));
    };
    return {times(v.low, exponent.low), times(v.high, exponent.high)};
}

static inline VecU no_units() { return {vdupq_n_u32(0), vdupq_n_u32(0)}; }

static inline VecU widen_int8(const uint16_t* p) {
    const int8x16_t bytes = vreinterpretq_s8_u16(vld1q_u16(p));
    return {vreinterpretq_u32_s16(vmovl_s8(vget_low_s8(bytes))), vreinterpretq_u32_s16(vmovl_high_s8(bytes))};
}

static inline uint32x4_t dot_int16(uint32x4_t sums, uint32x4_t a, uint32x4_t b) {
    const int16x8_t x = vreinterpretq_s16_u32(a), y = vreinterpretq_s16_u32(b);
    const int32x4_t products = vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
    return vaddq_u32(sums, vreinterpretq_u32_s32(products));
}
static inline VecU dot_int16(VecU sums, VecU a, VecU b) {
    return {dot_int16(sums.low, a.low, b.low), dot_int16(sums.high, a.high, b.high)};
}

static inline VecF to_floats(VecU integers) {
    return {vcvtq_f32_s32(vreinterpretq_s32_u32(integers.low)), vcvtq_f32_s32(vreinterpretq_s32_u32(integers.high))};
}

static inline int16x8_t to_int16(VecF v) {
    return vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(v.low)), vcvtnq_s32_f32(v.high));
}
static inline void store_int16(int16_t* p, VecF v) { vst1q_s16(p, to_int16(v)); }
static inline void store_int8(int8_t* p, VecF v) { vst1_s8(p, vqmovn_s16(to_int16(v))); }

static inline VecF split_power(VecF x, VecF& power) {
    const VecF clamped = max(splat(-126.0f), x);
    power = round_to_integer(clamped);
    return sub(clamped, power);
}
