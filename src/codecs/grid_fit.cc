#include <algorithm>
#include <cmath>

#include "codecs/grid.h"
#include "codecs/grid_codec.h"

namespace qevict::codecs {
namespace {

using kernels::GridVector;

float MaxCode(const GridVector& grid) { return static_cast<float>((1u << grid.bits) - 1); }

GridFit OfRange(const GridVector& grid, float low, float high) {
  return {(high - low) / MaxCode(grid), low};
}

/// Squared error of uniform codes on the grid as it is stored.
double ErrorOf(const GridVector& grid, GridFit fit, const float* x, uint32_t n) {
  const Grid stored = MakeGrid(fit.zero, fit.zero + fit.scale * MaxCode(grid), MaxCode(grid));
  const float scale = F16ToF32(stored.scale_f16);
  double error = 0.0;
  for (uint32_t i = 0; i < n; ++i) {
    const float code = GridCode(x[i], stored.zero, stored.divisor, MaxCode(grid));
    const double off = double{x[i]} - (double{code} * scale + stored.zero);
    error += off * off;
  }
  return error;
}

}  // namespace

GridFit FitMinMax(const GridVector& grid, const float* x, uint32_t n) {
  const auto [low, high] = std::minmax_element(x, x + n);
  return OfRange(grid, *low, *high);
}

GridFit FitWholeZero(const GridVector& grid, const float* x, uint32_t n) {
  const auto [low, high] = std::minmax_element(x, x + n);
  const float scale = std::max(*high - *low, 1e-5f) / MaxCode(grid);
  return {scale, scale * std::nearbyint(*low / scale)};
}

GridFit FitClipped(const GridVector& grid, const float* x, uint32_t n) {
  const auto [low, high] = std::minmax_element(x, x + n);
  const float middle = 0.5f * (*low + *high), half = 0.5f * (*high - *low);
  GridFit best{};
  double least = INFINITY;
  for (int step = 32; step >= 8; --step) {
    const float narrowed = half * static_cast<float>(step) / 32.0f;
    const GridFit fit = OfRange(grid, middle - narrowed, middle + narrowed);
    const double error = ErrorOf(grid, fit, x, n);
    if (error < least) least = error, best = fit;
  }
  return best;
}

GridFit FitAbsMax(const GridVector&, const float* x, uint32_t n) {
  float largest = 0.0f;
  for (uint32_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
  return {largest, 0.0f};
}

GridFit FitNormal(const GridVector&, const float* x, uint32_t n) {
  double sum = 0.0, square = 0.0;
  for (uint32_t i = 0; i < n; ++i) sum += x[i];
  const double mean = sum / n;
  for (uint32_t i = 0; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
  return {static_cast<float>(std::sqrt(square / std::max(n - 1, 1u))), static_cast<float>(mean)};
}

GridFit FitMiddle(const GridVector&, const float* x, uint32_t n) {
  const auto [low, high] = std::minmax_element(x, x + n);
  return {0.5f * (*high - *low), 0.5f * (*high + *low)};
}

GridFit FitGaussian(const GridVector& grid, const float* x, uint32_t n) {
  double square = 0.0;
  for (uint32_t i = 0; i < n; ++i) square += double{x[i]} * x[i];
  const double rms = std::sqrt(square / n);
  if (!(rms > 0.0)) return {0.0f, 0.0f};
  const float* end = grid.levels + (1u << grid.bits);
  double xy = 0.0, yy = 0.0;
  for (uint32_t i = 0; i < n; ++i) {
    const double z = x[i] / rms;
    const float* above = std::lower_bound(grid.levels, end, static_cast<float>(z));
    const bool below = above == end || (above != grid.levels && z - above[-1] <= *above - z);
    const double level = below ? above[-1] : *above;
    xy += x[i] * level;
    yy += level * level;
  }
  return {static_cast<float>(yy > 0.0 ? xy / yy : rms), 0.0f};
}

}  // namespace qevict::codecs
