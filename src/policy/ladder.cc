// A ladder by marginal gain: precision falls gradually with a window's expected attention, eviction
// comes last, and all layers, groups and sequences compete for the same bytes.
//
//   error of a unit     w * D(rung), D = expected squared error over the rows' energy; gone: 1
//   w                   expected attention: mass per query row that could see the window, over the
//                       mean of its group, plus `floor`
//
// Greedy: every unit begins as gone. The step up that saves most error per byte is taken first, as
// long as bytes are left; a unit's steps are those of the lower convex hull of (bytes, error), so
// that a later step never saves more than an earlier one. What is left over is spent on the next
// steps that fit.
//
// Why a floor: attention so far says little about the next question. A window that nobody has
// looked at keeps its lowest rung until windows are several times heavier (1.5 bits save 0.8 of an
// error for 1.75 bits per number, 2.5 instead of 1.5 save 0.14 for 1).
//
// Hysteresis: a unit that stands on the rung above or below the one it should get, and whose weight
// has changed by less than `hold` since, would move for little; its present rung counts as a share
// `hold` lighter in error, so that ties and noise move nothing.
#include <algorithm>
#include <cmath>

#include "policy/parts.h"
#include "policy/policies.h"

namespace qevict {
namespace {

constexpr PolicyParam kParams[] = {
    {"floor", "weight of a window that nobody has looked at, in means of its group", 1.0, 0.0,
     100.0},
    {"hold", "share of error by which the present rung is favoured", 0.1, 0.0, 0.9}};

/// A step of a unit from one rung to a better one.
struct Step {
  double gain;  ///< error saved per byte
  uint64_t bytes;
  uint32_t group, window;
  Rung to;
};

/// Expected error on a rung, both sides alike.
double ErrorOn(const Ladder& ladder, Rung r) {
  return (static_cast<double>(ladder.cost[0][r].distortion) +
          static_cast<double>(ladder.cost[1][r].distortion)) /
         2.0;
}

/// Steps of one unit along the lower hull from gone upwards.
void AddSteps(const GroupView& g, uint32_t group, uint32_t i, double weight, double hold,
              std::vector<Step>& steps) {
  const Ladder& ladder = *g.ladder;
  const auto error = [&](Rung r) {
    const double e = weight * (r == kGone ? 1.0 : ErrorOn(ladder, r));
    return r == g.rung_k[i] ? e * (1.0 - hold) : e;
  };
  uint64_t bytes = 0;
  double now = error(kGone);
  for (int from = static_cast<int>(ladder.n_rungs); from > 0;) {
    double best = 0.0;
    int to = -1;
    for (int r = from - 1; r >= 0; --r) {  // the steepest next step
      const auto rung = static_cast<Rung>(r);
      const uint64_t cost = ladder.UnitCost(rung, rung);
      if (cost <= bytes) continue;
      const double gain = (now - error(rung)) / static_cast<double>(cost - bytes);
      if (gain > best) best = gain, to = r;
    }
    if (to < 0) return;
    const auto rung = static_cast<Rung>(to);
    const uint64_t cost = ladder.UnitCost(rung, rung);
    steps.push_back({best, cost - bytes, group, i, rung});
    bytes = cost;
    now = error(rung);
    from = to;
  }
}

/// Expected attention of each window of a group, in means of the group.
std::vector<double> Weights(const GroupView& g, double floor) {
  std::vector<double> w(g.size());
  double sum = 0.0;
  for (size_t i = 0; i < g.size(); ++i) {
    const double rows = static_cast<double>(
        std::max<uint64_t>(1, std::min<uint64_t>(g.n_rows_scored, uint64_t{g.age[i]} + 1)));
    const double score = static_cast<double>(g.stat(Stat::kScore)[i]);
    w[i] = std::isfinite(score) && score > 0.0 ? score / rows : 0.0;
    sum += w[i];
  }
  const double mean = sum > 0.0 ? sum / static_cast<double>(g.size()) : 1.0;
  for (double& x : w) x = x / mean + floor;
  return w;
}

Plan PlanLadder(const View& view, const Budget& budget, const Config& config) {
  const double floor = ParamOf(config, kLadderPolicy, "floor");
  const double hold = ParamOf(config, kLadderPolicy, "hold");
  Plan plan = parts::KeepAll(view);
  uint64_t taken = 0;
  std::vector<Step> steps;
  for (uint32_t j = 0; j < view.groups.size(); ++j) {
    const GroupView& g = view.groups[j];
    taken += g.reserve_bytes;
    const std::vector<double> weights = Weights(g, floor);
    for (uint32_t i = 0; i < g.size(); ++i) {
      if (g.is_protected[i]) {
        taken += g.bytes[i];
        continue;
      }
      plan.placements[j][i] = {};
      if (g.visible[i]) AddSteps(g, j, i, weights[i], hold, steps);
    }
  }
  std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) {
    if (a.gain != b.gain) return a.gain > b.gain;
    if (a.group != b.group) return a.group < b.group;
    if (a.window != b.window) return a.window < b.window;
    return a.to > b.to;
  });
  uint64_t left = budget.bytes > taken ? budget.bytes - taken : 0;
  for (const Step& s : steps) {
    if (s.bytes > left) continue;
    Placement& p = plan.placements[s.group][s.window];
    // A step is from the rung before it; where that did not fit, neither does this one.
    const Ladder& ladder = *view.groups[s.group].ladder;
    if (ladder.UnitCost(p.k, p.v) + s.bytes != ladder.UnitCost(s.to, s.to)) continue;
    p = {s.to, s.to};
    left -= s.bytes;
  }
  return plan;
}

}  // namespace

const Policy kLadderPolicy{"ladder",
                           "marginal gain of error per byte; see src/policy/ladder.cc",
                           "spends bytes over all layers and windows where they save most error",
                           "Every window begins as evicted. The step to a better format (see "
                           "rungs=) that saves most expected error per byte is taken first, over "
                           "all layers and sequences, as long as bytes are left: expected error is "
                           "the format's distortion, weighed by the attention that a row gave the "
                           "window.",
                           Bit(Stat::kScore),
                           kParams,
                           DueEveryInterval,
                           PlanLadder};

}  // namespace qevict
