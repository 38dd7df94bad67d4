// Sums over rows of logits, for the comparison of distributions over a vocabulary. Exponentials are
// fp32 with a relative error below 2e-7, sums of more than a few hundred are double. Any thread.
#pragma once

#include <span>

namespace qevict::kernels {

/// sum_i exp(x_i - top). `top` is the largest of x and finite; NaN in x gives NaN.
double SumExp(std::span<const float> x, float top);

/// sum_i exp(p_i - top) (p_i - q_i): with S = SumExp(p, top), the cross part of KL(p || q), which
/// is this / S - log S - top + log(sum exp(q)). Sizes are equal, `top` the largest of p and finite.
/// Where exp(p_i - top) is 0, q_i does not matter; elsewhere q_i = -inf gives +inf.
double SumExpDifference(std::span<const float> p, std::span<const float> q, float top);

}  // namespace qevict::kernels
