// The attention kernels for AVX2. This unit alone is compiled with the ISA's flags.
#include "kernels/attention_block-inl.h"
#include "kernels/attention_internal.h"
#include "kernels/attention_merge-inl.h"
#include "kernels/logits-inl.h"
#include "kernels/simd_avx2.h"

namespace qevict::kernels::internal {

const KernelTable kAvx2Table = {AttendBlock<SimdAvx2>, MergeBlock<SimdAvx2>, SumExpRow<SimdAvx2>,
                                SumExpDifferenceRow<SimdAvx2>, SimdAvx2::kChannels};

}  // namespace qevict::kernels::internal
