// Scores of a few query vectors against windows that are read in place: full-precision keys (tokens in lanes), and
// packed keys, decoded and rotated in registers. Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_internal.h"

namespace qevict::kernels::internal {

template <int N>
struct Int {
  static constexpr int value = N;
};

/// Calls f(Int<n>) for n in 1..8: register blocks have a compile-time number of query vectors.
template <class F>
void WithBlock(uint32_t n, F&& f) {
  switch (n) {
    case 1: return f(Int<1>{});
    case 2: return f(Int<2>{});
    case 3: return f(Int<3>{});
    case 4: return f(Int<4>{});
    case 5: return f(Int<5>{});
    case 6: return f(Int<6>{});
    case 7: return f(Int<7>{});
    default: return f(Int<8>{});
  }
}

// Element types of stored rows.
template <class S>
struct F16 {
  using T = uint16_t;
  static typename S::V Load(const T* p) { return S::LoadF16(p); }
  static typename S::V LoadHalf(const T* p) { return S::LoadF16Half(p); }
};
template <class S>
struct BF16 {
  using T = uint16_t;
  static typename S::V Load(const T* p) { return S::LoadBf16(p); }
  static typename S::V LoadHalf(const T* p) { return S::LoadBf16Half(p); }
};
template <class S>
struct F32 {
  using T = float;
  static typename S::V Load(const T* p) { return S::Load(p); }
  static typename S::V LoadHalf(const T* p) {  // 8 of 16 lanes
    alignas(64) float x[S::kLanes] = {};
    for (uint32_t i = 0; i < 8; ++i) x[i] = p[i];
    return S::Load(x);
  }
};

/// A sub-block of S <= 8 tokens of full keys, [D][S], and the tile column its scores go to.
template <class T>
struct KeyBlock {
  const T* keys;
  uint32_t column;
};

/// Scores of kM query vectors against kN sub-blocks of 8 tokens; the expanded query loads are shared by the sub-blocks.
/// q: [kM][q_stride], each channel 8 times.
template <class S, class E, int kM, int kN>
void ScoreBlocks8(const KeyBlock<typename E::T>* blocks, const float* q, size_t q_stride, uint32_t head_dim, float* scores) {
  using V = typename S::V;
  V acc[kN][kM];
  for (int n = 0; n < kN; ++n) {
    for (int m = 0; m < kM; ++m) acc[n][m] = S::Zero();
  }
  const typename E::T* keys[kN];
  for (int n = 0; n < kN; ++n) keys[n] = blocks[n].keys;
  for (uint32_t i = 0; i < head_dim * 8; i += S::kLanes) {
    V k[kN];
#pragma GCC unroll 8
    for (int n = 0; n < kN; ++n) k[n] = E::Load(keys[n] + i);
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const V query = S::Load(q + m * q_stride + i);
#pragma GCC unroll 8
      for (int n = 0; n < kN; ++n) acc[n][m] = S::Fma(k[n], query, acc[n][m]);
    }
  }
  for (int n = 0; n < kN; ++n) {
    for (int m = 0; m < kM; ++m) S::FoldBlocks(acc[n][m], scores + m * kTile + blocks[n].column);
  }
}

/// The same for sub-blocks of 1, 2 or 4 tokens: more channels per vector.
template <class S, class E, int kM>
void ScoreBlockSmall(const KeyBlock<typename E::T>& block, const float* q, size_t q_stride, uint32_t head_dim,
                     uint32_t tokens, float* scores) {
  using V = typename S::V;
  V acc[kM];
  for (int m = 0; m < kM; ++m) acc[m] = S::Zero();
  const uint32_t n = head_dim * tokens;
  for (uint32_t i = 0; i < n; i += S::kLanes) {
    const V k = n - i < S::kLanes ? E::LoadHalf(block.keys + i) : E::Load(block.keys + i);
    for (int m = 0; m < kM; ++m) acc[m] = S::Fma(k, S::Load(q + m * q_stride + i), acc[m]);
  }
  for (int m = 0; m < kM; ++m) {
    alignas(64) float x[S::kLanes];
    S::Store(x, acc[m]);
    for (uint32_t t = 0; t < tokens; ++t) {
      float sum = x[t];
      for (uint32_t i = t + tokens; i < S::kLanes; i += tokens) sum += x[i];
      scores[m * kTile + block.column + t] = sum;
    }
  }
}

/// Number of sub-blocks that kM query vectors work on at once, from the number of registers.
template <class S, int kM>
constexpr int KeyBatch() {
  if (S::kRegisters >= 32) return kM <= 6 ? 4 : 2;
  return kM <= 2 ? 4 : (kM <= 4 ? 2 : 1);
}

