// run --compare: the compressed cache beside the full one, on the same prompt.
//
// There are three runs:
//   1. compressed, answering freely: its text, TTFT, TPOT, bytes
//   2. full cache on llama.cpp's CPU backend, answering freely
//   3. compressed again, fed the tokens of 2 (teacher forcing): logits against logits
// 2 and 3 advance token by token in turns, so both speeds come from the same tokens and minutes.
// Where the prompt is compressed only when it has been read, 3 restores what 1 has read of it.
#include <cstdio>

#include "cli/eval/kld.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "cli/run.h"
#include "codecs/codec.h"
#include "kernels/attention.h"
#include "qevict/version.h"

namespace qevict::cli {
namespace {

/// Above this a prompt is read again rather than kept beside its cache.
constexpr uint64_t kMaxSavedBytes = uint64_t{1} << 30;

/// A prompt as run 1 has read it; empty if it must be read again.
struct SavedPrompt {
  std::vector<uint8_t> state;
  std::vector<float> logits;  ///< of its last token
};

/// Runs 2 and 3.
struct Lockstep {
  Generation full;
  std::vector<Position> positions;
  std::vector<double> forced_ms;  ///< per token of the forced run, beside full.itl_ms
  uint64_t f16_bytes = 0;         ///< of the tokens of 2
};

std::string BudgetName(const Config& config) {
  if (config.preset == Preset::kFull) return "full";
  const std::string name = std::string(PresetName(config.preset)) + " ";
  if (config.budget_bytes) return name + BytesText(config.budget_bytes);
  const double percent = 100.0 * config.budget_fraction;
  return name + FixedText(percent, percent == static_cast<int>(percent) ? 0 : 1) + "%";
}

std::span<const float> Row(const Model& model, const Context& context) {
  return {context.Logits(0), static_cast<size_t>(model.n_vocab())};
}

/// One token through a context; appends the time it took.
Status TimedStep(Context& context, llama_token token, std::vector<double>& times) {
  const Timer timer;
  QEVICT_RETURN_IF_ERROR(context.Decode({&token, 1}, 1));
  times.push_back(timer.ms());
  return {};
}

class Comparison {
 public:
  Comparison(const RunOptions& o, const Config& config, const Model& model, const Task& task)
      : o_(o), config_(config), model_(model), task_(task), options_(o.context_options()) {
    options_.n_ctx = task.n_ctx;
  }

  Status Run() {
    QEVICT_RETURN_IF_ERROR(FreeRun());
    const Result<Model> full_model = Model::Load(o_.model, Device::kCpu);
    if (!full_model.ok()) return full_model.status();
    Result<Context> full = Context::Create(*full_model, options_);
    if (!full.ok()) return full.status();
    Result<Context> forced = Context::Create(model_, options_, config_, task_.n_total());
    if (!forced.ok()) return forced.status();
    QEVICT_RETURN_IF_ERROR(ReadPrompts(*full, *forced));
    QEVICT_RETURN_IF_ERROR(Advance(*full_model, *full, *forced));
    const Result<qevict_stats> stats = forced->Stats();
    if (!stats.ok()) return stats.status();
    both_.f16_bytes = stats->f16_bytes;
    return {};
  }

  void Print() const {
    Metrics full = TimeMetrics(task_.prompt.size(), both_.full);
    for (Metric& m : FullCacheMetrics(both_.f16_bytes)) full.push_back(std::move(m));
    Metrics ours = TimeMetrics(task_.prompt.size(), free_);
    for (Metric& m : CacheMetrics(stats_)) ours.push_back(std::move(m));
    const Metrics agreement = AgreementMetrics();
    if (o_.format == Format::kJson) {
      PrintText(JsonText(Document(full, ours, agreement)) + "\n");
      return;
    }
    const Table runs = ToTable({{"full cache", full}, {BudgetName(config_), ours}});
    const Table difference = ToTable({{"difference", agreement}});
    if (o_.format == Format::kCsv) {
      PrintText(runs.ToCsv() + "\n" + difference.ToCsv());
    } else {
      std::fprintf(stderr, "\n%s\n%s", runs.ToMarkdown().c_str(), difference.ToMarkdown().c_str());
    }
  }

 private:
  void Title(const std::string& title) const {
    if (o_.format == Format::kMarkdown) PrintText("--- " + title + " ---\n");
  }
  void Show(llama_token token) const {
    if (o_.format == Format::kMarkdown) PrintText(model_.Piece(token));
  }
  void EndText() const {
    if (o_.format == Format::kMarkdown) PrintText("\n\n");
  }

  Status FreeRun() {
    Result<Context> context = Context::Create(model_, options_, config_, task_.n_total());
    if (!context.ok()) return context.status();
    const Sampler sampler = MakeSampler(model_, o_.sampling);
    Title(BudgetName(config_));
    Result<Generation> g = Generate(
        model_, *context, sampler.get(), task_.prompt, task_.n_predict, options_.n_batch,
        "compressed: reading the prompt", [this](llama_token token) { Show(token); },
        [this, &context] { return SavePrompt(*context); });
    EndText();
    if (!g.ok()) return g.status();
    if (g->interrupted) return FailedPrecondition("interrupted");
    free_ = std::move(*g);
    const Result<qevict_stats> stats = context->Stats();
    if (!stats.ok()) return stats.status();
    stats_ = *stats;
    return {};
  }

