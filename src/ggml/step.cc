// The steps of a CacheGroup: which tokens arrive, to which sequences they belong, what they can
// see.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "ggml-impl.h"
#include "ggml/cache_group.h"
#include "ggml/lineage.h"
#include "ggml/log.h"
#include "ggml/timer.h"

namespace qevict::plugin {

Status CacheGroup::SetRows(const ggml_tensor* op, const ggml_cgraph* graph, OmpPool& pool) {
  const ggml_tensor* root = Root(op);
  const int il = FindLayer(root);
  const ggml_tensor* rows = op->src[0];
  if (il < 0 || rows->type != GGML_TYPE_F32 || rows->nb[0] != sizeof(float) ||
      rows->ne[0] != root->ne[0]) {
    return Unimplemented(std::string("rows of an unknown form are written to ") + root->name);
  }
  const auto layer = static_cast<uint32_t>(il);
  const bool is_k = layers_[layer].k == root;
  if (!step_open_ || (is_k && k_written_[layer]))
    QEVICT_RETURN_IF_ERROR(BeginStep(op, graph, pool));
  if (rows->ne[1] != static_cast<int64_t>(refs_.size())) {
    return Unimplemented(std::string(root->name) +
                         " receives another number of rows than the first layer of the step");
  }
  const ScopedTimer timer(timers_.write_ns);
  const LayerBinding& binding = layers_[layer];
  if (is_k) {
    k_written_[layer] = 1;
    if (!binding.rope_known) {
      ObserveRows(op);
      QEVICT_RETURN_IF_ERROR(SetLayerRope(binding));
    }
  }
  const auto* data = static_cast<const float*>(rows->data);
  const size_t stride = rows->nb[1] / sizeof(float),
               width = static_cast<size_t>(root->ne[0]) / binding.n_parts;
  for (uint32_t part = 0; part < binding.n_parts; ++part) {
    const uint32_t cache_layer = binding.first_cache_layer + part;
    const float* columns = data + part * width;
    QEVICT_RETURN_IF_ERROR(is_k ? cache_->WriteK(cache_layer, refs_, columns, stride, pool)
                                : cache_->WriteV(cache_layer, refs_, columns, stride, pool));
  }
  return {};
}

Status CacheGroup::SetLayerRope(const LayerBinding& layer) {
  for (uint32_t part = 0; part < layer.n_parts; ++part) {
    QEVICT_RETURN_IF_ERROR(cache_->SetRope(layer.first_cache_layer + part, layer.rope));
  }
  if (statistics_) return SetLayerStatistics(layer);  // which pairs of channels turn matters
  return {};
}

Status CacheGroup::BeginStep(const ggml_tensor* op, const ggml_cgraph* graph, OmpPool& pool) {
  QEVICT_RETURN_IF_ERROR(EnsureCache());
  cache_->FinishRestore();
  std::fill(k_written_.begin(), k_written_.end(), uint8_t{0});
  step_open_ = false;  // until nothing can fail any more
  grouped_ = false;
  masks_.clear();
  QEVICT_RETURN_IF_ERROR(ReadTokens(op, static_cast<size_t>(op->src[0]->ne[1])));
  ReadMasks(graph);
  QEVICT_RETURN_IF_ERROR(CheckLost());
  sequences_.Read(*cache_, n_streams_ > 1,
                  {tokens_, token_stream_, &masks_, first_stream_, rows_per_stream_, one_mask_});
  QEVICT_RETURN_IF_ERROR(RouteDue(pool));
  QEVICT_RETURN_IF_ERROR(cache_->Append(tokens_, refs_));
  step_open_ = true;
  return {};
}

// Cells from the index tensor, positions from the ROPE behind the rows (its memory is only sure to
// live now).
Status CacheGroup::ReadTokens(const ggml_tensor* op, size_t n) {
  const ggml_tensor* indices = op->src[1];
  if (indices->type != GGML_TYPE_I64 && indices->type != GGML_TYPE_I32)
    return Unimplemented("cell indices of an unknown type");
  std::vector<int32_t>& pos = positions_scratch_;
  std::vector<uint8_t>& positional = positional_scratch_;
  const ggml_tensor* rope = FindRope(op->src[0]);
  if (rope) ReadPositions(rope, n, pos, positional);
  tokens_.resize(n);
  token_stream_.resize(n);
  for (size_t i = 0; i < n; ++i) {
    const int64_t index = indices->type == GGML_TYPE_I64
                              ? static_cast<const int64_t*>(indices->data)[i]
                              : static_cast<const int32_t*>(indices->data)[i];
    if (index < 0 || index >= int64_t{n_cells_} * n_streams_) {
      return OutOfRange("cell " + std::to_string(index) + " lies outside the cache of " +
                        std::to_string(int64_t{n_cells_} * n_streams_) + " cells");
    }
    token_stream_[i] = static_cast<uint32_t>(index / n_cells_);
    tokens_[i] = {kNone, static_cast<uint32_t>(index % n_cells_), rope ? pos[i] : 0,
                  rope && positional[i]};
    highest_cell_[token_stream_[i]] =
        std::max(highest_cell_[token_stream_[i]], tokens_[i].cell + 1);
  }
  return {};
}

// The first attention's mask tells the sequences; layers that have another one see other windows.
void CacheGroup::ReadMasks(const ggml_cgraph* graph) {
  one_mask_ = true;
  for (int i = 0; i < graph->n_nodes; ++i) {
    const ggml_tensor* node = graph->nodes[i];
    if (node->op != GGML_OP_FLASH_ATTN_EXT || !Owns(Root(node->src[1]))) continue;
    if (masks_.empty()) ReadMask(node);
    one_mask_ = one_mask_ && node->src[3] == mask_tensor_;
  }
}

void CacheGroup::ReadMask(const ggml_tensor* flash_attn) {
  const ScopedTimer timer(timers_.mask_ns);
  const ggml_tensor* q = flash_attn->src[0];
  const ggml_tensor* k = flash_attn->src[1];
  const ggml_tensor* root = Root(k);
  mask_tensor_ = flash_attn->src[3];
  first_stream_ = static_cast<uint32_t>(
      (static_cast<const char*>(k->data) - static_cast<const char*>(root->data)) /
      static_cast<ptrdiff_t>(root->nb[2]));
  rows_per_stream_ = static_cast<uint32_t>(q->ne[1]);
  masks_.resize(static_cast<size_t>(q->ne[3]));
  for (size_t s = 0; s < masks_.size(); ++s) {
    masks_[s].Read(flash_attn->src[3], static_cast<int64_t>(s), rows_per_stream_,
                   static_cast<uint32_t>(k->ne[1]));
    DropCellsBeyond(first_stream_ + static_cast<uint32_t>(s), static_cast<uint32_t>(k->ne[1]));
  }
}

// llama.cpp shows cells up to the highest one in use: what lies beyond has been removed there.
void CacheGroup::DropCellsBeyond(uint32_t stream, uint32_t n_kv) {
  if (highest_cell_[stream] <= n_kv) return;
  std::vector<uint32_t> cells(highest_cell_[stream] - n_kv);
  std::iota(cells.begin(), cells.end(), n_kv);
  cache_->Kill(stream, cells);
  highest_cell_[stream] = n_kv;
}

// --- Routing
// -----------------------------------------------------------------------------------------------------------

Status CacheGroup::RouteDue(OmpPool& pool) {
  sequences_.NotePhases(phase_);
  demands_.clear();
  for (const SeqRows& entry : sequences_.rows())
    demands_.push_back({entry.seq, entry.rows, entry.kind, entry.n_breaks});
  const ScopedTimer timer(timers_.route_ns);
  QEVICT_RETURN_IF_ERROR(cache_->PrepareStep(demands_, pool));
  if (cache_->overdrawn()) WarnOfBudget();
  WarnOfKeyBias();
  return {};
}

void CacheGroup::WarnOfBudget() {
  if (warned_of_budget_) return;
  warned_of_budget_ = true;
  LogWarn(
      "the budget is too small for what must stay (first tokens, tokens being generated, a "
      "prompt's "
      "chunk): some steps exceed it. Raise the budget, or lower the chunk size (-ub) or the number "
      "of sequences");
}

/// A codec that has no place for a key bias answers, but nonsense.
void CacheGroup::WarnOfKeyBias() {
  // A grid over the bias then has steps of two standard deviations; see docs/codecs.md.
  const auto most = static_cast<float>(2 * ((1u << config_.bits) - 1));
  if (warned_of_key_bias_ || cache_->key_bias() <= most) return;
  warned_of_key_bias_ = true;
  LogWarn("this model adds a bias of up to " +
          std::to_string(static_cast<int>(cache_->key_bias())) +
          " standard deviations to all keys, and codec=" + CodecName(config_.codec) +
          " has no place for it: output will be poor. Use codec=wf or codec=kivi");
}

Status CacheGroup::BoundedRoute(const LayerBinding& layer, OmpPool& pool) {
  for (const SeqRows& entry : sequences_.rows()) {
    for (uint32_t part = 0; part < layer.n_parts; ++part) {
      const uint32_t cache_layer = layer.first_cache_layer + part;
      if (!cache_->NeedsBoundedRoute(cache_layer, entry.seq)) continue;
      const ScopedTimer timer(timers_.route_ns);
      const Status status = cache_->Route(cache_layer, entry.seq, entry.rows, pool);
      if (!status.ok() && status.code() != StatusCode::kResourceExhausted) return status;
      if (!status.ok()) WarnOfBudget();
      WarnOfKeyBias();
    }
  }
  return {};
}

// --- What rows see
// -----------------------------------------------------------------------------------------------------

void CacheGroup::FillBits(RowGroup& group, const MaskBits& mask) {
  const size_t n = group.windows.size();
  group.bits.assign(size_t{group.n_rows} * n, 0);
  group.bias.assign(mask.has_values() ? group.bits.size() * config_.window : 0, 0.0f);
  for (size_t w = 0; w < n; ++w) {
    const WindowInfo info = cache_->info(group.windows[w]);
    bool contiguous = true;
    for (uint32_t t = 1; t < info.n_tokens; ++t) contiguous &= info.cells[t] == info.cells[0] + t;
    for (uint32_t r = 0; r < group.n_rows; ++r) {
      const uint32_t row = group.first_row + r;
      uint32_t bits = 0;
      if (contiguous) {
        bits = mask.range(row, info.cells[0], info.n_tokens);
      } else {
        for (uint32_t t = 0; t < info.n_tokens; ++t)
          bits |= uint32_t{mask.test(row, info.cells[t])} << t;
      }
      bits &= info.live;
      group.bits[r * n + w] = bits;
      if (!mask.has_values()) continue;
      for (uint32_t t = 0; t < info.n_tokens; ++t) {
        if (bits >> t & 1u)
          group.bias[(r * n + w) * config_.window + t] = mask.value(row, info.cells[t]);
      }
    }
  }
}

// Which sequences each row of a stream sees, in seen_scratch_.
void CacheGroup::NoteSeen(uint32_t stream_index) {
  cache_->Sequences(first_stream_ + stream_index, sequences_scratch_);
  seen_scratch_.resize(rows_per_stream_);
  for (auto& row : seen_scratch_) row.clear();
  if (sequences_scratch_.size() == 1) {
    for (auto& row : seen_scratch_) row = sequences_scratch_;
    return;
  }
  RowGroup& all = rows_scratch_;
  all.n_rows = rows_per_stream_;
  for (const SeqId seq : sequences_scratch_) {
    all.windows.clear();
    AddWindows(seq, all);
    FillBits(all, masks_[stream_index]);
    const size_t n = all.windows.size();
    for (uint32_t r = 0; r < rows_per_stream_; ++r) {
      const auto row = std::span(all.bits).subspan(r * n, n);
      if (std::any_of(row.begin(), row.end(), [](uint32_t b) { return b != 0; }))
        seen_scratch_[r].push_back(seq);
    }
  }
}

void CacheGroup::AddWindows(SeqId seq, RowGroup& group) const {
  const std::span<const WindowId> windows = cache_->windows(seq);
  group.windows.insert(group.windows.end(), windows.begin(), windows.end());
}

// Rows that see the same sequences form a group.
void CacheGroup::BuildRowGroups() {
  const ScopedTimer timer(timers_.mask_ns);
  groups_.clear();
  grouped_ = true;
  for (uint32_t s = 0; s < masks_.size(); ++s) {
    NoteSeen(s);
    for (uint32_t r = 0; r < rows_per_stream_;) {
      uint32_t end = r + 1;
      while (end < rows_per_stream_ && seen_scratch_[end] == seen_scratch_[r]) ++end;
      RowGroup& group = groups_.Add();
      group.stream_index = s;
      group.first_row = r;
      group.n_rows = end - r;
      group.visible = seen_scratch_[r];
      group.windows.clear();
      for (const SeqId seq : group.visible) AddWindows(seq, group);
      FillBits(group, masks_[s]);
      r = end;
    }
  }
}

}  // namespace qevict::plugin
