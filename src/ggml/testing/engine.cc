#include "ggml/testing/engine.h"

#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>

#include "base/half.h"
#include "ggml-cpu.h"
#include "ggml/session.h"

namespace qevict::plugin::testing {
namespace {

constexpr size_t kGraphNodes = 4096;

ggml_context_ptr MakeContext(size_t n_tensors, bool graph) {
  const size_t bytes = n_tensors * ggml_tensor_overhead() +
                       (graph ? ggml_graph_overhead_custom(kGraphNodes, false) : 0);
  return ggml_context_ptr(ggml_init({bytes, nullptr, /*no_alloc*/ true}));
}

float ToFloat(uint16_t h, ggml_type type) {
  return type == GGML_TYPE_BF16 ? BF16ToF32(h) : F16ToF32(h);
}

template <typename T>
void SetTensor(ggml_tensor* t, const std::vector<T>& values) {
  if (!t || !t->buffer) return;  // not part of the graph
  if (values.size() * sizeof(T) != ggml_nbytes(t))
    throw std::runtime_error(std::string("test: size of ") + t->name);
  ggml_backend_tensor_set(t, values.data(), 0, ggml_nbytes(t));
}

}  // namespace

Engine::Engine(const CacheSpec& spec, Where where, const std::string& config) : spec_(spec) {
  cpu_.reset(ggml_backend_cpu_init());
  ggml_backend_cpu_set_n_threads(cpu_.get(), spec_.n_threads);
  std::vector<ggml_backend_t> backends{cpu_.get()};
  if (where == Where::kQevict) {
    ggml_backend_reg_t reg = qevict_backend_reg();
    if (!reg) throw std::runtime_error(qevict_last_error());
    if (!config.empty() && qevict_configure(config.c_str()) != 0)
      throw std::runtime_error(qevict_last_error());
    qevict_.reset(ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, 0), nullptr));
    session_ = qevict_last_session();
    backends.insert(backends.begin(), qevict_.get());
  }
  MakeConstants();
  MakeCache();
  sched_.reset(ggml_backend_sched_new(backends.data(), nullptr, static_cast<int>(backends.size()),
                                      kGraphNodes,
                                      /*parallel*/ false, /*op_offload*/ true));
  if (ok() && spec_.reserve) Reserve(spec_.n_streams);
}

Engine::~Engine() = default;

void Engine::FreeBackend() {
  sched_.reset();
  qevict_.reset();
}

// llama_kv_cache::llama_kv_cache.
void Engine::MakeCache() {
  cache_context_ = MakeContext(spec_.layers.size() * 2 * (1 + spec_.n_streams), false);
  ggml_context* ctx = cache_context_.get();
  for (size_t il = 0; il < spec_.layers.size(); ++il) {
    const LayerSpec& layer = spec_.layers[il];
    tensors_.push_back({});
    if (layer.shares >= 0) continue;
    CacheTensors& t = tensors_.back();
    t.k = ggml_new_tensor_3d(ctx, layer.type_k, int64_t{layer.n_kv_heads} * layer.head_dim,
                             spec_.n_cells, spec_.n_streams);
    ggml_format_name(t.k, "cache_k_l%zu", il);
    t.v = ggml_new_tensor_3d(ctx, layer.type_v, int64_t{layer.n_kv_heads} * layer.head_dim_v,
                             spec_.n_cells, spec_.n_streams);
    ggml_format_name(t.v, "cache_v_l%zu", il);
    for (uint32_t s = 0; s < spec_.n_streams; ++s) {
      t.k_stream.push_back(
          ggml_view_2d(ctx, t.k, t.k->ne[0], spec_.n_cells, t.k->nb[1], s * t.k->nb[2]));
      t.v_stream.push_back(
          ggml_view_2d(ctx, t.v, t.v->ne[0], spec_.n_cells, t.v->nb[1], s * t.v->nb[2]));
    }
  }
  ggml_backend_buffer_type_t type =
      ggml_backend_get_default_buffer_type(qevict_ ? qevict_.get() : cpu_.get());
  buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, type));
  if (buffer_) ggml_backend_buffer_clear(buffer_.get(), 0);
}

