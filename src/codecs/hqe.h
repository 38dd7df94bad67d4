// Format hqe (HqeKV, Findings of ACL 2026): keys after RoPE, one grid per channel over the window
// (the paper's blocks are 32 tokens: window=32), values one grid per token and 32 channels.
//
//   8, 4, 2 bits   the asymmetric uniform code of kivi_grid.h
//   1 bit          "normal" code: zero = mean, scale = unbiased standard deviation,
//                  code = x > mean, value = mean +- 0.6744898 scale
//
// The paper's downgrades decode a block and encode it again. 8 -> 4 -> 2 is nested but for the
// rounding of grids, 2 -> 1 is not: its error is 15% above that of the 1-bit code at once. qevict's
// tiers have one width each, so that a window is always coded from full precision. (For a Gaussian,
// +- 0.797885 scale would have 4% less error than the paper's levels.)
// Bytes per token: (D + Dv) b / 8, 4 D / W and 4 Dv / 32.
#pragma once

#include "codecs/grid_codec.h"

namespace qevict::codecs {

GridHead Hqe(uint32_t bits, const RowShape& shape);
/// The normal code of 1 or 2 bits for any group: levels and borders are quantiles of the unit
/// Gaussian.
void SetNormalCode(uint32_t bits, GridSpec& spec);

}  // namespace qevict::codecs
