// The graphs of Engine: llama_kv_cache's and llm_graph_context's views, permutations and order of
// nodes.

#include <algorithm>
#include <cmath>

#include "ggml/testing/engine.h"

namespace qevict::plugin::testing {

ggml_tensor* Engine::Rope(const LayerSpec& layer, uint32_t il, ggml_tensor* rows) {
  RopeSpec r = layer.rope;
  if (r.mode == kNoRope) return rows;
  const int n_dims = r.n_dims ? r.n_dims : static_cast<int>(layer.head_dim);
  ggml_context* ctx = graph_context_.get();
  if (r.multi()) {
    return ggml_rope_multi(ctx, rows, pos_, factor_tensors_[il], n_dims, r.sections, r.mode,
                           r.n_ctx_orig, r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor,
                           32.0f, 1.0f);
  }
  return ggml_rope_ext(ctx, rows, pos_, factor_tensors_[il], n_dims, r.mode, r.n_ctx_orig,
                       r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, 32.0f, 1.0f);
}

void Engine::MakeRows(LayerNodes& nodes, const LayerSpec& layer, uint32_t n) {
  ggml_context* ctx = graph_context_.get();
  const int64_t q_size = int64_t{layer.n_heads()} * layer.head_dim,
                k_size = int64_t{layer.n_kv_heads} * layer.head_dim,
                v_size = int64_t{layer.n_kv_heads} * layer.head_dim_v;
  nodes.qkv = nullptr;
  if (layer.fused_qkv) {
    nodes.qkv = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, q_size + k_size + v_size, n);
    ggml_set_input(nodes.qkv);
    const auto part = [&](int64_t dim, int64_t heads, int64_t offset) {
      return ggml_view_3d(ctx, nodes.qkv, dim, heads, n, static_cast<size_t>(dim) * sizeof(float),
                          nodes.qkv->nb[1], static_cast<size_t>(offset) * sizeof(float));
    };
    nodes.q = part(layer.head_dim, layer.n_heads(), 0);
    nodes.k = part(layer.head_dim, layer.n_kv_heads, q_size);
    nodes.v = part(layer.head_dim_v, layer.n_kv_heads, q_size + k_size);
    return;
  }
  nodes.q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.head_dim, layer.n_heads(), n);
  nodes.k = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.head_dim, layer.n_kv_heads, n);
  nodes.v = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.head_dim_v, layer.n_kv_heads, n);
  for (ggml_tensor* t : {nodes.q, nodes.k, nodes.v}) ggml_set_input(t);
}

// llama_kv_cache::get_k, get_v.
ggml_tensor* Engine::View(ggml_tensor* root, uint32_t head_dim, uint32_t n_kv_heads, uint32_t n_kv,
                          const StepInput& in) {
  return ggml_view_4d(graph_context_.get(), root, head_dim, n_kv_heads, n_kv, in.n_streams,
                      ggml_row_size(root->type, head_dim), root->nb[1], root->nb[2],
                      root->nb[2] * in.first_stream);
}

// get_v without flash attention: values are stored channel by channel.
ggml_tensor* Engine::TransposedView(ggml_tensor* root, uint32_t head_dim, uint32_t n_kv_heads,
                                    uint32_t n_kv, const StepInput& in) {
  return ggml_view_4d(graph_context_.get(), root, n_kv, n_kv_heads, head_dim, in.n_streams,
                      ggml_row_size(root->type, root->ne[1] * head_dim),
                      ggml_row_size(root->type, root->ne[1]), root->nb[2],
                      root->nb[2] * in.first_stream);
}

// llama_kv_cache::cpy_k, and cpy_v with flash attention.
ggml_tensor* Engine::StoreRows(ggml_tensor* root, ggml_tensor* rows, ggml_tensor* cells) {
  ggml_context* ctx = graph_context_.get();
  rows = ggml_view_2d(ctx, rows, rows->ne[0] * rows->ne[1], rows->ne[2], rows->nb[2], 0);
  if (root->ne[2] > 1) root = ggml_reshape_2d(ctx, root, root->ne[0], root->ne[1] * root->ne[2]);
  return ggml_set_rows(ctx, root, rows, cells);
}

