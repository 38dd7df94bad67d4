// Splitting of an attention call into tasks, and merging. Compiled for the lowest CPU: no numbers
// are crunched here.
//
// A task is (group, kv head, strip of blocks of query vectors), and when a call has fewer than
// kMinTasks of those, also a chunk of windows. All sizes follow from the call alone, never from the
// number of threads, so results do not depend on it. One strip merges its own blocks in order;
// chunks merge in a second pass, strips' masses in a third.
#include "kernels/attention.h"

#include <algorithm>
#include <cstdlib>

#include "kernels/attention_layout.h"

namespace qevict::kernels {
namespace {

using internal::BlockArgs;
using internal::BlockSize;
using internal::BlockState;
using internal::Carver;
using internal::CeilDiv;
using internal::ChunkSize;
using internal::GroupPlan;
using internal::HeadArgs;
using internal::LayoutScratch;
using internal::LayoutState;
using internal::MakeHead;
using internal::MergeArgs;
using internal::PadLanes;
using internal::PlanBlocks;
using internal::PlanChunks;
using internal::Scratch;
using internal::StripBegin;

/// One call of Attend.
class Call {
 public:
  Call(std::span<const AttentionGroup> groups, ParallelFor& pool, Workspace& workspace)
      : groups_(groups), pool_(pool), workspace_(workspace) {}

  bool Run() {
    Plan();
    if (n_tasks_ == 0) return true;
    Carver count(nullptr);
    Lay(count);
    uint8_t* memory = workspace_.Reserve(count.used());
    if (memory == nullptr) return false;
    Carver carver(memory);
    Lay(carver);
    pool_.For(n_tasks_, [this](size_t task, unsigned thread) { RunTask(task, thread); });
    if (n_merges_ != 0) MergeChunks();
    ReduceStrips();
    return true;
  }

 private:
  void Plan() {
    call_tasks_ = 0;
    for (const AttentionGroup& g : groups_) {
      const GroupPlan p = PlanBlocks(g);
      call_tasks_ += size_t{p.n_heads} * p.n_strips;
    }
    n_tasks_ = n_merges_ = 0;
    for (const AttentionGroup& g : groups_) {
      const GroupPlan p = PlanGroup(g);
      n_tasks_ += Tasks(p);
      n_merges_ += Merges(p);
    }
  }

  GroupPlan PlanGroup(const AttentionGroup& g) const {
    GroupPlan p = PlanBlocks(g);
    PlanChunks(g, call_tasks_, p);
    if (p.n_chunks > 1) p.n_strips = p.n_blocks;
    return p;
  }

  static size_t Tasks(const GroupPlan& p) {
    return size_t{p.n_heads} * (p.n_chunks > 1 ? p.n_blocks * p.n_chunks : p.n_strips);
  }
  static size_t Merges(const GroupPlan& p) {
    return p.n_chunks > 1 ? size_t{p.n_heads} * p.n_blocks : 0;
  }

  /// Assigns memory: plans, states of chunks, masses of strips, scratch of threads.
  void Lay(Carver& carver) {
    plans_ = carver.Take<GroupPlan>(groups_.size());
    size_t tasks = 0, merges = 0, scratch = 0;
    for (size_t i = 0; i < groups_.size(); ++i) {
      const AttentionGroup& g = groups_[i];
      GroupPlan p = PlanGroup(g);
      p.first_task = tasks;
      p.first_merge = merges;
      tasks += Tasks(p);
      merges += Merges(p);
      if (p.n_chunks > 1) LayChunks(g, p, carver);
      if (p.want_mass && p.n_strips > 1) {
        p.strip_mass =
            carver.Take<float>(size_t{p.n_heads} * p.n_strips * p.mass_rows * p.n_windows);
      }
      if (p.want_token_mass && p.n_strips > 1)
        p.strip_token_mass = carver.Take<float>(size_t{p.n_heads} * p.n_strips * p.n_tokens);
      if (plans_ != nullptr) plans_[i] = p;
      Carver one(nullptr);
      LayoutThread(g, p, one);
      scratch = std::max(scratch, one.used());
    }
    scratch_bytes_ = scratch;
    scratch_ = carver.Take<uint8_t>(scratch * pool_.n_threads());
  }

  void LayChunks(const AttentionGroup& g, GroupPlan& p, Carver& carver) {
    const size_t n = size_t{p.n_heads} * p.n_blocks * p.n_chunks;
    p.states = carver.Take<BlockState>(n);
    for (size_t i = 0; i < n; ++i) {
      const uint32_t chunk = static_cast<uint32_t>(i % p.n_chunks);
      const uint32_t block = static_cast<uint32_t>(i / p.n_chunks % p.n_blocks);
      const BlockState state = LayoutState(g, p, BlockSize(p, block), ChunkSize(p, chunk), carver);
      if (p.states != nullptr) p.states[i] = state;
    }
  }