template <class S, class E, int kM>
void ScoreFullBlocks(const KeyBlock<typename E::T>* blocks, uint32_t n_blocks, const float* q, size_t q_stride,
                     uint32_t head_dim, uint32_t tokens, float* scores) {
  constexpr int kN = KeyBatch<S, kM>();
  uint32_t i = 0;
  if (tokens == 8) {
    for (; i + kN <= n_blocks; i += kN) ScoreBlocks8<S, E, kM, kN>(blocks + i, q, q_stride, head_dim, scores);
    for (; i < n_blocks; ++i) ScoreBlocks8<S, E, kM, 1>(blocks + i, q, q_stride, head_dim, scores);
    return;
  }
  for (; i < n_blocks; ++i) ScoreBlockSmall<S, E, kM>(blocks[i], q, q_stride, head_dim, tokens, scores);
}

/// Addresses inside one kv head's packed block.
struct PackedBlock {
  const uint8_t* k_codes;
  const uint16_t* k_scale;  ///< [D], then zero [D]
  const uint8_t* v_codes;
  const uint16_t* v_scale;  ///< [W], then zero [W]
  size_t k_row, v_row;      ///< bytes of a channel's, of a token's codes
};

static inline PackedBlock LocatePacked(const HeadArgs& h, const WindowRef& w) {
  const uint32_t bits = w.format == WindowFormat::kPacked2 ? 2 : 4;
  PackedBlock b;
  b.k_codes = w.data + h.head_offset[static_cast<int>(w.format)];
  b.k_row = static_cast<size_t>(h.window) * bits / 8;
  b.k_scale = reinterpret_cast<const uint16_t*>(b.k_codes + static_cast<size_t>(h.head_dim) * h.window * bits / 8);
  b.v_codes = reinterpret_cast<const uint8_t*>(b.k_scale + 2 * static_cast<size_t>(h.head_dim));
  b.v_row = static_cast<size_t>(h.head_dim_v) * bits / 8;
  b.v_scale = reinterpret_cast<const uint16_t*>(b.v_codes + h.window * b.v_row);
  return b;
}

/// count (multiple of 8) f16 numbers to f32; dst must hold count rounded up to kPad.
template <class S>
void WidenF16(const uint16_t* src, uint32_t count, float* dst) {
  uint32_t i = 0;
  for (; i + S::kLanes <= count; i += S::kLanes) S::Store(dst + i, S::LoadF16(src + i));
  if (i < count) S::Store(dst + i, S::LoadF16Half(src + i));
}

/// True if the keys of the window are rotated.
static inline bool Rotates(const HeadArgs& h, const WindowRef& w) {
  return h.rope.coarse != nullptr && (w.pos_stride != 0 || w.pos0 != 0);
}

/// Coefficients of a sub-block of 8 packed keys: with codes a, b of a pair's two channels, the key rotated to `pos` is
/// (x0 + x1 a + x2 b, y0 + y1 a + y2 b). Six arrays of `stride` floats.
template <class S>
void RotationCoefficients(const RopeView& rope, int32_t pos, const float* scale, const float* zero, float* coef,
                          uint32_t stride) {
  using V = typename S::V;
  const uint32_t p = pos < 0 ? 0u - static_cast<uint32_t>(pos) : static_cast<uint32_t>(pos);
  const float* coarse = rope.coarse + static_cast<size_t>(p >> 6) * 2 * rope.stride;
  const float* fine = rope.fine + static_cast<size_t>(p & 63) * 2 * rope.stride;
  const V sign = S::Set1(pos < 0 ? -1.0f : 1.0f);
  const uint32_t second = rope.n_pairs;
  for (uint32_t i = 0; i < rope.n_pairs; i += S::kLanes) {
    const V cc = S::Load(coarse + i), cs = S::Load(coarse + rope.stride + i);
    const V fc = S::Load(fine + i), fs = S::Load(fine + rope.stride + i);
    const V c = S::Fnma(cs, fs, S::Mul(cc, fc));
    const V s = S::Mul(sign, S::Fma(cs, fc, S::Mul(cc, fs)));
    V sa, sb, za, zb;
    if (rope.halves) {
      sa = S::Load(scale + i), sb = S::Load(scale + second + i);
      za = S::Load(zero + i), zb = S::Load(zero + second + i);
    } else {
      S::Deinterleave(S::Load(scale + 2 * i), S::Load(scale + 2 * i + S::kLanes), sa, sb);
      S::Deinterleave(S::Load(zero + 2 * i), S::Load(zero + 2 * i + S::kLanes), za, zb);
    }
    S::Store(coef + i, S::Fnma(s, zb, S::Mul(c, za)));
    S::Store(coef + stride + i, S::Mul(c, sa));
    S::Store(coef + 2 * stride + i, S::Fnma(s, sb, S::Zero()));
    S::Store(coef + 3 * stride + i, S::Fma(s, za, S::Mul(c, zb)));
    S::Store(coef + 4 * stride + i, S::Mul(s, sa));
    S::Store(coef + 5 * stride + i, S::Mul(c, sb));
  }
}

