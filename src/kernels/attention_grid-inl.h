// Grid codes (grid_code.h): a window is decoded to f32 in scratch of the L1's size. Included by
// attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_keys-inl.h"
#include "kernels/attention_packed-inl.h"
#include "kernels/grid_code.h"

namespace qevict::kernels::internal {

/// A mask with the lowest `width` of every `period` bits set.
static constexpr uint64_t RepeatedBits(uint32_t width, uint32_t period) {
  uint64_t mask = 0;
  for (uint32_t i = 0; i < 64; i += period) mask |= ((uint64_t{1} << width) - 1) << i;
  return mask;
}

/// 8 codes of kBits, the first in the lowest bits, to the 8 bytes of a word.
template <int kBits>
static inline uint64_t SpreadCodes(const uint8_t* p) {
  uint64_t x = 0;
  __builtin_memcpy(&x, p, kBits);
  if constexpr (kBits < 8) {
    x = (x | x << (32 - 4 * kBits)) & RepeatedBits(4 * kBits, 32);
    x = (x | x << (16 - 2 * kBits)) & RepeatedBits(2 * kBits, 16);
    x = (x | x << (8 - kBits)) & RepeatedBits(kBits, 8);
  }
  return x;
}

/// Levels of the 8 n codes at p, n <= kLanes / 8; other lanes get that of code 0.
template <class S, int kBits>
typename S::V LoadLevels(const uint8_t* p, uint32_t n, const float* levels) {
  uint64_t codes[S::kLanes / 8] = {};
  for (uint32_t i = 0; i < n; ++i) codes[i] = SpreadCodes<kBits>(p + i * kBits);
  const auto* bytes = reinterpret_cast<const uint8_t*>(codes);
  return levels == nullptr ? S::LoadBytes(bytes) : S::Lookup(levels, bytes);
}

/// Calls f(Int<bits>) for the widths that a code may have.
template <class F>
void ForGridBits(uint32_t bits, F&& f) {
  if (bits == 1) return f(Int<1>{});
  if (bits == 2) return f(Int<2>{});
  if (bits == 3) return f(Int<3>{});
  if (bits == 4) return f(Int<4>{});
  return f(Int<8>{});
}

template <class S>
float HalfToFloat(const uint8_t* p) {
  uint16_t raw[8] = {};
  __builtin_memcpy(raw, p, 2);
  alignas(64) float x[S::kLanes];
  S::Store(x, S::LoadF16Half(raw));
  return x[0];
}

/// The grids of one kv head of a window, in f32.
template <class S>
struct WideGrid {
  float* scale;
  float* zero;

  /// scratch: Scratch::grid.
  WideGrid(const GridVector& g, const uint8_t* block, uint32_t window, uint32_t dim,
           float* scratch) {
    const uint32_t n = GridCount(g, window, dim);
    const GridLayout at = LayoutGrid(g, window, dim);
    scale = scratch;
    zero = scratch + PadLanes(n) + kPad;
    if (n == 0) return;
    if (g.bytes) {
      WidenBytes(block, at, dim);
      return;
    }
    WidenF16<S>(reinterpret_cast<const uint16_t*>(block + at.scale), n, scale);
    if (g.has_zero) {
      WidenF16<S>(reinterpret_cast<const uint16_t*>(block + at.zero), n, zero);
    } else {
      for (uint32_t i = 0; i < n; i += S::kLanes) S::Store(zero + i, S::Zero());
    }
  }

