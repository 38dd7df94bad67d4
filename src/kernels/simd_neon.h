// NEON traits (aarch64): 8 lanes in two 128-bit registers. See simd_scalar.h for the meaning of
// each operation.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace qevict::kernels::internal {

struct SimdNeon {
  static constexpr uint32_t kLanes = 8;
  static constexpr uint32_t kChannels = 1;
  static constexpr uint32_t kRegisters = 16;
  static constexpr bool kScalesToZero = false;
  struct V {
    float32x4_t lo, hi;
  };
  struct I {
    uint32x4_t lo, hi;
  };

  static V Zero() { return Set1(0.0f); }
  static V Set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static V Load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static V InRegister(V v) { return v; }
  static void Store(float* p, V v) { vst1q_f32(p, v.lo), vst1q_f32(p + 4, v.hi); }
  static V Add(V a, V b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
  static V Sub(V a, V b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
  static V Mul(V a, V b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
  static V Div(V a, V b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
  static V Max(V a, V b) { return IfLess(b, a, a, b); }
  static V Fma(V a, V b, V c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
  static V Fnma(V a, V b, V c) {
    return {vfmsq_f32(c.lo, a.lo, b.lo), vfmsq_f32(c.hi, a.hi, b.hi)};
  }
  static V Abs(V a) { return {vabsq_f32(a.lo), vabsq_f32(a.hi)}; }
  static V CopySign(V m, V s) {
    const uint32x4_t sign = vdupq_n_u32(0x80000000u);
    return {vbslq_f32(sign, s.lo, m.lo), vbslq_f32(sign, s.hi, m.hi)};
  }
  static V Round(V a) { return {vrndnq_f32(a.lo), vrndnq_f32(a.hi)}; }
  static V TimesExp2(V p, V n) { return {TimesExp2(p.lo, n.lo), TimesExp2(p.hi, n.hi)}; }
  static float Sum(V a) { return vaddvq_f32(vaddq_f32(a.lo, a.hi)); }
  static float MaxOf(V a) { return vmaxvq_f32(vmaxq_f32(a.lo, a.hi)); }
  static bool AnyAbove(V a, float b) { return MaxOf(a) > b; }
  static V IfBits(uint32_t bits, V a, V b) {
    const uint32x4_t lane = {1, 2, 4, 8}, all = vdupq_n_u32(bits);
    return {vbslq_f32(vtstq_u32(all, lane), a.lo, b.lo),
            vbslq_f32(vtstq_u32(all, vshlq_n_u32(lane, 4)), a.hi, b.hi)};
  }
  static V IfLess(V x, V y, V a, V b) {
    return {vbslq_f32(vcltq_f32(x.lo, y.lo), a.lo, b.lo),
            vbslq_f32(vcltq_f32(x.hi, y.hi), a.hi, b.hi)};
  }

  static V LoadF16(const uint16_t* p) {
    const uint16x8_t x = vld1q_u16(p);
    return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(x))),
            vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(x)))};
  }
  static V LoadBf16(const uint16_t* p) {
    const uint16x8_t x = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(x), 16))};
  }
  // Never needed: rows are multiples of 8.
  static V LoadF16Half(const uint16_t* p) { return LoadF16(p); }
  static V LoadBf16Half(const uint16_t* p) { return LoadBf16(p); }

  static V Channels(const float* p) { return Set1(*p); }
  static void FoldBlocks(V v, float* dst) { Store(dst, v); }
  static void StoreBlocks(V v, float* c0, float*) { Store(c0, v); }
  static V PairsToBlocks(V v) { return v; }
  static void Deinterleave(V a, V b, V& even, V& odd) {
    even = {vuzp1q_f32(a.lo, a.hi), vuzp1q_f32(b.lo, b.hi)};
    odd = {vuzp2q_f32(a.lo, a.hi), vuzp2q_f32(b.lo, b.hi)};
  }

  static I KeyShift(uint32_t bits, uint32_t first) {
    const uint32x4_t token = {0, 1, 2, 3};
    const uint32x4_t lo = vmlaq_n_u32(vdupq_n_u32(first), token, bits);
    return {lo, vaddq_u32(lo, vdupq_n_u32(4 * bits))};
  }
  static I KeyWords(const uint8_t* c0, const uint8_t*) {
    uint32_t w;
    std::memcpy(&w, c0, 4);
    return {vdupq_n_u32(w), vdupq_n_u32(w)};
  }
  template <int kBits>
  static V Codes(I words, I shift) {
    return {Codes<kBits>(words.lo, shift.lo), Codes<kBits>(words.hi, shift.hi)};
  }

  template <int kBits, bool kHalves>
  struct PairCodes {
    const I shift = KeyShift(kBits, 0);
    void Load(const uint8_t* p, size_t to_second, V& a, V& b) const {
      a = LoadOne(p);
      b = LoadOne(p + (kHalves ? to_second : kBits));
    }
    V LoadOne(const uint8_t* p) const { return Codes<kBits>(KeyWords(p, p), shift); }
  };

  template <int kBits>
  struct ValueGrid {
    float scale, zero;
    ValueGrid(float s, float z) : scale(s), zero(z) {}
    V Load(const uint8_t* p) const {
      return Fma(ToFloat(ChannelCodes<kBits>(p)), Set1(scale), Set1(zero));
    }
  };
  template <int kBits>
  static I CodePairs(const uint8_t* a, const uint8_t* b) {
    return Join(ChannelCodes<kBits>(a), ChannelCodes<kBits>(b), 16);
  }

  static I LoadWords(const uint8_t* a, const uint8_t*) {
    return {vreinterpretq_u32_u8(vld1q_u8(a)), vreinterpretq_u32_u8(vld1q_u8(a + 16))};
  }
  static V LoadBlocks(const float* a, const float*) { return Load(a); }
  static V LoadF16Blocks(const uint16_t* a, const uint16_t*) { return LoadF16(a); }
  static V LoadScaleBytes(const uint8_t* a, const uint8_t*) {
    uint16_t x[8];
    vst1q_u16(x, vshlq_n_u16(vmovl_u8(vld1_u8(a)), 6));
    return LoadF16(x);
  }
  static V LoadBytes(const uint8_t* p) {
    const uint16x8_t x = vmovl_u8(vld1_u8(p));
    return {vcvtq_f32_u32(vmovl_u16(vget_low_u16(x))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(x)))};
  }
  static V Lookup(const float* table, const uint8_t* p) {
    float x[8];
    for (int i = 0; i < 8; ++i) x[i] = table[p[i]];
    return Load(x);
  }
  static I SetInt(int32_t x) {
    const uint32x4_t u = vdupq_n_u32(static_cast<uint32_t>(x));
    return {u, u};
  }
  static I Fields(I words, uint32_t shift, uint32_t mask) {
    const int32x4_t right = vdupq_n_s32(-static_cast<int32_t>(shift));
    const uint32x4_t m = vdupq_n_u32(mask);
    return {vandq_u32(vshlq_u32(words.lo, right), m), vandq_u32(vshlq_u32(words.hi, right), m)};
  }
  static I Join(I a, I b, uint32_t shift) {
    const int32x4_t left = vdupq_n_s32(static_cast<int32_t>(shift));
    return {vorrq_u32(a.lo, vshlq_u32(b.lo, left)), vorrq_u32(a.hi, vshlq_u32(b.hi, left))};
  }
  static I BlockCounts(uint32_t a, uint32_t) { return SetInt(-static_cast<int32_t>(a)); }
  static I ShiftRight(I words, I counts) {  // counts come negative
    return {vshlq_u32(words.lo, vreinterpretq_s32_u32(counts.lo)),
            vshlq_u32(words.hi, vreinterpretq_s32_u32(counts.hi))};
  }
  struct Levels {
    uint8x16_t table;
    explicit Levels(const uint8_t* t) : table(vld1q_u8(t)) {}
    I operator()(I x) const { return {One(x.lo), One(x.hi)}; }
    uint32x4_t One(uint32x4_t x) const {
      return vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(x)));
    }
  };
  static I Dot8(I acc, I x, const int8_t* q) {
    const int8x16_t w = Broadcast8(q);
    return {Dot8(acc.lo, x.lo, w), Dot8(acc.hi, x.hi, w)};
  }
  static I Dot8Wide(I acc, I x,
                    const int8_t* q) {  // as bytes with sign: 2 times 0 ... 127, and a bit
    const I half = Fields(x, 1, 0x7F7F7F7F), bit = Fields(x, 0, 0x01010101);
    return Dot8(Dot8(Dot8(acc, half, q), half, q), bit, q);
  }
  static I Dot16(I acc, I x, const int16_t* w) {
    const int32_t a = w[0], b = w[1];
    return {Dot16(acc.lo, x.lo, a, b), Dot16(acc.hi, x.hi, a, b)};
  }
  static V ToFloat(I x) {
    return {vcvtq_f32_s32(vreinterpretq_s32_u32(x.lo)), vcvtq_f32_s32(vreinterpretq_s32_u32(x.hi))};
  }
  static void StoreInt8(int8_t* p, V v) { vst1_s8(p, vqmovn_s16(Int16(v))); }
  static void StoreInt16(int16_t* p, V v) { vst1q_s16(p, Int16(v)); }

  static void SegmentSums(const float* p, float* out) {
    for (int i = 0; i < 8; ++i) out[i] = Sum(Load(p + 8 * i));
  }

 protected:
  static int8x16_t Broadcast8(const int8_t* q) {
    int32_t x;
    std::memcpy(&x, q, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(x));
  }

 private:
  template <int kBits>
  static I ChannelCodes(const uint8_t* p) {
    uint32_t w = 0;
    std::memcpy(&w, p, kBits);
    const I shift = KeyShift(kBits, 0);
    return {ChannelCodes<kBits>(w, shift.lo), ChannelCodes<kBits>(w, shift.hi)};
  }
  template <int kBits>
  static uint32x4_t ChannelCodes(uint32_t word, uint32x4_t shift) {
    const uint32x4_t x = vshlq_u32(vdupq_n_u32(word), vnegq_s32(vreinterpretq_s32_u32(shift)));
    return vandq_u32(x, vdupq_n_u32((1u << kBits) - 1));
  }
  static uint32x4_t Dot8(uint32x4_t acc, uint32x4_t x, int8x16_t q) {
    const int8x16_t s = vreinterpretq_s8_u32(x);
    const int16x8_t low = vmull_s8(vget_low_s8(s), vget_low_s8(q)),
                    high = vmull_s8(vget_high_s8(s), vget_high_s8(q));
    const int32x4_t sum = vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
    return vaddq_u32(acc, vreinterpretq_u32_s32(sum));
  }
  static uint32x4_t Dot16(uint32x4_t acc, uint32x4_t x, int32_t a, int32_t b) {
    int32x4_t sum = vreinterpretq_s32_u32(acc);
    sum = vmlaq_n_s32(sum, vreinterpretq_s32_u32(vandq_u32(x, vdupq_n_u32(0xFFFF))), a);
    sum = vmlaq_n_s32(sum, vreinterpretq_s32_u32(vshrq_n_u32(x, 16)), b);
    return vreinterpretq_u32_s32(sum);
  }
  static int16x8_t Int16(V v) {
    return vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(v.lo)), vqmovn_s32(vcvtnq_s32_f32(v.hi)));
  }
  static float32x4_t TimesExp2(float32x4_t p, float32x4_t n) {
    const int32x4_t e = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
    return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(e, 23)));
  }
  template <int kBits>
  static float32x4_t Codes(uint32x4_t words, uint32x4_t shift) {
    const uint32x4_t x = vshlq_u32(words, vnegq_s32(vreinterpretq_s32_u32(shift)));
    return vcvtq_f32_u32(vandq_u32(x, vdupq_n_u32((1u << kBits) - 1)));
  }
};

}  // namespace qevict::kernels::internal
