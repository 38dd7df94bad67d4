// Format wf: a static transform code. Unequal bits for unequal channels, and a static mean that
// costs no key bytes. The bytes are those of kernels/token_code.h without zeros.
//
// Static per kv head, from keys and values seen so far (WaterFillStats), frozen when the first
// window is packed:
//
//   m[c]      mean of the keys before RoPE
//   sigma[c]  RMS of the values; of keys of what is left, after RoPE: both channels of a pair
//             share theirs
//   b[c]      0, 1, 2, 3, 4 or 8 bits, alike for units of 4 (keys) or 8 (values) channels of
//             similar energy, chosen so that the sum over channels of
//               weight[c] * sigma[c]^2 * D(b[c])
//             is least at the given number of words; weight: query energy E[q_c^2] for keys, 1 for
//             values; D: distortion of a unit Gaussian at its Lloyd-Max levels (1, .3634, .1175,
//             .03454, .009497), and at 8 bits at 255 even levels up to 6 (.00019)
//
// Values keep their mean: tokens that attract attention have small values, whose scale is small,
// too, and a mean that is taken off would drown them (measured: docs/codec-diary.md).
//
// Per token: a key is R_p m + residual, and of a residual or a value x
//
//   x[c] = sigma[c] * u_b * scale * (level - 63)       for a code of b bits (8: level - 127)
//
// level - 63: Lloyd-Max levels of a unit Gaussian in steps of u_b = (largest level) / 63, rounded;
// those of 8 bits are even and end at 127 u_8 = 6.
// Codes are taken at the gain g = RMS of residual[c] / sigma[c] over the channels of fewer than 8
// bits, and again at the least squares fit of what is decoded there to the residual. A second fit
// is the scale that is stored, as 64 times a scale of one byte (token_code.h); the codes are those
// at what that stands for. Channels of 8 bits are fine at any scale, but far above the others and
// with long tails: they only keep the scale from falling below what reaches them. (They set it
// alone where all channels have 8 bits.)
//
// Words: bits / 32 of (D + Dv) channels, keys get the odd one; or as Config::layer_bits says. Bytes
// per token: 4 per word and 2 for two scales. At D = Dv = 64: 2 bits 34 of 256 (13.3%), 3 bits 50
// (19.5%).
//
// Score: q . (R_p m + residual): the mean's part needs no code and is exact.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/rope.h"
#include "codecs/codec.h"

namespace qevict::codecs {

/// Quarters of a bit per value, keys and values on average.
inline uint32_t QuarterBits(const Config& config) { return 4 * config.bits + config.quarter_bits; }

/// 32-bit words of a vector of `dim` numbers of so many quarters of a bit.
inline uint32_t WordsOf(uint32_t quarters, uint32_t dim) { return (quarters * dim + 127) / 128; }

/// Sums of one kv head that the code is made of.
struct WaterFillStats {
  uint64_t n = 0;                       ///< tokens
  std::vector<double> k_sum, k_square;  ///< [D] keys before RoPE; squares around the mean later
  std::vector<double> v_square;         ///< [Dv]
  std::vector<double> q_square;         ///< [D] energy of the queries; empty or 0: all alike
  void AddKey(const float* before_rope, uint32_t head_dim);
  void AddValue(const float* value, uint32_t head_dim_v);
};

/// The largest mean of a key channel before RoPE, over the standard deviation of all channels
/// around their means: what a key bias adds to every key. 0 without keys.
float KeyBias(const WaterFillStats& stats);

/// One vector's code: what kernels need, with the memory behind it.
struct WaterFillVector {
  kernels::VectorCode code;
  std::vector<float> step;        // [places]
  std::vector<uint16_t> channel;  // [places]
};

/// Splits `n_words` words per token among channels of the given energies (weight * sigma^2), in
/// units of kernels::kKeyUnit or kValueUnit channels; sigma: what is left per channel.
WaterFillVector FillWater(std::span<const double> energy, std::span<const double> sigma,
                          uint32_t n_words, uint32_t unit);

class WaterFillCodec final : public Codec {
 public:
  WaterFillCodec(const WaterFillCodec&) = delete;  // codes point into it
  WaterFillCodec& operator=(const WaterFillCodec&) = delete;
  /// quarter_bits: average bits * 4, 4 to 16; RowShape::bits, 1 to 32, comes before it.
  /// stats: [n_kv_heads].
  WaterFillCodec(uint32_t quarter_bits, uint32_t window, const RowShape& shape,
                 const RopeParams& rope, std::span<const WaterFillStats> stats);
  static BlockBytes Bytes(uint32_t quarter_bits, uint32_t window, const RowShape& shape);
  /// static_bytes() and the queries' energy that it is made of, at most.
  static size_t LearnedBytes(const RowShape& shape);

  BlockBytes bytes() const override { return Bytes(quarter_bits_, window_, shape_); }
  kernels::WindowFormat format() const override { return kernels::WindowFormat::kToken; }
  bool before_rope() const override { return false; }
  const kernels::TokenCode* token_codes() const override { return codes_.data(); }
  const float* key_mean(uint32_t kv_head) const override { return codes_[kv_head].k.mean; }
  size_t static_bytes() const override;
  void EncodeSides(uint32_t kv_head, uint32_t n, const float* k, const float* v, uint8_t* k_block,
                   uint8_t* v_block) const override;
  void DecodeSides(uint32_t kv_head, uint32_t n, const uint8_t* k_block, const uint8_t* v_block,
                   float* k, float* v) const override;

 private:
  void Keep(std::span<const WaterFillVector> k, std::span<const WaterFillVector> v,
            std::span<const std::vector<double>> means);

  uint32_t quarter_bits_, window_;
  RowShape shape_;
  // Of all heads and both sides in one piece each: they are charged to the budget.
  std::vector<float> numbers_;             // steps and means
  std::vector<uint16_t> channels_;         // of places
  std::vector<kernels::TokenCode> codes_;  // [n_kv_heads]
};

}  // namespace qevict::codecs
