// The two products of prefill attention in bf16 pairs, which processors with such dot products multiply at twice the
// rate of float32. Numbers that meet lie side by side, so the slots that a strip of queries attends to are laid out
// anew for it, outside the pool.
#pragma once

#include "paged_products.h"

namespace kvorum {

#if defined(KVORUM_PAIR_DOTS)
constexpr bool HAS_PAIR_DOTS = true;
#else
constexpr bool HAS_PAIR_DOTS = false;
#endif

// Cuts a buffer into arrays that begin with cache lines.
class Cutter {
  public:
    explicit Cutter(float* buffer) : next_((reinterpret_cast<uintptr_t>(buffer) + LINE - 1) / LINE * LINE) {}

    template <class T>
    T* take(long count) {
        T* taken = reinterpret_cast<T*>(next_);
        next_ += (uintptr_t(count) * sizeof(T) + LINE - 1) / LINE * LINE;
        return taken;
    }

  private:
    static constexpr uintptr_t LINE = 64;
    uintptr_t next_;
};

// Floats that prefill in pairs needs beyond the two of [rows][head_dim] and of [rows][padded slots]: the paired slots,
// and what aligning six arrays costs.
constexpr long paired_size(int head_dim, long padded_slots) { return padded_slots * head_dim + 7 * LANES; }

#if defined(KVORUM_PAIR_DOTS)

// A matrix [2 * pairs][columns]: the pair of rows 2 k and 2 k + 1 in column j is at
// numbers + j / 16 * panel + k * pair + j % 16 * 2.
struct PairedMatrix {
    const uint16_t* numbers;
    long panel, pair;
};

// K of slots, [panels][head_dim / 2][16][2], and V, [padded slots / 2][head_dim][2].
struct PairedSlots {
    const uint16_t* key_pairs;
    const uint16_t* value_pairs;
    long head_dim;

    PairedMatrix keys() const { return {key_pairs, LANES * head_dim, 2 * LANES}; }
    PairedMatrix values(long first_slot) const {
        return {value_pairs + first_slot * head_dim, 2 * LANES, 2 * head_dim};
    }
};

// Lay out a sequence's first slots. Unused ones may hold anything: their V becomes 0, for they get weights of 0; their
// logits are never looked at.
inline PairedSlots pair_slots(const Pool& pool, const int32_t* panels, int slots, long base, Cutter& cutter) {
    const int head_dim = pool.head_dim;
    const long size = (slots + LANES - 1) / LANES * long(LANES) * head_dim;
    uint16_t *keys = cutter.take<uint16_t>(size), *values = cutter.take<uint16_t>(size);
    const PairedSlots paired{keys, values, head_dim};
    const std::vector<uint16_t> nothing(head_dim);
    for (int first = 0, panel = 0; first < slots; first += LANES, ++panel) {
        const PanelOf<uint16_t> at = panel_at<uint16_t>(pool, base + panels[panel]);
        for (int d = 0; d < head_dim; d += 2, keys += 2 * LANES)
            store_pairs(keys, at.keys + d * LANES, at.keys + (d + 1) * LANES);
        for (int lane = 0; lane < LANES; lane += 2) {
            const auto row = [&](int lane) {
                return first + lane < slots ? at.values + lane * head_dim : nothing.data();
            };
            const uint16_t *even = row(lane), *odd = row(lane + 1);
            for (int d = 0; d < head_dim; d += LANES, values += 2 * LANES) store_pairs(values, even + d, odd + d);
        }
    }
    return paired;
}

template <bool ADDS, int R, int P>
KVORUM_INLINE void pairs_tile(const uint16_t* a, long lda, int count, const PairedMatrix& matrix, long panel,
                              float* out, long stride) {
    F16 acc[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) acc[r][p] = ADDS ? load(out + r * stride + p * LANES) : zero();
    const uint16_t* numbers = matrix.numbers + panel * matrix.panel;
    for (int k = 0; k < count; k += 2, numbers += matrix.pair) {
        P16 column[P];
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) column[p] = load_pairs(numbers + p * matrix.panel);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const P16 x = splat_pair(a + r * lda + k);
#pragma GCC unroll 8
            for (int p = 0; p < P; ++p) acc[r][p] = dot(acc[r][p], x, column[p]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) store(out + r * stride + p * LANES, acc[r][p]);
}

template <bool ADDS, int P, int R>
void pairs_rows(const uint16_t* a, long lda, int rows, int count, const PairedMatrix& matrix, long panel, float* out,
                long stride) {
    int row = 0;
    for (; row + R <= rows; row += R)
        pairs_tile<ADDS, R, P>(a + row * lda, lda, count, matrix, panel, out + row * stride, stride);
    if constexpr (R > 1)
        if (row < rows)
            pairs_rows<ADDS, P, R - 1>(a + row * lda, lda, rows - row, count, matrix, panel, out + row * stride,
                                       stride);
}

// out [rows][columns] = a [rows][count] @ matrix, or ADDS it; count is even, columns a multiple of 16. Every number of
// out is one chain over the pairs in order.
template <bool ADDS>
void multiply_pairs(const uint16_t* a, long lda, int rows, int count, const PairedMatrix& matrix, int columns,
                    float* out, long stride) {
    constexpr int P = 4;
    int column = 0;
    for (; column + P * LANES <= columns; column += P * LANES)
        pairs_rows<ADDS, P, ROWS>(a, lda, rows, count, matrix, column / LANES, out + column, stride);
    for (; column < columns; column += LANES)
        pairs_rows<ADDS, 1, ROWS>(a, lda, rows, count, matrix, column / LANES, out + column, stride);
}

#endif

}  // namespace kvorum
