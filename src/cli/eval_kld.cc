// qevict eval kld: how far a compressed cache is from the full one, logit by logit.
//
// Per chunk of raw text: the full cache reads the prompt and is fed the scored tokens; then each
// compressed cache does the same, and its logits are compared with the reference's, position by
// position. The prompt is compressed before the first scored token, as in generation; until then
// it is the same under every budget, so it is read once and restored. A step of R
// tokens gives the same logits as single tokens as long as decisions are R tokens apart or more:
// tiers change only between steps.
#include <cstdio>
#include <optional>

#include "cli/cache_choice.h"
#include "cli/commands.h"
#include "cli/kld.h"
#include "cli/llm.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "cli/run.h"
#include "kernels/attention.h"
#include "qevict/version.h"

namespace qevict::cli {
namespace {

constexpr const char* kInput = "Input";

struct KldOptions {
  std::string model, file;
  std::string reference = "fa";
  int64_t n_chunks = 8, n_prompt = 3072, n_score = 1024, n_step = 0, n_batch = 512, n_threads = 0;
  bool floor = false, verbose = false;
  Format format = Format::kMarkdown;
  CacheListOptions caches{"qevict", "100%,40%,20%,10%,5%"};
};

/// One row of the table: a compressed cache, or the CPU backend without flash attention ("floor").
struct Contender {
  std::string policy, budget;
  std::optional<Config> config;  // none: floor
  std::vector<Position> positions;
  qevict_stats sum{};  // over chunks
  double share_sum = 0.0;
};

/// "floor" first, then the caches.
Result<std::vector<Contender>> MakeContenders(const KldOptions& o) {
  std::vector<Contender> contenders;
  if (o.floor) contenders.push_back({"floor", "", std::nullopt, {}, {}, 0.0});
  const Result<std::vector<CacheChoice>> choices = o.caches.Build();
  if (!choices.ok()) return choices.status();
  for (const CacheChoice& c : *choices) {
    contenders.push_back({c.policy, c.budget, c.config, {}, {}, 0.0});
  }
  return contenders;
}

/// True if the prompt is held alike whatever the budget is: it is compressed when it has been read.
bool SharesPrompt(const Contender& c) {
  return c.config && c.config->EffectivePrefill() == Prefill::kFull;
}

/// The configuration that a prompt is read with, as far as what is held of it depends on it.
std::string PromptKey(const Contender& c) {
  Config config = *c.config;
  config.budget_fraction = 1.0;
  config.budget_bytes = 0;
  return ToText(config);
}

/// Logits of the scored positions of one chunk.
class Logits {
 public:
  Logits(size_t n_positions, size_t n_vocab) : n_vocab_(n_vocab), values_(n_positions * n_vocab) {}
  std::span<float> Row(size_t i) { return {values_.data() + i * n_vocab_, n_vocab_}; }

 private:
  size_t n_vocab_;
  std::vector<float> values_;
};

class KldRun {
 public:
  KldRun(const KldOptions& o, std::vector<Contender> contenders, uint32_t n_step)
      : o_(o), contenders_(std::move(contenders)), n_step_(n_step) {
    options_.n_ctx = static_cast<uint32_t>((ChunkTokens() + 255) / 256 * 256);
    options_.n_batch = options_.n_ubatch = static_cast<uint32_t>(o.n_batch);
    options_.n_outputs = n_step;
    options_.n_threads = static_cast<int>(o.n_threads);
  }

  Status Run(const std::string& text) {
    Result<Model> cpu = Model::Load(o_.model, Device::kCpu);
    if (!cpu.ok()) return cpu.status();
    Result<Model> ours = Model::Load(o_.model, Device::kQEvict);
    if (!ours.ok()) return ours.status();
    Result<std::vector<llama_token>> tokens = cpu->Tokenize(text, true, false);
    if (!tokens.ok()) return tokens.status();
    const uint64_t needed = static_cast<uint64_t>(o_.n_chunks) * ChunkTokens() + 1;
    if (tokens->size() < needed) {
      return InvalidArgument("file " + o_.file + " has " + std::to_string(tokens->size()) +
                             " tokens, but " + std::to_string(o_.n_chunks) + " chunks of " +
                             std::to_string(ChunkTokens()) + " tokens need " +
                             std::to_string(needed) + ": lower --chunks, --prompt or --score");
    }
    QEVICT_RETURN_IF_ERROR(TryBudgets(*ours, (*tokens)[0]));
    progress_.emplace("", TotalTokens());
    Logits reference(static_cast<size_t>(o_.n_score), static_cast<size_t>(cpu->n_vocab()));
    for (size_t c = 0; c < static_cast<size_t>(o_.n_chunks); ++c) {
      std::span<const llama_token> all(*tokens);
      QEVICT_RETURN_IF_ERROR(
          RunChunk(*cpu, *ours, c, all.subspan(c * ChunkTokens(), ChunkTokens() + 1), reference));
    }
    progress_->Finish();
    return {};
  }

