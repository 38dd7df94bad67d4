// Quantiles of measured values.
#pragma once

#include <span>
#include <vector>

namespace qevict::cli {

/// Quantile of sorted values with linear interpolation, q in [0, 1]. 0 of an empty list.
double Quantile(std::span<const double> sorted, double q);
/// Quantile of values in any order; 0 if there are none.
double QuantileOf(std::vector<double> values, double q);

}  // namespace qevict::cli