/// A sub-block of 8 tokens of packed keys.
struct PackedKeys {
  const uint8_t* codes;  ///< word of channel 0
  size_t row;            ///< bytes from channel to channel
  uint32_t shift;        ///< of the sub-block's first token in the word
  const float* scale;    ///< [D] f32
  const float* zero;
  const float* coef;     ///< RotationCoefficients, if rotated
  uint32_t coef_stride;
  const float* step;     ///< rotation by the tokens' offsets
};

/// Decodes channels [begin, end) without rotation and calls use(channel, values of kChannels channels, pairs order).
template <class S, int kBits, class Use>
inline void DecodePlain(const PackedKeys& k, uint32_t begin, uint32_t end, Use&& use) {
  const auto shift = S::KeyShift(kBits, k.shift);
  for (uint32_t c = begin; c < end; c += S::kChannels) {
    const uint8_t* p = k.codes + c * k.row;
    const auto codes = S::template Codes<kBits>(S::KeyWords(p, p + k.row), shift);
    use(c, S::Fma(codes, S::Channels(k.scale + c), S::Channels(k.zero + c)));
  }
}

/// Decodes and rotates the rotary channels; calls use(pair, first channels' values, second channels' values).
template <class S, int kBits, bool kHalves, class Use>
inline void DecodeRotated(const PackedKeys& k, const RopeView& rope, Use&& use) {
  using V = typename S::V;
  const auto shift = S::KeyShift(kBits, k.shift);
  const size_t to_second = (kHalves ? rope.n_pairs : 1) * k.row, to_next = (kHalves ? 1 : 2) * k.row;
  const uint8_t* p = k.codes + rope.offset * k.row;
  const float* coef = k.coef;
  const uint32_t stride = k.coef_stride;
  for (uint32_t j = 0; j < rope.n_pairs; j += S::kChannels, p += S::kChannels * to_next, coef += S::kChannels) {
    const V a = S::template Codes<kBits>(S::KeyWords(p, p + to_next), shift);
    const V b = S::template Codes<kBits>(S::KeyWords(p + to_second, p + to_second + to_next), shift);
    V x = S::Fma(a, S::Channels(coef + stride), S::Channels(coef));
    V y = S::Fma(a, S::Channels(coef + 4 * stride), S::Channels(coef + 3 * stride));
    x = S::Fma(b, S::Channels(coef + 2 * stride), x);
    y = S::Fma(b, S::Channels(coef + 5 * stride), y);
    const float* step = k.step + static_cast<size_t>(j) * 16;
    const V c = S::Load(step), s = S::Load(step + S::kLanes);
    use(j, S::Fnma(y, s, S::Mul(x, c)), S::Fma(y, c, S::Mul(x, s)));
  }
}

/// Scores of kM query vectors against a sub-block of 8 packed keys. q: [kM][head_dim] natural order, q_pairs: pair order.
template <class S, int kBits, int kM>
void ScorePacked(const PackedKeys& k, const HeadArgs& h, bool rotate, const float* q, const float* q_pairs,
                 float* scores) {
  using V = typename S::V;
  const uint32_t d = h.head_dim;
  V acc[kM];
  for (int m = 0; m < kM; ++m) acc[m] = S::Zero();
  const auto plain = [&](uint32_t c, V x) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) acc[m] = S::Fma(x, S::Channels(q + m * d + c), acc[m]);
  };
  if (rotate) {
    const float* second = q_pairs + h.rope.n_pairs;
    const auto pair = [&](uint32_t j, V x, V y) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) acc[m] = S::Fma(x, S::Channels(q_pairs + m * d + j), acc[m]);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) acc[m] = S::Fma(y, S::Channels(second + m * d + j), acc[m]);
    };
    if (h.rope.halves) {
      DecodeRotated<S, kBits, true>(k, h.rope, pair);
    } else {
      DecodeRotated<S, kBits, false>(k, h.rope, pair);
    }
    DecodePlain<S, kBits>(k, 0, h.rope.offset, plain);
    DecodePlain<S, kBits>(k, h.rope.offset + 2 * h.rope.n_pairs, d, plain);
  } else {
    DecodePlain<S, kBits>(k, 0, d, plain);
  }
  for (int m = 0; m < kM; ++m) S::FoldBlocks(S::PairsToBlocks(acc[m]), scores + m * kTile);
}

