// What a GGUF file's metadata says about the KV cache, without loading weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "qevict/status.h"

namespace qevict::cli {

/// One layer that has a KV cache.
struct CacheLayer {
  uint32_t index;  ///< in the model
  uint32_t n_kv_heads, head_dim, head_dim_v;
  bool sliding;  ///< attends to the last `n_swa` tokens only
  bool operator==(const CacheLayer&) const = default;
};

struct ModelShape {
  std::string architecture;
  uint32_t n_ctx_train = 0;
  uint32_t n_swa = 0;      ///< tokens a sliding layer sees; 0 = there are none
  uint32_t rope_dims = 0;  ///< rotated channels of a key; 0 without RoPE
  std::vector<CacheLayer> layers;
};

/// Errors: kNotFound, kInvalidArgument (no GGUF, metadata missing), kUnimplemented (recurrent
/// state, MLA).
Result<ModelShape> ReadModelShape(const std::string& path);

}  // namespace qevict::cli
