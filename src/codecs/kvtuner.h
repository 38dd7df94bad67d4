// Format kvtuner (KVTuner, arXiv 2502.04420): bits per layer, keys and values apart
// (Config::layer_bits; else Config::bits for both), in its KIVI mode.
//
//   keys      after RoPE, per channel over the window (the paper: 32 tokens)
//   values    per token over all channels
//   scale = max(high - low, 1e-5) / (2^b - 1), zero = scale * round(low / scale)
//   code = round_half_even((x - zero) / scale) in [0, 2^b - 1], value = code * scale + zero
//
// The paper's zero point is the integer round(low / scale) + 2^(b-1); it outgrows 16 bits where a
// group is narrow and far from 0, so that its product with the scale is stored, as f16; a number
// half way between two codes may fall to the other one by that. The per-token mode is left out: it
// is KIVI's value code for keys, which one channel of large magnitude spoils. Bytes per token:
// (D b_k + Dv b_v) / 8 codes, 4 D / W and 4 for grids.
#pragma once

#include "codecs/grid_codec.h"

namespace qevict::codecs {

GridHead KvTuner(LayerBits bits, const RowShape& shape);

}  // namespace qevict::codecs
