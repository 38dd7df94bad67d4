// CacheGroup: the K and V tensors of one llama.cpp cache (one buffer) and the KvCache that holds
// their contents.
//
// A step is one graph of the host program over this cache:
//   begin   first SET_ROWS of K: read cells and positions, infer sequences, route if an event is
//   due, append layer   SET_ROWS K, SET_ROWS V, FLASH_ATTN_EXT; scores; with a bounded prompt,
//   routing of the layer
// Nothing in the backend interface announces a step: the thread-count callback precedes every
// graph, and a second write to the same layer starts a new one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "codecs/statistics.h"
#include "ggml.h"
#include "ggml/mask.h"
#include "ggml/omp_pool.h"
#include "ggml/reused.h"
#include "ggml/sequences.h"
#include "kernels/attention.h"
#include "qevict/cache.h"
#include "qevict/policy.h"

namespace qevict::plugin {

class Session;

/// One layer of a cache.
struct LayerBinding {
  int model_layer = -1;
  ggml_tensor* k = nullptr;
  ggml_tensor* v = nullptr;
  uint32_t n_kv_heads = 0, head_dim = 0,
           head_dim_v = 0;  ///< known once a FLASH_ATTN_EXT over the layer has been seen
  uint32_t first_cache_layer = 0,
           n_parts = 1;     ///< in the KvCache: one layer, or under per_head one per kv head
  bool rope_known = false;  ///< rope says how rows are rotated, kNone included
  RopeParams rope;
};

/// Rows of one sequence (or of one set of sequences) inside the current step, which attend to the
/// same windows.
struct RowGroup {
  uint32_t stream_index = 0;  ///< among the streams of the step
  uint32_t first_row = 0, n_rows = 0;
  std::vector<SeqId> visible;     ///< sequences with visible tokens, oldest first
  std::vector<WindowId> windows;  ///< all their windows, in order
  std::vector<uint32_t> bits;     ///< [n_rows][windows.size()]
  std::vector<float> bias;        ///< [n_rows][windows.size() * window], if the mask carries values
};

class CacheGroup {
 public:
  /// statistics: of Config::statistics, or null.
  explicit CacheGroup(Config config,
                      std::shared_ptr<const codecs::CodecStatistics> statistics = nullptr)
      : config_(std::move(config)), statistics_(std::move(statistics)) {}

  /// Called by init_tensor for every cache_* tensor; refuses what cannot be held, with the sentence
  /// in the Status.
  Status AddTensor(ggml_tensor* tensor);
  /// What this cache asks of the session's budget: bytes of the tokens that it is taken of, and
  /// what always stays. Heads are not known before the first graph: rows count as small ones.
  CacheDemand Demand() const;
  /// This cache's part of the session's budget, as a fraction of Demand().f16_bytes. Errors:
  /// kInvalidArgument if what always stays does not fit.
  Status SetBudgetFraction(double fraction);
  /// What a fraction is taken of; at most the cells there are.
  void set_budget_tokens(uint32_t tokens) { config_.budget_tokens = std::min(tokens, n_cells_); }
  /// Learns the head shape of a layer from an attention op over it.
  void Observe(const ggml_tensor* flash_attn);
  /// Learns the RoPE of a layer from a write of its keys. State may be restored before the first
  /// step, and is packed by it.
  void ObserveRows(const ggml_tensor* set_rows);
  bool Owns(const ggml_tensor* root) const { return FindLayer(root) >= 0; }

  /// The thread-count callback: the next write begins a step.
  void NoteGraph() {
    step_open_ = false;
    shifted_.clear();
  }
  Status SetRows(const ggml_tensor* op, const ggml_cgraph* graph, OmpPool& pool);
  Status FlashAttention(const ggml_tensor* op, OmpPool& pool);
  Status ShiftRope(const ggml_tensor* op, OmpPool& pool);

  void Clear();
  Status CopyStream(const ggml_tensor* src, const ggml_tensor* dst);
  void ReadBytes(const ggml_tensor* tensor, size_t offset, size_t size, uint8_t* out);
  Status WriteBytes(const ggml_tensor* tensor, size_t offset, size_t size, const uint8_t* data);
  void ZeroBytes(const ggml_tensor* tensor, size_t offset, size_t size);

  /// qevict_get_layer() for one layer: entries there are, at most `capacity` written.
  int DumpLayer(uint32_t il, uint32_t* births, uint8_t* tiers, float* scores, uint32_t capacity);

  /// Adds the statistics of what all layers hold, from at most `max_tokens` tokens each. Errors:
  /// kFailedPrecondition if they hold nothing.
  Status CollectStatistics(size_t max_tokens, codecs::CodecStatistics& to) const;

  /// One log line about what was held and done; at the end of a cache that was routed.
  void LogSummary() const;
  /// Makes the KvCache if the shapes are known. Fails if they are not, or if the budget cannot hold
  /// them.
  Status EnsureCache();
  KvCache* cache() { return cache_.get(); }
  const std::vector<LayerBinding>& layers() const { return layers_; }
  uint64_t workspace_bytes() const;
  uint64_t f16_bytes() const;
  uint32_t n_streams() const { return n_streams_; }
  uint32_t n_cells() const { return n_cells_; }
  void set_phase(int phase) { phase_ = phase; }
  Config& config() { return config_; }

  struct Timers {
    uint64_t attention_ns = 0, write_ns = 0, mask_ns = 0, route_ns = 0, score_ns = 0;
  };
  const Timers& timers() const { return timers_; }

