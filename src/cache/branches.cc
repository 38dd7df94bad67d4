// Branches: sequences that share a prefix, and the bookkeeping of what belongs to which.
//
// Rows see windows by their masks, whatever sequence these are listed in. So a branch needs no copy
// of its prefix, and windows may be listed anew without anything that rows see changing: what hangs
// on a list is which windows are sinks and recents, whose phase counts, and what an event plans.
#include <algorithm>
#include <bit>

#include "cache/kv_cache_impl.h"

namespace qevict {

SeqId KvCache::Impl::BranchSequence(SeqId parent) {
  const SeqId id = CreateSequence(sequences[parent]->stream);
  const Sequence& from = *sequences[parent];
  Sequence& s = *sequences[id];
  const uint64_t activity = s.activity;
  s.facts() = from.facts();
  s.activity = activity;
  s.appended = std::max<uint64_t>(from.appended, config.sinks);
  s.live = s.evicted = 0;
  s.reserved = 0;
  s.had_tokens = false;
  for (size_t il = 0; il < s.layers.size(); ++il) s.layers[il].routed = from.layers[il].routed;
  return id;
}

/// Moves the records of `ids` from one list to another; both are in the order of births.
template <typename Record, typename Add>
static void MoveRecords(std::span<const WindowId> ids, const std::vector<WindowRecord>& windows,
                        std::vector<Record>& from, const Add& add) {
  size_t kept = 0, i = 0;
  for (const Record& r : from) {
    while (i < ids.size() && windows[ids[i]].birth < windows[r.window].birth) ++i;
    if (i < ids.size() && ids[i] == r.window) {
      add(r);
    } else {
      from[kept++] = r;
    }
  }
  from.resize(kept);
}

/// The units of `ids` in every layer, with what the ledger has of them.
void KvCache::Impl::MoveUnits(std::span<const WindowId> ids, SeqId from, SeqId to) {
  for (uint32_t il = 0; il < layers.size(); ++il) {
    LayerSeq &source = sequences[from]->layers[il], &target = sequences[to]->layers[il];
    MoveRecords(ids, windows, source.units, [&](const UnitRecord& u) { AddUnit(target, u); });
    MoveRecords(ids, windows, source.ledger, [&](const LedgerEntry& e) {
      GrowLedger(target, target.ledger.size() + 1);
      target.ledger.insert(PlaceByBirth(target.ledger, windows, windows[e.window].birth), e);
    });
    TrimUnits(source);
    source.allowance = target.allowance = {};
  }
}

Status KvCache::Impl::MoveWindows(std::span<const WindowId> moved, SeqId to) {
  if (moved.empty()) return {};
  const SeqId from = windows[moved.front()].seq;
  if (from == to) return {};
  Sequence &source = *sequences[from], &target = *sequences[to];
  std::vector<WindowId> ids;
  try {
    ids.assign(moved.begin(), moved.end());
    GrowTight(target.windows, target.windows.size() + ids.size());
    for (size_t il = 0; il < target.layers.size(); ++il) {
      LayerSeq& ls = target.layers[il];
      GrowUnits(ls, ls.units.size() + ids.size());
      GrowLedger(ls, ls.ledger.size() + std::min(ids.size(), source.layers[il].ledger.size()));
    }
  } catch (const std::bad_alloc&) {
    for (LayerSeq& ls : target.layers) TrimUnits(ls);
    return OutOfMemory();
  }
  MoveUnits(ids, from, to);
  const auto older = [&](WindowId a, WindowId b) { return windows[a].birth < windows[b].birth; };
  for (const WindowId id : ids) {
    const auto n_live = static_cast<uint64_t>(std::popcount(windows[id].live));
    source.live -= n_live;
    target.live += n_live;
    windows[id].seq = to;
    if (source.tail.window == id) source.tail = {};
  }
  std::erase_if(source.windows, [&](WindowId id) { return windows[id].seq == to; });
  const auto middle = static_cast<std::ptrdiff_t>(target.windows.size());
  target.windows.insert(target.windows.end(), ids.begin(), ids.end());
  std::inplace_merge(target.windows.begin(), target.windows.begin() + middle, target.windows.end(),
                     older);
  target.had_tokens = true;
  bool sinks = true;  // only at the beginning
  for (const WindowId id : target.windows) {
    sinks = sinks && windows[id].has(WindowRecord::kSink);
    if (!sinks) windows[id].flags &= static_cast<uint8_t>(~WindowRecord::kSink);
  }
  FinishChange();
  return {};
}

Status KvCache::Impl::MergeSequence(SeqId from, SeqId into) {
  if (from == into) return {};
  QEVICT_RETURN_IF_ERROR(MoveWindows(sequences[from]->windows, into));  // what may fail comes first
  Sequence* source = Seq(from);
  if (!source || source->evicted == 0) return {};
  for (uint32_t& code : streams[source->stream].cells) {
    if (code == (kEvictedMark | from)) code = kEvictedMark | into;
  }
  sequences[into]->evicted += source->evicted;
  sequences[into]->had_tokens = true;
  source->evicted = 0;
  FinishChange();
  return {};
}

void KvCache::Impl::SetTail(TokenRef token) {
  const WindowRecord& w = windows[token.window];
  Sequence& s = *sequences[w.seq];
  s.tail = token;
  s.tail_pos = w.PosOf(token.offset);
}

}  // namespace qevict
