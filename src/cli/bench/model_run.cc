// How one pair is measured: both caches have read the same `depth` tokens. Each side is rewound to
// them by taking the tail back, decodes one token that is not timed, and then the test's tokens,
// which are the same in every repetition and on both sides. The sides change places from pair to
// pair. Nothing is restored from a saved state: what a policy has evicted stays so.
#include <algorithm>
#include <cmath>
#include <random>

#include "cli/bench/model.h"
#include "cli/eval/kld.h"
#include "cli/machine.h"
#include "cli/options.h"
#include "cli/progress.h"

namespace qevict::cli {
namespace {

constexpr uint32_t kCheckTokens = 8;
/// Between the CPU backend and itself with another attention, KL is 0.001 to 0.004.
constexpr double kAbsurdKl = 0.05;
constexpr uint32_t kTokenSeed = 1;

using Tokens = std::span<const llama_token>;
using Rows = std::vector<std::vector<float>>;

struct Sample {
  double ms = 0;
  std::vector<double> token_ms;
};

/// Pseudo-random tokens, as llama-bench takes them; the same in every run.
std::vector<llama_token> RandomTokens(const Model& model, size_t n) {
  std::mt19937 random(kTokenSeed);
  std::vector<llama_token> tokens(n);
  for (llama_token& token : tokens) {
    token = static_cast<llama_token>(random() % static_cast<uint32_t>(model.n_vocab()));
  }
  if (model.adds_bos()) tokens[0] = llama_vocab_bos(model.vocab());
  return tokens;
}

Result<std::vector<llama_token>> TextTokens(const Model& model, const std::string& file, size_t n) {
  const Result<std::string> text = ReadTextFile(file);
  if (!text.ok()) return text.status();
  Result<std::vector<llama_token>> tokens = model.Tokenize(*text, true, false);
  if (tokens.ok() && tokens->size() < n) {
    return InvalidArgument("file " + file + " has " + std::to_string(tokens->size()) +
                           " tokens, but the longest test needs " + std::to_string(n) +
                           ": lower -d, -p or -n");
  }
  return tokens;
}

std::string CacheName(const CacheChoice& c) {
  return c.policy + (c.budget.empty() ? "" : " at " + c.budget);
}

class ModelBench {
 public:
  explicit ModelBench(const ModelBenchPlan& plan) : plan_(plan) {}

  Result<std::vector<ModelRow>> Run(ModelFacts& facts) {
    Result<Model> cpu = Model::Load(plan_.model, Device::kCpu);
    if (!cpu.ok()) return cpu.status();
    Result<Model> ours = Model::Load(plan_.model, Device::kQEvict);
    if (!ours.ok()) return ours.status();
    facts = FactsOf(*cpu);
    uint32_t n_longest = 0;
    for (const uint32_t depth : plan_.depths) n_longest = std::max(n_longest, ContextTokens(depth));
    auto tokens = plan_.file.empty() ? RandomTokens(*cpu, n_longest)
                                     : TextTokens(*cpu, plan_.file, n_longest);
    if (!tokens.ok()) return tokens.status();
    tokens_ = std::move(*tokens);
    QEVICT_RETURN_IF_ERROR(TryBudgets(*ours));
    Progress progress("", TotalTokens());
    progress_ = &progress;
    for (const uint32_t depth : plan_.depths) {
      QEVICT_RETURN_IF_ERROR(RunDepth(*cpu, *ours, depth));
    }
    return std::move(rows_);
  }

 private:
  static ModelFacts FactsOf(const Model& model) {
    char text[256] = {};
    llama_model_desc(model.get(), text, sizeof(text));
    return {text, llama_model_size(model.get()), llama_model_n_params(model.get())};
  }

  static uint32_t Largest(std::span<const uint32_t> counts) {
    return counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
  }

  /// Tokens that a cache holds when the check begins: the depth, or a test's prompt.
  uint32_t CheckedPrompt(uint32_t depth) const { return depth ? depth : Largest(plan_.prompts); }

  /// Most tokens of a context: the longest test behind its warm-up token, or the check.
  uint32_t ContextTokens(uint32_t depth) const {
    const uint32_t n_test = 1 + std::max(Largest(plan_.prompts), Largest(plan_.generations));
    return std::max(depth + n_test, CheckedPrompt(depth) + kCheckTokens);
  }

  /// What a share of the f16 cache is a share of: prompt and answer, as `qevict run` counts.
  uint32_t BudgetTokens(uint32_t depth) const {
    const uint32_t n_gen = Largest(plan_.generations), n_prompt = Largest(plan_.prompts);
    return depth + (depth && n_gen ? n_gen : std::max(n_gen, n_prompt));
  }

  ContextOptions OptionsAt(uint32_t depth) const {
    ContextOptions options = plan_.context;
    options.n_ctx = ContextCells(ContextTokens(depth));
    return options;
  }

