// Routing: when events are due, and the plan of one layer.
//
// Per layer and event:
//   share      bytes the layer may hold (budget.cc)
//   mandatory  sinks, recents and promised tokens of every sequence of the domain
//   history    share - mandatory, split over the sequences by their number of candidates
// A policy (MakePlan) answers where each candidate shall be; commit.cc moves them.
// If mandatory bytes exceed the share, recents of other sequences lose their protection, longest
// idle first, then those of the sequence itself; only then the call fails.
#include <cmath>

#include "cache/kv_cache_impl.h"
#include "cache/restore.h"
#include "policy/rankers.h"

namespace qevict {

bool KvCache::Impl::NoteStep(SeqId seq, uint32_t n, StepKind kind) {
  Sequence* s = Seq(seq);
  if (!s || n == 0) return false;
  s->activity = ++clock;
  s->event_step = false;
  s->noted = true;
  s->open_rows =
      s->tail_confirmed || !s->decoded || s->last_rows > kMaxSpeculation ? 0 : s->last_rows;
  s->tail_confirmed = false;
  s->last_rows = n;
  if (!Routes()) return false;
  const bool generates =
      kind == StepKind::kDecode || (kind == StepKind::kAuto && s->decoded && n <= kMaxSpeculation);
  bool due = false;
  if (generates) {
    const uint64_t interval = config.EffectiveInterval();
    for (uint64_t step = s->decode_steps; step < s->decode_steps + n; ++step) {
      due |= step >= config.first_event && (step - config.first_event) % interval == 0;
    }
    due |=
        s->prompt_phase && RoutedSequence(*s);  // the prompt's reserve becomes the decode reserve
    s->decode_steps += n;
    s->chunk_tokens = 0;  // the next prompt may come in shorter chunks
    s->decoded = true;
    s->prompt_phase = false;
    NoteRound(*s);
  } else {
    if (!s->prompt_phase) FoldPromptScores(*s);
    s->prompt_phase = true;
    KeepLastRows(*s, n);
    s->chunk_tokens = std::max(s->chunk_tokens, n);
    s->chunk_round = decode_rounds;
    s->reserved = 0;
    UpdateLimit();  // a first prompt suspends it
  }
  const StepRows rows{seq, n};
  if (!due && LimitWanted() && RoutedSequence(*s)) due = !FitsNext({&rows, 1});
  s->event_step = due;
  return due;
}

/// A round ends when a sequence that it has counted makes another step.
void KvCache::Impl::NoteRound(Sequence& s) {
  if (s.round == decode_rounds) ++decode_rounds;
  s.round = decode_rounds;
}

/// A new prompt begins: what the last one gave counts among what has been earned from now on.
void KvCache::Impl::FoldPromptScores(Sequence& s) {
  for (LayerSeq& layer : s.layers) {
    for (UnitRecord& u : layer.units) {
      u.score = u.total_score();
      u.prompt_score = 0.0f;
    }
  }
}

/// init_rows = m: a prompt's scores come from its last m rows, but its end is not known. A chunk of
/// n rows replaces what earlier ones of the same prompt left, except for the share of the m - n
/// rows before it.
void KvCache::Impl::KeepLastRows(Sequence& s, uint32_t n) {
  if (config.init_rows == 0 || config.score == ScoreKind::kKeyNorm) return;
  const uint32_t m = config.init_rows;
  const float kept = n >= m ? 0.0f : static_cast<float>(m - n) / static_cast<float>(m);
  for (LayerSeq& layer : s.layers) {
    for (UnitRecord& u : layer.units) u.prompt_score *= kept;
  }
}

/// The usual case: the windows are those of one sequence, all of them. False if they are not.
bool KvCache::Impl::AddMassToAll(uint32_t il, std::span<const WindowId> ids,
                                 const WindowMasses& masses) {
  if (ids.empty() || ids[0] >= windows.size() || !windows[ids[0]].in_use()) return false;
  const SeqId seq = windows[ids[0]].seq;
  std::vector<UnitRecord>& units = sequences[seq]->layers[il].units;
  const auto same = [](const UnitRecord& u, WindowId id) { return u.window == id; };
  if (!std::equal(units.begin(), units.end(), ids.begin(), ids.end(), same)) return false;
  if (config.event_scores && !sequences[seq]->event_step) return true;
  mass_units.resize(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) mass_units[i] = &units[i];
  UpdateUnitScores(masses, seq);
  return true;
}

/// Adds masses to the scores of mass_units (null: none) that their sequences' phases say. The other
/// sum of a unit gets nothing, which is all it needs unless scores decay. of_all: the sequence of
/// all units, or kNone.
void KvCache::Impl::UpdateUnitScores(const WindowMasses& masses, SeqId of_all) {
  mass_scores.assign(mass_units.size(), 0.0f);
  mass_others.assign(config.score == ScoreKind::kEma ? mass_units.size() : 0, 0.0f);
  const auto in_prompt = [&](const UnitRecord& u) {
    return sequences[of_all != kNone ? of_all : windows[u.window].seq]->prompt_phase;
  };
  for (size_t i = 0; i < mass_units.size(); ++i) {
    if (!mass_units[i]) continue;
    const UnitRecord& u = *mass_units[i];
    const bool prompt = in_prompt(u);
    mass_scores[i] = prompt ? u.prompt_score : u.score;
    if (!mass_others.empty()) mass_others[i] = prompt ? u.score : u.prompt_score;
  }
  UpdateScores(config, masses, mass_scores);
  const float kept = static_cast<float>(
      std::pow(config.ema_lambda, static_cast<double>(masses.n_rows) * masses.repeat));
  for (size_t i = 0; i < mass_units.size(); ++i) {
    if (!mass_units[i]) continue;
    UnitRecord& u = *mass_units[i];
    const bool prompt = in_prompt(u);
    (prompt ? u.prompt_score : u.score) = mass_scores[i];
    if (!mass_others.empty()) (prompt ? u.score : u.prompt_score) = mass_others[i] * kept;
  }
}

void KvCache::Impl::AddMass(uint32_t il, std::span<const WindowId> ids, const float* mass,
                            size_t head_stride, uint32_t n_heads, uint32_t n_queries) {
  const uint32_t n_kv_heads = PoolsOf(il).shape.n_kv_heads;
  WindowMasses masses{mass, head_stride, n_kv_heads, std::max(1u, n_heads / n_kv_heads), n_queries};
  if (config.event_scores) masses.repeat = config.EffectiveInterval();
  if (AddMassToAll(il, ids, masses)) return;
  mass_units.assign(ids.size(), nullptr);
  size_t at = 0;
  SeqId seq = kNone;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= windows.size() || !windows[ids[i]].in_use()) continue;
    if (windows[ids[i]].seq != seq) {
      seq = windows[ids[i]].seq;
      at = 0;
    }
    if (config.event_scores && !sequences[seq]->event_step) continue;
    // ids come in the order of View: the next unit is nearly always the one.
    std::vector<UnitRecord>& units = sequences[seq]->layers[il].units;
    UnitRecord* u =
        at < units.size() && units[at].window == ids[i] ? &units[at] : FindUnit(seq, il, ids[i]);
    if (!u) continue;
    at = static_cast<size_t>(u - units.data()) + 1;
    mass_units[i] = u;
  }
  UpdateUnitScores(masses, kNone);
}