 private:
  void WidenBytes(const uint8_t* block, const GridLayout& at, uint32_t dim) {
    const uint32_t n_units = ByteGridUnits(dim);
    for (uint32_t i = 0; i < n_units; ++i) {
      const float unit = HalfToFloat<S>(block + at.units + 2 * i),
                  zero_unit = HalfToFloat<S>(block + at.units + 2 * (n_units + i));
      const uint32_t end = (i + 1) * kByteGridShare < dim ? (i + 1) * kByteGridShare : dim;
      for (uint32_t c = i * kByteGridShare; c < end; ++c) {
        scale[c] = unit * static_cast<float>(block[at.scale + c]);
        zero[c] = zero_unit * static_cast<float>(static_cast<int8_t>(block[at.zero + c]));
      }
    }
  }
};

/// Overwrites the numbers that are kept exactly: cell(t, c) is where a number lies.
template <class S, class Cell>
void PutExact(const GridVector& g, const uint8_t* block, uint32_t window, uint32_t dim,
              Cell&& cell) {
  const GridLayout at = LayoutGrid(g, window, dim);
  const auto index = [](const uint8_t* p) {
    uint16_t x;
    __builtin_memcpy(&x, p, 2);
    return uint32_t{x};
  };
  for (uint32_t i = 0; i < g.n_exact; ++i) {
    const uint8_t* entry = block + at.exact + 4 * i;
    const uint32_t where = index(entry);
    if (where < window * dim) *cell(where / dim, where % dim) = HalfToFloat<S>(entry + 2);
  }
  for (uint32_t i = 0; i < g.n_exact_tokens; ++i) {
    const uint8_t* entry = block + at.exact_tokens + i * (2 + size_t{2} * dim);
    const uint32_t t = index(entry);
    if (t >= window) continue;
    for (uint32_t c = 0; c < dim; ++c) *cell(t, c) = HalfToFloat<S>(entry + 2 + 2 * c);
  }
}

/// p[channel] in the lanes of each channel, blocks order.
template <class S>
typename S::V PerChannel(const float* p) {
  return S::PairsToBlocks(S::Channels(p));
}

/// 8 tokens of keys: channel c of token t to dst[c * stride + t].
template <class S, int kBits>
void DecodeKeyColumns(const GridVector& g, const uint8_t* codes, const WideGrid<S>& grid,
                      uint32_t window, uint32_t dim, uint32_t part, float* dst, size_t stride) {
  codes += size_t{part} * dim * kBits;
  for (uint32_t c = 0; c < dim; c += S::kChannels) {
    auto x = LoadLevels<S, kBits>(codes + size_t{c} * kBits, S::kChannels, g.levels);
    if (g.axis == GridAxis::kChannel) {
      x = S::Fma(x, PerChannel<S>(grid.scale + c), PerChannel<S>(grid.zero + c));
    } else if (g.axis == GridAxis::kToken) {  // groups are of 8 channels at least
      const uint32_t at = c / g.group * window + 8 * part;
      x = S::Fma(x, S::LoadBlocks(grid.scale + at, grid.scale + at),
                 S::LoadBlocks(grid.zero + at, grid.zero + at));
    }
    if (g.factor != nullptr) x = S::Mul(x, PerChannel<S>(g.factor + c));
    if (g.offset != nullptr) x = S::Add(x, PerChannel<S>(g.offset + c));
    S::StoreBlocks(x, dst + c * stride, dst + (c + 1) * stride);
  }
}

/// In place: 8 tokens in columns, blocks of n channels, times sign.
template <class S>
void HadamardColumns(const float* sign, uint32_t dim, float* x, size_t stride) {
  const uint32_t n = HadamardBlock(dim);
  for (uint32_t half = 1; half < n; half *= 2) {
    for (uint32_t c = 0; c < dim; ++c) {
      if ((c & half) != 0) continue;
      float *a = x + c * stride, *b = x + (c + half) * stride;
      const auto u = S::LoadBlocks(a, a), v = S::LoadBlocks(b, b);
      S::StoreBlocks(S::Add(u, v), a, a);
      S::StoreBlocks(S::Sub(u, v), b, b);
    }
  }
  for (uint32_t c = 0; c < dim; ++c) {
    float* a = x + c * stride;
    S::StoreBlocks(S::Mul(S::LoadBlocks(a, a), S::Set1(sign[c])), a, a);
  }
}

/// In place: one row.
static inline void HadamardRow(const float* sign, uint32_t dim, float* x) {
  WalshHadamard(dim, x);
  for (uint32_t c = 0; c < dim; ++c) x[c] *= sign[c];
}

/// In place: RoPE of 8 tokens in columns whose first is at pos. step: RopeView's, for the window.
template <class S>
void RotateColumns(const RopeView& rope, int32_t pos, const float* step, float* x, size_t stride) {
  alignas(64) float cos[kCoefStride], sin[kCoefStride], unused[8];
  PhasesAt<S>(rope, pos, cos, sin);
  const uint32_t next = rope.halves ? 1 : 2, to_second = rope.halves ? rope.n_pairs : 1;
  for (uint32_t j = 0; j < rope.n_pairs; j += S::kChannels, step += 2 * S::kLanes) {
    const auto tc = S::PairsToBlocks(S::Load(step)),
               ts = S::PairsToBlocks(S::Load(step + S::kLanes));
    const auto pc = PerChannel<S>(cos + j), ps = PerChannel<S>(sin + j);
    const auto c = S::Fnma(ps, ts, S::Mul(pc, tc)), s = S::Fma(ps, tc, S::Mul(pc, ts));
    float* a = x + (rope.offset + j * next) * stride;
    float* b = a + to_second * stride;
    const bool last = S::kChannels > 1 && j + 1 == rope.n_pairs;
    float *a1 = last ? unused : a + next * stride, *b1 = last ? unused : b + next * stride;
    const auto u = S::LoadBlocks(a, last ? a : a1), v = S::LoadBlocks(b, last ? b : b1);
    S::StoreBlocks(S::Fnma(v, s, S::Mul(u, c)), a, a1);
    S::StoreBlocks(S::Fma(v, c, S::Mul(u, s)), b, b1);
  }
}

/// Keys of a window to f32: channel c, token t at dst[t / 8 * block_stride + c * stride + t % 8].
template <class S>
void DecodeGridKeys(const HeadArgs& h, const WindowRef& w, float* scratch, float* dst,
                    size_t stride, size_t block_stride) {
  const GridVector& g = KeyRung(h, w).grid->k;
  const uint8_t* block = KeysOf(h, w);
  const WideGrid<S> grid(g, block, h.window, h.head_dim, scratch);
  for (uint32_t part = 0; part < h.window / 8; ++part) {
    ForGridBits(g.bits, [&](auto bits) {
      DecodeKeyColumns<S, decltype(bits)::value>(g, block, grid, h.window, h.head_dim, part,
                                                 dst + part * block_stride, stride);
    });
  }
  PutExact<S>(g, block, h.window, h.head_dim, [&](uint32_t t, uint32_t c) {
    return dst + t / 8 * block_stride + c * stride + t % 8;
  });
  const bool rotate = g.before_rope && Rotates(h, w);
  for (uint32_t part = 0; part < h.window / 8; ++part) {
    float* x = dst + part * block_stride;
    if (g.sign != nullptr) HadamardColumns<S>(g.sign, h.head_dim, x, stride);
    if (!rotate) continue;
    const int32_t pos = w.pos0 + static_cast<int32_t>(8 * part * w.pos_stride);
    RotateColumns<S>(h.rope, pos, w.pos_stride != 0 ? h.rope.step : h.rope.step_zero, x, stride);
  }
}

/// One token's values; grid: scale [dim] and zero [dim] of this token.
template <class S, int kBits>
void DecodeValueRow(const GridVector& g, const uint8_t* codes, const float* scale,
                    const float* zero, uint32_t dim, float* dst) {
  for (uint32_t c = 0; c < dim; c += S::kLanes) {
    const uint32_t n = dim - c < S::kLanes ? 1 : S::kLanes / 8;
    auto x = LoadLevels<S, kBits>(codes + c / 8 * kBits, n, g.levels);
    if (g.axis != GridAxis::kStatic) x = S::Fma(x, S::Load(scale + c), S::Load(zero + c));
    if (g.factor != nullptr) x = S::Mul(x, S::Load(g.factor + c));
    if (g.offset != nullptr) x = S::Add(x, S::Load(g.offset + c));
    S::Store(dst + c, x);  // excess lanes are padding
  }
}

/// Values of a window to f32 rows of `stride` floats.
template <class S>
void DecodeGridValues(const HeadArgs& h, const WindowRef& w, float* scratch, float* dst,
                      size_t stride) {
  const GridVector& g = ValueRung(h, w).grid->v;
  const uint32_t dim = h.head_dim_v;
  const uint8_t* block = ValuesOf(h, w);
  const WideGrid<S> grid(g, block, h.window, dim, scratch);
  alignas(64) float row_scale[kMaxChannels + kPad], row_zero[kMaxChannels + kPad];
  for (uint32_t t = 0; t < h.window; ++t) {
    const float *scale = grid.scale, *zero = grid.zero;
    if (g.axis == GridAxis::kToken) {
      for (uint32_t c = 0; c < dim; c += 8) {
        const uint32_t at = c / g.group * h.window + t;
        S::StoreBlocks(S::Set1(grid.scale[at]), row_scale + c, row_scale + c);
        S::StoreBlocks(S::Set1(grid.zero[at]), row_zero + c, row_zero + c);
      }
      scale = row_scale, zero = row_zero;
    }
    ForGridBits(g.bits, [&](auto bits) {
      constexpr int kBits = decltype(bits)::value;
      DecodeValueRow<S, kBits>(g, block + size_t{t} * dim * kBits / 8, scale, zero, dim,
                               dst + t * stride);
    });
  }
  PutExact<S>(g, block, h.window, dim,
              [&](uint32_t t, uint32_t c) { return dst + t * stride + c; });
  if (g.sign == nullptr) return;
  for (uint32_t t = 0; t < h.window; ++t) HadamardRow(g.sign, dim, dst + t * stride);
}

}  // namespace qevict::kernels::internal
