// What the end-to-end probe needs of llama.cpp and the plug-in: models, contexts, steps,
// statistics.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llama.h"
#include "qevict/backend.h"

namespace probe {

/// Ends the program with exit code 1 and one sentence.
[[noreturn]] void Fail(const std::string& sentence);

/// `--key value` pairs of the command line.
class Options {
 public:
  Options(int argc, char** argv);
  const std::string& text(const std::string& key) const;
  std::string text(const std::string& key, const std::string& otherwise) const;
  uint32_t number(const std::string& key) const;
  uint32_t number(const std::string& key, uint32_t otherwise) const;

 private:
  std::map<std::string, std::string> values_;
};

/// The plug-in's C entry points, from the library that QEVICT_PLUGIN names; loads it on first use.
struct Plugin {
  ggml_backend_dev_t device = nullptr;
  int (*configure)(const char*) = nullptr;
  uint64_t (*last_session)() = nullptr;
  int (*set_budget_tokens)(uint64_t, uint32_t) = nullptr;
  int (*set_phase)(uint64_t, qevict_phase) = nullptr;
  int (*get_stats)(uint64_t, qevict_stats*) = nullptr;
  int (*get_layer)(uint64_t, uint32_t, uint32_t, uint32_t*, uint8_t*, float*, uint32_t) = nullptr;
  const char* (*last_error)() = nullptr;

  static const Plugin& Get();
};

/// How a context is made. config empty: CPU backend.
struct ContextSettings {
  std::string config;
  uint32_t n_ctx = 0, n_batch = 512, n_seq_max = 1, n_threads = 2;
  bool unified = false;
  bool flash_attention = true;
  ggml_type cache_type = GGML_TYPE_F16;
  std::string override_key;  ///< an integer of the model's metadata to be replaced
  int64_t override_value = 0;
};

/// A model with one context over it.
class Engine {
 public:
  Engine(const std::string& model_path, const ContextSettings& settings);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  llama_context* context() const { return context_; }
  llama_memory_t memory() const { return llama_get_memory(context_); }
  uint32_t n_vocab() const;
  uint64_t session() const { return session_; }
  qevict_stats stats() const;
  /// The first n_tokens tokens of the text (0 = all of them).
  std::vector<llama_token> Tokenize(const std::string& text, uint32_t n_tokens) const;

  /// Decodes tokens at pos0, pos0 + 1, ... of a sequence as one batch; returns llama_decode's code.
  /// Logits of all of them are kept if `all_logits`, else those of the last.
  int Decode(const llama_token* tokens, uint32_t n, llama_pos pos0, llama_seq_id seq,
             bool all_logits = false);
  /// One token for each of several sequences, in one batch.
  int DecodeSide(const std::vector<llama_token>& tokens, const std::vector<llama_pos>& pos);
  /// The prompt in chunks of n_batch; fails if a chunk does.
  void Prompt(const std::vector<llama_token>& tokens, llama_seq_id seq);
  /// Appends n greedy tokens to `tokens`, whose last one is not decoded yet if `pending`.
  void Generate(std::vector<llama_token>& tokens, uint32_t n, llama_seq_id seq);

  const float* logits(int32_t i) const { return llama_get_logits_ith(context_, i); }
  llama_token Greedy(int32_t i) const;

 private:
  llama_model* model_ = nullptr;
  llama_context* context_ = nullptr;
  uint64_t session_ = 0;
  uint32_t n_batch_;
};

/// What the budget limits.
inline uint64_t Counted(const qevict_stats& s) {
  return s.full_bytes + s.packed_bytes + s.dormant_bytes + s.tables_bytes + s.slack_bytes;
}

/// Difference of two rows of logits: KL divergence of b from a, and whether the best token is the
/// same.
class Divergence {
 public:
  void Add(const float* a, const float* b, uint32_t n);
  /// One `key value` a line.
  void Print(const char* prefix) const;

 private:
  double sum_ = 0, max_ = 0, max_logit_ = 0;
  uint64_t n_ = 0, same_ = 0;
};

/// Bytes of /proc/self/status, for instance "RssAnon" or "VmHWM".
uint64_t StatusBytes(const char* key);
/// Everything that llama.cpp, ggml and the plug-in have logged so far.
const std::string& Log();

}  // namespace probe
