// Lineage: what the graph says about the rows that SET_ROWS stores - which RoPE rotated them, at
// which positions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/rope.h"
#include "ggml.h"

namespace qevict::plugin {

/// Name of a cache tensor taken apart: "cache_k_l12" -> kind 'k', layer 12. kind 0: not a cache
/// tensor.
struct CacheName {
  char kind = 0;  ///< 'k', 'v', 'r', 's' or another letter that llama.cpp may invent
  int layer = -1;
};
CacheName ParseCacheName(const char* name);

/// The tensor that owns the memory of `t` (t itself if it is no view).
inline const ggml_tensor* Root(const ggml_tensor* t) { return t->view_src ? t->view_src : t; }
inline ggml_tensor* Root(ggml_tensor* t) { return t->view_src ? t->view_src : t; }

/// The ROPE op whose output the rows are, seen through views and reshapes only; null if anything
/// else intervenes.
const ggml_tensor* FindRope(const ggml_tensor* rows);

/// The same with normalisation, scaling and biases in between (Llama 4, Hunyuan). Positions are not
/// read from it, so such keys are coded as they are, but a K-shift rotates them further by this
/// RoPE.
const ggml_tensor* FindRopeBehind(const ggml_tensor* rows);

/// Constants of a ROPE op. Vision RoPE and unknown modes give RopePairing::kNone (keys are then
/// coded as they are).
RopeParams ReadRope(const ggml_tensor* rope);

/// Positions of n tokens; positional[i] is false where one number does not describe the rotation
/// (M-RoPE image tokens).
void ReadPositions(const ggml_tensor* rope, size_t n, std::vector<int32_t>& pos,
                   std::vector<uint8_t>& positional);

}  // namespace qevict::plugin