  uint64_t TotalTokens() const {
    uint64_t total = 0;
    for (const uint32_t depth : plan_.depths) {
      total += (1 + plan_.caches.size()) * (CheckedPrompt(depth) + kCheckTokens);
      for (const ModelTest& test : TestsAt(depth, plan_.prompts, plan_.generations)) {
        total += uint64_t{2} * plan_.caches.size() * plan_.n_repetitions * (test.n_tokens() + 1);
      }
    }
    return total;
  }

  void Advance(size_t n) {
    n_done_ += n;
    progress_->Update(n_done_);
  }

  Result<Context> MakeCache(const Model& ours, const CacheChoice& c, uint32_t depth) const {
    return Context::Create(ours, OptionsAt(depth), c.config, BudgetTokens(depth));
  }

  static Status Named(const CacheChoice& c, uint32_t depth, const Status& status) {
    if (status.ok()) return status;
    return {status.code(),
            CacheName(c) + ", depth " + std::to_string(depth) + ": " + status.message()};
  }

  /// Whether every cache can be made, before a long prompt is read.
  Status TryBudgets(const Model& ours) const {
    for (const uint32_t depth : plan_.depths) {
      for (const CacheChoice& c : plan_.caches) {
        Result<Context> context = MakeCache(ours, c, depth);
        const Status status =
            context.ok() ? context->Decode({tokens_.data(), 1}, 1) : context.status();
        QEVICT_RETURN_IF_ERROR(Named(c, depth, status));
      }
    }
    return {};
  }

  Status ReadTokens(Context& context, Tokens tokens, bool show) {
    for (size_t at = 0; at < tokens.size();) {
      const size_t n = std::min<size_t>(plan_.context.n_batch, tokens.size() - at);
      QEVICT_RETURN_IF_ERROR(context.Decode(tokens.subspan(at, n), 1));
      at += n;
      if (show) Advance(n);  // never inside of what is timed
    }
    return {};
  }

  Tokens Range(size_t begin, size_t n) const { return Tokens(tokens_).subspan(begin, n); }

  /// Reads the prompt and decodes a few tokens; their logits. Leaves `depth` tokens.
  Status ReadAndCheck(Context& context, const Model& model, uint32_t depth, Rows& logits) {
    const uint32_t n_prompt = CheckedPrompt(depth);
    QEVICT_RETURN_IF_ERROR(context.SetPhase(QEVICT_PHASE_PROMPT));
    QEVICT_RETURN_IF_ERROR(ReadTokens(context, Range(0, n_prompt), true));
    QEVICT_RETURN_IF_ERROR(context.SetPhase(QEVICT_PHASE_DECODE));
    for (uint32_t i = 0; i < kCheckTokens; ++i) {
      QEVICT_RETURN_IF_ERROR(context.Decode(Range(n_prompt + i, 1), 1));
      const float* row = context.Logits(0);
      logits.emplace_back(row, row + model.n_vocab());
      Advance(1);
    }
    return context.Rewind(depth);
  }

  static double MeanKl(const Rows& base, const Rows& run) {
    double sum = 0.0;
    for (size_t i = 0; i < base.size(); ++i)
      sum += ComparePosition(ReferenceRow(base[i]), run[i], 0).kl;
    return sum / static_cast<double>(base.size());
  }

  static Status JudgeKl(const CacheChoice& c, double kl) {
    const bool full = c.config.preset == Preset::kFull;
    if (std::isfinite(kl) && (!full || kl <= kAbsurdKl)) return {};
    return Internal("its logits differ from the CPU backend's by a mean KL of " +
                    std::to_string(kl) + " nats" +
                    (full ? ", but at most " + std::to_string(kAbsurdKl) + " is rounding" : "") +
                    ": nothing was timed");
  }

  Status WarmUp(Context& context, const ModelTest& test) const {
    QEVICT_RETURN_IF_ERROR(context.Rewind(test.depth));
    const bool prompt = test.n_prompt && test.depth == 0;
    QEVICT_RETURN_IF_ERROR(context.SetPhase(prompt ? QEVICT_PHASE_PROMPT : QEVICT_PHASE_DECODE));
    QEVICT_RETURN_IF_ERROR(context.Decode(Range(test.depth, 1), 1));
    if (!test.n_prompt) return {};
    // Prompts begin where llama-bench's do: one token later they would fill another 256 cells.
    QEVICT_RETURN_IF_ERROR(context.Rewind(test.depth));
    return context.SetPhase(QEVICT_PHASE_PROMPT);
  }

  Result<Sample> Measure(Context& context, const ModelTest& test) {
    QEVICT_RETURN_IF_ERROR(WarmUp(context, test));
    Sample sample;
    const Timer timer;
    if (test.n_prompt) {
      QEVICT_RETURN_IF_ERROR(ReadTokens(context, Range(test.depth, test.n_prompt), false));
    }
    for (uint32_t i = 0; i < test.n_gen; ++i) {
      const Timer token;
      QEVICT_RETURN_IF_ERROR(context.Decode(Range(test.depth + 1 + i, 1), 1));
      sample.token_ms.push_back(token.ms());
    }
    sample.ms = timer.ms();
    Advance(test.n_tokens() + 1);
    return sample;
  }

