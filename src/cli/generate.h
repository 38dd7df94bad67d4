// Reading a prompt and writing an answer, with the times that are reported.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/llm.h"
#include "cli/options.h"

namespace qevict::cli {

/// Sampling options under llama.cpp's names. Temperature 0 is greedy and the default, so that runs
/// can be repeated and compared.
struct Sampling {
  double temperature = 0.0, top_p = 0.95, min_p = 0.05, repeat_penalty = 1.0;
  int64_t top_k = 40, repeat_last_n = 64;
  int64_t seed = 0;  ///< -1 = another one each time
  bool ignore_eos = false;

  /// Returns the options.
  std::vector<CLI::Option*> Register(CLI::App& app);
};

struct FreeSampler {
  void operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }
};
using Sampler = std::unique_ptr<llama_sampler, FreeSampler>;
Sampler MakeSampler(const Model& model, const Sampling& sampling);

/// Feeds a prompt in batches of `n_batch` with progress on stderr; the last row's logits are
/// available afterwards.
Status ReadPrompt(Context& context, std::span<const llama_token> prompt, uint32_t n_batch,
                  const std::string& what);
/// The same without progress of its own; on_batch gets the tokens of each batch.
Status ReadPrompt(Context& context, std::span<const llama_token> prompt, uint32_t n_batch,
                  const std::function<void(size_t)>& on_batch);

/// What a run took and wrote.
struct Generation {
  std::vector<llama_token> tokens;
  double prompt_ms = 0;        ///< reading the prompt
  double ttft_ms = 0;          ///< start to first token
  std::vector<double> itl_ms;  ///< from each token to the next
  bool ended = false;          ///< the model ended the answer itself
  bool interrupted = false;

  double tpot_ms() const;  ///< mean of itl_ms; 0 if there is none
  double itl_quantile_ms(double q) const;
};

/// Called with each token; may print it.
using OnToken = std::function<void(llama_token)>;
/// Called once the prompt has been read; its time counts nowhere.
using OnPrompt = std::function<Status()>;

/// Prompt, then at most `n_predict` tokens. The token that ends the answer is not part of it.
/// Errors: those of Decode. An interrupt while answering ends the answer and is no error.
Result<Generation> Generate(const Model& model, Context& context, llama_sampler* sampler,
                            std::span<const llama_token> prompt, uint32_t n_predict,
                            uint32_t n_batch, const std::string& what, const OnToken& on_token,
                            const OnPrompt& on_prompt = nullptr);

}  // namespace qevict::cli
