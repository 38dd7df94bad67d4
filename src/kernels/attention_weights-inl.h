// Probabilities of a tile as 16-bit weights of integer codes. Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_internal.h"

namespace qevict::kernels::internal {

/// Probabilities times token scales as 16-bit weights of one query vector: p * scale = unit *
/// weight, each below 2^15. Columns without tokens of this kind have scale 0. Returns the unit.
/// sum: of the weights.
template <class S>
float QuantizeWeights(const float* p, const float* scale, int16_t* weights, int32_t& sum) {
  using V = typename S::V;
  alignas(64) float x[kTile];
  V max = S::Zero();
  for (uint32_t i = 0; i < kTile; i += S::kLanes) {
    const V w = S::Mul(S::Load(p + i), S::Load(scale + i));
    max = S::Max(w, max);
    S::Store(x + i, w);
  }
  const float unit = S::MaxOf(max) / 32767.0f;
  const bool plain = unit >= 0x1p-126f && unit < __builtin_inff();
  const V inverse = S::Set1(plain ? 1.0f / unit : 0.0f);
  V total = S::Zero();  // whole numbers below 2^24: exact in any order
  for (uint32_t i = 0; i < kTile; i += S::kLanes) {
    const V w = plain ? S::Mul(S::Load(x + i), inverse) : S::Zero();
    S::StoreInt16(weights + i, w);
    total = S::Add(total, S::Round(w));
  }
  sum = static_cast<int32_t>(S::Sum(total));
  return plain || unit != unit ? unit : 0.0f;
}

/// x . y over a tile.
template <class S>
float DotTile(const float* x, const float* y) {
  auto sum = S::Zero();
  for (uint32_t t = 0; t < kTile; t += S::kLanes) {
    sum = S::Fma(S::Load(x + t), S::Load(y + t), sum);
  }
  return S::Sum(sum);
}

}  // namespace qevict::kernels::internal
