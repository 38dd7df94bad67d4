// The asymmetric uniform grid that several formats share: scale and minimum in f16, codes against
// the rounded grid (kivi_axis.h has the formulas).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/half.h"

namespace qevict::codecs {

inline constexpr float kMaxF16 = 65504.0f;

/// x, or 0 where it is not finite. In integers: a comparison of floats would have to mind NaN.
inline float Finite(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t keep = (bits & 0x7F800000u) == 0x7F800000u ? 0u : ~0u;
  return std::bit_cast<float>(bits & keep);
}

inline void StoreF16(uint8_t* at, size_t i, uint16_t h) { std::memcpy(at + 2 * i, &h, sizeof h); }

inline float LoadF16(const uint8_t* at, size_t i) {
  uint16_t h;
  std::memcpy(&h, at + 2 * i, sizeof h);
  return F16ToF32(h);
}

/// A grid in its stored form, and what codes are computed with.
struct Grid {
  uint16_t scale_f16, zero_f16;
  float zero;
  float divisor;  // the stored scale; infinity for a constant group, so that its codes become 0
};

inline Grid MakeGrid(float low, float high, float max_code) {
  Grid grid{};
  grid.zero_f16 = F32ToF16(std::clamp(low, -kMaxF16, kMaxF16));
  grid.zero = F16ToF32(grid.zero_f16);
  // high - low may overflow to infinity; the minimum takes that, too.
  grid.scale_f16 = F32ToF16(std::min((high - low) / max_code, kMaxF16));
  grid.divisor = F16ToF32(grid.scale_f16);
  if (grid.divisor == 0.0f) {
    grid.divisor = std::numeric_limits<float>::infinity();
    grid.scale_f16 = F32ToF16(1.0f);
  }
  return grid;
}

inline uint8_t GridCode(float x, float zero, float divisor, float max_code) {
  // 1.5 * 2^23: adding it leaves no fraction bits, rounded half to even.
  constexpr float kRound = 12582912.0f;
  const float position = (Finite(x) - zero) / divisor;
  const float positive = position > 0.0f ? position : 0.0f;
  const float clamped = positive < max_code ? positive : max_code;
  return static_cast<uint8_t>(static_cast<int32_t>((clamped + kRound) - kRound));
}

/// Smallest and largest of a row of n numbers (a multiple of 8), in eight lanes.
inline void RowRange(const float* x, size_t n, float* low, float* high) {
  float lows[8], highs[8];
  for (size_t i = 0; i < 8; ++i) lows[i] = highs[i] = Finite(x[i]);
  for (size_t c = 8; c < n; c += 8) {
    for (size_t i = 0; i < 8; ++i) {
      const float each = Finite(x[c + i]);
      lows[i] = each < lows[i] ? each : lows[i];
      highs[i] = each > highs[i] ? each : highs[i];
    }
  }
  *low = *std::min_element(lows, lows + 8);
  *high = *std::max_element(highs, highs + 8);
}

}  // namespace qevict::codecs
