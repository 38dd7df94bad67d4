// Policy: a pure function from statistics to a plan. No storage, SIMD or ggml here.
// A policy sees, for one layer (or one head group of a layer) and one sequence, the history windows
// between sinks and recents, what they score and where they are, and answers where each shall be.
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
struct UnitCosts {
  uint64_t full_bytes;    ///< M_f
  uint64_t packed_bytes;  ///< M_q
};

struct PlanInput {
  std::span<const Candidate> candidates;  ///< in position order
  UnitCosts costs;
  uint64_t history_bytes;  ///< B_hist: what candidates may cost together
};

/// Target state per candidate, same order as the input.
struct Placement {
  Tier tier = Tier::kEvicted;
  bool pinned = false;  ///< ranked as full precision, but stays packed (Promotion::kPinned)
};

struct Plan {
  std::vector<Placement> placements;
  uint64_t n_full_capacity = 0;    ///< K_f
  uint64_t n_packed_capacity = 0;  ///< K_q before dormant entries are charged
};

/// QEvict's routing rule (policies.md 5.4.1 item 3-5). Deterministic; bit-identical for equal
/// scores. If everything fits in full precision and nothing is packed yet, everything stays full.
Plan PlanQEvict(const PlanInput& input, const Config& config);
/// Sinks + recents + as many of the newest windows as fit, all in full precision (StreamingLLM with
/// original positions).
Plan PlanStreaming(const PlanInput& input, const Config& config);
/// Everything packed, the oldest evicted if that does not fit (quantization alone: KIVI and its
/// kin).
Plan PlanPack(const PlanInput& input, const Config& config);
/// Dispatches on config.preset. Preset::kFull keeps everything full.
Plan MakePlan(const PlanInput& input, const Config& config);

}  // namespace qevict
