// Twin: the same tokens through two engines, one with its cache on the QEVICT device and one in CPU
// memory, and both against the double-precision reference.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "ggml/testing/cells.h"
#include "ggml/testing/engine.h"
#include "ggml/testing/reference.h"

namespace qevict::plugin::testing {

/// Tokens [first, first + n) of one sequence.
std::vector<Token> TokensOf(uint32_t seq, int32_t first, uint32_t n);
/// Concatenation.
std::vector<Token> Join(std::initializer_list<std::vector<Token>> parts);

struct TwinReport {
  ggml_status status = GGML_STATUS_SUCCESS;
  struct Layer {
    Error ours, ggml;
  };
  std::vector<Layer> layers;
  std::vector<std::string> violations;  ///< of the cache's invariants, after the step
};

class Twin {
 public:
  explicit Twin(const CacheSpec& spec, const std::string& config = "preset=full",
                const MaskKind& mask = {});

  Cells cells, swa_cells;  ///< of the first and the second cache
  Engine ours, cpu;
  std::vector<MaskKind> masks;       ///< per layer
  std::vector<uint32_t> blind_rows;  ///< rows of the next steps whose masks are full of -inf
  std::vector<uint32_t> holes;       ///< cells that the next masks hide although they are in use
  int32_t swa = 0;                   ///< > 0: cells of tokens that left the window are taken again

  /// Places the tokens (grouped by stream, streams adjacent) and runs a step in both engines.
  TwinReport Step(const std::vector<Token>& batch, const GraphKind& kind = {});
  /// The same with the last graph of both.
  TwinReport Restep(const std::vector<Token>& batch);
  /// Runs tokens that already have cells (the input of the last Step with other rows, say).
  TwinReport RunInput(const StepInput& in, bool reuse = false, const GraphKind& kind = {});
  /// Cells, positions, masks and random rows for a batch.
  StepInput Input(const std::vector<Token>& batch);
  /// K-shift on both engines by what `cells` has accumulated. bf16 caches: on ours only (ggml has
  /// no bf16 rope).
  ggml_status Shift();

  /// The plug-in's sequences that hold cells of `seq` alone (cells of a shared prefix are left
  /// out).
  std::set<SeqId> HoldersOf(uint32_t seq);

  const StepInput& last_input() const { return last_; }
  const StepOutput& last_ours() const { return last_ours_; }

 private:
  std::vector<uint16_t> Mask(const std::vector<Token>& batch, const StepInput& in,
                             uint32_t il) const;
  StepInput last_;
  StepOutput last_ours_;
  uint64_t seed_ = 1;
};

/// Our error is not above ggml's, or is f32 rounding noise; times `slack` where keys may differ in
/// their last f16 bit, as after a K-shift. QEVICT_TEST_PRINT=1 prints both errors.
void ExpectExact(const TwinReport& report, const char* what, double slack = 1.0);

}  // namespace qevict::plugin::testing
