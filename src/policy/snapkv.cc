// SnapKV (arXiv 2404.14469, section 4): the last rows of the prompt tell which of its tokens the
// answer will need. In prose, for every head:
//
//   1. s[i]   = attention that the last w rows gave to token i
//   2. s'[i]  = s pooled over k neighbours: a token brings its surroundings along
//   3. the highest s' stay, as many as the budget holds; the w rows' own tokens stay, too
//   4. tokens of the answer are appended, and stay
//
// All heads and layers get the same number. Nothing is packed.
//
// Here tokens move by windows: s' of a window is the mean over its tokens (window=1 is the paper's
// rule). w is `init_rows`, and `recents` are what stays of the rows' own tokens. A group is a kv
// head with per_head=true, else all heads of a layer; query heads are averaged before pooling.
//
// Deviation: the budget is in bytes and holds during the answer, too. At every event what has been
// generated takes bytes from the lowest windows of the prompt, and when none is left, from its own
// oldest. A second prompt's rows rank everything anew.
#include "policy/observation.h"
#include "policy/parts.h"
#include "policy/policies.h"

namespace qevict {
namespace {

constexpr PolicyParam kParams[] = {
    {"kernel", "neighbours that are pooled, odd; 1 pools nothing", 5.0, 1.0, 63.0},
    {"max_pool", "1: the highest of the neighbours; 0: their mean", 0.0, 0.0, 1.0},
    {"window_max", "1: a window is its best token; 0: the mean over them", 0.0, 0.0, 1.0}};

Plan PlanSnapKv(const View& view, const Budget& budget, const Config& config) {
  const parts::Pooling pooling{static_cast<size_t>(ParamOf(config, kSnapKvPolicy, "kernel")),
                               ParamOf(config, kSnapKvPolicy, "max_pool") >= 0.5,
                               ParamOf(config, kSnapKvPolicy, "window_max") >= 0.5};
  Plan plan = parts::KeepAll(view);
  std::vector<uint64_t> bytes = parts::HistoryShares(view, budget);
  for (size_t j = 0; j < view.groups.size(); ++j) {
    const GroupView& g = view.groups[j];
    const auto ranking = parts::RankObserved(g, config.window, pooling);
    parts::KeepFirst(g, ranking, ranking.size(), bytes[j], plan.placements[j]);
  }
  return plan;
}

}  // namespace

const Policy kSnapKvPolicy{"snapkv",
                           "arXiv 2404.14469 (SnapKV), section 4",
                           "keeps what the prompt's last rows looked at, evicts the rest",
                           "Attention of the prompt's last init_rows rows is pooled over "
                           "neighbouring tokens and averaged over each window. The best windows "
                           "stay in full precision as long as they fit, the same number in every "
                           "layer; the rest is evicted. Generated windows push out the prompt's "
                           "lowest, then their own oldest.",
                           Bit(Stat::kPromptMass) | Bit(Stat::kObservation),
                           kParams,
                           DueEveryInterval,
                           PlanSnapKv};

}  // namespace qevict
