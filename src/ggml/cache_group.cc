#include "ggml/cache_group.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "ggml/guard.h"
#include "ggml/lineage.h"
#include "ggml/log.h"

namespace qevict::plugin {
namespace {

std::string MiB(uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f MiB", static_cast<double>(bytes) / (1024.0 * 1024.0));
  return text;
}

std::string SizeText(uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f KiB", static_cast<double>(bytes) / 1024.0);
  return bytes < (1u << 20) ? text : MiB(bytes);
}

Result<Elem> ElemOf(const ggml_tensor* t) {
  if (t->type == GGML_TYPE_F16) return Elem::kF16;
  if (t->type == GGML_TYPE_BF16) return Elem::kBF16;
  return Unimplemented(std::string("cache type ") + ggml_type_name(t->type) + " of " + t->name +
                       " is not supported by QEVICT, which needs f16 or bf16 (remove -ctk/-ctv)");
}

}  // namespace

Status CacheGroup::AddTensor(ggml_tensor* tensor) {
  const CacheName name = ParseCacheName(tensor->name);
  if (name.kind == 'r' || name.kind == 's') {
    return Unimplemented(std::string("recurrent state ") + tensor->name +
                         " is not supported by QEVICT: run this model with -dev none");
  }
  if (name.kind != 'k' && name.kind != 'v') {
    return Unimplemented(std::string("cache tensor ") + tensor->name +
                         " is of a kind that QEVICT does not know: run this model with -dev none");
  }
  if (Result<Elem> elem = ElemOf(tensor); !elem.ok()) return elem.status();
  const bool expects_v = !layers_.empty() && !layers_.back().v;
  if ((name.kind == 'k') == expects_v) {
    return Unimplemented(
        "the model's cache has keys without values (MLA), which QEVICT does not support: run it "
        "with -dev none");
  }
  const auto cells = static_cast<uint32_t>(tensor->ne[1]);
  const auto streams = static_cast<uint32_t>(tensor->ne[2]);
  if (layers_.empty()) {
    n_cells_ = cells;
    n_streams_ = streams;
  } else if (cells != n_cells_ || streams != n_streams_) {
    return Unimplemented(std::string("cache tensor ") + tensor->name +
                         " has another shape than the first one of its buffer");
  }
  if (name.kind == 'k') {
    layers_.push_back({});
    layers_.back().model_layer = name.layer;
    layers_.back().k = tensor;
  } else {
    layers_.back().v = tensor;
  }
  return {};
}

LayerBits CacheGroup::BitsOf(const LayerBinding& layer) const {
  return BitsOfLayer(config_, static_cast<uint32_t>(layer.model_layer));
}

/// Of attention as far as it has been seen, else heads of 64 channels.
std::vector<LayerShape> CacheGroup::GuessedShapes() const {
  std::vector<LayerShape> shapes;
  for (const LayerBinding& layer : layers_) {
    const auto k_row = static_cast<uint32_t>(layer.k->ne[0]),
               v_row = static_cast<uint32_t>(layer.v->ne[0]);
    uint32_t head_dim = 64;
    while (head_dim > 8 && (k_row % head_dim != 0 || v_row % (k_row / head_dim) != 0))
      head_dim /= 2;
    const uint32_t n_heads = layer.n_kv_heads ? layer.n_kv_heads : std::max(1u, k_row / head_dim);
    const uint32_t n_parts = config_.per_head ? n_heads : 1;
    shapes.insert(shapes.end(), n_parts,
                  {n_heads / n_parts, k_row / n_heads, v_row / n_heads, Elem::kF16, Elem::kF16,
                   BitsOf(layer), n_parts});
  }
  return shapes;
}

CacheDemand CacheGroup::Demand() const {
  if (config_.preset == Preset::kFull || layers_.empty() || !layers_.back().v) return {0, 0};
  Config config = config_;
  if (config.budget_tokens == 0) config.budget_tokens = n_cells_;
  const uint64_t tokens =
      config_.budget_bytes ? uint64_t{n_cells_} * n_streams_ : config.budget_tokens;
  return {f16_bytes() / (uint64_t{n_cells_} * n_streams_) * tokens,
          MinimumBudgetBytes(config, GuessedShapes()) * (config_.budget_bytes ? n_streams_ : 1)};
}

Status CacheGroup::SetBudgetFraction(double fraction) {
  const CacheDemand demand = Demand();
  if (demand.f16_bytes == 0) return {};
  if (config_.budget_bytes > 0) {
    const double bytes = fraction * static_cast<double>(demand.f16_bytes) + 0.5;
    if (!cache_) config_.budget_bytes = std::max<uint64_t>(static_cast<uint64_t>(bytes), 1);
    return {};
  }
  config_.budget_fraction = fraction;
  if (!cache_) return {};
  const Config admitted = WithLeastBudget(config_, GuessedShapes(), n_streams_, n_cells_);
  return cache_->SetBudget(admitted.budget_tokens ? admitted.budget_tokens : n_cells_, fraction);
}

/// Of all streams, as `config` has it.
uint64_t CacheGroup::BudgetOf(const Config& config) const {
  if (config.budget_bytes) return config.budget_bytes;
  const double tokens = config.budget_tokens ? config.budget_tokens : n_cells_;
  return static_cast<uint64_t>(config.budget_fraction * static_cast<double>(f16_bytes()) * tokens /
                               n_cells_);
}

void CacheGroup::LogBudget(const Config& admitted) const {
  const uint64_t asked = BudgetOf(config_), given = BudgetOf(admitted);
  if (config_.preset == Preset::kFull || given <= asked) return;
  LogWarn("the budget of " + SizeText(asked) + " for " + std::to_string(layers_.size()) +
          " layers is raised to " + SizeText(given) +
          ", the least that holds sinks, recents, one interval and one packed window");
}

int CacheGroup::FindLayer(const ggml_tensor* root) const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].k == root || layers_[i].v == root) return static_cast<int>(i);
  }
  return -1;
}

