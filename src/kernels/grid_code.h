// Grid codes: packed windows whose numbers are uniform or tabled codes on grids along any axis.
// Most formats of the field are of this kind (src/codecs); the kernels decode a window into scratch
// of the L1's size and never keep a copy. The number of token t, channel c is
//
//   value[t][c] = factor[c] * (scale * level(code) + zero) + offset[c]
//
// with level(code) = code, or an entry of a table. Some numbers, or all of a token, may be kept
// exactly instead. A rotated code (sign != null) holds the Walsh-Hadamard transform of a token's
// channels: what is meant is sign[c] * (H value[t])[c] within blocks of HadamardBlock(dim)
// channels. Keys that are coded before RoPE are rotated last, by the kernel.
//
// One kv head of a window of W tokens (8, 16 or 32), dim channels, b bits, little-endian; keys
// first, then values:
//
//   codes    keys    [W / 8][dim][8 tokens]  b bits
//            values  [W][dim]                b bits      in both, 8 codes are b adjacent bytes
//   grids    kChannel  scale f16 [dim], zero f16 [dim]   one per channel over the window's tokens
//            kToken    scale f16 [n][W], zero f16 [n][W] n = dim / group grids per token
//            kStatic   none: factor and offset are the grid
//            bytes     (kChannel) unit f16 [2][dim / 32 rounded up], scale u8 [dim], zero i8 [dim]:
//                      scale = byte * unit[0][c / 32], zero = byte * unit[1][c / 32]
//   exact    {u16 t * dim + c, f16 value} [n_exact]      unused: 0xFFFF
//            {u16 t, f16 [dim]} [n_exact_tokens]         unused: 0xFFFF
//
// There is no zero where a code has none. Exact numbers stand for what is before the transform.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qevict::kernels {

enum class GridAxis : uint8_t { kChannel, kToken, kStatic };

/// Keys or values of one kv head. Borrowed pointers; those to [dim] floats can be read up to the
/// next multiple of 16.
struct GridVector {
  uint32_t bits = 0;  ///< 1, 2, 3, 4 or 8
  GridAxis axis = GridAxis::kChannel;
  bool has_zero = true;
  bool bytes = false;             ///< grids of one byte, with zeros
  bool before_rope = false;       ///< keys
  uint32_t group = 0;             ///< kToken: channels of a grid, a multiple of 8 that divides dim
  uint32_t n_exact = 0;           ///< numbers of a window
  uint32_t n_exact_tokens = 0;    ///< tokens of a window
  const float* levels = nullptr;  ///< [16], of which 2^bits count, bits <= 4; null: codes
  const float* factor = nullptr;  ///< [dim], or null: 1
  const float* offset = nullptr;  ///< [dim], or null: 0
  const float* sign = nullptr;    ///< [dim] +-1 / sqrt(block), or null: no transform
};

struct GridCode {
  GridVector k, v;
};

inline constexpr uint32_t kByteGridShare = 32;  ///< channels that share the units of byte grids

/// Channels that a Hadamard transform mixes: the largest power of two that divides dim.
[[gnu::always_inline]] constexpr uint32_t HadamardBlock(uint32_t dim) { return dim & (~dim + 1); }

/// Units of one kind that a byte grid has.
[[gnu::always_inline]] constexpr uint32_t ByteGridUnits(uint32_t dim) {
  return (dim + kByteGridShare - 1) / kByteGridShare;
}

/// The transform of x [dim] in place, without signs and norm. Inlined for sure: units of several
/// instruction sets include this.
[[gnu::always_inline]] inline void WalshHadamard(uint32_t dim, float* x) {
  const uint32_t n = HadamardBlock(dim);
  for (uint32_t half = 1; half < n; half *= 2) {
    for (uint32_t c = 0; c < dim; c += 2 * half) {
      for (uint32_t i = c; i < c + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
}

/// Byte offsets of the parts of a window's keys (or values) of one kv head; codes begin at 0.
struct GridLayout {
  size_t units = 0, scale = 0, zero = 0, exact = 0, exact_tokens = 0, end = 0;
};

/// Grids of a window.
[[gnu::always_inline]] constexpr uint32_t GridCount(const GridVector& g, uint32_t window,
                                                    uint32_t dim) {
  if (g.axis == GridAxis::kStatic) return 0;
  return g.axis == GridAxis::kChannel ? dim : dim / g.group * window;
}

// Inlined for sure: units of several instruction sets include this.
[[gnu::always_inline]] constexpr GridLayout LayoutGrid(const GridVector& g, uint32_t window,
                                                       uint32_t dim) {
  GridLayout at{};
  const size_t n = GridCount(g, window, dim);
  at.units = size_t{window} * dim * g.bits / 8;
  at.scale = at.units + (g.bytes ? size_t{4} * ByteGridUnits(dim) : 0);
  at.zero = at.scale + (g.bytes ? n : 2 * n);
  at.exact = at.zero + (g.bytes ? n : g.has_zero ? 2 * n : 0);
  at.exact_tokens = at.exact + size_t{4} * g.n_exact;
  at.end = at.exact_tokens + g.n_exact_tokens * (2 + size_t{2} * dim);
  return at;
}

}  // namespace qevict::kernels
