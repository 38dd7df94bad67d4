// Joins the chunks of a block of query vectors: normalised outputs and masses. Included by
// attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_softmax-inl.h"

namespace qevict::kernels::internal {

/// to[i] += from[i] * weight
template <class S>
void AddMasses(const float* from, uint32_t n, float weight, float* to) {
  const auto w = S::Set1(weight);
  uint32_t i = 0;
  for (; i + S::kLanes <= n; i += S::kLanes)
    S::Store(to + i, S::Fma(S::Load(from + i), w, S::Load(to + i)));
  for (; i < n; ++i) to[i] += from[i] * weight;
}

/// to[i] = the larger of to[i] and from[i] * weight
template <class S>
void RaiseMasses(const float* from, uint32_t n, float weight, float* to) {
  const auto w = S::Set1(weight);
  uint32_t i = 0;
  for (; i + S::kLanes <= n; i += S::kLanes)
    S::Store(to + i, S::Max(S::Mul(S::Load(from + i), w), S::Load(to + i)));
  for (; i < n; ++i) to[i] = from[i] * weight > to[i] ? from[i] * weight : to[i];
}

/// Adds the probabilities of query vector i of the block, token by token; weights: of its parts.
template <class S>
void AddTokenMasses(const MergeArgs& a, uint32_t i) {
  const uint32_t window = a.head->window;
  for (uint32_t p = 0; p < a.n_parts; ++p) {
    if (a.weights[p] == 0.0f) continue;
    const uint32_t begin = p * a.part_windows, left = a.n_windows - begin;
    const uint32_t n = left < a.part_windows ? left : a.part_windows;
    AddMasses<S>(a.parts[p].token_mass + i * a.parts[p].token_stride, n * window, a.weights[p],
                 a.token_mass + static_cast<size_t>(begin) * window);
  }
}

template <class S>
void MergeBlock(const MergeArgs& a) {
  using V = typename S::V;
  const HeadArgs& h = *a.head;
  for (uint32_t i = 0; i < a.n_vec; ++i) {
    const uint32_t row = (a.vec_begin + i) / h.n_gqa,
                   head = h.first_head + (a.vec_begin + i) % h.n_gqa;
    const float sink = h.sinks != nullptr ? h.sinks[head] * kLog2E : kMinusInf;
    float max = sink;
    for (uint32_t p = 0; p < a.n_parts; ++p) max = a.parts[p].m[i] > max ? a.parts[p].m[i] : max;
    float sum = h.sinks != nullptr && max != kMinusInf ? Exp2Scalar<S>(sink - max) : 0.0f;
    for (uint32_t p = 0; p < a.n_parts; ++p) {
      const float m = a.parts[p].m[i];
      a.weights[p] = m == kMinusInf ? 0.0f : Exp2Scalar<S>(m - max);
      sum += a.weights[p] * a.parts[p].l[i];
    }
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (uint32_t p = 0; p < a.n_parts; ++p) a.weights[p] *= inverse;

    float* out = h.out + row * h.out_row_stride + head * h.out_head_stride;
    for (uint32_t j = 0; j < h.dv_pad; j += S::kLanes) {
      V x = S::Zero();
      for (uint32_t p = 0; p < a.n_parts; ++p) {
        if (a.weights[p] == 0.0f) continue;
        x = S::Fma(S::Load(a.parts[p].o + static_cast<size_t>(i) * h.dv_pad + j),
                   S::Set1(a.weights[p]), x);
      }
      if (j + S::kLanes <= h.head_dim_v) {
        S::Store(out + j, x);
      } else {
        alignas(64) float tail[S::kLanes];
        S::Store(tail, x);
        for (uint32_t c = j; c < h.head_dim_v; ++c) out[c] = tail[c - j];
      }
    }
    if (a.token_mass != nullptr && row >= h.token_mass_first_row) AddTokenMasses<S>(a, i);
    if (a.mass == nullptr || row < h.mass_first_row) continue;
    float* mass = a.mass + (a.vec_begin + i) % h.n_gqa * a.mass_stride;
    for (uint32_t p = 0; p < a.n_parts; ++p) {
      if (a.weights[p] == 0.0f) continue;
      const uint32_t begin = p * a.part_windows, left = a.n_windows - begin;
      const uint32_t n = left < a.part_windows ? left : a.part_windows;
      const float* part = a.parts[p].mass + i * a.parts[p].mass_stride;
      if (a.mass_max) {
        RaiseMasses<S>(part, n, a.weights[p], mass + begin);
      } else {
        AddMasses<S>(part, n, a.weights[p], mass + begin);
      }
    }
  }
}

}  // namespace qevict::kernels::internal
