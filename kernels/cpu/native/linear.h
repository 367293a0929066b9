// Linear layers over weights packed in panels.
//
// A panel holds 16 output columns, input by input ("K-major"), so that one pass over it serves a matrix-vector product as
// well as a blocked matrix product. Every output is one chain of multiply-adds over the inputs in order, whatever the
// number of rows: a row's bits do not depend on its neighbours.
//
// Formats, per 16 columns:
//   F32, BF16   [inputs][16] numbers.
//   Q8          per 32 inputs: 16 half scales, then [8][16 columns][4 inputs] bytes q + 128.
//   Q4_1, Q4_0  per 32 inputs: 16 half scales, (Q4_1) 16 half minima, then [4][16 columns][4] bytes, the low nibbles of
//               four inputs beside the high nibbles of the next four.
// The quantised formats are GGUF's blocks in another order, bit for bit: value = scale * q (+ minimum), Q4_0 with q - 8.
// Their products take whole activations with one scale for 32 inputs, so that sums are exact: words of 15 bits, which
// changes next to nothing (KL 6e-8 on the embedded model); or, for prompts, bytes, at 1.4 (AVX2) to 1.7 times (VNNI) the
// speed (KL 2e-3 if all tokens are a prompt's).
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "group_dots.h"
#include "simd.h"
#include "team.h"

namespace kvorum {

constexpr int ROWS_AT_ONCE = 96;   // rows whose activations stay in the cache while the panels pass

// A packed weight [num_outputs, num_inputs]; bias may be null.
struct Linear {
    const uint8_t* panels;
    const float* bias;
    int32_t format;
    int32_t num_outputs;
    int32_t num_inputs;
    int32_t unused;
};

constexpr long group_bytes(int format) {
    return format == Q8 ? 32 + 512 : format == Q4_1 ? 64 + 256 : 32 + 256;
}

inline long panel_bytes(int format, long num_inputs) {
    if (format == F32) return num_inputs * LANES * 4;
    if (format == BF16) return num_inputs * LANES * 2;
    return num_inputs / GROUP * group_bytes(format);
}

// Rows [begin, end) of a step that meet quantised weights as bytes, or as words.
struct Run {
    int begin, end;
    bool as_bytes;
};

// Rows of activations: floats, and for quantised weights whole numbers beside them.
struct Rows {
    const float* values;
    long stride;
    const std::vector<Run>* runs;
    const int16_t* words;   // [rows][num_inputs], four by four in the order 0, 2, 1, 3
    const int8_t* bytes;    // [rows][num_inputs]
    const float* scales;    // [rows][num_inputs / GROUP]
    const int32_t* sums;    // the same shape: of a group's whole numbers
    const float* totals;    // and these times their scale
};

// Room for quantised rows.
class QuantisedRows {
  public:
    void reserve(long rows, long inputs) {
        if (words_.size() < size_t(rows * inputs)) words_.resize(rows * inputs), bytes_.resize(rows * inputs);
        const long groups = rows * ((inputs + GROUP - 1) / GROUP);
        if (scales_.size() < size_t(groups)) scales_.resize(groups), sums_.resize(groups), totals_.resize(groups);
    }

    // Quantise this member's share of the rows; the team needs a barrier before it reads them.
    Rows fill(const Member& member, const float* values, long stride, const std::vector<Run>& runs, int inputs,
              bool quantised) {
        int begin, end;
        member.share(runs.back().end, begin, end);
        const long groups = inputs / GROUP;
        for (const Run& run : runs)
            for (int row = std::max(begin, run.begin); quantised && row < std::min(end, run.end); ++row)
                for (long group = 0; group < groups; ++group) {
                    const long at = long(row) * inputs + group * GROUP;
                    const float* x = values + row * stride + group * GROUP;
                    float& scale = scales_[row * groups + group];
                    int32_t& sum = sums_[row * groups + group];
                    if (run.as_bytes) quantise(x, 127.0f, &bytes_[at], scale, sum);
                    else quantise(x, 32767.0f, &words_[at], scale, sum), reorder(&words_[at]);
                    totals_[row * groups + group] = scale * float(sum);
                }
        return {values, stride, &runs, words_.data(), bytes_.data(), scales_.data(), sums_.data(), totals_.data()};
    }

  private:
    template <class T>
    static void quantise(const float* x, float most, T* whole, float& scale, int32_t& total) {
        const F16 first = load(x), second = load(x + LANES);
        const F16 size = max(max(first, zero() - first), max(second, zero() - second));
        const float largest_size = largest(size);
        scale = largest_size / most;
        const F16 inverse = splat(largest_size > 0.0f ? most / largest_size : 0.0f);
        const F16 a = round(first * inverse), b = round(second * inverse);
        store_rounded(whole, a);
        store_rounded(whole + LANES, b);
        total = int32_t(sum(a + b));   // exact: below 2^24
    }

