// FLASH_ATTN_EXT over a CacheGroup: ggml's tensors become AttentionGroups of the kernels.

#include <cmath>
#include <cstring>

#include "codecs/codec.h"
#include "ggml/cache_group.h"
#include "ggml/lineage.h"
#include "ggml/timer.h"

namespace qevict::plugin {
namespace {

float ParamF32(const ggml_tensor* t, int i) {
  float f;
  std::memcpy(&f, t->op_params + i, sizeof(f));
  return f;
}

// ALiBi slopes (ggml's soft_max and flash_attn_ext convention): powers of two ratios over the
// heads.
void FillSlopes(float max_bias, uint32_t n_heads, std::vector<float>& slopes) {
  const uint32_t n_pow2 = 1u << static_cast<uint32_t>(std::floor(std::log2(n_heads)));
  const float m0 = std::pow(2.0f, -max_bias / static_cast<float>(n_pow2));
  const float m1 = std::pow(2.0f, -max_bias / 2.0f / static_cast<float>(n_pow2));
  slopes.resize(n_heads);
  for (uint32_t h = 0; h < n_heads; ++h) {
    slopes[h] = h < n_pow2 ? std::pow(m0, static_cast<float>(h + 1))
                           : std::pow(m1, static_cast<float>(2 * (h - n_pow2) + 1));
  }
}

const float* Row(const ggml_tensor* t, uint32_t stream, uint32_t row, int row_dim) {
  return reinterpret_cast<const float*>(static_cast<const char*>(t->data) + stream * t->nb[3] +
                                        row * t->nb[row_dim]);
}

}  // namespace

// Views of all sequences the rows see; columns of the step's bit matrix that the layer still holds
// are picked out.
CacheGroup::GroupView CacheGroup::CollectGroup(uint32_t cache_layer, const RowGroup& group) {
  GroupView view{refs_scratch_.size(), 0,    bits_scratch_.size(), bias_scratch_.size(),
                 mass_scratch_.size(), false};
  for (const SeqId seq : group.visible) cache_->View(cache_layer, seq, refs_scratch_, ids_scratch_);
  view.n_refs = refs_scratch_.size() - view.first_ref;
  view.all = view.n_refs == group.windows.size();
  if (!view.all) PickColumns(group, view);
  if (WantsMass())
    mass_scratch_.resize(view.first_mass + view.n_refs * cache_->layer(cache_layer).n_kv_heads);
  return view;
}

void CacheGroup::PickColumns(const RowGroup& group, const GroupView& view) {
  const size_t n_all = group.windows.size(), window = config_.window;
  const bool bias = !group.bias.empty();
  std::vector<uint32_t>& columns = columns_scratch_;
  columns.clear();
  for (size_t i = 0, w = 0; i < view.n_refs; ++i) {
    while (group.windows[w] != ids_scratch_[view.first_ref + i]) ++w;
    columns.push_back(static_cast<uint32_t>(w));
  }
  bits_scratch_.resize(view.first_bit + view.n_refs * group.n_rows);
  if (bias) bias_scratch_.resize(view.first_bias + view.n_refs * group.n_rows * window);
  for (uint32_t r = 0; r < group.n_rows; ++r) {
    const uint32_t* from = group.bits.data() + r * n_all;
    uint32_t* to = bits_scratch_.data() + view.first_bit + r * view.n_refs;
    for (size_t i = 0; i < view.n_refs; ++i) to[i] = from[columns[i]];
    for (size_t i = 0; bias && i < view.n_refs; ++i) {
      std::memcpy(bias_scratch_.data() + view.first_bias + (r * view.n_refs + i) * window,
                  group.bias.data() + (r * n_all + columns[i]) * window, window * sizeof(float));
    }
  }
}

Status CacheGroup::CheckAttention(const ggml_tensor* op) const {
  const ggml_tensor* q = op->src[0];
  const int il = FindLayer(Root(op->src[1]));
  if (il < 0 || layers_[static_cast<size_t>(il)].k != Root(op->src[1]) ||
      layers_[static_cast<size_t>(il)].v != Root(op->src[2])) {
    return Unimplemented(
        "attention over a part of the cache that is not one layer's keys and values");
  }
  if (q->type != GGML_TYPE_F32 || (op->src[3] && op->src[3]->type != GGML_TYPE_F16) ||
      q->nb[0] != sizeof(float)) {
    return Unimplemented("attention with queries that are not f32 or a mask that is not f16");
  }
  return {};
}

// Shape of part `part` of a layer: all its kv heads, or one of them under per_head.
kernels::AttentionShape CacheGroup::ShapeOf(const ggml_tensor* op, const LayerBinding& layer,
                                            uint32_t part) {
  const auto n_heads = static_cast<uint32_t>(op->src[0]->ne[2]);
  const uint32_t cache_layer = layer.first_cache_layer + part;
  const LayerShape& stored = cache_->layer(cache_layer);
  kernels::AttentionShape shape;
  shape.n_kv_heads = stored.n_kv_heads;
  shape.n_gqa = n_heads / layer.n_kv_heads;
  shape.head_dim = stored.head_dim;
  shape.head_dim_v = stored.head_dim_v;
  shape.window = config_.window;
  shape.elem_k = stored.elem_k;
  shape.elem_v = stored.elem_v;
  shape.n_rungs = cache_->Rungs(cache_layer, shape.rungs);
  shape.scale = ParamF32(op, 0);
  shape.softcap = ParamF32(op, 2);
  const uint32_t first_head = part * shape.n_kv_heads * shape.n_gqa;
  if (const float max_bias = ParamF32(op, 1); max_bias > 0.0f) {
    FillSlopes(max_bias, n_heads, slopes_);
    shape.slopes = slopes_.data() + first_head;
  }
  if (op->src[4]) shape.sinks = static_cast<const float*>(op->src[4]->data) + first_head;
  shape.rope = cache_->rope_table(cache_layer);
  return shape;
}

kernels::AttentionGroup CacheGroup::ToKernel(const ggml_tensor* op,
                                             const kernels::AttentionShape& shape,
                                             const RowGroup& group, const GroupView& view,
                                             uint32_t part) {
  const ggml_tensor* q = op->src[0];
  const size_t first_head = size_t{part} * shape.n_kv_heads * shape.n_gqa;
  kernels::AttentionGroup a{};
  a.shape = &shape;
  a.n_rows = group.n_rows;
  a.q_row_stride = q->nb[1] / sizeof(float);
  a.q_head_stride = q->nb[2] / sizeof(float);
  a.q = Row(q, group.stream_index, group.first_row, 1) + first_head * a.q_head_stride;
  a.out_row_stride = op->nb[2] / sizeof(float);
  a.out_head_stride = op->nb[1] / sizeof(float);
  a.out = const_cast<float*>(Row(op, group.stream_index, group.first_row, 2)) +
          first_head * a.out_head_stride;
  a.windows = {refs_scratch_.data() + view.first_ref, view.n_refs};
  a.visible = view.all ? group.bits.data() : bits_scratch_.data() + view.first_bit;
  a.visible_stride = view.n_refs;
  if (!group.bias.empty()) {
    a.bias = view.all ? group.bias.data() : bias_scratch_.data() + view.first_bias;
    a.bias_stride = view.n_refs * config_.window;
  }
  if (WantsMass()) {
    a.mass = mass_scratch_.data() + view.first_mass;
    a.mass_head_stride = view.n_refs;
    if (config_.init_rows && group.n_rows > config_.init_rows)
      a.mass_first_row = group.n_rows - config_.init_rows;
  }
  return a;
}

/// Energy of the queries for a codec that learns from it.
void CacheGroup::NoteQueries(const ggml_tensor* op, const LayerBinding& layer, uint32_t part) {
  const uint32_t cache_layer = layer.first_cache_layer + part;
  if (!cache_->WantsQueryEnergy(cache_layer)) return;
  const ggml_tensor* q = op->src[0];
  const kernels::AttentionShape& shape = shapes_scratch_[part];
  const uint32_t d = shape.head_dim, n_heads = shape.n_kv_heads * shape.n_gqa;
  std::vector<float> squares(size_t{shape.n_kv_heads} * d);
  for (int64_t stream = 0; stream < q->ne[3]; ++stream) {
    for (int64_t row = 0; row < q->ne[1]; ++row) {
      const float* heads = Row(q, static_cast<uint32_t>(stream), static_cast<uint32_t>(row), 1);
      for (uint32_t h = 0; h < n_heads; ++h) {
        const float* x = heads + (size_t{part} * n_heads + h) * (q->nb[2] / sizeof(float));
        float* sum = squares.data() + size_t{h / shape.n_gqa} * d;
        for (uint32_t c = 0; c < d; ++c) sum[c] += x[c] * x[c];
      }
    }
  }
  cache_->AddQueryEnergy(cache_layer, squares.data());
}

/// The kernels' arguments for all row groups and parts of a layer.
void CacheGroup::CollectViews(const ggml_tensor* op, const LayerBinding& layer) {
  const ScopedTimer timer(timers_.mask_ns);
  refs_scratch_.clear();
  ids_scratch_.clear();
  bits_scratch_.clear();
  bias_scratch_.clear();
  mass_scratch_.clear();
  views_scratch_.clear();
  shapes_scratch_.clear();
  attention_scratch_.clear();
  for (uint32_t part = 0; part < layer.n_parts; ++part) {
    shapes_scratch_.push_back(ShapeOf(op, layer, part));
    for (const RowGroup& group : groups_)
      views_scratch_.push_back(CollectGroup(layer.first_cache_layer + part, group));
  }
  std::fill(mass_scratch_.begin(), mass_scratch_.end(), 0.0f);
  for (uint32_t part = 0; part < layer.n_parts; ++part) {
    for (size_t g = 0; g < groups_.size(); ++g) {
      attention_scratch_.push_back(ToKernel(op, shapes_scratch_[part], groups_[g],
                                            views_scratch_[part * groups_.size() + g], part));
    }
  }
}

Status CacheGroup::FlashAttention(const ggml_tensor* op, OmpPool& pool) {
  QEVICT_RETURN_IF_ERROR(CheckAttention(op));
  QEVICT_RETURN_IF_ERROR(EnsureCache());
  const int il = FindLayer(Root(op->src[1]));
  const LayerBinding& layer = layers_[static_cast<size_t>(il)];
  // Layers share a mask as a rule, but need not (sliding windows in some layers of one cache).
  if (!step_open_ || masks_.empty() || op->src[3] != mask_tensor_) {
    cache_->FinishRestore();
    if (!step_open_) sequences_.Clear();  // a graph that writes nothing
    ReadMask(op);
    step_open_ = true;
    grouped_ = false;
  }
  if (!grouped_) BuildRowGroups();

  CollectViews(op, layer);
  for (uint32_t part = 0; part < layer.n_parts; ++part) NoteQueries(op, layer, part);
  {
    const ScopedTimer timer(timers_.attention_ns);
    if (!kernels::Attend(attention_scratch_, pool, workspace_))
      return ResourceExhausted("no memory for the attention workspace");
  }
  if (WantsMass()) AddMasses(layer);
  return BoundedRoute(layer, pool);
}

void CacheGroup::AddMasses(const LayerBinding& layer) {
  const ScopedTimer timer(timers_.score_ns);
  for (size_t i = 0; i < views_scratch_.size(); ++i) {
    const GroupView& view = views_scratch_[i];
    const auto part = static_cast<uint32_t>(i / groups_.size());
    const kernels::AttentionShape& shape = shapes_scratch_[part];
    cache_->AddMass(
        layer.first_cache_layer + part, {ids_scratch_.data() + view.first_ref, view.n_refs},
        mass_scratch_.data() + view.first_mass, view.n_refs, shape.n_kv_heads * shape.n_gqa,
        groups_[i % groups_.size()].n_rows - attention_scratch_[i].mass_first_row);
  }
}

}  // namespace qevict::plugin
