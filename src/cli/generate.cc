#include "cli/generate.h"

#include <algorithm>
#include <numeric>

#include "cli/progress.h"
#include "cli/quantile.h"

namespace qevict::cli {
namespace {

constexpr const char* kGroup = "Sampling";

}  // namespace

std::vector<CLI::Option*> Sampling::Register(CLI::App& app) {
  const std::vector<CLI::Option*> options = {
      AddReal(app, "--temp", temperature, 0.0, 100.0, "temperature; 0 = greedy, repeatable"),
      AddInteger(app, "--top-k", top_k, 0, INT32_MAX, "keep the k likeliest tokens; 0 = all"),
      AddReal(app, "--top-p", top_p, 0.0, 1.0,
              "keep tokens up to this probability together; 1 = all"),
      AddReal(app, "--min-p", min_p, 0.0, 1.0,
              "drop tokens below this share of the best one; 0 = none"),
      AddReal(app, "--repeat-penalty", repeat_penalty, 0.01, 100.0,
              "penalty of repeated tokens; 1 = none"),
      AddInteger(app, "--repeat-last-n", repeat_last_n, 0, 1 << 20,
                 "tokens that the penalty looks at"),
      AddInteger(app, "-s,--seed", seed, -1, UINT32_MAX - 1,
                 "random seed; -1 = another one each time"),
      AddFlag(app, "--ignore-eos", ignore_eos, "never end the answer before -n tokens"),
  };
  for (CLI::Option* option : options) option->group(kGroup);
  return options;
}

Sampler MakeSampler(const Model& model, const Sampling& s) {
  llama_sampler* chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
  if (s.ignore_eos) {
    std::vector<llama_logit_bias> bias;
    for (llama_token t = 0; t < model.n_vocab(); ++t) {
      if (llama_vocab_is_eog(model.vocab(), t)) bias.push_back({t, -INFINITY});
    }
    llama_sampler_chain_add(
        chain, llama_sampler_init_logit_bias(model.n_vocab(), static_cast<int32_t>(bias.size()),
                                             bias.data()));
  }
  if (s.repeat_penalty != 1.0 && s.repeat_last_n > 0) {
    llama_sampler_chain_add(
        chain, llama_sampler_init_penalties(model.n_vocab(), static_cast<int32_t>(s.repeat_last_n),
                                            static_cast<float>(s.repeat_penalty), 0.0f, 0.0f));
  }
  if (s.temperature == 0.0) {
    llama_sampler_chain_add(chain, llama_sampler_init_greedy());
    return Sampler(chain);
  }
  if (s.top_k > 0) {
    llama_sampler_chain_add(chain, llama_sampler_init_top_k(static_cast<int32_t>(s.top_k)));
  }
  if (s.top_p < 1.0) {
    llama_sampler_chain_add(chain, llama_sampler_init_top_p(static_cast<float>(s.top_p), 1));
  }
  if (s.min_p > 0.0) {
    llama_sampler_chain_add(chain, llama_sampler_init_min_p(static_cast<float>(s.min_p), 1));
  }
  llama_sampler_chain_add(chain, llama_sampler_init_temp(static_cast<float>(s.temperature)));
  llama_sampler_chain_add(
      chain,
      llama_sampler_init_dist(s.seed < 0 ? LLAMA_DEFAULT_SEED : static_cast<uint32_t>(s.seed)));
  return Sampler(chain);
}

Status ReadPrompt(Context& context, std::span<const llama_token> prompt, uint32_t n_batch,
                  const std::function<void(size_t)>& on_batch) {
  QEVICT_RETURN_IF_ERROR(context.SetPhase(QEVICT_PHASE_PROMPT));
  for (size_t at = 0; at < prompt.size(); at += n_batch) {
    const size_t n = std::min<size_t>(n_batch, prompt.size() - at);
    const bool last = at + n == prompt.size();
    QEVICT_RETURN_IF_ERROR(context.Decode(prompt.subspan(at, n), last ? 1 : 0));
    on_batch(n);
  }
  return context.SetPhase(QEVICT_PHASE_DECODE);
}

Status ReadPrompt(Context& context, std::span<const llama_token> prompt, uint32_t n_batch,
                  const std::string& what) {
  Progress progress(what, prompt.size());
  uint64_t n_done = 0;
  return ReadPrompt(context, prompt, n_batch, [&](size_t n) { progress.Update(n_done += n); });
}

double Generation::tpot_ms() const {
  if (itl_ms.empty()) return 0.0;
  return std::accumulate(itl_ms.begin(), itl_ms.end(), 0.0) / static_cast<double>(itl_ms.size());
}

double Generation::itl_quantile_ms(double q) const { return QuantileOf(itl_ms, q); }

Result<Generation> Generate(const Model& model, Context& context, llama_sampler* sampler,
                            std::span<const llama_token> prompt, uint32_t n_predict,
                            uint32_t n_batch, const std::string& what, const OnToken& on_token,
                            const OnPrompt& on_prompt) {
  Generation g;
  const Timer timer;
  QEVICT_RETURN_IF_ERROR(ReadPrompt(context, prompt, n_batch, what));
  g.prompt_ms = timer.ms();
  if (on_prompt) QEVICT_RETURN_IF_ERROR(on_prompt());
  const double pause_ms = timer.ms() - g.prompt_ms;
  double last_ms = 0.0;
  while (!g.interrupted) {
    const llama_token token = llama_sampler_sample(sampler, context.get(), -1);
    const double now_ms = timer.ms() - pause_ms;
    if (g.tokens.empty()) {
      g.ttft_ms = now_ms;
    } else {
      g.itl_ms.push_back(now_ms - last_ms);
    }
    last_ms = now_ms;
    if (llama_vocab_is_eog(model.vocab(), token)) {
      g.ended = true;
      break;
    }
    g.tokens.push_back(token);
    on_token(token);
    if (g.tokens.size() >= n_predict) break;
    const Status status = context.Decode({&token, 1}, 1);
    g.interrupted = Interrupted();
    if (!status.ok() && !g.interrupted) return status;
  }
  return g;
}

}  // namespace qevict::cli
