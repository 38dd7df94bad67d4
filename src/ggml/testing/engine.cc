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

ggml_context_ptr MakeContext(size_t n_tensors, bool graph) {
  const size_t bytes = n_tensors * ggml_tensor_overhead() +
                       (graph ? ggml_graph_overhead_custom(kGraphNodes, false) : 0);
  return ggml_context_ptr(ggml_init({bytes, nullptr, /*no_alloc*/ true}));
}

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
  tensors_.resize(spec_.layers.size());
  MakeCache(false, cache_context_, buffer_);
  if (spec_.swa_cells) MakeCache(true, swa_context_, swa_buffer_);
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
void Engine::MakeCache(bool swa, ggml_context_ptr& context, ggml_backend_buffer_ptr& buffer) {
  const uint32_t n_cells = swa ? spec_.swa_cells : spec_.n_cells;
  context = MakeContext(spec_.layers.size() * 2 * (1 + spec_.n_streams), false);
  ggml_context* ctx = context.get();
  for (size_t il = 0; il < spec_.layers.size(); ++il) {
    const LayerSpec& layer = spec_.layers[il];
    if (layer.shares >= 0 || layer.swa != swa) continue;
    CacheTensors& t = tensors_[il];
    t.k = ggml_new_tensor_3d(ctx, layer.type_k, int64_t{layer.n_kv_heads} * layer.head_dim, n_cells,
                             spec_.n_streams);
    ggml_format_name(t.k, "cache_k_l%zu", il);
    t.v = ggml_new_tensor_3d(ctx, layer.type_v, int64_t{layer.n_kv_heads} * layer.head_dim_v,
                             n_cells, spec_.n_streams);
    ggml_format_name(t.v, "cache_v_l%zu", il);
    for (uint32_t s = 0; s < spec_.n_streams; ++s) {
      t.k_stream.push_back(ggml_view_2d(ctx, t.k, t.k->ne[0], n_cells, t.k->nb[1], s * t.k->nb[2]));
      t.v_stream.push_back(ggml_view_2d(ctx, t.v, t.v->ne[0], n_cells, t.v->nb[1], s * t.v->nb[2]));
    }
  }
  ggml_backend_buffer_type_t type =
      ggml_backend_get_default_buffer_type(qevict_ ? qevict_.get() : cpu_.get());
  if (spec_.dummy) {
    buffer.reset(ggml_backend_buft_alloc_buffer(type, 0));
    for (ggml_tensor* t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t))
      t->buffer = buffer.get();
    return;
  }
  buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, type));
  if (buffer) ggml_backend_buffer_clear(buffer.get(), 0);
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

// --- Steps

void Engine::SetInputs(const StepInput& in) {
  SetTensor(pos_, in.pos);
  SetTensor(cells_.k, in.cells);
  SetTensor(cells_.v, in.cells);
  if (spec_.swa_cells) {
    SetTensor(swa_cells_.k, in.swa_cells);
    SetTensor(swa_cells_.v, in.swa_cells);
  }
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

ggml_status Engine::Shift(const std::vector<int32_t>& delta) {
  ggml_tensor* shift = BuildShift();
  ggml_backend_sched_reset(sched_.get());
  if (!ggml_backend_sched_alloc_graph(sched_.get(), graph_)) return GGML_STATUS_ALLOC_FAILED;
  SetTensor(shift, delta);
  Announce();
  return ggml_backend_sched_graph_compute(sched_.get(), graph_);
}

// --- Whole-cache operations

void Engine::CopyStream(uint32_t from, uint32_t to) {
  for (const CacheTensors& t : tensors_) {
    if (!t.k) continue;
    ggml_backend_tensor_copy(t.k_stream[from], t.k_stream[to]);
    ggml_backend_tensor_copy(t.v_stream[from], t.v_stream[to]);
  }
}

void Engine::Clear() {
  ggml_backend_buffer_clear(buffer_.get(), 0);
  if (swa_buffer_) ggml_backend_buffer_clear(swa_buffer_.get(), 0);
}

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
      ReadState(il, is_k, stream, 0, row_bytes(il, is_k) * n_cells(il));
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

CacheGroup* Engine::group(size_t i) {
  const std::shared_ptr<Session> session = Sessions::Get().Find(session_);
  return session && i < session->groups.size() ? session->groups[i] : nullptr;
}

KvCache* Engine::cache(size_t i) { return group(i) ? group(i)->cache() : nullptr; }

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