void Engine::MakeConstants() {
  constants_context_ = MakeContext(2 * spec_.layers.size() + 1, false);
  ggml_context* ctx = constants_context_.get();
  sink_tensors_.assign(spec_.layers.size(), nullptr);
  factor_tensors_.assign(spec_.layers.size(), nullptr);
  sinks_.resize(spec_.layers.size());
  ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);  // a context without tensors has no buffer
  for (size_t il = 0; il < spec_.layers.size(); ++il) {
    const LayerSpec& layer = spec_.layers[il];
    if (layer.sinks) sink_tensors_[il] = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, layer.n_heads());
    if (layer.rope.factors)
      factor_tensors_[il] = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, layer.head_dim / 2);
  }
  constants_buffer_.reset(ggml_backend_alloc_ctx_tensors(ctx, cpu_.get()));
  ggml_backend_buffer_set_usage(constants_buffer_.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  for (size_t il = 0; il < spec_.layers.size(); ++il) {
    if (sink_tensors_[il]) {
      for (uint32_t h = 0; h < spec_.layers[il].n_heads(); ++h)
        sinks_[il].push_back(0.7f * static_cast<float>(h % 5) - 1.0f);
      SetTensor(sink_tensors_[il], sinks_[il]);
    }
    if (factor_tensors_[il]) {
      std::vector<float> factors;
      for (uint32_t i = 0; i < spec_.layers[il].head_dim / 2; ++i)
        factors.push_back(1.0f + 0.25f * static_cast<float>(i % 8));
      SetTensor(factor_tensors_[il], factors);
    }
  }
}

// --- Graphs
// ------------------------------------------------------------------------------------------------------------

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
ggml_tensor* Engine::View(ggml_tensor* root, uint32_t head_dim, uint32_t n_kv_heads,
                          const StepInput& in) {
  return ggml_view_4d(graph_context_.get(), root, head_dim, n_kv_heads, in.n_kv, in.n_streams,
                      ggml_row_size(root->type, head_dim), root->nb[1], root->nb[2],
                      root->nb[2] * in.first_stream);
}

// llama_kv_cache::cpy_k, cpy_v.
ggml_tensor* Engine::StoreRows(ggml_tensor* root, ggml_tensor* rows, ggml_tensor* cells) {
  ggml_context* ctx = graph_context_.get();
  rows = ggml_view_2d(ctx, rows, rows->ne[0] * rows->ne[1], rows->ne[2], rows->nb[2], 0);
  if (root->ne[2] > 1) root = ggml_reshape_2d(ctx, root, root->ne[0], root->ne[1] * root->ne[2]);
  return ggml_set_rows(ctx, root, rows, cells);
}

ggml_tensor* Engine::PlainAttention(const LayerSpec& layer, ggml_tensor* q, ggml_tensor* k,
                                    ggml_tensor* v, ggml_tensor* mask) {
  ggml_context* ctx = graph_context_.get();
  ggml_tensor* kq = ggml_mul_mat(ctx, k, q);
  kq = ggml_soft_max_ext(ctx, kq, mask, 1.0f / std::sqrt(static_cast<float>(layer.head_dim)),
                         layer.max_bias);
  v = ggml_cont(ctx, ggml_transpose(ctx, v));
  return ggml_cont(ctx, ggml_permute(ctx, ggml_mul_mat(ctx, v, kq), 0, 2, 1, 3));
}

