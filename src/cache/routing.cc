// Routing: when events are due, and how one is carried out. budget.cc says how many bytes a layer
// may hold, plan.cc asks the policy where each window shall be, commit.cc moves them.
// If mandatory bytes exceed the share, protection is given up: recents of other sequences, longest
// idle first, then more (GiveWay). An event never fails because of the budget.
#include <cmath>
#include <numeric>

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
    due = PolicyOf(config).due({Phase::kDecode, s->decode_steps, n}, config);
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
  const StepRows rows{seq, n, kind};
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
  const uint32_t n_kv_heads = StoreOf(il).shape.n_kv_heads;
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
  const ShapeStore& store = StoreOf(il);
  uint64_t bytes = store.UnitCost(u.rung(Side::kKeys), u.rung(Side::kValues));
  if (!config.charge_dormant || !u.dormant()) return bytes;
  const LedgerEntry* entry = FindLedger(sequences[windows[u.window].seq]->layers[il], u.window);
  bytes += kLedgerBytes;
  for (const Side s : kBothSides) {
    if (entry->has(s)) bytes += store.BlockCost(s, entry->rung(s));
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
  const ShapeStore& p = StoreOf(il);
  const uint32_t d = p.shape.head_dim, n = windows[u.window].n_tokens;
  uint16_t row[kMaxHeadDim];
  float key[kMaxHeadDim];
  double sum = 0.0;
  for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
    for (uint32_t t = 0; t < n; ++t) {
      LoadKeyRow(Block(il, u, Side::kKeys) + h * p.rungs[kFullRung].bytes_of_head(Side::kKeys),
                 config.window, d, t, row);
      ConvertTo32(row, d, p.shape.elem_k, key);
      sum += KeyNormSum(key, 1, d);
    }
  }
  u.score = KeyNormScore(config, sum, p.shape.n_kv_heads, n);
}

Status KvCache::Impl::Route(uint32_t il, SeqId seq, uint32_t reserve_tokens, ParallelFor& pool) {
  if (il >= layers.size()) return OutOfRange("layer " + std::to_string(il) + " does not exist");
  return RouteSome({&il, 1}, seq, reserve_tokens, pool);
}

/// Plans and commits some layers of the sequences that share the budget with `seq`.
Status KvCache::Impl::RouteSome(std::span<const uint32_t> ils, SeqId seq, uint32_t reserve_tokens,
                                ParallelFor& pool) {
  Sequence* self = Seq(seq);
  if (!self) return OutOfRange("sequence " + std::to_string(seq) + " does not exist");
  if (!Routes()) return {};
  if (Chunked(*self)) {
    self->chunk_tokens = std::max(self->chunk_tokens, reserve_tokens);
  } else {
    self->reserved = reserve_tokens;
  }
  std::vector<std::vector<UnitMove>> moves = PlanMoves(ils, seq);
  for (size_t i = 0; i < ils.size(); ++i) {
    QEVICT_RETURN_IF_ERROR(Commit(ils[i], moves[i], pool));
    self->layers[ils[i]].routed = true;
  }
  self->first_event =
      self->first_event || std::all_of(self->layers.begin(), self->layers.end(),
                                       [](const LayerSeq& ls) { return ls.routed; });
  return {};
}

/// Layers may gain bytes before others give theirs up: the limit counts at the end.
Status KvCache::Impl::RouteLayers(SeqId seq, uint32_t reserve, ParallelFor& pool) {
  struct Scope {  // also if the system refuses memory
    Impl& cache;
    ~Scope() {
      cache.routing_all = false;
      cache.FinishChange();
    }
  } scope{*this};
  routing_all = true;
  std::vector<uint32_t> all(layers.size());
  std::iota(all.begin(), all.end(), 0u);
  return RouteSome(all, seq, reserve, pool);
}

/// The limit may come into force with this event (prefill = full); then other streams that grew
/// meanwhile are routed too. Shares are made of sums that leave room for pages and tables; where
/// that was not enough, the event is repeated with what is missing taken off.
Status KvCache::Impl::RouteAll(SeqId seq, uint32_t reserve_tokens, ParallelFor& pool) {
  constexpr int kAttempts = 8;
  struct Scope {
    Impl& cache;
    ~Scope() { cache.pressure = 0; }
  } scope{*this};
  overdrawn = false;
  QEVICT_RETURN_IF_ERROR(RouteLayers(seq, reserve_tokens, pool));
  if (!LimitWanted() || !Seq(seq)) return {};
  const uint32_t own = sequences[seq]->stream;
  for (SeqId id = 0; id < sequences.size() && HeldBytes() > Limit(); ++id) {
    if (!sequences[id] || sequences[id]->stream == own || sequences[id]->empty()) continue;
    QEVICT_RETURN_IF_ERROR(RouteLayers(id, sequences[id]->reserved, pool));
  }
  for (int i = 0; i < kAttempts && Seq(seq); ++i) {
    const StepRows next{seq, reserve_tokens};
    const uint64_t needed = HeldBytes() + StepGrowth({&next, 1});
    if (needed <= Limit()) break;
    pressure += needed - Limit() + kPageBytes;
    QEVICT_RETURN_IF_ERROR(RouteLayers(seq, reserve_tokens, pool));
  }
  return {};
}

