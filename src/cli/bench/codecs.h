// Timing of packed formats: attention of one token over windows that the real codecs wrote.
#pragma once

#include <string>
#include <vector>

#include "cli/bench/attention.h"
#include "cli/cache_choice.h"

namespace qevict::cli {

struct CodecBenchPlan {
  HeadShape shape;
  uint32_t n_tokens = 16384, n_layers = 4, n_repetitions = 20;
  std::vector<CacheChoice> caches;  ///< codec, bits and window count
  int n_threads = 1;
};

/// One format, or full precision (no config).
struct CodecRow {
  std::string name;
  size_t layer_bytes = 0, static_bytes = 0, workspace_bytes = 0;
  double error = 0;               ///< of outputs over the decoded values, relative to the largest
  std::vector<double> layer_ms;   ///< a repetition, per layer
  std::vector<double> encode_us;  ///< per token and kv head, one per layer
  std::vector<double> ratios;     ///< full precision / this format, of each round
};

/// Full precision is the first row. Errors: kInvalidArgument for lengths that are no windows,
/// kInternal if a result differs from the double-precision one, then nothing is timed.
Result<std::vector<CodecRow>> RunCodecBench(const CodecBenchPlan& plan);

}  // namespace qevict::cli
