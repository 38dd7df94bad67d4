// Preset -> planner. A new policy is one file with one function and one line here.
#include "policy/history.h"

namespace qevict {

HistoryPlan PlanHistory(const HistoryInput& input, const Config& config) {
  switch (config.preset) {
    case Preset::kStreaming:
      return PlanStreaming(input, config);
    case Preset::kQEvict:
      return PlanQEvict(input, config);
    case Preset::kPack:
      return PlanPack(input, config);
    case Preset::kFull:
      break;
  }
  HistoryPlan plan;
  plan.placements.assign(input.candidates.size(), HistoryPlacement{Tier::kFull, false});
  plan.n_full_capacity = input.candidates.size();
  return plan;
}

}  // namespace qevict
