// Sequences, windows and cells: which token is where, before any tier.
//
// Rollback (speculative decoding, an edited prompt): a token written over its own sequence's cell
// at the same or an earlier position takes the sequence back to there, and everything after it is
// dead. (Engines that show masks say so themselves: they kill what was overwritten before they
// append, hide what may have been taken back, and name the token that goes on.) Dead tokens at the
// end of the last window are cut off, so that it goes on. A sealed window (packed or evicted in
// some layer) takes no tokens, and neither does a hidden one.
#include <bit>

#include "cache/kv_cache_impl.h"
#include "cache/row_format.h"

namespace qevict {

SeqId KvCache::Impl::CreateSequence(uint32_t stream) {
  auto s = std::make_unique<Sequence>();
  s->stream = stream;
  s->layers.resize(layers.size());
  s->created = s->activity = ++clock;
  s->chunk_round = decode_rounds;
  for (SeqId id = 0; id < sequences.size(); ++id) {
    if (!sequences[id]) {
      sequences[id] = std::move(s);
      return id;
    }
  }
  sequences.push_back(std::move(s));
  return static_cast<SeqId>(sequences.size() - 1);
}

void KvCache::Impl::SetCell(uint32_t stream, uint32_t cell, uint32_t code) {
  std::vector<uint32_t>& cells = streams[stream].cells;
  if (cell >= cells.size()) {
    if (code == kNone) return;
    GrowCells(stream, cell);
  }
  cells[cell] = code;
}

/// Room for a cell in its stream's map. Throws std::bad_alloc, and nothing has changed then.
void KvCache::Impl::GrowCells(uint32_t stream, uint32_t cell) {
  std::vector<uint32_t>& cells = streams[stream].cells;
  if (cell < cells.size()) return;
  GrowTight(cells, cell + 1);
  cells.resize(cell + 1, kNone);
}

/// Room for so many more windows. Throws as above.
void KvCache::Impl::GrowWindows(size_t n_new) {
  const size_t fresh = n_new > n_free_windows ? n_new - n_free_windows : 0;
  GrowTight(windows, windows.size() + fresh);
  GrowTight(window_cells, window_cells.size() + fresh * config.window);
}

/// RoPE tables up to a position. Throws as above, but some tables may be longer.
void KvCache::Impl::GrowRopeTables(int32_t pos) {
  for (auto& table : rope_tables) table->Grow(std::max(pos, max_pos));
  max_pos = std::max(pos, max_pos);
}

/// Room of the sequence's last window for tokens right behind its tail. appended: becomes what the
/// sequence has had up to there, if there is room.
uint32_t KvCache::Impl::RoomBehindTail(const Sequence& s, uint64_t& appended) const {
  appended = s.appended;
  if (s.windows.empty()) return 0;
  const WindowRecord& w = windows[s.windows.back()];
  const uint32_t kept = 32 - static_cast<uint32_t>(std::countl_zero(w.live));
  const bool goes_on = s.tail.window == s.windows.back() && s.tail.offset + 1 == kept;
  if (!goes_on || w.has(WindowRecord::kSealed) || w.has(WindowRecord::kHidden)) return 0;
  appended -= std::min<uint64_t>(appended, w.n_tokens - kept);
  const uint64_t room = config.window - kept;
  if (!w.has(WindowRecord::kSink)) return static_cast<uint32_t>(room);
  const uint64_t sinks = config.sinks > appended ? config.sinks - appended : 0;
  return static_cast<uint32_t>(std::min(room, sinks));
}

/// Windows that `n` tokens with consecutive positions make, of a sequence that has had `appended`
/// and whose last window takes none of them.
uint32_t KvCache::Impl::CountFreshWindows(uint64_t appended, uint32_t n) const {
  const uint32_t w_len = config.window;
  uint32_t count = 0;
  for (; n > 0 && appended < config.sinks; ++count) {
    const auto taken =
        static_cast<uint32_t>(std::min<uint64_t>({w_len, config.sinks - appended, uint64_t{n}}));
    n -= taken;
    appended += taken;
  }
  return count + (n + w_len - 1) / w_len;
}

/// New windows that `n` more tokens with consecutive positions make.
uint32_t KvCache::Impl::CountNewWindows(const Sequence& s, uint32_t n) const {
  uint64_t appended = 0;
  const uint32_t taken = std::min(n, RoomBehindTail(s, appended));
  return CountFreshWindows(appended + taken, n - taken);
}

Status KvCache::Impl::CheckAppend(std::span<const TokenSpec> tokens) {
  int32_t highest = max_pos;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const TokenSpec& t = tokens[i];
    if (!Seq(t.seq)) return OutOfRange("sequence " + std::to_string(t.seq) + " does not exist");
    if (t.cell >= cells_per_stream) {
      return OutOfRange("cell " + std::to_string(t.cell) + " lies beyond the " +
                        std::to_string(cells_per_stream) + " cells of a stream");
    }
    if (t.positional) {
      if (t.pos < 0 || t.pos >= kMaxPosition) {
        return InvalidArgument("position " + std::to_string(t.pos) + " lies outside 0..." +
                               std::to_string(kMaxPosition));
      }
      highest = std::max(highest, t.pos);
    }
  }
  GrowRopeTables(highest);
  return {};
}

