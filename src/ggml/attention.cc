// FLASH_ATTN_EXT over a CacheGroup: ggml's tensors become AttentionGroups of the kernels.

#include <cmath>
#include <cstring>

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

// ALiBi slopes (ggml's soft_max and flash_attn_ext convention): powers of two ratios over the heads.
void FillSlopes(float max_bias, uint32_t n_heads, std::vector<float>& slopes) {
  const uint32_t n_pow2 = 1u << static_cast<uint32_t>(std::floor(std::log2(n_heads)));
  const float m0 = std::pow(2.0f, -max_bias / static_cast<float>(n_pow2));
  const float m1 = std::pow(2.0f, -max_bias / 2.0f / static_cast<float>(n_pow2));
  slopes.resize(n_heads);
  for (uint32_t h = 0; h < n_heads; ++h) {
    slopes[h] = h < n_pow2 ? std::pow(m0, static_cast<float>(h + 1)) : std::pow(m1, static_cast<float>(2 * (h - n_pow2) + 1));
  }
}

}  // namespace

// Views of all sequences the rows see; columns of the step's bit matrix that the layer still holds are picked out.
CacheGroup::GroupView CacheGroup::CollectGroup(uint32_t il, const RowGroup& group) {
  GroupView view{refs_scratch_.size(), 0, bits_scratch_.size(), bias_scratch_.size(), mass_scratch_.size()};
  for (const SeqId seq : group.visible) cache_->View(il, seq, refs_scratch_, ids_scratch_);
  view.n_refs = refs_scratch_.size() - view.first_ref;
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
  if (WantsMass()) mass_scratch_.resize(view.first_mass + view.n_refs * layers_[il].n_kv_heads);
  return view;
}

Status CacheGroup::FlashAttention(const ggml_tensor* op, OmpPool& pool) {
  const ggml_tensor* q = op->src[0];
  const int layer_index = FindLayer(Root(op->src[1]));
  if (layer_index < 0 || layers_[static_cast<size_t>(layer_index)].k != Root(op->src[1]) ||
      layers_[static_cast<size_t>(layer_index)].v != Root(op->src[2])) {
    return Unimplemented("attention over a part of the cache that is not one layer's keys and values");
  }
  if (q->type != GGML_TYPE_F32 || (op->src[3] && op->src[3]->type != GGML_TYPE_F16) || q->nb[0] != sizeof(float)) {
    return Unimplemented("attention with queries that are not f32 or a mask that is not f16");
  }
  QEVICT_RETURN_IF_ERROR(EnsureCache());
  const auto il = static_cast<uint32_t>(layer_index);
  const LayerBinding& layer = layers_[il];
  // Layers share a mask as a rule, but need not (sliding windows in some layers of one cache).
  if (!step_open_ || masks_.empty() || op->src[3] != mask_tensor_) {
    cache_->FinishRestore();
    highest_cell_.resize(n_streams_, 0);
    ReadMask(op);
    step_open_ = true;
    grouped_ = false;
  }
  if (!grouped_) BuildRowGroups();

  const auto n_heads = static_cast<uint32_t>(q->ne[2]);
  kernels::AttentionShape shape;
  shape.n_kv_heads = layer.n_kv_heads;
  shape.n_gqa = n_heads / layer.n_kv_heads;
  shape.head_dim = layer.head_dim;
  shape.head_dim_v = layer.head_dim_v;
  shape.window = config_.window;
  shape.elem_k = cache_->layer(il).elem_k;
  shape.elem_v = cache_->layer(il).elem_v;
  cache_->HeadBytes(il, shape.head_bytes);
  shape.scale = ParamF32(op, 0);
  const float max_bias = ParamF32(op, 1);
  shape.softcap = ParamF32(op, 2);
  if (max_bias > 0.0f) {
    FillSlopes(max_bias, n_heads, slopes_);
    shape.slopes = slopes_.data();
  }
  if (op->src[4]) shape.sinks = static_cast<const float*>(op->src[4]->data);
  shape.rope = cache_->rope_table(il);

  refs_scratch_.clear();
  ids_scratch_.clear();
  bits_scratch_.clear();
  bias_scratch_.clear();
  mass_scratch_.clear();
  views_scratch_.clear();
  attention_scratch_.clear();
  for (const RowGroup& group : groups_) views_scratch_.push_back(CollectGroup(il, group));
  std::fill(mass_scratch_.begin(), mass_scratch_.end(), 0.0f);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const RowGroup& group = groups_[g];
    const GroupView& view = views_scratch_[g];
    kernels::AttentionGroup a{};
    a.shape = &shape;
    a.n_rows = group.n_rows;
    a.q = reinterpret_cast<const float*>(static_cast<const char*>(q->data) + group.stream_index * q->nb[3] + group.first_row * q->nb[1]);
    a.q_row_stride = q->nb[1] / sizeof(float);
    a.q_head_stride = q->nb[2] / sizeof(float);
    a.out = reinterpret_cast<float*>(static_cast<char*>(op->data) + group.stream_index * op->nb[3] + group.first_row * op->nb[2]);
    a.out_row_stride = op->nb[2] / sizeof(float);
    a.out_head_stride = op->nb[1] / sizeof(float);
    a.windows = {refs_scratch_.data() + view.first_ref, view.n_refs};
    a.visible = bits_scratch_.data() + view.first_bit;
    a.visible_stride = view.n_refs;
    if (!group.bias.empty()) {
      a.bias = bias_scratch_.data() + view.first_bias;
      a.bias_stride = view.n_refs * config_.window;
    }
    if (WantsMass()) {
      a.mass = mass_scratch_.data() + view.first_mass;
      a.mass_head_stride = view.n_refs;
      if (config_.init_rows && group.n_rows > config_.init_rows) a.mass_first_row = group.n_rows - config_.init_rows;
    }
    attention_scratch_.push_back(a);
  }
  {
    const ScopedTimer timer(timers_.attention_ns);
    if (!kernels::Attend(attention_scratch_, pool, workspace_)) {
      return ResourceExhausted("no memory for the attention workspace");
    }
  }
  for (size_t g = 0; WantsMass() && g < groups_.size(); ++g) {
    const GroupView& view = views_scratch_[g];
    cache_->AddMass(il, {ids_scratch_.data() + view.first_ref, view.n_refs}, mass_scratch_.data() + view.first_mass, view.n_refs,
                    n_heads, groups_[g].n_rows);
  }
  return BoundedRoute(layer_index, pool);
}

}  // namespace qevict::plugin
