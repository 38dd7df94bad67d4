#include <immintrin.h>

#include "cache/convert.h"

namespace qevict::internal {

void F32ToF16Avx2(const float* from, size_t n, uint16_t* to) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half =
        _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
  }
  for (; i < n; ++i) to[i] = F32ToF16(from[i]);
}

void F16ToF32Avx2(const uint16_t* from, size_t n, float* to) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(half));
  }
  for (; i < n; ++i) to[i] = F16ToF32(from[i]);
}

}  // namespace qevict::internal
