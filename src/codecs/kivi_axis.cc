#include "codecs/kivi_axis.h"

#include <algorithm>
#include <cstring>

#include "codecs/grid.h"

namespace qevict::codecs {
namespace {

constexpr size_t kMaxWindow = 32;

/// Channels that one step of the encoder holds in registers and L1. Its loops run over channels
/// with no branch, so that any compiler turns them into vector code.
constexpr size_t kLanes = 64;

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
      codes[t * kLanes + d] = GridCode(k[t * row_stride + d], zero[d], divisor[d], max_code);
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
      codes[c] = GridCode(v[c0 + c], grid.zero, grid.divisor, max_code);
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

void KiviAxisCodec::Encode(uint32_t, uint32_t n, const float* k, const float* v,
                           uint8_t* block) const {
  EncodeKiviAxis(bits_, window_, shape_.head_dim, shape_.head_dim_v, n, k, v, block);
}

void KiviAxisCodec::Decode(uint32_t, uint32_t n, const uint8_t* block, float* k, float* v) const {
  DecodeKiviAxis(bits_, window_, shape_.head_dim, shape_.head_dim_v, n, block, k, v);
}

}  // namespace qevict::codecs
