// Format token: every token by itself, keys after RoPE, b = 1, 2, 3, 4 or 8 bits. The bytes are
// those of kernels/token_code.h with one segment of b bits over all channels in their order, steps
// 1 and the codes as levels:
//
//   zero  = f16(min x)                                            x: the token's channels
//   scale = f16((max x - min x) / (2^b - 1))
//   code  = round_half_even(clamp((x - zero) / scale, 0, 2^b - 1))
//   value = code * scale + zero                                   in f32
//
// Grids as in kivi_axis.h: rounded to f16 first, a constant group gets scale 1 and codes 0, what
// f16 cannot hold is clamped, non-finite inputs count as 0. Tokens n ... W-1: everything 0.
//
// Bytes per token of D + Dv channels: (D + Dv) b / 8 codes, each part rounded up to 4, and 8 for
// the grids. At D = Dv = 64, b = 2: 40 of 256, 15.6%.
//
// Why per token: a window needs no grid of its own, so short windows cost nothing, and integer dot
// products read the codes in place. The price is what KIVI found (arXiv 2402.02750): outlier
// channels of keys, and a key bias, widen every token's grid.
#pragma once

#include <cstdint>
#include <vector>

#include "codecs/codec.h"

namespace qevict::codecs {

/// Codes of one vector in fields: what token_code.h lays out.
class TokenWriter {
 public:
  TokenWriter(const kernels::VectorCode& code, bool is_k)
      : code_(code), first_(code), is_k_(is_k) {}
  /// Sets the codes [n_places] of a token; its words must be 0 before.
  void Put(uint8_t* words, uint32_t token, const uint8_t* codes) const;
  uint32_t Get(const uint8_t* words, uint32_t token, uint32_t place) const;

 private:
  const kernels::VectorCode& code_;
  kernels::FieldCursors first_;
  bool is_k_;
};

/// One segment of b bits over all channels.
struct UniformVector {
  kernels::VectorCode code;
  std::vector<float> step;
  std::vector<uint16_t> channel;
  UniformVector(uint32_t bits, uint32_t dim, uint32_t unit);
  UniformVector(const UniformVector&) = delete;  // the code points into it
  UniformVector& operator=(const UniformVector&) = delete;
};

class TokenCodec final : public Codec {
 public:
  TokenCodec(const TokenCodec&) = delete;  // codes point into it
  TokenCodec& operator=(const TokenCodec&) = delete;
  /// bits: 1, 2, 3, 4 or 8; window: a multiple of 8.
  TokenCodec(uint32_t bits, uint32_t window, const RowShape& shape);
  static BlockBytes Bytes(uint32_t bits, uint32_t window, const RowShape& shape);

  BlockBytes bytes() const override { return Bytes(bits_, window_, shape_); }
  kernels::WindowFormat format() const override { return kernels::WindowFormat::kToken; }
  bool before_rope() const override { return false; }
  const kernels::TokenCode* token_codes() const override { return codes_.data(); }
  void EncodeSides(uint32_t kv_head, uint32_t n, const float* k, const float* v, uint8_t* k_block,
                   uint8_t* v_block) const override;
  void DecodeSides(uint32_t kv_head, uint32_t n, const uint8_t* k_block, const uint8_t* v_block,
                   float* k, float* v) const override;

 private:
  uint32_t bits_, window_;
  RowShape shape_;
  UniformVector k_, v_;
  std::vector<kernels::TokenCode> codes_;  // [n_kv_heads], all alike
};

}  // namespace qevict::codecs
