#include "policy/parts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace qevict::parts {
namespace {

/// Groups of the same layer and heads, in different sequences, share the layer's bytes.
struct LayerBytes {
  uint32_t layer, head;
  uint64_t token_bytes, mandatory = 0, n_free = 0, history = 0;
};

LayerBytes& Find(std::vector<LayerBytes>& layers, const GroupView& g) {
  for (LayerBytes& l : layers) {
    if (l.layer == g.layer && l.head == g.head) return l;
  }
  layers.push_back({g.layer, g.head, g.token_bytes});
  return layers.back();
}

/// bytes * part / whole without overflow, rounded down in two steps.
uint64_t Share(uint64_t bytes, uint64_t part, uint64_t whole) {
  return bytes / whole * part + bytes % whole * part / whole;
}

Placement OnRung(const HistoryPlacement& p) {
  const Rung rung = p.tier == Tier::kFull ? kFullRung : p.tier == Tier::kPacked ? Rung{1} : kGone;
  return {rung, rung, p.pinned};
}

}  // namespace

Plan KeepAll(const View& view) {
  Plan plan;
  for (const GroupView& g : view.groups) {
    std::vector<Placement>& placements = plan.placements.emplace_back(g.size());
    for (size_t i = 0; i < g.size(); ++i) placements[i] = {g.rung_k[i], g.rung_v[i]};
  }
  return plan;
}

std::vector<uint64_t> HistoryShares(const View& view, const Budget& budget) {
  std::vector<LayerBytes> layers;
  for (const GroupView& g : view.groups) {
    LayerBytes& l = Find(layers, g);
    l.mandatory += g.reserve_bytes;
    for (size_t i = 0; i < g.size(); ++i) {
      if (g.is_protected[i]) {
        l.mandatory += g.bytes[i];
      } else {
        ++l.n_free;
      }
    }
  }
  uint64_t all = 0;
  for (const LayerBytes& l : layers) all += l.token_bytes;
  for (LayerBytes& l : layers) {
    const uint64_t share = Share(budget.bytes, l.token_bytes, all);
    l.history = share > l.mandatory ? share - l.mandatory : 0;
  }
  std::vector<uint64_t> shares;
  for (const GroupView& g : view.groups) {
    const LayerBytes& l = Find(layers, g);
    const auto n =
        static_cast<uint64_t>(std::count(g.is_protected.begin(), g.is_protected.end(), uint8_t{0}));
    shares.push_back(l.n_free == 0 ? 0 : Share(l.history, n, l.n_free));
  }
  return shares;
}

History TakeHistory(const GroupView& g, uint64_t bytes, std::vector<Placement>& placements) {
  History history;
  const uint64_t full = g.ladder->UnitCost(kFullRung, kFullRung);
  uint64_t visible = 0;
  for (size_t i = 0; i < g.size(); ++i) {
    if (g.is_protected[i] || !g.visible[i]) continue;
    visible += std::max(full, g.bytes[i]);
    const bool codes = g.codes_k[i] != 0 || g.codes_v[i] != 0;
    const bool is_full = g.rung_k[i] == kFullRung && g.rung_v[i] == kFullRung;
    history.candidates.push_back({static_cast<uint32_t>(i), g.stat(Stat::kScore)[i],
                                  is_full ? Tier::kFull : Tier::kPacked, codes,
                                  static_cast<uint32_t>(history.candidates.size())});
    history.index.push_back(i);
  }
  uint64_t left = bytes > visible ? bytes - visible : 0;
  for (size_t i = g.size(); i-- > 0;) {
    if (g.is_protected[i] || g.visible[i]) continue;
    if (g.bytes[i] > left) {
      placements[i] = {};
      left = 0;
    } else {
      left -= g.bytes[i];
      bytes -= g.bytes[i];
    }
  }
  history.bytes = bytes;
  return history;
}

Plan PlanHistories(const View& view, const Budget& budget,
                   const std::function<HistoryPlan(const HistoryInput&)>& rank) {
  Plan plan = KeepAll(view);
  const std::vector<uint64_t> shares = HistoryShares(view, budget);
  for (size_t g = 0; g < view.groups.size(); ++g) {
    const GroupView& group = view.groups[g];
    const History history = TakeHistory(group, shares[g], plan.placements[g]);
    const HistoryCosts costs{group.ladder->UnitCost(0, 0),
                             group.ladder->n_rungs > 1 ? group.ladder->UnitCost(1, 1) : 0};
    const HistoryPlan ranked = rank({history.candidates, costs, history.bytes});
    for (size_t i = 0; i < history.index.size(); ++i)
      plan.placements[g][history.index[i]] = OnRung(ranked.placements[i]);
  }
  return plan;
}

std::vector<size_t> TopK(std::span<const float> x, size_t k) {
  std::vector<size_t> order(x.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto before = [x](size_t a, size_t b) {
    const bool a_nan = std::isnan(x[a]), b_nan = std::isnan(x[b]);
    if (a_nan != b_nan) return b_nan;
    if (!a_nan && x[a] != x[b]) return x[a] > x[b];
    return a < b;
  };
  k = std::min(k, order.size());
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k), order.end(),
                    before);
  order.resize(k);
  return order;
}

std::vector<uint64_t> Apportion(uint64_t total, std::span<const double> weights) {
  double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  const bool equal = !(sum > 0.0);
  if (equal) sum = static_cast<double>(weights.size());
  std::vector<uint64_t> shares(weights.size());
  std::vector<double> rest(weights.size());
  uint64_t given = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    const double exact = static_cast<double>(total) * (equal ? 1.0 : weights[i]) / sum;
    shares[i] = std::min(static_cast<uint64_t>(exact), total - given);
    rest[i] = exact - std::floor(exact);
    given += shares[i];
  }
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return rest[a] > rest[b]; });
  for (size_t i = 0; given < total && !order.empty(); i = (i + 1) % order.size(), ++given)
    ++shares[order[i]];
  return shares;
}

std::vector<float> Pool(std::span<const float> x, size_t k, bool maximum) {
  const auto half = static_cast<std::ptrdiff_t>(k / 2), n = static_cast<std::ptrdiff_t>(x.size());
  std::vector<float> out(x.size());
  for (std::ptrdiff_t i = 0; i < n; ++i) {
    double sum = 0.0;
    float top = -INFINITY;
    for (std::ptrdiff_t j = std::max<std::ptrdiff_t>(0, i - half); j <= std::min(n - 1, i + half);
         ++j) {
      sum += static_cast<double>(x[static_cast<size_t>(j)]);
      top = std::max(top, x[static_cast<size_t>(j)]);
    }
    out[static_cast<size_t>(i)] = maximum ? top : static_cast<float>(sum / static_cast<double>(k));
  }
  return out;
}

}  // namespace qevict::parts
