// Prompt form: many query vectors against a tile of 64 tokens. Keys and values are converted or
// decoded once per tile into an L1/L2-sized scratch, then two register-blocked matrix products.
// Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_values-inl.h"

namespace qevict::kernels::internal {

/// Channels of one panel of the value tile.
inline constexpr uint32_t kPanel = 64;

/// c[kM][kN vectors] (+)= a[kM][k] * b[k][kN vectors].
template <class S, int kM, int kN, bool kAdd>
void GemmBlock(const float* a, size_t a_stride, const float* b, size_t b_stride, float* c,
               size_t c_stride, uint32_t k) {
  using V = typename S::V;
  V acc[kM][kN];
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n)
      acc[m][n] = kAdd ? S::Load(c + m * c_stride + n * S::kLanes) : S::Zero();
  }
  for (uint32_t i = 0; i < k; ++i, b += b_stride) {
    V x[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) x[n] = S::Load(b + n * S::kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const V w = S::Set1(a[m * a_stride + i]);
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) acc[m][n] = S::Fma(x[n], w, acc[m][n]);
    }
  }
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) S::Store(c + m * c_stride + n * S::kLanes, acc[m][n]);
  }
}

template <class S, int kN, bool kAdd>
void GemmColumns(const float* a, size_t a_stride, const float* b, size_t b_stride, float* c,
                 size_t c_stride, uint32_t m, uint32_t k) {
  constexpr uint32_t kRows = 6;
  uint32_t i = 0;
  for (; i + kRows <= m; i += kRows) {
    GemmBlock<S, kRows, kN, kAdd>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride,
                                  c_stride, k);
  }
  if (i < m) {
    WithBlock(m - i, [&](auto block) {
      constexpr int kM = decltype(block)::value;
      if constexpr (kM < static_cast<int>(kRows)) {
        GemmBlock<S, kM, kN, kAdd>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride,
                                   c_stride, k);
      }
    });
  }
}

/// c[m][n] (+)= a[m][k] * b[k][n]; n is a multiple of 16.
template <class S, bool kAdd>
void Gemm(const float* a, size_t a_stride, const float* b, size_t b_stride, float* c,
          size_t c_stride, uint32_t m, uint32_t n, uint32_t k) {
  constexpr uint32_t kN = S::kRegisters >= 32 ? 4 : 2;
  uint32_t j = 0;
  for (; j + kN * S::kLanes <= n; j += kN * S::kLanes) {
    GemmColumns<S, kN, kAdd>(a, a_stride, b + j, b_stride, c + j, c_stride, m, k);
  }
  for (; j < n; j += S::kLanes)
    GemmColumns<S, 1, kAdd>(a, a_stride, b + j, b_stride, c + j, c_stride, m, k);
}

/// Full window to columns of the key tile [D][kTile].
template <class S, class E>
void WidenKeys(const HeadArgs& h, const uint16_t* keys, Ahead ahead, float* dst) {
  const uint32_t sub = h.window < 8 ? h.window : 8, n = h.head_dim * sub;
  for (uint32_t t = 0; t < h.window; t += sub, keys += n) {
    if (sub == 8) {
      for (uint32_t i = 0; i < n; i += S::kLanes) {
        ahead.Fetch();
        float* row = dst + i / 8 * kTile + t;
        S::StoreBlocks(E::Load(keys + i), row, row + kTile);
      }
      continue;
    }
    for (uint32_t i = 0; i < n; i += S::kLanes) {
      alignas(64) float x[S::kLanes];
      const uint32_t left = n - i < S::kLanes ? n - i : S::kLanes;
      S::Store(x, left < S::kLanes ? E::LoadHalf(keys + i) : E::Load(keys + i));
      for (uint32_t j = 0; j < left; ++j) dst[(i + j) / sub * kTile + (i + j) % sub] = x[j];
    }
  }
}

/// Window to columns of the key tile.
template <class S>
void DecodeKeys(const HeadArgs& h, const WindowRef& w, const Ahead& ahead, const Scratch& scratch,
                float* dst) {
  const WindowFormat format = KeyRung(h, w).format;
  if (format == WindowFormat::kFull) {
    const uint16_t* keys = reinterpret_cast<const uint16_t*>(KeysOf(h, w));
    return h.elem_k == Elem::kF16 ? WidenKeys<S, F16<S>>(h, keys, ahead, dst)
                                  : WidenKeys<S, BF16<S>>(h, keys, ahead, dst);
  }
  if (format == WindowFormat::kGrid) return DecodeGridKeys<S>(h, w, scratch.grid, dst, kTile, 8);
  DecodePackedKeys<S>(h, w, ahead, scratch.coef, dst, kTile, 8);
}

