// Format hadamard: a random-sign Walsh-Hadamard transform spreads each token's outliers over its
// channels, which then are nearly Gaussian and take Lloyd-Max levels (as in QuaRot, arXiv
// 2404.00456, with the levels of Max 1960). The static mean of the keys before RoPE is taken off
// first: a key bias would fill every token's range (Qwen2.5, keys alone at 3 bits: KL 3.2 instead
// of 0.05).
//
//   y = H (sign * x) / sqrt(n) in blocks of n channels, n the largest power of two that divides D
//   scale = f16(least squares of the codes' levels), code = nearest level of (y - H mean) / scale
//
// Keys are coded before RoPE. The mean is that of the rows which the layer held when it packed its
// first window. Bytes per token: (D + Dv) b / 8 and 2 each for keys and values; b = 1 to 4.
#pragma once

#include "codecs/grid_codec.h"
#include "codecs/row_sample.h"

namespace qevict::codecs {

/// Without a sample: for its bytes.
GridHead Hadamard(uint32_t bits, const RowShape& shape, const RowSample* sample);

}  // namespace qevict::codecs