void CacheGroup::Observe(const ggml_tensor* flash_attn) {
  const int il = FindLayer(Root(flash_attn->src[1]));
  if (il < 0) return;
  LayerBinding& layer = layers_[static_cast<size_t>(il)];
  layer.head_dim = static_cast<uint32_t>(flash_attn->src[1]->ne[0]);
  layer.n_kv_heads = static_cast<uint32_t>(flash_attn->src[1]->ne[2]);
  layer.head_dim_v = static_cast<uint32_t>(flash_attn->src[2]->ne[0]);
}

void CacheGroup::ObserveRows(const ggml_tensor* set_rows) {
  const ggml_tensor* root = Root(set_rows);
  const int il = FindLayer(root);
  if (il < 0 || layers_[static_cast<size_t>(il)].k != root ||
      layers_[static_cast<size_t>(il)].rope_known)
    return;
  const ggml_tensor* rope = FindRopeBehind(set_rows->src[0]);
  if (rope && rope->src[2] && !rope->src[2]->data) return;  // frequency factors are not loaded yet
  layers_[static_cast<size_t>(il)].rope_known = true;
  if (rope) layers_[static_cast<size_t>(il)].rope = ReadRope(rope);
}

Status CacheGroup::EnsureCache() {
  if (cache_) return {};
  std::vector<LayerShape> shapes;
  for (LayerBinding& layer : layers_) {
    if (!layer.v)
      return Unimplemented(
          "the model's cache has keys without values (MLA), which QEVICT does not support");
    if (!layer.n_kv_heads) {
      return FailedPrecondition("layer " + std::to_string(layer.model_layer) +
                                " has a cache but no attention over it has been seen");
    }
    if (layer.k->ne[0] != int64_t{layer.n_kv_heads} * layer.head_dim ||
        layer.v->ne[0] != int64_t{layer.n_kv_heads} * layer.head_dim_v) {
      return Unimplemented("layer " + std::to_string(layer.model_layer) +
                           " attends over a part of its cache rows, which QEVICT does not support");
    }
    layer.first_cache_layer = static_cast<uint32_t>(shapes.size());
    layer.n_parts = config_.per_head ? layer.n_kv_heads : 1;
    shapes.insert(shapes.end(), layer.n_parts,
                  {layer.n_kv_heads / layer.n_parts, layer.head_dim, layer.head_dim_v,
                   *ElemOf(layer.k), *ElemOf(layer.v), BitsOf(layer), layer.n_parts});
  }
  const Config admitted = WithLeastBudget(config_, shapes, n_streams_, n_cells_);
  Result<std::unique_ptr<KvCache>> cache = KvCache::Create(admitted, shapes, n_streams_, n_cells_);
  if (!cache.ok()) return cache.status();
  cache_ = std::move(*cache);
  if (Status set = SetLayers(); !set.ok()) {
    cache_.reset();  // the next step fails alike, not half way
    return set;
  }
  k_written_.assign(layers_.size(), 0);
  highest_cell_.assign(n_streams_, 0);
  lost_.assign(n_streams_, "");
  const uint64_t full = f16_bytes();
  std::string line = "KV cache of " + std::to_string(layers_.size()) + " layers, " +
                     std::to_string(n_cells_) + " cells, " + std::to_string(n_streams_) +
                     " stream(s): full size " + MiB(full) + ", preset " +
                     PresetName(config_.preset);
  if (config_.preset != Preset::kFull) line += ", budget " + MiB(BudgetOf(admitted));
  LogInfo(line + ", kernels " + kernels::IsaName(kernels::ActiveIsa()));
  LogBudget(admitted);
  return {};
}

