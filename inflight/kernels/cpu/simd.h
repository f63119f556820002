// Vectors of float for one instruction set, chosen by the compiler's flags: AVX-512 with BF16, AVX-512, AVX2, or NEON
// (simd_neon.h).
//
// A *unit* is 32 bits of a row: one float, or two neighbouring bfloat16. `dot` multiplies units and adds: for floats it is a
// fused multiply-add, for bfloat16 the sum of two products. So kernels are written once for both types.
#pragma once

#if !defined(__aarch64__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

struct bf16 {
    uint16_t bits;
};

struct fp16 {
    uint16_t bits;
};

static inline float to_float(float x) { return x; }

static inline float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename T>
static inline T from_float(float x);

template <>
inline float from_float<float>(float x) {
    return x;
}

template <>
inline bf16 from_float<bf16>(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40)};
    return bf16{static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <typename T>
constexpr int kElementsPerUnit = sizeof(uint32_t) / sizeof(T);

// kRowsOfSums: so many rows of two vectors of sums stay in registers, beside what a step of a product needs.
#if defined(__aarch64__)

#include "simd_neon.h"

#elif defined(__AVX512F__)

constexpr int kLanes = 16;
constexpr int kRowsOfSums = 12;
using VecF = __m512;
using VecU = __m512i;  // kLanes units

static inline VecF zero() { return _mm512_setzero_ps(); }
static inline VecF splat(float x) { return _mm512_set1_ps(x); }
static inline VecF load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, VecF v) { _mm512_storeu_ps(p, v); }
// Stores the lanes whose bit in `lanes` is set. The other lanes keep their values, but may be read and written back.
static inline void store_where(float* p, uint32_t lanes, VecF v) {
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>(lanes), v);
}
static inline VecF add(VecF a, VecF b) { return _mm512_add_ps(a, b); }
static inline VecF sub(VecF a, VecF b) { return _mm512_sub_ps(a, b); }
static inline VecF mul(VecF a, VecF b) { return _mm512_mul_ps(a, b); }
static inline VecF div(VecF a, VecF b) { return _mm512_div_ps(a, b); }
static inline VecF fma(VecF a, VecF b, VecF c) { return _mm512_fmadd_ps(a, b, c); }
static inline VecF max(VecF a, VecF b) { return _mm512_max_ps(a, b); }
static inline VecF min(VecF a, VecF b) { return _mm512_min_ps(a, b); }
static inline float sum(VecF v) { return _mm512_reduce_add_ps(v); }
static inline float largest(VecF v) { return _mm512_reduce_max_ps(v); }

// Keeps lanes [from, to) of v. The other lanes become those of `other`.
static inline VecF keep(VecF v, int from, int to, VecF other) {
    const uint32_t upto = to >= kLanes ? 0xffffu : (to <= 0 ? 0u : (1u << to) - 1);
    const uint32_t before = from <= 0 ? 0u : (from >= kLanes ? 0xffffu : (1u << from) - 1);
    return _mm512_mask_blend_ps(static_cast<__mmask16>(upto & ~before), other, v);
}

static inline VecF load(const bf16* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}

static inline void store(bf16* p, VecF v) {
#if defined(__AVX512BF16__)
    const __m256i packed = (__m256i)_mm512_cvtneps_pbh(v);
#else
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    const __m256i packed = _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
#endif
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), packed);
}

static inline fp16 to_fp16(float x) { return fp16{static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))}; }

static inline VecF load(const fp16* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

static inline void store(fp16* p, VecF v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

static inline VecU load_units(const uint32_t* p) { return _mm512_loadu_si512(p); }
static inline void store_units(uint32_t* p, VecU v) { _mm512_storeu_si512(p, v); }
static inline VecU splat_unit(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }

// Units whose first half is a bfloat16 of `first`, and whose second half is the one of `second`.
static inline VecU pair_up(const bf16* first, const bf16* second) {
    const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first)));
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
    return _mm512_or_si512(a, _mm512_slli_epi32(b, 16));
}

// The units of `into`, with their second halves replaced by `second`.
static inline VecU replace_second(VecU into, const bf16* second) {
    const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(second)));
    return _mm512_or_si512(_mm512_and_si512(into, _mm512_set1_epi32(0xffff)), _mm512_slli_epi32(b, 16));
}

template <typename T>
static inline VecF dot(VecF sums, VecU a, VecU b);

template <>
inline VecF dot<float>(VecF sums, VecU a, VecU b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sums);
}

template <>
inline VecF dot<bf16>(VecF sums, VecU a, VecU b) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b);
#else
    const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
    sums = _mm512_fmadd_ps(
        _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), sums);
    return _mm512_fmadd_ps(
        _mm512_castsi512_ps(_mm512_and_si512(a, high)), _mm512_castsi512_ps(_mm512_and_si512(b, high)), sums);
#endif
}

