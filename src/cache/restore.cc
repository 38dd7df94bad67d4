// Rows in: what an engine's restore writes into the cells.
//
// Engines write K of every layer, then V of every layer, in ranges of cells of any size. Rows of
// the first layer's K make tokens and windows: records carry their place, full rows are looked up
// in the row memory, unknown rows become tokens without positions. Codes arrive in shares, one per
// row, and are copied straight into packed slots; a unit that has not received all its shares when
// the next step begins is evicted in that layer. A row that cannot be right loses its token,
// nothing else. What arrives may exceed the budget until the restore ends; then it is held to it.
#include "cache/restore.h"

#include <bit>

#include "cache/row_format.h"

namespace qevict {
KvCache::Impl::Impl() = default;
KvCache::Impl::~Impl() = default;

void KvCache::Impl::BeginRestore(uint32_t il, uint32_t stream, Side side) {
  const bool first = side == Side::kKeys && (!restore || restore->stream != stream ||
                                             (il == restore->first_layer && restore->filling));
  if (first) {
    FinishRestore();
    auto session = std::make_unique<RestoreSession>();
    session->stream = stream;
    session->first_layer = il;
    session->chains.resize(layers.size());
    session->seq = CreateSequence(stream);
    restore = std::move(session);
    sequences[restore->seq]->prompt_phase = false;
    sequences[restore->seq]->chain = n_streams > 1;
  } else if (restore && side == Side::kValues) {
    restore->filling = true;
  }
}

/// Called when a window is freed while its rows may still arrive.
void KvCache::Impl::ForgetRestoredWindow(WindowId id) {
  if (!restore) return;
  std::erase_if(restore->windows, [id](const auto& entry) { return entry.second == id; });
  for (uint32_t il = 0; il < layers.size(); ++il) restore->units.erase(RestoreSession::Key(il, id));
}

void KvCache::Impl::ForgetRestore(SeqId seq) {
  if (restore && restore->seq == seq) restore.reset();
}

/// Orders windows by position (cells may come in any order), renews births, finds the tail.
void KvCache::Impl::SortRestored(SeqId seq) {
  Sequence& s = *sequences[seq];
  const bool positional = std::all_of(s.windows.begin(), s.windows.end(), [&](WindowId id) {
    return windows[id].has(WindowRecord::kPositional);
  });
  if (positional) {
    std::stable_sort(s.windows.begin(), s.windows.end(),
                     [&](WindowId a, WindowId b) { return windows[a].pos0 < windows[b].pos0; });
    for (const WindowId id : s.windows) windows[id].birth = next_birth++;
    for (LayerSeq& ls : s.layers) {
      std::sort(ls.units.begin(), ls.units.end(), [&](const UnitRecord& a, const UnitRecord& b) {
        return windows[a.window].birth < windows[b.window].birth;
      });
    }
  }
  bool sinks = true;
  for (const WindowId id : s.windows) {
    sinks = sinks && windows[id].has(WindowRecord::kSink);
    if (!sinks) windows[id].flags &= static_cast<uint8_t>(~WindowRecord::kSink);
  }
  s.tail = {};
  if (s.windows.empty()) return;
  const WindowId last = s.windows.back();
  s.tail = {last, 31u - static_cast<uint32_t>(std::countl_zero(windows[last].live))};
  s.tail_pos = windows[last].PosOf(s.tail.offset);
}

/// Ends a restore: incomplete units go, counters take the place of what a live sequence has.
void KvCache::Impl::FinishRestore() {
  if (!restore) return;
  const std::unique_ptr<RestoreSession> session = std::move(restore);
  if (!Seq(session->seq)) return;
  if (!sequences[session->seq]->had_tokens) {
    DropSequence(session->seq);
    return;
  }
  Sequence& s = *sequences[session->seq];
  for (const auto& [key, unit] : session->units) {
    const uint32_t il = static_cast<uint32_t>(key >> 32);
    const WindowId id = static_cast<WindowId>(key);
    if (unit.n_shares == 0 || unit.complete()) continue;
    if (UnitRecord* u = FindUnit(session->seq, il, id)) RemoveUnit(il, *u);
  }
  bool dropped = false;
  for (const WindowId id : s.windows) {
    WindowRecord& w = windows[id];
    if (w.n_units < layers.size()) w.flags |= WindowRecord::kSealed;
    w.n_created = static_cast<uint16_t>(layers.size());
    s.first_event |= w.has(WindowRecord::kSealed);
    if (w.n_units > 0) continue;
    DropEvictedWindow(id);
    dropped = true;
  }
  if (dropped) std::erase_if(s.windows, [&](WindowId id) { return !windows[id].in_use(); });
  s.first_event |= s.evicted > 0;
  s.decoded = s.first_event;  // only what has generated is saved with packed or evicted windows
  SortRestored(session->seq);
  FinishChange();
  if (Seq(session->seq)) FitNow(session->seq);
}

Status KvCache::Impl::RestoreRows(uint32_t il, uint32_t stream, uint32_t cell0, uint32_t n,
                                  Side side, const uint16_t* rows) {
  if (il >= layers.size() || stream >= n_streams || cell0 > cells_per_stream ||
      n > cells_per_stream - cell0) {
    return OutOfRange("rows of layer " + std::to_string(il) + ", stream " + std::to_string(stream) +
                      ", cells " + std::to_string(cell0) + "+" + std::to_string(n) +
                      " lie outside the cache");
  }
  BeginRestore(il, stream, side);
  Status result;
  const size_t n_words = RowWords(il, side);
  const auto restore_row = [&](uint32_t i) -> Status {
    try {
      return RestoreRow(il, stream, cell0 + i, side, rows + i * n_words);
    } catch (const std::bad_alloc&) {
      return OutOfMemory();
    }
  };
  for (uint32_t i = 0; i < n; ++i) {
    Status status = restore_row(i);
    if (status.ok()) continue;
    if (status.code() != StatusCode::kFailedPrecondition) ReleaseCell(stream, cell0 + i);
    const bool stop = status.code() == StatusCode::kResourceExhausted;
    if (result.ok() || stop) result = std::move(status);
    if (stop) break;
  }
  FinishChange();
  return result;
}

Status KvCache::Impl::RestoreRow(uint32_t il, uint32_t stream, uint32_t cell, Side side,
                                 const uint16_t* row) {
  const size_t n_words = RowWords(il, side);
  const bool is_k = side == Side::kKeys;
  const bool makes_tokens = is_k && restore && il == restore->first_layer;
  if (makes_tokens) ReleaseCell(stream, cell);
  const uint64_t hash = is_k && restore ? restore->chains[il].Next(il, cell, row, n_words) : 0;
  const bool zero = IsZeroRow(row, n_words);
  if (is_k && zero) {
    ReleaseCell(stream, cell);
    return {};
  }
  RowRecord record;
  const bool is_record = IsRowRecord(row, n_words);
  if (is_record) {
    Result<RowRecord> parsed = ReadRowHeader(row, n_words, config, is_k);
    if (!parsed.ok()) return parsed.status();
    record = parsed.value();
  }
  TokenRef ref;
  if (makes_tokens) {
    QEVICT_RETURN_IF_ERROR(RestoreToken(cell, is_record ? &record : nullptr, hash, ref));
    if (ref.window == kNone) return {};  // evicted in every layer
  } else {
    const uint32_t code = Cell(stream, cell);
    if (code == kNone || !IsToken(code)) return {};  // dropped before, or evicted
    ref = {code / kMaxWindow, code % kMaxWindow};
    if (!restore || windows[ref.window].seq != restore->seq) {
      return FailedPrecondition("rows of cell " + std::to_string(cell) +
                                " arrive without the first layer's keys");
    }
  }
  return RestoreUnit(il, ref, side, is_record ? &record : nullptr, hash, row);
}

/// Makes the token of a cell in the sequence being restored. No ref: it is evicted in every layer.
Status KvCache::Impl::RestoreToken(uint32_t cell, const RowRecord* record, uint64_t hash,
                                   TokenRef& ref) {
  RowRecord place;
  bool known = record != nullptr;
  if (record) {
    place = *record;
  } else {
    known = RecallRow(hash, place) && place.n_tokens > 0;
  }
  Sequence& s = *sequences[restore->seq];
  GrowCells(restore->stream, cell);
  if (record && record->gone()) {
    s.had_tokens = true;
    ++s.appended;
    ++s.evicted;
    SetCell(restore->stream, cell, kEvictedMark | restore->seq);
    return {};
  }
  const WindowId id = known && place.window == config.window ? RestoredWindow(place) : kNone;
  if (id == kNone || ((windows[id].live >> place.offset) & 1u)) {
    if (record)
      return DataLoss(
          "saved rows name the same token twice, one window differently, or a position beyond the "
          "budget's RoPE tables");
    const bool positional =
        known && (place.flags & RowRecord::kPositional) != 0 && RoomForPosition(place.pos0);
    const int32_t pos = place.pos0 + place.offset;
    ref = AppendOne({restore->seq, cell, positional ? pos : 0, positional});
    return {};
  }
  ref = {id, place.offset};
  windows[id].live |= 1u << place.offset;
  CellsOf(id)[place.offset] = cell;
  SetCell(restore->stream, cell, CellCode(ref));
  s.had_tokens = true;
  ++s.appended;
  ++s.live;
  return {};
}

/// Grows the RoPE tables to a new window's positions. False, and nothing done, if the budget has no
/// room: a damaged record can name any position.
bool KvCache::Impl::RoomForPosition(int32_t pos0) {
  const int32_t highest = std::max({max_pos, pos0 + static_cast<int32_t>(kMaxWindow), -pos0});
  uint64_t bytes = 0;
  for (const auto& table : rope_tables) bytes += table->GrowthBytes(highest);
  if (Routes() && bytes > TotalBudget() / 4) return false;
  if (bytes > 0 && LimitInForce() && HeldBytes() + bytes > Limit()) return false;
  GrowRopeTables(highest);
  if (bytes > 0) UpdateLimit();
  return true;
}

/// The window of a record, made if it is new; kNone if it contradicts what is there, or stands
/// where the budget has no room for RoPE tables.
WindowId KvCache::Impl::RestoredWindow(const RowRecord& r) {
  const uint64_t key = RestoreSession::Key(r.kind == RowKind::kFull ? 1 : 0, r.birth);
  const auto found = restore->windows.find(key);
  const bool positional = (r.flags & RowRecord::kPositional) != 0;
  if (found != restore->windows.end()) {
    const WindowRecord& w = windows[found->second];
    const bool same = w.pos0 == r.pos0 && w.n_tokens == r.n_tokens &&
                      w.has(WindowRecord::kPositional) == positional;
    return same ? found->second : kNone;
  }
  if (!RoomForPosition(r.pos0)) return kNone;
  Sequence& s = *sequences[restore->seq];
  const bool sink = (r.flags & RowRecord::kSink) != 0 &&
                    (s.windows.empty() || windows[s.windows.back()].has(WindowRecord::kSink));
  const auto entry = restore->windows.emplace(key, kNone).first;
  try {
    entry->second = NewWindow(restore->seq, r.pos0, positional, sink);
  } catch (const std::bad_alloc&) {
    restore->windows.erase(entry);
    throw;
  }
  const WindowId id = entry->second;
  windows[id].pos0 = r.pos0;
  windows[id].n_tokens = r.n_tokens;
  std::fill_n(CellsOf(id), config.window, 0u);
  return id;
}

/// Stores one row of a token that exists.
Status KvCache::Impl::RestoreUnit(uint32_t il, TokenRef ref, Side side, const RowRecord* record,
                                  uint64_t hash, const uint16_t* row) {
  const uint64_t key = RestoreSession::Key(il, ref.window);
  const auto known = restore->units.find(key);
  UnitRecord* u = FindUnit(restore->seq, il, ref.window);
  if (record && record->packed()) return RestoreShare(il, ref, side, *record, row);
  if (record) {
    if (u) return DataLoss("a saved row says evicted, another one of its window does not");
    if (known != restore->units.end()) return {};
    if (side == Side::kValues) return DataLoss("values of a token whose keys are missing");
    restore->units.emplace(key, RestoredUnit{});
    windows[ref.window].flags |= WindowRecord::kSealed;
    return {};  // counts as written when the restore ends
  }
  if (known != restore->units.end()) {
    return DataLoss("a saved row is full precision, another one of its window is not");
  }
  if (!u) {
    if (side == Side::kValues) return DataLoss("values of a token whose keys are missing");
    QEVICT_RETURN_IF_ERROR(CreateUnits(il, std::span<const TokenRef>(&ref, 1)));
    u = FindUnit(restore->seq, il, ref.window);
  }
  WriteFullRow(il, *u, ref.offset, side, row);
  RowRecord place;
  if (side == Side::kKeys && RecallRow(hash, place)) u->score = place.score;
  return {};
}

Status KvCache::Impl::RestoreShare(uint32_t il, TokenRef ref, Side side, const RowRecord& record,
                                   const uint16_t* row) {
  if (!SharesFit(il, record.n_shares)) return DataLoss("a saved row is too short for its share");
  const uint64_t key = RestoreSession::Key(il, ref.window);
  auto known = restore->units.find(key);
  if (known == restore->units.end()) {
    if (side == Side::kValues) return DataLoss("values of a token whose keys are missing");
    if (FindUnit(restore->seq, il, ref.window)) {
      return DataLoss("a saved row is packed, another one of its window is not");
    }
    known = restore->units.emplace(key, RestoredUnit{0, 0, record.n_shares}).first;
    Status made;
    try {
      made = CreatePackedUnit(il, ref.window, record.score);
    } catch (const std::bad_alloc&) {
      made = OutOfMemory();
    }
    if (!made.ok()) restore->units.erase(known);
    QEVICT_RETURN_IF_ERROR(made);
  }
  RestoredUnit& unit = known->second;
  const UnitRecord* u = FindUnit(restore->seq, il, ref.window);
  uint32_t& shares = side == Side::kKeys ? unit.shares_k : unit.shares_v;
  if (!u || unit.n_shares != record.n_shares || ((shares >> record.share) & 1u)) {
    return DataLoss("shares of a saved window do not match");
  }
  shares |= 1u << record.share;
  uint8_t* bytes = reinterpret_cast<uint8_t*>(const_cast<uint16_t*>(row)) + kRowHeaderBytes;
  CopyShare(il, Block(il, *u, side), side, record, bytes, true);
  PoolOf(il, side, u->rung(side)).Seal(u->block(side));
  return {};
}

Status KvCache::Impl::CreatePackedUnit(uint32_t il, WindowId id, float score) {
  RungStore& rung = StoreOf(il).rungs[1];
  LayerSeq& ls = sequences[windows[id].seq]->layers[il];
  std::vector<BlockCount> blocks;
  for (const Side s : kBothSides) CountBlock(blocks, rung.pool(s));
  GrowUnits(ls, ls.units.size() + 1);
  Status grown;
  for (const BlockCount& count : blocks) {
    if (grown.ok()) grown = count.pool->Reserve(count.n);
  }
  if (!grown.ok()) {
    TrimUnits(ls);
    return grown;
  }
  UnitRecord u;
  u.window = id;
  for (const Side s : kBothSides) u.Set(s, 1, rung.pool(s).New());
  u.score = score;
  AddUnit(ls, u);
  ++windows[id].n_units;
  ++windows[id].n_created;
  windows[id].flags |= WindowRecord::kSealed;
  return {};
}

}  // namespace qevict
