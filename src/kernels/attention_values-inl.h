// Probabilities times values, decode form: channels in lanes, one broadcast probability per query
// vector and token. Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_packed-inl.h"

namespace qevict::kernels::internal {

/// The tokens of a tile that a run of query vectors sees, in one storage format.
struct TokenList {
  uint32_t n = 0;
  uint8_t column[kTile];            ///< tile column of the token
  const uint8_t* row[kTile];        ///< its value row: elements or codes
  float scale[kTile], zero[kTile];  ///< packed: its grid
};

// Loaders: Token gives access to one token's row; Load(j) is the vector that begins at channel j.
template <class S, class E>
struct FullValues {
  struct Token {
    const typename E::T* p;
    Token(const TokenList& list, uint32_t i)
        : p(reinterpret_cast<const typename E::T*>(list.row[i])) {}
    typename S::V Load(uint32_t j) const { return E::Load(p + j); }
    typename S::V LoadHalf(uint32_t j) const { return E::LoadHalf(p + j); }
  };
};
template <class S, int kBits>
struct PackedValues {
  struct Token {
    const uint8_t* p;
    typename S::template ValueGrid<kBits> grid;
    Token(const TokenList& list, uint32_t i) : p(list.row[i]), grid(list.scale[i], list.zero[i]) {}
    typename S::V Load(uint32_t j) const { return grid.Load(p + j * kBits / 8); }
    typename S::V LoadHalf(uint32_t j) const {
      return Load(j);
    }  // excess lanes fall into the padding of o
  };
};

/// o[m][j ... j + kN vectors) += sum over tokens of p[m][token] * v[token][...].
template <class S, class Values, int kM, int kN, bool kHalf>
void AddValuesAt(const TokenList& list, uint32_t j, const float* p, float* o, size_t o_stride) {
  using V = typename S::V;
  V acc[kM][kN];
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) acc[m][n] = S::Load(o + m * o_stride + j + n * S::kLanes);
  }
  for (uint32_t i = 0; i < list.n; ++i) {
    const typename Values::Token token(list, i);
    V v[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) v[n] = kHalf ? token.LoadHalf(j) : token.Load(j + n * S::kLanes);
    const float* weight = p + list.column[i];
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const V w = S::Set1(weight[m * kTile]);
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) acc[m][n] = S::Fma(v[n], w, acc[m][n]);
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) S::Store(o + m * o_stride + j + n * S::kLanes, acc[m][n]);
  }
}

/// Vectors of channels that kM query vectors work on at once.
template <class S, int kM>
constexpr int ValueBatch() {
  if (S::kRegisters >= 32) return kM <= 6 ? 4 : 2;
  return kM <= 2 ? 4 : (kM <= 5 ? 2 : 1);
}

template <class S, class Values, int kM>
void AddValues(const TokenList& list, uint32_t dv, const float* p, float* o, size_t o_stride) {
  constexpr int kN = ValueBatch<S, kM>();
  constexpr uint32_t kLanes = S::kLanes;
  uint32_t j = 0;
  for (; j + kN * kLanes <= dv; j += kN * kLanes)
    AddValuesAt<S, Values, kM, kN, false>(list, j, p, o, o_stride);
  if constexpr (kN > 2) {
    for (; j + 2 * kLanes <= dv; j += 2 * kLanes)
      AddValuesAt<S, Values, kM, 2, false>(list, j, p, o, o_stride);
  }
  for (; j + kLanes <= dv; j += kLanes)
    AddValuesAt<S, Values, kM, 1, false>(list, j, p, o, o_stride);
  if (j < dv) AddValuesAt<S, Values, kM, 1, true>(list, j, p, o, o_stride);
}

/// Adds the listed tokens to o of n_vec <= 8 query vectors.
template <class S>
void AddListed(const HeadArgs& h, WindowFormat format, const TokenList& list, uint32_t n_vec,
               const float* p, float* o) {
  if (list.n == 0) return;
  const uint32_t dv = h.head_dim_v, stride = h.dv_pad;
  WithBlock(n_vec, [&](auto block) {
    constexpr int kM = decltype(block)::value;
    if (format == WindowFormat::kPacked2)
      return AddValues<S, PackedValues<S, 2>, kM>(list, dv, p, o, stride);
    if (format == WindowFormat::kPacked4)
      return AddValues<S, PackedValues<S, 4>, kM>(list, dv, p, o, stride);
    if (h.elem_v == Elem::kF16)
      return AddValues<S, FullValues<S, F16<S>>, kM>(list, dv, p, o, stride);
    return AddValues<S, FullValues<S, BF16<S>>, kM>(list, dv, p, o, stride);
  });
}

/// Appends the tokens of window w (tile columns from `column`) whose bit is set.
template <class S>
void ListTokens(const HeadArgs& h, const WindowRef& w, uint32_t column, uint32_t bits,
                TokenList& list) {
  const uint8_t* rows = w.data + h.head_offset[0] + static_cast<size_t>(h.window) * h.head_dim * 2;
  size_t row_bytes = static_cast<size_t>(h.head_dim_v) * 2;
  alignas(64) float grid[kTile + kPad];  // scale [W], zero [W]
  const bool packed = w.format != WindowFormat::kFull;
  if (packed) {
    const PackedBlock b = LocatePacked(h, w);
    rows = b.v_codes;
    row_bytes = b.v_row;
    if (h.window >= 4) {
      WidenF16<S>(b.v_scale, 2 * h.window, grid);
    } else {
      uint16_t raw[8] = {};
      for (uint32_t i = 0; i < 2 * h.window; ++i) raw[i] = b.v_scale[i];
      WidenF16<S>(raw, 8, grid);
    }
  }
  if (h.window == 8 && bits == 0xFF) {  // nearly all windows
    const uint32_t n = list.n;
    for (uint32_t t = 0; t < 8; ++t) list.column[n + t] = static_cast<uint8_t>(column + t);
    for (uint32_t t = 0; t < 8; ++t) list.row[n + t] = rows + t * row_bytes;
    if (packed) {
      __builtin_memcpy(list.scale + n, grid, 32);
      __builtin_memcpy(list.zero + n, grid + 8, 32);
    }
    list.n = n + 8;
    return;
  }
  for (; bits != 0; bits &= bits - 1) {
    const uint32_t t = static_cast<uint32_t>(__builtin_ctz(bits));
    list.column[list.n] = static_cast<uint8_t>(column + t);
    if (packed) list.scale[list.n] = grid[t], list.zero[list.n] = grid[h.window + t];
    list.row[list.n++] = rows + t * row_bytes;
  }
}

}  // namespace qevict::kernels::internal
