// Portable traits: 8 lanes in two compiler vectors of 4, which every CPU has registers or plain
// code for. The meaning of each operation for every ISA is stated here.
#pragma once

#include <cstdint>

namespace qevict::kernels::internal {

struct SimdScalar {
  static constexpr uint32_t kLanes = 8;  ///< floats of a vector: 8 or 16
  static constexpr uint32_t kChannels =
      1;  ///< key channels of a vector when 8 tokens are in lanes: kLanes / 8
  static constexpr uint32_t kRegisters = 16;    ///< vectors that can be kept in registers
  static constexpr bool kScalesToZero = false;  ///< TimesExp2 takes any n and rounds to 0
  using F4 [[gnu::vector_size(16)]] = float;
  using U4 [[gnu::vector_size(16)]] = uint32_t;
  using I4 [[gnu::vector_size(16)]] = int32_t;
  struct V {
    F4 lo, hi;
  };
  struct I {
    U4 lo, hi;
  };

  static V Zero() { return Set1(0.0f); }
  static V Set1(float a) { return {F4{a, a, a, a}, F4{a, a, a, a}}; }
  static V Load(const float* p) {
    V v;
    __builtin_memcpy(&v, p, sizeof(v));
    return v;
  }
  /// v, loaded once: the compiler would rather load it again for each use.
  static V InRegister(V v) { return v; }
  static void Store(float* p, V v) { __builtin_memcpy(p, &v, sizeof(v)); }
  static V Add(V a, V b) { return {a.lo + b.lo, a.hi + b.hi}; }
  static V Sub(V a, V b) { return {a.lo - b.lo, a.hi - b.hi}; }
  static V Mul(V a, V b) { return {a.lo * b.lo, a.hi * b.hi}; }
  static V Div(V a, V b) { return {a.lo / b.lo, a.hi / b.hi}; }
  /// b where either is NaN.
  static V Max(V a, V b) { return IfLess(b, a, a, b); }
  static V Fma(V a, V b, V c) { return Add(Mul(a, b), c); }   ///< a * b + c
  static V Fnma(V a, V b, V c) { return Sub(c, Mul(a, b)); }  ///< c - a * b
  static V Abs(V a) { return {Magnitude(a.lo), Magnitude(a.hi)}; }
  static V CopySign(V m, V s) {
    return {F4((U4)Magnitude(m.lo) | ((U4)s.lo & 0x80000000u)),
            F4((U4)Magnitude(m.hi) | ((U4)s.hi & 0x80000000u))};
  }
  /// To nearest even; |a| < 2^22.
  static V Round(V a) { return Sub(Add(a, Set1(0x1.8p23f)), Set1(0x1.8p23f)); }
  /// p * 2^n for whole n in [-126, 127].
  static V TimesExp2(V p, V n) { return {p.lo * Power(n.lo), p.hi * Power(n.hi)}; }
  static float Sum(V a) {
    const F4 x = a.lo + a.hi;
    return (x[0] + x[2]) + (x[1] + x[3]);
  }
  static float MaxOf(V a) {
    const F4 x = Max(a, V{a.hi, a.lo}).lo;
    const float even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
    return even > odd ? even : odd;
  }
  static bool AnyAbove(V a, float b) { return MaxOf(a) > b; }
  /// Lane i: a if bit i of `bits` is set, else b.
  static V IfBits(uint32_t bits, V a, V b) {
    const U4 all = {bits, bits, bits, bits}, lane = {1, 2, 4, 8};
    return {Blend((all & lane) != 0, a.lo, b.lo), Blend((all & (lane << 4)) != 0, a.hi, b.hi)};
  }
  /// Lane i: x < y ? a : b.
  static V IfLess(V x, V y, V a, V b) {
    return {Blend(x.lo < y.lo, a.lo, b.lo), Blend(x.hi < y.hi, a.hi, b.hi)};
  }

  static V LoadF16(const uint16_t* p) { return {Half(Widen(p)), Half(Widen(p + 4))}; }
  static V LoadBf16(const uint16_t* p) { return {(F4)(Widen(p) << 16), (F4)(Widen(p + 4) << 16)}; }
  /// 8 values, the other lanes (of 16) 0.
  static V LoadF16Half(const uint16_t* p) { return LoadF16(p); }
  static V LoadBf16Half(const uint16_t* p) { return LoadBf16(p); }