/// Decodes (and rotates) a sub-block of 8 packed keys into f32 columns: channel c, token t at dst[c * stride + t].
template <class S, int kBits>
void StorePacked(const PackedKeys& k, const HeadArgs& h, bool rotate, float* dst, size_t stride) {
  using V = typename S::V;
  const RopeView& rope = h.rope;
  const auto store = [&](uint32_t c0, uint32_t c1, V x) {
    S::StoreBlocks(S::PairsToBlocks(x), dst + c0 * stride, dst + c1 * stride);
  };
  const auto plain = [&](uint32_t c, V x) { store(c, c + 1, x); };
  if (!rotate) return DecodePlain<S, kBits>(k, 0, h.head_dim, plain);
  if (rope.halves) {
    DecodeRotated<S, kBits, true>(k, rope, [&](uint32_t j, V x, V y) {
      store(rope.offset + j, rope.offset + j + 1, x);
      store(rope.offset + rope.n_pairs + j, rope.offset + rope.n_pairs + j + 1, y);
    });
  } else {
    DecodeRotated<S, kBits, false>(k, rope, [&](uint32_t j, V x, V y) {
      store(rope.offset + 2 * j, rope.offset + 2 * j + 2, x);
      store(rope.offset + 2 * j + 1, rope.offset + 2 * j + 3, y);
    });
  }
  DecodePlain<S, kBits>(k, 0, rope.offset, plain);
  DecodePlain<S, kBits>(k, rope.offset + 2 * rope.n_pairs, h.head_dim, plain);
}

/// True if sub-blocks of 8 tokens and whole vectors of channels fit the window's codes.
template <class S>
bool PackedInRegisters(const HeadArgs& h, bool rotate) {
  if (h.window < 8) return false;
  return !rotate || (h.rope.n_pairs % S::kChannels == 0 && h.rope.offset % S::kChannels == 0);
}

/// Any shape, one number at a time: window -> f32, channel c, token t at dst[t / 8 * block_stride + c * stride + t % 8].
template <class S>
void DecodeKeysAnyShape(const HeadArgs& h, const WindowRef& w, float* coef, float* dst, size_t stride,
                        size_t block_stride) {
  const PackedBlock b = LocatePacked(h, w);
  const uint32_t bits = w.format == WindowFormat::kPacked2 ? 2 : 4, d = h.head_dim, sub = h.window < 8 ? h.window : 8;
  const uint32_t d_pad = PadLanes(d) + 2 * kPad;
  float *scale = coef, *zero = coef + d_pad, *rotation = coef + 2 * d_pad;
  WidenF16<S>(b.k_scale, d, scale);
  WidenF16<S>(b.k_scale + d, d, zero);
  const RopeView& rope = h.rope;
  const bool rotate = Rotates(h, w);
  for (uint32_t t = 0; t < h.window; ++t) {
    float* column = dst + t / sub * block_stride + t % sub;
    const auto code = [&](uint32_t c) {
      const uint32_t bit = (c * h.window + t) * bits;
      return static_cast<float>((b.k_codes[bit / 8] >> (bit % 8)) & ((1u << bits) - 1));
    };
    for (uint32_t c = 0; c < d; ++c) column[c * stride] = code(c) * scale[c] + zero[c];
    if (!rotate) continue;
    RotationCoefficients<S>(rope, w.pos0 + static_cast<int32_t>(t * w.pos_stride), scale + rope.offset,
                            zero + rope.offset, rotation, d_pad);
    for (uint32_t j = 0; j < rope.n_pairs; ++j) {
      const uint32_t c0 = rope.offset + (rope.halves ? j : 2 * j), c1 = c0 + (rope.halves ? rope.n_pairs : 1);
      const float x = code(c0), y = code(c1);
      const float* r = rotation + j;
      column[c0 * stride] = r[0] + r[d_pad] * x + r[2 * d_pad] * y;
      column[c1 * stride] = r[3 * d_pad] + r[4 * d_pad] * x + r[5 * d_pad] * y;
    }
  }
}

}  // namespace qevict::kernels::internal
