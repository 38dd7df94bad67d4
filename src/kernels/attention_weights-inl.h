// Probabilities of a tile as 16-bit weights of integer codes. Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_internal.h"

namespace qevict::kernels::internal {

/// Probabilities times token scales as 16-bit weights of one query vector: p * scale = unit *
/// weight, each below 2^15. Columns without tokens of this kind have scale 0. Returns the unit.
/// sum: of the weights, unless null.
template <class S>
float QuantizeWeights(const float* p, const float* scale, int16_t* weights, int32_t* sum) {
  using V = typename S::V;
  constexpr uint32_t kN = kTile / S::kLanes;
  V x[kN];
  V max = S::Zero();
  for (uint32_t i = 0; i < kN; ++i) {
    x[i] = S::Mul(S::Load(p + i * S::kLanes), S::Load(scale + i * S::kLanes));
    max = S::Max(x[i], max);
  }
  const float unit = S::MaxOf(max) / 32767.0f;
  const bool plain = unit >= 0x1p-126f && unit < __builtin_inff();
  const V inverse = S::Set1(plain ? 1.0f / unit : 0.0f);
  V total = S::Zero();  // whole numbers below 2^24: exact in any order
  for (uint32_t i = 0; i < kN; ++i) {
    const V w = plain ? S::Mul(x[i], inverse) : S::Zero();
    S::StoreInt16(weights + i * S::kLanes, w);
    if (sum != nullptr) total = S::Add(total, S::Round(w));
  }
  if (sum != nullptr) *sum = static_cast<int32_t>(S::Sum(total));
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
