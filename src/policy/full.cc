// Everything stays in full precision, as if there were no budget. And the ranking of a preset that
// has one history and one packed rung.
#include "policy/parts.h"
#include "policy/policies.h"

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

const Policy kFullPolicy{
    "full",
    "",
    "keeps everything in full precision",
    "Nothing is ever packed or evicted, and no budget is looked at.",
    0,
    {},
    [](const Phase&, const Config&) { return false; },
    [](const View& view, const Budget&, const Config&) { return parts::KeepAll(view); }};

}  // namespace qevict