/// True if a run's first token stands right behind its sequence's tail, and none takes tokens of the
/// sequence back.
bool KvCache::Impl::RunGoesOn(std::span<const TokenSpec> run) const {
  const Sequence& s = *sequences[run[0].seq];
  if (s.windows.empty() || s.tail.window != s.windows.back()) return false;
  const WindowRecord& w = windows[s.windows.back()];
  if (w.has(WindowRecord::kPositional) != run[0].positional) return false;
  if (run[0].positional && w.PosOf(s.tail.offset + 1) != run[0].pos) return false;
  return std::none_of(run.begin(), run.end(), [&](const TokenSpec& t) {
    const uint32_t held = Cell(s.stream, t.cell);
    if (held == kNone || !IsToken(held)) return false;
    const TokenRef old{held / kMaxWindow, held % kMaxWindow};
    return TakesBack(t, old) || old.window == s.windows.back();
  });
}

/// Room for everything that AppendOne adds for the tokens of a step.
void KvCache::Impl::ReserveAppend(std::span<const TokenSpec> tokens) {
  std::vector<AppendCount>& counts = append_counts;
  counts.clear();
  size_t n_all = 0;
  for (size_t i = 0, end = 0; i < tokens.size(); i = end) {
    const TokenSpec& t = tokens[i];
    for (end = i; end < tokens.size(); ++end) {
      const TokenSpec& next = tokens[end];
      const auto ahead = static_cast<int32_t>(end - i);
      if (next.seq != t.seq || next.positional != t.positional) break;
      if (t.positional && next.pos != t.pos + ahead) break;
      GrowCells(sequences[t.seq]->stream, next.cell);
    }
    const auto run = tokens.subspan(i, end - i);
    const auto n = static_cast<uint32_t>(run.size());
    const Sequence& s = *sequences[t.seq];
    auto count = std::find_if(counts.begin(), counts.end(),
                              [&](const AppendCount& c) { return c.seq == t.seq; });
    const bool first = count == counts.end();
    if (first) count = counts.insert(count, {t.seq, 0, 0});
    const uint32_t n_windows = first && RunGoesOn(run)
                                   ? CountNewWindows(s, n)
                                   : CountFreshWindows(s.appended + count->n_tokens, n);
    count->n_tokens += n;
    count->n_windows += n_windows;
    n_all += n_windows;
  }
  GrowWindows(n_all);
  for (const AppendCount& c : counts) {
    GrowTight(sequences[c.seq]->windows, sequences[c.seq]->windows.size() + c.n_windows);
  }
}

/// All tokens of a step. All or nothing, but for the room that has been made.
Status KvCache::Impl::Append(std::span<const TokenSpec> tokens, std::vector<TokenRef>& refs) {
  QEVICT_RETURN_IF_ERROR(CheckAppend(tokens));
  refs.reserve(tokens.size());
  ReserveAppend(tokens);
  for (const TokenSpec& token : tokens) refs.push_back(AppendOne(token));
  FinishChange();
  return {};
}

/// True if writing `t` over its sequence's own token `held` takes the sequence back to there. A
/// ring of cells (sliding window) overwrites tokens too, but older ones: their positions lie before
/// t.pos. Without positions nothing can be told: a hole that a context shift has left is filled
/// alike. What was restored into a shared stream may belong to several sequences of the host: there
/// a token says nothing about those behind it.
bool KvCache::Impl::TakesBack(const TokenSpec& t, TokenRef held) const {
  const WindowRecord& w = windows[held.window];
  if (w.seq != t.seq || !sequences[t.seq]->chain) return false;
  return t.positional && w.has(WindowRecord::kPositional) && w.PosOf(held.offset) >= t.pos;
}

