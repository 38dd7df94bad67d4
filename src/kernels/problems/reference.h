// Attention in double precision over the same storage, one number at a time: what tests and benches
// compare with.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.h"

namespace qevict::kernels {

struct ReferenceResult {
  std::vector<double> out;         ///< [row][head][Dv]
  std::vector<double> mass;        ///< [kv head or query head][window], what masses of 0 become
  std::vector<double> token_mass;  ///< [kv head][window * W + token]
  std::vector<double> sink;        ///< [row][head] probability of the sink
  /// [row][head] largest sum of |q_c k_c| * scale over the seen tokens, plus |bias|: scale of a
  /// logit's rounding error.
  std::vector<double> magnitude;
};

ReferenceResult AttendReference(const AttentionGroup& group);

/// Key (rotated if packed) and value of one token of one kv head.
void ReferenceKey(const AttentionShape& shape, const WindowRef& window, uint32_t kv_head,
                  uint32_t token, double* key);
void ReferenceValue(const AttentionShape& shape, const WindowRef& window, uint32_t kv_head,
                    uint32_t token, double* value);

}  // namespace qevict::kernels