  // Keys of 8 tokens and kChannels channels come in two lane orders:
  //   blocks (full windows)    lane = channel * 8 + token
  //   pairs (packed windows)   lane = token * kChannels + channel
  /// In pairs order: p[channel] in the lanes of each channel.
  static V Channels(const float* p) { return Set1(*p); }
  /// Blocks order: sums of the channels, one per token, to dst[8].
  static void FoldBlocks(V v, float* dst) { Store(dst, v); }
  /// Blocks order: channel 0 to c0[8], channel 1 (if any) to c1[8].
  static void StoreBlocks(V v, float* c0, float*) { Store(c0, v); }
  static V PairsToBlocks(V v) { return v; }
  /// even = a0 a2 ... b0 b2 ..., odd = a1 a3 ...
  static void Deinterleave(V a, V b, V& even, V& odd) {
    even = {F4{a.lo[0], a.lo[2], a.hi[0], a.hi[2]}, F4{b.lo[0], b.lo[2], b.hi[0], b.hi[2]}};
    odd = {F4{a.lo[1], a.lo[3], a.hi[1], a.hi[3]}, F4{b.lo[1], b.lo[3], b.hi[1], b.hi[3]}};
  }

  /// Per lane: first + bits * token, pairs order.
  static I KeyShift(uint32_t bits, uint32_t first) {
    const U4 lo = U4{0, 1, 2, 3} * bits + first;
    return {lo, lo + 4 * bits};
  }
  /// The 32-bit word at c0 in the lanes of channel 0, at c1 in those of channel 1; pairs order.
  static I KeyWords(const uint8_t* c0, const uint8_t*) {
    uint32_t w;
    __builtin_memcpy(&w, c0, 4);
    return {U4{w, w, w, w}, U4{w, w, w, w}};
  }
  /// Low kBits of words >> shift as floats.
  template <int kBits>
  static V Codes(I words, I shift) {
    constexpr uint32_t kMask = (1u << kBits) - 1;
    return {ToFloat((words.lo >> shift.lo) & kMask), ToFloat((words.hi >> shift.hi) & kMask)};
  }

