// QEvict's routing rule (arXiv 2608.05326; what it leaves open is decided in docs/policies.md,
// `qevict`).
//
// In prose. The history of one layer is a list of windows. Bytes B are there for it; the share q
// belongs to the packed tier, the rest to full precision, so at most
//
//     K_f = floor((1-q)*B / M_f)  full windows     and     K_q = floor(q*B / M_q)  packed windows
//
// exist. At an event all windows that are not yet evicted compete anew by score: the best K_f are
// full precision, the next K_q packed, the rest is evicted for good. A window is quantized once, at
// its first demotion; when it returns to full precision its codes stay beside it (dormant), for the
// next demotion. Nothing is quantized or evicted before the budget binds: while every window fits
// in full precision, every window stays there.
//
// In steps:
//   1. rank     score descending, NaN last; ties: windows that are in the tier already, then the
//               older one
//   2. full     F = the first K_f of the ranking
//                 promotion=none:   packed windows do not compete for F
//                 promotion=pinned: a packed window in F stays packed; M_f - M_q bytes of it go to
//                                   the packed tier
//   3. dormant  with charge_dormant each window of F that has codes costs the packed tier M_q
//   4. packed   Q = the next windows of the ranking, as many as the packed tier's bytes still pay
//   5. slack    with fill_slack windows that were never quantized stay full while bytes are left,
//               best first
//
// The dormant charge can exceed the packed tier's whole share when q is small: F may then hold more
// ledger entries than K_q. The paper is silent. Here F gives up its last windows until F and its
// codes fit in B (a window that leaves F keeps its codes if it still ranks into Q), so a charged
// plan never costs more than B.
//
// Bytes are integers throughout (q in per mille), so capacities do not depend on the machine.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "policy/parts.h"
#include "policy/policies.h"

namespace qevict {
namespace {

/// Share of `bytes` in per mille, rounded down, without overflow.
uint64_t PermilleOf(uint64_t bytes, uint64_t permille) {
  return bytes / 1000 * permille + bytes % 1000 * permille / 1000;
}

constexpr uint64_t kMaxBytes = uint64_t{1} << 60;

/// Into a range where sums of three cannot overflow.
int64_t Signed(uint64_t bytes, uint64_t at_least) {
  return static_cast<int64_t>(std::clamp(bytes, at_least, kMaxBytes));
}

/// Ranking by score, NaN last; ties go to `incumbent`, then to the older window.
class RanksBefore {
 public:
  RanksBefore(std::span<const Candidate> candidates, Tier incumbent)
      : candidates_(candidates), incumbent_(incumbent) {}

  bool operator()(size_t i, size_t j) const {
    const Candidate &a = candidates_[i], &b = candidates_[j];
    const bool a_nan = std::isnan(a.score), b_nan = std::isnan(b.score);
    if (a_nan != b_nan) return b_nan;
    if (!a_nan && a.score != b.score) return a.score > b.score;
    const bool a_stays = a.tier == incumbent_, b_stays = b.tier == incumbent_;
    if (a_stays != b_stays) return a_stays;
    if (a.order != b.order) return a.order < b.order;
    return i < j;
  }

 private:
  std::span<const Candidate> candidates_;
  Tier incumbent_;
};

/// One routing event. Byte sums are signed: M_q may exceed M_f (window = 1), and then packing
/// "saves" less than nothing.
class Router {
 public:
  Router(const HistoryInput& input, const Config& config)
      : candidates_(input.candidates),
        config_(config),
        full_bytes_(Signed(input.costs.full_bytes, 1)),
        packed_bytes_(Signed(input.costs.packed_bytes, 1)),
        history_bytes_(Signed(input.history_bytes, 0)) {
    plan_.placements.resize(candidates_.size());
    const uint64_t history = static_cast<uint64_t>(history_bytes_);
    const uint64_t full_share = PermilleOf(history, 1000 - config.q_permille);
    packed_share_ = static_cast<int64_t>(PermilleOf(history, config.q_permille));
    plan_.n_full_capacity = full_share / static_cast<uint64_t>(full_bytes_);
    plan_.n_packed_capacity = static_cast<uint64_t>(packed_share_ / packed_bytes_);
  }

  HistoryPlan Route() {
    if (EverythingFitsInFull()) {
      for (HistoryPlacement& placement : plan_.placements) placement = {Tier::kFull, false};
      return std::move(plan_);
    }
    const size_t n_full = ChooseFull();
    ChoosePacked(n_full);
    if (config_.fill_slack) FillSlack();
    return std::move(plan_);
  }