  Status SavePrompt(const Context& context) {
    const Result<qevict_stats> stats = context.Stats();
    if (!stats.ok()) return stats.status();
    const bool small = stats->f16_bytes <= kMaxSavedBytes;
    // A saved state lacks the queries' energy, and what a sliding window has left behind.
    const bool whole = !codecs::WantsQueryEnergy(config_) && llama_model_n_swa(model_.get()) == 0;
    if (!small || !whole || config_.EffectivePrefill() != Prefill::kFull) return {};
    Result<std::vector<uint8_t>> state = context.Save();
    if (!state.ok()) return state.status();
    const std::span<const float> row = Row(model_, context);
    saved_ = {std::move(*state), {row.begin(), row.end()}};
    return {};
  }

  Status ReadPrompts(Context& full, Context& forced) {
    const Timer timer;
    QEVICT_RETURN_IF_ERROR(
        ReadPrompt(full, task_.prompt, options_.n_batch, "full cache: reading the prompt"));
    both_.full.prompt_ms = timer.ms();
    if (!saved_.state.empty()) {
      QEVICT_RETURN_IF_ERROR(
          forced.Restore(saved_.state, static_cast<uint32_t>(task_.prompt.size())));
      saved_.state = {};
      return forced.SetPhase(QEVICT_PHASE_DECODE);
    }
    return ReadPrompt(forced, task_.prompt, options_.n_batch,
                      "compressed, second time: reading the prompt");
  }

  Status Advance(const Model& full_model, Context& full, Context& forced) {
    const Sampler sampler = MakeSampler(full_model, o_.sampling);
    Generation& g = both_.full;
    Title("full cache");
    for (;;) {
      const Timer timer;
      const llama_token token = llama_sampler_sample(sampler.get(), full.get(), -1);
      const double sample_ms = timer.ms();
      if (g.tokens.empty()) g.ttft_ms = g.prompt_ms + sample_ms;
      const bool restored = both_.positions.empty() && !saved_.logits.empty();
      const std::span<const float> row = restored ? saved_.logits : Row(model_, forced);
      both_.positions.push_back(ComparePosition(ReferenceRow(Row(full_model, full)), row, token));
      g.ended = llama_vocab_is_eog(full_model.vocab(), token);
      if (g.ended) break;
      g.tokens.push_back(token);
      Show(token);
      if (g.tokens.size() >= task_.n_predict) break;
      QEVICT_RETURN_IF_ERROR(TimedStep(full, token, g.itl_ms));
      g.itl_ms.back() += sample_ms;
      QEVICT_RETURN_IF_ERROR(TimedStep(forced, token, both_.forced_ms));
      both_.forced_ms.back() += sample_ms;
    }
    EndText();
    return {};
  }

  size_t CommonPrefix() const {
    size_t n = 0;
    while (n < free_.tokens.size() && n < both_.full.tokens.size() &&
           free_.tokens[n] == both_.full.tokens[n]) {
      ++n;
    }
    return n;
  }

  Metrics AgreementMetrics() const {
    const Agreement a = Summarize(both_.positions);
    Generation forced;
    forced.itl_ms = both_.forced_ms;
    const double full_ms = both_.full.tpot_ms(), forced_ms = forced.tpot_ms();
    const auto speed = [](double ms) { return FixedCell(ms > 0.0 ? 1000.0 / ms : 0.0, 2); };
    const bool same = free_.tokens == both_.full.tokens;
    Cell prefix = CountCell(CommonPrefix());
    if (same) prefix.text += " (all)";
    return {
        {"same_tokens", "tokens until the texts differ", prefix},
        {"positions", "positions compared (teacher-forced)", CountCell(a.n)},
        {"kl_mean", "mean KL(full || compressed), nats", FixedCell(a.kl_mean, 5)},
        {"kl_max", "largest KL, nats", FixedCell(a.kl_max, 4)},
        {"same_top_percent", "same top token", PercentCell(a.same_top_percent)},
        {"full_tokens_per_s", "decode tokens/s, full cache, same tokens", speed(full_ms)},
        {"compressed_tokens_per_s", "decode tokens/s, compressed, same tokens", speed(forced_ms)},
        {"speed_ratio", "compressed / full",
         FixedCell(forced_ms > 0.0 ? full_ms / forced_ms : 0.0, 2)},
        {"ttft_ratio", "TTFT, compressed / full",
         FixedCell(both_.full.ttft_ms > 0.0 ? free_.ttft_ms / both_.full.ttft_ms : 0.0, 2)},
    };
  }

  Json Document(const Metrics& full, const Metrics& ours, const Metrics& agreement) const {
    Json json = {{"command", "run --compare"},
                 {"version", QEVICT_VERSION_STRING},
                 {"model", o_.model},
                 {"config", ToText(config_)},
                 {"isa", kernels::IsaName(kernels::ActiveIsa())},
                 {"threads", o_.n_threads},
                 {"context_tokens", task_.n_ctx},
                 {"budget_tokens", task_.n_total()}};
    json["full"] = ToJson(full);
    json["full"]["text"] = model_.Text(both_.full.tokens);
    json["compressed"] = ToJson(ours);
    json["compressed"]["text"] = model_.Text(free_.tokens);
    json["agreement"] = ToJson(agreement);
    return json;
  }

  SavedPrompt saved_;
  const RunOptions& o_;
  const Config& config_;
  const Model& model_;
  const Task& task_;
  ContextOptions options_;
  Generation free_;  // run 1
  qevict_stats stats_{};
  Lockstep both_;  // runs 2 and 3
};

}  // namespace

int RunCompare(const RunOptions& options, const Config& config, const Model& model,
               const Task& task) {
  Comparison comparison(options, config, model, task);
  if (const Status status = comparison.Run(); !status.ok()) return Fail(status);
  comparison.Print();
  return kOk;
}

}  // namespace qevict::cli
