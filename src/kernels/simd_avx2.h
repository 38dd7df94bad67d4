// AVX2 + FMA + F16C traits: 8 lanes. See simd_scalar.h for the meaning of each operation.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qevict::kernels::internal {

struct SimdAvx2 {
  static constexpr uint32_t kLanes = 8;
  static constexpr uint32_t kChannels = 1;
  static constexpr uint32_t kRegisters = 16;
  static constexpr bool kScalesToZero = false;
  using V = __m256;
  using I = __m256i;

  static V Zero() { return _mm256_setzero_ps(); }
  static V Set1(float x) { return _mm256_set1_ps(x); }
  static V Load(const float* p) { return _mm256_loadu_ps(p); }
  static V InRegister(V v) {
    asm("" : "+v"(v));
    return v;
  }
  static void Store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static V Add(V a, V b) { return _mm256_add_ps(a, b); }
  static V Sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V Mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V Div(V a, V b) { return _mm256_div_ps(a, b); }
  static V Max(V a, V b) { return _mm256_max_ps(a, b); }
  static V Fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V Fnma(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }
  static V Abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static V CopySign(V magnitude, V sign) {
    const __m256 mask = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(mask, magnitude), _mm256_and_ps(mask, sign));
  }
  static V Round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  static V TimesExp2(V p, V n) {
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
  }
  static float Sum(V a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  static float MaxOf(V a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  static bool AnyAbove(V a, float b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, Set1(b), _CMP_GT_OQ)) != 0;
  }
  static V IfBits(uint32_t bits, V a, V b) {
    const __m256i lane = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane)));
  }
  static V IfLess(V x, V y, V a, V b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
  }

  static V LoadF16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static V LoadBf16(const uint16_t* p) {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
  }
  // Never needed: rows are multiples of 8.
  static V LoadF16Half(const uint16_t* p) { return LoadF16(p); }
  static V LoadBf16Half(const uint16_t* p) { return LoadBf16(p); }

  static V Channels(const float* p) { return _mm256_broadcast_ss(p); }
  static void FoldBlocks(V v, float* dst) { _mm256_storeu_ps(dst, v); }
  static void StoreBlocks(V v, float* c0, float*) { _mm256_storeu_ps(c0, v); }
  static V PairsToBlocks(V v) { return v; }
  static void Deinterleave(V a, V b, V& even, V& odd) {
    const __m256 lo = _mm256_permute2f128_ps(a, b, 0x20), hi = _mm256_permute2f128_ps(a, b, 0x31);
    even = _mm256_shuffle_ps(lo, hi, _MM_SHUFFLE(2, 0, 2, 0));
    odd = _mm256_shuffle_ps(lo, hi, _MM_SHUFFLE(3, 1, 3, 1));
  }

  static I KeyShift(uint32_t bits, uint32_t first) {
    const __m256i token = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return _mm256_add_epi32(_mm256_mullo_epi32(token, _mm256_set1_epi32(static_cast<int>(bits))),
                            _mm256_set1_epi32(static_cast<int>(first)));
  }
  static I KeyWords(const uint8_t* c0, const uint8_t*) {
    return _mm256_set1_epi32(static_cast<int>(*reinterpret_cast<const u32_alias*>(c0)));
  }
  template <int kBits>
  static V Codes(I words, I shift) {
    const __m256i x = _mm256_srlv_epi32(words, shift);
    if constexpr (kBits == 2) {
      return _mm256_permutevar_ps(CodeLevels(), x);
    } else {
      return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(15)));
    }
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
    __m256 a, b;  // 2 bits: the four levels; 4 bits: scale and zero
    ValueGrid(float scale, float zero) : a(_mm256_set1_ps(scale)), b(_mm256_set1_ps(zero)) {
      if constexpr (kBits == 2) a = _mm256_fmadd_ps(CodeLevels(), a, b);
    }
    V Load(const uint8_t* p) const {
      if constexpr (kBits == 2) {
        const __m256i x = _mm256_set1_epi32(*reinterpret_cast<const u16_alias*>(p));
        return _mm256_permutevar_ps(
            a, _mm256_srlv_epi32(x, _mm256_set_epi32(14, 12, 10, 8, 6, 4, 2, 0)));
      } else {
        const __m256i x =
            _mm256_set1_epi32(static_cast<int>(*reinterpret_cast<const u32_alias*>(p)));
        const __m256i code = _mm256_srlv_epi32(x, _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0));
        return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(code, _mm256_set1_epi32(15))), a,
                               b);
      }
    }
  };

  template <int kBits>
  static I CodePairs(const uint8_t* a, const uint8_t* b) {
    if constexpr (kBits == 2) {
      const uint32_t x = *reinterpret_cast<const u16_alias*>(a),
                     y = *reinterpret_cast<const u16_alias*>(b);
      const __m256i codes =
          _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(x | y << 16)), KeyShift(2, 0));
      return _mm256_and_si256(codes, _mm256_set1_epi32(0x00030003));
    } else {
      const __m256i mask = _mm256_set1_epi32(15), shift = KeyShift(4, 0);
      const __m256i x = _mm256_and_si256(_mm256_srlv_epi32(Broadcast(a), shift), mask),
                    y = _mm256_and_si256(_mm256_srlv_epi32(Broadcast(b), shift), mask);
      return _mm256_or_si256(x, _mm256_slli_epi32(y, 16));
    }
  }

  static I LoadWords(const uint8_t* a, const uint8_t*) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  }
  static V LoadBlocks(const float* a, const float*) { return Load(a); }
  static V LoadF16Blocks(const uint16_t* a, const uint16_t*) { return LoadF16(a); }
  static V LoadScaleBytes(const uint8_t* a, const uint8_t*) {
    const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)));
    return _mm256_cvtph_ps(_mm_slli_epi16(x, 6));
  }
  static V LoadBytes(const uint8_t* p) { return _mm256_cvtepi32_ps(Bytes(p)); }
  static V Lookup(const float* table, const uint8_t* p) {
    const __m256i index = Bytes(p);
    const __m256 low = _mm256_permutevar8x32_ps(Load(table), index),
                 high = _mm256_permutevar8x32_ps(Load(table + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
  static I SetInt(int32_t x) { return _mm256_set1_epi32(x); }
  static I Fields(I words, uint32_t shift, uint32_t mask) {
    return _mm256_and_si256(_mm256_srlv_epi32(words, _mm256_set1_epi32(static_cast<int>(shift))),
                            _mm256_set1_epi32(static_cast<int>(mask)));
  }
  static I Join(I a, I b, uint32_t shift) {
    return _mm256_or_si256(a, _mm256_sllv_epi32(b, _mm256_set1_epi32(static_cast<int>(shift))));
  }
  static I BlockCounts(uint32_t a, uint32_t) { return SetInt(static_cast<int32_t>(a)); }
  static I ShiftRight(I words, I counts) { return _mm256_srlv_epi32(words, counts); }
  struct Levels {
    __m256i table;
    explicit Levels(const uint8_t* t)
        : table(_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t)))) {
    }
    I operator()(I x) const { return _mm256_shuffle_epi8(table, x); }
  };
  static I Dot8(I acc, I x, const int8_t* q) {
    const __m256i pairs = _mm256_maddubs_epi16(x, Broadcast(q));  // at most 2 * 126 * 127
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static I Dot8Wide(I acc, I x, const int8_t* q) {  // two dot products: 16-bit sums would saturate
    const __m256i low = _mm256_and_si256(x, _mm256_set1_epi8(15));
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15));
    acc = Dot8(acc, low, q);
    const __m256i pairs = _mm256_maddubs_epi16(high, Broadcast(q));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(16)));
  }
  static I Dot16(I acc, I x, const int16_t* w) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(x, Broadcast(w)));
  }
  static V ToFloat(I x) { return _mm256_cvtepi32_ps(x); }
  static void StoreInt8(int8_t* p, V v) {
    const __m128i x = Int16(v);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(x, x));
  }
  static void StoreInt16(int16_t* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), Int16(v));
  }

  static void SegmentSums(const float* p, float* out) {
    for (int i = 0; i < 2; ++i, p += 32, out += 4) {
      const __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(Load(p), Load(p + 8)),
                                      _mm256_hadd_ps(Load(p + 16), Load(p + 24)));
      _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
    }
  }

 private:
  using u16_alias [[gnu::may_alias, gnu::aligned(1)]] = uint16_t;
  using u32_alias [[gnu::may_alias, gnu::aligned(1)]] = uint32_t;
  static I Broadcast(const void* p) {
    return _mm256_set1_epi32(static_cast<int>(*static_cast<const u32_alias*>(p)));
  }
  static __m256i Bytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  static __m128i Int16(V v) {
    const __m256i x = _mm256_cvtps_epi32(v);
    return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  static V CodeLevels() { return _mm256_set_ps(3, 2, 1, 0, 3, 2, 1, 0); }
};

}  // namespace qevict::kernels::internal
