#include "cli/llm.h"

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>

#include "cli/log.h"

namespace qevict::cli {
namespace {

std::atomic<bool> interrupted{false};

bool StopCompute(void*) { return interrupted.load(std::memory_order_relaxed); }

Result<ggml_backend_dev_t> QEvictDevice() {
  ggml_backend_reg_t reg = qevict_backend_reg();
  if (!reg) return Internal(qevict_last_error());
  return ggml_backend_reg_dev_get(reg, 0);
}

/// Why creating or using a cache failed. A budget that is too small is for the user to correct.
Status CacheFailure(StatusCode code, const std::string& what) {
  const std::string why = WhyFailed(what);
  const auto starts = [&why](std::string_view text) { return why.starts_with(text); };
  const bool budget = starts("budget ") || starts("a budget of ") || starts("the budget of ") ||
                      starts("bad configuration") || starts("the statistics in ");
  const bool refused = why.find("not support") != std::string::npos;  // the model or its shape
  if (refused) return {StatusCode::kUnimplemented, why};
  return {budget ? StatusCode::kInvalidArgument : code, why};
}

/// One row per token, of sequence 0.
class Batch {
 public:
  Batch(std::span<const llama_token> tokens, uint32_t first_pos, uint32_t n_outputs)
      : batch_(llama_batch_init(static_cast<int32_t>(tokens.size()), 0, 1)) {
    const size_t n = tokens.size();
    batch_.n_tokens = static_cast<int32_t>(n);
    for (size_t i = 0; i < n; ++i) {
      batch_.token[i] = tokens[i];
      batch_.pos[i] = static_cast<llama_pos>(first_pos + i);
      batch_.n_seq_id[i] = 1;
      batch_.seq_id[i][0] = 0;
      batch_.logits[i] = n - i <= n_outputs;
    }
  }
  ~Batch() { llama_batch_free(batch_); }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  const llama_batch& get() const { return batch_; }

