#include "probe_engine.h"

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ggml-backend.h"

namespace probe {
namespace {

std::string& LogText() {
  static std::string text;
  return text;
}

void KeepLog(ggml_log_level level, const char* text, void*) {
  LogText() += text;
  if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

template <typename F>
void Lookup(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  if (!function) Fail(std::string("the plug-in lacks ") + name);
}

}  // namespace

void Fail(const std::string& sentence) {
  std::fflush(stdout);
  std::fprintf(stderr, "probe: %s\n", sentence.c_str());
  std::exit(1);
}

const std::string& Log() { return LogText(); }

Options::Options(int argc, char** argv) {
  for (int i = 0; i + 1 < argc; i += 2) {
    if (std::strncmp(argv[i], "--", 2) != 0) Fail(std::string("unexpected argument ") + argv[i]);
    values_[argv[i] + 2] = argv[i + 1];
  }
}

const std::string& Options::text(const std::string& key) const {
  const auto found = values_.find(key);
  if (found == values_.end()) Fail("--" + key + " is missing");
  return found->second;
}

std::string Options::text(const std::string& key, const std::string& otherwise) const {
  return values_.count(key) ? values_.at(key) : otherwise;
}

uint32_t Options::number(const std::string& key) const {
  return static_cast<uint32_t>(std::strtoul(text(key).c_str(), nullptr, 10));
}

uint32_t Options::number(const std::string& key, uint32_t otherwise) const {
  return values_.count(key) ? number(key) : otherwise;
}

const Plugin& Plugin::Get() {
  static const Plugin plugin = [] {
    const char* path = std::getenv("QEVICT_PLUGIN");
    if (!path) Fail("QEVICT_PLUGIN does not name the plug-in");
    ggml_backend_reg_t reg = ggml_backend_load(path);
    void* library = dlopen(path, RTLD_NOW);
    if (!reg || !library) Fail(std::string("the plug-in ") + path + " does not load");
    Plugin p;
    p.device = ggml_backend_reg_dev_get(reg, 0);
    Lookup(library, "qevict_configure", p.configure);
    Lookup(library, "qevict_last_session", p.last_session);
    Lookup(library, "qevict_set_budget_tokens", p.set_budget_tokens);
    Lookup(library, "qevict_set_phase", p.set_phase);
    Lookup(library, "qevict_get_stats", p.get_stats);
    Lookup(library, "qevict_get_layer", p.get_layer);
    Lookup(library, "qevict_last_error", p.last_error);
    return p;
  }();
  return plugin;
}

Engine::Engine(const std::string& model_path, const ContextSettings& settings)
    : n_batch_(settings.n_batch) {
  static const bool initialised = [] {
    llama_log_set(KeepLog, nullptr);
    llama_backend_init();
    return true;
  }();
  static_cast<void>(initialised);

  const bool on_device = !settings.config.empty();
  ggml_backend_dev_t devices[] = {on_device ? Plugin::Get().device : nullptr, nullptr};
  llama_model_params model_params = llama_model_default_params();
  model_params.devices = devices;
  model_params.n_gpu_layers = on_device ? 999 : 0;
  llama_model_kv_override overrides[2] = {};
  if (!settings.override_key.empty()) {
    overrides[0].tag = LLAMA_KV_OVERRIDE_TYPE_INT;
    std::snprintf(overrides[0].key, sizeof(overrides[0].key), "%s", settings.override_key.c_str());
    overrides[0].val_i64 = settings.override_value;
    model_params.kv_overrides = overrides;
  }
  model_ = llama_model_load_from_file(model_path.c_str(), model_params);
  if (!model_) Fail("the model " + model_path + " does not load");

  if (on_device && Plugin::Get().configure(settings.config.c_str()) != 0) {
    Fail(std::string("configuration refused: ") + Plugin::Get().last_error());
  }
  llama_context_params params = llama_context_default_params();
  params.n_ctx = settings.n_ctx;
  params.n_batch = settings.n_batch;
  params.n_ubatch = std::min(settings.n_batch, 512u);
  params.n_seq_max = settings.n_seq_max;
  params.kv_unified = settings.unified;
  params.n_threads = params.n_threads_batch = static_cast<int32_t>(settings.n_threads);
  params.flash_attn_type =
      settings.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = params.type_v = settings.cache_type;
  context_ = llama_init_from_model(model_, params);
  if (!context_) Fail("no context over " + model_path);
  if (on_device) session_ = Plugin::Get().last_session();
}

Engine::~Engine() {
  llama_free(context_);
  llama_model_free(model_);
}

uint32_t Engine::n_vocab() const {
  return static_cast<uint32_t>(llama_vocab_n_tokens(llama_model_get_vocab(model_)));
}

qevict_stats Engine::stats() const {
  qevict_stats stats{};
  if (session_ && Plugin::Get().get_stats(session_, &stats) != 0) Fail(Plugin::Get().last_error());
  return stats;
}

std::vector<llama_token> Engine::Tokenize(const std::string& text, uint32_t n_tokens) const {
  std::vector<llama_token> tokens(text.size() + 8);
  const int n =
      llama_tokenize(llama_model_get_vocab(model_), text.data(), static_cast<int32_t>(text.size()),
                     tokens.data(), static_cast<int32_t>(tokens.size()), true, false);
  if (n < static_cast<int>(n_tokens)) Fail("the text has only " + std::to_string(n) + " tokens");
  tokens.resize(n_tokens ? n_tokens : static_cast<size_t>(n));
  return tokens;
}

int Engine::Decode(const llama_token* tokens, uint32_t n, llama_pos pos0, llama_seq_id seq,
                   bool all_logits) {
  llama_batch batch = llama_batch_init(static_cast<int32_t>(n), 0, 1);
  for (uint32_t i = 0; i < n; ++i) {
    batch.token[i] = tokens[i];
    batch.pos[i] = pos0 + static_cast<llama_pos>(i);
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = seq;
    batch.logits[i] = all_logits || i + 1 == n;
  }
  batch.n_tokens = static_cast<int32_t>(n);
  const int code = llama_decode(context_, batch);
  llama_batch_free(batch);
  return code;
}

int Engine::DecodeSide(const std::vector<llama_token>& tokens, const std::vector<llama_pos>& pos) {
  llama_batch batch = llama_batch_init(static_cast<int32_t>(tokens.size()), 0, 1);
  for (size_t i = 0; i < tokens.size(); ++i) {
    batch.token[i] = tokens[i];
    batch.pos[i] = pos[i];
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = static_cast<llama_seq_id>(i);
    batch.logits[i] = true;
  }
  batch.n_tokens = static_cast<int32_t>(tokens.size());
  const int code = llama_decode(context_, batch);
  llama_batch_free(batch);
  return code;
}

void Engine::Prompt(const std::vector<llama_token>& tokens, llama_seq_id seq) {
  for (size_t i = 0; i < tokens.size(); i += n_batch_) {
    const auto n = static_cast<uint32_t>(std::min<size_t>(n_batch_, tokens.size() - i));
    if (Decode(tokens.data() + i, n, static_cast<llama_pos>(i), seq) != 0)
      Fail("llama_decode failed");
  }
}

void Engine::Generate(std::vector<llama_token>& tokens, uint32_t n, llama_seq_id seq) {
  for (uint32_t i = 0; i < n; ++i) {
    tokens.push_back(Greedy(-1));
    const auto pos = static_cast<llama_pos>(tokens.size() - 1);
    if (Decode(&tokens.back(), 1, pos, seq) != 0) Fail("llama_decode failed");
  }
}

llama_token Engine::Greedy(int32_t i) const {
  const float* row = logits(i);
  return static_cast<llama_token>(std::max_element(row, row + n_vocab()) - row);
}

void Divergence::Add(const float* a, const float* b, uint32_t n) {
  const float top_a = *std::max_element(a, a + n), top_b = *std::max_element(b, b + n);
  double sum_a = 0, sum_b = 0;
  for (uint32_t i = 0; i < n; ++i) {
    sum_a += std::exp(static_cast<double>(a[i]) - top_a);
    sum_b += std::exp(static_cast<double>(b[i]) - top_b);
  }
  const double log_a = top_a + std::log(sum_a), log_b = top_b + std::log(sum_b);
  double kl = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const double p = a[i] - log_a, q = b[i] - log_b;
    kl += std::exp(p) * (p - q);
    max_logit_ = std::max(max_logit_, std::abs(static_cast<double>(a[i]) - b[i]));
  }
  if (!std::isfinite(kl)) Fail("logits that are not finite");
  sum_ += kl;
  max_ = std::max(max_, kl);
  ++n_;
  same_ += std::max_element(a, a + n) - a == std::max_element(b, b + n) - b;
}

void Divergence::Print(const char* prefix) const {
  const auto n = static_cast<double>(n_);
  std::printf("%scompared %llu\n%skl %.3e\n%smax_kl %.3e\n%smax_logit %.3e\n%sdifferent_top %llu\n",
              prefix, static_cast<unsigned long long>(n_), prefix, sum_ / n, prefix, max_, prefix,
              max_logit_, prefix, static_cast<unsigned long long>(n_ - same_));
}

uint64_t StatusBytes(const char* key) {
  uint64_t bytes = 0;
  if (std::FILE* file = std::fopen("/proc/self/status", "re")) {
    char line[256];
    const size_t length = std::strlen(key);
    while (std::fgets(line, sizeof(line), file)) {
      if (std::strncmp(line, key, length) == 0 && line[length] == ':') {
        bytes = std::strtoull(line + length + 1, nullptr, 10) * 1024;
      }
    }
    std::fclose(file);
  }
  return bytes;
}

}  // namespace probe