// llm_graph_context::build_attn and build_attn_mha.
void Engine::BuildLayer(uint32_t il, const StepInput& in, const GraphKind& kind) {
  const LayerSpec& layer = spec_.layers[il];
  const CacheTensors& cache = tensors_[owner(il)];
  ggml_context* ctx = graph_context_.get();
  LayerNodes& nodes = nodes_[il];
  const uint32_t n = in.n_tokens();
  MakeRows(nodes, layer, n);
  ggml_tensor* mask = masks_[in.mask_of[il]];
  nodes.q_rot = Rope(layer, il, nodes.q);
  ggml_set_output(nodes.q_rot);
  ggml_tensor* k_rot = Rope(layer, il, nodes.k);
  ggml_build_forward_expand(graph_, nodes.q_rot);
  ggml_build_forward_expand(graph_, nodes.v);
  ggml_build_forward_expand(graph_, k_rot);
  if (layer.shares < 0 && kind.write) {
    ggml_build_forward_expand(graph_, StoreRows(cache.k, k_rot, cells_k_));
    ggml_build_forward_expand(graph_, StoreRows(cache.v, nodes.v, cells_v_));
  }
  ggml_tensor* q = nodes.q_rot;
  ggml_tensor* k = View(cache.k, layer.head_dim, layer.n_kv_heads, in);
  ggml_tensor* v = View(cache.v, layer.head_dim_v, layer.n_kv_heads, in);
  q = ggml_view_4d(ctx, q, q->ne[0], q->ne[1], q->ne[2] / in.n_streams, in.n_streams, q->nb[1],
                   q->nb[2], q->nb[2] * static_cast<size_t>(q->ne[2] / in.n_streams), 0);
  q = ggml_permute(ctx, q, 0, 2, 1, 3);
  k = ggml_permute(ctx, k, 0, 2, 1, 3);
  v = ggml_permute(ctx, v, 0, 2, 1, 3);
  if (kind.cast_before) k = ggml_cast(ctx, ggml_cast(ctx, k, GGML_TYPE_F32), GGML_TYPE_F16);
  if (kind.flash_attention) {
    nodes.out = ggml_flash_attn_ext(ctx, q, k, v, mask,
                                    1.0f / std::sqrt(static_cast<float>(layer.head_dim)),
                                    layer.max_bias, layer.softcap);
    ggml_flash_attn_ext_add_sinks(nodes.out, sink_tensors_[il]);
    ggml_prec_set_acc(nodes.out, GGML_PREC_F32);
  } else {
    nodes.out = PlainAttention(layer, q, k, v, mask);
  }
  // The rest of the model is somewhere else: attention's output goes on to an operation of the CPU.
  nodes.out = ggml_reshape_2d(ctx, nodes.out, nodes.out->ne[0] * nodes.out->ne[1],
                              nodes.out->ne[2] * nodes.out->ne[3]);
  nodes.out = ggml_scale(ctx, nodes.out, 1.0f);
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
  cells_k_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, in.n_tokens());
  cells_v_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, in.n_tokens());
  for (ggml_tensor* t : {pos_, cells_k_, cells_v_}) ggml_set_input(t);
  masks_.clear();
  for (size_t i = 0; i < in.masks.size(); ++i) {
    masks_.push_back(ggml_new_tensor_4d(ctx, GGML_TYPE_F16, in.n_kv, in.n_tokens() / in.n_streams,
                                        1, in.n_streams));
    ggml_set_input(masks_.back());
  }
  nodes_.assign(spec_.layers.size(), {});
  for (uint32_t il = 0; il < spec_.layers.size(); ++il) BuildLayer(il, in, kind);
}

bool Engine::Reserve(uint32_t n_tokens, const GraphKind& kind) {
  StepInput in;
  in.n_streams = n_tokens % spec_.n_streams == 0 ? spec_.n_streams : 1;
  in.n_kv = spec_.n_cells;
  in.cells.resize(n_tokens);
  in.masks.resize(1);
  in.mask_of.assign(spec_.layers.size(), 0);
  Build(in, kind);
  ggml_backend_sched_reset(sched_.get());
  return ggml_backend_sched_reserve(sched_.get(), graph_);
}