 private:
  int FindLayer(const ggml_tensor* root) const;
  Status ShiftKeys(const ggml_tensor* op, OmpPool& pool);
  Status BeginStep(const ggml_tensor* op, const ggml_cgraph* graph, OmpPool& pool);
  Status ReadTokens(const ggml_tensor* op, size_t n);
  void ReadMasks(const ggml_cgraph* graph);
  void ReadMask(const ggml_tensor* flash_attn);
  void DropCellsBeyond(uint32_t stream, uint32_t n_kv);
  Status RouteDue(OmpPool& pool);
  void WarnOfKeyBias();
  void WarnOfBudget();
  void BuildRowGroups();
  void NoteSeen(uint32_t stream_index);
  void AddWindows(SeqId seq, RowGroup& group) const;
  void FillBits(RowGroup& group, const MaskBits& mask);
  Status BoundedRoute(const LayerBinding& layer, OmpPool& pool);
  /// RoPE and statistics of the layers whose RoPE is known.
  Status SetLayers();
  /// Fails if rows of the step see tokens that could not be restored, copied or moved.
  Status CheckLost() const;
  Status SetLayerRope(const LayerBinding& layer);
  Status SetLayerStatistics(const LayerBinding& layer);
  Status CheckAttention(const ggml_tensor* op) const;
  kernels::AttentionShape ShapeOf(const ggml_tensor* op, const LayerBinding& layer, uint32_t part);
  struct GroupView {  ///< a row group against one layer: offsets into the scratch vectors below
    size_t first_ref, n_refs, first_bit, first_bias, first_mass;
    bool all;  ///< the layer holds all of the group's windows: its bits are the group's
  };
  GroupView CollectGroup(uint32_t cache_layer, const RowGroup& group);
  void CollectViews(const ggml_tensor* op, const LayerBinding& layer);
  void AddMasses(const LayerBinding& layer);
  void PickColumns(const RowGroup& group, const GroupView& view);
  void NoteQueries(const ggml_tensor* op, const LayerBinding& layer, uint32_t part);
  kernels::AttentionGroup ToKernel(const ggml_tensor* op, const kernels::AttentionShape& shape,
                                   const RowGroup& group, const GroupView& view, uint32_t part);
  Status RestoreRows(const LayerBinding& layer, bool is_k, uint32_t stream, uint32_t cell,
                     uint32_t n, const uint16_t* rows);
  std::vector<LayerShape> GuessedShapes() const;
  uint64_t BudgetOf(const Config& config) const;
  void LogBudget(const Config& admitted) const;
  LayerBits BitsOf(const LayerBinding& layer) const;
  /// Masses are computed only for policies that read scores of attention.
  bool WantsMass() const {
    return config_.score != ScoreKind::kKeyNorm && PolicyOf(config_).needs != 0;
  }

  Config config_;
  std::shared_ptr<const codecs::CodecStatistics> statistics_;
  std::vector<LayerBinding> layers_;
  std::unique_ptr<KvCache> cache_;
  uint32_t n_streams_ = 0, n_cells_ = 0;
  int phase_ = 0;

  // The current step.
  bool step_open_ = false;
  bool warned_of_key_bias_ = false, warned_of_budget_ = false;
  bool grouped_ = false;            ///< row groups are built (needs the mask)
  std::vector<uint8_t> k_written_;  ///< per layer
  std::vector<TokenSpec> tokens_;
  std::vector<uint32_t> token_stream_;
  std::vector<TokenRef> refs_;
  Reused<MaskBits> masks_;                    ///< per stream of the step
  const ggml_tensor* mask_tensor_ = nullptr;  ///< what masks_ were read from
  uint32_t first_stream_ = 0;  ///< of the step's attention; masks_[i] belongs to first_stream_ + i
  uint32_t rows_per_stream_ = 0;
  Reused<RowGroup> groups_;
  bool one_mask_ = true;  ///< of all layers of the step
  SequenceReader sequences_;
  std::vector<StepRows> demands_;  // of the step

  // Whole-cache operations that arrive tensor by tensor: a tensor that comes again begins the next
  // operation.
  std::vector<const ggml_tensor*> shifted_, copied_;
  std::vector<int32_t> shift_;
  std::pair<uint32_t, uint32_t> copied_streams_{};
  std::vector<uint32_t> highest_cell_;  ///< per stream: one past the highest cell written
  /// Per stream: why tokens are missing that the host believes to be here, which no callback could
  /// tell it; or empty.
  std::vector<std::string> lost_;

  // State bytes that end inside a row wait here for the rest: per tensor root.
  struct PartialRow {
    const ggml_tensor* root;
    size_t row_begin;
    std::vector<uint8_t> bytes;
  };
  std::vector<PartialRow> partial_rows_;

  // Scratch, kept between calls: no step of a cache that does not grow asks for memory.
  std::vector<int32_t> positions_scratch_;
  std::vector<uint8_t> positional_scratch_;
  std::vector<SeqId> sequences_scratch_;
  Reused<std::vector<SeqId>> seen_scratch_;
  RowGroup rows_scratch_;
  kernels::Workspace workspace_;
  std::vector<kernels::WindowRef> refs_scratch_;
  std::vector<WindowId> ids_scratch_;
  std::vector<uint32_t> bits_scratch_;
  std::vector<float> bias_scratch_, mass_scratch_, slopes_;
  std::vector<uint32_t> columns_scratch_;
  std::vector<GroupView> views_scratch_;
  std::vector<kernels::AttentionShape> shapes_scratch_;
  std::vector<kernels::AttentionGroup> attention_scratch_;
  Timers timers_;
};

}  // namespace qevict::plugin