uint64_t KvCache::Impl::UnitBytes(uint32_t il, const UnitRecord& u) const {
  const ShapePools& p = PoolsOf(il);
  uint64_t bytes = kUnitBytes;
  if (u.has_full()) bytes += p.full_bytes() + kOwnerBytes;
  if (u.has_codes() && (config.charge_dormant || !u.has_full())) {
    bytes += p.packed_bytes() + kOwnerBytes;
  }
  return bytes;
}

/// Birth of the oldest window that belongs to the recents; hidden ones behind it do not.
uint32_t KvCache::Impl::FirstRecentBirth(const Sequence& s, uint32_t recents) const {
  const size_t n_protected = (recents + config.window - 1) / config.window;
  uint32_t first = kNone;
  uint64_t newer = 0;
  size_t n_hidden = 0;
  for (size_t i = s.windows.size(); i-- > 0;) {
    const WindowRecord& w = windows[s.windows[i]];
    if (w.has(WindowRecord::kHidden)) {
      ++n_hidden;
      continue;
    }
    const size_t rank = s.windows.size() - 1 - i - n_hidden;
    const bool open = rank == 0 && w.n_tokens < config.window && !w.has(WindowRecord::kSealed);
    const bool recent =
        config.local_mode == LocalMode::kAligned ? newer < recents : rank < n_protected;
    if (!open && !recent) break;
    first = w.birth;
    newer += w.n_tokens;
  }
  return first;
}

