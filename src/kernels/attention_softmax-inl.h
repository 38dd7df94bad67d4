// Online softmax of one query vector over one tile: logits -> exponentials, in place. Logits are in
// units of ln 2 (queries are scaled by log2 e), so that powers of 2 need no argument reduction.
// Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_internal.h"

namespace qevict::kernels::internal {

inline constexpr float kMinusInf = -__builtin_inff();

/// e^x for x <= 88; relative error below 2e-7, 0 below -87.33 (the result would be subnormal) and
/// for -inf; NaN stays.
template <class S>
typename S::V Exp(typename S::V x) {
  using V = typename S::V;
  const V lowest = S::Set1(-87.33654f);
  const V clamped = S::Max(lowest, x);
  const V n = S::Round(S::Mul(clamped, S::Set1(1.44269504088896341f)));
  V r = S::Fnma(n, S::Set1(0.693359375f), clamped);
  r = S::Fnma(n, S::Set1(-2.12194440e-4f), r);
  V p = S::Set1(1.9875691500e-4f);  // minimax polynomial of (e^r - 1 - r) / r^2 on |r| <= ln2 / 2
  p = S::Fma(p, r, S::Set1(1.3981999507e-3f));
  p = S::Fma(p, r, S::Set1(8.3334519073e-3f));
  p = S::Fma(p, r, S::Set1(4.1665795894e-2f));
  p = S::Fma(p, r, S::Set1(1.6666665459e-1f));
  p = S::Fma(p, r, S::Set1(5.0000001201e-1f));
  p = S::Add(S::Fma(p, S::Mul(r, r), r), S::Set1(1.0f));
  return S::IfLess(x, lowest, S::Zero(), S::TimesExp2(p, n));
}

/// 2^t for t <= 127; relative error below 2e-7, 0 where the result would be subnormal (or, where
/// the ISA's scaling rounds to it, that subnormal), and for -inf; NaN stays.
template <class S>
typename S::V Exp2(typename S::V t) {
  using V = typename S::V;
  const V lowest = S::Set1(S::kScalesToZero ? -200.0f : -126.0f);
  const V clamped = S::Max(lowest, t);
  const V n = S::Round(clamped), r = S::Sub(clamped, n);
  V p = S::Set1(1.326465918e-3f);  // minimax polynomial on |r| <= 1/2 with p(0) = 1, error 9.2e-8
  p = S::Fma(p, r, S::Set1(9.671566164e-3f));
  p = S::Fma(p, r, S::Set1(5.550734584e-2f));
  p = S::Fma(p, r, S::Set1(2.402224118e-1f));
  p = S::Fma(p, r, S::Set1(6.931469740e-1f));
  p = S::Fma(p, r, S::Set1(1.0f));
  const V y = S::TimesExp2(p, n);
  return S::kScalesToZero ? y : S::IfLess(t, lowest, S::Zero(), y);
}

template <class S>
float Exp2Scalar(float x) {
  alignas(64) float y[S::kLanes];
  S::Store(y, Exp2<S>(S::Set1(x)));
  return y[0];
}

/// Relative error below 4e-7: odd polynomial near 0, else 1 - 2 / (e^2|x| + 1).
template <class S>
typename S::V Tanh(typename S::V x) {
  using V = typename S::V;
  const V a = S::Abs(x), a2 = S::Mul(a, a);
  V p = S::Set1(62.0f / 2835.0f);
  p = S::Fma(p, a2, S::Set1(-17.0f / 315.0f));
  p = S::Fma(p, a2, S::Set1(2.0f / 15.0f));
  p = S::Fma(p, a2, S::Set1(-1.0f / 3.0f));
  const V small = S::Fma(S::Mul(a, a2), p, a);
  const V twice = S::IfLess(S::Set1(20.0f), a, S::Set1(40.0f), S::Add(a, a));
  const V large =
      S::Sub(S::Set1(1.0f), S::Div(S::Set1(2.0f), S::Add(Exp<S>(twice), S::Set1(1.0f))));
  return S::CopySign(S::IfLess(a, S::Set1(0.25f), small, large), x);
}

/// What a tile's logits get added or transformed with.
struct LogitArgs {
  float softcap;      ///< 0: none
  const float* bias;  ///< [kTile], or null
  float slope;
};

template <class S>
typename S::V AdjustLogit(const LogitArgs& a, uint32_t i, typename S::V s) {
  s = S::Mul(s, S::Set1(kLn2));
  if (a.softcap > 0.0f)
    s = S::Mul(S::Set1(a.softcap), Tanh<S>(S::Mul(s, S::Set1(1.0f / a.softcap))));
  if (a.bias != nullptr) s = S::Fma(S::Load(a.bias + i), S::Set1(a.slope), s);
  return S::Mul(s, S::Set1(kLog2E));
}

/// scores [kTile]: logits in, exponentials relative to the new m out (0 where `bits` is clear).
/// Updates m and the sums [kLanes]. Returns the factor that the vector's accumulated output must be
/// multiplied with (1: nothing to do).
template <class S>
float SoftmaxTile(float* scores, uint64_t bits, const LogitArgs& args, float& m, float* sums) {
  using V = typename S::V;
  constexpr uint32_t kN = kTile / S::kLanes;
  V s[kN];
  V max = S::Set1(kMinusInf);
  const bool plain = args.softcap <= 0.0f && args.bias == nullptr;
  for (uint32_t i = 0; i < kN; ++i) {
    s[i] = S::Load(scores + i * S::kLanes);
    if (!plain) s[i] = AdjustLogit<S>(args, i * S::kLanes, s[i]);
  }
  if (bits != ~uint64_t{0}) {
    for (uint32_t i = 0; i < kN; ++i)
      s[i] = S::IfBits(static_cast<uint32_t>(bits >> (i * S::kLanes)), s[i], S::Set1(kMinusInf));
  }
  for (uint32_t i = 0; i < kN; ++i) max = S::Max(s[i], max);
  const float old = m, now = S::AnyAbove(max, old) ? S::MaxOf(max) : old;
  if (now == kMinusInf) {  // every visible logit is -inf
    for (uint32_t i = 0; i < kN; ++i) S::Store(scores + i * S::kLanes, S::Zero());
    return 1.0f;
  }
  float factor = 1.0f;
  V sum = S::Load(sums);
  if (now != old) {
    factor = old == kMinusInf ? 0.0f : Exp2Scalar<S>(old - now);
    sum = S::Mul(sum, S::Set1(factor));
    m = now;
  }
  for (uint32_t i = 0; i < kN; ++i) {
    s[i] = Exp2<S>(S::Sub(s[i], S::Set1(now)));
    S::Store(scores + i * S::kLanes, s[i]);
    sum = S::Add(sum, s[i]);
  }
  S::Store(sums, sum);
  return factor;
}

/// Sums of the exponentials p [kTile] of each of n_win windows of W tokens.
template <class S>
void WindowSums(const float* p, uint32_t window, uint32_t n_win, float* out) {
  if (window < 8) {
    for (uint32_t i = 0; i < n_win; ++i) {
      float sum = 0.0f;
      for (uint32_t t = 0; t < window; ++t) sum += p[i * window + t];
      out[i] = sum;
    }
    return;
  }
  float sums[8];
  S::SegmentSums(p, sums);
  const uint32_t parts = window / 8;
  for (uint32_t i = 0; i < n_win; ++i) {
    float sum = sums[i * parts];
    for (uint32_t j = 1; j < parts; ++j) sum += sums[i * parts + j];
    out[i] = sum;
  }
}

}  // namespace qevict::kernels::internal
