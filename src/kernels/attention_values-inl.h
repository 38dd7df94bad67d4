// Probabilities times values, decode form: channels in lanes. Full values: one broadcast f32
// probability per query vector and token. Packed values: integers, a pair of 16-bit weights per
// query vector and two tokens. Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_grid-inl.h"
#include "kernels/attention_packed-inl.h"
#include "kernels/attention_weights-inl.h"

namespace qevict::kernels::internal {

/// The tokens of a tile that a run of query vectors sees, in one storage format.
struct TokenList {
  uint32_t n = 0;
  uint8_t column[kTile];        ///< tile column of the token
  const uint8_t* row[kTile];    ///< its value row: elements or codes
  const uint8_t* ahead[kTile];  ///< full: what is fetched meanwhile, as long as a row
  /// Packed: grids by tile column, 0 where no token is listed.
  alignas(64) float scale[kTile], zero[kTile];

  void Clear(bool packed) {
    n = 0;
    if (packed) __builtin_memset(scale, 0, sizeof(scale) + sizeof(zero));
  }
};

// Loaders: Token gives access to one token's row; Load(j) is the vector that begins at channel j.
// While full values are added, the keys of the next tile are fetched (TokenList::ahead).
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
struct PackedValues {  // prompt form only
  struct Token {
    const uint8_t* p;
    typename S::template ValueGrid<kBits> grid;
    Token(const TokenList& list, uint32_t i)
        : p(list.row[i]), grid(list.scale[list.column[i]], list.zero[list.column[i]]) {}
    typename S::V Load(uint32_t j) const { return grid.Load(p + j * kBits / 8); }
    typename S::V LoadHalf(uint32_t j) const { return Load(j); }  // excess lanes: padding
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
#pragma GCC unroll 4
    for (int n = 0; n < kN; n += 2)
      __builtin_prefetch(list.ahead[i] + 2 * (j + n * S::kLanes), 0, 2);
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

/// Two packed value rows, of adjacent tile columns.
struct RowPair {
  const uint8_t *a, *b;
  uint32_t column;  ///< of a; even
};

/// The listed tokens in pairs. Where only one of two is listed its row stands for both: the other's
/// weight is 0.
static inline uint32_t PairRows(const TokenList& list, RowPair* pairs) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < list.n; ++i, ++n) {
    const uint32_t column = list.column[i] & ~1u;
    const bool two = i + 1 < list.n && (list.column[i + 1] & ~1u) == column;
    pairs[n] = {list.row[i], list.row[i + two], column};
    i += two;
  }
  return n;
}

/// o[m][j ... j + kN vectors) += units[m] * sum over pairs of weights * codes + zeros[m].
template <class S, int kBits, int kM, int kN>
void AddCodesAt(const RowPair* pairs, uint32_t n_pairs, uint32_t j, const int16_t* weights,
                const float* units, const float* zeros, float* o, size_t o_stride) {
  using I = typename S::I;
  I acc[kM][kN];
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) acc[m][n] = S::SetInt(0);
  }
  for (uint32_t i = 0; i < n_pairs; ++i) {
    const RowPair& pair = pairs[i];
    I codes[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) {
      const uint32_t at = (j + n * S::kLanes) * kBits / 8;
      codes[n] = S::template CodePairs<kBits>(pair.a + at, pair.b + at);
    }
    const int16_t* weight = weights + pair.column;
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) acc[m][n] = S::Dot16(acc[m][n], codes[n], weight + m * kTile);
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      float* at = o + m * o_stride + j + n * S::kLanes;
      const auto sum = S::Add(S::Load(at), S::Set1(zeros[m]));
      S::Store(at, S::Fma(S::ToFloat(acc[m][n]), S::Set1(units[m]), sum));
    }
  }
}

/// Vectors of channels that kM query vectors work on at once.
template <class S, int kM>
constexpr int ValueBatch() {
  if (S::kRegisters >= 32) return kM <= 6 ? 4 : 2;
  return kM <= 2 ? 4 : (kM <= 5 ? 2 : 1);
}

/// Query vectors of a register block over full values: with few registers two vectors of channels
/// for fewer queries beat one for many.
template <class S>
inline constexpr uint32_t kFullValueBlock = S::kRegisters >= 32 ? kMaxBlock : 4;

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

