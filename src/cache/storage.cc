// Blocks and rows: where the bytes of units live.
//
// A block is one side of one window of one layer (all kv heads). Blocks of one layer shape, side and
// rung share a pool (store/block_pool.h). Full precision, per kv head, W = window, S = min(W, 8):
//   keys    [W/S][D][S] 16 bit   tokens in lanes
//   values  [W][Dv]     16 bit   channels in lanes
#include <cstring>

#include "cache/kv_cache_impl.h"

namespace qevict {
namespace {

/// Tokens per parallel task of a write; below this a write stays on the calling thread.
constexpr size_t kWriteGrain = 32;

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

void StoreRow(Side side, uint8_t* block, uint32_t window, uint32_t dim, uint32_t t,
              const uint16_t* row) {
  if (side == Side::kKeys) return StoreKeyRow(block, window, dim, t, row);
  std::memcpy(block + size_t{t} * dim * 2, row, size_t{dim} * 2);
}

void LoadRow(Side side, const uint8_t* block, uint32_t window, uint32_t dim, uint32_t t,
             uint16_t* row) {
  if (side == Side::kKeys) return LoadKeyRow(block, window, dim, t, row);
  std::memcpy(row, block + size_t{t} * dim * 2, size_t{dim} * 2);
}

/// The rungs of layers of one shape, without pools.
static ShapeStore MakeStore(const Config& config, const LayerShape& shape) {
  ShapeStore store;
  store.shape = shape;
  RungStore full;
  full.head_bytes = {size_t{config.window} * shape.head_dim * 2,
                     size_t{config.window} * shape.head_dim_v * 2};
  store.rungs.push_back(std::move(full));
  for (const Config& rung_config : codecs::RungConfigs(config)) {
    RungStore rung;
    rung.codec = codecs::MakeCodec(rung_config, RowsOf(shape));
    rung.head_bytes = {rung.codec->bytes().keys, rung.codec->bytes().values};
    store.learned_bytes += codecs::LearnedBytes(rung_config, RowsOf(shape));
    store.rungs.push_back(std::move(rung));
  }
  return store;
}

Status KvCache::Impl::InitStores(std::vector<LayerShape> shapes) {
  layers.resize(shapes.size());
  for (size_t il = 0; il < shapes.size(); ++il) {
    const LayerShape& shape = shapes[il];
    size_t c = 0;
    while (c < stores.size() && !SameShape(stores[c].shape, shape)) ++c;
    if (c == stores.size()) stores.push_back(MakeStore(config, shape));
    ++stores[c].n_layers;
    stores[c].shape.n_together = std::max(stores[c].shape.n_together, shape.n_together);
    LayerState& layer = layers[il];
    layer.store = static_cast<uint32_t>(c);
    for (const RungStore& rung : stores[c].rungs) layer.codecs.push_back(rung.codec);
    layer.f16_token_bytes = uint64_t{2} * shape.n_kv_heads * (shape.head_dim + shape.head_dim_v);
    f16_token_bytes += layer.f16_token_bytes;
  }
  // Address space only: partly filled windows and rewritten tails make more windows than cells / W.
  const uint64_t per_layer =
      (2 * (uint64_t{cells_per_stream} / config.window + 1) + 64) * n_streams + 64;
  const uint64_t max_blocks =
      std::min<uint64_t>({kSides * per_layer * layers.size(),
                          kSides * (uint64_t{cells_per_stream} * n_streams * layers.size() + 64),
                          uint64_t{UnitSides::kNoBlock} - 1});
  for (ShapeStore& store : stores) QEVICT_RETURN_IF_ERROR(AddPools(store, max_blocks));
  return {};
}

/// Blocks of one size share a pool: the last page of each is partly used, and there may be as many
/// shapes as layers.
Status KvCache::Impl::AddPools(ShapeStore& store, uint64_t max_blocks) {
  for (RungStore& rung : store.rungs) {
    for (const Side s : kBothSides) {
      const size_t bytes = rung.bytes_of_head(s) * store.shape.n_kv_heads;
      auto same = std::find_if(pools.begin(), pools.end(),
                               [bytes](const auto& p) { return p->block_bytes() == bytes; });
      if (same == pools.end()) {
        same = pools.insert(same, std::make_unique<BlockPool>());
        QEVICT_RETURN_IF_ERROR((*same)->Init(arena, bytes, max_blocks, config.check));
      }
      rung.pools[static_cast<size_t>(s)] = same->get();
    }
  }
  return {};
}

void CountBlock(std::vector<BlockCount>& counts, BlockPool& pool, size_t n) {
  for (BlockCount& count : counts) {
    if (count.pool != &pool) continue;
    count.n += n;
    return;
  }
  counts.push_back({&pool, n});
}

void KvCache::Impl::GrowUnits(LayerSeq& ls, size_t n) {
  const uint64_t before = CapacityBytes(ls.units);
  GrowTight(ls.units, n);
  unit_table_bytes += CapacityBytes(ls.units) - before;
}

void KvCache::Impl::GrowLedger(LayerSeq& ls, size_t n) {
  const uint64_t before = CapacityBytes(ls.ledger);
  GrowTight(ls.ledger, n);
  unit_table_bytes += CapacityBytes(ls.ledger) - before;
}

void KvCache::Impl::TrimUnits(LayerSeq& ls) {
  unit_table_bytes -= CapacityBytes(ls.units) + CapacityBytes(ls.ledger);
  TrimTight(ls.units);
  TrimTight(ls.ledger);
  unit_table_bytes += CapacityBytes(ls.units) + CapacityBytes(ls.ledger);
}

void KvCache::Impl::AddUnit(LayerSeq& ls, const UnitRecord& u) {
  GrowUnits(ls, ls.units.size() + 1);
  const uint32_t birth = windows[u.window].birth;
  auto at = ls.units.end();
  while (at != ls.units.begin() && windows[(at - 1)->window].birth > birth) --at;
  ls.units.insert(at, u);
}

/// The entry of a window in a list of records in the order of births, or its end.
template <typename Record>
static Record* FindByBirth(std::vector<Record>& records, const std::vector<WindowRecord>& windows,
                           WindowId w) {
  const auto it = PlaceByBirth(records, windows, windows[w].birth);
  return it != records.end() && it->window == w ? &*it : nullptr;
}

UnitRecord* KvCache::Impl::FindUnit(SeqId seq, uint32_t il, WindowId w) {
  std::vector<UnitRecord>& units = sequences[seq]->layers[il].units;
  if (units.empty()) return nullptr;
  if (units.back().window == w) return &units.back();
  return FindByBirth(units, windows, w);
}

LedgerEntry* KvCache::Impl::FindLedger(const LayerSeq& ls, WindowId w) const {
  return FindByBirth(const_cast<LayerSeq&>(ls).ledger, windows, w);
}

/// Keeps codes of a side that becomes full precision.
void KvCache::Impl::AddLedger(uint32_t il, UnitRecord& u, Side s, Rung r, BlockId id) {
  LayerSeq& ls = sequences[windows[u.window].seq]->layers[il];
  LedgerEntry* entry = u.dormant() ? FindLedger(ls, u.window) : nullptr;
  if (entry == nullptr) {
    LedgerEntry fresh;
    fresh.window = u.window;
    GrowLedger(ls, ls.ledger.size() + 1);
    const auto at = PlaceByBirth(ls.ledger, windows, windows[u.window].birth);
    entry = &*ls.ledger.insert(at, fresh);
    u.set_dormant(true);
  }
  entry->Set(s, r, id);
  StoreOf(il).dormant_bytes += PoolOf(il, s, r).block_bytes();
}

void KvCache::Impl::DropBlock(uint32_t il, UnitSides& u, Side s) {
  if (!u.has(s)) return;
  PoolOf(il, s, u.rung(s)).Unref(u.block(s));
  u.Drop(s);
}

/// Forgets a unit's dormant codes.
void KvCache::Impl::DropLedger(uint32_t il, UnitRecord& u) {
  if (!u.dormant()) return;
  u.set_dormant(false);
  LayerSeq& ls = sequences[windows[u.window].seq]->layers[il];
  LedgerEntry* entry = FindLedger(ls, u.window);
  for (const Side s : kBothSides) {
    if (!entry->has(s)) continue;
    StoreOf(il).dormant_bytes -= PoolOf(il, s, entry->rung(s)).block_bytes();
    DropBlock(il, *entry, s);
  }
  ls.ledger.erase(ls.ledger.begin() + (entry - ls.ledger.data()));
}

/// Forgets the ledger entry of a unit whose codes are all attended.
void KvCache::Impl::DropEmptyLedger(uint32_t il, UnitRecord& u) {
  if (!u.dormant()) return;
  const LedgerEntry* entry = FindLedger(sequences[windows[u.window].seq]->layers[il], u.window);
  if (!entry->has(Side::kKeys) && !entry->has(Side::kValues)) DropLedger(il, u);
}

/// New handles for the blocks of one pool, in every unit and ledger that has some.
void KvCache::Impl::CompactHandles(BlockPool& pool) {
  std::vector<BlockId> to;
  try {
    to = pool.Compact();
  } catch (const std::bad_alloc&) {  // the tables stay as large as they are
    return;
  }
  ForBlocks([&](uint32_t il, UnitSides& u, Side s, bool) {
    if (&PoolOf(il, s, u.rung(s)) == &pool) u.Set(s, u.rung(s), to[u.block(s)]);
  });
}

void KvCache::Impl::TrimStores() {
  for (const auto& pool : pools) {
    if (pool->WantsCompaction()) CompactHandles(*pool);
    pool->Trim();
  }
}

/// The windows of `refs` whose units the layer lacks, each once.
Status KvCache::Impl::CheckRefs(uint32_t il, std::span<const TokenRef> refs,
                                std::vector<WindowId>& fresh) {
  WindowId last = kNone;
  for (const TokenRef& ref : refs) {
    if (ref.window == last) continue;
    last = ref.window;
    if (last >= windows.size() || !windows[last].in_use()) {
      return Internal("a row is written to a window that does not exist");
    }
    const WindowRecord& w = windows[last];
    if (UnitRecord* u = FindUnit(w.seq, il, last)) {
      if (!u->full()) return Internal("a row is written to a packed window");
      for (const Side s : kBothSides) QEVICT_RETURN_IF_ERROR(OwnBlocks(il, *u, s));
    } else {
      if (w.n_created == layers.size()) return Internal("a row is written to an evicted window");
      if (std::find(fresh.begin(), fresh.end(), last) == fresh.end()) fresh.push_back(last);
    }
  }
  return {};
}

/// A block that is about to change must not be shared with a copy.
Status KvCache::Impl::OwnBlocks(uint32_t il, UnitSides& u, Side side) {
  BlockPool& pool = PoolOf(il, side, u.rung(side));
  if (pool.refs(u.block(side)) == 1) return {};
  QEVICT_RETURN_IF_ERROR(pool.Reserve(1));
  const BlockId own = pool.Clone(u.block(side));
  pool.Unref(u.block(side));
  u.Set(side, u.rung(side), own);
  return {};
}

/// Makes the units of `refs` that the layer lacks. All or nothing.
Status KvCache::Impl::CreateUnits(uint32_t il, std::span<const TokenRef> refs) {
  std::vector<WindowId> fresh;
  QEVICT_RETURN_IF_ERROR(CheckRefs(il, refs, fresh));
  if (fresh.empty()) return {};
  RungStore& full = StoreOf(il).rungs[kFullRung];
  std::vector<BlockCount> blocks;
  for (const Side s : kBothSides) CountBlock(blocks, full.pool(s), fresh.size());
  Status grown;
  try {
    SeqId last = kNone;
    for (const WindowId w : fresh) {
      const SeqId seq = windows[w].seq;
      if (seq == last) continue;
      last = seq;
      const auto n = std::count_if(fresh.begin(), fresh.end(),
                                   [&](WindowId id) { return windows[id].seq == seq; });
      LayerSeq& ls = sequences[seq]->layers[il];
      GrowUnits(ls, ls.units.size() + static_cast<size_t>(n));
    }
  } catch (const std::bad_alloc&) {
    grown = OutOfMemory();
  }
  for (const BlockCount& count : blocks) {
    if (grown.ok()) grown = count.pool->Reserve(count.n);
  }
  if (!grown.ok()) {
    for (const WindowId w : fresh) TrimUnits(sequences[windows[w].seq]->layers[il]);
    for (const Side s : kBothSides) full.pool(s).Trim();
    return grown;
  }
  for (const WindowId w : fresh) {
    WindowRecord& record = windows[w];
    UnitRecord u;
    u.window = w;
    for (const Side s : kBothSides) u.Set(s, kFullRung, full.pool(s).New());
    AddUnit(sequences[record.seq]->layers[il], u);
    ++record.n_units;
    ++record.n_created;
  }
  NotePeak();
  return {};
}

Status KvCache::Impl::Write(uint32_t il, std::span<const TokenRef> refs, const float* rows,
                            size_t row_stride, Side side, ParallelFor& pool) {
  if (il >= layers.size()) return OutOfRange("layer " + std::to_string(il) + " does not exist");
  write_blocks.resize(refs.size());
  QEVICT_RETURN_IF_ERROR(CreateUnits(il, refs));
  const LayerShape& shape = StoreOf(il).shape;
  const uint32_t n_heads = shape.n_kv_heads, d = HeadDim(il, side);
  const Elem elem = side == Side::kKeys ? shape.elem_k : shape.elem_v;
  const size_t head_bytes = StoreOf(il).rungs[kFullRung].bytes_of_head(side);
  for (size_t i = 0; i < refs.size(); ++i) {
    write_blocks[i] =
        i > 0 && refs[i].window == refs[i - 1].window
            ? write_blocks[i - 1]
            : Block(il, *FindUnit(windows[refs[i].window].seq, il, refs[i].window), side);
  }
  const auto write_row = [&](size_t i) {
    uint16_t row[kMaxHeadDim];
    for (uint32_t h = 0; h < n_heads; ++h) {
      ConvertTo16(rows + i * row_stride + size_t{h} * d, d, elem, row);
      StoreRow(side, write_blocks[i] + h * head_bytes, config.window, d, refs[i].offset, row);
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
