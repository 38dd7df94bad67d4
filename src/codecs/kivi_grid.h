// Formats kivi (1, 3 and 8 bits; kivi_axis.h has 2 and 4), kivi_post, kivi_clip and byte_grid: the
// asymmetric uniform code of KIVI (arXiv 2402.02750) on the axes that it found right, with the
// bytes of kernels/grid_code.h.
//
//                keys: one grid per channel      values: one grid per token      grids
//   kivi         over the window, before RoPE    over all channels               minimum, maximum
//   kivi_clip    the same                        the same                        least squares
//   kivi_post    over the window, after RoPE     over 32 channels                minimum, maximum
//   byte_grid    over the window, before RoPE    over all channels               see below
//
//   zero = f16(low), scale = f16((high - low) / (2^b - 1))
//   code = round_half_even(clamp((x - zero) / scale, 0, 2^b - 1)), value = code * scale + zero
//
// A scale that rounds to 0 becomes 1: codes then hold what f16 lost of the minimum.
//
// Least squares: the range is narrowed on both sides in steps of 1/32, down to a quarter, and the
// one with the smallest squared error of its stored grid is taken.
// byte_grid (after RecoverKv): scale and zero of a key channel are a byte each, times an f16
// unit that 32 channels share. Zeros are taken against an anchor, the channel's mean before RoPE of
// the rows that the layer held when it packed its first window: a key bias is the same in all
// windows, and a byte is too coarse for it. The source's values have one-byte grids, too (20
// instead of 32 bytes at W = 8); here they keep f16 ones, which are 1.5% of a window. KIVI's keys
// share a grid over 32 tokens: window=32. kivi_post's groups of 32 channels become all channels
// where 32 does not divide them.
//
// Bytes per token of D + Dv channels, window W: (D + Dv) b / 8 codes; keys 4 D / W for grids
// (byte_grid: (2 D + 4 ceil(D / 32)) / W), values 4 per group.
#pragma once

#include "codecs/grid_codec.h"
#include "codecs/row_sample.h"

namespace qevict::codecs {

GridHead KiviGrid(uint32_t bits, const RowShape& shape);
GridHead KiviClip(uint32_t bits, const RowShape& shape);
GridHead KiviPost(uint32_t bits, const RowShape& shape);
/// Without a sample: for its bytes.
GridHead ByteGrid(uint32_t bits, const RowShape& shape, const RowSample* sample);

/// Channels of a group of 32, or all.
uint32_t GroupOf32(uint32_t dim);
/// Mean per channel of rows [n][dim]; zeros if n is 0.
std::vector<float> MeanRow(const std::vector<float>& rows, uint32_t n, uint32_t dim);

}  // namespace qevict::codecs