Status CacheGroup::SetLayers() {
  for (const LayerBinding& layer : layers_) {
    if (layer.rope_known) {
      QEVICT_RETURN_IF_ERROR(SetLayerRope(layer));
    } else if (statistics_) {
      QEVICT_RETURN_IF_ERROR(SetLayerStatistics(layer));
    }
  }
  return {};
}

Status CacheGroup::SetLayerStatistics(const LayerBinding& layer) {
  const codecs::RowShape shape{layer.n_kv_heads, layer.head_dim, layer.head_dim_v};
  const auto* given = statistics_->Find(static_cast<uint32_t>(layer.model_layer), shape);
  if (given == nullptr) {
    return InvalidArgument("the statistics in " + config_.statistics + " do not fit layer " +
                           std::to_string(layer.model_layer) + " of " +
                           std::to_string(shape.n_kv_heads) + " kv heads and " +
                           std::to_string(shape.head_dim) + "/" + std::to_string(shape.head_dim_v) +
                           " channels: they were taken from another model");
  }
  const uint32_t heads_per_part = layer.n_kv_heads / layer.n_parts;
  for (uint32_t part = 0; part < layer.n_parts; ++part) {
    QEVICT_RETURN_IF_ERROR(cache_->SetCodecStatistics(
        layer.first_cache_layer + part,
        std::span(given->heads).subspan(size_t{part} * heads_per_part, heads_per_part)));
  }
  return {};
}

Status CacheGroup::CollectStatistics(size_t max_tokens, codecs::CodecStatistics& to) const {
  for (const LayerBinding& layer : layers_) {
    codecs::LayerStatistics statistics;
    statistics.model_layer = static_cast<uint32_t>(layer.model_layer);
    statistics.shape = {layer.n_kv_heads, layer.head_dim, layer.head_dim_v};
    for (uint32_t part = 0; cache_ && part < layer.n_parts; ++part) {
      for (codecs::WaterFillStats& head :
           cache_->CodecStatistics(layer.first_cache_layer + part, max_tokens)) {
        statistics.heads.push_back(std::move(head));
      }
    }
    if (statistics.heads.empty() || statistics.heads[0].n == 0) {
      return FailedPrecondition("layer " + std::to_string(layer.model_layer) +
                                " holds no tokens in full precision to take statistics from");
    }
    to.layers.push_back(std::move(statistics));
  }
  return {};
}