/// What a call other than a step has added (a restored state, a copy's records) is held to the limit
/// at once: what ranks last is packed or evicted, of all sequences that share the budget.
void KvCache::Impl::FitNow(SeqId seq) {
  if (!Seq(seq) || !LimitWanted() || HeldBytes() <= Limit()) return;
  try {
    const std::unique_ptr<ParallelFor> serial = MakeSerial();
    (void)RouteAll(seq, config.EffectiveInterval(), *serial);  // if not, the next step does it
  } catch (const std::bad_alloc&) {
  }
}

/// An event for each domain of the step, its sequences asked for what they are about to append.
Status KvCache::Impl::RouteForRows(std::span<const StepRows> rows, ParallelFor& pool) {
  const auto same_domain = [&](const StepRows& a, const StepRows& b) {
    return config.budget_bytes > 0 || sequences[a.seq]->stream == sequences[b.seq]->stream;
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto earlier = rows.first(i);
    if (std::any_of(earlier.begin(), earlier.end(),
                    [&](const StepRows& r) { return same_domain(r, rows[i]); })) {
      continue;
    }
    const Sequence& s = *sequences[rows[i].seq];
    QEVICT_RETURN_IF_ERROR(RouteLayers(rows[i].seq, Chunked(s) ? rows[i].n : s.reserved, pool));
    ++counters.events;
  }
  return {};
}

/// Events until the rows of a step fit together: an open window may be given up, and is needed anew
/// then.
Status KvCache::Impl::MakeRoom(std::span<const StepRows> rows, ParallelFor& pool) {
  constexpr int kAttempts = 8;
  overdrawn = false;
  if (!Routes() || rows.empty()) return {};
  UpdateLimit();
  if (!LimitWanted() || FitsNext(rows)) return {};
  struct Scope {
    Impl& cache;
    ~Scope() {
      cache.pressure = 0;
      cache.step_sequences.clear();
    }
  } scope{*this};
  for (const StepRows& r : rows) {
    Sequence& s = *sequences[r.seq];
    step_sequences.push_back(r.seq);
    if (!Chunked(s)) s.reserved = std::max(s.reserved, r.n);
  }
  for (int i = 0; i < kAttempts && !FitsNext(rows); ++i) {
    pressure += HeldBytes() + StepGrowth(rows) - Limit() + kPageBytes;
    QEVICT_RETURN_IF_ERROR(RouteForRows(rows, pool));
  }
  overdrawn = !FitsNext(rows);
  UpdateLimit();
  return {};
}

Status KvCache::Impl::PrepareStep(std::span<const StepRows> rows, ParallelFor& pool) {
  for (const StepRows& r : rows) {
    if (!NoteStep(r.seq, r.n, r.kind)) continue;
    QEVICT_RETURN_IF_ERROR(RouteAll(r.seq, std::max(r.n, config.EffectiveInterval()), pool));
    if (Routes()) ++counters.events;
  }
  return MakeRoom(rows, pool);
}

/// One layer of a prompt chunk. After the last one what pages and tables took beyond the shares is
/// made up for.
Status KvCache::Impl::RouteChunk(uint32_t il, SeqId seq, uint32_t reserve, ParallelFor& pool) {
  QEVICT_RETURN_IF_ERROR(Route(il, seq, reserve, pool));
  if (il + 1 < layers.size() || !LimitWanted() || HeldBytes() <= Limit()) return {};
  return RouteAll(seq, reserve, pool);
}

bool KvCache::Impl::NeedsBoundedRoute(uint32_t il, SeqId seq) const {
  const Sequence* s = Seq(seq);
  if (il >= layers.size() || !s || !Routes() || !Chunked(*s)) return false;
  if (il + 1 == layers.size() && LimitWanted() && HeldBytes() > Limit()) return true;
  const std::vector<SeqId> domain = Domain(seq);
  const uint64_t share = LayerShare(il, domain);
  uint64_t held = 0;
  for (const SeqId id : domain) {
    const Sequence& other = *sequences[id];
    if (!Chunked(other)) {
      held += CountNewWindows(other, other.reserved) * StoreOf(il).UnitCost(kFullRung, kFullRung);
    }
    for (const UnitRecord& u : other.layers[il].units) held += UnitBytes(il, u);
  }
  return held > share;
}

}  // namespace qevict
