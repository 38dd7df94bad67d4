// What a restore in progress remembers between calls. Scratch, gone when the next step begins.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "cache/kv_cache_impl.h"
#include "cache/row_format.h"

namespace qevict {

/// Packed (or evicted) unit whose rows are arriving.
struct RestoredUnit {
  uint32_t shares_k = 0, shares_v = 0;  // bit i: share i is here
  uint32_t n_shares = 0;                // 0: evicted in this layer
  bool complete() const {
    const uint32_t all = n_shares >= 32 ? 0xFFFFFFFFu : (1u << n_shares) - 1;
    return (shares_k & shares_v) == all;
  }
};

/// Rows of one restored state: K of the first layer makes the tokens, everything else fills them.
struct RestoreSession {
  uint32_t stream = 0;
  uint32_t first_layer = 0;
  bool filling = false;                              // V has begun: the next K is another restore
  SeqId seq = kNone;                                 // made with the first token
  std::unordered_map<uint64_t, WindowId> windows;    // source << 32 | saved birth
  std::unordered_map<uint64_t, RestoredUnit> units;  // layer << 32 | window
  std::vector<RowChain> chains;                      // per layer

  static uint64_t Key(uint32_t high, uint32_t low) { return uint64_t{high} << 32 | low; }
};

}  // namespace qevict
