// How an attention call is split, and where each part's memory lies. Used by attention.cc alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention_internal.h"

namespace qevict::kernels::internal {

constexpr uint32_t CeilDiv(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

/// Hands out 64-byte aligned pieces; with a null base it only counts.
class Carver {
 public:
  explicit Carver(uint8_t* base) : base_(base) {}
  template <typename T>
  T* Take(size_t n) {
    T* p = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (n * sizeof(T) + 63) / 64 * 64;
    return p;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

/// How one group is split.
struct GroupPlan {
  uint32_t n_vec, n_windows, n_heads;
  uint32_t block_vec, n_blocks;
  uint32_t n_strips;  // each of consecutive blocks
  uint32_t chunk_windows, n_chunks;
  bool prompt, want_mass, want_token_mass;
  size_t first_task, first_merge;
  BlockState* states;       // chunked: [head][block][chunk]
  uint32_t mass_rows;       // masses of a kv head: 1, or one per query head
  float* strip_mass;        // several strips: [head][strip][mass_rows][n_windows]
  float* strip_token_mass;  // the same: [head][strip][n_tokens]
  size_t n_tokens;          // of all windows
};

uint32_t StripBegin(const GroupPlan& p, uint32_t strip);
uint32_t BlockSize(const GroupPlan& p, uint32_t block);
uint32_t ChunkSize(const GroupPlan& p, uint32_t chunk);
/// Blocks and strips, one chunk.
GroupPlan PlanBlocks(const AttentionGroup& g);
/// Splits the windows so that the call, which has so many tasks without, has about kMinTasks.
void PlanChunks(const AttentionGroup& g, size_t call_tasks, GroupPlan& p);
/// Scratch for blocks of the plan's largest size.
Scratch LayoutScratch(const AttentionGroup& g, const GroupPlan& p, Carver& carver);
BlockState LayoutState(const AttentionGroup& g, const GroupPlan& p, uint32_t n_vec, uint32_t n_win,
                       Carver& carver);
HeadArgs MakeHead(const AttentionGroup& g, uint32_t kv_head);

}  // namespace qevict::kernels::internal
