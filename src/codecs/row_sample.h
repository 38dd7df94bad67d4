// Rows that codecs with statistics are made of: what a layer holds in full precision when it packs
// its first window.
#pragma once

#include <cstdint>
#include <vector>

namespace qevict::codecs {

/// Rows of one kv head, f32 and finite.
struct RowSample {
  uint32_t n = 0;
  std::vector<float> k_before_rope, k;  ///< [n][head_dim]
  std::vector<float> v;                 ///< [n][head_dim_v]
};

}  // namespace qevict::codecs
