// One thin SIMD layer: vectors of 16 floats (F16), 16 int32 (I16) and 64 bytes (U64: 4 for each of 16 lanes), on AVX-512,
// on AVX2 with FMA and F16C, or on anything else in plain loops.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define KVORUM_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVORUM_AVX2 1
#endif
#if defined(KVORUM_AVX512) || defined(KVORUM_AVX2)
#include <immintrin.h>
#endif

#define KVORUM_INLINE static inline __attribute__((always_inline))

namespace kvorum {

constexpr int LANES = 16;
constexpr float COUNT[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

KVORUM_INLINE float bf16_to_float(uint16_t bits) {
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// Round to nearest, ties to even; a NaN stays one.
KVORUM_INLINE uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);
    return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

KVORUM_INLINE float half_to_float(uint16_t bits) {
    const uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
    if (exponent == 0) {
        const float magnitude = float(mantissa) * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    const uint32_t wide = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

#if defined(KVORUM_AVX512)

struct F16 { __m512 v; };
struct I16 { __m512i v; };
struct U64 { __m512i v; };

KVORUM_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
KVORUM_INLINE F16 splat(float x) { return {_mm512_set1_ps(x)}; }
KVORUM_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
KVORUM_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
KVORUM_INLINE F16 load(const uint16_t* bf16) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bf16))), 16))};
}
KVORUM_INLINE F16 load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
KVORUM_INLINE F16 load_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
KVORUM_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
KVORUM_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
KVORUM_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
KVORUM_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
KVORUM_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
KVORUM_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
KVORUM_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
KVORUM_INLINE F16 round(F16 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
KVORUM_INLINE float sum(F16 a) { return _mm512_reduce_add_ps(a.v); }
KVORUM_INLINE float largest(F16 a) { return _mm512_reduce_max_ps(a.v); }
struct M16 { __mmask16 v; };
KVORUM_INLINE M16 operator<(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
KVORUM_INLINE M16 operator==(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
KVORUM_INLINE M16 operator&(M16 a, M16 b) { return {__mmask16(a.v & b.v)}; }
KVORUM_INLINE M16 operator|(M16 a, M16 b) { return {__mmask16(a.v | b.v)}; }
KVORUM_INLINE F16 select(M16 m, F16 a, F16 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
KVORUM_INLINE F16 to_float(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
// 2^n for whole n in [-126, 127].
KVORUM_INLINE F16 exp2_whole(F16 n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}

KVORUM_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
KVORUM_INLINE I16 splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
KVORUM_INLINE U64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
KVORUM_INLINE U64 low_nibbles(U64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
KVORUM_INLINE U64 high_nibbles(U64 a) { return low_nibbles({_mm512_srli_epi16(a.v, 4)}); }
// acc[i] += the dot product of lane i's 4 bytes with a[0..3], which are stored as a[0], a[2], a[1], a[3].
KVORUM_INLINE I16 dot(I16 acc, U64 bytes, const int16_t* a) {
    int32_t even, odd;
    std::memcpy(&even, a, 4);
    std::memcpy(&odd, a + 2, 4);
    const __m512i evens = _mm512_and_si512(bytes.v, _mm512_set1_epi16(255)), odds = _mm512_srli_epi16(bytes.v, 8);
#if defined(__AVX512VNNI__)
    const __m512i sum = _mm512_dpwssd_epi32(acc.v, evens, _mm512_set1_epi32(even));
    return {_mm512_dpwssd_epi32(sum, odds, _mm512_set1_epi32(odd))};
#else
    const __m512i first = _mm512_madd_epi16(evens, _mm512_set1_epi32(even));
    const __m512i second = _mm512_madd_epi16(odds, _mm512_set1_epi32(odd));
    return {_mm512_add_epi32(acc.v, _mm512_add_epi32(first, second))};
#endif
}
#if defined(__AVX512VNNI__)
#define KVORUM_BYTE_DOTS 1
// The same with a[0..3] as bytes, at twice the speed.
KVORUM_INLINE I16 dot(I16 acc, U64 bytes, const int8_t* a) {
    int32_t four;
    std::memcpy(&four, a, 4);
    return {_mm512_dpbusd_epi32(acc.v, bytes.v, _mm512_set1_epi32(four))};
}
#endif
#if defined(__AVX512BF16__)
#define KVORUM_PAIR_DOTS 1
// 16 pairs of bf16.
struct P16 { __m512i v; };
KVORUM_INLINE P16 load_pairs(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
KVORUM_INLINE P16 splat_pair(const uint16_t* p) {
    int32_t both;
    std::memcpy(&both, p, 4);
    return {_mm512_set1_epi32(both)};
}
// acc[i] += a[i][0] * b[i][0] + a[i][1] * b[i][1], in float32; subnormal numbers count as 0.
KVORUM_INLINE F16 dot(F16 acc, P16 a, P16 b) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }
// p = 16 numbers of each, by turns.
KVORUM_INLINE void store_pairs(uint16_t* p, const uint16_t* first, const uint16_t* second) {
    const auto widen = [](const uint16_t* from) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    };
    _mm512_storeu_si512(p, _mm512_or_si512(widen(first), _mm512_slli_epi32(widen(second), 16)));
}
KVORUM_INLINE void store_bf16(uint16_t* p, F16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
}
// 2^x within 2 ulp for x <= 0, 0 below -150: half of exp's instructions, for it may use those of AVX-512.
KVORUM_INLINE F16 exp2_nonpositive(F16 x) {
    const F16 clamped = max(splat(-200.0f), x), n = round(clamped), r = clamped - n;
    F16 y = splat(1.326472731307149e-3f);
    y = fma(y, r, splat(9.671512991189957e-3f));
    y = fma(y, r, splat(5.550733581185341e-2f));
    y = fma(y, r, splat(2.4022242426872253e-1f));
    y = fma(y, r, splat(6.931470036506653e-1f));
    y = fma(y, r, splat(1.0f));
    return {_mm512_scalef_ps(y.v, n.v)};
}
#endif
KVORUM_INLINE void store_rounded(int8_t* p, F16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
KVORUM_INLINE void store_rounded(int16_t* p, F16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a.v)));
}

#elif defined(KVORUM_AVX2)

struct F16 { __m256 lo, hi; };
struct I16 { __m256i lo, hi; };
struct U64 { __m256i lo, hi; };

KVORUM_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
KVORUM_INLINE F16 splat(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
KVORUM_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
KVORUM_INLINE void store(float* p, F16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
KVORUM_INLINE __m256 widen_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
KVORUM_INLINE F16 load(const uint16_t* bf16) { return {widen_bf16(bf16), widen_bf16(bf16 + 8)}; }
KVORUM_INLINE __m256 widen_bytes(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
KVORUM_INLINE F16 load(const int8_t* p) { return {widen_bytes(p), widen_bytes(p + 8)}; }
KVORUM_INLINE F16 load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
KVORUM_INLINE F16 fma(F16 a, F16 b, F16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
KVORUM_INLINE F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
KVORUM_INLINE F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
KVORUM_INLINE F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
KVORUM_INLINE F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
KVORUM_INLINE F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
KVORUM_INLINE F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
KVORUM_INLINE F16 round(F16 a) { return {_mm256_round_ps(a.lo, 8), _mm256_round_ps(a.hi, 8)}; }
KVORUM_INLINE float sum(F16 a) {
    const __m256 eight = _mm256_add_ps(a.lo, a.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
KVORUM_INLINE float largest(F16 a) {
    const __m256 eight = _mm256_max_ps(a.lo, a.hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
struct M16 { __m256 lo, hi; };
KVORUM_INLINE M16 operator<(F16 a, F16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
KVORUM_INLINE M16 operator==(F16 a, F16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}
KVORUM_INLINE M16 operator&(M16 a, M16 b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
KVORUM_INLINE M16 operator|(M16 a, M16 b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
KVORUM_INLINE F16 select(M16 m, F16 a, F16 b) {
    return {_mm256_blendv_ps(b.lo, a.lo, m.lo), _mm256_blendv_ps(b.hi, a.hi, m.hi)};
}
KVORUM_INLINE F16 to_float(const int32_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
            _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8)))};
}
KVORUM_INLINE __m256 exp2_whole(__m256 n) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
KVORUM_INLINE F16 exp2_whole(F16 n) { return {exp2_whole(n.lo), exp2_whole(n.hi)}; }

KVORUM_INLINE F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
KVORUM_INLINE I16 splat_int(int32_t x) { const __m256i v = _mm256_set1_epi32(x); return {v, v}; }
KVORUM_INLINE U64 load_bytes(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
KVORUM_INLINE U64 low_nibbles(U64 a) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
KVORUM_INLINE U64 high_nibbles(U64 a) { return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)}); }
KVORUM_INLINE __m256i dot(__m256i acc, __m256i bytes, __m256i even, __m256i odd) {
    const __m256i first = _mm256_madd_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(255)), even);
    const __m256i second = _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), odd);
    return _mm256_add_epi32(acc, _mm256_add_epi32(first, second));
}
KVORUM_INLINE I16 dot(I16 acc, U64 bytes, const int16_t* a) {
    int32_t even, odd;
    std::memcpy(&even, a, 4);
    std::memcpy(&odd, a + 2, 4);
    const __m256i evens = _mm256_set1_epi32(even), odds = _mm256_set1_epi32(odd);
    return {dot(acc.lo, bytes.lo, evens, odds), dot(acc.hi, bytes.hi, evens, odds)};
}
KVORUM_INLINE void store_rounded(int8_t* p, F16 a) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
KVORUM_INLINE void store_rounded(int16_t* p, F16 a) {
    const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

#else

struct F16 { float v[LANES]; };
struct I16 { int32_t v[LANES]; };
struct U64 { uint8_t v[4 * LANES]; };

#define KVORUM_EACH(expression)                          \
    F16 out;                                             \
    for (int i = 0; i < LANES; ++i) out.v[i] = expression; \
    return out

KVORUM_INLINE F16 load(const float* p) { KVORUM_EACH(p[i]); }
KVORUM_INLINE F16 splat(float x) { KVORUM_EACH(x); }
KVORUM_INLINE F16 zero() { KVORUM_EACH(0.0f); }
KVORUM_INLINE void store(float* p, F16 a) { std::memcpy(p, a.v, sizeof a.v); }
KVORUM_INLINE F16 load(const uint16_t* bf16) { KVORUM_EACH(bf16_to_float(bf16[i])); }
KVORUM_INLINE F16 load(const int8_t* p) { KVORUM_EACH(float(p[i])); }
KVORUM_INLINE F16 load_half(const uint16_t* p) { KVORUM_EACH(half_to_float(p[i])); }
KVORUM_INLINE F16 fma(F16 a, F16 b, F16 c) { KVORUM_EACH(a.v[i] * b.v[i] + c.v[i]); }
KVORUM_INLINE F16 operator+(F16 a, F16 b) { KVORUM_EACH(a.v[i] + b.v[i]); }
KVORUM_INLINE F16 operator-(F16 a, F16 b) { KVORUM_EACH(a.v[i] - b.v[i]); }
KVORUM_INLINE F16 operator*(F16 a, F16 b) { KVORUM_EACH(a.v[i] * b.v[i]); }
KVORUM_INLINE F16 operator/(F16 a, F16 b) { KVORUM_EACH(a.v[i] / b.v[i]); }
KVORUM_INLINE F16 max(F16 a, F16 b) { KVORUM_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
KVORUM_INLINE F16 min(F16 a, F16 b) { KVORUM_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
KVORUM_INLINE F16 round(F16 a) { KVORUM_EACH(__builtin_rintf(a.v[i])); }
KVORUM_INLINE float sum(F16 a) {
    float total = 0.0f;
    for (int i = 0; i < LANES; ++i) total += a.v[i];
    return total;
}
KVORUM_INLINE float largest(F16 a) {
    float best = a.v[0];
    for (int i = 1; i < LANES; ++i) best = a.v[i] > best ? a.v[i] : best;
    return best;
}
struct M16 { bool v[LANES]; };
#define KVORUM_EACH_MASK(expression)                     \
    M16 out;                                             \
    for (int i = 0; i < LANES; ++i) out.v[i] = expression; \
    return out
KVORUM_INLINE M16 operator<(F16 a, F16 b) { KVORUM_EACH_MASK(a.v[i] < b.v[i]); }
KVORUM_INLINE M16 operator==(F16 a, F16 b) { KVORUM_EACH_MASK(a.v[i] == b.v[i]); }
KVORUM_INLINE M16 operator&(M16 a, M16 b) { KVORUM_EACH_MASK(a.v[i] && b.v[i]); }
KVORUM_INLINE M16 operator|(M16 a, M16 b) { KVORUM_EACH_MASK(a.v[i] || b.v[i]); }
#undef KVORUM_EACH_MASK
KVORUM_INLINE F16 select(M16 m, F16 a, F16 b) { KVORUM_EACH(m.v[i] ? a.v[i] : b.v[i]); }
KVORUM_INLINE F16 to_float(const int32_t* p) { KVORUM_EACH(float(p[i])); }
KVORUM_INLINE F16 exp2_whole(F16 n) {
    F16 out;
    for (int i = 0; i < LANES; ++i) {
        const uint32_t bits = uint32_t(int32_t(n.v[i]) + 127) << 23;
        std::memcpy(&out.v[i], &bits, sizeof bits);
    }
    return out;
}

KVORUM_INLINE F16 to_float(I16 a) { KVORUM_EACH(float(a.v[i])); }
KVORUM_INLINE I16 splat_int(int32_t x) {
    I16 out;
    for (int i = 0; i < LANES; ++i) out.v[i] = x;
    return out;
}
KVORUM_INLINE U64 load_bytes(const uint8_t* p) {
    U64 out;
    std::memcpy(out.v, p, sizeof out.v);
    return out;
}
KVORUM_INLINE U64 low_nibbles(U64 a) {
    for (int i = 0; i < 4 * LANES; ++i) a.v[i] &= 15;
    return a;
}
KVORUM_INLINE U64 high_nibbles(U64 a) {
    for (int i = 0; i < 4 * LANES; ++i) a.v[i] >>= 4;
    return a;
}
KVORUM_INLINE I16 dot(I16 acc, U64 bytes, const int16_t* a) {
    for (int i = 0; i < LANES; ++i) {
        const uint8_t* b = bytes.v + 4 * i;
        acc.v[i] += int32_t(b[0]) * a[0] + int32_t(b[2]) * a[1] + int32_t(b[1]) * a[2] + int32_t(b[3]) * a[3];
    }
    return acc;
}
template <class T>
KVORUM_INLINE void store_rounded(T* p, F16 a) {
    for (int i = 0; i < LANES; ++i) p[i] = T(__builtin_rintf(a.v[i]));
}
#undef KVORUM_EACH

#endif

// e^x within 2 ulp for x <= 88; 0 below -87. Cephes' expf: x = n ln 2 + r, e^r by a polynomial of degree 7.
KVORUM_INLINE F16 exp(F16 x) {
    const F16 clamped = max(min(x, splat(88.0f)), splat(-87.5f));
    const F16 n = max(round(clamped * splat(1.44269504088896341f)), splat(-126.0f));
    F16 r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    F16 y = splat(1.9875691500e-4f);
    y = fma(y, r, splat(1.3981999507e-3f));
    y = fma(y, r, splat(8.3334519073e-3f));
    y = fma(y, r, splat(4.1665795894e-2f));
    y = fma(y, r, splat(1.6666665459e-1f));
    y = fma(y, r, splat(5.0000001201e-1f));
    y = fma(y, r * r, r + splat(1.0f));
    return select(x < splat(-87.0f), zero(), y * exp2_whole(n));
}

}  // namespace kvorum
