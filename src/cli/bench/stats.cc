#include "cli/bench/stats.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cli/cache_choice.h"
#include "cli/options.h"
#include "cli/quantile.h"

namespace qevict::cli {

Result<std::vector<uint32_t>> ParseCounts(const std::string& option, const std::string& text,
                                          uint32_t low, uint32_t high) {
  std::vector<uint32_t> counts;
  for (const std::string& item : SplitList(text)) {
    int64_t value = 0;
    if (!ParseInteger(item, value) || value < low || value > high) {
      return InvalidArgument(option + " " + text + " is not legal: expected integers from " +
                             std::to_string(low) + " to " + std::to_string(high) +
                             ", separated by commas");
    }
    counts.push_back(static_cast<uint32_t>(value));
  }
  return counts;
}

std::string ModelTest::Name() const {
  const std::string what =
      n_prompt ? "pp" + std::to_string(n_prompt) : "tg" + std::to_string(n_gen);
  return depth ? what + " @ d" + std::to_string(depth) : what;
}

std::vector<ModelTest> TestsAt(uint32_t depth, std::span<const uint32_t> prompts,
                               std::span<const uint32_t> generations) {
  std::vector<ModelTest> tests;
  for (const uint32_t n : prompts) {
    if (n) tests.push_back({n, 0, depth});
  }
  for (const uint32_t n : generations) {
    if (n) tests.push_back({0, n, depth});
  }
  return tests;
}

double Mean(std::span<const double> values) {
  if (values.empty()) return 0.0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

MedianInterval IntervalOfMedian(std::vector<double> values, double wanted_percent) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  // The median lies outside of the k-th smallest to the k-th largest value exactly if fewer than k
  // of n fair coins fall on one side; `tail` is the probability of that on one side.
  double term = std::pow(0.5, static_cast<double>(n)), tail = term;
  MedianInterval interval{Quantile(values, 0.5), values.front(), values.back(),
                          std::max(0.0, 100.0 * (1.0 - 2.0 * tail))};
  for (size_t k = 2; 2 * k <= n; ++k) {
    term *= static_cast<double>(n - k + 2) / static_cast<double>(k - 1);
    tail += term;
    const double coverage = 100.0 * (1.0 - 2.0 * tail);
    if (coverage < wanted_percent) break;
    interval.low = values[k - 1];
    interval.high = values[n - k];
    interval.coverage_percent = coverage;
  }
  return interval;
}

std::vector<double> Ratios(std::span<const double> a, std::span<const double> b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) ratios.push_back(a[i] / b[i]);
  return ratios;
}

}  // namespace qevict::cli