// cpy_v without flash attention: every element is a row.
ggml_tensor* Engine::StoreTransposed(ggml_tensor* root, ggml_tensor* rows) {
  ggml_context* ctx = graph_context_.get();
  rows = ggml_reshape_2d(ctx, ggml_cont(ctx, rows), 1, ggml_nelements(rows));
  ggml_tensor* elements = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, rows->ne[1]);
  ggml_set_input(elements);
  return ggml_set_rows(ctx, ggml_reshape_2d(ctx, root, 1, ggml_nelements(root)), rows, elements);
}

// The end of llm_graph_context::build_attn_mha.
ggml_tensor* Engine::Attention(uint32_t il, ggml_tensor* q, ggml_tensor* k, ggml_tensor* v,
                               ggml_tensor* mask, bool flash) {
  const LayerSpec& layer = spec_.layers[il];
  ggml_context* ctx = graph_context_.get();
  const float scale = 1.0f / std::sqrt(static_cast<float>(layer.head_dim));
  if (!flash) {
    ggml_tensor* kq = ggml_mul_mat(ctx, k, q);
    ggml_prec_set_acc(kq, GGML_PREC_F32);
    kq = ggml_soft_max_ext(ctx, kq, mask, scale, layer.max_bias);
    return ggml_cont(ctx, ggml_permute(ctx, ggml_mul_mat(ctx, v, kq), 0, 2, 1, 3));
  }
  ggml_tensor* out = ggml_flash_attn_ext(ctx, q, k, v, mask, scale, layer.max_bias, layer.softcap);
  ggml_flash_attn_ext_add_sinks(out, sink_tensors_[il]);
  ggml_prec_set_acc(out, GGML_PREC_F32);
  return out;
}

// llm_graph_context::build_attn.
void Engine::BuildLayer(uint32_t il, const StepInput& in, const GraphKind& kind) {
  const LayerSpec& layer = spec_.layers[il];
  const CacheTensors& cache = tensors_[owner(il)];
  const CellNodes& cells = layer.swa ? swa_cells_ : cells_;
  const bool flash = kind.flash_attention;
  ggml_context* ctx = graph_context_.get();
  LayerNodes& nodes = nodes_[il];
  MakeRows(nodes, layer, in.n_tokens());
  nodes.q_rot = Rope(layer, il, nodes.q);
  ggml_set_output(nodes.q_rot);
  ggml_tensor* k_rot = Rope(layer, il, nodes.k);
  if (layer.norm_after_rope) k_rot = ggml_rms_norm(ctx, k_rot, 1e-6f);
  ggml_build_forward_expand(graph_, nodes.q_rot);
  ggml_build_forward_expand(graph_, nodes.v);
  ggml_build_forward_expand(graph_, k_rot);
  if (layer.shares < 0 && kind.write) {
    ggml_build_forward_expand(graph_, StoreRows(cache.k, k_rot, cells.k));
    ggml_build_forward_expand(
        graph_, flash ? StoreRows(cache.v, nodes.v, cells.v) : StoreTransposed(cache.v, nodes.v));
  }
  ggml_tensor* mask = masks_[in.mask_of[il]];
  const auto n_kv = static_cast<uint32_t>(mask->ne[0]);
  ggml_tensor* q = nodes.q_rot;
  ggml_tensor* k = View(cache.k, layer.head_dim, layer.n_kv_heads, n_kv, in);
  ggml_tensor* v = flash ? View(cache.v, layer.head_dim_v, layer.n_kv_heads, n_kv, in)
                         : TransposedView(cache.v, layer.head_dim_v, layer.n_kv_heads, n_kv, in);
  q = ggml_view_4d(ctx, q, q->ne[0], q->ne[1], q->ne[2] / in.n_streams, in.n_streams, q->nb[1],
                   q->nb[2], q->nb[2] * static_cast<size_t>(q->ne[2] / in.n_streams), 0);
  q = ggml_permute(ctx, q, 0, 2, 1, 3);
  k = ggml_permute(ctx, k, 0, 2, 1, 3);
  v = ggml_permute(ctx, v, 0, 2, 1, 3);
  if (kind.cast_before) k = ggml_cast(ctx, ggml_cast(ctx, k, GGML_TYPE_F32), GGML_TYPE_F16);
  ggml_tensor* out = Attention(il, q, k, v, mask, flash);
  out = ggml_reshape_2d(ctx, out, out->ne[0] * out->ne[1], out->ne[2] * out->ne[3]);
  nodes.out = ggml_scale(ctx, out, 1.0f);  // the rest of the model is an operation of the CPU
  ggml_set_output(nodes.out);
  ggml_build_forward_expand(graph_, nodes.out);
}