  void Print() const {
    if (o_.format == Format::kJson) {
      for (const Contender& c : contenders_) {
        Json line = ResultOf(c, c.positions, c.sum, static_cast<double>(o_.n_chunks));
        line["type"] = "summary";
        PrintText(JsonLine(line) + "\n");
      }
      return;
    }
    const Table table = MakeTable();
    PrintText(o_.format == Format::kCsv ? table.ToCsv() : table.ToMarkdown());
  }

 private:
  size_t ChunkTokens() const { return static_cast<size_t>(o_.n_prompt + o_.n_score); }
  uint64_t TotalTokens() const {
    const auto n_prompt = static_cast<uint64_t>(o_.n_prompt);
    uint64_t per_chunk = ChunkTokens() * (contenders_.size() + 1);
    for (size_t i = 1; i < contenders_.size(); ++i) {
      const Contender &before = contenders_[i - 1], &c = contenders_[i];
      if (SharesPrompt(before) && SharesPrompt(c) && PromptKey(before) == PromptKey(c)) {
        per_chunk -= n_prompt;
      }
    }
    return static_cast<uint64_t>(o_.n_chunks) * per_chunk;
  }

  /// Whether every cache can be made, before hours have gone by.
  Status TryBudgets(const Model& model, llama_token token) const {
    for (const Contender& c : contenders_) {
      if (!c.config) continue;
      auto context =
          Context::Create(model, options_, *c.config, static_cast<uint32_t>(ChunkTokens()));
      const Status status = context.ok() ? context->Decode({&token, 1}, 1) : context.status();
      if (!status.ok()) {
        return {status.code(), c.policy + " at " + c.budget + ": " + status.message()};
      }
    }
    return {};
  }

  Status ReadPrompt(Context& context, std::span<const llama_token> chunk) {
    QEVICT_RETURN_IF_ERROR(context.SetPhase(QEVICT_PHASE_PROMPT));
    const auto n_prompt = static_cast<size_t>(o_.n_prompt);
    for (size_t at = 0; at < n_prompt;) {
      const size_t n = std::min<size_t>(options_.n_batch, n_prompt - at);
      QEVICT_RETURN_IF_ERROR(context.Decode(chunk.subspan(at, n), 0));
      at += n;
      Advance(n);
    }
    return {};
  }

  /// The same, from what the contender before has read if that is the same.
  Status ReadOrRestorePrompt(const Contender& c, Context& context,
                             std::span<const llama_token> chunk) {
    if (!SharesPrompt(c)) return ReadPrompt(context, chunk);
    const std::string key = PromptKey(c);
    if (prompt_.key == key)
      return context.Restore(prompt_.state, static_cast<uint32_t>(o_.n_prompt));
    QEVICT_RETURN_IF_ERROR(ReadPrompt(context, chunk));
    Result<std::vector<uint8_t>> state = context.Save();
    if (!state.ok()) return state.status();
    prompt_ = {key, std::move(*state)};
    return {};
  }

  /// The scored tokens; on_row(position, logits) for each.
  template <typename F>
  Status Score(Context& context, const Model& model, std::span<const llama_token> chunk,
               const F& on_row) {
    QEVICT_RETURN_IF_ERROR(context.SetPhase(QEVICT_PHASE_DECODE));
    const auto n_prompt = static_cast<size_t>(o_.n_prompt), end = ChunkTokens();
    for (size_t at = n_prompt; at < end;) {
      const size_t n = std::min<size_t>(n_step_, end - at);
      QEVICT_RETURN_IF_ERROR(context.Decode(chunk.subspan(at, n), static_cast<uint32_t>(n)));
      for (size_t i = 0; i < n; ++i) {
        on_row(at + i - n_prompt, std::span<const float>(context.Logits(static_cast<uint32_t>(i)),
                                                         static_cast<size_t>(model.n_vocab())));
      }
      at += n;
      Advance(n);
    }
    return {};
  }

  void Advance(size_t n) {
    n_done_ += n;
    progress_->Update(n_done_);
  }

