// Dot products of one group of 32 inputs between rows of whole activations and panels of quantised weights.
#pragma once

#include <type_traits>

#include "simd.h"

namespace kvorum {

enum Format : int32_t { F32 = 0, BF16 = 1, Q8 = 2, Q4_1 = 3, Q4_0 = 4 };

constexpr int GROUP = 32;   // inputs that share a scale

#if defined(KVORUM_BYTE_DOTS) || defined(KVORUM_AVX2)
constexpr bool HAS_BYTE_DOTS = true;
#else
constexpr bool HAS_BYTE_DOTS = false;
#endif

// Whole panels side by side, a line of 16 columns at a time.
template <int FORMAT, int R, int P, class T>
KVORUM_INLINE void whole_group_dots(I16 (&dots)[R][P], const uint8_t* const (&w)[P], const T* a, long inputs) {
    if constexpr (FORMAT == Q8) {
#pragma GCC unroll 2
        for (int quad = 0; quad < GROUP / 4; ++quad) {
            U64 column[P];
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) column[p] = load_bytes(w[p] + quad * 64);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int p = 0; p < P; ++p) dots[r][p] = dot(dots[r][p], column[p], a + r * inputs + 4 * quad);
        }
    } else {
#pragma GCC unroll 2
        for (int octet = 0; octet < GROUP / 8; ++octet) {
            U64 low[P], high[P];
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) {
                const U64 both = load_bytes(w[p] + octet * 64);
                low[p] = low_nibbles(both), high[p] = high_nibbles(both);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
                for (int p = 0; p < P; ++p)
                    dots[r][p] = dot(dot(dots[r][p], low[p], a + r * inputs + 8 * octet), high[p],
                                     a + r * inputs + 8 * octet + 4);
        }
    }
}

#if defined(KVORUM_AVX2)

// Half a panel (8 columns) at a time, for then eight rows' sums stay in registers.
constexpr int HALF_BYTES = 32;

// The compiler would otherwise load every row's activations first and have no registers left for the sums.
KVORUM_INLINE void keep_in_register(__m256i& value) { asm volatile("" : "+x"(value)); }

template <class T>
KVORUM_INLINE __m256i splat_four_bytes(const T* a) {
    int32_t bytes;
    std::memcpy(&bytes, a, 4);
    return _mm256_set1_epi32(bytes);
}

// sums[r] += the products of a column's pairs of words with row r's pair at `a`.
template <int R>
KVORUM_INLINE void add_pairs(__m256i (&sums)[R], __m256i pairs, const int16_t* a, long inputs) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(pairs, splat_four_bytes(a + r * inputs)));
        keep_in_register(sums[r]);
    }
}

// sums[r] += the dot products of 8 columns, whose bytes are every other 32 from w on, with row r's group of words.
template <int FORMAT, int R>
KVORUM_INLINE void half_dots(__m256i (&sums)[R], const uint8_t* w, const int16_t* a, long inputs) {
    const __m256i nibbles = _mm256_set1_epi16(15), bytes = _mm256_set1_epi16(255);
    constexpr int STEP = FORMAT == Q8 ? 4 : 8;
#pragma GCC unroll 1
    for (int i = 0; i < GROUP; i += STEP, a += STEP, w += 2 * HALF_BYTES) {
        const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
        if constexpr (FORMAT == Q8) {
            add_pairs(sums, _mm256_and_si256(all, bytes), a, inputs);
            add_pairs(sums, _mm256_srli_epi16(all, 8), a + 2, inputs);
        } else {
            add_pairs(sums, _mm256_and_si256(all, nibbles), a, inputs);
            add_pairs(sums, _mm256_and_si256(_mm256_srli_epi16(all, 8), nibbles), a + 2, inputs);
            add_pairs(sums, _mm256_and_si256(_mm256_srli_epi16(all, 4), nibbles), a + 4, inputs);
            add_pairs(sums, _mm256_srli_epi16(all, 12), a + 6, inputs);
        }
    }
}

// words[r] += the products of a column's fours of nibbles with row r's four bytes at `a`. Pairs of products, at most
// 2 * 15 * 127, fit words for a whole group (8 of them) without saturating.
template <int R>
KVORUM_INLINE void add_fours(__m256i (&words)[R], __m256i nibbles, const int8_t* a, long inputs) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        words[r] = _mm256_add_epi16(words[r], _mm256_maddubs_epi16(nibbles, splat_four_bytes(a + r * inputs)));
        keep_in_register(words[r]);
    }
}

// half_dots of bytes; weights of 8 bits go as two nibbles.
template <int FORMAT, int R>
KVORUM_INLINE void half_dots(__m256i (&sums)[R], const uint8_t* w, const int8_t* a, long inputs) {
    const __m256i nibbles = _mm256_set1_epi8(15);
    constexpr int STEP = FORMAT == Q8 ? 4 : 8;
#pragma GCC unroll 2
    for (int high = 0; high < (FORMAT == Q8 ? 2 : 1); ++high) {
        __m256i words[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) words[r] = _mm256_setzero_si256();
#pragma GCC unroll 1
        for (int i = 0; i < GROUP; i += STEP) {
            const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + i / STEP * 2 * HALF_BYTES));
            const __m256i lower = _mm256_and_si256(all, nibbles);
            const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(all, 4), nibbles);
            if constexpr (FORMAT == Q8) {
                add_fours(words, high ? upper : lower, a + i, inputs);
            } else {
                add_fours(words, lower, a + i, inputs);
                add_fours(words, upper, a + i + 4, inputs);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
            sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(words[r], _mm256_set1_epi16(high ? 16 : 1)));
    }
}

template <int FORMAT, int R, int P, class T>
KVORUM_INLINE void halved_group_dots(I16 (&dots)[R][P], const uint8_t* const (&w)[P], const T* a, long inputs) {
#pragma GCC unroll 1
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 1
        for (int half = 0; half < 2; ++half) {
            __m256i sums[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r] = half ? dots[r][p].hi : dots[r][p].lo;
            half_dots<FORMAT>(sums, w[p] + half * HALF_BYTES, a, inputs);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) (half ? dots[r][p].hi : dots[r][p].lo) = sums[r];
        }
}

#endif

// dots[r][p] += the dot products of row r's activations at a + r * inputs with panel p's group of weights at w[p].
template <int FORMAT, int R, int P, class T>
KVORUM_INLINE void group_dots(I16 (&dots)[R][P], const uint8_t* const (&w)[P], const T* a, long inputs) {
#if defined(KVORUM_AVX2)
    // A single row waits for memory, and reads whole lines better than halves; bytes are multiplied by halves only.
    if constexpr (R > 1 || std::is_same_v<T, int8_t>) halved_group_dots<FORMAT>(dots, w, a, inputs);
    else whole_group_dots<FORMAT>(dots, w, a, inputs);
#else
    whole_group_dots<FORMAT>(dots, w, a, inputs);
#endif
}

}  // namespace kvorum
