// One history and one packed rung: the ranking that QEvict, StreamingLLM and packing alone share.
// Each sequence of each group has a history, the windows between sinks and recents, and bytes for
// it; what to do with these bytes is the policy's rule.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "qevict/config.h"

namespace qevict {

enum class Tier : uint8_t { kFull, kPacked, kEvicted };

/// One history window (a candidate) as a policy sees it.
struct Candidate {
  uint32_t window;  ///< id; smaller = older; ids never return
  float score;      ///< higher = keep
  Tier tier;        ///< kFull or kPacked: where it is now
  bool has_codes;   ///< a ledger entry exists (always true for kPacked; dormant if tier == kFull)
  uint32_t order = 0;  ///< position order inside the sequence; ties go to the incumbent tier, then
                       ///< to the lower order
};

/// Bytes that one unit costs in each state, records included.
struct HistoryCosts {
  uint64_t full_bytes;    ///< M_f
  uint64_t packed_bytes;  ///< M_q
};

struct HistoryInput {
  std::span<const Candidate> candidates;  ///< in position order
  HistoryCosts costs;
  uint64_t history_bytes;  ///< B_hist: what candidates may cost together
};

/// Target state per candidate, same order as the input.
struct HistoryPlacement {
  Tier tier = Tier::kEvicted;
  bool pinned = false;  ///< ranked as full precision, but stays packed (Promotion::kPinned)
};

struct HistoryPlan {
  std::vector<HistoryPlacement> placements;
  uint64_t n_full_capacity = 0;    ///< K_f
  uint64_t n_packed_capacity = 0;  ///< K_q before dormant entries are charged
};

/// QEvict's routing rule (see qevict.cc). Deterministic; bit-identical for equal scores. If
/// everything fits in full precision and nothing is packed yet, everything stays full.
HistoryPlan PlanQEvict(const HistoryInput& input, const Config& config);
/// Sinks + recents + as many of the newest windows as fit, all in full precision (StreamingLLM with
/// original positions).
HistoryPlan PlanStreaming(const HistoryInput& input, const Config& config);
/// Everything packed, the oldest evicted if that does not fit (quantization alone: KIVI and its
/// kin).
HistoryPlan PlanPack(const HistoryInput& input, const Config& config);
/// Dispatches on config.preset. Preset::kFull keeps everything full.
HistoryPlan PlanHistory(const HistoryInput& input, const Config& config);

}  // namespace qevict