  Status RunChunk(const Model& cpu, const Model& ours, size_t index,
                  std::span<const llama_token> text, Logits& reference) {
    std::vector<llama_token> chunk(text.begin(), text.end());
    if (cpu.adds_bos()) chunk[0] = llama_vocab_bos(cpu.vocab());
    const std::string where =
        "chunk " + std::to_string(index + 1) + " of " + std::to_string(o_.n_chunks);
    {
      progress_->SetWhat(where + ", reference");
      ContextOptions options = options_;
      options.flash_attention = o_.reference == "fa";
      auto context = Context::Create(cpu, options);
      if (!context.ok()) return context.status();
      QEVICT_RETURN_IF_ERROR(ReadPrompt(*context, chunk));
      QEVICT_RETURN_IF_ERROR(Score(*context, cpu, chunk, [&](size_t i, std::span<const float> row) {
        std::copy(row.begin(), row.end(), reference.Row(i).begin());
      }));
    }
    prompt_ = {};
    for (Contender& c : contenders_) {
      progress_->SetWhat(where + ", " + c.policy + (c.budget.empty() ? "" : " ") + c.budget);
      QEVICT_RETURN_IF_ERROR(RunContender(c, c.config ? ours : cpu, index, chunk, reference));
    }
    return {};
  }

  Status RunContender(Contender& c, const Model& model, size_t index,
                      std::span<const llama_token> chunk, Logits& reference) {
    ContextOptions options = options_;
    if (!c.config) options.flash_attention = o_.reference != "fa";
    auto context = Context::Create(model, options, c.config.value_or(Config{}),
                                   static_cast<uint32_t>(ChunkTokens()));
    if (!context.ok()) return context.status();
    std::vector<Position> positions;
    const auto n_prompt = static_cast<size_t>(o_.n_prompt);
    QEVICT_RETURN_IF_ERROR(ReadOrRestorePrompt(c, *context, chunk));
    QEVICT_RETURN_IF_ERROR(Score(*context, model, chunk, [&](size_t i, std::span<const float> row) {
      positions.push_back(ComparePosition(reference.Row(i), row, chunk[n_prompt + i + 1]));
    }));
    qevict_stats stats{};
    if (c.config) {
      const auto got = context->Stats();
      if (!got.ok()) return got.status();
      stats = *got;
    }
    if (o_.format == Format::kJson) {
      Json line = ResultOf(c, positions, stats, 1.0);
      line["type"] = "chunk";
      line["chunk"] = index;
      for (const Position& p : positions) line["kl"].push_back(p.kl);
      PrintText(JsonLine(line) + "\n");
    }
    c.positions.insert(c.positions.end(), positions.begin(), positions.end());
    AddStats(c.sum, stats);
    return {};
  }

  static void AddStats(qevict_stats& sum, const qevict_stats& s) {
    const uint64_t n_layers = s.n_layers;
    sum.full_bytes += s.full_bytes;
    sum.packed_bytes += s.packed_bytes;
    sum.dormant_bytes += s.dormant_bytes;
    sum.tables_bytes += s.tables_bytes;
    sum.slack_bytes += s.slack_bytes;
    sum.f16_bytes += s.f16_bytes;
    sum.full_tokens += s.full_tokens;
    sum.packed_tokens += s.packed_tokens;
    sum.evicted_tokens += s.evicted_tokens;
    sum.events += s.events;
    sum.promotions += s.promotions;
    sum.demotions += s.demotions;
    sum.evictions += s.evictions;
    sum.violations += s.violations;
    sum.n_layers = n_layers;
  }

  /// `stats` are sums over `n` chunks; counts come out as means per chunk.
  Json ResultOf(const Contender& c, std::span<const Position> positions, const qevict_stats& stats,
                double n) const {
    const Agreement a = Summarize(positions);
    Json json = {{"type", ""},
                 {"policy", c.policy},
                 {"budget", c.budget},
                 {"positions", a.n},
                 {"kl_mean", a.kl_mean},
                 {"kl_stderr", a.kl_stderr},
                 {"kl_median", a.kl_median},
                 {"kl_p90", a.kl_p90},
                 {"kl_p99", a.kl_p99},
                 {"kl_p999", a.kl_p999},
                 {"kl_max", a.kl_max},
                 {"same_top_percent", a.same_top_percent},
                 {"ppl_reference", a.perplexity_base},
                 {"ppl", a.perplexity},
                 {"ppl_ratio", a.perplexity_ratio}};
    json.update(Setting(c));
    if (!c.config) return json;
    const double per_layer = n * static_cast<double>(std::max<uint64_t>(1, stats.n_layers));
    json["kv_bytes"] = static_cast<double>(TotalBytes(stats)) / n;
    json["f16_bytes"] = static_cast<double>(stats.f16_bytes) / n;
    json["kv_share_percent"] = SharePercent(stats);
    json["packed_share_percent"] = PackedShare(stats);
    json["full_tokens"] = static_cast<double>(stats.full_tokens) / per_layer;
    json["packed_tokens"] = static_cast<double>(stats.packed_tokens) / per_layer;
    json["evicted_tokens"] = static_cast<double>(stats.evicted_tokens) / per_layer;
    json["events"] = static_cast<double>(stats.events) / n;
    json["promotions"] = static_cast<double>(stats.promotions) / n;
    json["demotions"] = static_cast<double>(stats.demotions) / n;
    json["evictions"] = static_cast<double>(stats.evictions) / n;
    json["violations"] = stats.violations;
    return json;
  }

