// NEON with the dot product instructions of ARMv8.2. All else is NEON's.
#pragma once

#include "kernels/simd_neon.h"

namespace qevict::kernels::internal {

struct SimdNeonDot : SimdNeon {
  static I Dot8(I acc, I x, const int8_t* q) {
    const int8x16_t w = Broadcast8(q);
    return {One(acc.lo, x.lo, w), One(acc.hi, x.hi, w)};
  }

 private:
  static uint32x4_t One(uint32x4_t acc, uint32x4_t x, int8x16_t q) {
    return vreinterpretq_u32_s32(vdotq_s32(vreinterpretq_s32_u32(acc), vreinterpretq_s8_u32(x), q));
  }
};

}  // namespace qevict::kernels::internal