uint64_t CacheGroup::f16_bytes() const {
  uint64_t bytes = 0;
  for (const LayerBinding& layer : layers_) {
    bytes += ggml_nbytes(layer.k) + (layer.v ? ggml_nbytes(layer.v) : 0);
  }
  return bytes;
}

void CacheGroup::LogSummary() const {
  if (!cache_) return;
  const CacheStats s = cache_->Stats();
  if (s.events == 0) return;
  size_t n_sequences = 0;
  for (uint32_t stream = 0; stream < n_streams_; ++stream) {
    n_sequences += cache_->Sequences(stream).size();
  }
  LogInfo("KV bytes " + MiB(s.bytes.total()) + " (full " + MiB(s.bytes.full) + ", packed " +
          MiB(s.bytes.packed) + ", dormant " + MiB(s.bytes.dormant) + ", tables " +
          MiB(s.bytes.tables) + ", slack " + MiB(s.bytes.slack) +
          "), f16 cache of the same tokens " + MiB(s.f16_bytes) + "; " + std::to_string(s.events) +
          " events, " + std::to_string(s.promotions) + " promotions, " +
          std::to_string(s.demotions) + " demotions, " + std::to_string(s.evictions) +
          " evictions; at most " + MiB(s.peak_bytes) + " under the budget, " +
          std::to_string(n_sequences) + " sequence(s) at the end");
}

uint64_t CacheGroup::workspace_bytes() const {
  uint64_t bytes =
      workspace_.bytes() +
      (bits_scratch_.capacity() + bias_scratch_.capacity() + mass_scratch_.capacity()) * 4;
  for (const MaskBits& mask : masks_.elements()) bytes += mask.bytes();
  for (const RowGroup& group : groups_.elements())
    bytes += (group.bits.capacity() + group.bias.capacity() + group.windows.capacity()) * 4;
  return bytes;
}

void CacheGroup::Clear() {
  if (cache_) cache_->Clear();
  step_open_ = false;
  grouped_ = false;
  groups_.clear();
  partial_rows_.clear();
  copied_.clear();
  highest_cell_.assign(n_streams_, 0);
  lost_.assign(n_streams_, "");
}

Status CacheGroup::CopyStream(const ggml_tensor* src, const ggml_tensor* dst) {
  QEVICT_RETURN_IF_ERROR(EnsureCache());
  const ggml_tensor* root = Root(dst);
  const auto stream = [root](const ggml_tensor* t) {
    return static_cast<uint32_t>(
        (static_cast<const char*>(t->data) - static_cast<const char*>(root->data)) /
        static_cast<ptrdiff_t>(root->nb[2]));
  };
  const std::pair<uint32_t, uint32_t> streams{stream(src), stream(dst)};
  const bool again = std::find(copied_.begin(), copied_.end(), root) != copied_.end();
  if (!copied_.empty() && !again && streams == copied_streams_) {
    copied_.push_back(root);
    return {};
  }
  copied_.assign(1, root);
  copied_streams_ = streams;
  highest_cell_[streams.second] = highest_cell_[streams.first];
  Status status = Guarded([&] { return cache_->CopyStream(streams.first, streams.second); });
  if (!status.ok()) lost_[streams.second] = status.message();
  return status;
}

