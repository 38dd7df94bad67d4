// AVX-512 (F, BW, DQ, VL) traits: 16 lanes. See simd_scalar.h for the meaning of each operation.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qevict::kernels::internal {

struct SimdAvx512 {
  static constexpr uint32_t kLanes = 16;
  static constexpr uint32_t kChannels = 2;
  static constexpr uint32_t kRegisters = 32;
  static constexpr bool kScalesToZero = true;
  using V = __m512;
  using I = __m512i;

  static V Zero() { return _mm512_setzero_ps(); }
  static V Set1(float x) { return _mm512_set1_ps(x); }
  static V Load(const float* p) { return _mm512_loadu_ps(p); }
  static V InRegister(V v) {
    asm("" : "+v"(v));
    return v;
  }
  static void Store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V Add(V a, V b) { return _mm512_add_ps(a, b); }
  static V Sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V Div(V a, V b) { return _mm512_div_ps(a, b); }
  static V Max(V a, V b) { return _mm512_max_ps(a, b); }
  static V Fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
  static V Fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }
  static V Abs(V a) { return _mm512_abs_ps(a); }
  static V CopySign(V magnitude, V sign) {
    const __m512 mask = _mm512_set1_ps(-0.0f);
    return _mm512_or_ps(_mm512_andnot_ps(mask, magnitude), _mm512_and_ps(mask, sign));
  }
  static V Round(V a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static V TimesExp2(V p, V n) { return _mm512_scalef_ps(p, n); }
  static float Sum(V a) { return _mm512_reduce_add_ps(a); }
  static float MaxOf(V a) { return _mm512_reduce_max_ps(a); }
  static bool AnyAbove(V a, float b) { return _mm512_cmp_ps_mask(a, Set1(b), _CMP_GT_OQ) != 0; }
  static V IfBits(uint32_t bits, V a, V b) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), b, a);
  }
  static V IfLess(V x, V y, V a, V b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
  }

  static V LoadF16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static V LoadBf16(const uint16_t* p) {
    const __m512i x =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
  }
  static V LoadF16Half(const uint16_t* p) {
    const __m256i x = _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(x);
  }
  static V LoadBf16Half(const uint16_t* p) {
    const __m256i x = _mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
  }

  static V Channels(const float* p) {
    return _mm512_castpd_ps(_mm512_set1_pd(*reinterpret_cast<const double_alias*>(p)));
  }
  static void FoldBlocks(V v, float* dst) {
    _mm256_storeu_ps(dst, _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
  }
  static void StoreBlocks(V v, float* c0, float* c1) {
    _mm256_storeu_ps(c0, _mm512_castps512_ps256(v));
    _mm256_storeu_ps(c1, _mm512_extractf32x8_ps(v, 1));
  }
  static V PairsToBlocks(V v) {
    const __m512i order = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutexvar_ps(order, v);
  }
  static void Deinterleave(V a, V b, V& even, V& odd) {
    const __m512i e = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i o = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    even = _mm512_permutex2var_ps(a, e, b);
    odd = _mm512_permutex2var_ps(a, o, b);
  }

  static I KeyShift(uint32_t bits, uint32_t first) {
    const __m512i token = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return _mm512_add_epi32(_mm512_mullo_epi32(token, _mm512_set1_epi32(static_cast<int>(bits))),
                            _mm512_set1_epi32(static_cast<int>(first)));
  }
  static I KeyWords(const uint8_t* c0, const uint8_t* c1) {
    const uint64_t lo = *reinterpret_cast<const u32_alias*>(c0);
    const uint64_t hi = *reinterpret_cast<const u32_alias*>(c1);
    return _mm512_set1_epi64(static_cast<int64_t>(lo | (hi << 32)));
  }
  /// Codes of the lanes after a shift; higher bits are ignored.
  template <int kBits>
  static V Codes(I words, I shift) {
    const __m512i x = _mm512_srlv_epi32(words, shift);
    if constexpr (kBits == 2) {
      return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_set_ps(3, 2, 1, 0)), x);
    } else {
      const __m512 levels = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
      return _mm512_permutexvar_ps(x, levels);
    }
  }

  template <int kBits, bool kHalves>
  struct PairCodes {
    // 2 bits: a channel is 16 bits, 4 bits: 32 bits. Lanes are (token, channel), so adjacent
    // channels of 4 bits, and every other channel of 2 bits, are the two halves of a broadcast
    // 64-bit word.
    const __m512i shift = KeyShift(kBits, 0);
    const __m512i shift_next =
        _mm512_add_epi32(shift, _mm512_set1_epi64(int64_t{16} << 32));  // adjacent, 2 bits
    const __m512i shift_partner =
        _mm512_add_epi32(shift, _mm512_set1_epi32(16));  // interleaved, 2 bits

    void Load(const uint8_t* p, size_t to_second, V& a, V& b) const {
      if constexpr (kHalves) {
        a = LoadOne(p);
        b = LoadOne(p + to_second);
      } else if constexpr (kBits == 2) {
        const __m512i x = _mm512_set1_epi64(*reinterpret_cast<const i64_alias*>(p));
        a = Codes<2>(x, shift);
        b = Codes<2>(x, shift_partner);
      } else {
        const __m512i x =
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        a = Codes<4>(_mm512_shuffle_epi32(x, static_cast<_MM_PERM_ENUM>(0x88)), shift);
        b = Codes<4>(_mm512_shuffle_epi32(x, static_cast<_MM_PERM_ENUM>(0xDD)), shift);
      }
    }
    V LoadOne(const uint8_t* p) const {
      if constexpr (kBits == 2) {
        return Codes<2>(_mm512_set1_epi32(static_cast<int>(*reinterpret_cast<const u32_alias*>(p))),
                        shift_next);
      } else {
        return Codes<4>(_mm512_set1_epi64(*reinterpret_cast<const i64_alias*>(p)), shift);
      }
    }
  };

  template <int kBits>
  struct ValueGrid {
    __m512 levels;
    ValueGrid(float scale, float zero) {
      const __m512 codes =
          kBits == 2 ? _mm512_broadcast_f32x4(_mm_set_ps(3, 2, 1, 0))
                     : _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
      levels = _mm512_fmadd_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(zero));
    }
    /// 16 values whose codes begin at p. Reads 4 (2 bits) or 8 (4 bits) bytes.
    V Load(const uint8_t* p) const {
      const __m512i x = ChannelWords<kBits>(p);
      if constexpr (kBits == 2) {
        const __m512i shift =
            _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        return _mm512_permutevar_ps(levels, _mm512_srlv_epi32(x, shift));
      } else {
        const __m512i shift =
            _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(x, shift), levels);
      }
    }
  };

  template <int kBits>
  static I CodePairs(const uint8_t* a, const uint8_t* b) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i shift = kBits == 2
                              ? _mm512_slli_epi32(lane, 1)
                              : _mm512_and_epi32(_mm512_slli_epi32(lane, 2), _mm512_set1_epi32(31));
    const __m512i x = _mm512_srlv_epi32(ChannelWords<kBits>(a), shift);
    const __m512i y =
        _mm512_rorv_epi32(ChannelWords<kBits>(b), _mm512_xor_epi32(shift, _mm512_set1_epi32(16)));
    const __m512i both = _mm512_ternarylogic_epi32(_mm512_set1_epi32(0xFFFF), x, y, 0xCA);
    return _mm512_and_epi32(both, _mm512_set1_epi32(((1 << kBits) - 1) * 0x00010001));
  }

  static I LoadWords(const uint8_t* a, const uint8_t* b) {
    return _mm512_inserti64x4(
        _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a))),
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)), 1);
  }
  static V LoadBlocks(const float* a, const float* b) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(a)), _mm256_loadu_ps(b), 1);
  }
  static V LoadF16Blocks(const uint16_t* a, const uint16_t* b) {
    return _mm512_cvtph_ps(_mm256_inserti128_si256(
        _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a))),
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)), 1));
  }
  static V LoadScaleBytes(const uint8_t* a, const uint8_t* b) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)),
                  y = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b));
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_unpacklo_epi64(x, y));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 6));
  }
  static V LoadBytes(const uint8_t* p) { return _mm512_cvtepi32_ps(Bytes(p)); }
  static V Lookup(const float* table, const uint8_t* p) {
    return _mm512_permutexvar_ps(Bytes(p), Load(table));
  }
  static I SetInt(int32_t x) { return _mm512_set1_epi32(x); }
  static I Fields(I words, uint32_t shift, uint32_t mask) {
    return _mm512_and_epi32(_mm512_srlv_epi32(words, _mm512_set1_epi32(static_cast<int>(shift))),
                            _mm512_set1_epi32(static_cast<int>(mask)));
  }
  static I Join(I a, I b, uint32_t shift) {
    return _mm512_or_epi32(a, _mm512_sllv_epi32(b, _mm512_set1_epi32(static_cast<int>(shift))));
  }
  static I BlockCounts(uint32_t a, uint32_t b) {
    return _mm512_mask_set1_epi32(SetInt(static_cast<int32_t>(a)), 0xFF00, static_cast<int>(b));
  }
  static I ShiftRight(I words, I counts) { return _mm512_srlv_epi32(words, counts); }
  struct Levels {
    __m512i table;
    explicit Levels(const uint8_t* t)
        : table(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t)))) {}
    I operator()(I x) const { return _mm512_shuffle_epi8(table, x); }
  };
  static I Dot8(I acc, I x, const int8_t* q) {
    const __m512i pairs = _mm512_maddubs_epi16(x, Broadcast(q));  // at most 2 * 126 * 127
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  static I Dot8Wide(I acc, I x, const int8_t* q) {  // two dot products: 16-bit sums would saturate
    const __m512i low = _mm512_and_si512(x, _mm512_set1_epi8(15));
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
    acc = Dot8(acc, low, q);
    const __m512i pairs = _mm512_maddubs_epi16(high, Broadcast(q));
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(16)));
  }
  static I Dot16(I acc, I x, const int16_t* w) {
    return _mm512_add_epi32(acc, _mm512_madd_epi16(x, Broadcast(w)));
  }
  static V ToFloat(I x) { return _mm512_cvtepi32_ps(x); }
  static void StoreInt8(int8_t* p, V v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
  }
  static void StoreInt16(int16_t* p, V v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v)));
  }

  /// Sums of 8 consecutive floats each: p[64] -> out[8].
  static void SegmentSums(const float* p, float* out) {
    const V t01 = HalfSums(Load(p), Load(p + 16)), t23 = HalfSums(Load(p + 32), Load(p + 48));
    const V r = HalfSums(t01, t23);  // in each 128 bits: sums of 4 of vectors 0, 2, 1, 3
    const __m512 other = _mm512_shuffle_f32x4(r, r, _MM_SHUFFLE(2, 3, 0, 1));
    const __m512 sums =
        _mm512_add_ps(r, other);  // lanes 0-3: first 8 of the four vectors, lanes 8-11: second 8
    const __m512i order = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 11, 3, 9, 1, 10, 2, 8, 0);
    _mm256_storeu_ps(out, _mm512_castps512_ps256(_mm512_permutexvar_ps(order, sums)));
  }

 protected:
  using u32_alias [[gnu::may_alias, gnu::aligned(1)]] = uint32_t;
  static I Broadcast(const void* p) {
    return _mm512_set1_epi32(static_cast<int>(*static_cast<const u32_alias*>(p)));
  }

 private:
  using double_alias [[gnu::may_alias, gnu::aligned(4)]] = double;
  using i64_alias [[gnu::may_alias, gnu::aligned(1)]] = int64_t;
  /// Per lane the word that holds its channel's code: 16 channels from p on.
  template <int kBits>
  static I ChannelWords(const uint8_t* p) {
    const __m512i low = Broadcast(p);
    if constexpr (kBits == 2) return low;
    return _mm512_mask_set1_epi32(low, 0xFF00,
                                  static_cast<int>(*reinterpret_cast<const u32_alias*>(p + 4)));
  }
  static __m512i Bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static V HalfSums(V a, V b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
};

}  // namespace qevict::kernels::internal
