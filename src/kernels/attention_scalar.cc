// The attention kernels for any CPU. This unit alone is compiled with the ISA's flags.
#include "kernels/attention_block-inl.h"
#include "kernels/attention_internal.h"
#include "kernels/attention_merge-inl.h"
#include "kernels/logits-inl.h"
#include "kernels/simd_scalar.h"

namespace qevict::kernels::internal {

const KernelTable kScalarTable = {AttendBlock<SimdScalar>, MergeBlock<SimdScalar>,
                                  SumExpRow<SimdScalar>, SumExpDifferenceRow<SimdScalar>,
                                  SimdScalar::kChannels};

}  // namespace qevict::kernels::internal
