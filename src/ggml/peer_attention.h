// ggml's own attention (FLASH_ATTN_EXT on its CPU backend) over a cache laid out as llama.cpp does,
// to compare ours with. No part of the plug-in.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "qevict/status.h"

namespace qevict::plugin {

enum class PeerType : uint8_t { kF16, kQ8_0, kQ4_0 };
/// ggml's name: "f16", "q8_0", "q4_0".
const char* PeerTypeName(PeerType type);

struct PeerShape {
  uint32_t n_heads, n_kv_heads, head_dim;  ///< head_dim: a multiple of 32 for quantized types
  uint32_t n_tokens;
};

/// One decode step through `n_layers` layers as one graph. Not thread-safe.
class PeerAttention {
 public:
  /// Errors: kResourceExhausted.
  static Result<std::unique_ptr<PeerAttention>> Create(const PeerShape& shape, PeerType type,
                                                       uint32_t n_layers, int n_threads);
  ~PeerAttention();

  /// Query [head][channel]; keys and values [token][kv head][channel], stored as the type can.
  void Fill(uint32_t layer, std::span<const float> query, std::span<const float> keys,
            std::span<const float> values);
  /// What is stored, as floats.
  void Stored(uint32_t layer, std::vector<float>& keys, std::vector<float>& values) const;
  /// Computes all layers. Errors: kInternal.
  Status Run();
  /// [head][channel] of the last Run.
  std::vector<float> Out(uint32_t layer) const;
  /// K and V of one layer.
  size_t layer_bytes() const;

 private:
  struct Graph;
  explicit PeerAttention(std::unique_ptr<Graph> graph);
  std::unique_ptr<Graph> graph_;
};

}  // namespace qevict::plugin
