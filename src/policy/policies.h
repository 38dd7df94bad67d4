// The list of policies; each is defined in a file of its own.
#pragma once

#include "qevict/policy.h"

namespace qevict {

extern const Policy kFullPolicy, kStreamingPolicy, kPackPolicy, kQEvictPolicy, kSnapKvPolicy,
    kAdaKvPolicy, kLadderPolicy;

inline constexpr const Policy* kPolicies[] = {&kFullPolicy,   &kStreamingPolicy, &kPackPolicy,
                                              &kQEvictPolicy, &kSnapKvPolicy,    &kAdaKvPolicy,
                                              &kLadderPolicy};

}  // namespace qevict
