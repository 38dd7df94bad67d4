// Stats and Clear.
#include <bit>

#include "cache/kv_cache_impl.h"
#include "cache/restore.h"

namespace qevict {

CacheStats KvCache::Impl::Stats() const {
  CacheStats out = counters;
  uint64_t total_tokens = 0;
  for (const auto& s : sequences) {
    if (!s) continue;
    total_tokens += s->live + s->evicted;
    for (uint32_t il = 0; il < layers.size(); ++il) {
      for (const UnitRecord& u : s->layers[il].units) {
        const uint64_t n = static_cast<uint64_t>(std::popcount(windows[u.window].live));
        (u.full() ? out.tokens.full : out.tokens.packed) += n;
      }
    }
  }
  const uint64_t token_layers = total_tokens * layers.size();
  const uint64_t accessible = out.tokens.full + out.tokens.packed;
  out.tokens.evicted = token_layers > accessible ? token_layers - accessible : 0;
  CountBlocks(out.bytes);
  out.bytes.tables = TableBytes();
  out.bytes.slack = arena.bytes() - out.bytes.full - out.bytes.packed - out.bytes.dormant;
  out.f16_bytes = total_tokens * f16_token_bytes;
  out.budget_bytes = LimitInForce() ? TotalBudget() : 0;
  out.arena_bytes = arena.bytes();
  out.arena_peak_bytes = arena.peak_bytes();
  out.n_layers = layers.size();
  return out;
}

/// Blocks that some unit attends are full or packed, the others dormant; shared ones count once.
void KvCache::Impl::CountBlocks(ByteCounts& bytes) const {
  std::vector<std::vector<bool>> seen(pools.size());
  uint64_t held = 0;
  for (size_t i = 0; i < pools.size(); ++i) {
    held += pools[i]->used() * pools[i]->block_bytes();
    seen[i].resize(pools[i]->n_handles());
  }
  const auto count = [&](uint32_t il, const UnitSides& u, Side s, bool dormant) {
    const BlockPool& pool = PoolOf(il, s, u.rung(s));
    size_t i = 0;
    while (pools[i].get() != &pool) ++i;
    if (dormant || seen[i][u.block(s)]) return;
    seen[i][u.block(s)] = true;
    (u.rung(s) == kFullRung ? bytes.full : bytes.packed) += pool.block_bytes();
  };
  const_cast<Impl*>(this)->ForBlocks(count);
  bytes.dormant = held - bytes.full - bytes.packed;
}

void KvCache::Impl::Clear() {
  Relearn();
  sequences.clear();
  sequences.shrink_to_fit();
  for (const auto& pool : pools) pool->Clear();
  for (ShapeStore& store : stores) store.dormant_bytes = 0;
  std::vector<WindowRecord>().swap(windows);
  std::vector<uint32_t>().swap(window_cells);
  for (Stream& stream : streams) std::vector<uint32_t>().swap(stream.cells);
  free_window = kNone;
  n_free_windows = 0;
  next_birth = 0;
  max_pos = 0;
  unit_table_bytes = 0;
  counters = {};
  restore.reset();
  arena.ResetPeak();
  UpdateLimit();
}

}  // namespace qevict