 private:
  llama_batch batch_;
};

}  // namespace

void Interrupt() { interrupted.store(true, std::memory_order_relaxed); }
bool Interrupted() { return interrupted.load(std::memory_order_relaxed); }

Status InitLlama(bool verbose) {
  CaptureLog(verbose);
  llama_backend_init();
  ggml_backend_reg_t reg = qevict_backend_reg();
  if (!reg) return Internal(qevict_last_error());
  ggml_backend_register(reg);
  return {};
}

// --- Model
// -----------------------------------------------------------------------------------------

Result<Model> Model::Load(const std::string& path, Device device) {
  ggml_backend_dev_t devices[2] = {nullptr, nullptr};
  llama_model_params params = llama_model_default_params();
  if (device == Device::kQEvict) {
    const Result<ggml_backend_dev_t> dev = QEvictDevice();
    if (!dev.ok()) return dev.status();
    devices[0] = *dev;
    params.n_gpu_layers = 99999;  // all: a layer's cache is where its layer is
  }
  params.devices = devices;
  ForgetErrors();
  llama_model* model = llama_model_load_from_file(path.c_str(), params);
  if (!model) return FailedPrecondition(WhyFailed("model file " + path + " cannot be loaded"));
  return Model(model, device);
}

uint32_t Model::n_ctx_train() const {
  return static_cast<uint32_t>(std::max(1, llama_model_n_ctx_train(model_.get())));
}

Result<std::vector<llama_token>> Model::Tokenize(const std::string& text, bool add_special,
                                                 bool parse_special) const {
  if (text.size() > INT32_MAX) {
    return InvalidArgument("a text of " + std::to_string(text.size()) +
                           " bytes is too long: the limit is " + std::to_string(INT32_MAX));
  }
  std::vector<llama_token> tokens(text.size() + 8);
  const auto length = static_cast<int32_t>(text.size());
  int32_t n = llama_tokenize(vocab(), text.data(), length, tokens.data(),
                             static_cast<int32_t>(tokens.size()), add_special, parse_special);
  if (n < 0 && n != INT32_MIN) {
    tokens.resize(static_cast<size_t>(-n));
    n = llama_tokenize(vocab(), text.data(), length, tokens.data(),
                       static_cast<int32_t>(tokens.size()), add_special, parse_special);
  }
  if (n < 0) return FailedPrecondition("the model's vocabulary cannot encode the text");
  tokens.resize(static_cast<size_t>(n));
  return tokens;
}

std::string Model::Piece(llama_token token) const {
  std::string piece(32, '\0');
  int32_t n = llama_token_to_piece(vocab(), token, piece.data(), static_cast<int32_t>(piece.size()),
                                   0, false);
  if (n < 0) {
    piece.resize(static_cast<size_t>(-n));
    n = llama_token_to_piece(vocab(), token, piece.data(), static_cast<int32_t>(piece.size()), 0,
                             false);
  }
  piece.resize(static_cast<size_t>(std::max(n, 0)));
  return piece;
}

std::string Model::Text(std::span<const llama_token> tokens) const {
  std::string text;
  for (const llama_token token : tokens) text += Piece(token);
  return text;
}

bool Model::has_chat_template() const {
  return llama_model_chat_template(model_.get(), nullptr) != nullptr;
}

Result<std::string> Model::ApplyChatTemplate(const std::string& system,
                                             const std::string& user) const {
  std::vector<llama_chat_message> messages;
  if (!system.empty()) messages.push_back({"system", system.c_str()});
  messages.push_back({"user", user.c_str()});
  const char* text = llama_model_chat_template(model_.get(), nullptr);
  std::string prompt(2 * (system.size() + user.size()) + 256, '\0');
  int32_t n = 0;
  for (int attempt = 0; attempt < 2; ++attempt) {
    n = llama_chat_apply_template(text, messages.data(), messages.size(), true, prompt.data(),
                                  static_cast<int32_t>(prompt.size()));
    if (n < 0) return Unimplemented("libllama does not know the chat template of this model");
    if (static_cast<size_t>(n) <= prompt.size()) break;
    prompt.resize(static_cast<size_t>(n));
  }
  prompt.resize(static_cast<size_t>(n));
  return prompt;
}

// --- Context
// ---------------------------------------------------------------------------------------

Result<Context> Context::Create(const Model& model, const ContextOptions& options,
                                const Config& config, uint32_t budget_tokens) {
  const bool ours = model.device() == Device::kQEvict;
  if (ours && qevict_configure(ToText(config).c_str()) != 0) {
    return InvalidArgument(qevict_last_error());
  }
  llama_context_params params = llama_context_default_params();
  params.n_ctx = options.n_ctx;
  params.n_batch = options.n_batch;
  params.n_ubatch = options.n_ubatch;
  params.n_outputs_max = std::max(1u, options.n_outputs);
  params.n_outputs_max_per_seq = params.n_outputs_max;
  params.n_threads = params.n_threads_batch = options.n_threads;
  params.flash_attn_type =
      options.flash_attention ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
  params.type_k = params.type_v = GGML_TYPE_F16;
  params.offload_kqv = true;
  params.swa_full = false;  // as llama.cpp's programs
  params.abort_callback = StopCompute;
  ForgetErrors();
  llama_context* made = llama_init_from_model(model.get(), params);
  if (!made) return CacheFailure(StatusCode::kFailedPrecondition, "the context cannot be created");
  Context context(made);
  if (!ours) return context;

  context.session_ = qevict_last_session();
  qevict_stats stats{};
  if (qevict_get_stats(context.session_, &stats) != 0 || stats.n_layers == 0) {
    return FailedPrecondition("llama.cpp put no layer's cache on the device QEVICT");
  }
  if (budget_tokens && !config.budget_tokens &&
      qevict_set_budget_tokens(context.session_, budget_tokens) != 0) {
    return InvalidArgument(qevict_last_error());
  }
  return context;
}

Status Context::Decode(std::span<const llama_token> tokens, uint32_t n_outputs) {
  const llama_model* model = llama_get_model(context_.get());
  const auto n_positions = static_cast<uint32_t>(std::max(llama_model_n_ctx_train(model), 0));
  if (llama_model_rope_type(model) == LLAMA_ROPE_TYPE_NONE &&
      n_past_ + tokens.size() > n_positions) {
    return InvalidArgument(std::to_string(n_past_ + tokens.size()) + " tokens are more than the " +
                           std::to_string(n_positions) + " positions that this model has learned");
  }
  if (tokens.empty()) return InvalidArgument("no tokens to decode");
  ForgetErrors();
  n_outputs_ = std::min<uint32_t>(n_outputs, static_cast<uint32_t>(tokens.size()));
  const Batch batch(tokens, n_past_, n_outputs_);
  const int32_t rc = llama_decode(context_.get(), batch.get());
  if (rc == 0) {
    llama_synchronize(context_.get());
    n_past_ += static_cast<uint32_t>(tokens.size());
    return {};
  }
  if (rc == 2 || Interrupted()) return FailedPrecondition("interrupted");
  if (rc == 1) {
    return ResourceExhausted("the context of " + std::to_string(n_ctx()) +
                             " tokens is full after " + std::to_string(n_past_));
  }
  return CacheFailure(StatusCode::kInternal, "decoding " + std::to_string(tokens.size()) +
                                                 " tokens at position " + std::to_string(n_past_) +
                                                 " failed");
}

const float* Context::Logits(uint32_t i) const {
  return llama_get_logits_ith(context_.get(),
                              static_cast<int32_t>(i) - static_cast<int32_t>(n_outputs_));
}

Status Context::Rewind(uint32_t n_past) {
  llama_memory_t memory = llama_get_memory(context_.get());
  if (n_past == 0) {
    llama_memory_clear(memory, true);
  } else if (!llama_memory_seq_rm(memory, 0, static_cast<llama_pos>(n_past), -1)) {
    return FailedPrecondition("the cache of this model cannot take back tokens from position " +
                              std::to_string(n_past) + " on");
  }
  n_past_ = n_past;
  return {};
}

Result<std::vector<uint8_t>> Context::Save() const {
  ForgetErrors();
  std::vector<uint8_t> bytes(llama_state_seq_get_size(context_.get(), 0));
  const size_t n = llama_state_seq_get_data(context_.get(), bytes.data(), bytes.size(), 0);
  if (n == 0) return CacheFailure(StatusCode::kInternal, "saving the prompt failed");
  bytes.resize(n);
  return bytes;
}

Status Context::Restore(std::span<const uint8_t> saved, uint32_t n_past) {
  ForgetErrors();
  if (llama_state_seq_set_data(context_.get(), saved.data(), saved.size(), 0) != saved.size()) {
    return CacheFailure(StatusCode::kInternal, "restoring the prompt failed");
  }
  n_past_ = n_past;
  return {};
}

Status Context::SetPhase(qevict_phase phase) {
  if (session_ == 0 || qevict_set_phase(session_, phase) == 0) return {};
  return Internal(qevict_last_error());
}

Status Context::SaveStatistics(const std::string& path, uint64_t model_hash,
                               uint32_t max_tokens) const {
  if (session_ == 0) return FailedPrecondition("the cache is not on the device QEVICT");
  const int code = qevict_save_statistics(session_, path.c_str(), model_hash, max_tokens);
  if (code == 0) return {};
  return {static_cast<StatusCode>(-code), qevict_last_error()};
}

Result<qevict_stats> Context::Stats() const {
  if (session_ == 0) return FailedPrecondition("the cache is not on the device QEVICT");
  qevict_stats stats{};
  if (qevict_get_stats(session_, &stats) != 0) return Internal(qevict_last_error());
  return stats;
}

}  // namespace qevict::cli