    static void reorder(int16_t* words) {
        for (int i = 0; i < GROUP; i += 4) std::swap(words[i + 1], words[i + 2]);
    }

    std::vector<int16_t> words_;
    std::vector<int8_t> bytes_;
    std::vector<float> scales_;
    std::vector<int32_t> sums_;
    std::vector<float> totals_;
};

// acc[r][p] += sum over k of a[r * lda + k] * w[p][k * stride + 0..15], k in order. ahead: how many numbers further on
// the next tile's lie, to fetch them while these are computed with; 0 fetches nothing.
template <class W, int R, int P>
KVORUM_INLINE void accumulate(F16 (&acc)[R][P], const float* a, long lda, const W* const (&w)[P], long stride, int count,
                              long ahead = 0) {
    for (int k = 0; k < count; ++k) {
        F16 column[P];
        if (ahead != 0 && k * LANES * sizeof(W) % 64 == 0)
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) __builtin_prefetch(w[p] + k * stride + ahead, 0, 2);
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) column[p] = load(w[p] + k * stride);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F16 x = splat(a[r * lda + k]);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) acc[r][p] = fma(x, column[p], acc[r][p]);
        }
    }
}

// The same over quantised panels, a group of inputs at a time; whole: the rows' words or bytes.
template <int FORMAT, int R, int P, class T>
KVORUM_INLINE void accumulate_quantised(F16 (&acc)[R][P], const Rows& x, const T* whole, long row, long inputs,
                                        const uint8_t* const (&w)[P], bool ahead) {
    constexpr int HEADER = FORMAT == Q4_1 ? 64 : 32;
    const long groups = inputs / GROUP;
    for (long group = 0; group < groups; ++group) {
        const long at = group * group_bytes(FORMAT);
        // The panels that this tile's rows take next, while these are computed with.
        if (ahead)
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p)
                for (long line = 0; line < group_bytes(FORMAT); line += 64)
                    __builtin_prefetch(w[p] + P * groups * group_bytes(FORMAT) + at + line, 0, 2);
        I16 dots[R][P];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p)
                dots[r][p] = splat_int(FORMAT == Q8 ? -128 * x.sums[(row + r) * groups + group] : 0);
        const uint8_t* numbers[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) numbers[p] = w[p] + at + HEADER;
        group_dots<FORMAT>(dots, numbers, whole + row * inputs + group * GROUP, inputs);
        F16 scale[P], least[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
            scale[p] = load_half(reinterpret_cast<const uint16_t*>(w[p] + at));
            if constexpr (FORMAT == Q4_1) least[p] = load_half(reinterpret_cast<const uint16_t*>(w[p] + at + 32));
            if constexpr (FORMAT == Q4_0) least[p] = scale[p] * splat(-8.0f);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const F16 step = splat(x.scales[(row + r) * groups + group]);
            const F16 total = splat(x.totals[(row + r) * groups + group]);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) {
                acc[r][p] = fma(to_float(dots[r][p]) * step, scale[p], acc[r][p]);
                if constexpr (FORMAT != Q8) acc[r][p] = fma(total, least[p], acc[r][p]);
            }
        }
    }
}

template <int FORMAT, bool BYTES, int R, int P, class Sink>
__attribute__((noinline)) void tile(const Linear& weight, const Rows& x, long row, long panel, bool ahead,
                                    const Sink& sink) {
    F16 acc[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) acc[r][p] = zero();
    const long size = panel_bytes(FORMAT, weight.num_inputs);
    if constexpr (FORMAT == F32 || FORMAT == BF16) {
        using W = std::conditional_t<FORMAT == F32, float, uint16_t>;
        const W* w[P];
        for (int p = 0; p < P; ++p) w[p] = reinterpret_cast<const W*>(weight.panels + (panel + p) * size);
        accumulate<W, R, P>(acc, x.values + row * x.stride, x.stride, w, LANES, weight.num_inputs,
                            ahead ? long(P) * LANES * weight.num_inputs : 0);
    } else {
        const uint8_t* w[P];
        for (int p = 0; p < P; ++p) w[p] = weight.panels + (panel + p) * size;
        if constexpr (BYTES) accumulate_quantised<FORMAT, R, P>(acc, x, x.bytes, row, weight.num_inputs, w, ahead);
        else accumulate_quantised<FORMAT, R, P>(acc, x, x.words, row, weight.num_inputs, w, ahead);
    }
    sink(row, panel, acc);
}

// How many rows and panels a tile has that computes at least STEP panels: what the registers hold.
template <int FORMAT, int STEP>
struct TileSize {
    static constexpr bool IS_FLOAT = FORMAT == F32 || FORMAT == BF16;
#if defined(KVORUM_AVX512)
    static constexpr int ROWS = IS_FLOAT ? 6 : 4;
    static constexpr int PANELS = std::max(STEP, IS_FLOAT ? 4 : 2);
#elif defined(KVORUM_AVX2)
    static constexpr int ROWS = IS_FLOAT ? 6 / STEP : 8;
    static constexpr int PANELS = STEP;
#else
    static constexpr int ROWS = IS_FLOAT ? 6 : 3;
    static constexpr int PANELS = STEP;
#endif
};

