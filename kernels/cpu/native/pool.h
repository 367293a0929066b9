// The paged KV pool: panels of 16 slots, and reading and writing single slots.
//
// For each (layer, KV head) the panels of all blocks lie one behind the other, block_size / 16 to a block. A panel is
// K [head_dim][16], transposed so that 16 logits come from plain multiply-adds, then V [16][head_dim]. int8 numbers have
// one scale for each slot's K and one for its V.
#pragma once

#include "linear.h"

namespace kvorum {

enum KVFormat : int32_t { KV_F32 = 0, KV_BF16 = 1, KV_INT8 = 2 };

constexpr int NO_VICTIM = -1;

// kv: [num_layers, num_kv_heads, num_panels][K then V]; scores, positions: [.., num_panels, 16];
// scales: [.., num_panels, 2, 16] for int8, else null; victims: [num_layers, max_num_seqs, num_kv_heads].
struct Pool {
    uint8_t* kv;
    float* scores;
    int32_t* positions;
    float* scales;
    int32_t* victims;
    int64_t num_panels;
    int32_t num_layers;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t max_num_seqs;
    int32_t format;
    int32_t unused;

    long pair(long layer, long head) const { return layer * num_kv_heads + head; }
    long panel(long layer, long head, long index) const { return pair(layer, head) * num_panels + index; }
    int32_t& victim(long layer, long row, long head) const {
        return victims[(layer * max_num_seqs + row) * num_kv_heads + head];
    }
};

template <class W>
struct PanelOf {
    W* keys;
    W* values;
    float* key_scales;
    float* value_scales;
};

template <class W>
KVORUM_INLINE PanelOf<W> panel_at(const Pool& pool, long panel) {
    const long half = long(LANES) * pool.head_dim;
    W* keys = reinterpret_cast<W*>(pool.kv) + panel * 2 * half;
    float* scales = pool.scales == nullptr ? nullptr : pool.scales + panel * 2 * LANES;
    return {keys, keys + half, scales, scales == nullptr ? nullptr : scales + LANES};
}

KVORUM_INLINE void encode(float& to, float value, float) { to = value; }
KVORUM_INLINE void encode(uint16_t& to, float value, float) { to = float_to_bf16(value); }
KVORUM_INLINE void encode(int8_t& to, float value, float inverse) { to = int8_t(__builtin_rintf(value * inverse)); }
KVORUM_INLINE float decode(float value, float) { return value; }
KVORUM_INLINE float decode(uint16_t value, float) { return bf16_to_float(value); }
KVORUM_INLINE float decode(int8_t value, float scale) { return float(value) * scale; }

// A scale for int8 numbers, rounded up to 12 bits, so that numbers read back and written again keep their bits.
inline float int8_scale(const float* numbers, int count) {
    float most = 0.0f;
    for (int i = 0; i < count; ++i) most = std::max(most, std::fabs(numbers[i]));
    const float scale = most / 127.0f;
    uint32_t bits;
    std::memcpy(&bits, &scale, sizeof bits);
    bits = (bits + 0xfffu) & ~0xfffu;
    float rounded;
    std::memcpy(&rounded, &bits, sizeof rounded);
    return rounded;
}

template <class W>
void write_slot(const Pool& pool, long panel, int lane, const float* key, const float* value) {
    const PanelOf<W> at = panel_at<W>(pool, panel);
    float key_inverse = 0.0f, value_inverse = 0.0f;
    if constexpr (std::is_same_v<W, int8_t>) {
        const float key_scale = int8_scale(key, pool.head_dim), value_scale = int8_scale(value, pool.head_dim);
        at.key_scales[lane] = key_scale;
        at.value_scales[lane] = value_scale;
        key_inverse = key_scale > 0.0f ? 1.0f / key_scale : 0.0f;
        value_inverse = value_scale > 0.0f ? 1.0f / value_scale : 0.0f;
    }
    for (int d = 0; d < pool.head_dim; ++d) {
        encode(at.keys[d * LANES + lane], key[d], key_inverse);
        encode(at.values[lane * pool.head_dim + d], value[d], value_inverse);
    }
}

template <class W>
void read_slot(const Pool& pool, long panel, int lane, float* key, float* value) {
    const PanelOf<W> at = panel_at<W>(pool, panel);
    const bool scaled = std::is_same_v<W, int8_t>;
    const float key_scale = scaled ? at.key_scales[lane] : 1.0f, value_scale = scaled ? at.value_scales[lane] : 1.0f;
    for (int d = 0; d < pool.head_dim; ++d) {
        key[d] = decode(at.keys[d * LANES + lane], key_scale);
        value[d] = decode(at.values[lane * pool.head_dim + d], value_scale);
    }
}

// Call body with a null pointer of the pool's number type.
template <class Body>
void with_kv_type(int format, const Body& body) {
    if (format == KV_F32) body(static_cast<float*>(nullptr));
    else if (format == KV_BF16) body(static_cast<uint16_t*>(nullptr));
    else body(static_cast<int8_t*>(nullptr));
}

}  // namespace kvorum
