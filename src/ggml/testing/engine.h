// Engine: the part of llama.cpp around its cache, for tests: cache tensors, graphs of ROPE ->
// SET_ROWS -> FLASH_ATTN_EXT built with llama_kv_cache's and llm_graph_context's views and
// permutations, and a scheduler over [QEVICT, CPU]. The same engine with its cache in ordinary CPU
// memory is what the plug-in is compared with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/rope.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"
#include "qevict/backend.h"
#include "qevict/cache.h"

namespace qevict::plugin {
class CacheGroup;
}

namespace qevict::plugin::testing {

inline constexpr int kNoRope = -1;

struct RopeSpec {
  int mode = GGML_ROPE_TYPE_NEOX;  ///< kNoRope: none
  int n_dims = 0;                  ///< 0 = head_dim
  float freq_base = 10000.0f, freq_scale = 1.0f, ext_factor = 0.0f, attn_factor = 1.0f;
  int n_ctx_orig = 4096;
  bool factors = false;  ///< frequency factors (LLaMA 3, LongRoPE)
  int sections[4] = {0, 0, 0, 0};
  bool multi() const { return mode >= 0 && (mode & GGML_ROPE_TYPE_MROPE) != 0; }
};

struct LayerSpec {
  uint32_t n_kv_heads = 2, n_gqa = 2, head_dim = 64, head_dim_v = 64;
  ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
  RopeSpec rope;
  bool sinks = false;
  float softcap = 0.0f, max_bias = 0.0f;
  bool fused_qkv = false;        ///< q, k and v are views of one tensor
  int shares = -1;               ///< >= 0: has no cache of its own, attends over that layer's
  bool norm_after_rope = false;  ///< keys are normalised after RoPE (Llama 4, Hunyuan)
  bool swa = false;              ///< lives in the second cache (llama_kv_cache_iswa)
  uint32_t n_heads() const { return n_kv_heads * n_gqa; }
};

struct CacheSpec {
  std::vector<LayerSpec> layers{1};
  uint32_t n_cells = 256, n_streams = 1;
  uint32_t swa_cells =
      0;  ///< > 0: there is a second cache of that many cells, in a buffer of its own
  int n_threads = 2;
  bool reserve = true;  ///< as llama_context does: the scheduler measures a graph first
  bool dummy = false;   ///< a cache buffer without memory, as llama.cpp makes to measure (--fit)
};

/// Rows of one layer in a step, before RoPE: q [token][head][head_dim], k and v [token][kv
/// head][head_dim(_v)].
struct LayerRows {
  std::vector<float> q, k, v;
};

/// Everything one step of the host program hands to the graph.
struct StepInput {
  uint32_t first_stream = 0, n_streams = 1;
  uint32_t n_kv = 0;                      ///< visible cells of the first cache
  std::vector<int64_t> cells, swa_cells;  ///< one per token, global; of the first and second cache
  std::vector<int32_t> pos;               ///< one per token, or four planes (M-RoPE)
  std::vector<std::vector<uint16_t>> masks;  ///< [token][n_kv] f16; layers share them
  std::vector<uint32_t> mask_of;             ///< which one, per layer
  std::vector<LayerRows> rows;               ///< per layer
  uint32_t n_tokens() const { return static_cast<uint32_t>(cells.size()); }
  uint32_t n_kv_of(uint32_t il) const {
    return static_cast<uint32_t>(mask(il).size() / cells.size());
  }
  const std::vector<uint16_t>& mask(uint32_t il) const { return masks[mask_of[il]]; }
};

struct StepOutput {
  ggml_status status = GGML_STATUS_SUCCESS;
  std::vector<std::vector<float>> attention;  ///< per layer, [token][head][head_dim_v]
  std::vector<std::vector<float>> q;          ///< per layer, rotated, [token][head][head_dim]
};

enum class Where : uint8_t { kQevict, kCpu };

/// What a graph contains besides the usual.
struct GraphKind {
  bool flash_attention = true;  ///< false: MUL_MAT, SOFT_MAX, MUL_MAT
  bool cast_before =
      false;  ///< f16 cache cast to f32 before attention (an operation that the plug-in refuses)
  bool write = true;  ///< false: no SET_ROWS
};

/// Cache tensors that could not be allocated make ok() false; nothing else may be called then.
/// `config` is passed to qevict_configure() first; engines made later do not change it.
class Engine {
 public:
  Engine(const CacheSpec& spec, Where where, const std::string& config = "preset=full");
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::vector<ggml_backend_buffer_t> cache_buffers() const {
    return swa_buffer_ ? std::vector{buffer_.get(), swa_buffer_.get()} : std::vector{buffer_.get()};
  }
  bool ok() const { return buffer_ && (spec_.swa_cells == 0 || swa_buffer_); }
  /// What llama.cpp does before a cache is used: lets the scheduler measure a graph. False if it
  /// refuses.
  bool Reserve(uint32_t n_tokens, const GraphKind& kind = {});
  /// A graph for the step (built anew), computed.
  StepOutput Run(const StepInput& in, const GraphKind& kind = {});
  /// The graph of the last Run again, with other inputs of the same shape.
  StepOutput Rerun(const StepInput& in);
  /// K-shift: ROPE in place over the whole of each layer's cache. delta [stream * n_cells + cell].
  ggml_status Shift(const std::vector<int32_t>& delta);
  /// llama_memory_seq_cp between streams.
  void CopyStream(uint32_t from, uint32_t to);
  void Clear();

