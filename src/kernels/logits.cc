#include "kernels/logits.h"

#include "kernels/attention_internal.h"

namespace qevict::kernels {

double SumExp(std::span<const float> x, float top) {
  return internal::ActiveTable().sum_exp(x.data(), x.size(), top);
}

double SumExpDifference(std::span<const float> p, std::span<const float> q, float top) {
  return internal::ActiveTable().sum_exp_difference(p.data(), q.data(), p.size(), top);
}

}  // namespace qevict::kernels