template <class S, int kBits, int kM>
void AddCodes(const TokenList& list, uint32_t dv, const float* p, float* o, size_t o_stride) {
  constexpr int kN = ValueBatch<S, kM>();
  constexpr uint32_t kLanes = S::kLanes;
  alignas(64) int16_t weights[kM * kTile];
  float units[kM], zeros[kM];
  for (int m = 0; m < kM; ++m) {
    units[m] = QuantizeWeights<S>(p + m * kTile, list.scale, weights + m * kTile, nullptr);
    zeros[m] = DotTile<S>(p + m * kTile, list.zero);
  }
  RowPair pairs[kTile];
  const uint32_t n = PairRows(list, pairs);
  uint32_t j = 0;
  for (; j + kN * kLanes <= dv; j += kN * kLanes)
    AddCodesAt<S, kBits, kM, kN>(pairs, n, j, weights, units, zeros, o, o_stride);
  for (; j < dv; j += kLanes)  // excess lanes fall into the padding of o
    AddCodesAt<S, kBits, kM, 1>(pairs, n, j, weights, units, zeros, o, o_stride);
}

/// Adds the listed tokens to o of kM query vectors.
template <class S, int kM>
void AddListed(const HeadArgs& h, WindowFormat format, const TokenList& list, const float* p,
               float* o) {
  const uint32_t dv = h.head_dim_v, stride = h.dv_pad;
  if (format == WindowFormat::kPacked2) return AddCodes<S, 2, kM>(list, dv, p, o, stride);
  if (format == WindowFormat::kPacked4) return AddCodes<S, 4, kM>(list, dv, p, o, stride);
  if (format == WindowFormat::kGrid)
    return AddValues<S, FullValues<S, F32<S>>, kM>(list, dv, p, o, stride);
  if (h.elem_v == Elem::kF16)
    return AddValues<S, FullValues<S, F16<S>>, kM>(list, dv, p, o, stride);
  return AddValues<S, FullValues<S, BF16<S>>, kM>(list, dv, p, o, stride);
}

/// Appends the tokens of window w (tile columns from `column`) whose bit is set. ahead: what full
/// values fetch meanwhile, or null.
template <class S>
void ListTokens(const HeadArgs& h, const Scratch& scratch, const WindowRef& w, const uint8_t* ahead,
                uint32_t column, uint32_t bits, TokenList& list) {
  const WindowFormat format = ValueRung(h, w).format;
  const uint8_t* rows = ValuesOf(h, w);
  size_t row_bytes = static_cast<size_t>(h.head_dim_v) * 2;
  alignas(64) float grid[kTile + kPad];  // scale [W], zero [W]
  const bool packed = format == WindowFormat::kPacked2 || format == WindowFormat::kPacked4;
  if (format == WindowFormat::kGrid) {
    float* values = scratch.v_rows + static_cast<size_t>(column) * h.dv_pad;
    DecodeGridValues<S>(h, w, scratch.grid, values, h.dv_pad);
    rows = reinterpret_cast<const uint8_t*>(values);
    row_bytes = h.dv_pad * sizeof(float);
    ahead = rows;
  }
  if (ahead == nullptr) ahead = rows;
  if (packed) {
    const PackedBlock b = LocateValues(h, w);
    row_bytes = b.row;
    if (h.window >= 4) {
      WidenF16<S>(b.scale, 2 * h.window, grid);
    } else {
      uint16_t raw[8] = {};
      for (uint32_t i = 0; i < 2 * h.window; ++i) raw[i] = b.scale[i];
      WidenF16<S>(raw, 8, grid);
    }
  }
  if (h.window == 8 && bits == 0xFF) {  // nearly all windows
    const uint32_t n = list.n;
    for (uint32_t t = 0; t < 8; ++t) list.column[n + t] = static_cast<uint8_t>(column + t);
    for (uint32_t t = 0; t < 8; ++t) list.row[n + t] = rows + t * row_bytes;
    for (uint32_t t = 0; t < 8; ++t) list.ahead[n + t] = ahead + t * row_bytes;
    if (packed) {
      __builtin_memcpy(list.scale + column, grid, 32);
      __builtin_memcpy(list.zero + column, grid + 8, 32);
    }
    list.n = n + 8;
    return;
  }
  for (; bits != 0; bits &= bits - 1) {
    const uint32_t t = static_cast<uint32_t>(__builtin_ctz(bits));
    list.column[list.n] = static_cast<uint8_t>(column + t);
    if (packed) list.scale[column + t] = grid[t], list.zero[column + t] = grid[h.window + t];
    list.ahead[list.n] = ahead + t * row_bytes;
    list.row[list.n++] = rows + t * row_bytes;
  }
}

}  // namespace qevict::kernels::internal
