// State: a stream's rows as llama.cpp saves and restores them - ranges of cells, all K before any
// V.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml/testing/engine.h"

namespace qevict::plugin::testing {

/// One part per layer and kind: K of every layer, then V of every layer.
using SavedState = std::vector<std::vector<uint8_t>>;

/// Reads cells [cell0, cell0 + n) in slices of at most `slice` bytes (0: whole parts).
SavedState Save(Engine& engine, uint32_t stream, uint32_t cell0, uint32_t n, size_t slice = 0);
/// Writes them to the cells from cell0.
void Restore(Engine& engine, uint32_t stream, uint32_t cell0, const SavedState& parts,
             size_t slice = 0);

}  // namespace qevict::plugin::testing
