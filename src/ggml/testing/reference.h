// Attention in double precision: what every comparison is made against.
#pragma once

#include <cstdint>
#include <vector>

#include "ggml/testing/engine.h"

namespace qevict::plugin::testing {

/// Keys and values of one stream as numbers: k [cell][kv head][head_dim], v [cell][kv
/// head][head_dim_v].
struct StreamRows {
  std::vector<float> k, v;
};

/// Output of one layer for the rows of one step, [token][head][head_dim_v]. q: rotated queries,
/// [token][head][head_dim]; streams: one per stream of the step. If `mass` is not null, it receives
/// the probability of each cell summed over query heads of a kv head: [token][kv head][n_kv].
std::vector<double> ReferenceAttention(const LayerSpec& layer, const StepInput& in, uint32_t il,
                                       const std::vector<float>& q,
                                       const std::vector<StreamRows>& streams,
                                       const std::vector<float>& sinks,
                                       std::vector<double>* mass = nullptr);

struct Error {
  double max_abs = 0.0;  ///< largest absolute difference
  double rms = 0.0;      ///< root of the squared differences over the squared reference
  bool nan = false;
};
Error Compare(const std::vector<float>& got, const std::vector<double>& want);

}  // namespace qevict::plugin::testing
