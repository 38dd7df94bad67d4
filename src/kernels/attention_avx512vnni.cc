// The attention kernels for AVX-512 with VNNI. This unit alone is compiled with the ISA's flags.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC bug 105593: its own intrinsics
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include "kernels/attention_block-inl.h"
#include "kernels/attention_internal.h"
#include "kernels/attention_merge-inl.h"
#include "kernels/logits-inl.h"
#include "kernels/simd_avx512vnni.h"

namespace qevict::kernels::internal {

const KernelTable kAvx512VnniTable = {
    AttendBlock<SimdAvx512Vnni>, MergeBlock<SimdAvx512Vnni>, SumExpRow<SimdAvx512Vnni>,
    SumExpDifferenceRow<SimdAvx512Vnni>, SimdAvx512Vnni::kChannels};

}  // namespace qevict::kernels::internal