  /// Codes of windows of 8 tokens, kChannels pairs at a time: channels from p on and their
  /// partners, which follow at once (not kHalves) or `to_second` bytes later. LoadOne: adjacent
  /// channels, no pairs.
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
      return Fma(ToFloat(ChannelCodes<kBits>(p)), Set1(scale), Set1(zero));
    }
  };

  /// Codes of kLanes adjacent channels of two value rows, which begin at a and b, as the low and
  /// the high 16 bits of each lane. May read what ValueGrid::Load may.
  template <int kBits>
  static I CodePairs(const uint8_t* a, const uint8_t* b) {
    return Join(ChannelCodes<kBits>(a), ChannelCodes<kBits>(b), 16);
  }

  // Token codes (token_code.h): 8 words side by side, with 16 lanes 8 words of each of two places.
  static I LoadWords(const uint8_t* a, const uint8_t*) {
    I x;
    __builtin_memcpy(&x, a, sizeof(x));
    return x;
  }
  static V LoadBlocks(const float* a, const float*) { return Load(a); }
  static V LoadF16Blocks(const uint16_t* a, const uint16_t*) { return LoadF16(a); }
  /// Scales of one byte (token_code.h).
  static V LoadScaleBytes(const uint8_t* a, const uint8_t*) {
    uint16_t x[8];
    for (int i = 0; i < 8; ++i) x[i] = static_cast<uint16_t>(a[i] << 6);
    return LoadF16(x);
  }
  // Grid codes (grid_code.h).
  /// kLanes bytes as numbers.
  static V LoadBytes(const uint8_t* p) {
    return {ToFloat(U4{p[0], p[1], p[2], p[3]}), ToFloat(U4{p[4], p[5], p[6], p[7]})};
  }
  /// table[byte] for kLanes bytes below 16; table [16].
  static V Lookup(const float* table, const uint8_t* p) {
    return {F4{table[p[0]], table[p[1]], table[p[2]], table[p[3]]},
            F4{table[p[4]], table[p[5]], table[p[6]], table[p[7]]}};
  }
  static I SetInt(int32_t x) {
    const auto u = static_cast<uint32_t>(x);
    return {U4{u, u, u, u}, U4{u, u, u, u}};
  }
  /// (words >> shift) & mask
  static I Fields(I words, uint32_t shift, uint32_t mask) {
    return {(words.lo >> shift) & mask, (words.hi >> shift) & mask};
  }
  /// a | b << shift
  static I Join(I a, I b, uint32_t shift) {
    return {a.lo | (b.lo << shift), a.hi | (b.hi << shift)};
  }
  /// Per lane: a, and with 16 lanes b in the second 8.
  static I BlockCounts(uint32_t a, uint32_t) { return SetInt(static_cast<int32_t>(a)); }
  static I ShiftRight(I words, I counts) { return {words.lo >> counts.lo, words.hi >> counts.hi}; }
  /// Replaces every byte, below 16, by the table's entry.
  struct Levels {
    const uint8_t* table;
    explicit Levels(const uint8_t* t) : table(t) {}
    I operator()(I x) const {
      uint8_t bytes[32];
      __builtin_memcpy(bytes, &x, 32);
      for (uint8_t& b : bytes) b = table[b];
      __builtin_memcpy(&x, bytes, 32);
      return x;
    }
  };
  /// acc + per lane the dot product of 4 bytes 0 ... 126 with q[4].
  static I Dot8(I acc, I x, const int8_t* q) { return Dot8Wide(acc, x, q); }
  /// The same for bytes 0 ... 255.
  static I Dot8Wide(I acc, I x, const int8_t* q) {
    for (uint32_t i = 0; i < 4; ++i) {
      acc.lo += ((x.lo >> (8 * i)) & 255) * static_cast<uint32_t>(int32_t{q[i]});
      acc.hi += ((x.hi >> (8 * i)) & 255) * static_cast<uint32_t>(int32_t{q[i]});
    }
    return acc;
  }
  /// acc + per lane the dot product of 2 numbers of 16 bits with w[2].
  static I Dot16(I acc, I x, const int16_t* w) {
    const auto a = static_cast<uint32_t>(int32_t{w[0]}), b = static_cast<uint32_t>(int32_t{w[1]});
    return {acc.lo + (x.lo & 0xFFFF) * a + (x.lo >> 16) * b,
            acc.hi + (x.hi & 0xFFFF) * a + (x.hi >> 16) * b};
  }
  static V ToFloat(I x) { return {ToFloat(x.lo), ToFloat(x.hi)}; }
  /// Rounded to nearest even; numbers that fit.
  static void StoreInt8(int8_t* p, V v) {
    for (int i = 0; i < 8; ++i) p[i] = static_cast<int8_t>(RoundedLane(v, i));
  }
  static void StoreInt16(int16_t* p, V v) {
    for (int i = 0; i < 8; ++i) p[i] = static_cast<int16_t>(RoundedLane(v, i));
  }

  /// Sums of 8 consecutive floats each: p[64] -> out[8].
  static void SegmentSums(const float* p, float* out) {
    for (int i = 0; i < 8; ++i) out[i] = Sum(Load(p + 8 * i));
  }

 private:
  template <int kBits>
  static I ChannelCodes(const uint8_t* p) {
    uint32_t w = 0;
    __builtin_memcpy(&w, p, kBits);
    const I shift = KeyShift(kBits, 0);
    constexpr uint32_t kMask = (1u << kBits) - 1;
    return {(U4{w, w, w, w} >> shift.lo) & kMask, (U4{w, w, w, w} >> shift.hi) & kMask};
  }
  static F4 Blend(I4 mask, F4 a, F4 b) { return (F4)(((I4)a & mask) | ((I4)b & ~mask)); }
  static F4 Magnitude(F4 a) { return (F4)((U4)a & 0x7FFFFFFFu); }
  static F4 Power(F4 n) { return (F4)((__builtin_convertvector(n, I4) + 127) << 23); }
  static float RoundedLane(V v, int i) {
    const V r = Round(v);
    return i < 4 ? r.lo[i] : r.hi[i - 4];
  }
  static F4 ToFloat(U4 code) { return __builtin_convertvector((I4)code, F4); }
  static U4 Widen(const uint16_t* p) { return U4{p[0], p[1], p[2], p[3]}; }
  static F4 Half(U4 h) {
    const U4 sign = (h & 0x8000u) << 16, x = (h & 0x7FFFu) << 13;
    const F4 offset = (F4)(U4{} + (113u << 23));
    const F4 subnormal = (F4)(x + (113u << 23)) - offset;
    const F4 normal = (F4)(x + (112u << 23)),
             special = (F4)(x + (224u << 23));  // special: infinity, NaN
    const F4 finite = Blend((I4)(x < (1u << 23)), subnormal, normal);
    return (F4)((U4)Blend((I4)(x >= (31u << 23)), special, finite) | sign);
  }
};

}  // namespace qevict::kernels::internal