  /// State bytes of a layer's stream, as llama_state_* read and write them.
  std::vector<uint8_t> ReadState(uint32_t il, bool is_k, uint32_t stream, size_t offset,
                                 size_t size);
  void WriteState(uint32_t il, bool is_k, uint32_t stream, size_t offset,
                  std::span<const uint8_t> bytes);
  size_t row_bytes(uint32_t il, bool is_k) const;
  /// 16-bit words of all cells of a stream as floats: [cell][n_kv_heads * head_dim(_v)].
  std::vector<float> Rows(uint32_t il, bool is_k, uint32_t stream);

  const CacheSpec& spec() const { return spec_; }
  ggml_backend_t backend() { return qevict_.get(); }
  ggml_backend_sched_t sched() { return sched_.get(); }
  /// The backend goes before the buffer, or (the default at destruction) after it.
  void FreeBackend();
  void FreeBuffer() {
    buffer_.reset();
    swa_buffer_.reset();
  }
  uint64_t session() const { return session_; }
  qevict_stats stats() const;
  CacheGroup* group(size_t i = 0);
  KvCache* cache(size_t i = 0);
  /// Attention-sink logits and frequency factors of a layer (constants of the "model").
  const std::vector<float>& sinks(uint32_t il) const { return sinks_[il]; }
  /// Without this the backend hears of a graph through its thread-count callback, as from
  /// llama.cpp.
  void AnnounceGraphs(bool on) { announce_ = on; }
  uint32_t owner(uint32_t il) const {
    return spec_.layers[il].shares >= 0 ? static_cast<uint32_t>(spec_.layers[il].shares) : il;
  }

 private:
  struct LayerNodes {
    ggml_tensor *q, *k, *v, *qkv, *q_rot, *out;
  };
  struct CacheTensors {
    ggml_tensor *k, *v;
    std::vector<ggml_tensor*> k_stream, v_stream;
  };
  void MakeCache(bool swa, ggml_context_ptr& context, ggml_backend_buffer_ptr& buffer);
  void MakeConstants();
  void Build(const StepInput& in, const GraphKind& kind);
  void BuildLayer(uint32_t il, const StepInput& in, const GraphKind& kind);
  void MakeRows(LayerNodes& nodes, const LayerSpec& layer, uint32_t n);
  ggml_tensor* Rope(const LayerSpec& layer, uint32_t il, ggml_tensor* rows);
  uint32_t n_cells(uint32_t il) const {
    return spec_.layers[il].swa ? spec_.swa_cells : spec_.n_cells;
  }
  ggml_tensor* View(ggml_tensor* root, uint32_t head_dim, uint32_t n_kv_heads, uint32_t n_kv,
                    const StepInput& in);
  ggml_tensor* TransposedView(ggml_tensor* root, uint32_t head_dim, uint32_t n_kv_heads,
                              uint32_t n_kv, const StepInput& in);
  ggml_tensor* StoreRows(ggml_tensor* root, ggml_tensor* rows, ggml_tensor* cells);
  ggml_tensor* StoreTransposed(ggml_tensor* root, ggml_tensor* rows);
  ggml_tensor* Attention(uint32_t il, ggml_tensor* q, ggml_tensor* k, ggml_tensor* v,
                         ggml_tensor* mask, bool flash);
  ggml_tensor* BuildShift();
  void SetInputs(const StepInput& in);
  void Announce();
  StepOutput Compute(const StepInput& in);

  CacheSpec spec_;
  ggml_backend_ptr qevict_, cpu_;
  ggml_backend_sched_ptr sched_;
  ggml_context_ptr cache_context_, swa_context_, constants_context_, graph_context_;
  ggml_backend_buffer_ptr constants_buffer_, buffer_, swa_buffer_;
  std::vector<CacheTensors> tensors_;
  std::vector<ggml_tensor*> sink_tensors_, factor_tensors_;
  std::vector<std::vector<float>> sinks_;
  uint64_t session_ = 0;
  bool announce_ = true;

  // The graph of the last Run.
  ggml_cgraph* graph_ = nullptr;
  struct CellNodes {
    ggml_tensor *k, *v;
  };
  ggml_tensor* pos_ = nullptr;
  CellNodes cells_{}, swa_cells_{};
  std::vector<LayerNodes> nodes_;
  std::vector<ggml_tensor*> masks_;
};

inline constexpr size_t kGraphNodes = 4096;
/// A context for tensors without data, and for a graph.
ggml_context_ptr MakeContext(size_t n_tensors, bool graph);

/// q, k and v made from a seed: normal numbers, some key channels larger than the others.
LayerRows RandomRows(const LayerSpec& layer, uint32_t n_tokens, uint64_t seed);

}  // namespace qevict::plugin::testing
