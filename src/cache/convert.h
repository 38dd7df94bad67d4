// Rows between f32 and their 16-bit type, bit exact with base/half.h on every path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/half.h"

namespace qevict {

void ConvertTo16(const float* from, size_t n, Elem elem, uint16_t* to);
void ConvertTo32(const uint16_t* from, size_t n, Elem elem, float* to);

namespace internal {
/// F16C; in convert_avx2.cc. Called only where the active ISA has it.
void F32ToF16Avx2(const float* from, size_t n, uint16_t* to);
void F16ToF32Avx2(const uint16_t* from, size_t n, float* to);
}  // namespace internal

}  // namespace qevict