/// Kills `from` and the tokens behind it that `t` replaces: those without positions, and those at
/// its position or later. Tokens that this step has placed before `t` stay.
void KvCache::Impl::Truncate(const TokenSpec& t, TokenRef from) {
  const uint32_t birth = windows[from.window].birth;
  const std::vector<WindowId>& ids = sequences[t.seq]->windows;
  for (size_t i = ids.size(); i-- > 0;) {  // only what has been passed leaves the list
    const WindowId id = ids[i];
    const WindowRecord w = windows[id];  // a copy: the last kill frees the record
    if (w.birth < birth) return;
    const bool positional = t.positional && w.has(WindowRecord::kPositional);
    const uint32_t first = id == from.window ? from.offset : 0;
    for (uint32_t k = w.n_tokens; k-- > first;) {
      const bool replaced = !positional || w.PosOf(k) >= t.pos;
      if (replaced && ((w.live >> k) & 1u)) KillToken({id, k});
    }
  }
}

WindowId KvCache::Impl::OpenWindowFor(Sequence& s, const TokenSpec& t) {
  if (s.windows.empty()) return kNone;
  const WindowId id = s.windows.back();
  WindowRecord& w = windows[id];
  if (w.has(WindowRecord::kSealed) || w.has(WindowRecord::kHidden)) return kNone;
  if (w.has(WindowRecord::kPositional) != t.positional) return kNone;
  const uint32_t kept =
      32 - static_cast<uint32_t>(std::countl_zero(w.live));  // dead tail is cut off
  if (t.positional && w.PosOf(kept) != t.pos) return kNone;
  const uint64_t appended = s.appended - (w.n_tokens - kept);
  if (kept >= config.window) return kNone;
  if (w.has(WindowRecord::kSink) && appended >= config.sinks) return kNone;
  w.n_tokens = static_cast<uint8_t>(kept);
  s.appended = appended;
  return id;
}

/// Throws std::bad_alloc, and nothing has changed then.
WindowId KvCache::Impl::NewWindow(SeqId seq, int32_t pos, bool positional, bool sink) {
  Sequence& s = *sequences[seq];
  GrowWindows(1);
  GrowTight(s.windows, s.windows.size() + 1);
  WindowId id = free_window;
  if (id != kNone) {
    free_window = windows[id].seq;
    --n_free_windows;
  } else {
    id = static_cast<WindowId>(windows.size());
    windows.emplace_back();
    window_cells.resize(window_cells.size() + config.window);
  }
  WindowRecord w;
  w.seq = seq;
  w.birth = next_birth++;
  w.pos0 = positional ? pos : 0;
  if (positional) w.flags |= WindowRecord::kPositional;
  if (sink) w.flags |= WindowRecord::kSink;
  windows[id] = w;
  s.windows.push_back(id);
  return id;
}

TokenRef KvCache::Impl::AppendOne(const TokenSpec& t) {
  Sequence& s = *sequences[t.seq];
  const uint32_t held = Cell(s.stream, t.cell);
  if (held != kNone && IsToken(held)) {
    const TokenRef old{held / kMaxWindow, held % kMaxWindow};
    if (TakesBack(t, old)) Truncate(t, old);
  }
  ReleaseCell(s.stream, t.cell);
  WindowId id = OpenWindowFor(s, t);
  if (id == kNone) id = NewWindow(t.seq, t.pos, t.positional, s.appended < config.sinks);
  WindowRecord& w = windows[id];
  const TokenRef ref{id, w.n_tokens++};
  w.live |= 1u << ref.offset;
  CellsOf(id)[ref.offset] = t.cell;
  SetCell(s.stream, t.cell, CellCode(ref));
  ++s.appended;
  ++s.live;
  s.had_tokens = true;
  s.tail = ref;
  s.tail_pos = t.pos;
  if (s.reserved > 0) --s.reserved;
  return ref;
}

/// Forgets what a cell holds.
void KvCache::Impl::ReleaseCell(uint32_t stream, uint32_t cell) {
  const uint32_t held = Cell(stream, cell);
  if (held == kNone) return;
  if (IsToken(held)) {
    KillToken({held / kMaxWindow, held % kMaxWindow});
    return;
  }
  SetCell(stream, cell, kNone);
  if (Sequence* owner = Seq(held & ~kEvictedMark)) --owner->evicted;
}

void KvCache::Impl::KillToken(TokenRef ref) {
  WindowRecord& w = windows[ref.window];
  Sequence& s = *sequences[w.seq];
  SetCell(s.stream, CellsOf(ref.window)[ref.offset], kNone);
  w.live &= ~(1u << ref.offset);
  --s.live;
  if (s.tail.window == ref.window && s.tail.offset == ref.offset) {
    const uint32_t before = w.live & ((1u << ref.offset) - 1);
    s.tail = {};
    if (before != 0) s.tail = {ref.window, 31u - static_cast<uint32_t>(std::countl_zero(before))};
    if (before != 0) s.tail_pos = w.PosOf(s.tail.offset);
  }
  if (w.live == 0) FreeWindow(ref.window);
}