  struct Thread {
    Scratch scratch;
    BlockState state;
    float* weights;
  };
  static Thread LayoutThread(const AttentionGroup& g, const GroupPlan& p, Carver& carver) {
    Thread t{};
    t.scratch = LayoutScratch(g, p, carver);
    t.weights = carver.Take<float>(p.n_chunks);
    if (p.n_chunks == 1) t.state = LayoutState(g, p, p.block_vec, p.n_windows, carver);
    return t;
  }
  Thread ThreadMemory(size_t group, unsigned thread) const {
    Carver carver(scratch_ + thread * scratch_bytes_);
    return LayoutThread(groups_[group], plans_[group], carver);
  }

  /// The last group whose first index is not above `index`; groups without tasks share their
  /// successor's first index.
  size_t FindGroup(size_t index, size_t GroupPlan::*first) const {
    size_t i = groups_.size() - 1;
    while (plans_[i].*first > index) --i;
    return i;
  }

  void RunTask(size_t task, unsigned thread) {
    const size_t group = FindGroup(task, &GroupPlan::first_task);
    const GroupPlan& p = plans_[group];
    Thread memory = ThreadMemory(group, thread);
    size_t index = task - p.first_task;
    if (p.n_chunks > 1) {
      const uint32_t chunk = static_cast<uint32_t>(index % p.n_chunks);
      const uint32_t block = static_cast<uint32_t>(index / p.n_chunks % p.n_blocks);
      const HeadArgs head =
          MakeHead(groups_[group], static_cast<uint32_t>(index / p.n_chunks / p.n_blocks));
      AttendBlock(p, head, block, chunk, p.states[index], memory.scratch);
      return;
    }
    const uint32_t strip = static_cast<uint32_t>(index % p.n_strips),
                   kv_head = static_cast<uint32_t>(index / p.n_strips);
    const HeadArgs head = MakeHead(groups_[group], kv_head);
    const MassTarget mass = TargetOf(group, kv_head, strip);
    for (uint32_t b = StripBegin(p, strip); b < StripBegin(p, strip + 1); ++b) {
      AttendBlock(p, head, b, 0, memory.state, memory.scratch);
      MergeBlock(p, head, b, &memory.state, mass, memory.weights);
    }
  }

  struct MassTarget {
    float* data;
    size_t stride;
    bool max;
    float* tokens;
  };
  /// The caller's arrays, or (cleared) the strip's own.
  MassTarget TargetOf(size_t group, uint32_t kv_head, uint32_t strip) const {
    const AttentionGroup& g = groups_[group];
    const GroupPlan& p = plans_[group];
    MassTarget to{nullptr, 0, g.mass_kind == MassKind::kMax, nullptr};
    const size_t index = size_t{kv_head} * p.n_strips + strip;
    if (p.want_mass && p.n_strips == 1) {
      to.data = g.mass + size_t{kv_head} * p.mass_rows * g.mass_head_stride;
      to.stride = g.mass_per_head ? g.mass_head_stride : 0;
    } else if (p.want_mass) {
      const size_t n = size_t{p.mass_rows} * p.n_windows;
      to.data = Cleared(p.strip_mass + index * n, n);
      to.stride = g.mass_per_head ? p.n_windows : 0;
    }
    if (p.want_token_mass) {
      to.tokens = p.n_strips == 1 ? g.token_mass + size_t{kv_head} * g.token_mass_head_stride
                                  : Cleared(p.strip_token_mass + index * p.n_tokens, p.n_tokens);
    }
    return to;
  }
  static float* Cleared(float* mass, size_t n) {
    std::fill_n(mass, n, 0.0f);
    return mass;
  }

  void AttendBlock(const GroupPlan& p, const HeadArgs& head, uint32_t block, uint32_t chunk,
                   const BlockState& state, const Scratch& scratch) const {
    BlockArgs a{};
    a.head = &head;
    a.vec_begin = block * p.block_vec;
    a.n_vec = BlockSize(p, block);
    a.win_begin = chunk * p.chunk_windows;
    a.n_win = ChunkSize(p, chunk);
    a.state = state;
    a.scratch = scratch;
    a.tile_max_stride = PadLanes(CeilDiv(p.chunk_windows, head.tile_windows));
    a.prompt = p.prompt;
    internal::ActiveTable().attend(a);
  }