void KvCache::Impl::ScoreByKeyNorm(uint32_t il, UnitRecord& u) const {
  const ShapePools& p = PoolsOf(il);
  const uint32_t d = p.shape.head_dim, n = windows[u.window].n_tokens;
  uint16_t row[kMaxHeadDim];
  float key[kMaxHeadDim];
  double sum = 0.0;
  for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
    for (uint32_t t = 0; t < n; ++t) {
      LoadKeyRow(FullSlot(il, u) + h * p.full_head_bytes, config.window, d, t, row);
      ConvertTo32(row, d, p.shape.elem_k, key);
      sum += KeyNormSum(key, 1, d);
    }
  }
  u.score = KeyNormScore(config, sum, p.shape.n_kv_heads, n);
}

/// Fills mandatory bytes and candidates of one sequence in one layer.
void KvCache::Impl::CollectCandidates(uint32_t il, SeqPlan& plan) {
  Sequence& s = *sequences[plan.id];
  const uint64_t full_cost = PoolsOf(il).costs().full_bytes;
  const bool restoring = restore && restore->seq == plan.id;
  // Drafts that may be taken back by the rows that come are no recents.
  const uint32_t drafts = s.open_rows > 1 && plan.recents > 0 ? s.open_rows - 1 : 0;
  const uint32_t first_recent = restoring              ? 0
                                : plan.protect_recents ? FirstRecentBirth(s, plan.recents + drafts)
                                                       : kNone;
  plan.mandatory = 0;
  plan.candidates.clear();
  plan.index.clear();
  plan.hidden.clear();
  if (plan.keep_reserve && !Chunked(s)) {
    plan.mandatory += CountNewWindows(s, s.reserved) * full_cost;
  }
  std::vector<UnitRecord>& units = s.layers[il].units;
  for (uint32_t i = 0; i < units.size(); ++i) {
    UnitRecord& u = units[i];
    const WindowRecord& w = windows[u.window];
    if (w.has(WindowRecord::kHidden)) {
      plan.hidden.push_back(i);
      continue;
    }
    if (w.has(WindowRecord::kSink) || w.birth >= first_recent) {
      plan.mandatory += UnitBytes(il, u);
      continue;
    }
    if (config.score == ScoreKind::kKeyNorm && u.has_full() && !u.has_codes()) {
      ScoreByKeyNorm(il, u);
    }
    plan.candidates.push_back({w.birth, u.total_score(), u.has_full() ? Tier::kFull : Tier::kPacked,
                               u.has_codes(), static_cast<uint32_t>(plan.candidates.size())});
    plan.index.push_back(i);
  }
}

/// The other sequence that has been idle longest and still has protected recents, or null.
SeqPlan* KvCache::Impl::LongestIdle(std::vector<SeqPlan>& plans, SeqId self) const {
  SeqPlan* idle = nullptr;
  for (SeqPlan& p : plans) {
    if (p.id == self || !p.protect_recents) continue;
    if (!idle || sequences[p.id]->activity < sequences[idle->id]->activity) idle = &p;
  }
  return idle;
}

