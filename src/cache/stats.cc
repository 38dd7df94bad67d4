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
        (u.has_full() ? out.tokens.full : out.tokens.packed) += n;
      }
    }
  }
  const uint64_t token_layers = total_tokens * layers.size();
  const uint64_t accessible = out.tokens.full + out.tokens.packed;
  out.tokens.evicted = token_layers > accessible ? token_layers - accessible : 0;
  for (const ShapePools& p : pools) {
    out.bytes.full += p.full.used() * p.full_bytes();
    out.bytes.packed += (p.packed.used() - p.n_dormant) * p.packed_bytes();
    out.bytes.dormant += p.n_dormant * p.packed_bytes();
  }
  out.bytes.tables = TableBytes();
  out.bytes.slack = arena.bytes() - out.bytes.full - out.bytes.packed - out.bytes.dormant;
  out.f16_bytes = total_tokens * f16_token_bytes;
  out.budget_bytes = LimitInForce() ? TotalBudget() : 0;
  out.arena_bytes = arena.bytes();
  out.arena_peak_bytes = arena.peak_bytes();
  out.n_layers = layers.size();
  return out;
}

void KvCache::Impl::Clear() {
  Relearn();
  sequences.clear();
  sequences.shrink_to_fit();
  for (ShapePools& p : pools) {
    for (SlotPool* pool : {&p.full, &p.packed}) {
      std::vector<SlotOwner>().swap(pool->owners);
      std::vector<uint32_t>().swap(pool->checksums);
      (void)pool->region->Resize(0);
    }
    p.n_dormant = 0;
  }
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