Status CacheGroup::CheckLost() const {
  for (size_t s = 0; s < masks_.size(); ++s) {
    const uint32_t stream = first_stream_ + static_cast<uint32_t>(s);
    if (lost_[stream].empty()) continue;
    std::vector<bool> here(masks_[s].n_kv());
    for (uint32_t cell = 0; cell < here.size(); ++cell) here[cell] = cache_->Holds(stream, cell);
    for (size_t i = 0; i < tokens_.size(); ++i) {
      if (token_stream_[i] == stream && tokens_[i].cell < here.size()) here[tokens_[i].cell] = true;
    }
    for (uint32_t row = 0; row < rows_per_stream_; ++row) {
      for (uint32_t cell = 0; cell < here.size(); ++cell) {
        if (here[cell] || !masks_[s].test(row, cell)) continue;
        return FailedPrecondition("stream " + std::to_string(stream) +
                                  " lacks tokens that were to be restored, copied or moved (" +
                                  lost_[stream] +
                                  "): remove the sequence and read its prompt again");
      }
    }
  }
  return {};
}

// The host logs a refused shift and goes on as if the keys had moved.
Status CacheGroup::ShiftRope(const ggml_tensor* op, OmpPool& pool) {
  Status status = Guarded([&] { return ShiftKeys(op, pool); });
  if (status.ok() || !cache_) return status;
  const auto* delta = static_cast<const int32_t*>(op->src[1]->data);
  std::vector<uint32_t> cells;
  for (uint32_t stream = 0; stream < n_streams_; ++stream) {
    cells.clear();
    for (uint32_t cell = 0; cell < n_cells_; ++cell) {
      if (delta[size_t{stream} * n_cells_ + cell] != 0) cells.push_back(cell);
    }
    if (cells.empty()) continue;
    cache_->Kill(stream, cells);
    lost_[stream] = "their positions could not be shifted: " + status.message();
  }
  shifted_.clear();
  return status;
}

Status CacheGroup::ShiftKeys(const ggml_tensor* op, OmpPool& pool) {
  const int il = FindLayer(Root(op));
  if (il < 0 || layers_[static_cast<size_t>(il)].v == Root(op))
    return Unimplemented("RoPE over cached values is not supported");
  QEVICT_RETURN_IF_ERROR(EnsureCache());
  if (layers_[static_cast<size_t>(il)].rope.pairing == RopePairing::kNone) {
    return Unimplemented(std::string("the keys of ") + Root(op)->name +
                         " cannot be moved: what rotated them is not understood");
  }
  if (shifted_.empty() || std::find(shifted_.begin(), shifted_.end(), Root(op)) != shifted_.end()) {
    const auto* delta = static_cast<const int32_t*>(op->src[1]->data);
    shift_.assign(delta, delta + op->src[1]->ne[0]);
    QEVICT_RETURN_IF_ERROR(cache_->ShiftPositions(shift_));
    shifted_.clear();
  }
  shifted_.push_back(Root(op));
  const LayerBinding& layer = layers_[static_cast<size_t>(il)];
  for (uint32_t part = 0; part < layer.n_parts; ++part)
    QEVICT_RETURN_IF_ERROR(cache_->RotateLayer(layer.first_cache_layer + part, shift_, pool));
  return {};
}

int CacheGroup::DumpLayer(uint32_t il, uint32_t* births, uint8_t* tiers, float* scores,
                          uint32_t capacity) {
  uint32_t n = 0;
  for (uint32_t stream = 0; stream < n_streams_; ++stream) {
    cache_->Sequences(stream, sequences_scratch_);
    for (const SeqId seq : sequences_scratch_) {
      refs_scratch_.clear();
      ids_scratch_.clear();
      cache_->View(il, seq, refs_scratch_, ids_scratch_);
      for (size_t i = 0; i < ids_scratch_.size(); ++i, ++n) {
        if (n >= capacity) continue;
        if (births) births[n] = cache_->info(ids_scratch_[i]).birth;
        if (tiers) tiers[n] = refs_scratch_[i].rung_k;
        if (scores) scores[n] = cache_->score(il, ids_scratch_[i]);
      }
    }
  }
  return static_cast<int>(n);
}

}  // namespace qevict::plugin
