// Held: what a cache says that it holds - full-precision and packed windows, decoded to numbers
// with src/codecs - and the attention that follows from it in double precision.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ggml/testing/twin.h"

namespace qevict::plugin::testing {

/// One stream of one layer by cells.
struct HeldRows {
  StreamRows rows;
  std::vector<WindowId> window;  ///< [cell]; kNone: nothing is held
  uint32_t n_packed = 0;         ///< windows
  uint32_t n_full = 0;
};
/// Under per_head: of kv head `part`.
HeldRows ReadHeld(Engine& engine, uint32_t layer, uint32_t stream, uint32_t part = 0);

/// A layer's windows and what they have scored, by birth number.
using Scores = std::map<uint32_t, double>;
Scores ScoresOf(Engine& engine, uint32_t il);

struct HeldReport {
  ggml_status status = GGML_STATUS_SUCCESS;
  std::vector<Error> layers;  ///< and parts of layers
  std::vector<Scores>
      masses;  ///< per layer: probability per window, summed over rows, mean over heads
  std::vector<std::string> violations;
  uint64_t held_bytes = 0, budget_bytes = 0;
};

/// Runs a step of `twin.ours` alone. Compares its attention with what the cache holds afterwards,
/// which is what it held during the attention unless a bounded prompt is routed after it (compare =
/// false then).
HeldReport RunHeld(Twin& twin, const std::vector<Token>& batch, bool compare = true);

/// Weights of packed values have 16 bits below the largest of a tile, and their codes' part and
/// their zeros' part cancel in an average of random rows: some 1e-4. (Packed keys differ less: the
/// reference's angles are fp32 steps as in the forward pass, those of the kernels are exact.)
inline constexpr double kRms = 4e-4;
/// Token codes are read with queries of 8 bits: logits of this size are off by some percent.
inline constexpr double kTokenRms = 5e-2;

/// Attention follows from what is held, the cache is sound, and its bytes are within the budget
/// once there is one.
void ExpectHeld(const HeldReport& report, const std::string& what, double rms = kRms);

}  // namespace qevict::plugin::testing
