// Vectors of 32-bit integers, in addition to those of simd.h: dot products of bytes.
#pragma once

#include "simd.h"

#if defined(__aarch64__)

#include "integer_neon.h"

#elif defined(__AVX512F__)

using VecI = __m512i;

static inline VecI splat_int(int32_t x) { return _mm512_set1_epi32(x); }
static inline VecF to_float(VecI v) { return _mm512_cvtepi32_ps(v); }
static inline VecI to_int(VecF v) { return _mm512_cvtps_epi32(v); }  // to nearest
static inline VecI add(VecI a, VecI b) { return _mm512_add_epi32(a, b); }
static inline VecI sub(VecI a, VecI b) { return _mm512_sub_epi32(a, b); }
static inline int32_t sum(VecI v) { return _mm512_reduce_add_epi32(v); }
static inline void store_as_bytes(uint32_t* p, VecI v) {  // kLanes / 4 units; lanes are in [-128, 127]
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v));
}
static inline VecU load_bytes(const void* p) { return _mm512_loadu_si512(p); }
static inline VecU low_nibbles(VecU v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
static inline VecU high_nibbles(VecU v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
// The kBits bits of each unit that begin at bit `first`, a multiple of kBits, minus `zero_point`.
template <int kBits>
static inline VecI bits_at(VecU v, int32_t first, int32_t zero_point) {
    if constexpr (kBits == 8) return _mm512_dpbusd_epi32(splat_int(-zero_point), v, splat_unit(1u << first));
    return sub(_mm512_and_si512(_mm512_srlv_epi32(v, splat_int(first)), splat_int(15)), splat_int(zero_point));
}

static inline VecF magnitude(VecF v) { return _mm512_abs_ps(v); }
// The lanes of v, or 0 where the magnitude is above the limit.
static inline VecF unless_above(VecF v, VecF limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(magnitude(v), limit, _CMP_LE_OQ), v);
}
// A bit for each lane: whether it is above the limit.
static inline uint32_t lanes_above(VecF v, VecF limit) { return _mm512_cmp_ps_mask(v, limit, _CMP_GT_OQ); }

// Adds to each sum the products of four neighbouring bytes. Bytes of `a` are unsigned and below 2^kBits. Bytes of `b` are signed
// and above -128.
template <int kBits>
static inline VecI dot_bytes(VecI sums, VecU a, VecU b) {
    // not the intrinsic: with it GCC 12 copies and spills the sums in every iteration, at half the speed
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
}

// A table of 16 integers above -128, in each 128 bits of the vector, with kTableZero added: here bytes of a product are unsigned.
constexpr int32_t kTableZero = 128;
static inline VecU load_table(const int8_t* table) {
    const __m128i bytes = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)), _mm_set1_epi8(-128));
    return _mm512_broadcast_i32x4(bytes);
}
static inline VecU look_up(VecU table, VecU nibbles) { return _mm512_shuffle_epi8(table, nibbles); }
// The integers of the table for the 4 bits of each unit that begin at bit `first`.
static inline VecI looked_up_at(VecU table, VecU v, int32_t first) {
    const VecU found = look_up(table, _mm512_and_si512(_mm512_srlv_epi32(v, splat_int(first)), splat_int(15)));
    return sub(_mm512_and_si512(found, splat_int(255)), splat_int(kTableZero));
}
// Like `dot_bytes`, for bytes that `look_up` has given.
static inline VecI dot_looked_up(VecI sums, VecU a, VecU b) { return dot_bytes<8>(sums, a, b); }

#else  // AVX2

using VecI = __m256i;

static inline VecI splat_int(int32_t x) { return _mm256_set1_epi32(x); }
static inline VecF to_float(VecI v) { return _mm256_cvtepi32_ps(v); }
static inline VecI to_int(VecF v) { return _mm256_cvtps_epi32(v); }
static inline VecI add(VecI a, VecI b) { return _mm256_add_epi32(a, b); }
static inline VecI sub(VecI a, VecI b) { return _mm256_sub_epi32(a, b); }
static inline int32_t sum(VecI v) {
    alignas(32) int32_t lanes[kLanes];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), v);
    int32_t total = 0;
    for (const int32_t lane : lanes) total += lane;
    return total;
}
static inline void store_as_bytes(uint32_t* p, VecI v) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
static inline VecU load_bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline VecU low_nibbles(VecU v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
static inline VecU high_nibbles(VecU v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
template <int kBits>
static inline VecI bits_at(VecU v, int32_t first, int32_t zero_point) {
    const VecI bits = _mm256_and_si256(_mm256_srlv_epi32(v, splat_int(first)), splat_int((1 << kBits) - 1));
    return sub(bits, splat_int(zero_point));
}

static inline VecF magnitude(VecF v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
static inline VecF unless_above(VecF v, VecF limit) {
    return _mm256_and_ps(_mm256_cmp_ps(magnitude(v), limit, _CMP_LE_OQ), v);
}
static inline uint32_t lanes_above(VecF v, VecF limit) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, limit, _CMP_GT_OQ)));
}

#if defined(__AVXVNNI__) || defined(INFLIGHT_EVEX_VNNI)
// A test on a processor that has the instruction only for AVX-512 asks for its other encoding.
#if defined(INFLIGHT_EVEX_VNNI)
#define VNNI_ENCODING "%{evex%} "
#else
#define VNNI_ENCODING "%{vex%} "
#endif
static inline VecI dot_unsigned_signed(VecI sums, VecU a, VecU b) {
    asm(VNNI_ENCODING "vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));  // not the intrinsic: see above
    return sums;
}
template <int kBits>
static inline VecI dot_bytes(VecI sums, VecU a, VecU b) {
    return dot_unsigned_signed(sums, a, b);
}
#else
// At most 127 * 255 for each product, and two of them must fit 16 bits: so one factor must be below 128.
static inline VecI dot_unsigned_signed(VecI sums, VecU a, VecU b) {
    return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
}
// The instruction adds two products in 16 bits. Products of 8-bit numbers could overflow, so each byte of `a` is split in two.
template <int kBits>
static inline VecI dot_bytes(VecI sums, VecU a, VecU b) {
    if constexpr (kBits <= 7) return dot_unsigned_signed(sums, a, b);
    const VecU half = _mm256_and_si256(_mm256_srli_epi16(a, 1), _mm256_set1_epi8(127));
    const VecU odd = _mm256_and_si256(a, _mm256_set1_epi8(1));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(half, b), _mm256_set1_epi16(2)));
    return dot_unsigned_signed(sums, odd, b);
}
#endif

// The bytes of a table are signed here: the sign of `b` goes to them, and the magnitude of `b` is the unsigned factor. Both are at
// most 127, so the sum of two products fits 16 bits, and no byte has to be split.
constexpr int32_t kTableZero = 0;
static inline VecU load_table(const int8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}
static inline VecU look_up(VecU table, VecU nibbles) { return _mm256_shuffle_epi8(table, nibbles); }
static inline VecI looked_up_at(VecU table, VecU v, int32_t first) {
    const VecU found = look_up(table, _mm256_and_si256(_mm256_srlv_epi32(v, splat_int(first)), splat_int(15)));
    return _mm256_srai_epi32(_mm256_slli_epi32(found, 24), 24);
}
static inline VecI dot_looked_up(VecI sums, VecU a, VecU b) {
    return dot_unsigned_signed(sums, _mm256_abs_epi8(b), _mm256_sign_epi8(a, b));
}

#endif
