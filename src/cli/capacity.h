// How many tokens of a full context end up in which tier, by arithmetic: QEvict's own planner on a
// synthetic list of windows, with bytes as src/cache counts them.
//
// The numbers are those of the first routing event after a prompt that fills the context. Tables
// that depend on the scores (a window's record lives until every layer has evicted it) are taken at
// their largest, so real caches hold at least as many tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/model_shape.h"
#include "qevict/config.h"

namespace qevict::cli {

/// How a program sets its caches up.
struct CacheUse {
  uint32_t n_ctx = 0;    ///< of all slots together
  uint32_t n_slots = 1;  ///< sequences
  bool unified = false;  ///< one cache for all slots
  uint32_t n_ubatch = 512;
};

/// One cache of llama.cpp (models with sliding windows have two).
struct CacheLayout {
  bool sliding = false;
  std::vector<CacheLayer> layers;
  uint32_t n_streams = 1, cells_per_stream = 0;
  uint32_t n_sequences = 1;          ///< per stream
  uint32_t tokens_per_sequence = 0;  ///< of a full context
};
std::vector<CacheLayout> LayOut(const ModelShape& model, const CacheUse& use);
/// What llama.cpp's own f16 cache takes.
uint64_t F16Bytes(const CacheLayout& cache);

/// Layers with the same numbers; all sequences and streams together.
struct LayerPlan {
  std::vector<uint32_t> layers;  ///< indices in the model
  bool sliding = false;
  /// Per layer and sequence:
  uint32_t full_tokens = 0, packed_tokens = 0, evicted_tokens = 0;
  /// Of all these layers, sequences and streams:
  uint64_t full_bytes = 0, packed_bytes = 0, record_bytes = 0, f16_bytes = 0;
};

struct CapacityPlan {
  std::vector<LayerPlan> layers;
  uint64_t table_bytes =
      0;  ///< records of windows, cells and RoPE that belong to no layer, at most
  uint64_t asked_bytes = 0;    ///< the budget as configured: less than budget_bytes where that is
                               ///< raised to the least that holds a short sequence
  uint64_t budget_bytes = 0;   ///< of all caches; the f16 size for preset full
  uint64_t minimum_bytes = 0;  ///< the least budget that works
  uint64_t f16_bytes = 0;
  uint64_t full_bytes() const;
  uint64_t packed_bytes() const;
  uint64_t all_table_bytes() const;
  uint64_t total_bytes() const { return full_bytes() + packed_bytes() + all_table_bytes(); }
};

CapacityPlan PlanCapacity(const Config& config, const ModelShape& model, const CacheUse& use);

}  // namespace qevict::cli
