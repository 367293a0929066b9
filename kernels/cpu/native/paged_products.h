// The two products of attention over paged K and V: logits from queries and keys, outputs from weights and values.
#pragma once

#include "pool.h"

namespace kvorum {

// Of a tile: what the registers hold.
constexpr int ROWS = 6;
#if defined(KVORUM_AVX512)
constexpr int COLUMNS = 4;
#else
constexpr int COLUMNS = 1;
#endif
constexpr int VALUE_PANELS = 8;   // panels of V that stay in the first cache while a tile's rows pass

template <class W, int R, int P>
KVORUM_INLINE void logits_tile(const Pool& pool, const int32_t* panels, long base, const float* queries, long query_stride,
                               float* logits, long stride) {
    F16 acc[R][P];
    const W* keys[P];
    const float* scales[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
        const PanelOf<W> at = panel_at<W>(pool, base + panels[p]);
        keys[p] = at.keys;
        scales[p] = at.key_scales;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) acc[r][p] = zero();
    }
    // V lies behind K: fetch it meanwhile.
    accumulate<W, R, P>(acc, queries, query_stride, keys, LANES, pool.head_dim, long(LANES) * pool.head_dim);
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            if constexpr (std::is_same_v<W, int8_t>) acc[r][p] = acc[r][p] * load(scales[p]);
            store(logits + r * stride + p * LANES, acc[r][p]);
        }
    }
}

template <class W, int P, int R>
void logits_rows(const Pool& pool, const int32_t* panels, long base, const float* queries, long query_stride, int rows,
                 float* logits, long stride) {
    int row = 0;
    for (; row + R <= rows; row += R)
        logits_tile<W, R, P>(pool, panels, base, queries + row * query_stride, query_stride, logits + row * stride, stride);
    if constexpr (R > 1)
        if (row < rows)
            logits_rows<W, P, R - 1>(pool, panels, base, queries + row * query_stride, query_stride, rows - row,
                                     logits + row * stride, stride);
}

template <class W, int P, int R>
void logits_panels(const Pool& pool, const int32_t* panels, int num_panels, long base, const float* queries,
                   long query_stride, int rows, float* logits, long stride) {
    int panel = 0;
    for (; panel + P <= num_panels; panel += P)
        logits_rows<W, P, R>(pool, panels + panel, base, queries, query_stride, rows, logits + panel * LANES, stride);
    for (; panel < num_panels; ++panel)
        logits_rows<W, 1, R>(pool, panels + panel, base, queries, query_stride, rows, logits + panel * LANES, stride);
}

// logits[row][slot] = queries[row] . keys[slot] for whole panels. Where registers are few, few rows take more panels.
template <class W>
void compute_logits(const Pool& pool, const int32_t* panels, int num_panels, long base, const float* queries,
                    long query_stride, int rows, float* logits, long stride) {
    const auto take = [&](auto panels_product) {
        panels_product(pool, panels, num_panels, base, queries, query_stride, rows, logits, stride);
    };
    if constexpr (COLUMNS == 4) take(logits_panels<W, 4, ROWS>);
    else if (rows == 1) take(logits_panels<W, 4, 1>);
    else if (rows <= 3) take(logits_panels<W, 2, 3>);
    else take(logits_panels<W, 1, ROWS>);
}

// Panels whose K comes next, to be fetched while V is computed with.
struct Ahead {
    const int32_t* panels = nullptr;
    int count = 0;
    long base = 0;

    template <class W>
    void fetch(const Pool& pool, int panel) const {
        if (panel >= count) return;
        const char* keys = reinterpret_cast<const char*>(panel_at<W>(pool, base + panels[panel]).keys);
        for (long byte = 0; byte < long(sizeof(W)) * LANES * pool.head_dim; byte += 64)
            __builtin_prefetch(keys + byte, 0, 2);
    }
};

template <class W, int R, int C>
KVORUM_INLINE void values_tile(const Pool& pool, const int32_t* panels, int slots, long base, const float* weights,
                               long stride, float* output, long output_stride, int column, const Ahead& ahead) {
    F16 acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = load(output + r * output_stride + column + c * LANES);
    for (int first = 0, panel = 0; first < slots; first += LANES, ++panel) {
        const W* values = panel_at<W>(pool, base + panels[panel]).values + column;
        if (column == 0) ahead.fetch<W>(pool, panel);
        const W* columns[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) columns[c] = values + c * LANES;
        accumulate<W, R, C>(acc, weights + first, stride, columns, pool.head_dim, std::min(LANES, slots - first));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) store(output + r * output_stride + column + c * LANES, acc[r][c]);
}

template <class W, int R>
void values_rows(const Pool& pool, const int32_t* panels, int slots, long base, const float* weights, long stride,
                 int rows, float* output, const Ahead& ahead) {
    const int head_dim = pool.head_dim;
    int row = 0;
    for (; row + R <= rows; row += R) {
        int column = 0;
        for (; column + COLUMNS * LANES <= head_dim; column += COLUMNS * LANES)
            values_tile<W, R, COLUMNS>(pool, panels, slots, base, weights + row * stride, stride, output + row * head_dim,
                                       head_dim, column, ahead);
        for (; column < head_dim; column += LANES)
            values_tile<W, R, 1>(pool, panels, slots, base, weights + row * stride, stride, output + row * head_dim,
                                 head_dim, column, ahead);
    }
    if constexpr (R > 1)
        if (row < rows)
            values_rows<W, R - 1>(pool, panels, slots, base, weights + row * stride, stride, rows - row,
                                  output + row * head_dim, ahead);
}

// output[row] += sum over slots of weights[row][slot] * values[slot], int8 values without their scales.
template <class W>
void add_values(const Pool& pool, const int32_t* panels, int slots, long base, const float* weights, long stride, int rows,
                float* output, const Ahead& ahead = {}) {
    for (int first = 0; first < slots; first += VALUE_PANELS * LANES) {
        const int done = first / LANES;
        const Ahead left = done < ahead.count ? Ahead{ahead.panels + done, ahead.count - done, ahead.base} : Ahead{};
        values_rows<W, ROWS>(pool, panels + done, std::min(VALUE_PANELS * LANES, slots - first), base, weights + first,
                             stride, rows, output, left);
    }
}

// scaled[row][slot] = weights[row][slot] * the slot's V scale.
void scale_weights(const Pool& pool, const int32_t* panels, int slots, long base, const float* weights, long stride,
                   int rows, float* scaled) {
    for (int first = 0, panel = 0; first < slots; first += LANES, ++panel) {
        const F16 scales = load(panel_at<int8_t>(pool, base + panels[panel]).value_scales);
        for (int row = 0; row < rows; ++row)
            store(scaled + row * stride + first, load(weights + row * stride + first) * scales);
    }
}

}  // namespace kvorum