static inline VecF round_to_integer(VecF v) {
    return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline VecF times_power_of_2(VecF v, VecF exponent) { return _mm512_scalef_ps(v, exponent); }

static inline VecU no_units() { return _mm512_setzero_si512(); }
// Converts units of two int8 to units of two int16.
static inline VecU widen_int8(const uint16_t* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Adds to each int32 of `sums` the two products of the int16 in a unit of `a` and of `b`.
static inline VecU dot_int16(VecU sums, VecU a, VecU b) { return _mm512_dpwssd_epi32(sums, a, b); }
static inline VecF to_floats(VecU integers) { return _mm512_cvtepi32_ps(integers); }
// Both round to nearest and saturate.
static inline void store_int16(int16_t* p, VecF v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
}
static inline void store_int8(int8_t* p, VecF v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}
// Splits x into `power`, an integer, and the returned rest in [-0.5, 0.5]. With AVX2, x below -126 counts as -126.
static inline VecF split_power(VecF x, VecF& power) {
    const VecF rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    power = sub(x, rest);
    return rest;
}

#else  // AVX2

constexpr int kLanes = 8;
constexpr int kRowsOfSums = 4;
using VecF = __m256;
using VecU = __m256i;

static inline VecF zero() { return _mm256_setzero_ps(); }
static inline VecF splat(float x) { return _mm256_set1_ps(x); }
static inline VecF load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, VecF v) { _mm256_storeu_ps(p, v); }
// Stores the lanes whose bit in `lanes` is set. The other lanes keep their values, but may be read and written back, because a
// masked store would be five times as slow (measured on an AMD EPYC).
static inline void store_where(float* p, uint32_t lanes, VecF v) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(lanes)), bit), bit);
    _mm256_storeu_ps(p, _mm256_blendv_ps(_mm256_loadu_ps(p), v, _mm256_castsi256_ps(set)));
}
static inline VecF add(VecF a, VecF b) { return _mm256_add_ps(a, b); }
static inline VecF sub(VecF a, VecF b) { return _mm256_sub_ps(a, b); }
static inline VecF mul(VecF a, VecF b) { return _mm256_mul_ps(a, b); }
static inline VecF div(VecF a, VecF b) { return _mm256_div_ps(a, b); }
static inline VecF fma(VecF a, VecF b, VecF c) { return _mm256_fmadd_ps(a, b, c); }
static inline VecF max(VecF a, VecF b) { return _mm256_max_ps(a, b); }
static inline VecF min(VecF a, VecF b) { return _mm256_min_ps(a, b); }

static inline float sum(VecF v) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}

static inline float largest(VecF v) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

static inline VecF keep(VecF v, int from, int to, VecF other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i kept = _mm256_andnot_si256(
        _mm256_cmpgt_epi32(_mm256_set1_epi32(from), lane), _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane));
    return _mm256_blendv_ps(other, v, _mm256_castsi256_ps(kept));
}

static inline __m256i load_16_bits(const bf16* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

static inline VecF load(const bf16* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(load_16_bits(p), 16)); }

static inline void store(bf16* p, VecF v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256 nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
    const __m256i quiet = _mm256_castps_si256(_mm256_blendv_ps(
        _mm256_castsi256_ps(rounded), _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(0x400000))), nan));
    const __m256i words = _mm256_srli_epi32(quiet, 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

static inline fp16 to_fp16(float x) { return fp16{static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))}; }

static inline VecF load(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }

static inline void store(fp16* p, VecF v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}

static inline VecU load_units(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline void store_units(uint32_t* p, VecU v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
static inline VecU splat_unit(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }

static inline VecU pair_up(const bf16* first, const bf16* second) {
    return _mm256_or_si256(load_16_bits(first), _mm256_slli_epi32(load_16_bits(second), 16));
}

static inline VecU replace_second(VecU into, const bf16* second) {
    return _mm256_or_si256(
        _mm256_and_si256(into, _mm256_set1_epi32(0xffff)), _mm256_slli_epi32(load_16_bits(second), 16));
}

template <typename T>
static inline VecF dot(VecF sums, VecU a, VecU b);

template <>
inline VecF dot<float>(VecF sums, VecU a, VecU b) {
    return _mm256_fmadd_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), sums);
}

template <>
inline VecF dot<bf16>(VecF sums, VecU a, VecU b) {
    const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
    sums = _mm256_fmadd_ps(
        _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16)), sums);
    return _mm256_fmadd_ps(
        _mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high)), sums);
}

static inline VecF round_to_integer(VecF v) {
    return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Exact for results that are normal numbers: the exponent is in [-126, 127].
static inline VecF times_power_of_2(VecF v, VecF exponent) {
    const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(exponent), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(v, _mm256_castsi256_ps(bits));
}

static inline VecU no_units() { return _mm256_setzero_si256(); }
static inline VecU widen_int8(const uint16_t* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline VecU dot_int16(VecU sums, VecU a, VecU b) { return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b)); }
static inline VecF to_floats(VecU integers) { return _mm256_cvtepi32_ps(integers); }

