// Format zipcache (ZipCache, arXiv 2405.14256): keys after RoPE on one static grid per channel and
// kv head; values channel-separable and per token.
//
//   keys     offset = min, factor = (max - min) / (2^b - 1) of the channel over the rows that the
//            layer held when it packed its first window; code = round(clamp((x - offset) / factor))
//   values   factor c = sqrt(max |V|) of the channel over the same rows, y = x / c, one uniform
//            grid per token and kv head for y, value = c * (code * scale + zero)
//
// The authors compress the whole cache again every 100 tokens, with new ranges; here a window is
// written once, and later keys beyond the range are clamped. The split of tokens into 4 and 2 bits
// by saliency is left out: packed windows of a layer have one width. Bytes per token:
// (D + Dv) b / 8 and 4; per kv head, once: 4 (2 D + Dv), in f32.
#pragma once

#include "codecs/grid_codec.h"
#include "codecs/row_sample.h"

namespace qevict::codecs {

/// Without a sample: for its bytes.
GridHead ZipCache(uint32_t bits, const RowShape& shape, const RowSample* sample);

}  // namespace qevict::codecs
