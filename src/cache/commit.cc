// Commit: carries a plan of one layer out, all or nothing; if the system refuses memory to a codec,
// it ends with the step before.
//
//   1 reserve   both pools grow to what they need at the end; if that fails, nothing has changed
//   2 evict     slots of evicted units are freed
//   3 encode    first demotions, in parallel, into new packed slots (the ledger: written once)
//   4 demote    full slots of packed units are freed
//   5 promote   codes are decoded, in parallel, into new full slots; the codes stay (dormant)
//   6 shrink    pages go back, windows that are evicted in every layer are forgotten
//
// Between 1 and 6 a layer holds its new codes beside its old rows: the transient is at most the
// layer's newly packed bytes. It is the only moment at which the arena may exceed the budget.
#include <cstring>
#include <new>

#include "cache/kv_cache_impl.h"
#include "codecs/codec.h"

namespace qevict {
namespace {

uint64_t Pages(uint64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

}  // namespace

SortedMoves KvCache::Impl::SortMoves(uint32_t il, const std::vector<UnitMove>& moves) {
  SortedMoves out;
  for (const UnitMove& m : moves) {
    UnitRecord& u = sequences[m.seq]->layers[il].units[m.index];
    if (m.to.tier == Tier::kEvicted) {
      if (u.has_codes()) out.free_packed.push_back(&u);
      if (u.has_full()) out.free_full.push_back(&u);
    } else if (m.to.tier == Tier::kFull) {
      if (!u.has_full()) out.promote.push_back(&u);
    } else {
      if (u.has_full()) {
        out.demote.push_back(&u);
        if (!u.has_codes()) out.encode.push_back(&u);
      }
      if (u.pinned() != m.to.pinned) out.pin.emplace_back(&u, m.to.pinned);
    }
  }
  return out;
}

uint32_t Checksum(const uint8_t* data, size_t n) {
  uint32_t hash = 2166136261u;
  for (size_t i = 0; i < n; ++i) hash = (hash ^ data[i]) * 16777619u;
  return hash;
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

/// Rows of one unit as f32, keys as the codec wants them, packed into `block` (all kv heads).
/// Windows without positions are un-rotated at position pos0 = 0, which takes the magnitude out
/// that kernels put back.
void KvCache::Impl::EncodeUnit(uint32_t il, const UnitRecord& u, uint8_t* block, float* k,
                               float* v) const {
  const ShapePools& p = PoolsOf(il);
  const codecs::Codec& codec = *layers[il].codec;
  const WindowRecord& w = windows[u.window];
  const uint32_t d = p.shape.head_dim, dv = p.shape.head_dim_v, n = w.n_tokens;
  const WindowPhases phases(layers[il].rope, w,
                            codec.before_rope() || codec.key_mean(0) != nullptr);
  uint16_t row[kMaxHeadDim];
  float mean[kMaxHeadDim];
  for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
    const uint8_t* full = FullSlot(il, u) + h * p.full_head_bytes;
    const uint16_t* values =
        reinterpret_cast<const uint16_t*>(full + size_t{config.window} * d * 2);
    for (uint32_t t = 0; t < n; ++t) {
      float* key = k + size_t{t} * d;
      LoadKeyRow(full, config.window, d, t, row);
      ConvertTo32(row, d, p.shape.elem_k, key);
      if (codec.before_rope()) phases.Unrotate(t, key);
      if (codec.key_mean(h) == nullptr) continue;
      std::copy_n(codec.key_mean(h), d, mean);
      if (!codec.before_rope()) phases.Rotate(t, mean);
      for (uint32_t c = 0; c < d; ++c) key[c] -= mean[c];
    }
    ConvertTo32(values, size_t{n} * dv, p.shape.elem_v, v);
    codec.Encode(h, n, k, v, block + h * p.packed_head_bytes);
  }
}

/// Inverse into a full slot: keys rotated at their positions, rounded to 16 bit.
void KvCache::Impl::DecodeUnit(uint32_t il, const UnitRecord& u, uint8_t* full, float* k,
                               float* v) const {
  const ShapePools& p = PoolsOf(il);
  const codecs::Codec& codec = *layers[il].codec;
  const WindowRecord& w = windows[u.window];
  const uint32_t d = p.shape.head_dim, dv = p.shape.head_dim_v, n = w.n_tokens;
  const WindowPhases phases(layers[il].rope, w,
                            codec.before_rope() || codec.key_mean(0) != nullptr);
  uint16_t row[kMaxHeadDim];
  for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
    uint8_t* out = full + h * p.full_head_bytes;
    uint16_t* values = reinterpret_cast<uint16_t*>(out + size_t{config.window} * d * 2);
    codec.Decode(h, n, PackedSlot(il, u) + h * p.packed_head_bytes, k, v);
    for (uint32_t t = 0; t < n; ++t) {
      float* key = k + size_t{t} * d;
      codec.FinishKey(h, {key, d}, [&](float* x) { phases.Rotate(t, x); });
      ConvertTo16(key, d, p.shape.elem_k, row);
      StoreKeyRow(out, config.window, d, t, row);
    }
    ConvertTo16(v, size_t{n} * dv, p.shape.elem_v, values);
  }
}

Status KvCache::Impl::ReserveForCommit(uint32_t il, size_t n_full, size_t n_packed) {
  ShapePools& p = PoolsOf(il);
  const uint64_t after = arena.bytes() - p.full.region->bytes() - p.packed.region->bytes() +
                         Pages(n_full * p.full_bytes()) + Pages(n_packed * p.packed_bytes());
  if (LimitInForce() && after + TableBytes() > Limit() && after > arena.bytes()) {
    return ResourceExhausted("layer " + std::to_string(il) + " would raise the cache to " +
                             std::to_string(after + TableBytes()) + " bytes; the limit is " +
                             std::to_string(Limit()));
  }
  GrowTight(p.packed.owners, n_packed);
  GrowTight(p.full.owners, n_full);
  if (config.check) p.packed.checksums.reserve(n_packed);
  arena.SetLimit(SIZE_MAX);
  const size_t packed_before = p.packed.region->n_slots();
  Status status;
  if (n_packed > packed_before) status = p.packed.region->Resize(n_packed);
  if (status.ok() && n_full > p.full.region->n_slots()) {
    status = p.full.region->Resize(n_full);
    if (!status.ok() && n_packed > packed_before) (void)p.packed.region->Resize(packed_before);
  }
  if (!status.ok()) UpdateLimit();
  return status;
}

Status KvCache::Impl::Commit(uint32_t il, std::vector<UnitMove>& moves, ParallelFor& pool) {
  ShapePools& p = PoolsOf(il);
  SortedMoves sorted = SortMoves(il, moves);
  const size_t n_full =
      p.full.used() + sorted.promote.size() - sorted.demote.size() - sorted.free_full.size();
  const size_t n_packed = p.packed.used() + sorted.encode.size() - sorted.free_packed.size();
  QEVICT_RETURN_IF_ERROR(ReserveForCommit(il, n_full, n_packed));

  if (!sorted.encode.empty()) LearnCodec(il);
  // From here on nothing allocates but codecs.
  for (auto& [u, on] : sorted.pin) {
    u->set_pinned(on);
    counters.promotions += on ? 1 : 0;
  }
  FreeSlots(il, true, sorted.free_packed);
  FreeSlots(il, false, sorted.free_full);
  bool done = EncodeAll(il, sorted.encode, pool);
  if (done) {
    counters.first_encodings += sorted.encode.size();
    counters.demotions += sorted.demote.size();
    FreeSlots(il, false, sorted.demote);
    for (UnitRecord* u : sorted.demote) windows[u->window].flags |= WindowRecord::kSealed;
    done = DecodeAll(il, sorted.promote, pool);
  }
  if (done) counters.promotions += sorted.promote.size();
  counters.evictions += ForgetEvicted(il, moves);
  TrimPools();
  return done ? Status() : OutOfMemory();
}

/// Frees one kind of slot of units that have it, from the highest slot down: then a hole is never
/// filled with a slot that is about to go.
void KvCache::Impl::FreeSlots(uint32_t il, bool packed, std::vector<UnitRecord*>& units) {
  std::sort(units.begin(), units.end(), [packed](const UnitRecord* a, const UnitRecord* b) {
    return packed ? a->packed_slot() > b->packed_slot() : a->full_slot > b->full_slot;
  });
  for (UnitRecord* u : units) {
    if (packed) {
      RemovePackedSlot(il, *u);
    } else {
      RemoveFullSlot(il, *u);
    }
  }
}

/// The codes of a unit have been written.
void KvCache::Impl::NoteCodes(uint32_t il, const UnitRecord& u) {
  if (!config.check) return;
  ShapePools& p = PoolsOf(il);
  p.packed.checksums[u.packed_slot()] = Checksum(PackedSlot(il, u), p.packed_bytes());
}

/// write(unit, k, v) for each of the units, in parallel, with floats for the rows of one kv head.
/// Codecs may allocate: false if that failed for any of them.
template <typename F>
bool KvCache::Impl::ForUnits(uint32_t il, const std::vector<UnitRecord*>& units, ParallelFor& pool,
                             const F& write) {
  const LayerShape& shape = PoolsOf(il).shape;
  const size_t k_floats = size_t{config.window} * shape.head_dim;
  const size_t v_floats = size_t{config.window} * shape.head_dim_v;
  try {
    std::vector<float> scratch(pool.n_threads() * (k_floats + v_floats));
    pool.For(units.size(), [&](size_t i, unsigned thread) {
      float* k = scratch.data() + thread * (k_floats + v_floats);
      write(*units[i], k, k + k_floats);
    });
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

/// All of them, or (false) none has codes.
bool KvCache::Impl::EncodeAll(uint32_t il, const std::vector<UnitRecord*>& units,
                              ParallelFor& pool) {
  if (units.empty()) return true;
  ShapePools& p = PoolsOf(il);
  for (UnitRecord* u : units) {
    u->set_packed_slot(static_cast<uint32_t>(p.packed.used()));
    p.packed.owners.push_back({u->window, il});
  }
  p.n_dormant += units.size();  // until their full slots are freed
  if (config.check) p.packed.checksums.resize(p.packed.used());
  if (ForUnits(il, units, pool, [&](const UnitRecord& u, float* k, float* v) {
        EncodeUnit(il, u, PackedSlot(il, u), k, v);
        NoteCodes(il, u);
      }))
    return true;
  for (size_t i = units.size(); i-- > 0;) RemovePackedSlot(il, *units[i]);
  return false;
}

/// All of them, or (false) none has a full slot.
bool KvCache::Impl::DecodeAll(uint32_t il, const std::vector<UnitRecord*>& units,
                              ParallelFor& pool) {
  if (units.empty()) return true;
  ShapePools& p = PoolsOf(il);
  for (UnitRecord* u : units) {
    u->full_slot = static_cast<uint32_t>(p.full.used());
    p.full.owners.push_back({u->window, il});
  }
  p.n_dormant += units.size();
  if (ForUnits(il, units, pool, [&](const UnitRecord& u, float* k, float* v) {
        std::memset(FullSlot(il, u), 0, p.full_bytes());  // the slot may have had another owner
        DecodeUnit(il, u, FullSlot(il, u), k, v);
      }))
    return true;
  for (size_t i = units.size(); i-- > 0;) RemoveFullSlot(il, *units[i]);
  return false;
}

/// Removes records of units without slots, and windows that no layer holds any more. Returns the
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
      if (u.has_full() || u.has_codes()) {
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
