// Stats: what a cache holds and what it has done. Every number is counted or measured, never
// estimated.
#pragma once

#include <cstdint>

namespace qevict {

/// Bytes of one cache by what they are for. total() is what the budget limits.
struct ByteCounts {
  uint64_t full = 0;     ///< full-precision rows
  uint64_t packed = 0;   ///< codes and grids that are attended
  uint64_t dormant = 0;  ///< codes of windows that are full precision now
  uint64_t tables = 0;   ///< records: windows, positions, cells, scores, slot owners
  uint64_t slack = 0;    ///< committed pages beyond the slots in use
  uint64_t total() const { return full + packed + dormant + tables + slack; }
};

/// Tokens by tier, summed over layers (divide by n_layers for a mean).
struct TokenCounts {
  uint64_t full = 0, packed = 0, evicted = 0;
};

struct CacheStats {
  ByteCounts bytes;
  TokenCounts tokens;
  uint64_t f16_bytes = 0;     ///< the same live tokens in an f16 cache, evicted ones included
  uint64_t budget_bytes = 0;  ///< the limit in force (0 = none)
  uint64_t arena_bytes = 0;   ///< committed bytes of the arena; equals its resident size
  uint64_t arena_peak_bytes = 0;
  uint64_t peak_bytes = 0;  ///< highest total() at the end of a step since the limit is in force
  uint64_t n_layers = 0;
  uint64_t events = 0;      ///< routing events (all layers of a sequence = one event)
  uint64_t promotions = 0;  ///< windows, summed over layers
  uint64_t demotions = 0;
  uint64_t first_encodings = 0;  ///< ledger entries written
  uint64_t evictions = 0;
  uint64_t route_ns = 0;  ///< time spent in routing
};

}  // namespace qevict
