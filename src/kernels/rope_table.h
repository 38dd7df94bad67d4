// Phases of RoPE pairs at any position from two tables: e^{i w p} = coarse[p >> 6] * fine[p & 63].
#pragma once

#include <cstdint>
#include <vector>

#include "base/rope.h"

namespace qevict::kernels {

/// Built once per distinct RopeParams. Grow() must have covered every position before a kernel reads it; reading is
/// thread-safe. Bytes: (max_pos/64 + 64) * n_dims * 4.
class RopeTable {
 public:
  explicit RopeTable(const RopeParams& params);
  /// Covers positions in [-max_pos, max_pos].
  void Grow(int32_t max_pos);
  const RopeParams& params() const { return params_; }
  uint32_t n_pairs() const { return params_.n_dims / 2; }
  float magnitude() const { return magnitude_; }
  /// magnitude * cos and sin of every pair at `pos`: cos [n_pairs], sin [n_pairs].
  void Phases(int32_t pos, float* cos, float* sin) const;
  /// cos and sin (no magnitude) of pair i at 0..7: [n_pairs][8]. In-window offsets of a sub-block of 8 tokens.
  const float* step_cos() const { return step_cos_.data(); }
  const float* step_sin() const { return step_sin_.data(); }
  size_t bytes() const;

 private:
  RopeParams params_;
  float magnitude_ = 1.0f;
  std::vector<double> omega_;
  std::vector<float> coarse_, fine_;  // [block][2][n_pairs]
  std::vector<float> step_cos_, step_sin_;
  int32_t max_pos_ = -1;
};

}  // namespace qevict::kernels
