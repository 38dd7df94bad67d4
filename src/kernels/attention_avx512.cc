// The attention kernels for AVX-512. This unit alone is compiled with the ISA's flags.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC bug 105593: its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "kernels/attention_block-inl.h"
#include "kernels/attention_internal.h"
#include "kernels/attention_merge-inl.h"
#include "kernels/logits-inl.h"
#include "kernels/simd_avx512.h"

namespace qevict::kernels::internal {

const KernelTable kAvx512Table = {AttendBlock<SimdAvx512>, MergeBlock<SimdAvx512>,
                                  SumExpRow<SimdAvx512>, SumExpDifferenceRow<SimdAvx512>,
                                  SimdAvx512::kChannels};

}  // namespace qevict::kernels::internal