  void MergeBlock(const GroupPlan& p, const HeadArgs& head, uint32_t block, const BlockState* parts,
                  const MassTarget& mass, float* weights) const {
    MergeArgs a{};
    a.head = &head;
    a.vec_begin = block * p.block_vec;
    a.n_vec = BlockSize(p, block);
    a.parts = parts;
    a.n_parts = p.n_chunks;
    a.part_windows = p.chunk_windows;
    a.n_windows = p.n_windows;
    a.mass = mass.data;
    a.mass_stride = mass.stride;
    a.mass_max = mass.max;
    a.token_mass = mass.tokens;
    a.weights = weights;
    internal::ActiveTable().merge(a);
  }

  void MergeChunks() {
    pool_.For(n_merges_, [this](size_t index, unsigned thread) {
      const size_t group = FindGroup(index, &GroupPlan::first_merge);
      const GroupPlan& p = plans_[group];
      const size_t local = index - p.first_merge;
      const uint32_t block = static_cast<uint32_t>(local % p.n_blocks),
                     kv_head = static_cast<uint32_t>(local / p.n_blocks);
      const HeadArgs head = MakeHead(groups_[group], kv_head);
      const Thread memory = ThreadMemory(group, thread);
      MergeBlock(p, head, block, p.states + local * p.n_chunks, TargetOf(group, kv_head, block),
                 memory.weights);
    });
  }

  void ReduceStrips() {
    for (size_t i = 0; i < groups_.size(); ++i) {
      const AttentionGroup& g = groups_[i];
      const GroupPlan& p = plans_[i];
      if (p.n_strips <= 1) continue;
      if (p.want_token_mass) ReduceTokens(g, p);
      if (!p.want_mass) continue;
      const float* strip = p.strip_mass;
      for (uint32_t kv_head = 0; kv_head < p.n_heads; ++kv_head) {
        for (uint32_t s = 0; s < p.n_strips; ++s) {
          for (uint32_t row = 0; row < p.mass_rows; ++row, strip += p.n_windows) {
            float* mass = g.mass + (size_t{kv_head} * p.mass_rows + row) * g.mass_head_stride;
            Reduce(g.mass_kind, {strip, p.n_windows}, mass);
          }
        }
      }
    }
  }

  static void ReduceTokens(const AttentionGroup& g, const GroupPlan& p) {
    const float* strip = p.strip_token_mass;
    for (uint32_t kv_head = 0; kv_head < p.n_heads; ++kv_head) {
      for (uint32_t s = 0; s < p.n_strips; ++s, strip += p.n_tokens) {
        Reduce(MassKind::kSum, {strip, p.n_tokens},
               g.token_mass + size_t{kv_head} * g.token_mass_head_stride);
      }
    }
  }

  static void Reduce(MassKind kind, std::span<const float> from, float* to) {
    for (size_t w = 0; w < from.size(); ++w)
      to[w] = kind == MassKind::kMax ? std::max(to[w], from[w]) : to[w] + from[w];
  }

  std::span<const AttentionGroup> groups_;
  ParallelFor& pool_;
  Workspace& workspace_;
  size_t call_tasks_ = 0, n_tasks_ = 0, n_merges_ = 0;
  GroupPlan* plans_ = nullptr;
  uint8_t* scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
};

}  // namespace

size_t FullHeadBytes(uint32_t window, uint32_t head_dim, uint32_t head_dim_v) {
  return size_t{window} * (size_t{head_dim} + head_dim_v) * 2;
}

size_t PackedHeadBytes(uint32_t bits, uint32_t window, uint32_t head_dim, uint32_t head_dim_v) {
  const size_t codes = size_t{window} * (size_t{head_dim} + head_dim_v) * bits / 8;
  return codes + (size_t{head_dim} + window) * 2 * sizeof(uint16_t);
}

size_t TokenHeadBytes(uint32_t window, const TokenCode& code) {
  return TokenCodeBytes(window, code.k.n_words, code.k.grid) +
         TokenCodeBytes(window, code.v.n_words, code.v.grid);
}

size_t GridHeadBytes(uint32_t window, uint32_t head_dim, uint32_t head_dim_v,
                     const GridCode& code) {
  return LayoutGrid(code.k, window, head_dim).end + LayoutGrid(code.v, window, head_dim_v).end;
}

Workspace::~Workspace() { std::free(data_); }

uint8_t* Workspace::Reserve(size_t n) {
  if (n <= bytes_) return data_;
  const size_t rounded = (n + n / 4 + 63) / 64 * 64;
  uint8_t* data = static_cast<uint8_t*>(std::aligned_alloc(64, rounded));
  if (data == nullptr) return nullptr;
  std::free(data_);
  data_ = data;
  bytes_ = rounded;
  return data_;
}

bool Attend(std::span<const AttentionGroup> groups, ParallelFor& pool, Workspace& workspace) {
  return Call(groups, pool, workspace).Run();
}

}  // namespace qevict::kernels
