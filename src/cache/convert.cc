#include "cache/convert.h"

#include "kernels/attention.h"

namespace qevict {
namespace {

bool UsesF16c() {
#ifdef QEVICT_HAVE_AVX2
  return kernels::ActiveIsa() != kernels::Isa::kScalar;
#else
  return false;
#endif
}

/// F32ToF16 without branches, so that compilers turn the loop into vectors. Same results.
inline uint16_t ToF16Bits(uint32_t x) {
  const uint32_t sign = (x >> 16) & 0x8000u;
  const uint32_t a = x & 0x7FFFFFFFu;
  const uint32_t normal = (a + 0xFFFu + ((a >> 13) & 1u) - 0x38000000u) >> 13;
  const float scaled = std::bit_cast<float>(a < 0x38800000u ? a : 0u) + 0.5f;
  const uint32_t small = std::bit_cast<uint32_t>(scaled) - 0x3F000000u;
  const uint32_t nan = 0x7E00u | ((a >> 13) & 0x3FFu);
  uint32_t h = a < 0x38800000u ? small : normal;
  h = a >= 0x477FF000u ? 0x7C00u : h;
  h = a > 0x7F800000u ? nan : h;
  return static_cast<uint16_t>(sign | h);
}

}  // namespace

void ConvertTo16(const float* from, size_t n, Elem elem, uint16_t* to) {
  if (elem == Elem::kBF16) {
    for (size_t i = 0; i < n; ++i) to[i] = F32ToBF16(from[i]);
    return;
  }
#ifdef QEVICT_HAVE_AVX2
  if (UsesF16c()) return internal::F32ToF16Avx2(from, n, to);
#endif
  for (size_t i = 0; i < n; ++i) to[i] = ToF16Bits(std::bit_cast<uint32_t>(from[i]));
}

void ConvertTo32(const uint16_t* from, size_t n, Elem elem, float* to) {
  if (elem == Elem::kBF16) {
    for (size_t i = 0; i < n; ++i) to[i] = BF16ToF32(from[i]);
    return;
  }
#ifdef QEVICT_HAVE_AVX2
  if (UsesF16c()) return internal::F16ToF32Avx2(from, n, to);
#endif
  for (size_t i = 0; i < n; ++i) to[i] = F16ToF32(from[i]);
}

}  // namespace qevict
