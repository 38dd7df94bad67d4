// Preset -> planner. A new policy is one file with one function and one line here.
#include "qevict/policy.h"

namespace qevict {

Plan MakePlan(const PlanInput& input, const Config& config) {
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
  Plan plan;
  plan.placements.assign(input.candidates.size(), Placement{Tier::kFull, false});
  plan.n_full_capacity = input.candidates.size();
  return plan;
}

}  // namespace qevict