/// Newest first: what ends a sequence leaves its lists from their ends. Without memory for the
/// order: as they come, which takes longer.
void KvCache::Impl::ReleaseCells(uint32_t stream, std::span<const uint32_t> cells) {
  std::vector<std::pair<uint64_t, uint32_t>> order;  // (birth, offset), cell
  try {
    order.reserve(cells.size());
  } catch (const std::bad_alloc&) {
    for (const uint32_t cell : cells) ReleaseCell(stream, cell);
    return;
  }
  for (const uint32_t cell : cells) {
    const uint32_t held = Cell(stream, cell);
    if (held == kNone) continue;
    const uint64_t birth = IsToken(held) ? windows[held / kMaxWindow].birth : 0;
    order.emplace_back(birth * kMaxWindow + held % kMaxWindow, cell);
  }
  std::sort(order.rbegin(), order.rend());
  for (const auto& [at, cell] : order) ReleaseCell(stream, cell);
}

/// Frees the blocks of a unit and its record.
void KvCache::Impl::RemoveUnit(uint32_t il, UnitRecord& u) {
  DropLedger(il, u);
  for (const Side s : kBothSides) DropBlock(il, u, s);
  std::vector<UnitRecord>& units = sequences[windows[u.window].seq]->layers[il].units;
  --windows[u.window].n_units;
  units.erase(units.begin() + (&u - units.data()));
}

/// Removes a window whose tokens are all dead from every layer.
void KvCache::Impl::FreeWindow(WindowId id) {
  WindowRecord& w = windows[id];
  Sequence& s = *sequences[w.seq];
  for (uint32_t il = 0; il < layers.size(); ++il) {
    if (UnitRecord* u = FindUnit(w.seq, il, id)) RemoveUnit(il, *u);
  }
  if (s.windows.back() == id) {
    s.appended -= std::min<uint64_t>(s.appended, w.n_tokens);  // a tail was taken back
    s.windows.pop_back();
  } else {
    s.windows.erase(std::find(s.windows.begin(), s.windows.end(), id));
  }
  ReleaseRecord(id);
}

/// Gives up the record of a window that is evicted in every layer; the caller removes it from the
/// sequence's list.
void KvCache::Impl::DropEvictedWindow(WindowId id) {
  const WindowRecord& w = windows[id];
  Sequence& s = *sequences[w.seq];
  for (uint32_t t = 0; t < w.n_tokens; ++t) {
    if (((w.live >> t) & 1u) == 0) continue;
    SetCell(s.stream, CellsOf(id)[t], kEvictedMark | w.seq);
    --s.live;
    ++s.evicted;
  }
  if (s.tail.window == id) s.tail = {};
  ReleaseRecord(id);
}

void KvCache::Impl::ReleaseRecord(WindowId id) {
  ForgetRestoredWindow(id);
  windows[id] = WindowRecord{};
  windows[id].seq = free_window;
  free_window = id;
  ++n_free_windows;
}

void KvCache::Impl::DropSequenceIfDead(SeqId id) {
  const Sequence* s = Seq(id);
  if (s && s->empty() && s->had_tokens) DropSequence(id);
}

/// Forgets a sequence and all its tokens.
void KvCache::Impl::DropSequence(SeqId id) {
  Sequence& s = *sequences[id];
  while (!s.windows.empty()) {
    const WindowId w = s.windows.back();
    for (uint32_t t = 0; t < windows[w].n_tokens; ++t) {
      if ((windows[w].live >> t) & 1u) SetCell(s.stream, CellsOf(w)[t], kNone);
    }
    FreeWindow(w);
  }
  if (s.evicted > 0) {
    for (uint32_t& code : streams[s.stream].cells) {
      if (code == (kEvictedMark | id)) code = kNone;
    }
  }
  for (const LayerSeq& ls : s.layers)
    unit_table_bytes -= CapacityBytes(ls.units) + CapacityBytes(ls.ledger);
  ForgetRestore(id);
  sequences[id].reset();
}

/// Ends every call that changed windows: dead sequences go, slots and tables shrink, the limit
/// follows.
void KvCache::Impl::FinishChange() {
  for (SeqId id = 0; id < sequences.size(); ++id) {
    if (sequences[id]) DropSequenceIfDead(id);
  }
  TrimStores();
  UpdateLimit();
  NotePeak();
}

}  // namespace qevict
