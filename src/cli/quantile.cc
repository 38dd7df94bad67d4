#include "cli/quantile.h"

#include <algorithm>

namespace qevict::cli {

double Quantile(std::span<const double> sorted, double q) {
  if (sorted.empty()) return 0.0;
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(at);
  if (low + 1 >= sorted.size()) return sorted.back();
  const double rest = at - static_cast<double>(low);
  if (rest == 0.0) return sorted[low];
  return sorted[low] + rest * (sorted[low + 1] - sorted[low]);
}

double QuantileOf(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return Quantile(values, q);
}

}  // namespace qevict::cli
