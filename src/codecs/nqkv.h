// Format nqkv (NQKV, arXiv 2505.16210): 4-bit NormalFloat levels per token, keys after RoPE.
//
//   a = f16(max |x|) over a block of a token's channels, code = nearest level of x / a,
//   value = level * a
//
// The paper's blocks are 256 elements of the row of all kv heads. Here a kv head's channels stand
// alone in memory, so that a block is one head's channels, or 256 of them. Bytes per token:
// (D + Dv) / 2 codes and 2 per block.
#pragma once

#include "codecs/grid_codec.h"

namespace qevict::codecs {

GridHead Nqkv(const RowShape& shape);

}  // namespace qevict::codecs