/// Channel j of tile column t in the value tile is at panel j / 64: [kTile][kPanel].
static inline float* ValueCell(float* v_tile, uint32_t column, uint32_t j) {
  return v_tile + static_cast<size_t>(j / kPanel) * kTile * kPanel + column * kPanel + j % kPanel;
}

template <class S, class Values>
void WidenValues(const TokenList& list, uint32_t dv, uint32_t dv_pad, float* v_tile) {
  for (uint32_t i = 0; i < list.n; ++i) {
    const typename Values::Token token(list, i);
    uint32_t j = 0;
    for (; j + S::kLanes <= dv; j += S::kLanes)
      S::Store(ValueCell(v_tile, list.column[i], j), token.Load(j));
    if (j < dv) S::Store(ValueCell(v_tile, list.column[i], j), token.LoadHalf(j)), j += S::kLanes;
    for (; j < dv_pad; j += S::kLanes) S::Store(ValueCell(v_tile, list.column[i], j), S::Zero());
  }
}

template <class S>
void WidenListed(const HeadArgs& h, WindowFormat format, const TokenList& list, float* v_tile) {
  const uint32_t dv = h.head_dim_v, dv_pad = h.dv_pad;
  if (format == WindowFormat::kPacked2)
    return WidenValues<S, PackedValues<S, 2>>(list, dv, dv_pad, v_tile);
  if (format == WindowFormat::kPacked4)
    return WidenValues<S, PackedValues<S, 4>>(list, dv, dv_pad, v_tile);
  if (format == WindowFormat::kGrid)
    return WidenValues<S, FullValues<S, F32<S>>>(list, dv, dv_pad, v_tile);
  if (h.elem_v == Elem::kF16)
    return WidenValues<S, FullValues<S, F16<S>>>(list, dv, dv_pad, v_tile);
  return WidenValues<S, FullValues<S, BF16<S>>>(list, dv, dv_pad, v_tile);
}

/// Rows of tokens that no query vector of the block sees: they may hold anything, so they become 0.
template <class S>
void ClearUnseenValues(uint64_t seen, uint32_t dv_pad, float* v_tile) {
  for (uint64_t rest = ~seen; rest != 0; rest &= rest - 1) {
    const uint32_t t = static_cast<uint32_t>(__builtin_ctzll(rest));
    for (uint32_t j = 0; j < dv_pad; j += S::kLanes) S::Store(ValueCell(v_tile, t, j), S::Zero());
  }
}

/// True if every value of the tile is finite.
template <class S>
bool AllFinite(const float* v_tile, uint32_t dv_pad) {
  auto sum = S::Zero();  // 0 * x is NaN for every x that is not finite
  for (uint32_t t = 0; t < kTile; ++t) {
    for (uint32_t j = 0; j < dv_pad; j += S::kLanes) {
      sum = S::Fma(S::Load(ValueCell(const_cast<float*>(v_tile), t, j)), S::Zero(), sum);
    }
  }
  return S::Sum(sum) == 0.0f;
}

/// o [n_vec][dv_pad] += p [n_vec][kTile] * value tile, with each vector's own tokens only: for
/// values that are not finite.
template <class S>
void AddVisibleOnly(const float* p, const uint64_t* bits, uint32_t n_vec, uint32_t dv_pad,
                    float* v_tile, float* o) {
  for (uint32_t m = 0; m < n_vec; ++m) {
    for (uint64_t rest = bits[m]; rest != 0; rest &= rest - 1) {
      const uint32_t t = static_cast<uint32_t>(__builtin_ctzll(rest));
      const auto w = S::Set1(p[m * kTile + t]);
      for (uint32_t j = 0; j < dv_pad; j += S::kLanes) {
        float* cell = o + static_cast<size_t>(m) * dv_pad + j;
        S::Store(cell, S::Fma(S::Load(ValueCell(v_tile, t, j)), w, S::Load(cell)));
      }
    }
  }
}

}  // namespace qevict::kernels::internal
