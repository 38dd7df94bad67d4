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
void EncodeKeys(const KiviAxisLayout& at, size_t window, size_t head_dim, size_t n, const float* k,
                uint8_t* block) {
  std::memset(block, 0, at.v_codes);
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
}

/// block: where the values begin, at.v_codes of a whole one.
template <uint32_t kBits>
void EncodeValues(const KiviAxisLayout& at, size_t head_dim_v, size_t n, const float* v,
                  uint8_t* block) {
  std::memset(block, 0, at.end - at.v_codes);
  const float max_code = static_cast<float>((1u << kBits) - 1);
  for (size_t t = 0; t < n; ++t) {
    const Grid grid = EncodeValueRow<kBits>(v + t * head_dim_v, head_dim_v, max_code,
                                            block + t * head_dim_v * kBits / 8);
    StoreF16(block + (at.v_scale - at.v_codes), t, grid.scale_f16);
    StoreF16(block + (at.v_zero - at.v_codes), t, grid.zero_f16);
  }
}

}  // namespace

void KiviAxisCodec::EncodeSides(uint32_t, uint32_t n, const float* k, const float* v,
                                uint8_t* k_block, uint8_t* v_block) const {
  const uint32_t d = shape_.head_dim, dv = shape_.head_dim_v;
  const KiviAxisLayout at = LayoutKiviAxis(bits_, window_, d, dv);
  if (bits_ == 2) {
    if (k_block != nullptr) EncodeKeys<2>(at, window_, d, n, k, k_block);
    if (v_block != nullptr) EncodeValues<2>(at, dv, n, v, v_block);
  } else {
    if (k_block != nullptr) EncodeKeys<4>(at, window_, d, n, k, k_block);
    if (v_block != nullptr) EncodeValues<4>(at, dv, n, v, v_block);
  }
}

void KiviAxisCodec::DecodeSides(uint32_t, uint32_t n, const uint8_t* k_block,
                                const uint8_t* v_block, float* k, float* v) const {
  const uint32_t dim = shape_.head_dim, dv = shape_.head_dim_v;
  const KiviAxisLayout at = LayoutKiviAxis(bits_, window_, dim, dv);
  for (size_t d = 0; k != nullptr && d < dim; ++d) {
    DecodeGroup(bits_, k_block + at.k_codes, d * window_, LoadF16(k_block + at.k_scale, d),
                LoadF16(k_block + at.k_zero, d), dim, n, k + d);
  }
  for (size_t t = 0; v != nullptr && t < n; ++t) {
    DecodeGroup(bits_, v_block, t * dv, LoadF16(v_block + (at.v_scale - at.v_codes), t),
                LoadF16(v_block + (at.v_zero - at.v_codes), t), 1, dv, v + t * dv);
  }
}

}  // namespace qevict::codecs
