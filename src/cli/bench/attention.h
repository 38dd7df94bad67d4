// Timing of attention alone: our kernels and ggml's over the same queries, in turns.
#pragma once

#include <string>
#include <vector>

#include "kernels/problems/layer_problem.h"
#include "qevict/status.h"

namespace qevict::cli {

/// "14/2x64": 14 query heads over 2 KV heads of 64 channels.
struct HeadShape {
  uint32_t n_heads = 0, n_kv_heads = 0, head_dim = 0;
  std::string Name() const;
  kernels::LayerShape layer() const { return {n_kv_heads, n_heads / n_kv_heads, head_dim}; }
};
/// Errors: kInvalidArgument that says what is expected.
Result<std::vector<HeadShape>> ParseShapes(const std::string& text);
Result<std::vector<kernels::Formats>> ParseTiers(const std::string& text);

struct AttentionBenchPlan {
  std::vector<HeadShape> shapes;
  std::vector<uint32_t> tokens;
  std::vector<kernels::Formats> tiers;
  uint32_t n_layers = 4, n_repetitions = 20;
  int n_threads = 1;
  bool warm = false;  ///< leave in the processor's caches what is there
};

/// One kernel at one shape and length.
struct AttentionRow {
  HeadShape shape;
  uint32_t n_tokens = 0;
  std::string kernel;            ///< "ggml f16", "qevict packed2"
  double error = 0;              ///< of outputs, relative to the largest
  double mass_error = -1;        ///< of window masses; -1: returns none
  size_t layer_bytes = 0;        ///< K and V of a layer
  std::vector<double> layer_ms;  ///< a repetition, per layer
  std::vector<double> ratios;    ///< ggml f16 / this kernel, of each round
};

struct AttentionBenchResult {
  std::vector<AttentionRow> rows;
  std::vector<double> read_gbps;  ///< streaming reads between the repetitions
  size_t read_bytes = 0;          ///< of one such read
};

/// Errors: kInternal if a result differs from the double-precision one, then nothing is timed.
Result<AttentionBenchResult> RunAttentionBench(const AttentionBenchPlan& plan);

}  // namespace qevict::cli
