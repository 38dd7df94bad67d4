// From the cache to a policy and back: what is protected, the view of the domain, and the moves of
// the plan.
//
// Per layer and event:
//   share      bytes the layer may hold (budget.cc)
//   mandatory  sinks, recents and promised tokens of every sequence of the domain
// If mandatory bytes exceed the share, protection is given up: recents of other sequences, longest
// idle first, then more (GiveWay). An event never fails because of the budget. The policy gets the
// shares of all its layers together, and may spend them as it likes.
#include "cache/kv_cache_impl.h"
#include "cache/view.h"

namespace qevict {

/// Which units of one sequence in one layer are protected, and what they and its reserve cost.
void KvCache::Impl::Protect(uint32_t il, SeqPlan& plan) {
  Sequence& s = *sequences[plan.id];
  // Drafts that may be taken back by the rows that come are no recents.
  const uint32_t drafts = s.open_rows > 1 && plan.recents > 0 ? s.open_rows - 1 : 0;
  const uint32_t first_recent =
      plan.protect_tail ? FirstRecentBirth(s, plan.recents + drafts) : kNone;
  plan.reserve = plan.keep_reserve && !Chunked(s)
                     ? CountNewWindows(s, s.reserved) * StoreOf(il).UnitCost(kFullRung, kFullRung)
                     : 0;
  plan.mandatory = plan.reserve;
  std::vector<UnitRecord>& units = s.layers[il].units;
  plan.is_protected.assign(units.size(), 0);
  plan.n_free = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    UnitRecord& u = units[i];
    const WindowRecord& w = windows[u.window];
    const bool sink = w.has(WindowRecord::kSink) && plan.protect_sinks;
    if (!w.has(WindowRecord::kHidden) && (sink || w.birth >= first_recent)) {
      plan.is_protected[i] = 1;
      plan.mandatory += UnitBytes(il, u);
      continue;
    }
    ++plan.n_free;
    if (config.score == ScoreKind::kKeyNorm && u.full(Side::kKeys) && !u.dormant())
      ScoreByKeyNorm(il, u);
  }
}

/// Of the sequences that have something to give, the one that has been idle longest, or null.
template <typename F>
SeqPlan* KvCache::Impl::LongestIdle(std::vector<SeqPlan>& plans, const F& has) const {
  SeqPlan* idle = nullptr;
  for (SeqPlan& p : plans) {
    if (!has(p)) continue;
    if (!idle || sequences[p.id]->activity < sequences[idle->id]->activity) idle = &p;
  }
  return idle;
}

/// One sequence gives up some of its protection: first recents and the open window of others, then
/// their sinks, longest idle first; then half of the recents of `self`, last its open window, the
/// bytes promised to it and its sinks. False if there is nothing left to give.
bool KvCache::Impl::GiveWay(uint32_t il, std::vector<SeqPlan>& plans, SeqId self) {
  const auto idle = [&](const auto& has) { return LongestIdle(plans, has); };
  SeqPlan* plan = nullptr;
  if ((plan = idle([self](const SeqPlan& p) { return p.id != self && p.protect_tail; }))) {
    plan->recents = 0;
    plan->protect_tail = false;
    plan->keep_reserve =
        std::find(step_sequences.begin(), step_sequences.end(), plan->id) != step_sequences.end();
  } else if ((plan = idle([self](const SeqPlan& p) { return p.id != self && p.protect_sinks; }))) {
    plan->protect_sinks = false;
  } else if ((plan = idle([](const SeqPlan& p) { return p.recents > 0; }))) {
    plan->recents /= 2;
  } else if ((plan = idle([](const SeqPlan& p) { return p.protect_tail; }))) {
    plan->protect_tail = false;
  } else if ((plan = idle([](const SeqPlan& p) { return p.keep_reserve; }))) {
    plan->keep_reserve = false;
  } else if ((plan = idle([](const SeqPlan& p) { return p.protect_sinks; }))) {
    plan->protect_sinks = false;
  } else {
    return false;
  }
  Protect(il, *plan);
  return true;
}

static uint64_t MandatoryBytes(const std::vector<SeqPlan>& plans) {
  uint64_t bytes = 0;
  for (const SeqPlan& p : plans) bytes += p.mandatory;
  return bytes;
}