/// Where the history of one sequence shall be. What no row sees keeps the bytes that are left when
/// everything else is in full precision, the newest first.
void KvCache::Impl::PlanSequence(uint32_t il, const SeqPlan& p, uint64_t history,
                                 std::vector<UnitMove>& moves) {
  LayerSeq& ls = sequences[p.id]->layers[il];
  ls.allowance = {p.mandatory, history, static_cast<uint32_t>(p.n_units()), true};
  if (p.n_units() == 0) return;
  const UnitCosts costs = PoolsOf(il).costs();
  const std::vector<UnitRecord>& units = ls.units;
  uint64_t visible = 0;
  for (const uint32_t i : p.index) visible += std::max(costs.full_bytes, UnitBytes(il, units[i]));
  uint64_t left = history > visible ? history - visible : 0;
  for (size_t k = p.hidden.size(); k-- > 0;) {
    const uint32_t i = p.hidden[k];
    const uint64_t bytes = UnitBytes(il, units[i]);
    if (bytes > left) {
      moves.push_back({p.id, i, Placement{}});
      left = 0;
    } else {
      left -= bytes;
      history -= bytes;
    }
  }
  const Plan plan = MakePlan({p.candidates, costs, history}, config);
  for (size_t i = 0; i < p.candidates.size(); ++i) {
    moves.push_back({p.id, p.index[i], plan.placements[i]});
  }
}

/// Recents of another sequence lose their protection, longest idle first, then some of `self`.
/// False if there are none left.
bool KvCache::Impl::GiveUpRecents(uint32_t il, std::vector<SeqPlan>& plans, SeqId self) {
  SeqPlan* plan = LongestIdle(plans, self);
  if (plan) {
    plan->protect_recents = false;
    plan->keep_reserve =
        std::find(step_sequences.begin(), step_sequences.end(), plan->id) != step_sequences.end();
  } else {
    plan = &*std::find_if(plans.begin(), plans.end(),
                          [self](const SeqPlan& p) { return p.id == self; });
    if (!plan->protect_recents) return false;
    plan->protect_recents = plan->recents > 0;
    plan->recents /= 2;
  }
  CollectCandidates(il, *plan);
  return true;
}

/// Plans the due sequence beside what the others were given, if nearly as much is left as it would
/// get if all were planned anew: an event then costs what one sequence costs. False: it is not.
bool KvCache::Impl::PlanAlone(uint32_t il, SeqId seq, std::span<const SeqId> domain, uint64_t share,
                              std::vector<UnitMove>& moves) {
  if (domain.size() < 2 || !step_sequences.empty() || restore) return false;
  uint64_t mandatory = 0, history = 0, n_units = 0;
  for (const SeqId id : domain) {
    if (id == seq) continue;
    const LayerSeq::Allowance& a = sequences[id]->layers[il].allowance;
    if (!a.known || Chunked(*sequences[id])) return false;
    mandatory += a.mandatory;
    history += a.history;
    n_units += a.n_units;
  }
  SeqPlan plan;
  plan.id = seq;
  plan.recents = Recents();
  CollectCandidates(il, plan);
  mandatory += plan.mandatory;
  n_units += plan.n_units();
  if (share < mandatory + history || n_units == 0) return false;
  const uint64_t left = share - mandatory - history;
  const uint64_t fair = (share - mandatory) / n_units * plan.n_units();
  if (left < fair - fair / 16) return false;
  PlanSequence(il, plan, std::min(left, fair), moves);
  return true;
}

/// Plans all sequences of a domain: history bytes by their numbers of candidates.
Status KvCache::Impl::PlanDomain(uint32_t il, SeqId seq, std::span<const SeqId> domain,
                                 uint64_t share, std::vector<UnitMove>& moves) {
  std::vector<SeqPlan> plans;
  for (const SeqId id : domain) {
    plans.emplace_back().id = id;
    plans.back().recents = Recents();
    CollectCandidates(il, plans.back());
  }
  const auto mandatory_bytes = [&plans] {
    uint64_t bytes = 0;
    for (const SeqPlan& p : plans) bytes += p.mandatory;
    return bytes;
  };
  uint64_t mandatory = mandatory_bytes();
  while (mandatory > share && GiveUpRecents(il, plans, seq)) mandatory = mandatory_bytes();
  if (mandatory > share) {
    return ResourceExhausted("sinks, recents and reserve of layer " + std::to_string(il) +
                             " need " + std::to_string(mandatory) +
                             " bytes; its share of the budget is " + std::to_string(share));
  }
  uint64_t n_units = 0;
  for (const SeqPlan& p : plans) n_units += p.n_units();
  for (const SeqPlan& p : plans) {
    const uint64_t left = share - mandatory;
    const uint64_t history =
        n_units == 0 ? 0 : left / n_units * p.n_units() + left % n_units * p.n_units() / n_units;
    PlanSequence(il, p, history, moves);
  }
  return {};
}

