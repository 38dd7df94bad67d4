// Models and contexts of libllama as the commands use them: owned, with errors as sentences.
// Only the public C API of libllama; the KV cache is ours (device QEVICT) or llama.cpp's own (CPU).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "llama.h"
#include "qevict/backend.h"
#include "qevict/config.h"

namespace qevict::cli {

enum class Device : unsigned char { kCpu, kQEvict };

/// Weights and vocabulary. Movable; contexts must not outlive it.
class Model {
 public:
  /// Errors: kInternal if the plug-in does not fit this ggml, kFailedPrecondition with llama.cpp's
  /// reason otherwise.
  static Result<Model> Load(const std::string& path, Device device);

  llama_model* get() const { return model_.get(); }
  const llama_vocab* vocab() const { return llama_model_get_vocab(model_.get()); }
  Device device() const { return device_; }
  int32_t n_vocab() const { return llama_vocab_n_tokens(vocab()); }
  uint32_t n_ctx_train() const;
  bool adds_bos() const { return llama_vocab_get_add_bos(vocab()); }

  /// Tokens of a text. `special`: with BOS and EOS as the model wants them, special tokens parsed.
  Result<std::vector<llama_token>> Tokenize(const std::string& text, bool add_special,
                                            bool parse_special) const;
  std::string Piece(llama_token token) const;
  std::string Text(std::span<const llama_token> tokens) const;
  /// True if the model brings a chat template.
  bool has_chat_template() const;
  /// The prompt that the template makes of a conversation. kUnimplemented: libllama does not know
  /// this template.
  Result<std::string> ApplyChatTemplate(const std::string& system, const std::string& user) const;

 private:
  struct Free {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  Model(llama_model* model, Device device) : model_(model), device_(device) {}
  std::unique_ptr<llama_model, Free> model_;
  Device device_;
};

/// Cells that a context of so many tokens gets; llama.cpp rounds them up, too.
constexpr uint32_t ContextCells(uint64_t n_tokens) {
  return static_cast<uint32_t>((n_tokens + 255) / 256 * 256);
}

struct ContextOptions {
  uint32_t n_ctx = 0;
  uint32_t n_batch = 512;
  uint32_t n_ubatch = 512;
  uint32_t n_outputs = 1;  ///< most rows of a batch whose logits are wanted
  int n_threads = 1;
  bool flash_attention = true;
};

/// One KV cache. Movable.
class Context {
 public:
  /// A context with the cache on the model's device. `config` counts for kQEvict only;
  /// `budget_tokens` resolves a fraction (0 = n_ctx). Errors: the plug-in's or llama.cpp's reason.
  static Result<Context> Create(const Model& model, const ContextOptions& options,
                                const Config& config = {}, uint32_t budget_tokens = 0);

  llama_context* get() const { return context_.get(); }
  uint32_t n_ctx() const { return llama_n_ctx(context_.get()); }
  /// Feeds tokens at the positions that follow; logits of the last `n_outputs` of them become
  /// available. Errors: kResourceExhausted, kInternal with the reason, kFailedPrecondition if
  /// interrupted.
  Status Decode(std::span<const llama_token> tokens, uint32_t n_outputs);
  /// Logits of row i of the last Decode's outputs, i from 0. Valid until the next Decode.
  const float* Logits(uint32_t i) const;
  uint32_t n_past() const { return n_past_; }
  /// Removes all tokens from position `n_past` on, as llama.cpp's programs take tokens back. What
  /// has been evicted before stays evicted; Rewind(0) begins anew. Errors: kFailedPrecondition.
  Status Rewind(uint32_t n_past);

  /// What is held of the tokens so far, as bytes. In this process they restore everything,
  /// scores included, as long as no window has been packed or evicted.
  Result<std::vector<uint8_t>> Save() const;
  /// Puts `n_past` saved tokens into this empty context. Errors: kInternal with the reason.
  Status Restore(std::span<const uint8_t> saved, uint32_t n_past);

  /// What the next tokens are; no effect on the CPU device.
  Status SetPhase(qevict_phase phase);
  /// kFailedPrecondition on the CPU device.
  Result<qevict_stats> Stats() const;
  /// Writes the codec's statistics of what is held, see qevict_save_statistics.
  Status SaveStatistics(const std::string& path, uint64_t model_hash, uint32_t max_tokens) const;

 private:
  struct Free {
    void operator()(llama_context* context) const { llama_free(context); }
  };
  explicit Context(llama_context* context) : context_(context) {}
  std::unique_ptr<llama_context, Free> context_;
  uint64_t session_ = 0;  // 0: CPU
  uint32_t n_past_ = 0;
  uint32_t n_outputs_ = 0;
};

/// Makes the current and every later Decode stop (SIGINT handlers may call it).
void Interrupt();
bool Interrupted();

/// Starts libllama once per process: silent log, device QEVICT registered.
Status InitLlama(bool verbose);

}  // namespace qevict::cli