void Engine::Build(const StepInput& in, const GraphKind& kind) {
  graph_context_ = MakeContext(64 * spec_.layers.size() + 64, true);
  ggml_context* ctx = graph_context_.get();
  graph_ = ggml_new_graph_custom(ctx, kGraphNodes, false);
  bool multi = false;
  for (const LayerSpec& layer : spec_.layers) multi |= layer.rope.multi();
  pos_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, int64_t{in.n_tokens()} * (multi ? 4 : 1));
  ggml_set_input(pos_);
  for (CellNodes* cells : {&cells_, &swa_cells_}) {
    *cells = {ggml_new_tensor_1d(ctx, GGML_TYPE_I64, in.n_tokens()),
              ggml_new_tensor_1d(ctx, GGML_TYPE_I64, in.n_tokens())};
    ggml_set_input(cells->k);
    ggml_set_input(cells->v);
  }
  masks_.clear();
  for (const std::vector<uint16_t>& mask : in.masks) {
    masks_.push_back(ggml_new_tensor_4d(ctx, GGML_TYPE_F16,
                                        static_cast<int64_t>(mask.size()) / in.n_tokens(),
                                        in.n_tokens() / in.n_streams, 1, in.n_streams));
    ggml_set_input(masks_.back());
  }
  nodes_.assign(spec_.layers.size(), {});
  for (uint32_t il = 0; il < spec_.layers.size(); ++il) BuildLayer(il, in, kind);
}

bool Engine::Reserve(uint32_t n_tokens, const GraphKind& kind) {
  StepInput in;
  in.n_streams = n_tokens % spec_.n_streams == 0 ? spec_.n_streams : 1;
  in.cells.resize(n_tokens);
  in.masks.emplace_back(size_t{n_tokens} * spec_.n_cells);
  in.masks.emplace_back(size_t{n_tokens} * std::max(spec_.swa_cells, 1u));
  for (const LayerSpec& layer : spec_.layers) in.mask_of.push_back(layer.swa ? 1 : 0);
  Build(in, kind);
  ggml_backend_sched_reset(sched_.get());
  return ggml_backend_sched_reserve(sched_.get(), graph_);
}

// llama_kv_cache::build_graph_shift. Returns the input.
ggml_tensor* Engine::BuildShift() {
  graph_context_ = MakeContext(16 * spec_.layers.size() + 16, true);
  ggml_context* ctx = graph_context_.get();
  graph_ = ggml_new_graph_custom(ctx, kGraphNodes, false);
  const int64_t n_rows = int64_t{spec_.n_cells} * spec_.n_streams;
  ggml_tensor* shift = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_rows);
  ggml_set_input(shift);
  for (size_t il = 0; il < spec_.layers.size(); ++il) {
    const LayerSpec& layer = spec_.layers[il];
    const RopeSpec& r = layer.rope;
    if (layer.shares >= 0 || layer.swa || r.mode == kNoRope) continue;
    ggml_tensor* root = tensors_[il].k;
    const int n_rot = r.n_dims ? r.n_dims : static_cast<int>(layer.head_dim);
    ggml_tensor* k = ggml_view_3d(ctx, root, n_rot, layer.n_kv_heads, n_rows,
                                  ggml_row_size(root->type, layer.head_dim), root->nb[1], 0);
    const int mode = r.multi() ? GGML_ROPE_TYPE_NEOX : r.mode;
    ggml_build_forward_expand(
        graph_,
        ggml_rope_ext_inplace(ctx, k, shift, factor_tensors_[il], n_rot, mode, r.n_ctx_orig,
                              r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, 32.0f, 1.0f));
  }
  return shift;
}

}  // namespace qevict::plugin::testing
