// Portable traits: 8 lanes in a plain array. The meaning of each operation for every ISA is stated here.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace qevict::kernels::internal {

struct SimdScalar {
  static constexpr uint32_t kLanes = 8;      ///< floats of a vector: 8 or 16
  static constexpr uint32_t kChannels = 1;   ///< key channels of a vector when 8 tokens are in lanes: kLanes / 8
  static constexpr uint32_t kRegisters = 16; ///< vectors that can be kept in registers
  struct V { float x[8]; };
  struct I { uint32_t x[8]; };

  static V Zero() { return Set1(0.0f); }
  static V Set1(float a) { return Each([&](int) { return a; }); }
  static V Load(const float* p) { return Each([&](int i) { return p[i]; }); }
  static void Store(float* p, V v) { std::memcpy(p, v.x, sizeof(v.x)); }
  static V Add(V a, V b) { return Each([&](int i) { return a.x[i] + b.x[i]; }); }
  static V Sub(V a, V b) { return Each([&](int i) { return a.x[i] - b.x[i]; }); }
  static V Mul(V a, V b) { return Each([&](int i) { return a.x[i] * b.x[i]; }); }
  static V Div(V a, V b) { return Each([&](int i) { return a.x[i] / b.x[i]; }); }
  /// b where either is NaN.
  static V Max(V a, V b) { return Each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; }); }
  static V Fma(V a, V b, V c) { return Each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; }); }   ///< a * b + c
  static V Fnma(V a, V b, V c) { return Each([&](int i) { return c.x[i] - a.x[i] * b.x[i]; }); }  ///< c - a * b
  static V Abs(V a) { return Each([&](int i) { return __builtin_fabsf(a.x[i]); }); }
  static V CopySign(V m, V s) { return Each([&](int i) { return __builtin_copysignf(m.x[i], s.x[i]); }); }
  static V Round(V a) {  // to nearest even; |a| < 2^22
    return Each([&](int i) { return (a.x[i] + 0x1.8p23f) - 0x1.8p23f; });
  }
  /// p * 2^n for whole n in [-126, 127].
  static V TimesExp2(V p, V n) {
    return Each([&](int i) {
      const uint32_t e = static_cast<uint32_t>(static_cast<int32_t>(n.x[i]) + 127) << 23;
      return p.x[i] * FromBits(e);
    });
  }
  static float Sum(V a) { return ((a.x[0] + a.x[4]) + (a.x[2] + a.x[6])) + ((a.x[1] + a.x[5]) + (a.x[3] + a.x[7])); }
  static float MaxOf(V a) {
    float m = a.x[0];
    for (int i = 1; i < 8; ++i) m = a.x[i] > m ? a.x[i] : m;
    return m;
  }
  /// Lane i: a if bit i of `bits` is set, else b.
  static V IfBits(uint32_t bits, V a, V b) { return Each([&](int i) { return (bits >> i) & 1u ? a.x[i] : b.x[i]; }); }
  static V IfLess(V x, V y, V a, V b) { return Each([&](int i) { return x.x[i] < y.x[i] ? a.x[i] : b.x[i]; }); }

  static V LoadF16(const uint16_t* p) { return Each([&](int i) { return Half(p[i]); }); }
  static V LoadBf16(const uint16_t* p) {
    return Each([&](int i) { return FromBits(static_cast<uint32_t>(p[i]) << 16); });
  }
  /// 8 values, the other lanes (of 16) 0.
  static V LoadF16Half(const uint16_t* p) { return LoadF16(p); }
  static V LoadBf16Half(const uint16_t* p) { return LoadBf16(p); }

  // Keys of 8 tokens and kChannels channels come in two lane orders:
  //   blocks (full windows): lane = channel * 8 + token       pairs (packed windows): lane = token * kChannels + channel
  /// In pairs order: p[channel] in the lanes of each channel.
  static V Channels(const float* p) { return Set1(*p); }
  /// Blocks order: sums of the channels, one per token, to dst[8].
  static void FoldBlocks(V v, float* dst) { Store(dst, v); }
  /// Blocks order: channel 0 to c0[8], channel 1 (if any) to c1[8].
  static void StoreBlocks(V v, float* c0, float*) { Store(c0, v); }
  static V PairsToBlocks(V v) { return v; }
  /// even = a0 a2 ... b0 b2 ..., odd = a1 a3 ...
  static void Deinterleave(V a, V b, V& even, V& odd) {
    for (int i = 0; i < 4; ++i) {
      even.x[i] = a.x[2 * i], odd.x[i] = a.x[2 * i + 1];
      even.x[4 + i] = b.x[2 * i], odd.x[4 + i] = b.x[2 * i + 1];
    }
  }

  /// Per lane: first + bits * token, pairs order.
  static I KeyShift(uint32_t bits, uint32_t first) {
    I r;
    for (uint32_t i = 0; i < 8; ++i) r.x[i] = first + bits * i;
    return r;
  }
  /// The 32-bit word at c0 in the lanes of channel 0, at c1 in those of channel 1; pairs order.
  static I KeyWords(const uint8_t* c0, const uint8_t*) {
    uint32_t w;
    std::memcpy(&w, c0, 4);
    I r;
    for (uint32_t& x : r.x) x = w;
    return r;
  }
  /// Low kBits of words >> shift as floats.
  template <int kBits>
  static V Codes(I words, I shift) {
    return Each([&](int i) { return static_cast<float>(static_cast<int>((words.x[i] >> shift.x[i]) & ((1u << kBits) - 1))); });
  }

  /// Codes of windows of 8 tokens, kChannels pairs at a time: channels from p on and their partners, which follow at
  /// once (not kHalves) or `to_second` bytes later. LoadOne: adjacent channels, no pairs.
  template <int kBits, bool kHalves>
  struct PairCodes {
    const I shift = KeyShift(kBits, 0);
    void Load(const uint8_t* p, size_t to_second, V& a, V& b) const {
      a = LoadOne(p);
      b = LoadOne(p + (kHalves ? to_second : kBits));
    }
    V LoadOne(const uint8_t* p) const { return Codes<kBits>(KeyWords(p, p), shift); }
  };

  /// Grid of one packed value row (a token's channels).
  template <int kBits>
  struct ValueGrid {
    float scale, zero;
    ValueGrid(float s, float z) : scale(s), zero(z) {}
    /// kLanes values whose codes begin at p. May read up to 4 bytes more than their codes.
    V Load(const uint8_t* p) const {
      uint32_t w = 0;
      std::memcpy(&w, p, kBits);
      return Each([&](int i) {
        return static_cast<float>(static_cast<int>((w >> (kBits * i)) & ((1u << kBits) - 1))) * scale + zero;
      });
    }
  };

  /// Sums of 8 consecutive floats each: p[64] -> out[8].
  static void SegmentSums(const float* p, float* out) {
    for (int i = 0; i < 8; ++i) out[i] = Sum(Load(p + 8 * i));
  }

 private:
  template <class F>
  static V Each(F&& f) {
    V r;
    for (int i = 0; i < 8; ++i) r.x[i] = f(i);
    return r;
  }
  static float FromBits(uint32_t u) {
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
  static float Half(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, x = static_cast<uint32_t>(h & 0x7FFFu) << 13;
    const uint32_t subnormal_bits = x + (113u << 23);
    float tiny = FromBits(subnormal_bits) - FromBits(113u << 23);
    uint32_t t;
    std::memcpy(&t, &tiny, 4);
    const uint32_t normal = x + ((x >= (31u << 23)) ? (224u << 23) : (112u << 23));
    return FromBits((x < (1u << 23) ? t : normal) | sign);
  }
};

}  // namespace qevict::kernels::internal
