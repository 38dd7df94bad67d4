#include "ggml/peer_attention.h"

#include <cmath>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace qevict::plugin {
namespace {

constexpr ggml_type kTypes[] = {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0};

struct Layer {
  ggml_tensor *q, *k, *v;  // k, v: one row of all kv heads per token, as llama.cpp's cells
  ggml_tensor* out;
};

/// The view of a cache that llama.cpp attends over: [head_dim, n_tokens, n_kv_heads].
ggml_tensor* HeadView(ggml_context* context, ggml_tensor* cache, const PeerShape& s) {
  return ggml_view_3d(context, cache, s.head_dim, s.n_tokens, s.n_kv_heads, cache->nb[1],
                      ggml_row_size(cache->type, s.head_dim), 0);
}

void Quantize(ggml_tensor* cache, std::span<const float> rows) {
  std::vector<uint8_t> bytes(ggml_nbytes(cache));
  ggml_quantize_chunk(cache->type, rows.data(), bytes.data(), 0, cache->ne[1], cache->ne[0],
                      nullptr);
  ggml_backend_tensor_set(cache, bytes.data(), 0, bytes.size());
}

std::vector<float> Dequantize(const ggml_tensor* cache) {
  std::vector<uint8_t> bytes(ggml_nbytes(cache));
  ggml_backend_tensor_get(cache, bytes.data(), 0, bytes.size());
  std::vector<float> rows(static_cast<size_t>(ggml_nelements(cache)));
  ggml_get_type_traits(cache->type)->to_float(bytes.data(), rows.data(), ggml_nelements(cache));
  return rows;
}

}  // namespace

struct PeerAttention::Graph {
  ggml_context_ptr context;
  ggml_backend_ptr backend;
  ggml_backend_buffer_ptr buffer;
  ggml_cgraph* graph = nullptr;
  std::vector<Layer> layers;
};

const char* PeerTypeName(PeerType type) { return ggml_type_name(kTypes[static_cast<int>(type)]); }

PeerAttention::PeerAttention(std::unique_ptr<Graph> graph) : graph_(std::move(graph)) {}
PeerAttention::~PeerAttention() = default;

Result<std::unique_ptr<PeerAttention>> PeerAttention::Create(const PeerShape& s, PeerType type,
                                                             uint32_t n_layers, int n_threads) {
  auto g = std::make_unique<Graph>();
  const size_t n_tensors = 8 * size_t{n_layers} + 8;
  g->context.reset(ggml_init({n_tensors * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr,
                              /*no_alloc=*/true}));
  g->backend.reset(ggml_backend_cpu_init());
  if (!g->context || !g->backend) return ResourceExhausted("ggml's CPU backend does not start");
  ggml_backend_cpu_set_n_threads(g->backend.get(), n_threads);
  ggml_context* c = g->context.get();
  g->graph = ggml_new_graph(c);
  // llama.cpp always passes a mask; one query sees all of these tokens.
  ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, s.n_tokens, 1);
  const int64_t row = int64_t{s.n_kv_heads} * s.head_dim;
  for (uint32_t i = 0; i < n_layers; ++i) {
    Layer l{};
    l.q = ggml_new_tensor_3d(c, GGML_TYPE_F32, s.head_dim, 1, s.n_heads);
    l.k = ggml_new_tensor_2d(c, kTypes[static_cast<int>(type)], row, s.n_tokens);
    l.v = ggml_new_tensor_2d(c, kTypes[static_cast<int>(type)], row, s.n_tokens);
    l.out = ggml_flash_attn_ext(c, l.q, HeadView(c, l.k, s), HeadView(c, l.v, s), mask,
                                1.0f / std::sqrt(static_cast<float>(s.head_dim)), 0.0f, 0.0f);
    ggml_build_forward_expand(g->graph, l.out);
    g->layers.push_back(l);
  }
  g->buffer.reset(ggml_backend_alloc_ctx_tensors(c, g->backend.get()));
  if (!g->buffer) return ResourceExhausted("no memory for a cache of ggml");
  ggml_backend_buffer_clear(g->buffer.get(), 0);
  return std::unique_ptr<PeerAttention>(new PeerAttention(std::move(g)));
}

void PeerAttention::Fill(uint32_t layer, std::span<const float> query, std::span<const float> keys,
                         std::span<const float> values) {
  const Layer& l = graph_->layers[layer];
  ggml_backend_tensor_set(l.q, query.data(), 0, query.size_bytes());
  Quantize(l.k, keys);
  Quantize(l.v, values);
}

void PeerAttention::Stored(uint32_t layer, std::vector<float>& keys,
                           std::vector<float>& values) const {
  keys = Dequantize(graph_->layers[layer].k);
  values = Dequantize(graph_->layers[layer].v);
}

Status PeerAttention::Run() {
  if (ggml_backend_graph_compute(graph_->backend.get(), graph_->graph) == GGML_STATUS_SUCCESS) {
    return {};
  }
  return Internal("ggml's CPU backend did not compute its attention");
}

std::vector<float> PeerAttention::Out(uint32_t layer) const {
  const ggml_tensor* out = graph_->layers[layer].out;
  std::vector<float> values(static_cast<size_t>(ggml_nelements(out)));
  ggml_backend_tensor_get(out, values.data(), 0, ggml_nbytes(out));
  return values;
}

size_t PeerAttention::layer_bytes() const {
  return ggml_nbytes(graph_->layers[0].k) + ggml_nbytes(graph_->layers[0].v);
}

}  // namespace qevict::plugin
