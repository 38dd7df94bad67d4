// AdaKV (arXiv 2407.11550, section 3): as SnapKV, but the heads of a layer share their windows: a
// head whose attention is spread gets more of them than one that looks at a few. In prose, for a
// layer of H heads that may keep N windows together (base = N / H):
//
//   1. every head ranks its windows as SnapKV does
//   2. cnt[h] = how many of the layer's N best windows are of head h; with `normalize` a head's
//               scores are first multiplied by the share of its mass that its own `base` best have
//   3. budget[h] = (1 - alpha) * cnt[h] + alpha * base: the floor saves heads whose scores are low
//   4. head h keeps its own best budget[h]
//
// Heads compete with per_head=true only; without it a layer is one group, and the rule is SnapKV's.
//
// Deviations: budgets are rounded by the largest remainder, so that they add up to N exactly (the
// authors' two roundings lose or add some). What a head has no windows for goes to the best windows
// that no other head's budget holds. The budget holds during the answer, as in snapkv.cc.
#include <algorithm>
#include <map>
#include <utility>

#include "policy/observation.h"
#include "policy/parts.h"
#include "policy/policies.h"

namespace qevict {
namespace {

constexpr PolicyParam kParams[] = {
    {"alpha", "share of the windows that all heads get alike", 0.2, 0.0, 1.0},
    {"normalize", "1: weigh a head's scores by how concentrated they are", 0.0, 0.0, 1.0},
    {"kernel", "neighbours that are pooled, odd; 1 pools nothing", 7.0, 1.0, 63.0},
    {"max_pool", "1: the highest of the neighbours; 0: their mean", 1.0, 0.0, 1.0},
    {"window_max", "1: a window is its best token; 0: the mean over them", 0.0, 0.0, 1.0}};

using Ranking = std::vector<parts::Ranked>;

/// A place in a head's ranking.
struct Place {
  size_t head, rank;
};

/// The windows of all heads, best first; equal ones by head.
std::vector<Place> Merge(const std::vector<Ranking>& heads) {
  std::vector<Place> all;
  for (size_t h = 0; h < heads.size(); ++h) {
    for (size_t r = 0; r < heads[h].size(); ++r) all.push_back({h, r});
  }
  std::stable_sort(all.begin(), all.end(), [&](const Place& a, const Place& b) {
    return parts::RanksBefore(heads[a.head][a.rank], heads[b.head][b.rank]);
  });
  return all;
}

/// Multiplies scores by the share of the head's mass that its `base` best windows have.
void Normalize(Ranking& head, size_t base) {
  double all = 0.0, best = 0.0;
  for (const parts::Ranked& r : head) {
    if (r.kind != parts::Ranked::kObserved || !(r.score > 0.0f)) continue;
    all += static_cast<double>(r.score);
    if (base > 0) best += static_cast<double>(r.score), --base;
  }
  for (parts::Ranked& r : head) r.score *= all > 0.0 ? static_cast<float>(best / all) : 1.0f;
}

/// How many windows each head keeps; n in all, or all if there are fewer.
std::vector<uint64_t> HeadBudgets(const std::vector<Ranking>& heads, uint64_t n, double alpha) {
  const std::vector<Place> all = Merge(heads);
  n = std::min<uint64_t>(n, all.size());
  std::vector<double> weights(heads.size(),
                              alpha * static_cast<double>(n) / static_cast<double>(heads.size()));
  for (uint64_t i = 0; i < n; ++i) weights[all[i].head] += 1.0 - alpha;
  std::vector<uint64_t> budgets = parts::Apportion(n, weights);
  uint64_t spare = 0;
  for (size_t h = 0; h < heads.size(); ++h) {
    const uint64_t held = std::min<uint64_t>(budgets[h], heads[h].size());
    spare += budgets[h] - held;
    budgets[h] = held;
  }
  for (size_t i = 0; i < all.size() && spare > 0; ++i) {
    if (all[i].rank < budgets[all[i].head]) continue;
    ++budgets[all[i].head];
    --spare;
  }
  return budgets;
}

/// Heads of one layer of one sequence: these groups of the view, which share `bytes`.
void PlanLayer(const View& view, const std::vector<size_t>& groups, uint64_t bytes,
               const Config& config, Plan& plan) {
  const auto param = [&](std::string_view name) { return ParamOf(config, kAdaKvPolicy, name); };
  const parts::Pooling pooling{static_cast<size_t>(param("kernel")), param("max_pool") >= 0.5,
                               param("window_max") >= 0.5};
  const uint64_t unit = view.groups[groups[0]].ladder->UnitCost(kFullRung, kFullRung);
  const uint64_t n = bytes / std::max<uint64_t>(1, unit);
  std::vector<Ranking> heads;
  for (const size_t j : groups) {
    heads.push_back(parts::RankObserved(view.groups[j], config.window, pooling));
    if (param("normalize") >= 0.5) Normalize(heads.back(), n / groups.size());
  }
  const std::vector<uint64_t> budgets = HeadBudgets(heads, n, param("alpha"));
  for (size_t h = 0; h < groups.size(); ++h)
    parts::KeepFirst(view.groups[groups[h]], heads[h], budgets[h], bytes,
                     plan.placements[groups[h]]);
}

Plan PlanAdaKv(const View& view, const Budget& budget, const Config& config) {
  Plan plan = parts::KeepAll(view);
  const std::vector<uint64_t> shares = parts::HistoryShares(view, budget);
  std::map<std::pair<uint32_t, uint32_t>, std::vector<size_t>> layers;  // of each sequence
  for (size_t j = 0; j < view.groups.size(); ++j)
    layers[{view.groups[j].sequence, view.groups[j].layer}].push_back(j);
  for (const auto& [layer, groups] : layers) {
    uint64_t bytes = 0;
    for (const size_t j : groups) bytes += shares[j];
    PlanLayer(view, groups, bytes, config, plan);
  }
  return plan;
}

}  // namespace

const Policy kAdaKvPolicy{
    "adakv",
    "arXiv 2407.11550 (AdaKV), section 3",
    "as snapkv, with the heads of a layer sharing their windows (per_head)",
    "Every kv head ranks its windows as snapkv does. Of the N windows that "
    "fit into a layer, a head gets as many as it has among the layer's N best, "
    "except for the share alpha that all heads get alike, and keeps its own "
    "best ones. Without per_head=true a layer is one group, as with snapkv.",
    Bit(Stat::kPromptMass) | Bit(Stat::kObservation),
    kParams,
    DueEveryInterval,
    PlanAdaKv};

}  // namespace qevict
