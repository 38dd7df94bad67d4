// StreamingLLM (arXiv 2309.17453) with original positions: sinks and recents, which no policy sees,
// and as many of the newest history windows as fit, all in full precision. Scores play no part;
// what leaves is evicted for good.
//
// Deviation: the original renumbers positions inside the cache; here nothing is renumbered:
// a key that is kept stays at its original position, and the next query has its true one.
#include "policy/parts.h"
#include "policy/policies.h"

namespace qevict {

HistoryPlan PlanStreaming(const HistoryInput& input, const Config&) {
  HistoryPlan plan;
  plan.placements.resize(input.candidates.size());
  const uint64_t full_bytes = input.costs.full_bytes ? input.costs.full_bytes : 1;
  plan.n_full_capacity = input.history_bytes / full_bytes;
  uint64_t left = input.history_bytes;
  for (size_t i = input.candidates.size(); i-- > 0;) {
    // A sequence that another preset has packed keeps its codes beside the full rows.
    const uint64_t cost =
        full_bytes + (input.candidates[i].has_codes ? input.costs.packed_bytes : 0);
    if (cost > left) break;
    plan.placements[i].tier = Tier::kFull;
    left -= cost;
  }
  return plan;
}

const Policy kStreamingPolicy{
    "streaming",
    "arXiv 2309.17453 (StreamingLLM), section 3",
    "keeps the first and the newest tokens in full precision",
    "Sinks and recents stay, and as many of the newest other windows as fit, all in full precision "
    "and at their original positions. Attention plays no part. What leaves is evicted for good.",
    0,
    {},
    DueEveryInterval,
    [](const View& view, const Budget& budget, const Config& config) {
      return parts::PlanHistories(
          view, budget, [&](const HistoryInput& input) { return PlanStreaming(input, config); });
    }};

}  // namespace qevict