// Sizes between 8 and 4 would take the compiler long, and are rare.
template <int FORMAT, bool BYTES, int P, int R, class Sink>
void row_tiles(const Linear& weight, const Rows& x, long row, long end, long panel, bool ahead, const Sink& sink) {
    for (; row + R <= end; row += R, ahead = false) tile<FORMAT, BYTES, R, P>(weight, x, row, panel, ahead, sink);
    if constexpr (R > 1) {
        if (row < end) row_tiles<FORMAT, BYTES, P, (R > 6 ? 4 : R - 1)>(weight, x, row, end, panel, ahead, sink);
    }
}

template <int FORMAT, bool BYTES, int STEP, class Sink>
void run_product(const Linear& weight, const Rows& x, const Run& run, int begin, int end, const Sink& sink) {
    using Size = TileSize<FORMAT, STEP>;
    constexpr int PANELS = Size::PANELS;
    constexpr int WALKED = 4;   // panels that a single row walks side by side: four streams from memory
    for (int first = run.begin; first < run.end; first += ROWS_AT_ONCE) {
        const int last = std::min(run.end, first + ROWS_AT_ONCE);
        int panel = begin;
        if (last - first == 1)
            for (; panel + WALKED <= end; panel += WALKED)
                tile<FORMAT, BYTES, 1, WALKED>(weight, x, first, panel, true, sink);
        for (; panel + PANELS <= end; panel += PANELS)
            row_tiles<FORMAT, BYTES, PANELS, Size::ROWS>(weight, x, first, last, panel, true, sink);
        for (; panel < end; panel += STEP)
            row_tiles<FORMAT, BYTES, STEP, Size::ROWS>(weight, x, first, last, panel, true, sink);
    }
}

template <int FORMAT, int STEP, class Sink>
void format_product(const Linear& weight, const Rows& x, int begin, int end, const Sink& sink) {
    for (const Run& run : *x.runs) {
        if constexpr (HAS_BYTE_DOTS && FORMAT >= Q8) {
            if (run.as_bytes) {
                run_product<FORMAT, true, STEP>(weight, x, run, begin, end, sink);
                continue;
            }
        }
        run_product<FORMAT, false, STEP>(weight, x, run, begin, end, sink);
    }
}

// Compute panels [begin, end) of x @ weight.T; sink(row, panel, acc) takes tiles of at least STEP panels.
template <int STEP, class Sink>
void product(const Linear& weight, const Rows& x, int begin, int end, const Sink& sink) {
    switch (weight.format) {
        case F32: return format_product<F32, STEP>(weight, x, begin, end, sink);
        case BF16: return format_product<BF16, STEP>(weight, x, begin, end, sink);
        case Q8: return format_product<Q8, STEP>(weight, x, begin, end, sink);
        case Q4_1: return format_product<Q4_1, STEP>(weight, x, begin, end, sink);
        default: return format_product<Q4_0, STEP>(weight, x, begin, end, sink);
    }
}

inline bool is_quantised(const Linear& weight) { return weight.format >= Q8; }

// How many panels are taken at least: a whole tile's, or the four that a single row walks side by side.
inline int panels_at_once(const Linear& weight, const Rows& x) {
    return is_quantised(weight) && x.runs->back().end > 1 ? 2 : 4;
}

inline int num_panels(long columns) { return int((columns + LANES - 1) / LANES); }

// Store a vector in the columns from `column` on, as many as there are.
KVORUM_INLINE void store_columns(float* row, long column, long num_columns, F16 value) {
    if (column + LANES <= num_columns) {
        store(row + column, value);
        return;
    }
    float lanes[LANES];
    store(lanes, value);
    std::copy(lanes, lanes + (num_columns - column), row + column);
}

// out[row][0..num_outputs) = x @ weight.T + bias, the panels that this member takes.
inline void linear(const Member& member, const Linear& weight, const Rows& x, float* out, long stride) {
    const auto sink = [&](long row, long panel, const auto& acc) {
        constexpr int R = std::extent_v<std::remove_reference_t<decltype(acc)>, 0>;
        constexpr int P = std::extent_v<std::remove_reference_t<decltype(acc)>, 1>;
        for (int p = 0; p < P; ++p) {
            const long column = (panel + p) * LANES;
            const F16 bias = weight.bias == nullptr ? zero() : load(weight.bias + column);
            for (int r = 0; r < R; ++r)
                store_columns(out + (row + r) * stride, column, weight.num_outputs,
                              weight.bias == nullptr ? acc[r][p] : acc[r][p] + bias);
        }
    };
    member.take_parts(num_panels(weight.num_outputs), panels_at_once(weight, x),
                      [&](int begin, int end) { product<1>(weight, x, begin, end, sink); });
}

}  // namespace kvorum