 private:
  bool IsPinned(const Candidate& c) const {
    return config_.promotion == Promotion::kPinned && c.tier == Tier::kPacked;
  }
  /// Bytes of a window in F: its rows and its dormant codes, or its codes alone if it is pinned.
  int64_t CostInFull(const Candidate& c) const {
    if (IsPinned(c)) return packed_bytes_;
    return full_bytes_ + (config_.charge_dormant && c.has_codes ? packed_bytes_ : 0);
  }

  bool EverythingFitsInFull() const {
    int64_t left = history_bytes_;
    for (const Candidate& c : candidates_) {
      if (c.tier == Tier::kPacked || CostInFull(c) > left) return false;
      left -= CostInFull(c);
    }
    return true;
  }

  /// Steps 1-3. Returns how many windows F holds; `order_` starts with them.
  size_t ChooseFull() {
    order_.resize(candidates_.size());
    std::iota(order_.begin(), order_.end(), size_t{0});
    auto end = order_.end();
    if (config_.promotion == Promotion::kNone) {
      end = std::partition(order_.begin(), end,
                           [&](size_t i) { return candidates_[i].tier != Tier::kPacked; });
    }
    std::sort(order_.begin(), end, RanksBefore(candidates_, Tier::kFull));

    const size_t n_eligible = static_cast<size_t>(end - order_.begin());
    const size_t n_max = static_cast<size_t>(std::min<uint64_t>(plan_.n_full_capacity, n_eligible));
    size_t n_full = 0;
    while (n_full < n_max && spent_ + CostInFull(candidates_[order_[n_full]]) <= history_bytes_) {
      const Candidate& c = candidates_[order_[n_full]];
      plan_.placements[order_[n_full]] = {IsPinned(c) ? Tier::kPacked : Tier::kFull, IsPinned(c)};
      spent_ += CostInFull(c);
      ++n_full;
    }
    f_is_short_ = n_full < n_max;
    return n_full;
  }

  /// Step 4. The packed tier pays for dormant codes and gains what pinned windows save:
  ///   share - (cost of F - n_full * M_f)
  void ChoosePacked(size_t n_full) {
    const auto rest = order_.begin() + static_cast<std::ptrdiff_t>(n_full);
    std::sort(rest, order_.end(), RanksBefore(candidates_, Tier::kPacked));
    int64_t left = packed_share_ - (spent_ - static_cast<int64_t>(n_full) * full_bytes_);
    if (f_is_short_)
      left = history_bytes_ -
             spent_;  // dormant codes ate the shares: what is left pays for packed windows
    for (auto it = rest; it != order_.end() && left >= packed_bytes_; ++it) {
      plan_.placements[*it] = {Tier::kPacked, false};
      left -= packed_bytes_;
      spent_ += packed_bytes_;
    }
  }

  /// Step 5.
  void FillSlack() {
    for (const size_t i : order_) {
      const Candidate& c = candidates_[i];
      if (plan_.placements[i].tier != Tier::kPacked || c.has_codes || c.tier == Tier::kPacked)
        continue;
      if (spent_ + full_bytes_ - packed_bytes_ > history_bytes_) return;
      plan_.placements[i].tier = Tier::kFull;
      spent_ += full_bytes_ - packed_bytes_;
    }
  }

  std::span<const Candidate> candidates_;
  const Config& config_;
  const int64_t full_bytes_, packed_bytes_, history_bytes_;
  int64_t packed_share_ = 0;
  int64_t spent_ = 0;          // bytes of the placements so far
  bool f_is_short_ = false;    // F holds less than K_f because its dormant codes do not fit
  std::vector<size_t> order_;  // candidates, best first
  HistoryPlan plan_;
};

}  // namespace

HistoryPlan PlanQEvict(const HistoryInput& input, const Config& config) {
  return Router(input, config).Route();
}

const Policy kQEvictPolicy{
    "qevict",
    "arXiv 2608.05326 (QEvict)",
    "ranks history by attention: full precision, packed, evicted; both ways",
    "The bytes for a layer's history are divided: the share q belongs to packed windows, the rest "
    "to "
    "full precision. Windows are ranked by the attention that fell on them; the best that fit are "
    "full precision, the next are packed, the others are evicted for good. A window is packed "
    "once: "
    "one that returns to full precision keeps its codes for the next time.",
    Bit(Stat::kScore),
    {},
    DueEveryInterval,
    [](const View& view, const Budget& budget, const Config& config) {
      return parts::PlanHistories(
          view, budget, [&](const HistoryInput& input) { return PlanQEvict(input, config); });
    }};

}  // namespace qevict
