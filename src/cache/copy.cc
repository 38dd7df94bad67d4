// CopyStream: a deep copy of one stream's sequences, units and slots.
#include <cstring>

#include "cache/kv_cache_impl.h"

namespace qevict {

/// Slots that the units of a stream hold in one pool.
void KvCache::Impl::CountSlots(uint32_t stream, size_t pool, size_t& n_full,
                               size_t& n_packed) const {
  n_full = n_packed = 0;
  for (const auto& s : sequences) {
    if (!s || s->stream != stream) continue;
    for (const LayerSeq& ls : s->layers) {
      if (layers[static_cast<size_t>(&ls - s->layers.data())].pools != pool) continue;
      for (const UnitRecord& u : ls.units) {
        n_full += u.has_full() ? 1 : 0;
        n_packed += u.has_codes() ? 1 : 0;
      }
    }
  }
}

/// A copy of a slot at the end of its pool; the region has room for it.
uint32_t KvCache::Impl::DuplicateSlot(uint32_t il, bool packed, uint32_t slot, WindowId owner) {
  ShapePools& p = PoolsOf(il);
  SlotPool& pool = packed ? p.packed : p.full;
  const uint32_t fresh = static_cast<uint32_t>(pool.used());
  std::memcpy(pool.region->slot(fresh), pool.region->slot(slot), pool.region->slot_bytes());
  GrowTight(pool.owners, pool.used() + 1);
  pool.owners.push_back({owner, il});
  if (packed && config.check) pool.checksums.push_back(uint32_t{pool.checksums[slot]});
  return fresh;
}

/// A copy of a unit for another window, which has a record but no unit in this layer yet.
void KvCache::Impl::DuplicateUnit(uint32_t il, const UnitRecord& from, WindowId to) {
  UnitRecord u = from;
  u.window = to;
  if (u.has_full()) u.full_slot = DuplicateSlot(il, false, from.full_slot, to);
  if (u.has_codes()) u.set_packed_slot(DuplicateSlot(il, true, from.packed_slot(), to));
  if (u.has_full() && u.has_codes()) ++PoolsOf(il).n_dormant;
  AddUnit(sequences[windows[to].seq]->layers[il], u);
}

void KvCache::Impl::DropStream(uint32_t stream) {
  for (SeqId id = 0; id < sequences.size(); ++id) {
    if (sequences[id] && sequences[id]->stream == stream) DropSequence(id);
  }
  std::vector<uint32_t>().swap(streams[stream].cells);
  FinishChange();
}

void KvCache::Impl::CopySequence(SeqId from, uint32_t stream) {
  const SeqId to = CreateSequence(stream);
  Sequence& src = *sequences[from];
  Sequence& dst = *sequences[to];
  dst.facts() = src.facts();
  const std::vector<WindowId> src_windows = src.windows;
  for (const WindowId id : src_windows) {
    const WindowId copy = NewWindow(to, 0, true, false);
    const uint32_t birth = windows[copy].birth;
    windows[copy] = windows[id];
    windows[copy].seq = to;
    windows[copy].birth = birth;
    for (uint32_t t = 0; t < windows[id].n_tokens; ++t) {
      CellsOf(copy)[t] = CellsOf(id)[t];
      if ((windows[id].live >> t) & 1u) SetCell(stream, CellsOf(id)[t], CellCode({copy, t}));
    }
    if (src.tail.window == id) dst.tail = {copy, src.tail.offset};
    for (uint32_t il = 0; il < layers.size(); ++il) {
      if (const UnitRecord* u = FindUnit(from, il, id)) DuplicateUnit(il, *u, copy);
    }
  }
  for (uint32_t il = 0; il < layers.size(); ++il) dst.layers[il].routed = src.layers[il].routed;
  const std::vector<uint32_t> src_cells = streams[src.stream].cells;
  for (uint32_t cell = 0; cell < src_cells.size() && src.evicted > 0; ++cell) {
    if (src_cells[cell] == (kEvictedMark | from)) SetCell(stream, cell, kEvictedMark | to);
  }
}

Status KvCache::Impl::CopyStream(uint32_t src, uint32_t dst) {
  if (src >= n_streams || dst >= n_streams) {
    return OutOfRange("stream " + std::to_string(std::max(src, dst)) + " does not exist");
  }
  if (src == dst) return {};
  DropStream(dst);
  Status status;
  for (size_t i = 0; i < pools.size() && status.ok(); ++i) {
    size_t n_full = 0, n_packed = 0;
    CountSlots(src, i, n_full, n_packed);
    status = pools[i].full.region->Resize(pools[i].full.used() + n_full);
    if (status.ok()) status = pools[i].packed.region->Resize(pools[i].packed.used() + n_packed);
  }
  if (status.ok()) {
    std::vector<SeqId> ids;
    for (SeqId id = 0; id < sequences.size(); ++id) {
      if (sequences[id] && sequences[id]->stream == src) ids.push_back(id);
    }
    std::sort(ids.begin(), ids.end(),
              [&](SeqId a, SeqId b) { return sequences[a]->created < sequences[b]->created; });
    for (const SeqId id : ids) CopySequence(id, dst);
    if (LimitInForce() && HeldBytes() > Limit()) {
      status = ResourceExhausted("a copy of stream " + std::to_string(src) + " needs " +
                                 std::to_string(HeldBytes()) + " bytes in total; the budget is " +
                                 std::to_string(Limit()));
    }
  }
  if (!status.ok()) DropStream(dst);
  FinishChange();
  return status;
}

}  // namespace qevict
