// Commit: carries a plan of one layer out, all or nothing.
//
//   1 reserve   pools and ledgers grow to what the new blocks need; if that fails, nothing changes
//   2 write     first demotions are encoded, promotions decoded, in parallel, into new blocks; if
//               the system refuses memory to a codec, the new blocks go and nothing has changed
//   3 switch    units take their new blocks; codes of what is promoted go to the ledger (written
//               once, reused by later demotions), other old blocks and those of evicted units are
//               freed
//   4 shrink    pages go back, windows that are evicted in every layer are forgotten
//
// Between 1 and 4 a layer holds its new blocks beside its old ones: the transient is at most the
// layer's newly written bytes. It is the only moment at which the arena may exceed the budget.
#include <cstring>
#include <new>

#include "cache/kv_cache_impl.h"
#include "codecs/codec.h"

namespace qevict {

/// What the moves of one layer write, reuse, evict and pin.
SortedMoves KvCache::Impl::SortMoves(uint32_t il, const std::vector<UnitMove>& moves) {
  SortedMoves out;
  for (const UnitMove& m : moves) {
    UnitRecord& u = sequences[m.seq]->layers[il].units[m.index];
    if (m.k == kGone || m.v == kGone) {
      out.evict.push_back(&u);
      continue;
    }
    UnitWrite write{&u, {m.k, m.v}, {}, {}};
    const LedgerEntry* entry =
        u.dormant() ? FindLedger(sequences[m.seq]->layers[il], u.window) : nullptr;
    for (const Side s : kBothSides) {
      const size_t i = static_cast<size_t>(s);
      write.moves[i] = write.to[i] != u.rung(s);
      write.reuses[i] = write.moves[i] && entry && entry->has(s) && entry->rung(s) == write.to[i];
    }
    if (write.moves[0] || write.moves[1]) out.write.push_back(write);
    if (u.pinned() != m.pinned) out.pin.emplace_back(&u, m.pinned);
  }
  return out;
}

WindowPhases::WindowPhases(const RopeParams& rope, const WindowRecord& w, bool needed)
    : rope_(rope) {
  if (!needed || rope.pairing == RopePairing::kNone) return;
  phases_.resize(size_t{w.n_tokens} * rope.n_dims);
  for (uint32_t t = 0; t < w.n_tokens; ++t) {
    RopeCosSin(rope, w.PosOf(t), phases_.data() + size_t{t} * rope.n_dims);
  }
}
void WindowPhases::Rotate(uint32_t t, float* key) const {
  if (!phases_.empty()) RopeRotate(rope_, phases_.data() + size_t{t} * rope_.n_dims, key);
}
void WindowPhases::Unrotate(uint32_t t, float* key) const {
  if (!phases_.empty()) RopeUnrotate(rope_, phases_.data() + size_t{t} * rope_.n_dims, key);
}

/// Rows of one kv head of a unit as attention meets them, f32: k [n][D], v [n][Dv].
void KvCache::Impl::LoadRows(uint32_t il, const UnitRecord& u, const WindowPhases& phases,
                             uint32_t head, float* k, float* v) const {
  const ShapeStore& store = StoreOf(il);
  const uint32_t d = store.shape.head_dim, dv = store.shape.head_dim_v;
  const uint32_t n = windows[u.window].n_tokens;
  const auto block = [&](Side s) {
    return Block(il, u, s) + head * store.rungs[u.rung(s)].bytes_of_head(s);
  };
  if (u.full(Side::kKeys)) {
    uint16_t row[kMaxHeadDim];
    for (uint32_t t = 0; t < n; ++t) {
      LoadKeyRow(block(Side::kKeys), config.window, d, t, row);
      ConvertTo32(row, d, store.shape.elem_k, k + size_t{t} * d);
    }
  } else {
    const codecs::Codec& codec = *layers[il].codecs[u.rung(Side::kKeys)];
    codec.DecodeSides(head, n, block(Side::kKeys), nullptr, k, nullptr);
    for (uint32_t t = 0; t < n; ++t)
      codec.FinishKey(head, {k + size_t{t} * d, d}, [&](float* x) { phases.Rotate(t, x); });
  }
  if (u.full(Side::kValues)) {
    ConvertTo32(reinterpret_cast<const uint16_t*>(block(Side::kValues)), size_t{n} * dv,
                store.shape.elem_v, v);
  } else {
    layers[il].codecs[u.rung(Side::kValues)]->DecodeSides(head, n, nullptr, block(Side::kValues),
                                                          nullptr, v);
  }
}

/// Keys as attention meets them become keys as a codec wants them. Windows without positions are
/// un-rotated at position pos0 = 0, which takes the magnitude out that kernels put back.
static void PrepareKeys(const codecs::Codec& codec, const WindowPhases& phases, uint32_t head,
                        uint32_t n, uint32_t d, float* k) {
  float mean[kMaxHeadDim];
  for (uint32_t t = 0; t < n; ++t, k += d) {
    if (codec.before_rope()) phases.Unrotate(t, k);
    if (codec.key_mean(head) == nullptr) continue;
    std::copy_n(codec.key_mean(head), d, mean);
    if (!codec.before_rope()) phases.Rotate(t, mean);
    for (uint32_t c = 0; c < d; ++c) k[c] -= mean[c];
  }
}

/// Rows k [n][D], v [n][Dv] of one kv head into the new blocks of a unit. k is changed.
void KvCache::Impl::StoreRows(uint32_t il, const UnitWrite& w, const WindowPhases& phases,
                              uint32_t head, float* k, float* v) const {
  const ShapeStore& store = StoreOf(il);
  const uint32_t n = windows[w.unit->window].n_tokens;
  const auto block = [&](Side s) -> uint8_t* {
    const size_t i = static_cast<size_t>(s);
    if (!w.writes(s)) return nullptr;
    const RungStore& rung = store.rungs[w.to[i]];
    return rung.pool(s).data(w.target[i]) + head * rung.bytes_of_head(s);
  };
  uint8_t* const blocks[kSides] = {block(Side::kKeys), block(Side::kValues)};
  uint16_t row[kMaxHeadDim];
  for (const Side s : kBothSides) {
    const size_t i = static_cast<size_t>(s);
    if (blocks[i] == nullptr || w.to[i] != kFullRung) continue;
    const uint32_t d = HeadDim(il, s);
    for (uint32_t t = 0; t < n; ++t) {
      ConvertTo16((s == Side::kKeys ? k : v) + size_t{t} * d, d,
                  s == Side::kKeys ? store.shape.elem_k : store.shape.elem_v, row);
      StoreRow(s, blocks[i], config.window, d, t, row);
    }
  }
  const bool codes_v = blocks[1] != nullptr && w.to[1] != kFullRung;
  if (codes_v && (blocks[0] == nullptr || w.to[0] != w.to[1]))  // before k is changed
    layers[il].codecs[w.to[1]]->EncodeSides(head, n, k, v, nullptr, blocks[1]);
  if (blocks[0] == nullptr || w.to[0] == kFullRung) return;
  const codecs::Codec& codec = *layers[il].codecs[w.to[0]];
  PrepareKeys(codec, phases, head, n, store.shape.head_dim, k);
  codec.EncodeSides(head, n, k, v, blocks[0], w.to[0] == w.to[1] ? blocks[1] : nullptr);
}

/// Writes one unit's new blocks. k, v: scratch for the rows of one kv head.
void KvCache::Impl::WriteUnit(uint32_t il, const UnitWrite& w, float* k, float* v) const {
  bool rotates = false;
  for (const Rung r : {w.to[0], w.unit->rung(Side::kKeys)}) {
    const codecs::Codec* codec = layers[il].codecs[r].get();
    rotates |= codec != nullptr && (codec->before_rope() || codec->key_mean(0) != nullptr);
  }
  const WindowPhases phases(layers[il].rope, windows[w.unit->window], rotates);
  for (uint32_t h = 0; h < StoreOf(il).shape.n_kv_heads; ++h) {
    LoadRows(il, *w.unit, phases, h, k, v);
    StoreRows(il, w, phases, h, k, v);
  }
}

/// Makes and fills the blocks of `writes`: all, or (false, the system refused memory) none.
bool KvCache::Impl::WriteAll(uint32_t il, std::vector<UnitWrite>& writes, ParallelFor& pool) {
  const LayerShape& shape = StoreOf(il).shape;
  const size_t k_floats = size_t{config.window} * shape.head_dim;
  const size_t v_floats = size_t{config.window} * shape.head_dim_v;
  const auto each = [&](const auto& f) {
    for (UnitWrite& w : writes) {
      for (const Side s : kBothSides) {
        const size_t i = static_cast<size_t>(s);
        if (w.writes(s)) f(PoolOf(il, s, w.to[i]), w.target[i], w.to[i]);
      }
    }
  };
  each([](BlockPool& p, BlockId& id, Rung) { id = p.New(); });
  try {
    std::vector<float> scratch(pool.n_threads() * (k_floats + v_floats));
    pool.For(writes.size(), [&](size_t i, unsigned thread) {
      float* k = scratch.data() + thread * (k_floats + v_floats);
      WriteUnit(il, writes[i], k, k + k_floats);
    });
  } catch (const std::bad_alloc&) {
    each([](BlockPool& p, BlockId& id, Rung) { p.Unref(id); });
    return false;
  }
  each([](BlockPool& p, BlockId& id, Rung r) {
    if (r != kFullRung) p.Seal(id);
  });
  return true;
}

/// New blocks of every pool that the moves of a layer need.
static std::vector<BlockCount> CountNew(const ShapeStore& store,
                                        const std::vector<UnitWrite>& writes) {
  std::vector<BlockCount> n;
  for (const UnitWrite& w : writes) {
    for (const Side s : kBothSides) {
      if (w.writes(s)) CountBlock(n, store.rungs[w.to[static_cast<size_t>(s)]].pool(s));
    }
  }
  return n;
}

/// Grows pools and ledgers.
Status KvCache::Impl::ReserveForCommit(uint32_t il, const SortedMoves& sorted) {
  const std::vector<BlockCount> n_new = CountNew(StoreOf(il), sorted.write);
  std::vector<size_t> promoted(sequences.size());
  for (const UnitWrite& w : sorted.write) {
    const UnitRecord& u = *w.unit;
    if (w.promotes() && !u.dormant()) ++promoted[windows[u.window].seq];
  }
  for (SeqId id = 0; id < sequences.size(); ++id) {
    if (promoted[id] == 0) continue;
    LayerSeq& ls = sequences[id]->layers[il];
    GrowLedger(ls, ls.ledger.size() + promoted[id]);
  }
  for (const BlockCount& count : n_new) QEVICT_RETURN_IF_ERROR(count.pool->Reserve(count.n));
  return {};
}

/// One side of a unit takes its new block. What it leaves goes to the ledger or to `freed`.
void KvCache::Impl::SwitchSide(uint32_t il, const UnitWrite& w, Side s,
                               std::vector<FreedBlock>& freed) {
  const size_t i = static_cast<size_t>(s);
  UnitRecord& u = *w.unit;
  const Rung from = u.rung(s), to = w.to[i];
  const BlockId old = u.block(s);
  BlockId target = w.target[i];
  LedgerEntry* entry =
      u.dormant() ? FindLedger(sequences[windows[u.window].seq]->layers[il], u.window) : nullptr;
  if (to != kFullRung && entry && entry->has(s)) {  // codes are attended again, or are outdated
    StoreOf(il).dormant_bytes -= PoolOf(il, s, entry->rung(s)).block_bytes();
    if (w.reuses[i]) {
      target = entry->block(s);
    } else {
      freed.push_back({&PoolOf(il, s, entry->rung(s)), entry->block(s)});
    }
    entry->Drop(s);
  }
  u.Set(s, to, target);
  if (to == kFullRung) {
    AddLedger(il, u, s, from, old);
  } else {
    freed.push_back({&PoolOf(il, s, from), old});
  }
}

/// From the highest slot down: then a hole is never filled with a block that is about to go.
void KvCache::Impl::Free(std::vector<FreedBlock>& freed) {
  std::sort(freed.begin(), freed.end(), [](const FreedBlock& a, const FreedBlock& b) {
    if (a.pool != b.pool) return std::less<>()(a.pool, b.pool);
    return a.pool->slot(a.id) > b.pool->slot(b.id);
  });
  for (const FreedBlock& f : freed) f.pool->Unref(f.id);
}

/// Units take their new blocks, evicted ones lose theirs. Cannot fail.
void KvCache::Impl::SwitchAll(uint32_t il, const SortedMoves& sorted,
                              std::vector<FreedBlock>& freed) {
  for (const UnitWrite& w : sorted.write) {
    for (const Side s : kBothSides) {
      if (w.moves[static_cast<size_t>(s)]) SwitchSide(il, w, s, freed);
    }
    UnitRecord& u = *w.unit;
    if (u.holds_codes()) windows[u.window].flags |= WindowRecord::kSealed;
    if (u.holds_codes()) DropEmptyLedger(il, u);
  }
  for (UnitRecord* u : sorted.evict) {
    DropLedger(il, *u);
    for (const Side s : kBothSides) {
      freed.push_back({&PoolOf(il, s, u->rung(s)), u->block(s)});
      u->Drop(s);
    }
  }
  Free(freed);
}

/// Counts what a commit is about to do.
void KvCache::Impl::CountMoves(const SortedMoves& sorted) {
  for (const auto& [u, on] : sorted.pin) counters.promotions += on ? 1 : 0;
  for (const UnitWrite& w : sorted.write) {
    counters.promotions += w.promotes() ? 1 : 0;
    counters.first_encodings += w.encodes() ? 1 : 0;
    counters.demotions += w.demotes() ? 1 : 0;
  }
}

Status KvCache::Impl::Commit(uint32_t il, std::vector<UnitMove>& moves, ParallelFor& pool) {
  SortedMoves sorted = SortMoves(il, moves);
  std::vector<FreedBlock> freed;
  freed.reserve(2 * (sorted.evict.size() + 2 * sorted.write.size()));
  QEVICT_RETURN_IF_ERROR(ReserveForCommit(il, sorted));
  if (std::any_of(sorted.write.begin(), sorted.write.end(),
                  [](const UnitWrite& w) { return w.demotes(); })) {
    LearnCodec(il);
  }
  if (!WriteAll(il, sorted.write, pool)) {
    TrimStores();
    return OutOfMemory();
  }
  CountMoves(sorted);
  for (auto& [u, on] : sorted.pin) u->set_pinned(on);
  SwitchAll(il, sorted, freed);
  counters.evictions += ForgetEvicted(il, moves);
  TrimStores();
  return {};
}

/// Removes records of units without blocks, and windows that no layer holds any more. Returns the
/// number of units.
size_t KvCache::Impl::ForgetEvicted(uint32_t il, const std::vector<UnitMove>& moves) {
  size_t n_gone = 0;
  SeqId last = kNone;
  for (const UnitMove& m : moves) {  // moves come sequence by sequence
    if (m.seq == last) continue;
    last = m.seq;
    Sequence& s = *sequences[last];
    std::vector<UnitRecord>& units = s.layers[il].units;
    size_t kept = 0;
    bool dropped = false;
    for (const UnitRecord& u : units) {
      if (!u.empty()) {
        units[kept++] = u;
        continue;
      }
      WindowRecord& w = windows[u.window];
      w.flags |= WindowRecord::kSealed;
      if (--w.n_units > 0 || w.n_created < layers.size()) continue;
      DropEvictedWindow(u.window);
      dropped = true;
    }
    n_gone += units.size() - kept;
    units.resize(kept);
    TrimUnits(s.layers[il]);
    if (dropped) {
      std::erase_if(s.windows, [&](WindowId id) { return !windows[id].in_use(); });
      TrimTight(s.windows);
    }
  }
  return n_gone;
}

}  // namespace qevict
