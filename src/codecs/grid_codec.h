// Codecs whose windows are grid codes (kernels/grid_code.h). A format is a specification of its
// keys and of its values: which numbers share a grid, how a grid is fitted to them, what is exact.
// Codes are always the nearest level of the grid as it is stored: of two equally near ones the even
// code of a uniform grid, the lower one of a table; unless a format has borders of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "codecs/codec.h"

namespace qevict::codecs {

/// scale and zero of numbers that share a grid, before they are rounded to what is stored.
struct GridFit {
  float scale, zero;
};
/// x [n], finite, factor and offset taken off.
using FitGrid = GridFit (*)(const kernels::GridVector& grid, const float* x, uint32_t n);

/// zero = min, scale = (max - min) / (2^bits - 1).
GridFit FitMinMax(const kernels::GridVector& grid, const float* x, uint32_t n);
/// zero = scale * round(min / scale), scale = max(max - min, 1e-5) / (2^bits - 1).
GridFit FitWholeZero(const kernels::GridVector& grid, const float* x, uint32_t n);
/// FitMinMax of a range that is narrowed on both sides, in steps of 1/32, to the least squared
/// error.
GridFit FitClipped(const kernels::GridVector& grid, const float* x, uint32_t n);
/// scale = max |x|.
GridFit FitAbsMax(const kernels::GridVector& grid, const float* x, uint32_t n);
/// zero = mean, scale = unbiased standard deviation.
GridFit FitNormal(const kernels::GridVector& grid, const float* x, uint32_t n);
/// zero and scale = middle and half of the range.
GridFit FitMiddle(const kernels::GridVector& grid, const float* x, uint32_t n);
/// scale = root mean square, refined once to the least squares of the codes' levels.
GridFit FitGaussian(const kernels::GridVector& grid, const float* x, uint32_t n);

/// What of x [n][dim] is kept exactly: numbers, t * dim + c each, at most GridVector::n_exact; or
/// tokens, at most n_exact_tokens.
using PickExact = std::function<std::vector<uint32_t>(const kernels::GridVector& grid,
                                                      const float* x, uint32_t n, uint32_t dim)>;

/// Keys or values of one kv head.
struct GridSpec {
  kernels::GridVector grid;                 ///< pointers are set by GridCodec
  FitGrid fit = FitMinMax;                  ///< not used by kStatic
  std::vector<float> levels;                ///< [2^bits], rising, or empty
  std::vector<float> borders;               ///< [2^bits - 1]: code = borders below x; or empty
  std::vector<float> factor, offset, sign;  ///< [dim] each, or empty
  PickExact pick_numbers = nullptr;         ///< or null
};

struct GridHead {
  GridSpec k, v;
  PickExact pick_tokens = nullptr;  ///< by the keys, for both; or null
};

/// Borders of nearest levels: half way between neighbours; empty without levels.
std::vector<float> Midpoints(const std::vector<float>& levels);

/// sign of a random-sign Hadamard transform; the same for equal dim.
std::vector<float> HadamardSigns(uint32_t dim);
/// x [dim] = H (sign * x), sign as above: what is coded for a token's channels.
void HadamardForward(const float* sign, uint32_t dim, float* x);

class GridCodec final : public Codec {
 public:
  GridCodec(const GridCodec&) = delete;  // codes point into it
  GridCodec& operator=(const GridCodec&) = delete;
  /// heads: [n_kv_heads], with the same bytes each. window: 8, 16 or 32.
  GridCodec(uint32_t window, const RowShape& shape, std::vector<GridHead> heads);

  BlockBytes bytes() const override;
  kernels::WindowFormat format() const override { return kernels::WindowFormat::kGrid; }
  bool before_rope() const override { return codes_[0].k.before_rope; }
  const kernels::GridCode* grid_codes() const override { return codes_.data(); }
  size_t static_bytes() const override;
  void EncodeSides(uint32_t kv_head, uint32_t n, const float* k, const float* v, uint8_t* k_block,
                   uint8_t* v_block) const override;
  void DecodeSides(uint32_t kv_head, uint32_t n, const uint8_t* k_block, const uint8_t* v_block,
                   float* k, float* v) const override;

 private:
  uint32_t window_;
  RowShape shape_;
  std::vector<GridHead> heads_;
  std::vector<kernels::GridCode> codes_;
};

/// The same specification for all kv heads.
std::vector<GridHead> SameHeads(const RowShape& shape, const GridHead& head);

}  // namespace qevict::codecs