static inline __m128i to_int16(VecF v) {
    const __m256i integers = _mm256_cvtps_epi32(v);
    return _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
}
static inline void store_int16(int16_t* p, VecF v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_int16(v)); }
static inline void store_int8(int8_t* p, VecF v) {
    const __m128i words = to_int16(v);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

static inline VecF split_power(VecF x, VecF& power) {
    const VecF clamped = max(splat(-126.0f), x);
    power = round_to_integer(clamped);
    return sub(clamped, power);
}

#endif

// Splits e^x into 2^n and e^r: x = n ln 2 + r. Returns p, with which e^r is p r^2 + r + 1. x is in [-87.3, 88.3], or NaN.
static inline VecF split_exponential(VecF x, VecF& n, VecF& r) {
    n = round_to_integer(mul(x, splat(1.44269504f)));
    r = fma(n, splat(-0.693359375f), x);  // ln 2 is in two parts, so that the first product is exact
    r = fma(n, splat(2.12194440e-4f), r);
    VecF p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    return fma(p, r, splat(5.0000001201e-1f));
}

// e^x to about 1 unit in the last place; below -87.3 it is at most 2^-126, above 88.3 it is about 2^127. NaN stays NaN.
static inline VecF exponential(VecF x) {
    VecF n, r;
    const VecF p = split_exponential(min(splat(88.3f), max(splat(-87.3f), x)), n, r);
    return times_power_of_2(fma(p, mul(r, r), add(r, splat(1.0f))), n);
}

// With a relative error of at most 2e-7, also near 0. NaN stays NaN.
static inline VecF hyperbolic_tangent(VecF x) {
    const VecF clamped = min(splat(10.0f), max(splat(-10.0f), x));  // beyond them the result is rounded to 1 or -1
    VecF n, r;
    const VecF p = split_exponential(add(clamped, clamped), n, r), power = times_power_of_2(splat(1.0f), n);
    // e^2x - 1 = 2^n (e^r - 1) + (2^n - 1)
    const VecF grown = fma(power, fma(p, mul(r, r), r), sub(power, splat(1.0f)));
    return div(grown, add(grown, splat(2.0f)));
}

static inline VecF one_plus_exponential_of_minus(VecF x) { return add(splat(1.0f), exponential(sub(zero(), x))); }
static inline VecF sigmoid(VecF x) { return div(splat(1.0f), one_plus_exponential_of_minus(x)); }
static inline VecF silu(VecF x) { return div(x, one_plus_exponential_of_minus(x)); }

// GELU in its tanh form, x / 2 * (1 + tanh(z)), which is x * sigmoid(2z); 2z = sqrt(8 / pi) * (x + 0.044715 x^3)
static inline VecF gelu(VecF x) {
    const VecF twice_z = mul(mul(splat(1.59576912f), x), fma(mul(splat(0.044715f), x), x, splat(1.0f)));
    return div(x, add(splat(1.0f), exponential(sub(zero(), twice_z))));
}

// GELU, x times the normal distribution function. The part of the distribution beyond |x| is e^(-x^2 / 2) times t p(t) with
// t = 1 / (1 + 0.3 |x|). The polynomial p was fitted to it for |x| up to 13, with a relative error of at most 3e-7.
static inline VecF gelu_exact(VecF x) {
    const VecF size = max(sub(zero(), x), x);
    const VecF t = div(splat(1.0f), fma(size, splat(0.3f), splat(1.0f)));
    VecF p = fma(splat(0.0360364541f), t, splat(-0.15871419f));
    p = fma(p, t, splat(0.20896551f));
    p = fma(p, t, splat(-0.0560966432f));
    p = fma(p, t, splat(0.129843771f));
    p = fma(p, t, splat(0.0995229632f));
    p = fma(p, t, splat(0.120816909f));
    p = fma(p, t, splat(0.119625166f));
    // the square in two parts, because the exponential would multiply a rounding error by the size of the square
    const VecF square = mul(x, x), rest = fma(x, x, sub(zero(), square)), half = splat(-0.5f);
    const VecF density = mul(exponential(mul(half, square)), fma(half, rest, splat(1.0f)));
    return sub(max(zero(), x), mul(size, mul(mul(t, p), density)));
}

// NaN stays NaN.
static inline VecF relu(VecF x) { return max(zero(), x); }

// 2^x for x <= 127, to about 2 units in the last place; 2^0 is 1. Below -126 it is at most 2^-126; NaN stays NaN.
static inline VecF power_of_2(VecF x) {
    VecF power;
    const VecF r = split_power(x, power);
    VecF p = fma(splat(1.32647e-3f), r, splat(9.67151e-3f));
    p = fma(p, r, splat(5.550734e-2f));
    p = fma(p, r, splat(2.4022242e-1f));
    p = fma(p, r, splat(6.9314698e-1f));
    return times_power_of_2(fma(p, r, splat(1.0f)), power);
}

static inline float power_of_2(float x) {
    alignas(64) float lanes[kLanes];
    store(lanes, power_of_2(splat(x)));
    return lanes[0];
}
