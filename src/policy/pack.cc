// Quantization alone, as KIVI (arXiv 2402.02750) and its kin do: whatever is neither sink nor
// recent is packed, whether the budget binds or not. If even that does not fit, the oldest windows
// are evicted. Scores play no part.
#include "policy/parts.h"
#include "policy/policies.h"

namespace qevict {

HistoryPlan PlanPack(const HistoryInput& input, const Config&) {
  HistoryPlan plan;
  plan.placements.resize(input.candidates.size());
  const uint64_t packed_bytes = input.costs.packed_bytes ? input.costs.packed_bytes : 1;
  plan.n_packed_capacity = input.history_bytes / packed_bytes;
  uint64_t left = plan.n_packed_capacity;
  for (size_t i = input.candidates.size(); i-- > 0 && left > 0; --left) {
    plan.placements[i].tier = Tier::kPacked;
  }
  return plan;
}

const Policy kPackPolicy{"pack",
                         "arXiv 2402.02750 (KIVI), section 3",
                         "packs all history, evicts the oldest if it must",
                         "Whatever is neither sink nor recent is packed at the next event, also "
                         "while full precision would fit. If packed windows do not fit either, the "
                         "oldest are evicted. Attention plays no part.",
                         0,
                         {},
                         DueEveryInterval,
                         [](const View& view, const Budget& budget, const Config& config) {
                           return parts::PlanHistories(
                               view, budget,
                               [&](const HistoryInput& input) { return PlanPack(input, config); });
                         }};

}  // namespace qevict