  /// Bytes of packed windows (blocks, and their part of the tables) of what f16 takes for them.
  static double PackedShare(const qevict_stats& s) {
    const auto packed = static_cast<double>(s.packed_tokens);
    const auto held = packed + static_cast<double>(s.full_tokens);
    if (packed == 0.0) return 0.0;
    const double f16 =
        static_cast<double>(s.f16_bytes) * packed / (held + static_cast<double>(s.evicted_tokens));
    return 100.0 *
           (static_cast<double>(s.packed_bytes) +
            static_cast<double>(s.tables_bytes) * packed / held) /
           f16;
  }

  /// What a reader needs to repeat the number.
  Json Setting(const Contender& c) const {
    return {{"command", "eval kld"},
            {"version", QEVICT_VERSION_STRING},
            {"model", o_.model},
            {"file", o_.file},
            {"reference", o_.reference},
            {"chunks", o_.n_chunks},
            {"prompt_tokens", o_.n_prompt},
            {"score_tokens", o_.n_score},
            {"step_tokens", n_step_},
            {"threads", o_.n_threads},
            {"isa", kernels::IsaName(kernels::ActiveIsa())},
            {"config", c.config ? ToText(*c.config) : ""}};
  }

  Table MakeTable() const {
    Table table({{"policy", "policy"},
                 {"budget", "budget"},
                 {"kv_share_percent", "KV bytes"},
                 {"kl_mean", "mean KL"},
                 {"kl_stderr", "+-"},
                 {"kl_median", "median"},
                 {"kl_p90", "90%"},
                 {"kl_p99", "99%"},
                 {"kl_p999", "99.9%"},
                 {"kl_max", "max"},
                 {"same_top_percent", "same top"},
                 {"ppl_reference", "PPL full"},
                 {"ppl", "PPL"},
                 {"ppl_ratio", "ratio"},
                 {"full_tokens", "full"},
                 {"packed_tokens", "packed"},
                 {"evicted_tokens", "evicted"},
                 {"events", "events"},
                 {"promotions", "promoted"},
                 {"evictions", "evicted windows"}});
    for (const Contender& c : contenders_) {
      const Json r = ResultOf(c, c.positions, c.sum, static_cast<double>(o_.n_chunks));
      const auto number = [&r](const char* key, int decimals) {
        return r.contains(key) ? FixedCell(r[key].get<double>(), decimals) : Cell{};
      };
      const auto percent = [&r](const char* key) {
        return r.contains(key) ? PercentCell(r[key].get<double>(), 2) : Cell{};
      };
      table.Add(
          {TextCell(c.policy),         TextCell(c.budget),          percent("kv_share_percent"),
           number("kl_mean", 5),       number("kl_stderr", 5),      number("kl_median", 5),
           number("kl_p90", 4),        number("kl_p99", 4),         number("kl_p999", 3),
           number("kl_max", 3),        percent("same_top_percent"), number("ppl_reference", 4),
           number("ppl", 4),           number("ppl_ratio", 4),      number("full_tokens", 0),
           number("packed_tokens", 0), number("evicted_tokens", 0), number("events", 0),
           number("promotions", 0),    number("evictions", 0)});
    }
    return table;
  }

