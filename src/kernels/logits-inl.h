// Sums over rows of logits. Included by attention_<isa>.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_softmax-inl.h"

namespace qevict::kernels::internal {

/// Vectors whose sum is kept in fp32, before it joins the double.
inline constexpr size_t kLogitVectors = 16;

/// Calls add(vector of p, vector of q) and adds what it returns, over n logits; -inf behind the
/// end.
template <class S, typename F>
double SumOverLogits(const float* p, const float* q, size_t n, const F& add) {
  using V = typename S::V;
  double total = 0.0;
  size_t i = 0;
  while (i + S::kLanes <= n) {
    V sum = S::Zero();
    for (size_t v = 0; v < kLogitVectors && i + S::kLanes <= n; ++v, i += S::kLanes)
      sum = S::Add(sum, add(S::Load(p + i), S::Load(q + i)));
    total += static_cast<double>(S::Sum(sum));
  }
  if (i == n) return total;
  alignas(64) float p_end[S::kLanes], q_end[S::kLanes];
  for (size_t j = 0; j < S::kLanes; ++j) {
    p_end[j] = i + j < n ? p[i + j] : kMinusInf;
    q_end[j] = i + j < n ? q[i + j] : kMinusInf;
  }
  return total + static_cast<double>(S::Sum(add(S::Load(p_end), S::Load(q_end))));
}

/// See SumExp of kernels/logits.h.
template <class S>
double SumExpRow(const float* x, size_t n, float top) {
  using V = typename S::V;
  const V most = S::Set1(top);
  return SumOverLogits<S>(x, x, n, [&](V a, V) { return Exp<S>(S::Sub(a, most)); });
}

/// See SumExpDifference of kernels/logits.h.
template <class S>
double SumExpDifferenceRow(const float* p, const float* q, size_t n, float top) {
  using V = typename S::V;
  const V most = S::Set1(top);
  return SumOverLogits<S>(p, q, n, [&](V a, V b) {
    const V weight = Exp<S>(S::Sub(a, most));
    // Not 0 times an infinite difference.
    return S::IfLess(S::Zero(), weight, S::Mul(weight, S::Sub(a, b)), weight);
  });
}

}  // namespace qevict::kernels::internal
