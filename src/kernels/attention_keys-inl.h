// Scores of a few query vectors against full-precision keys that are read in place, tokens in
// lanes. Included by attention_<isa>.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_internal.h"

namespace qevict::kernels::internal {

template <int N>
struct Int {
  static constexpr int value = N;
};

/// Calls f(Int<n>) for n in 1..8: register blocks have a compile-time number of query vectors.
template <class F>
void WithBlock(uint32_t n, F&& f) {
  switch (n) {
    case 1:
      return f(Int<1>{});
    case 2:
      return f(Int<2>{});
    case 3:
      return f(Int<3>{});
    case 4:
      return f(Int<4>{});
    case 5:
      return f(Int<5>{});
    case 6:
      return f(Int<6>{});
    case 7:
      return f(Int<7>{});
    default:
      return f(Int<8>{});
  }
}

/// Calls f(first query vector of the register block, Int<size>) for blocks of nearly equal size, at
/// most kMost.
template <uint32_t kMost = kMaxBlock, class F>
void ForBlocks(uint32_t begin, uint32_t end, F&& f) {
  for (uint32_t m = begin; m < end;) {
    const uint32_t left = end - m, blocks = (left + kMost - 1) / kMost,
                   n = blocks == 1 ? left : (left + blocks - 1) / blocks;
    WithBlock(n, [&](auto block) { f(m, block); });
    m += n;
  }
}

// Element types of stored rows.
template <class S>
struct F16 {
  using T = uint16_t;
  static typename S::V Load(const T* p) { return S::LoadF16(p); }
  static typename S::V LoadHalf(const T* p) { return S::LoadF16Half(p); }
};
template <class S>
struct BF16 {
  using T = uint16_t;
  static typename S::V Load(const T* p) { return S::LoadBf16(p); }
  static typename S::V LoadHalf(const T* p) { return S::LoadBf16Half(p); }
};
template <class S>
struct F32 {
  using T = float;
  static typename S::V Load(const T* p) { return S::Load(p); }
  static typename S::V LoadHalf(const T* p) {  // 8 of 16 lanes
    alignas(64) float x[S::kLanes] = {};
    for (uint32_t i = 0; i < 8; ++i) x[i] = p[i];
    return S::Load(x);
  }
};

/// Memory that is fetched to the L2 while something else is scored, a line per loop iteration.
/// Windows are scattered, which defeats the hardware's prefetchers, and prefetches that come in
/// bursts are dropped.
struct Ahead {
  const uint8_t* data;
  ptrdiff_t second;  ///< from the keys to the values: a line of each is fetched at a time
  uint32_t step;     ///< bytes per iteration

  void Fetch() {
    __builtin_prefetch(data, 0, 2);
    __builtin_prefetch(data + second, 0, 2);
    data += step;
  }
  /// The keys only.
  void FetchFirst() {
    __builtin_prefetch(data, 0, 2);
    data += step;
  }
};

/// A sub-block of S <= 8 tokens of full keys, [D][S], and the tile column its scores go to.
template <class T>
struct KeyBlock {
  const T* keys;
  uint32_t column;
  Ahead ahead;
};

/// Vectors of a full key between two fetches: a line of 64 bytes with 16 lanes. D * 8 is a multiple
/// of it for any lanes.
inline constexpr uint32_t kKeyStep = 2;

/// Scores of kM query vectors against kN sub-blocks of 8 tokens; the expanded query loads are
/// shared by the sub-blocks. q: [kM][q_stride], each channel 8 times.
template <class S, class E, int kM, int kN>
void ScoreBlocks8(const KeyBlock<typename E::T>* blocks, const float* q, size_t q_stride,
                  uint32_t head_dim, float* scores) {
  using V = typename S::V;
  V acc[kN][kM];
  for (int n = 0; n < kN; ++n) {
    for (int m = 0; m < kM; ++m) acc[n][m] = S::Zero();
  }
  const typename E::T* keys[kN];
  Ahead ahead[kN];
  for (int n = 0; n < kN; ++n) keys[n] = blocks[n].keys, ahead[n] = blocks[n].ahead;
  for (uint32_t i = 0; i < head_dim * 8; i += kKeyStep * S::kLanes) {
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) ahead[n].FetchFirst();
#pragma GCC unroll 8
    for (uint32_t j = i; j < i + kKeyStep * S::kLanes; j += S::kLanes) {
      V k[kN];
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) k[n] = E::Load(keys[n] + j);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) {
        V query = S::Load(q + m * q_stride + j);
        if constexpr (kN > 1) query = S::InRegister(query);
#pragma GCC unroll 8
        for (int n = 0; n < kN; ++n) acc[n][m] = S::Fma(k[n], query, acc[n][m]);
      }
    }
  }
  for (int n = 0; n < kN; ++n) {
    for (int m = 0; m < kM; ++m) S::FoldBlocks(acc[n][m], scores + m * kTile + blocks[n].column);
  }
}

/// The same for sub-blocks of 1, 2 or 4 tokens: more channels per vector.
template <class S, class E, int kM>
void ScoreBlockSmall(const KeyBlock<typename E::T>& block, const float* q, size_t q_stride,
                     uint32_t head_dim, uint32_t tokens, float* scores) {
  using V = typename S::V;
  V acc[kM];
  for (int m = 0; m < kM; ++m) acc[m] = S::Zero();
  const uint32_t n = head_dim * tokens;
  for (uint32_t i = 0; i < n; i += S::kLanes) {
    const V k = n - i < S::kLanes ? E::LoadHalf(block.keys + i) : E::Load(block.keys + i);
    for (int m = 0; m < kM; ++m) acc[m] = S::Fma(k, S::Load(q + m * q_stride + i), acc[m]);
  }
  for (int m = 0; m < kM; ++m) {
    alignas(64) float x[S::kLanes];
    S::Store(x, acc[m]);
    for (uint32_t t = 0; t < tokens; ++t) {
      float sum = x[t];
      for (uint32_t i = t + tokens; i < S::kLanes; i += tokens) sum += x[i];
      scores[m * kTile + block.column + t] = sum;
    }
  }
}

/// Number of sub-blocks that kM query vectors work on at once, from the number of registers.
template <class S, int kM>
constexpr int KeyBatch() {
  if (S::kRegisters >= 32) return kM <= 6 ? 4 : 2;
  return kM <= 2 ? 4 : (kM <= 4 ? 2 : 1);
}

template <class S, class E, int kM>
void ScoreFullBlocks(const KeyBlock<typename E::T>* blocks, uint32_t n_blocks, const float* q,
                     size_t q_stride, uint32_t head_dim, uint32_t tokens, float* scores) {
  constexpr int kN = KeyBatch<S, kM>();
  uint32_t i = 0;
  if (tokens == 8) {
    for (; i + kN <= n_blocks; i += kN)
      ScoreBlocks8<S, E, kM, kN>(blocks + i, q, q_stride, head_dim, scores);
    for (; i < n_blocks; ++i) ScoreBlocks8<S, E, kM, 1>(blocks + i, q, q_stride, head_dim, scores);
    return;
  }
  for (; i < n_blocks; ++i)
    ScoreBlockSmall<S, E, kM>(blocks[i], q, q_stride, head_dim, tokens, scores);
}

}  // namespace qevict::kernels::internal