void Engine::SetInputs(const StepInput& in) {
  SetTensor(pos_, in.pos);
  SetTensor(cells_k_, in.cells);
  SetTensor(cells_v_, in.cells);
  for (size_t i = 0; i < masks_.size(); ++i) SetTensor(masks_[i], in.masks[i]);
  for (size_t il = 0; il < nodes_.size(); ++il) {
    const LayerNodes& nodes = nodes_[il];
    const LayerRows& rows = in.rows[il];
    if (!nodes.qkv) {
      SetTensor(nodes.q, rows.q);
      SetTensor(nodes.k, rows.k);
      SetTensor(nodes.v, rows.v);
      continue;
    }
    std::vector<float> fused;
    const size_t n = in.n_tokens();
    for (size_t i = 0; i < n; ++i) {
      for (const std::vector<float>* part : {&rows.q, &rows.k, &rows.v}) {
        const auto begin = part->begin() + static_cast<ptrdiff_t>(i * part->size() / n);
        fused.insert(fused.end(), begin, begin + static_cast<ptrdiff_t>(part->size() / n));
      }
    }
    SetTensor(nodes.qkv, fused);
  }
}

void Engine::Announce() {
  if (!qevict_ || !announce_) return;
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(qevict_.get()));
  auto* set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
      ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
  set_n_threads(qevict_.get(), spec_.n_threads);
}

StepOutput Engine::Compute(const StepInput& in) {
  StepOutput out;
  SetInputs(in);
  Announce();
  out.status = ggml_backend_sched_graph_compute(sched_.get(), graph_);
  if (out.status != GGML_STATUS_SUCCESS) return out;
  for (const LayerNodes& nodes : nodes_) {
    out.attention.emplace_back(ggml_nelements(nodes.out));
    ggml_backend_tensor_get(nodes.out, out.attention.back().data(), 0, ggml_nbytes(nodes.out));
    out.q.emplace_back(ggml_nelements(nodes.q_rot));
    if (nodes.q_rot == nodes.q && nodes.qkv) {
      out.q.back() = in.rows[out.q.size() - 1].q;
    } else {
      ggml_backend_tensor_get(nodes.q_rot, out.q.back().data(), 0, ggml_nbytes(nodes.q_rot));
    }
  }
  return out;
}

StepOutput Engine::Run(const StepInput& in, const GraphKind& kind) {
  Build(in, kind);
  ggml_backend_sched_reset(sched_.get());
  if (!ggml_backend_sched_alloc_graph(sched_.get(), graph_))
    return {GGML_STATUS_ALLOC_FAILED, {}, {}};
  return Compute(in);
}

StepOutput Engine::Rerun(const StepInput& in) { return Compute(in); }

// llama_kv_cache::build_graph_shift.
ggml_status Engine::Shift(const std::vector<int32_t>& delta) {
  graph_context_ = MakeContext(16 * spec_.layers.size() + 16, true);
  ggml_context* ctx = graph_context_.get();
  graph_ = ggml_new_graph_custom(ctx, kGraphNodes, false);
  ggml_tensor* shift =
      ggml_new_tensor_1d(ctx, GGML_TYPE_I32, int64_t{spec_.n_cells} * spec_.n_streams);
  ggml_set_input(shift);
  for (size_t il = 0; il < spec_.layers.size(); ++il) {
    const LayerSpec& layer = spec_.layers[il];
    const RopeSpec& r = layer.rope;
    if (layer.shares >= 0 || r.mode == kNoRope) continue;
    ggml_tensor* root = tensors_[il].k;
    const int n_rot = r.n_dims ? r.n_dims : static_cast<int>(layer.head_dim);
    ggml_tensor* k =
        ggml_view_3d(ctx, root, n_rot, layer.n_kv_heads, int64_t{spec_.n_cells} * spec_.n_streams,
                     ggml_row_size(root->type, layer.head_dim), root->nb[1], 0);
    const int mode = r.multi() ? GGML_ROPE_TYPE_NEOX : r.mode;
    ggml_build_forward_expand(
        graph_,
        ggml_rope_ext_inplace(ctx, k, shift, factor_tensors_[il], n_rot, mode, r.n_ctx_orig,
                              r.freq_base, r.freq_scale, r.ext_factor, r.attn_factor, 32.0f, 1.0f));
  }
  ggml_backend_sched_reset(sched_.get());
  if (!ggml_backend_sched_alloc_graph(sched_.get(), graph_)) return GGML_STATUS_ALLOC_FAILED;
  SetTensor(shift, delta);
  Announce();
  return ggml_backend_sched_graph_compute(sched_.get(), graph_);
}

