// Format kivi_axis: QEvict's packed tier. One kv head of one window of W tokens in b = 2 or 4 bits.
//
// Grid (after KIVI, arXiv 2402.02750): asymmetric and uniform. For a group x of finite numbers
//
//     zero  = f16(min x)
//     scale = f16((max x - min x) / (2^b - 1))
//     code  = round_half_even(clamp((x - zero) / scale, 0, 2^b - 1))
//     value = code * scale + zero                                      in f32
//
//   Scale and zero are rounded to f16 first, codes are taken against the rounded grid. A group
//   whose scale is 0 in f16 (constant, or nearly) gets scale 1 and codes 0. A grid beyond f16 is
//   clamped to +-65504, the largest finite f16. The grid is f16 even if rows are bf16: bf16 has
//   8 bits of mantissa and would shift codes.
// Groups: keys one per channel over the n tokens of the window, *before* RoPE; values one per
// token over its channels. Non-finite inputs count as 0.
//
// Bytes, all little-endian, no padding, parts in this order (sizes: W = 8, D = Dv = 128, b = 2):
//
//   part      length     size
//   K codes   D*W*b/8     256    channel-major: (channel d, token t) has code number d*W + t
//   K scale   2*D         256    f16 [D]
//   K zero    2*D         256    f16 [D]
//   V codes   W*Dv*b/8    256    token-major: (token t, channel c) has code number t*Dv + c
//   V scale   2*W          16    f16 [W]
//   V zero    2*W          16    f16 [W]
//                        1056    = 132 bytes per token
//
//   Code number j of a part lies in byte j*b/8 from bit (j*b mod 8) on, lowest bits first:
//
//     bit     7 6   5 4   3 2   1 0         bit     7 6 5 4   3 2 1 0
//     b = 2   j+3   j+2   j+1    j          b = 4     j+1        j
//
//   Tokens n ... W-1 of a window that is not full: codes 0, V scale and zero 0.
//
// Why per channel and before RoPE: outlier channels of keys are stable until RoPE mixes them. The
// price is the K grid, 4 bytes per channel and window: at W = 8 the "2-bit" keys cost 6 bits.
// Error per element: at most scale/2 plus the rounding of the grid.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codecs/codec.h"

namespace qevict::codecs {

/// Byte offsets of the parts of a block; `end` is its size.
struct KiviAxisLayout {
  size_t k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, end;
};

/// Requires bits 2 or 4, D and Dv multiples of 8.
constexpr KiviAxisLayout LayoutKiviAxis(size_t bits, size_t window, size_t head_dim,
                                        size_t head_dim_v) {
  const size_t b = bits, w = window, d = head_dim, dv = head_dim_v;
  KiviAxisLayout at{};
  at.k_codes = 0;
  at.k_scale = at.k_codes + d * w * b / 8;
  at.k_zero = at.k_scale + 2 * d;
  at.v_codes = at.k_zero + 2 * d;
  at.v_scale = at.v_codes + w * dv * b / 8;
  at.v_zero = at.v_scale + 2 * w;
  at.end = at.v_zero + 2 * w;
  return at;
}

static_assert(LayoutKiviAxis(2, 8, 128, 128).end == size_t{8} * 132);
static_assert(LayoutKiviAxis(4, 8, 128, 128).end == size_t{8} * 196);

class KiviAxisCodec final : public Codec {
 public:
  KiviAxisCodec(uint32_t bits, uint32_t window, const RowShape& shape)
      : bits_(bits), window_(window), shape_(shape) {}
  static BlockBytes Bytes(uint32_t bits, uint32_t window, const RowShape& shape) {
    const KiviAxisLayout at = LayoutKiviAxis(bits, window, shape.head_dim, shape.head_dim_v);
    return {at.v_codes, at.end - at.v_codes};
  }

  BlockBytes bytes() const override { return Bytes(bits_, window_, shape_); }
  kernels::WindowFormat format() const override {
    return bits_ == 2 ? kernels::WindowFormat::kPacked2 : kernels::WindowFormat::kPacked4;
  }
  bool before_rope() const override { return true; }
  KiviAxisLayout layout() const {
    return LayoutKiviAxis(bits_, window_, shape_.head_dim, shape_.head_dim_v);
  }
  void EncodeSides(uint32_t kv_head, uint32_t n, const float* k, const float* v, uint8_t* k_block,
                   uint8_t* v_block) const override;
  void DecodeSides(uint32_t kv_head, uint32_t n, const uint8_t* k_block, const uint8_t* v_block,
                   float* k, float* v) const override;

 private:
  uint32_t bits_, window_;
  RowShape shape_;
};

}  // namespace qevict::codecs
