// RoPE as the model's forward pass applies it, so that packed keys can be stored unrotated.
// Angle of channel pair i at position p: ggml accumulates theta = p * scale^i in fp32 and mixes the
// YaRN ramp in (ggml/src/ggml-cpu/ops.cpp, rope cache). Un-rotation uses the same fp32 steps,
// therefore is exact up to rounding.
#pragma once

#include <cstdint>
#include <vector>

namespace qevict {

enum class RopePairing : uint8_t {
  kNone,         ///< layer without RoPE
  kInterleaved,  ///< ggml NORM: channels (2i, 2i+1)
  kHalves,       ///< ggml NEOX (and M-RoPE with equal sections): channels (i, i + n_dims/2)
};

/// Constants of one layer's RoPE. Equality means that two layers can share tables.
struct RopeParams {
  RopePairing pairing = RopePairing::kNone;
  uint32_t n_dims = 0;  ///< rotated channels, even, <= head_dim; the rest passes through
  uint32_t offset = 0;  ///< first rotated channel
  float freq_base = 10000.0f;
  float freq_scale = 1.0f;
  float ext_factor = 0.0f;
  float attn_factor = 1.0f;
  float beta_fast = 32.0f;
  float beta_slow = 1.0f;
  uint32_t n_ctx_orig = 0;
  std::vector<float> freq_factors;  ///< empty, or n_dims/2 divisors of the angle
  bool operator==(const RopeParams&) const = default;
};

/// Fills cos_sin[2*i], cos_sin[2*i+1] with magnitude*cos, magnitude*sin of pair i at `pos`, in the
/// forward pass's fp32 steps. cos_sin: n_dims floats.
void RopeCosSin(const RopeParams& params, int32_t pos, float* cos_sin);
/// Magnitude (YaRN) that the rotation multiplies keys with; un-rotation divides by it once, and by
/// its square in total.
float RopeMagnitude(const RopeParams& params);
/// Effective angle per position of pair i (radians), linear in the position; for kernels that
/// rotate in registers.
std::vector<double> RopeFrequencies(const RopeParams& params);
/// Rotates head_dim floats in place by `cos_sin` (as RopeCosSin fills it). Channels outside n_dims
/// stay.
void RopeRotate(const RopeParams& params, const float* cos_sin, float* row);
/// Inverse of RopeRotate, magnitude included.
void RopeUnrotate(const RopeParams& params, const float* cos_sin, float* row);

}  // namespace qevict