Status KvCache::Impl::Route(uint32_t il, SeqId seq, uint32_t reserve_tokens, ParallelFor& pool) {
  if (il >= layers.size()) return OutOfRange("layer " + std::to_string(il) + " does not exist");
  Sequence* self = Seq(seq);
  if (!self) return OutOfRange("sequence " + std::to_string(seq) + " does not exist");
  if (!Routes()) return {};
  if (Chunked(*self)) {
    self->chunk_tokens = std::max(self->chunk_tokens, reserve_tokens);
  } else {
    self->reserved = reserve_tokens;
  }

  const std::vector<SeqId> domain = Domain(seq);
  const Result<uint64_t> share = LayerShare(il, domain);
  if (!share.ok()) return share.status();
  std::vector<UnitMove> moves;
  if (!PlanAlone(il, seq, domain, *share, moves)) {
    QEVICT_RETURN_IF_ERROR(PlanDomain(il, seq, domain, *share, moves));
  }
  QEVICT_RETURN_IF_ERROR(Commit(il, moves, pool));
  self->layers[il].routed = true;
  self->first_event =
      self->first_event || std::all_of(self->layers.begin(), self->layers.end(),
                                       [](const LayerSeq& ls) { return ls.routed; });
  return {};
}

/// Layers may gain bytes before others give theirs up: the limit counts at the end. It may come
/// into force with this event (prefill = full); then other streams that grew meanwhile are routed
/// too.
Status KvCache::Impl::RouteAll(SeqId seq, uint32_t reserve_tokens, ParallelFor& pool) {
  const auto route_layers = [&](SeqId id, uint32_t reserve) {
    struct Scope {  // also if the system refuses memory
      Impl& cache;
      ~Scope() {
        cache.routing_all = false;
        cache.FinishChange();
      }
    } scope{*this};
    routing_all = true;
    Status status;
    for (uint32_t il = 0; il < layers.size() && status.ok(); ++il) {
      status = Route(il, id, reserve, pool);
    }
    return status;
  };
  QEVICT_RETURN_IF_ERROR(route_layers(seq, reserve_tokens));
  if (!LimitWanted() || !Seq(seq)) return {};
  const uint32_t own = sequences[seq]->stream;
  for (SeqId id = 0; id < sequences.size() && HeldBytes() > Limit(); ++id) {
    if (!sequences[id] || sequences[id]->stream == own || sequences[id]->empty()) continue;
    QEVICT_RETURN_IF_ERROR(route_layers(id, sequences[id]->reserved));
  }
  return {};
}

bool KvCache::Impl::NeedsBoundedRoute(uint32_t il, SeqId seq) const {
  const Sequence* s = Seq(seq);
  if (il >= layers.size() || !s || !Routes() || !Chunked(*s)) return false;
  const std::vector<SeqId> domain = Domain(seq);
  const Result<uint64_t> share = LayerShare(il, domain);
  if (!share.ok()) return true;  // Route says why
  uint64_t held = 0;
  for (const SeqId id : domain) {
    const Sequence& other = *sequences[id];
    if (!Chunked(other)) {
      held += CountNewWindows(other, other.reserved) * PoolsOf(il).costs().full_bytes;
    }
    for (const UnitRecord& u : other.layers[il].units) held += UnitBytes(il, u);
  }
  return held > *share;
}

}  // namespace qevict
