// CopyStream: a copy-on-write fork of one stream. Windows and units get records of their own; their
// blocks are shared until one side changes them, so that time and memory grow with the number of
// windows and not with their bytes.
#include "cache/kv_cache_impl.h"

namespace qevict {

/// One more owner of a block; a block that has as many as can be counted is copied. Requires room
/// for the copy (ReserveCopies).
void KvCache::Impl::ShareBlock(uint32_t il, UnitSides& u, Side s) {
  if (!u.has(s)) return;
  BlockPool& pool = PoolOf(il, s, u.rung(s));
  if (!pool.Ref(u.block(s))) u.Set(s, u.rung(s), pool.Clone(u.block(s)));
}

/// A unit for another window, with the same blocks. That window has a record, but no unit in this
/// layer yet. Requires room in the lists.
void KvCache::Impl::ShareUnit(uint32_t il, const UnitRecord& from, WindowId to) {
  const LedgerEntry* entry =
      from.dormant() ? FindLedger(sequences[windows[from.window].seq]->layers[il], from.window)
                     : nullptr;
  LedgerEntry codes;
  if (entry) codes = *entry;
  UnitRecord u = from;
  u.window = to;
  u.set_dormant(false);
  for (const Side s : kBothSides) ShareBlock(il, u, s);
  AddUnit(sequences[windows[to].seq]->layers[il], u);
  if (!entry) return;
  UnitRecord& added = *FindUnit(windows[to].seq, il, to);
  for (const Side s : kBothSides) {
    ShareBlock(il, codes, s);
    if (codes.has(s)) AddLedger(il, added, s, codes.rung(s), codes.block(s));
  }
}

void KvCache::Impl::DropStream(uint32_t stream) {
  for (SeqId id = 0; id < sequences.size(); ++id) {
    if (sequences[id] && sequences[id]->stream == stream) DropSequence(id);
  }
  std::vector<uint32_t>().swap(streams[stream].cells);
  FinishChange();
}

/// Pages and tables for blocks whose references are used up.
Status KvCache::Impl::ReserveCopies(uint32_t src) {
  for (const auto& s : sequences) {
    if (!s || s->stream != src) continue;
    for (uint32_t il = 0; il < layers.size(); ++il) {
      const auto reserve = [&](const UnitSides& u) -> Status {
        for (const Side side : kBothSides) {
          if (!u.has(side)) continue;
          BlockPool& pool = PoolOf(il, side, u.rung(side));
          if (pool.refs(u.block(side)) < BlockPool::kMaxRefs) continue;
          QEVICT_RETURN_IF_ERROR(pool.Reserve(s->windows.size()));
        }
        return {};
      };
      for (const UnitRecord& u : s->layers[il].units) QEVICT_RETURN_IF_ERROR(reserve(u));
      for (const LedgerEntry& e : s->layers[il].ledger) QEVICT_RETURN_IF_ERROR(reserve(e));
    }
  }
  return {};
}

void KvCache::Impl::CopySequence(SeqId from, uint32_t stream) {
  const SeqId to = CreateSequence(stream);
  Sequence& src = *sequences[from];
  Sequence& dst = *sequences[to];
  std::vector<WindowId> copies;
  copies.reserve(src.windows.size());
  GrowTight(dst.windows, src.windows.size());
  GrowWindows(src.windows.size());
  if (!streams[src.stream].cells.empty()) {
    GrowCells(stream, static_cast<uint32_t>(streams[src.stream].cells.size()) - 1);
  }
  for (uint32_t il = 0; il < layers.size(); ++il) {
    GrowUnits(dst.layers[il], src.layers[il].units.size());
    GrowLedger(dst.layers[il], src.layers[il].ledger.size());
    dst.layers[il].routed = src.layers[il].routed;
  }
  dst.facts() = src.facts();
  dst.live = dst.evicted = 0;  // counted as they come
  for (const WindowId id : src.windows) {
    const WindowId copy = NewWindow(to, 0, true, false);
    copies.push_back(copy);
    const uint32_t birth = windows[copy].birth;
    windows[copy] = windows[id];
    windows[copy].seq = to;
    windows[copy].birth = birth;
    windows[copy].n_units = 0;
    for (uint32_t t = 0; t < windows[id].n_tokens; ++t) {
      CellsOf(copy)[t] = CellsOf(id)[t];
      if (((windows[id].live >> t) & 1u) == 0) continue;
      SetCell(stream, CellsOf(id)[t], CellCode({copy, t}));
      ++dst.live;
    }
    if (src.tail.window == id) dst.tail = {copy, src.tail.offset};
  }
  for (uint32_t il = 0; il < layers.size(); ++il) {
    size_t at = 0;
    for (const UnitRecord& u : src.layers[il].units) {
      while (src.windows[at] != u.window) ++at;
      ShareUnit(il, u, copies[at]);
      ++windows[copies[at]].n_units;
    }
  }
  const size_t n_cells = src.evicted > 0 ? streams[src.stream].cells.size() : 0;
  for (uint32_t cell = 0; cell < n_cells; ++cell) {
    if (streams[src.stream].cells[cell] != (kEvictedMark | from)) continue;
    SetCell(stream, cell, kEvictedMark | to);
    ++dst.evicted;
  }
}

Status KvCache::Impl::CopyStream(uint32_t src, uint32_t dst) {
  if (src >= n_streams || dst >= n_streams) {
    return OutOfRange("stream " + std::to_string(std::max(src, dst)) + " does not exist");
  }
  if (src == dst) return {};
  DropStream(dst);
  Status status = ReserveCopies(src);
  try {
    std::vector<SeqId> ids;
    for (SeqId id = 0; status.ok() && id < sequences.size(); ++id) {
      if (sequences[id] && sequences[id]->stream == src) ids.push_back(id);
    }
    std::sort(ids.begin(), ids.end(),
              [&](SeqId a, SeqId b) { return sequences[a]->created < sequences[b]->created; });
    for (const SeqId id : ids) CopySequence(id, dst);
  } catch (const std::bad_alloc&) {
    status = OutOfMemory();
  }
  if (!status.ok()) DropStream(dst);
  FinishChange();
  for (SeqId id = 0; id < sequences.size(); ++id) {  // records may exceed the budget
    if (sequences[id] && sequences[id]->stream == dst) FitNow(id);
  }
  return status;
}

}  // namespace qevict
