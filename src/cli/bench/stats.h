// What `qevict bench` computes without a model: lists, names of tests, statistics of repetitions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "qevict/status.h"

namespace qevict::cli {

/// The integers of "512,1024". Errors: kInvalidArgument that names option, value and limits.
Result<std::vector<uint32_t>> ParseCounts(const std::string& option, const std::string& text,
                                          uint32_t low, uint32_t high);

/// One of llama-bench's tests: `n_prompt` tokens read in batches or `n_gen` tokens one by one (the
/// other is 0), behind `depth` tokens.
struct ModelTest {
  uint32_t n_prompt = 0, n_gen = 0, depth = 0;
  uint32_t n_tokens() const { return n_prompt + n_gen; }
  /// llama-bench's name: "pp512", "tg32 @ d4096".
  std::string Name() const;
};
/// Tests behind one depth; counts of 0 mean that there is none of the kind, as in llama-bench.
std::vector<ModelTest> TestsAt(uint32_t depth, std::span<const uint32_t> prompts,
                               std::span<const uint32_t> generations);

double Mean(std::span<const double> values);

/// Median with a confidence interval from order statistics (the sign test turned around): it takes
/// no distribution for granted and is exact for any number of repetitions. Fewer than 6 values
/// cannot reach 95%: then the interval is the range, and `coverage_percent` says what it is worth.
struct MedianInterval {
  double median = 0, low = 0, high = 0;
  double coverage_percent = 0;
};
MedianInterval IntervalOfMedian(std::vector<double> values, double wanted_percent = 95.0);

/// a[i] / b[i]: how many times as fast b is as a, if both are times.
std::vector<double> Ratios(std::span<const double> a, std::span<const double> b);

}  // namespace qevict::cli
