// The fp32 steps of the forward pass's rotary encoding, restated from its formulas.
// Facts: ggml/src/ggml-cpu/ops.cpp (rope cache, YaRN mixing) and ggml/src/ggml.c (correction dims)
// of llama.cpp.
//
//   theta_0 = pos,  theta_{i+1} = theta_i * s,  s = base^(-2/n_dims)     products rounded to fp32
//   e = theta_i / freq_factor_i                                          extrapolated angle
//   a = freq_scale * e                                                   interpolated angle
//   YaRN (ext_factor != 0):  r = ramp(i) * ext_factor,  a = a*(1-r) + e*r
//   (cos a, sin a) * attn_factor * (YaRN: 1 + 0.1 * ln(1/freq_scale))
//
// Frequencies for kernels are linear in the position, hence cannot repeat the fp32 rounding of
// theta (relative 2^-24 per step). They are powers of the *rounded* s, so that only this noise, not
// the error of s times i, is between them and the forward pass.
#include "base/rope.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace qevict {
namespace {

constexpr float kPi = 3.14159265358979323846f;

float ThetaScale(const RopeParams& p) {
  return std::pow(p.freq_base, -2.0f / static_cast<float>(p.n_dims));
}

/// Pair index at which a wave turns `n_rot` times within the original context.
float CorrectionDim(const RopeParams& p, float n_rot) {
  const float n_dims = static_cast<float>(p.n_dims);
  return n_dims * std::log(static_cast<float>(p.n_ctx_orig) / (n_rot * 2.0f * kPi)) /
         (2.0f * std::log(p.freq_base));
}

/// 1 where pairs keep the extrapolated angle (fast waves), 0 where they take the interpolated one.
struct YarnRamp {
  float low = 0.0f, high = 0.0f;

  explicit YarnRamp(const RopeParams& p) {
    if (p.ext_factor == 0.0f) return;
    low = std::max(0.0f, std::floor(CorrectionDim(p, p.beta_fast)));
    high = std::min(static_cast<float>(p.n_dims) - 1.0f, std::ceil(CorrectionDim(p, p.beta_slow)));
  }
  float At(size_t pair) const {
    const float y = (static_cast<float>(pair) - low) / std::max(0.001f, high - low);
    return 1.0f - std::min(1.0f, std::max(0.0f, y));
  }
};

/// Channels of pair i.
struct Pair {
  size_t a, b;
};
inline Pair PairAt(const RopeParams& p, size_t i) {
  if (p.pairing == RopePairing::kInterleaved) return {p.offset + 2 * i, p.offset + 2 * i + 1};
  return {p.offset + i, p.offset + i + p.n_dims / 2};
}

}  // namespace

float RopeMagnitude(const RopeParams& params) {
  if (params.ext_factor == 0.0f) return params.attn_factor;
  return params.attn_factor * (1.0f + 0.1f * std::log(1.0f / params.freq_scale));
}

void RopeCosSin(const RopeParams& params, int32_t pos, float* cos_sin) {
  if (params.pairing == RopePairing::kNone) return;
  const float theta_scale = ThetaScale(params);
  const float magnitude = RopeMagnitude(params);
  const YarnRamp ramp(params);
  float theta = static_cast<float>(pos);
  for (size_t i = 0; i < params.n_dims / 2; ++i) {
    const float extrapolated = params.freq_factors.empty() ? theta : theta / params.freq_factors[i];
    float angle = params.freq_scale * extrapolated;
    if (params.ext_factor != 0.0f) {
      const float mix = ramp.At(i) * params.ext_factor;
      angle = angle * (1.0f - mix) + extrapolated * mix;
    }
    cos_sin[2 * i] = std::cos(angle) * magnitude;
    cos_sin[2 * i + 1] = std::sin(angle) * magnitude;
    theta *= theta_scale;
  }
}

std::vector<double> RopeFrequencies(const RopeParams& params) {
  if (params.pairing == RopePairing::kNone) return {};
  const double theta_scale = ThetaScale(params);
  const YarnRamp ramp(params);
  std::vector<double> omega(params.n_dims / 2);
  for (size_t i = 0; i < omega.size(); ++i) {
    double extrapolated = std::pow(theta_scale, static_cast<double>(i));
    if (!params.freq_factors.empty()) extrapolated /= static_cast<double>(params.freq_factors[i]);
    omega[i] = static_cast<double>(params.freq_scale) * extrapolated;
    if (params.ext_factor != 0.0f) {
      const double mix = static_cast<double>(ramp.At(i) * params.ext_factor);
      omega[i] = omega[i] * (1.0 - mix) + extrapolated * mix;
    }
  }
  return omega;
}

void RopeRotate(const RopeParams& params, const float* cos_sin, float* row) {
  if (params.pairing == RopePairing::kNone) return;
  for (size_t i = 0; i < params.n_dims / 2; ++i) {
    const Pair pair = PairAt(params, i);
    const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    const float x = row[pair.a], y = row[pair.b];
    row[pair.a] = x * c - y * s;
    row[pair.b] = x * s + y * c;
  }
}

void RopeUnrotate(const RopeParams& params, const float* cos_sin, float* row) {
  if (params.pairing == RopePairing::kNone) return;
  // cos_sin carries the magnitude once more: (c, s) * (c, -s) = magnitude^2.
  const float magnitude = RopeMagnitude(params);
  const float inverse = 1.0f / (magnitude * magnitude);
  for (size_t i = 0; i < params.n_dims / 2; ++i) {
    const Pair pair = PairAt(params, i);
    const float c = cos_sin[2 * i] * inverse, s = cos_sin[2 * i + 1] * inverse;
    const float x = row[pair.a], y = row[pair.b];
    row[pair.a] = x * c + y * s;
    row[pair.b] = y * c - x * s;
  }
}

}  // namespace qevict
