// Format ott (outlier token tracing, arXiv 2505.10938): KIVI's code after RoPE, but the tokens
// whose keys have the smallest sum of magnitudes are exact: they have small values in the channels
// of large magnitude and widen every grid there. Their place in the codes gets the mean of the
// other tokens.
//
// The paper traces a pool of 3 tokens through groups of 128 tokens and stops when 32 have been
// pushed out of it, and has none in the first two layers. Here a window is written once and stands
// alone, so that each has one exact token (key and value) in every layer: 2 (D + Dv) + 4 bytes a
// window. Of 1,000 tokens at W = 32 that are 31, where the paper keeps up to 35.
//
// Bytes per token: (D + Dv) b / 8, 4 D / W, 4 Dv / 32, and (2 (D + Dv) + 4) / W.
#pragma once

#include "codecs/grid_codec.h"

namespace qevict::codecs {

GridHead Ott(uint32_t bits, const RowShape& shape);
/// The n tokens of x [n_tokens][dim] with the smallest sum of magnitudes (what is not finite
/// counts as 0); ties: the earlier one.
std::vector<uint32_t> SmallestTokens(const float* x, uint32_t n_tokens, uint32_t dim, uint32_t n);

}  // namespace qevict::codecs
