// AVX-512 with VNNI: dot products of token codes in one instruction. All else is AVX-512's.
#pragma once

#include "kernels/simd_avx512.h"

namespace qevict::kernels::internal {

struct SimdAvx512Vnni : SimdAvx512 {
  static I Dot8(I acc, I x, const int8_t* q) { return _mm512_dpbusd_epi32(acc, x, Broadcast(q)); }
  static I Dot8Wide(I acc, I x, const int8_t* q) { return Dot8(acc, x, q); }
  static I Dot16(I acc, I x, const int16_t* w) { return _mm512_dpwssd_epi32(acc, x, Broadcast(w)); }
};

}  // namespace qevict::kernels::internal
