#include "codecs/kivi_axis.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/half.h"

namespace qevict::codecs {
namespace {

constexpr size_t kMaxWindow = 32;
constexpr float kMaxF16 = 65504.0f;
// 1.5 * 2^23: adding it leaves no fraction bits, rounded half to even.
constexpr float kRound = 12582912.0f;

/// Channels that one step of the encoder holds in registers and L1. Its loops run over channels
/// with no branch, so that any compiler turns them into vector code.
constexpr size_t kLanes = 64;

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

inline uint8_t Code(float x, float zero, float divisor, float max_code) {
  const float position = (Finite(x) - zero) / divisor;
  const float positive = position > 0.0f ? position : 0.0f;
  const float clamped = positive < max_code ? positive : max_code;
  return static_cast<uint8_t>(static_cast<int32_t>((clamped + kRound) - kRound));
}

template <uint32_t kBits>
constexpr size_t kPerByte = 8 / kBits;

/// Joins 8/kBits codes, `stride` apart, to one byte.
template <uint32_t kBits>
inline uint8_t PackByte(const uint8_t* codes, size_t stride) {
  static_assert(kBits == 2 || kBits == 4);
  if constexpr (kBits == 4) return static_cast<uint8_t>(codes[0] | codes[stride] << 4);
  return static_cast<uint8_t>(codes[0] | codes[stride] << 2 | codes[2 * stride] << 4 |
                              codes[3 * stride] << 6);
}

/// Keys of `lanes` <= kLanes adjacent channels, the first at k: grids, and codes [window][kLanes].
/// Codes of tokens from n on are left as they are.
void EncodeKeyLanes(const float* k, size_t row_stride, size_t n, size_t lanes, float max_code,
                    Grid* grids, uint8_t* codes) {
  float low[kLanes], high[kLanes], zero[kLanes], divisor[kLanes];
  for (size_t d = 0; d < lanes; ++d) low[d] = high[d] = Finite(k[d]);
  for (size_t t = 1; t < n; ++t) {
    for (size_t d = 0; d < lanes; ++d) {
      const float x = Finite(k[t * row_stride + d]);
      low[d] = x < low[d] ? x : low[d];
      high[d] = x > high[d] ? x : high[d];
    }
  }
  for (size_t d = 0; d < lanes; ++d) {
    grids[d] = MakeGrid(low[d], high[d], max_code);
    zero[d] = grids[d].zero;
    divisor[d] = grids[d].divisor;
  }
  for (size_t t = 0; t < n; ++t) {
    for (size_t d = 0; d < lanes; ++d) {
      codes[t * kLanes + d] = Code(k[t * row_stride + d], zero[d], divisor[d], max_code);
    }
  }
}

/// Packs codes [window][kLanes] channel-major. `bytes` is where channel 0 of the lanes begins;
/// lanes are a multiple of 8, so that it begins at a whole byte.
template <uint32_t kBits>
void PackKeyLanes(size_t window, size_t lanes, const uint8_t* codes, uint8_t* bytes) {
  if (window >= kPerByte<kBits>) {
    const size_t channel_bytes = window / kPerByte<kBits>;
    for (size_t i = 0; i < channel_bytes; ++i) {
      for (size_t d = 0; d < lanes; ++d) {
        bytes[d * channel_bytes + i] =
            PackByte<kBits>(codes + i * kPerByte<kBits> * kLanes + d, kLanes);
      }
    }
    return;
  }
  std::memset(bytes, 0, lanes * window / kPerByte<kBits>);
  for (size_t d = 0; d < lanes; ++d) {  // several channels share a byte
    for (size_t t = 0; t < window; ++t) {
      const size_t j = d * window + t;
      const uint32_t code = static_cast<uint32_t>(codes[t * kLanes + d])
                            << (j % kPerByte<kBits> * kBits);
      bytes[j / kPerByte<kBits>] = static_cast<uint8_t>(bytes[j / kPerByte<kBits>] | code);
    }
  }
}

/// Smallest and largest of a row of dv values (a multiple of 8), in eight lanes.
void RowRange(const float* v, size_t dv, float* low, float* high) {
  float lows[8], highs[8];
  for (size_t i = 0; i < 8; ++i) lows[i] = highs[i] = Finite(v[i]);
  for (size_t c = 8; c < dv; c += 8) {
    for (size_t i = 0; i < 8; ++i) {
      const float x = Finite(v[c + i]);
      lows[i] = x < lows[i] ? x : lows[i];
      highs[i] = x > highs[i] ? x : highs[i];
    }
  }
  *low = *std::min_element(lows, lows + 8);
  *high = *std::max_element(highs, highs + 8);
}

/// One token's values: returns the grid, writes dv*bits/8 bytes.
template <uint32_t kBits>
Grid EncodeValueRow(const float* v, size_t dv, float max_code, uint8_t* bytes) {
  float low = 0.0f, high = 0.0f;
  RowRange(v, dv, &low, &high);
  const Grid grid = MakeGrid(low, high, max_code);
  for (size_t c0 = 0; c0 < dv; c0 += kLanes) {
    const size_t lanes = std::min(kLanes, dv - c0);
    uint8_t codes[kLanes];
    for (size_t c = 0; c < lanes; ++c) {
      codes[c] = Code(v[c0 + c], grid.zero, grid.divisor, max_code);
    }
    for (size_t i = 0; i < lanes / kPerByte<kBits>; ++i) {
      bytes[c0 / kPerByte<kBits> + i] = PackByte<kBits>(codes + i * kPerByte<kBits>, 1);
    }
  }
  return grid;
}

/// Decodes `n` numbers with codes first, first + 1, ... of `codes` to x, x + stride, ...
inline void DecodeGroup(uint32_t bits, const uint8_t* codes, size_t first, float scale, float zero,
                        size_t stride, size_t n, float* x) {
  const uint32_t mask = (1u << bits) - 1;
  for (size_t i = 0; i < n; ++i) {
    const size_t bit = (first + i) * bits;
    const uint32_t code = (codes[bit / 8] >> (bit % 8)) & mask;
    x[i * stride] = static_cast<float>(code) * scale + zero;
  }
}

template <uint32_t kBits>
void EncodeBlock(size_t window, size_t head_dim, size_t head_dim_v, size_t n, const float* k,
                 const float* v, uint8_t* block) {
  const KiviAxisLayout at = LayoutKiviAxis(kBits, window, head_dim, head_dim_v);
  std::memset(block, 0, at.end);
  if (n == 0) return;
  const float max_code = static_cast<float>((1u << kBits) - 1);
  uint8_t codes[kMaxWindow * kLanes] = {};
  for (size_t d0 = 0; d0 < head_dim; d0 += kLanes) {
    const size_t lanes = std::min(kLanes, head_dim - d0);
    Grid grids[kLanes];
    EncodeKeyLanes(k + d0, head_dim, n, lanes, max_code, grids, codes);
    PackKeyLanes<kBits>(window, lanes, codes, block + at.k_codes + d0 * window * kBits / 8);
    for (size_t d = 0; d < lanes; ++d) {
      StoreF16(block + at.k_scale, d0 + d, grids[d].scale_f16);
      StoreF16(block + at.k_zero, d0 + d, grids[d].zero_f16);
    }
  }
  for (size_t t = 0; t < n; ++t) {
    const Grid grid = EncodeValueRow<kBits>(v + t * head_dim_v, head_dim_v, max_code,
                                            block + at.v_codes + t * head_dim_v * kBits / 8);
    StoreF16(block + at.v_scale, t, grid.scale_f16);
    StoreF16(block + at.v_zero, t, grid.zero_f16);
  }
}

}  // namespace

void EncodeKiviAxis(uint32_t bits, uint32_t window, uint32_t head_dim, uint32_t head_dim_v,
                    uint32_t n, const float* k, const float* v, uint8_t* block) {
  if (bits == 2) EncodeBlock<2>(window, head_dim, head_dim_v, n, k, v, block);
  if (bits == 4) EncodeBlock<4>(window, head_dim, head_dim_v, n, k, v, block);
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
