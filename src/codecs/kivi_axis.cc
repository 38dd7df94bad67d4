#include "codecs/kivi_axis.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/half.h"

namespace qevict::codecs {
namespace {

constexpr float kMaxF16 = 65504.0f;
// 1.5 * 2^23: adding it leaves no fraction bits, rounded half to even.
constexpr float kRound = 12582912.0f;

inline float Finite(float x) { return std::isfinite(x) ? x : 0.0f; }

inline void StoreF16(uint8_t* at, size_t i, uint16_t h) { std::memcpy(at + 2 * i, &h, sizeof h); }

inline float LoadF16(const uint8_t* at, size_t i) {
  uint16_t h;
  std::memcpy(&h, at + 2 * i, sizeof h);
  return F16ToF32(h);
}

/// A grid in its stored form and the values that form stands for.
struct Grid {
  uint16_t scale_f16, zero_f16;
  float scale, zero;
  bool constant;
};

inline Grid MakeGrid(float low, float high, float max_code) {
  Grid grid{};
  grid.zero_f16 = F32ToF16(std::clamp(low, -kMaxF16, kMaxF16));
  grid.zero = F16ToF32(grid.zero_f16);
  // high - low may overflow to infinity; the clamp takes that, too.
  grid.scale_f16 = F32ToF16(std::min((high - low) / max_code, kMaxF16));
  grid.scale = F16ToF32(grid.scale_f16);
  grid.constant = grid.scale == 0.0f;
  if (grid.constant) {
    grid.scale = 1.0f;
    grid.scale_f16 = F32ToF16(1.0f);
  }
  return grid;
}

inline uint32_t Code(float x, const Grid& grid, float max_code) {
  if (grid.constant) return 0;
  const float position = std::clamp((x - grid.zero) / grid.scale, 0.0f, max_code);
  return static_cast<uint32_t>((position + kRound) - kRound);
}

/// Encodes `n` numbers at x, x + stride, ... as codes first, first + 1, ... of `codes` (zeroed
/// before) and returns their grid.
inline Grid EncodeGroup(uint32_t bits, const float* x, size_t stride, size_t n, size_t first,
                        uint8_t* codes) {
  const float max_code = static_cast<float>((1u << bits) - 1);
  float low = Finite(x[0]), high = low;
  for (size_t i = 1; i < n; ++i) {
    const float value = Finite(x[i * stride]);
    low = std::min(low, value);
    high = std::max(high, value);
  }
  const Grid grid = MakeGrid(low, high, max_code);
  for (size_t i = 0; i < n; ++i) {
    const size_t bit = (first + i) * bits;
    const uint32_t code = Code(Finite(x[i * stride]), grid, max_code) << (bit % 8);
    codes[bit / 8] = static_cast<uint8_t>(codes[bit / 8] | code);
  }
  return grid;
}

/// Inverse of EncodeGroup.
inline void DecodeGroup(uint32_t bits, const uint8_t* codes, size_t first, float scale, float zero,
                        size_t stride, size_t n, float* x) {
  const uint32_t mask = (1u << bits) - 1;
  for (size_t i = 0; i < n; ++i) {
    const size_t bit = (first + i) * bits;
    const uint32_t code = (codes[bit / 8] >> (bit % 8)) & mask;
    x[i * stride] = static_cast<float>(code) * scale + zero;
  }
}

}  // namespace

void EncodeKiviAxis(uint32_t bits, uint32_t window, uint32_t head_dim, uint32_t head_dim_v,
                    uint32_t n, const float* k, const float* v, uint8_t* block) {
  const KiviAxisLayout at = LayoutKiviAxis(bits, window, head_dim, head_dim_v);
  std::memset(block, 0, at.end);
  if (n == 0) return;
  for (size_t d = 0; d < head_dim; ++d) {
    const Grid grid = EncodeGroup(bits, k + d, head_dim, n, d * window, block + at.k_codes);
    StoreF16(block + at.k_scale, d, grid.scale_f16);
    StoreF16(block + at.k_zero, d, grid.zero_f16);
  }
  for (size_t t = 0; t < n; ++t) {
    const Grid grid =
        EncodeGroup(bits, v + t * head_dim_v, 1, head_dim_v, t * head_dim_v, block + at.v_codes);
    StoreF16(block + at.v_scale, t, grid.scale_f16);
    StoreF16(block + at.v_zero, t, grid.zero_f16);
  }
}

void DecodeKiviAxis(uint32_t bits, uint32_t window, uint32_t head_dim, uint32_t head_dim_v,
                    uint32_t n, const uint8_t* block, float* k, float* v) {
  const KiviAxisLayout at = LayoutKiviAxis(bits, window, head_dim, head_dim_v);
  if (k != nullptr) {
    for (size_t d = 0; d < head_dim; ++d) {
      DecodeGroup(bits, block + at.k_codes, d * window, LoadF16(block + at.k_scale, d),
                  LoadF16(block + at.k_zero, d), head_dim, n, k + d);
    }
  }
  if (v != nullptr) {
    for (size_t t = 0; t < n; ++t) {
      DecodeGroup(bits, block + at.v_codes, t * head_dim_v, LoadF16(block + at.v_scale, t),
                  LoadF16(block + at.v_zero, t), 1, head_dim_v, v + t * head_dim_v);
    }
  }
}

}  // namespace qevict::codecs
