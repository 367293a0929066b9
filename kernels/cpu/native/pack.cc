// Packing of weights into panels, and reading rows back out of them.
#include "pack.h"

namespace kvorum {
namespace {

uint16_t float_to_half(float value) {
    // Round to nearest even by way of the exact float arithmetic of subnormals and a bias trick.
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits >= 0x47800000u) return uint16_t(sign | 0x7c00u);
    if (bits < 0x38800000u) {
        float magnitude;
        std::memcpy(&magnitude, &bits, sizeof magnitude);
        return uint16_t(sign | uint32_t(__builtin_rintf(magnitude * 0x1p24f)));
    }
    return uint16_t(sign | ((bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13));
}

// One column's 32 inputs, in a quantised format.
struct Block {
    uint16_t scale = 0, least = 0;
    int8_t q[GROUP];
};

Block read_gguf(int format, const uint8_t* source) {
    Block block;
    std::memcpy(&block.scale, source, 2);
    if (format == Q8) {
        std::memcpy(block.q, source + 2, GROUP);
        return block;
    }
    const uint8_t* nibbles = source + 2;
    if (format == Q4_1) {
        std::memcpy(&block.least, source + 2, 2);
        nibbles += 2;
    }
    for (int i = 0; i < GROUP / 2; ++i) block.q[i] = nibbles[i] & 15, block.q[i + GROUP / 2] = nibbles[i] >> 4;
    return block;
}

Block quantise(const float* source) {
    Block block;
    float most = 0.0f;
    for (int i = 0; i < GROUP; ++i) most = std::max(most, std::fabs(source[i]));
    block.scale = float_to_half(most / 127.0f);
    const float scale = half_to_float(block.scale);
    for (int i = 0; i < GROUP; ++i) {
        const float q = scale > 0.0f ? __builtin_rintf(source[i] / scale) : 0.0f;
        block.q[i] = int8_t(std::min(127.0f, std::max(-127.0f, q)));
    }
    return block;
}

void write_block(int format, const Block& block, uint8_t* group, int lane) {
    reinterpret_cast<uint16_t*>(group)[lane] = block.scale;
    if (format == Q4_1) reinterpret_cast<uint16_t*>(group)[LANES + lane] = block.least;
    uint8_t* bytes = group + (format == Q4_1 ? 64 : 32);
    for (int i = 0; i < GROUP; ++i) {
        if (format == Q8) {
            bytes[i / 4 * 64 + lane * 4 + i % 4] = uint8_t(block.q[i] + 128);
            continue;
        }
        uint8_t& byte = bytes[i / 8 * 64 + lane * 4 + i % 4];
        if (i % 8 < 4) byte = uint8_t(block.q[i]);
        else byte = uint8_t(byte | block.q[i] << 4);
    }
}

}  // namespace

void pack_floats(int format, const float* source, long rows, long inputs, uint8_t* panels, long first, long step) {
    const long size = panel_bytes(format, inputs);
    for (long row = 0; row < rows; ++row) {
        uint8_t* panel = panels + (first + row / LANES * step) * size;
        const long lane = row % LANES;
        const float* numbers = source + row * inputs;
        if (format == F32)
            for (long k = 0; k < inputs; ++k) reinterpret_cast<float*>(panel)[k * LANES + lane] = numbers[k];
        else if (format == BF16)
            for (long k = 0; k < inputs; ++k)
                reinterpret_cast<uint16_t*>(panel)[k * LANES + lane] = float_to_bf16(numbers[k]);
        else
            for (long group = 0; group < inputs / GROUP; ++group)
                write_block(Q8, quantise(numbers + group * GROUP), panel + group * group_bytes(Q8), int(lane));
    }
}

void pack_gguf(int format, const uint8_t* source, long rows, long inputs, uint8_t* panels, long first, long step) {
    const long size = panel_bytes(format, inputs);
    const long block = format == Q8 ? 34 : format == Q4_1 ? 20 : 18, groups = inputs / GROUP;
    for (long row = 0; row < rows; ++row) {
        uint8_t* panel = panels + (first + row / LANES * step) * size;
        for (long group = 0; group < groups; ++group)
            write_block(format, read_gguf(format, source + (row * groups + group) * block),
                        panel + group * group_bytes(format), int(row % LANES));
    }
}

void unpack_row(const Linear& weight, long row, float* out) {
    const long inputs = weight.num_inputs;
    const int format = weight.format, lane = int(row % LANES);
    const uint8_t* panel = weight.panels + row / LANES * panel_bytes(format, inputs);
    if (format == F32) {
        for (long k = 0; k < inputs; ++k) out[k] = reinterpret_cast<const float*>(panel)[k * LANES + lane];
        return;
    }
    if (format == BF16) {
        for (long k = 0; k < inputs; ++k)
            out[k] = bf16_to_float(reinterpret_cast<const uint16_t*>(panel)[k * LANES + lane]);
        return;
    }
    for (long group = 0; group < inputs / GROUP; ++group, panel += group_bytes(format)) {
        const float scale = half_to_float(reinterpret_cast<const uint16_t*>(panel)[lane]);
        const float least = format == Q4_1 ? half_to_float(reinterpret_cast<const uint16_t*>(panel)[LANES + lane])
                            : format == Q4_0 ? -8.0f * scale
                                             : 0.0f;
        const uint8_t* bytes = panel + (format == Q4_1 ? 64 : 32);
        for (int i = 0; i < GROUP; ++i) {
            float q;
            if (format == Q8) q = float(bytes[i / 4 * 64 + lane * 4 + i % 4]) - 128.0f;
            else q = float(bytes[i / 8 * 64 + lane * 4 + i % 4] >> (i % 8 < 4 ? 0 : 4) & 15);
            out[group * GROUP + i] = scale * q + least;
        }
    }
}

}  // namespace kvorum
