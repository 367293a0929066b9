// Packing of weights into panels, and reading rows back out of them; the formats are described in linear.h.
#pragma once

#include "linear.h"

namespace kvorum {

// Pack float rows [rows, inputs] into panels first, first + step, ...; format Q8 quantises, 32 inputs to a scale.
void pack_floats(int format, const float* source, long rows, long inputs, uint8_t* panels, long first, long step);

// The same from GGUF blocks of the same format.
void pack_gguf(int format, const uint8_t* source, long rows, long inputs, uint8_t* panels, long first, long step);

// Write row `row` of a packed weight, dequantised, to out [num_inputs].
void unpack_row(const Linear& weight, long row, float* out);

}  // namespace kvorum
