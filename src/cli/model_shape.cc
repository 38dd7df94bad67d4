#include "cli/model_shape.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "cli/options.h"
#include "llama.h"

namespace qevict::cli {
namespace {

constexpr const char* kPattern = "attention.sliding_window_pattern";

/// Architectures whose layers alternate between sliding and full attention, where the file does not
/// say which: of `period` layers one is full, the first or the last.
struct SlidingDefault {
  std::string_view architecture;
  uint32_t period;
  bool full_first;
  uint32_t n_swa;  ///< if the file does not say; 0 = then none slides
};
constexpr SlidingDefault kSlidingDefaults[] = {
    {"afmoe", 4, false, 0},        {"cohere2", 4, false, 0}, {"cohere2moe", 4, true, 0},
    {"exaone-moe", 4, false, 128}, {"exaone4", 4, false, 0}, {"gemma2", 2, false, 4096},
    {"gemma3", 6, false, 0},       {"gemma3n", 5, false, 0}, {"gpt-oss", 2, false, 0},
    {"llama4", 4, false, 8192},    {"olmo2", 4, false, 0},   {"plamo3", 8, false, 0},
    {"smallthinker", 4, true, 0},
};

/// Metadata of one file under its architecture's prefix.
class Metadata {
 public:
  static Result<Metadata> Open(const std::string& path) {
    QEVICT_RETURN_IF_ERROR(CheckModelFile(path));
    gguf_context* file = gguf_init_from_file(path.c_str(), {/*no_alloc*/ true, /*ctx*/ nullptr});
    if (!file)
      return InvalidArgument("model file " + path + " is damaged: its header is unreadable");
    Metadata metadata(file);
    const int64_t id = gguf_find_key(file, "general.architecture");
    if (id < 0 || gguf_get_kv_type(file, id) != GGUF_TYPE_STRING) {
      return InvalidArgument("model file " + path + " lacks general.architecture");
    }
    metadata.architecture_ = gguf_get_val_str(file, id);
    return metadata;
  }

  const std::string& architecture() const { return architecture_; }
  bool Has(const std::string& name) const { return Find(name) >= 0; }

  std::optional<uint32_t> Number(const std::string& name) const {
    const int64_t id = Find(name);
    if (id < 0) return std::nullopt;
    const gguf_type type = gguf_get_kv_type(file_.get(), id);
    if (type == GGUF_TYPE_ARRAY || type == GGUF_TYPE_STRING) return std::nullopt;
    return Widen(type, gguf_get_val_data(file_.get(), id), 0);
  }

  /// A value per layer: an array as it is, a number for all, `fallback` where there is none.
  std::vector<uint32_t> PerLayer(const std::string& name, size_t n,
                                 const std::vector<uint32_t>& fallback) const {
    const int64_t id = Find(name);
    if (id < 0) return fallback;
    if (gguf_get_kv_type(file_.get(), id) != GGUF_TYPE_ARRAY) {
      const std::optional<uint32_t> value = Number(name);
      return value ? std::vector<uint32_t>(n, *value) : fallback;
    }
    const gguf_type type = gguf_get_arr_type(file_.get(), id);
    if (type == GGUF_TYPE_STRING || type == GGUF_TYPE_ARRAY) return fallback;
    std::vector<uint32_t> values;
    const size_t n_values = std::min(n, gguf_get_arr_n(file_.get(), id));
    for (size_t i = 0; i < n_values; ++i) {
      values.push_back(Widen(type, gguf_get_arr_data(file_.get(), id), i).value_or(0));
    }
    values.resize(n, 0);
    return values;
  }

  bool IsArray(const std::string& name) const {
    const int64_t id = Find(name);
    return id >= 0 && gguf_get_kv_type(file_.get(), id) == GGUF_TYPE_ARRAY;
  }

 private:
  struct Free {
    void operator()(gguf_context* file) const { gguf_free(file); }
  };
  explicit Metadata(gguf_context* file) : file_(file) {}

  int64_t Find(const std::string& name) const {
    return gguf_find_key(file_.get(), (architecture_ + "." + name).c_str());
  }

  template <typename T>
  static uint32_t At(const void* data, size_t i) {
    const T value = static_cast<const T*>(data)[i];
    return value > T{0} ? static_cast<uint32_t>(value) : 0;
  }
  static std::optional<uint32_t> Widen(gguf_type type, const void* data, size_t i) {
    switch (type) {
      case GGUF_TYPE_UINT8:
      case GGUF_TYPE_BOOL:
        return At<uint8_t>(data, i);
      case GGUF_TYPE_INT8:
        return At<int8_t>(data, i);
      case GGUF_TYPE_UINT16:
        return At<uint16_t>(data, i);
      case GGUF_TYPE_INT16:
        return At<int16_t>(data, i);
      case GGUF_TYPE_UINT32:
        return At<uint32_t>(data, i);
      case GGUF_TYPE_INT32:
        return At<int32_t>(data, i);
      case GGUF_TYPE_UINT64:
        return At<uint64_t>(data, i);
      case GGUF_TYPE_INT64:
        return At<int64_t>(data, i);
      default:
        return std::nullopt;
    }
  }

