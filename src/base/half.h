// fp16 and bf16 <-> fp32, bit exact with IEEE round-to-nearest-even (ggml stores its cache rows the
// same way).
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

namespace qevict {

/// 16-bit element types a full-precision row can have.
enum class Elem : uint8_t { kF16, kBF16 };

inline float F16ToF32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exp = (h >> 10) & 0x1Fu;
  const uint32_t man = h & 0x3FFu;
  if (exp == 0x1Fu) return std::bit_cast<float>(sign | 0x7F800000u | (man << 13));
  if (exp != 0) return std::bit_cast<float>(sign | ((exp + 112u) << 23) | (man << 13));
  const float magnitude = static_cast<float>(man) * 0x1p-24f;  // zero and subnormals, exact
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

inline uint16_t F32ToF16(float f) {
  const uint32_t x = std::bit_cast<uint32_t>(f);
  const uint32_t sign = (x >> 16) & 0x8000u;
  const uint32_t a = x & 0x7FFFFFFFu;
  if (a > 0x7F800000u)
    return static_cast<uint16_t>(sign | 0x7E00u | ((a >> 13) & 0x3FFu));  // NaN stays NaN
  if (a >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);     // overflow
  if (a < 0x38800000u) {                                                  // subnormal or zero
    const float scaled =
        std::bit_cast<float>(a) + 0.5f;  // aligns the 2^-24 grid with the mantissa: rounds to even
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(scaled) - 0x3F000000u));
  }
  const uint32_t rounded = a + 0xFFFu + ((a >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float BF16ToF32(uint16_t h) { return std::bit_cast<float>(static_cast<uint32_t>(h) << 16); }

inline uint16_t F32ToBF16(float f) {
  const uint32_t x = std::bit_cast<uint32_t>(f);
  if ((x & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((x >> 16) | 64u);
  return static_cast<uint16_t>((x + 0x7FFFu + ((x >> 16) & 1u)) >> 16);
}

inline float ToF32(uint16_t h, Elem e) { return e == Elem::kF16 ? F16ToF32(h) : BF16ToF32(h); }
inline uint16_t FromF32(float f, Elem e) { return e == Elem::kF16 ? F32ToF16(f) : F32ToBF16(f); }

}  // namespace qevict
