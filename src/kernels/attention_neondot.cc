// The attention kernels for NEON with dot products. This unit alone is compiled with the ISA's
// flags.
#include "kernels/attention_block-inl.h"
#include "kernels/attention_internal.h"
#include "kernels/attention_merge-inl.h"
#include "kernels/logits-inl.h"
#include "kernels/simd_neondot.h"

namespace qevict::kernels::internal {

const KernelTable kNeonDotTable = {AttendBlock<SimdNeonDot>, MergeBlock<SimdNeonDot>,
                                   SumExpRow<SimdNeonDot>, SumExpDifferenceRow<SimdNeonDot>,
                                   SimdNeonDot::kChannels};

}  // namespace qevict::kernels::internal