  const KldOptions& o_;
  std::vector<Contender> contenders_;
  uint32_t n_step_;
  ContextOptions options_;
  std::optional<Progress> progress_;
  uint64_t n_done_ = 0;
  struct {
    std::string key;
    std::vector<uint8_t> state;
  } prompt_;  // of the current chunk, as the contender before left it
};

/// Tokens per step; tiers must not be due to change inside one.
Result<uint32_t> StepTokens(const KldOptions& o, std::span<const Contender> contenders) {
  uint32_t shortest = UINT32_MAX;
  for (const Contender& c : contenders) {
    if (c.config) shortest = std::min(shortest, c.config->EffectiveInterval());
  }
  const auto step =
      static_cast<uint32_t>(o.n_step ? o.n_step : std::min<int64_t>(shortest, o.n_batch));
  for (const Contender& c : contenders) {
    const uint32_t interval = c.config ? c.config->EffectiveInterval() : step;
    if (interval % step == 0) continue;
    return InvalidArgument("--step " + std::to_string(step) + " does not divide the interval of " +
                           std::to_string(interval) + " tokens: decisions would come late");
  }
  if (step > o.n_batch) {
    return InvalidArgument("--step " + std::to_string(step) + " is larger than the batch of " +
                           std::to_string(o.n_batch) + " tokens");
  }
  return step;
}

int EvalKld(const KldOptions& o) {
  if (o.reference != "fa" && o.reference != "none-fa") {
    return Fail(
        InvalidArgument("--reference " + o.reference + " is not legal: expected fa or none-fa"));
  }
  Result<std::vector<Contender>> contenders = MakeContenders(o);
  if (!contenders.ok()) return Fail(contenders.status());
  const Result<uint32_t> step = StepTokens(o, *contenders);
  if (!step.ok()) return Fail(step.status());
  if (const Status s = CheckModelFile(o.model); !s.ok()) return Fail(s);
  if (o.file.empty()) return Fail(InvalidArgument("there is no text: give -f FILE"));
  const Result<std::string> text = ReadTextFile(o.file);
  if (!text.ok()) return Fail(text.status());
  if (const Status s = InitLlama(o.verbose); !s.ok()) return Fail(s);
  KldRun run(o, std::move(*contenders), *step);
  if (const Status s = run.Run(*text); !s.ok()) return Fail(s);
  run.Print();
  return kOk;
}

Command AddKld(CLI::App& eval) {
  auto o = std::make_shared<KldOptions>();
  o->n_threads = UsableCpus();
  CLI::App* app = eval.add_subcommand("kld", "KL divergence from the full cache, logit by logit");
  SetHelp(
      *app,
      "Feeds chunks of a text to the full cache and to compressed ones, and compares their logits.",
      "qevict eval kld -m FILE -f TEXT [options]",
      "  qevict eval kld -m model.gguf -f wiki.test.raw --budget 40%,20% --policy "
      "qevict,streaming\n"
      "  qevict eval kld -m model.gguf -f book.txt --chunks 4 --prompt 7168 --floor -o json > "
      "kld.jsonl\n\n"
      "The reference is llama.cpp's CPU backend with an f16 cache. --floor adds what that backend\n"
      "differs from itself with and without flash attention: smaller values mean nothing.\n");
  AddModel(*app, o->model)->group(kInput);
  AddText(*app, "-f,--file", o->file, "FILE", "text, read as raw tokens")->group(kInput);
  AddInteger(*app, "--chunks", o->n_chunks, 1, 1 << 20, "consecutive chunks of the text")
      ->group(kInput);
  AddInteger(*app, "--prompt", o->n_prompt, 1, 1 << 24, "tokens read before the first decision")
      ->group(kInput);
  AddInteger(*app, "--score", o->n_score, 1, 1 << 20, "tokens compared after them")->group(kInput);
  AddInteger(*app, "--step", o->n_step, 1, 4096, "tokens per step")
      ->default_str("interval")
      ->group(kInput);
  AddInteger(*app, "-b,--batch-size", o->n_batch, 1, 65536, "prompt tokens per step")
      ->group(kInput);
  AddInteger(*app, "-t,--threads", o->n_threads, 1, 1024, "CPU threads")->group(kInput);
  AddText(*app, "--reference", o->reference, "fa|none-fa", "flash attention of the reference")
      ->default_str("fa")
      ->group(kInput);
  AddFlag(*app, "--floor", o->floor, "compare the reference with its own other attention, too")
      ->group(kInput);
  o->caches.Register(*app);
  AddFormat(*app, o->format, "table, or with json one line per chunk and result")->group("Output");
  AddFlag(*app, "-v,--verbose", o->verbose, "show the log of llama.cpp")->group("Output");
  return {app, [o] { return EvalKld(*o); }};
}

}  // namespace

std::vector<Command> AddEval(CLI::App& root) {
  CLI::App* eval = root.add_subcommand("eval", "measure what compression does to a model");
  SetHelp(*eval, "Measures what compression does to a model.", "qevict eval TASK [options]",
          "  qevict eval kld -m model.gguf -f wiki.test.raw\n");
  eval->require_subcommand(1)->group("Commands");
  return {AddKld(*eval)};
}

}  // namespace qevict::cli
