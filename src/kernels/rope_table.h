// Phases of RoPE pairs at any position from two tables: e^{i w p} = coarse[p >> 6] * fine[p & 63].
// A kernel needs no memory per token: two complex products give a pair's rotation at any position.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/rope.h"

namespace qevict::kernels {

/// Built once per distinct RopeParams. Grow() must have covered every position before a kernel
/// reads it; reading is thread-safe. Bytes: about (max_pos / 64 + 64) * n_dims * 4.
class RopeTable {
 public:
  explicit RopeTable(const RopeParams& params);
  /// Covers positions in [-max_pos, max_pos].
  void Grow(int32_t max_pos);
  /// Bytes that Grow(max_pos) would add.
  size_t GrowthBytes(int32_t max_pos) const;
  const RopeParams& params() const { return params_; }
  uint32_t n_pairs() const { return params_.n_dims / 2; }
  float magnitude() const { return magnitude_; }
  int32_t max_pos() const { return max_pos_; }
  /// magnitude * cos and sin of every pair at `pos`: cos [n_pairs], sin [n_pairs].
  void Phases(int32_t pos, float* cos, float* sin) const;
  /// Rotation (no magnitude) by the offsets 0...7 in a sub-block, in the order of a kernel whose
  /// vectors hold `channels` (1 or 2) pairs of 8 tokens: [n_pairs / channels][cos, sin][8
  /// tokens][channels].
  const float* steps(uint32_t channels) const { return steps_[channels - 1].data(); }
  /// The same for tokens that share one position: cos = 1, sin = 0.
  const float* zero_steps(uint32_t channels) const { return zero_steps_[channels - 1].data(); }
  /// [block][cos, sin][stride], with the magnitude; block p covers 64 positions from 64 p.
  const float* coarse() const { return coarse_.data(); }
  /// [64][cos, sin][stride].
  const float* fine() const { return fine_.data(); }
  uint32_t stride() const { return stride_; }
  uint32_t n_blocks() const {
    return static_cast<uint32_t>(coarse_.size() / (size_t{2} * stride_));
  }

  // Sums over pairs of a cos(w t) + b sin(w t) for the 64 positions t of a block, as one matrix
  // product: with cos and sin rows for the first n_fast() pairs, and the powers 0 ... 3 of
  // y = (t - 31.5) / 32 for all others, whose angle changes by at most 0.15 from the block's
  // middle (the cubic is off by 2e-5 of the pair's amplitude).
  /// Call AddBasis() once before; it is not thread-safe.
  void AddBasis();
  uint32_t n_fast() const { return n_fast_; }
  /// [2 n_fast + 4][64]: cos of each fast pair, sin of each, powers of y.
  const float* basis() const { return basis_.data(); }
  /// [3][stride]: cos and sin of 31.5 w, and 32 w; 0 for fast pairs.
  const float* middle() const { return middle_.data(); }
  size_t bytes() const;
  /// The most that a table of any frequencies takes for `n_dims` channels and `n_positions`
  /// positions, with or without the basis.
  static size_t MaxBytes(uint32_t n_dims, uint64_t n_positions, bool with_basis);

 private:
  RopeParams params_;
  float magnitude_ = 1.0f;
  uint32_t stride_ = 0;        // n_pairs rounded up to 16, so that whole vectors can be read
  std::vector<double> omega_;  // [n_pairs] radians per position
  std::vector<float> coarse_, fine_;
  std::vector<float> steps_[2], zero_steps_[2];
  uint32_t n_fast_ = 0;
  std::vector<float> basis_, middle_;
  int32_t max_pos_ = -1;
};

}  // namespace qevict::kernels
