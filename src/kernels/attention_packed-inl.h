// Packed keys: decoded and rotated in registers, no copy in memory. Windows of 8 tokens are scored
// directly; others, and the prompt form, take the decoded keys from an L1-sized f32 tile. Included
// by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_keys-inl.h"

namespace qevict::kernels::internal {

/// Keys or values of one kv head of a packed window.
struct PackedBlock {
  const uint8_t* codes;
  const uint16_t* scale;  ///< [D] of keys or [W] of values, then the zeros
  size_t row;             ///< bytes of a channel's, or of a token's codes
};

static inline uint32_t PackedBits(const RungArgs& rung) {
  return rung.format == WindowFormat::kPacked2 ? 2 : 4;
}

static inline PackedBlock LocateKeys(const HeadArgs& h, const WindowRef& w) {
  const size_t channel_bits = static_cast<size_t>(h.window) * PackedBits(KeyRung(h, w));
  const uint8_t* codes = KeysOf(h, w);
  return {codes, reinterpret_cast<const uint16_t*>(codes + h.head_dim * channel_bits / 8),
          channel_bits / 8};
}

static inline PackedBlock LocateValues(const HeadArgs& h, const WindowRef& w) {
  const size_t row = static_cast<size_t>(h.head_dim_v) * PackedBits(ValueRung(h, w)) / 8;
  const uint8_t* codes = ValuesOf(h, w);
  return {codes, reinterpret_cast<const uint16_t*>(codes + h.window * row), row};
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

/// cos and sin (magnitude included) of each pair at `pos`, to [n_pairs rounded up to kPad] each.
template <class S>
void PhasesAt(const RopeView& rope, int32_t pos, float* cos, float* sin) {
  const uint32_t p = pos < 0 ? 0u - static_cast<uint32_t>(pos) : static_cast<uint32_t>(pos);
  const float* coarse = rope.coarse + static_cast<size_t>(p >> 6) * 2 * rope.stride;
  const float* fine = rope.fine + static_cast<size_t>(p & 63) * 2 * rope.stride;
  const auto sign = S::Set1(pos < 0 ? -1.0f : 1.0f);
  for (uint32_t i = 0; i < rope.n_pairs; i += S::kLanes) {
    const auto cc = S::Load(coarse + i), cs = S::Load(coarse + rope.stride + i);
    const auto fc = S::Load(fine + i), fs = S::Load(fine + rope.stride + i);
    S::Store(cos + i, S::Fnma(cs, fs, S::Mul(cc, fc)));
    S::Store(sin + i, S::Mul(sign, S::Fma(cs, fc, S::Mul(cc, fs))));
  }
}

/// Coefficients of a sub-block of 8 packed keys: with codes a, b of a pair's two channels, the key
/// rotated to `pos` is (x0 + x1 a + x2 b, y0 + y1 a + y2 b). Six arrays of kCoefStride floats.
template <class S>
void RotationCoefficients(const RopeView& rope, int32_t pos, const float* scale, const float* zero,
                          float* coef) {
  constexpr uint32_t stride = kCoefStride;
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
  const float* coef;    ///< RotationCoefficients, if rotated
  const float* step;    ///< rotation by the tokens' offsets
  Ahead ahead;          ///< fetched while rotated channels are decoded
  uint32_t column = 0;  ///< of the tile, for scores
};

/// Decodes channels [begin, end) without rotation and calls use(channel, values of kChannels
/// channels, pairs order).
template <class S, int kBits, class Use>
inline void DecodePlain(const PackedKeys& k, uint32_t begin, uint32_t end, Use&& use) {
  const auto shift = S::KeyShift(kBits, k.shift);
  for (uint32_t c = begin; c < end; c += S::kChannels) {
    const uint8_t* p = k.codes + c * k.row;
    const auto codes = S::template Codes<kBits>(S::KeyWords(p, p + k.row), shift);
    use(c, S::Fma(codes, S::Channels(k.scale + c), S::Channels(k.zero + c)));
  }
}

/// Decodes and rotates the rotary channels; calls use(pair, first channels' values, second
/// channels' values).
template <class S, int kBits, bool kHalves, class Use>
inline void DecodeRotated(const PackedKeys& k, const RopeView& rope, Use&& use) {
  using V = typename S::V;
  const auto shift = S::KeyShift(kBits, k.shift);
  const size_t to_second = (kHalves ? rope.n_pairs : 1) * k.row,
               to_next = (kHalves ? 1 : 2) * k.row;
  const uint8_t* p = k.codes + rope.offset * k.row;
  const float* coef = k.coef;
  Ahead ahead = k.ahead;
  constexpr uint32_t stride = kCoefStride;
  for (uint32_t j = 0; j < rope.n_pairs;
       j += S::kChannels, p += S::kChannels * to_next, coef += S::kChannels) {
    ahead.Fetch();
    const V a = S::template Codes<kBits>(S::KeyWords(p, p + to_next), shift);
    const V b =
        S::template Codes<kBits>(S::KeyWords(p + to_second, p + to_second + to_next), shift);
    V x = S::Fma(a, S::Channels(coef + stride), S::Channels(coef));
    V y = S::Fma(a, S::Channels(coef + 4 * stride), S::Channels(coef + 3 * stride));
    x = S::Fma(b, S::Channels(coef + 2 * stride), x);
    y = S::Fma(b, S::Channels(coef + 5 * stride), y);
    const float* step = k.step + static_cast<size_t>(j) * 16;
    const V c = S::Load(step), s = S::Load(step + S::kLanes);
    use(j, S::Fnma(y, s, S::Mul(x, c)), S::Fma(y, c, S::Mul(x, s)));
  }
}

/// Windows of 8 packed keys that kM query vectors work on at once: they share the queries' loads.
template <class S, int kM>
constexpr int PackedBatch() {
  return S::kRegisters >= 32 && kM <= 8 ? 2 : 1;
}

/// A rotated pair of channels of a window of 8 packed keys, decoded where its codes are.
template <class S, int kBits, bool kHalves>
struct RotatedWalk {
  using V = typename S::V;
  const uint8_t* codes;
  const float* coef;
  Ahead ahead;

  RotatedWalk() = default;
  RotatedWalk(const PackedKeys& k, uint32_t offset)
      : codes(k.codes + offset * kBits), coef(k.coef), ahead(k.ahead) {}

  /// Both channels of the next S::kChannels pairs; c, s: rotation by the tokens' offsets.
  void Next(const typename S::template PairCodes<kBits, kHalves>& decode, size_t to_second, V c,
            V s, V& first, V& second) {
    V a, b;
    decode.Load(codes, to_second, a, b);
    ahead.Fetch();
    V x = S::Fma(a, S::Channels(coef + kCoefStride), S::Channels(coef));
    V y = S::Fma(a, S::Channels(coef + 4 * kCoefStride), S::Channels(coef + 3 * kCoefStride));
    x = S::Fma(b, S::Channels(coef + 2 * kCoefStride), x);
    y = S::Fma(b, S::Channels(coef + 5 * kCoefStride), y);
    first = S::Fnma(y, s, S::Mul(x, c));
    second = S::Fma(y, c, S::Mul(x, s));
    codes += S::kChannels * kBits * (kHalves ? 1 : 2);
    coef += S::kChannels;
  }
};

/// acc += products of kN windows of 8 packed keys, with the same offsets between their tokens, with
/// kM query vectors.
/// q_plain: [channel / C][kM][C], q_pairs: [pair / C][kM][2][C] with C = S::kChannels, so that one
/// pointer walks each.
template <class S, int kBits, bool kHalves, int kM, int kN>
void ScoreRotated(const PackedKeys* keys, const RopeView& rope, const float* q_pairs,
                  typename S::V (&out)[kN][kM]) {
  using V = typename S::V;
  V acc[kN][kM];  // a reference would be written back in every step
  for (int n = 0; n < kN; ++n) {
    for (int m = 0; m < kM; ++m) acc[n][m] = out[n][m];
  }
  constexpr uint32_t kC = S::kChannels;
  const typename S::template PairCodes<kBits, kHalves> decode;
  RotatedWalk<S, kBits, kHalves> walk[kN];
  for (int n = 0; n < kN; ++n) walk[n] = {keys[n], rope.offset};
  const size_t to_second = rope.n_pairs * kBits;
  const float* step = keys[0].step;
  for (uint32_t j = 0; j < rope.n_pairs; j += kC, q_pairs += 2 * kC * kM, step += 2 * S::kLanes) {
    const V c = S::Load(step), s = S::Load(step + S::kLanes);
    V first[kN], second[kN];
#pragma GCC unroll 2
    for (int n = 0; n < kN; ++n) walk[n].Next(decode, to_second, c, s, first[n], second[n]);
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const V q = S::Channels(q_pairs + 2 * kC * m);
#pragma GCC unroll 2
      for (int n = 0; n < kN; ++n) acc[n][m] = S::Fma(first[n], q, acc[n][m]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) {
      const V q = S::Channels(q_pairs + 2 * kC * m + kC);
#pragma GCC unroll 2
      for (int n = 0; n < kN; ++n) acc[n][m] = S::Fma(second[n], q, acc[n][m]);
    }
  }
  for (int n = 0; n < kN; ++n) {
    for (int m = 0; m < kM; ++m) out[n][m] = acc[n][m];
  }
}

/// Channels [begin, end), not rotated.
template <class S, int kBits, int kM>
void ScorePlain(const PackedKeys& k, uint32_t begin, uint32_t end, const float* q_plain,
                typename S::V (&out)[kM]) {
  using V = typename S::V;
  constexpr uint32_t kC = S::kChannels;
  const typename S::template PairCodes<kBits, true> codes;
  V acc[kM];
  for (int m = 0; m < kM; ++m) acc[m] = out[m];
  q_plain += begin * kM;
  for (uint32_t c = begin; c < end; c += kC, q_plain += kC * kM) {
    const V x = S::Fma(codes.LoadOne(k.codes + c * kBits), S::Channels(k.scale + c),
                       S::Channels(k.zero + c));
#pragma GCC unroll 8
    for (int m = 0; m < kM; ++m) acc[m] = S::Fma(x, S::Channels(q_plain + kC * m), acc[m]);
  }
  for (int m = 0; m < kM; ++m) out[m] = acc[m];
}

/// Scores of kM query vectors against kN windows of 8 packed keys, rotated alike, to
/// scores [kM][kTile] from each window's column on.
template <class S, int kBits, int kM, int kN>
void ScorePacked(const PackedKeys* keys, const HeadArgs& h, bool rotate, const float* q_plain,
                 const float* q_pairs, float* scores) {
  typename S::V acc[kN][kM];
  for (auto& window : acc) {
    for (int m = 0; m < kM; ++m) window[m] = S::Zero();
  }
  if (rotate) {
    if (h.rope.halves) {
      ScoreRotated<S, kBits, true, kM, kN>(keys, h.rope, q_pairs, acc);
    } else {
      ScoreRotated<S, kBits, false, kM, kN>(keys, h.rope, q_pairs, acc);
    }
  }
  const uint32_t before = rotate ? h.rope.offset : h.head_dim,
                 behind = rotate ? h.rope.offset + 2 * h.rope.n_pairs : h.head_dim;
  for (int n = 0; n < kN; ++n) {
    if (before != 0) ScorePlain<S, kBits, kM>(keys[n], 0, before, q_plain, acc[n]);
    if (behind != h.head_dim)
      ScorePlain<S, kBits, kM>(keys[n], behind, h.head_dim, q_plain, acc[n]);
    for (int m = 0; m < kM; ++m)
      S::FoldBlocks(S::PairsToBlocks(acc[n][m]), scores + m * kTile + keys[n].column);
  }
}

/// Decodes (and rotates) a sub-block of 8 packed keys into f32 columns: channel c, token t at dst[c
/// * stride + t].
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
bool PackedInVectors(const HeadArgs& h, bool rotate) {
  if (h.window < 8) return false;
  return !rotate || (h.rope.n_pairs % S::kChannels == 0 && h.rope.offset % S::kChannels == 0);
}

/// Any shape, one number at a time: window -> f32, channel c, token t at dst[t / 8 * block_stride +
/// c * stride + t % 8].
template <class S>
void DecodeKeysAnyShape(const HeadArgs& h, const WindowRef& w, float* coef, float* dst,
                        size_t stride, size_t block_stride) {
  const PackedBlock b = LocateKeys(h, w);
  const uint32_t bits = PackedBits(KeyRung(h, w)), d = h.head_dim,
                 sub = h.window < 8 ? h.window : 8;
  const uint32_t d_pad = PadLanes(d) + 2 * kPad;
  float *scale = coef, *zero = coef + d_pad, *rotation = coef + 2 * d_pad;
  WidenF16<S>(b.scale, d, scale);
  WidenF16<S>(b.scale + d, d, zero);
  const RopeView& rope = h.rope;
  const bool rotate = Rotates(h, w);
  for (uint32_t t = 0; t < h.window; ++t) {
    float* column = dst + t / sub * block_stride + t % sub;
    const auto code = [&](uint32_t c) {
      const uint32_t bit = (c * h.window + t) * bits;
      return static_cast<float>((b.codes[bit / 8] >> (bit % 8)) & ((1u << bits) - 1));
    };
    for (uint32_t c = 0; c < d; ++c) column[c * stride] = code(c) * scale[c] + zero[c];
    if (!rotate) continue;
    RotationCoefficients<S>(rope, w.pos0 + static_cast<int32_t>(t * w.pos_stride),
                            scale + rope.offset, zero + rope.offset, rotation);
    for (uint32_t j = 0; j < rope.n_pairs; ++j) {
      const uint32_t c0 = rope.offset + (rope.halves ? j : 2 * j),
                     c1 = c0 + (rope.halves ? rope.n_pairs : 1);
      const float x = code(c0), y = code(c1);
      const float* r = rotation + j;
      column[c0 * stride] = r[0] + r[kCoefStride] * x + r[2 * kCoefStride] * y;
      column[c1 * stride] = r[3 * kCoefStride] + r[4 * kCoefStride] * x + r[5 * kCoefStride] * y;
    }
  }
}

/// Floats that the grids and coefficients of a packed window take.
static inline uint32_t PackedCoefs(uint32_t head_dim) {
  return 2 * (PadLanes(head_dim) + 2 * kPad) + 6 * kCoefStride;
}

/// Sub-block s of a packed window of at least 8 tokens, whose grids are (s == 0: become) widened in
/// coef.
template <class S>
PackedKeys LoadSubBlock(const HeadArgs& h, const WindowRef& w, uint32_t s, bool rotate, float* coef,
                        const Ahead& ahead) {
  const PackedBlock b = LocateKeys(h, w);
  const uint32_t bits = PackedBits(KeyRung(h, w)), d = h.head_dim, d_pad = PadLanes(d) + 2 * kPad,
                 bit = 8 * s * bits;
  float *scale = coef, *zero = coef + d_pad, *rotation = coef + 2 * d_pad;
  if (s == 0) {
    WidenF16<S>(b.scale, d, scale);
    WidenF16<S>(b.scale + d, d, zero);
  }
  if (rotate) {
    const int32_t pos = w.pos0 + static_cast<int32_t>(8 * s * w.pos_stride);
    RotationCoefficients<S>(h.rope, pos, scale + h.rope.offset, zero + h.rope.offset, rotation);
  }
  return {
      b.codes + bit / 32 * 4,
      b.row,
      bit % 32,
      scale,
      zero,
      rotation,
      w.pos_stride != 0 ? h.rope.step : h.rope.step_zero,
      {ahead.data + s * ahead.step * (h.rope.n_pairs / S::kChannels), ahead.second, ahead.step}};
}

/// Packed window of any shape to f32: channel c, token t at dst[t / 8 * block_stride + c * stride +
/// t % 8].
template <class S>
void DecodePackedKeys(const HeadArgs& h, const WindowRef& w, const Ahead& ahead, float* coef,
                      float* dst, size_t stride, size_t block_stride) {
  const bool rotate = Rotates(h, w);
  if (!PackedInVectors<S>(h, rotate))
    return DecodeKeysAnyShape<S>(h, w, coef, dst, stride, block_stride);
  for (uint32_t s = 0; s < h.window / 8; ++s) {
    const PackedKeys keys = LoadSubBlock<S>(h, w, s, rotate, coef, ahead);
    if (PackedBits(KeyRung(h, w)) == 2) {
      StorePacked<S, 2>(keys, h, rotate, dst + s * block_stride, stride);
    } else {
      StorePacked<S, 4>(keys, h, rotate, dst + s * block_stride, stride);
    }
  }
}

}  // namespace qevict::kernels::internal
