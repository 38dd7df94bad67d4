// Slots and rows: where the bytes of units live.
//
// A slot is one window of one layer (all kv heads). Slots of one pool are dense: a freed slot is
// filled with the pool's last one, whose owner record says which unit must learn its new place.
#include <cstring>

#include "cache/kv_cache_impl.h"

namespace qevict {
namespace {

/// Tokens per parallel task of a write; below this a write stays on the calling thread.
constexpr size_t kWriteGrain = 32;

void StoreValueRow(uint8_t* block, uint32_t head_dim_v, uint32_t t, const uint16_t* row) {
  std::memcpy(block + size_t{t} * head_dim_v * 2, row, size_t{head_dim_v} * 2);
}

}  // namespace

bool SameShape(const LayerShape& a, const LayerShape& b) {
  return a.n_kv_heads == b.n_kv_heads && a.head_dim == b.head_dim && a.head_dim_v == b.head_dim_v &&
         a.elem_k == b.elem_k && a.elem_v == b.elem_v && a.bits == b.bits;
}

void StoreKeyRow(uint8_t* block, uint32_t window, uint32_t head_dim, uint32_t t,
                 const uint16_t* row) {
  const uint32_t s = std::min(window, 8u);
  uint16_t* out = reinterpret_cast<uint16_t*>(block) + size_t{t / s} * head_dim * s + t % s;
  for (uint32_t d = 0; d < head_dim; ++d) out[size_t{d} * s] = row[d];
}

void LoadKeyRow(const uint8_t* block, uint32_t window, uint32_t head_dim, uint32_t t,
                uint16_t* row) {
  const uint32_t s = std::min(window, 8u);
  const uint16_t* in =
      reinterpret_cast<const uint16_t*>(block) + size_t{t / s} * head_dim * s + t % s;
  for (uint32_t d = 0; d < head_dim; ++d) row[d] = in[size_t{d} * s];
}

Status KvCache::Impl::InitPools(std::vector<LayerShape> shapes) {
  layers.resize(shapes.size());
  for (size_t il = 0; il < shapes.size(); ++il) {
    const LayerShape& shape = shapes[il];
    size_t c = 0;
    while (c < pools.size() && !SameShape(pools[c].shape, shape)) ++c;
    if (c == pools.size()) {
      ShapePools p;
      p.shape = shape;
      p.full_head_bytes = kernels::FullHeadBytes(config.window, shape.head_dim, shape.head_dim_v);
      p.codec = codecs::MakeCodec(config, RowsOf(shape));
      p.packed_head_bytes = p.codec->bytes().total();
      p.learned_bytes = codecs::LearnedBytes(config, RowsOf(shape));
      pools.push_back(std::move(p));
    }
    ++pools[c].n_layers;
    pools[c].shape.n_together = std::max(pools[c].shape.n_together, shape.n_together);
    LayerState& layer = layers[il];
    layer.pools = static_cast<uint32_t>(c);
    layer.codec = pools[c].codec;
    layer.f16_token_bytes = uint64_t{2} * shape.n_kv_heads * (shape.head_dim + shape.head_dim_v);
    f16_token_bytes += layer.f16_token_bytes;
  }
  // Address space only: partly filled windows and rewritten tails make more windows than cells / W.
  const uint64_t per_layer =
      (2 * (uint64_t{cells_per_stream} / config.window + 1) + 64) * n_streams + 64;
  for (ShapePools& p : pools) {
    const uint64_t max_slots = std::min<uint64_t>(
        {per_layer * p.n_layers, uint64_t{cells_per_stream} * n_streams * p.n_layers + 64,
         uint64_t{UnitRecord::kNoSlot} - 1});
    Result<ArenaRegion*> full = arena.AddRegion(p.full_bytes(), max_slots);
    if (!full.ok()) return full.status();
    Result<ArenaRegion*> packed = arena.AddRegion(p.packed_bytes(), max_slots);
    if (!packed.ok()) return packed.status();
    p.full.region = full.value();
    p.packed.region = packed.value();
  }
  return {};
}

void KvCache::Impl::GrowUnits(LayerSeq& ls, size_t n) {
  const uint64_t before = CapacityBytes(ls.units);
  GrowTight(ls.units, n);
  unit_table_bytes += CapacityBytes(ls.units) - before;
}

void KvCache::Impl::TrimUnits(LayerSeq& ls) {
  unit_table_bytes -= CapacityBytes(ls.units);
  TrimTight(ls.units);
  unit_table_bytes += CapacityBytes(ls.units);
}

void KvCache::Impl::AddUnit(LayerSeq& ls, const UnitRecord& u) {
  GrowUnits(ls, ls.units.size() + 1);
  const uint32_t birth = windows[u.window].birth;
  auto at = ls.units.end();
  while (at != ls.units.begin() && windows[(at - 1)->window].birth > birth) --at;
  ls.units.insert(at, u);
}

UnitRecord* KvCache::Impl::FindUnit(SeqId seq, uint32_t il, WindowId w) {
  std::vector<UnitRecord>& units = sequences[seq]->layers[il].units;
  if (units.empty()) return nullptr;
  if (units.back().window == w) return &units.back();
  const uint32_t birth = windows[w].birth;
  const auto it = std::lower_bound(
      units.begin(), units.end(), birth,
      [&](const UnitRecord& u, uint32_t b) { return windows[u.window].birth < b; });
  return it != units.end() && it->window == w ? &*it : nullptr;
}

void KvCache::Impl::RemoveSlot(uint32_t il, bool packed, uint32_t slot) {
  ShapePools& p = PoolsOf(il);
  SlotPool& pool = packed ? p.packed : p.full;
  const uint32_t last = static_cast<uint32_t>(pool.used() - 1);
  if (slot != last) {
    std::memcpy(pool.region->slot(slot), pool.region->slot(last), pool.region->slot_bytes());
    const SlotOwner owner = pool.owners[last];
    pool.owners[slot] = owner;
    UnitRecord* moved = FindUnit(windows[owner.window].seq, owner.layer, owner.window);
    if (packed) {
      moved->set_packed_slot(slot);
    } else {
      moved->full_slot = slot;
    }
  }
  pool.owners.pop_back();
  if (!pool.checksums.empty()) {
    pool.checksums[slot] = pool.checksums[last];
    pool.checksums.pop_back();
  }
}

void KvCache::Impl::RemoveFullSlot(uint32_t il, UnitRecord& u) {
  if (u.has_codes()) --PoolsOf(il).n_dormant;
  const uint32_t slot = u.full_slot;
  u.full_slot = kNone;
  RemoveSlot(il, false, slot);
}

void KvCache::Impl::RemovePackedSlot(uint32_t il, UnitRecord& u) {
  if (u.has_full()) --PoolsOf(il).n_dormant;
  const uint32_t slot = u.packed_slot();
  u.set_packed_slot(UnitRecord::kNoSlot);
  RemoveSlot(il, true, slot);
}

void KvCache::Impl::TrimPools() {
  for (ShapePools& p : pools) {
    for (SlotPool* pool : {&p.full, &p.packed}) {
      TrimTight(pool->owners);
      if (pool->region->n_slots() > pool->used()) {
        (void)pool->region->Resize(pool->used());  // shrinking cannot fail
      }
    }
  }
}

/// More slots within the limit, after the tables have grown for them.
Status KvCache::Impl::GrowPool(SlotPool& pool, size_t n_slots) {
  UpdateLimit();
  if (LimitInForce() && HeldBytes() > Limit()) {
    return ResourceExhausted("records need " + std::to_string(HeldBytes() - Limit()) +
                             " bytes more than the budget of " + std::to_string(Limit()) +
                             " bytes");
  }
  return pool.region->Resize(n_slots);
}

/// Makes the units of `refs` that the layer lacks. All or nothing.
Status KvCache::Impl::CreateUnits(uint32_t il, std::span<const TokenRef> refs) {
  std::vector<WindowId> fresh;
  WindowId last = kNone;
  for (const TokenRef& ref : refs) {
    if (ref.window == last) continue;
    last = ref.window;
    if (last >= windows.size() || !windows[last].in_use()) {
      return Internal("a row is written to a window that does not exist");
    }
    const WindowRecord& w = windows[last];
    if (const UnitRecord* u = FindUnit(w.seq, il, last)) {
      if (!u->has_full()) return Internal("a row is written to a packed window");
    } else {
      if (w.n_created == layers.size()) return Internal("a row is written to an evicted window");
      if (std::find(fresh.begin(), fresh.end(), last) == fresh.end()) fresh.push_back(last);
    }
  }
  if (fresh.empty()) return {};

  SlotPool& pool = PoolsOf(il).full;
  const size_t first = pool.used();
  GrowTight(pool.owners, first + fresh.size());
  for (const WindowId w : fresh) {
    LayerSeq& ls = sequences[windows[w].seq]->layers[il];
    GrowUnits(ls, ls.units.size() + fresh.size());
  }
  if (Status grown = GrowPool(pool, first + fresh.size()); !grown.ok()) {
    for (const WindowId w : fresh) TrimUnits(sequences[windows[w].seq]->layers[il]);
    TrimTight(pool.owners);
    UpdateLimit();
    return grown;
  }
  for (const WindowId w : fresh) {
    WindowRecord& record = windows[w];
    UnitRecord u;
    u.window = w;
    u.full_slot = static_cast<uint32_t>(pool.used());
    pool.owners.push_back({w, il});
    AddUnit(sequences[record.seq]->layers[il], u);
    ++record.n_units;
    ++record.n_created;
  }
  NotePeak();
  return {};
}

Status KvCache::Impl::Write(uint32_t il, std::span<const TokenRef> refs, const float* rows,
                            size_t row_stride, bool is_k, ParallelFor& pool) {
  if (il >= layers.size()) return OutOfRange("layer " + std::to_string(il) + " does not exist");
  QEVICT_RETURN_IF_ERROR(CreateUnits(il, refs));
  const ShapePools& p = PoolsOf(il);
  const uint32_t n_heads = p.shape.n_kv_heads, d = p.shape.head_dim, dv = p.shape.head_dim_v;
  const size_t v_offset = size_t{config.window} * d * 2;
  write_blocks.resize(refs.size());
  for (size_t i = 0; i < refs.size(); ++i) {
    write_blocks[i] =
        i > 0 && refs[i].window == refs[i - 1].window
            ? write_blocks[i - 1]
            : FullSlot(il, *FindUnit(windows[refs[i].window].seq, il, refs[i].window));
  }
  const auto write_row = [&](size_t i) {
    uint16_t row[kMaxHeadDim];
    for (uint32_t h = 0; h < n_heads; ++h) {
      uint8_t* block = write_blocks[i] + h * p.full_head_bytes;
      const float* from = rows + i * row_stride + size_t{h} * (is_k ? d : dv);
      ConvertTo16(from, is_k ? d : dv, is_k ? p.shape.elem_k : p.shape.elem_v, row);
      if (is_k) {
        StoreKeyRow(block, config.window, d, refs[i].offset, row);
      } else {
        StoreValueRow(block + v_offset, dv, refs[i].offset, row);
      }
    }
  };
  if (refs.size() < 2 * kWriteGrain || pool.n_threads() == 1) {
    for (size_t i = 0; i < refs.size(); ++i) write_row(i);
  } else {
    pool.For((refs.size() + kWriteGrain - 1) / kWriteGrain, [&](size_t task, unsigned) {
      const size_t end = std::min(refs.size(), (task + 1) * kWriteGrain);
      for (size_t i = task * kWriteGrain; i < end; ++i) write_row(i);
    });
  }
  return {};
}

}  // namespace qevict