  std::unique_ptr<gguf_context, Free> file_;
  std::string architecture_;
};

/// Sliding layers, and the tokens they see.
void ReadSliding(const Metadata& m, size_t n_layers, std::vector<uint32_t>& sliding,
                 uint32_t& n_swa) {
  sliding.assign(n_layers, 0);
  const auto known =
      std::find_if(std::begin(kSlidingDefaults), std::end(kSlidingDefaults),
                   [&](const SlidingDefault& d) { return d.architecture == m.architecture(); });
  const bool is_known = known != std::end(kSlidingDefaults);
  n_swa = m.Number("attention.sliding_window").value_or(is_known ? known->n_swa : 0);
  if (n_swa == 0) return;
  if (m.IsArray(kPattern)) {
    sliding = m.PerLayer(kPattern, n_layers, sliding);
    return;
  }
  if (!is_known) {
    n_swa = 0;  // such as phi3: llama.cpp keeps every token
    return;
  }
  const uint32_t period = std::max(1u, m.Number(kPattern).value_or(known->period));
  for (size_t il = 0; il < n_layers; ++il) {
    sliding[il] = il % period != (known->full_first ? 0 : period - 1);
  }
}

/// Layers whose cache is another layer's (Gemma 3n, Gemma 4) have none of their own.
size_t LayersWithCache(const Metadata& m, size_t n_layers) {
  if (m.architecture() == "gemma3n") return std::min<size_t>(n_layers, 20);
  const uint32_t shared = m.Number("attention.shared_kv_layers").value_or(0);
  return n_layers - std::min<size_t>(n_layers, shared);
}

}  // namespace

Result<ModelShape> ReadModelShape(const std::string& path) {
  const Result<Metadata> opened = Metadata::Open(path);
  if (!opened.ok()) return opened.status();
  const Metadata& m = *opened;
  const std::string& name = m.architecture();
  const auto n_blocks = m.Number("block_count");
  const auto n_embd = m.Number("embedding_length");
  if (!n_blocks || !n_embd || *n_blocks == 0 || *n_blocks > 4096) {
    return InvalidArgument("model file " + path + " lacks " + name + ".block_count or " + name +
                           ".embedding_length");
  }
  const size_t n = *n_blocks - std::min(*n_blocks, m.Number("nextn_predict_layers").value_or(0));
  const std::vector<uint32_t> n_heads =
      m.PerLayer("attention.head_count", n, std::vector<uint32_t>(n, 0));
  const std::vector<uint32_t> n_kv = m.PerLayer("attention.head_count_kv", n, n_heads);
  if (m.Has("ssm.state_size") || m.Has("wkv.head_size") || m.Has("shortconv.l_cache") ||
      n_heads[0] == 0) {
    return Unimplemented("models with recurrent state (" + name +
                         ") are not supported by QEVICT: run this one with -dev none");
  }
  if (m.Has("attention.kv_lora_rank") || m.Has("attention.key_length_mla")) {
    return Unimplemented("models with multi-head latent attention (" + name +
                         ") are not supported by QEVICT: run this one with -dev none");
  }
  ModelShape shape;
  shape.architecture = name;
  shape.n_ctx_train = m.Number("context_length").value_or(0);
  const uint32_t d = m.Number("attention.key_length").value_or(*n_embd / n_heads[0]);
  const uint32_t dv = m.Number("attention.value_length").value_or(*n_embd / n_heads[0]);
  const uint32_t d_swa = m.Number("attention.key_length_swa").value_or(d);
  const uint32_t dv_swa = m.Number("attention.value_length_swa").value_or(dv);
  shape.rope_dims = m.Number("rope.dimension_count").value_or(d);
  std::vector<uint32_t> sliding;
  ReadSliding(m, n, sliding, shape.n_swa);
  for (uint32_t il = 0; il < LayersWithCache(m, n); ++il) {
    if (n_kv[il] == 0) continue;
    const bool slides = sliding[il] != 0;
    shape.layers.push_back({il, n_kv[il], slides ? d_swa : d, slides ? dv_swa : dv, slides});
  }
  if (shape.layers.empty())
    return InvalidArgument("no layer of model file " + path + " has a KV cache");
  return shape;
}

}  // namespace qevict::cli
