// The policies that src/policy defines, one file each; policies.cc lists them.
#pragma once

#include "qevict/policy.h"

namespace qevict {

extern const Policy kFullPolicy, kStreamingPolicy, kPackPolicy, kQEvictPolicy, kSnapKvPolicy,
    kAdaKvPolicy, kLadderPolicy;

}  // namespace qevict