// --- Whole-cache operations
// --------------------------------------------------------------------------------------------

void Engine::CopyStream(uint32_t from, uint32_t to) {
  for (const CacheTensors& t : tensors_) {
    if (!t.k) continue;
    ggml_backend_tensor_copy(t.k_stream[from], t.k_stream[to]);
    ggml_backend_tensor_copy(t.v_stream[from], t.v_stream[to]);
  }
}

void Engine::Clear() { ggml_backend_buffer_clear(buffer_.get(), 0); }

std::vector<uint8_t> Engine::ReadState(uint32_t il, bool is_k, uint32_t stream, size_t offset,
                                       size_t size) {
  std::vector<uint8_t> bytes(size);
  const CacheTensors& t = tensors_[il];
  ggml_backend_tensor_get((is_k ? t.k_stream : t.v_stream)[stream], bytes.data(), offset, size);
  return bytes;
}

void Engine::WriteState(uint32_t il, bool is_k, uint32_t stream, size_t offset,
                        std::span<const uint8_t> bytes) {
  const CacheTensors& t = tensors_[il];
  ggml_backend_tensor_set((is_k ? t.k_stream : t.v_stream)[stream], bytes.data(), offset,
                          bytes.size());
}

size_t Engine::row_bytes(uint32_t il, bool is_k) const {
  return (is_k ? tensors_[il].k : tensors_[il].v)->nb[1];
}

std::vector<float> Engine::Rows(uint32_t il, bool is_k, uint32_t stream) {
  const std::vector<uint8_t> bytes =
      ReadState(il, is_k, stream, 0, row_bytes(il, is_k) * spec_.n_cells);
  const ggml_type type = is_k ? spec_.layers[il].type_k : spec_.layers[il].type_v;
  std::vector<float> rows(bytes.size() / 2);
  for (size_t i = 0; i < rows.size(); ++i) {
    uint16_t h;
    std::memcpy(&h, bytes.data() + 2 * i, sizeof(h));
    rows[i] = ToFloat(h, type);
  }
  return rows;
}

qevict_stats Engine::stats() const {
  qevict_stats stats{};
  if (qevict_get_stats(session_, &stats) != 0) throw std::runtime_error(qevict_last_error());
  return stats;
}

CacheGroup* Engine::group() {
  const std::shared_ptr<Session> session = Sessions::Get().Find(session_);
  return session && !session->groups.empty() ? session->groups.front() : nullptr;
}

KvCache* Engine::cache() { return group() ? group()->cache() : nullptr; }

LayerRows RandomRows(const LayerSpec& layer, uint32_t n_tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  LayerRows rows;
  rows.q.resize(size_t{n_tokens} * layer.n_heads() * layer.head_dim);
  rows.k.resize(size_t{n_tokens} * layer.n_kv_heads * layer.head_dim);
  rows.v.resize(size_t{n_tokens} * layer.n_kv_heads * layer.head_dim_v);
  for (float& f : rows.q) f = normal(random);
  for (size_t i = 0; i < rows.k.size(); ++i)
    rows.k[i] = normal(random) * (i % layer.head_dim % 19 == 7 ? 3.0f : 1.0f);
  for (float& f : rows.v) f = normal(random);
  return rows;
}

}  // namespace qevict::plugin::testing