  Status MeasureInto(Context& context, ModelRow& row) {
    const Result<Sample> sample = Measure(context, row.test);
    if (!sample.ok()) return sample.status();
    row.ms.push_back(sample->ms);
    row.token_ms.insert(row.token_ms.end(), sample->token_ms.begin(), sample->token_ms.end());
    row.peak_rss_bytes = PeakRssBytes();
    return {};
  }

  static double UpkeepMs(const qevict_stats& s) {
    return static_cast<double>(s.route_ns + s.score_ns + s.mask_ns + s.write_ns) / 1e6;
  }

  /// All repetitions of one test on the CPU backend and on one cache.
  Status MeasurePairs(Context& cpu, ModelRow& cpu_row, Context& ours, ModelRow& row) {
    const size_t first = cpu_row.ms.size();
    const Result<qevict_stats> before = ours.Stats();
    if (!before.ok()) return before.status();
    for (uint32_t r = 0; r < plan_.n_repetitions; ++r) {
      const bool cpu_first = r % 2 == 0;
      if (cpu_first) QEVICT_RETURN_IF_ERROR(MeasureInto(cpu, cpu_row));
      QEVICT_RETURN_IF_ERROR(MeasureInto(ours, row));
      if (!cpu_first) QEVICT_RETURN_IF_ERROR(MeasureInto(cpu, cpu_row));
    }
    row.ratios = Ratios(std::span<const double>(cpu_row.ms).subspan(first), row.ms);
    const Result<qevict_stats> stats = ours.Stats();
    if (!stats.ok()) return stats.status();
    row.stats = *stats;
    if (row.test.n_gen != 0) {
      const double n_tokens = 1.0 * plan_.n_repetitions * (row.test.n_gen + 1);  // and a warm-up
      row.upkeep_ms = (UpkeepMs(*stats) - UpkeepMs(*before)) / n_tokens;
    }
    return {};
  }

  /// One cache at one depth: appends a row per test, in the order of `cpu_rows`.
  Status RunCache(const Model& model, const CacheChoice& c, uint32_t depth, const Rows& reference,
                  Context& cpu, std::vector<ModelRow>& cpu_rows, std::vector<ModelRow>& rows) {
    Result<Context> context = MakeCache(model, c, depth);
    if (!context.ok()) return context.status();
    progress_->SetWhat(CacheName(c) + ", prompt");
    Rows logits;
    QEVICT_RETURN_IF_ERROR(ReadAndCheck(*context, model, depth, logits));
    const double kl = MeanKl(reference, logits);
    QEVICT_RETURN_IF_ERROR(JudgeKl(c, kl));
    const size_t first = rows.size();
    for (const ModelRow& cpu_row : cpu_rows) {
      rows.push_back({});
      rows.back().cache = &c;
      rows.back().test = cpu_row.test;
      rows.back().kl = kl;
    }
    // Generation first: what it removes is less, so the cache holds the depth and little else.
    for (size_t i = cpu_rows.size(); i-- > 0;) {
      progress_->SetWhat(CacheName(c) + ", " + cpu_rows[i].test.Name());
      QEVICT_RETURN_IF_ERROR(MeasurePairs(cpu, cpu_rows[i], *context, rows[first + i]));
    }
    return {};
  }

  Status RunDepth(const Model& cpu, const Model& ours, uint32_t depth) {
    std::vector<ModelRow> cpu_rows, rows;
    for (const ModelTest& test : TestsAt(depth, plan_.prompts, plan_.generations)) {
      cpu_rows.push_back({});
      cpu_rows.back().test = test;
    }
    Result<Context> context = Context::Create(cpu, OptionsAt(depth));
    if (!context.ok()) return context.status();
    progress_->SetWhat("CPU backend, prompt");
    Rows reference;
    QEVICT_RETURN_IF_ERROR(ReadAndCheck(*context, cpu, depth, reference));
    for (const CacheChoice& c : plan_.caches) {
      QEVICT_RETURN_IF_ERROR(
          Named(c, depth, RunCache(ours, c, depth, reference, *context, cpu_rows, rows)));
    }
    const size_t n_tests = cpu_rows.size();
    for (size_t t = 0; t < n_tests; ++t) {
      rows_.push_back(std::move(cpu_rows[t]));
      for (size_t i = t; i < rows.size(); i += n_tests) rows_.push_back(std::move(rows[i]));
    }
    return {};
  }

  const ModelBenchPlan& plan_;
  std::vector<llama_token> tokens_;
  std::vector<ModelRow> rows_;
  Progress* progress_ = nullptr;
  uint64_t n_done_ = 0;
};

}  // namespace

Result<std::vector<ModelRow>> RunModelBench(const ModelBenchPlan& plan, ModelFacts& facts) {
  return ModelBench(plan).Run(facts);
}

}  // namespace qevict::cli