/// All sequences of a domain in one layer.
std::vector<SeqPlan> KvCache::Impl::ProtectDomain(uint32_t il, SeqId seq,
                                                  std::span<const SeqId> domain, uint64_t share) {
  std::vector<SeqPlan> plans(domain.size());
  for (size_t i = 0; i < domain.size(); ++i) {
    plans[i].id = domain[i];
    plans[i].recents = Recents();
    Protect(il, plans[i]);
  }
  while (MandatoryBytes(plans) > share && GiveWay(il, plans, seq)) {
  }
  uint64_t n_free = 0;
  for (const SeqPlan& p : plans) n_free += p.n_free;
  const uint64_t mandatory = MandatoryBytes(plans), left = share - std::min(share, mandatory);
  for (SeqPlan& p : plans) p.history = n_free == 0 ? 0 : left / n_free * p.n_free;
  return plans;
}

/// Bytes for the due sequence alone in one layer, beside what the others were given, if nearly as
/// much is left as it would get if all were planned anew: an event then costs what one sequence
/// costs. None: it is not.
std::optional<uint64_t> KvCache::Impl::ShareAlone(uint32_t il, std::span<const SeqId> domain,
                                                  uint64_t share, const SeqPlan& plan) const {
  uint64_t mandatory = plan.mandatory, history = 0, n_units = plan.n_free;
  for (const SeqId id : domain) {
    if (id == plan.id) continue;
    const LayerSeq::Allowance& a = sequences[id]->layers[il].allowance;
    if (!a.known || Chunked(*sequences[id])) return std::nullopt;
    mandatory += a.mandatory;
    history += a.history;
    n_units += a.n_units;
  }
  if (share < mandatory + history || n_units == 0) return std::nullopt;
  const uint64_t left = share - mandatory - history;
  const uint64_t fair = (share - mandatory) / n_units * plan.n_free;
  if (left < fair - fair / 16) return std::nullopt;
  return plan.mandatory + std::min(left, fair);
}

/// The due sequence alone, if every layer can have it so.
bool KvCache::Impl::ProtectAlone(std::span<const uint32_t> ils, SeqId seq,
                                 std::span<const SeqId> domain, LayerPlans& out) {
  if (domain.size() < 2 || pressure > 0 || !step_sequences.empty() || restore) return false;
  for (const uint32_t il : ils) {
    SeqPlan plan;
    plan.id = seq;
    plan.recents = Recents();
    Protect(il, plan);
    const std::optional<uint64_t> bytes = ShareAlone(il, domain, LayerShare(il, domain), plan);
    if (!bytes) return false;
    plan.history = *bytes - plan.mandatory;
    out.bytes += *bytes;
    out.plans.emplace_back().push_back(std::move(plan));
  }
  return true;
}

/// What a plan gives a sequence in a layer is what its next plans may count on.
void KvCache::Impl::NoteAllowance(uint32_t il, const SeqPlan& plan,
                                  const std::vector<Placement>& placements) {
  const ShapeStore& store = StoreOf(il);
  uint64_t history = 0;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (plan.is_protected[i] || placements[i].k == kGone || placements[i].v == kGone) continue;
    history += store.UnitCost(placements[i].k, placements[i].v);
  }
  sequences[plan.id]->layers[il].allowance = {plan.mandatory, std::max(history, plan.history),
                                              plan.n_free, true};
}

/// What the policy says, by layer of `ils`.
std::vector<std::vector<UnitMove>> KvCache::Impl::PlanMoves(std::span<const uint32_t> ils,
                                                            SeqId seq) {
  const std::vector<SeqId> domain = Domain(seq);
  LayerPlans layers_plans;
  if (!ProtectAlone(ils, seq, domain, layers_plans)) {
    layers_plans = {};
    for (const uint32_t il : ils) {
      const uint64_t share = LayerShare(il, domain);
      layers_plans.bytes += share;
      layers_plans.plans.push_back(ProtectDomain(il, seq, domain, share));
    }
  }
  DomainView view(*this);
  for (size_t i = 0; i < ils.size(); ++i) {
    for (const SeqPlan& plan : layers_plans.plans[i]) view.Add(ils[i], plan);
  }
  const Plan plan = PolicyOf(config).plan(view.view(), {layers_plans.bytes}, config);
  std::vector<std::vector<UnitMove>> moves(ils.size());
  size_t group = 0;
  for (size_t i = 0; i < ils.size(); ++i) {
    for (const SeqPlan& p : layers_plans.plans[i]) {
      const std::vector<Placement>& placements = plan.placements[group++];
      NoteAllowance(ils[i], p, placements);
      for (uint32_t u = 0; u < placements.size(); ++u) {
        if (p.is_protected[u]) continue;
        moves[i].push_back({p.id, u, placements[u].k, placements[u].v, placements[u].pinned});
      }
    }
  }
  return moves;
}

}  // namespace qevict
