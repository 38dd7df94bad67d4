// The attention kernels for NEON. This unit alone is compiled with the ISA's flags.
#include "kernels/attention_block-inl.h"
#include "kernels/attention_internal.h"
#include "kernels/attention_merge-inl.h"
#include "kernels/logits-inl.h"
#include "kernels/simd_neon.h"

namespace qevict::kernels::internal {

const KernelTable kNeonTable = {AttendBlock<SimdNeon>, MergeBlock<SimdNeon>, SumExpRow<SimdNeon>,
                                SumExpDifferenceRow<SimdNeon>, SimdNeon::kChannels};

}  // namespace qevict::kernels::internal
