// Timing of whole models: the CPU backend and one compressed cache after the other, in pairs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/bench/stats.h"
#include "cli/cache_choice.h"
#include "cli/llm.h"

namespace qevict::cli {

struct ModelBenchPlan {
  std::string model, file;  ///< no file: pseudo-random tokens
  std::vector<uint32_t> prompts, generations, depths;
  std::vector<CacheChoice> caches;
  uint32_t n_repetitions = 5;
  ContextOptions context;
};

/// Times of one test on one cache. The CPU backend has no cache choice.
struct ModelRow {
  const CacheChoice* cache = nullptr;
  ModelTest test;
  std::vector<double> ms;        ///< of a repetition; of the CPU backend one per pair
  std::vector<double> token_ms;  ///< tg: of a token, all repetitions
  std::vector<double> ratios;    ///< CPU / ours, of each pair
  std::optional<double> kl;      ///< mean over the checked tokens behind the same prompt
  std::optional<qevict_stats> stats;
  /// tg: time of a token that goes into routing, packing, scores, masks and writing; mean.
  std::optional<double> upkeep_ms;
  uint64_t peak_rss_bytes = 0;
};

struct ModelFacts {
  std::string description;
  uint64_t bytes = 0, parameters = 0;
};

/// All tests, the CPU backend's row of each first. Errors: kInvalidArgument where a text is too
/// short or a budget too small; kInternal if a full cache does not agree with the CPU backend.
Result<std::vector<ModelRow>> RunModelBench(const ModelBenchPlan& plan, ModelFacts& facts);

}  // namespace qevict::cli
