// The report of a run: what it took and what the cache held.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cli/generate.h"
#include "cli/text.h"

namespace qevict::cli {

/// One reported number. Dots in the key nest JSON objects: "kv.full_bytes".
struct Metric {
  std::string key, label;
  Cell cell;
};
using Metrics = std::vector<Metric>;

/// Prompt and generation: counts, TTFT, TPOT, speeds.
Metrics TimeMetrics(size_t n_prompt, const Generation& generation);
/// The cache: bytes by tier against f16, arena, budget, tokens by tier, routing counters, time
/// spent.
Metrics CacheMetrics(const qevict_stats& stats);
/// What an f16 cache of the same tokens holds.
Metrics FullCacheMetrics(uint64_t f16_bytes);

/// Sum that the budget limits.
uint64_t TotalBytes(const qevict_stats& stats);
/// TotalBytes in percent of f16_bytes; 0 if there are no tokens.
double SharePercent(const qevict_stats& stats);

Json ToJson(const Metrics& metrics);
/// One row per metric, one column per named set; metrics that a set lacks stay empty.
Table ToTable(const std::vector<std::pair<std::string, Metrics>>& columns);

}  // namespace qevict::cli
