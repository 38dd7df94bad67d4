// qevict bench model: llama-bench's tests on the CPU backend and on compressed caches, in pairs.
#include "cli/bench/model.h"

#include "cli/bench/bench.h"
#include "cli/machine.h"
#include "cli/quantile.h"
#include "cli/report.h"
#include "cli/statistics_file.h"

namespace qevict::cli {
namespace {

constexpr const char* kTests = "Tests";

struct BenchModelOptions {
  std::string model, file;
  std::string prompts = "512", generations = "32", depths = "0";
  int64_t n_repetitions = 5, n_threads = 0, n_batch = 2048, n_ubatch = 512;
  bool verbose = false;
  Format format = Format::kMarkdown;
  CacheListOptions caches{"full,qevict", "20%"};
};

Result<ModelBenchPlan> MakePlan(const BenchModelOptions& o) {
  ModelBenchPlan plan;
  plan.model = o.model;
  plan.file = o.file;
  const struct {
    const char* option;
    const std::string& text;
    std::vector<uint32_t>& counts;
  } lists[] = {{"-p", o.prompts, plan.prompts},
               {"-n", o.generations, plan.generations},
               {"-d", o.depths, plan.depths}};
  for (const auto& list : lists) {
    Result<std::vector<uint32_t>> counts = ParseCounts(list.option, list.text, 0, 1 << 24);
    if (!counts.ok()) return counts.status();
    list.counts = std::move(*counts);
  }
  if (TestsAt(0, plan.prompts, plan.generations).empty()) {
    return InvalidArgument("there is no test: -p and -n are both 0");
  }
  Result<std::vector<CacheChoice>> caches = o.caches.Build();
  if (!caches.ok()) return caches.status();
  plan.caches = std::move(*caches);
  plan.n_repetitions = static_cast<uint32_t>(o.n_repetitions);
  plan.context.n_batch = static_cast<uint32_t>(o.n_batch);
  plan.context.n_ubatch = static_cast<uint32_t>(std::min(o.n_batch, o.n_ubatch));
  plan.context.n_threads = static_cast<int>(o.n_threads);
  return plan;
}

const std::vector<Table::Column>& Columns() {
  static const std::vector<Table::Column> columns = {{"backend", "backend"},
                                                     {"policy", "policy"},
                                                     {"budget", "budget"},
                                                     {"test", "test"},
                                                     {"tokens_per_s_mean", "t/s mean"},
                                                     {"tokens_per_s_median", "median"},
                                                     {"ttft_ms", "TTFT, ms"},
                                                     {"tpot_p50_ms", "TPOT p50, ms"},
                                                     {"tpot_p95_ms", "p95"},
                                                     {"upkeep_percent", "upkeep"},
                                                     {"ratio_median", "x CPU"},
                                                     {"ratio_low", "from"},
                                                     {"ratio_high", "to"},
                                                     {"ratio_coverage_percent", "confidence"},
                                                     {"kl_mean", "mean KL"},
                                                     {"kv_bytes", "KV bytes"},
                                                     {"kv_share_percent", "of f16"},
                                                     {"peak_rss_bytes", "peak RSS"}};
  return columns;
}

std::vector<double> Speeds(const ModelRow& row) {
  std::vector<double> speeds;
  for (const double ms : row.ms) speeds.push_back(1000.0 * row.test.n_tokens() / ms);
  return speeds;
}

Cell RatioCell(double x) { return FixedCell(x, 3); }

BenchRow MakeRow(const ModelRow& row) {
  const std::vector<double> speeds = Speeds(row);
  const bool ours = row.cache != nullptr;
  BenchRow out;
  std::vector<Cell>& cells = out.cells;
  cells = {TextCell(ours ? "QEVICT" : "CPU"),
           TextCell(ours ? row.cache->policy : ""),
           TextCell(ours ? row.cache->budget : ""),
           TextCell(row.test.Name()),
           FixedCell(Mean(speeds), 2),
           FixedCell(QuantileOf(speeds, 0.5), 2)};
  cells.push_back(row.test.n_prompt ? FixedCell(QuantileOf(row.ms, 0.5), 1) : Cell{});
  for (const double q : {0.5, 0.95}) {
    cells.push_back(row.token_ms.empty() ? Cell{} : FixedCell(QuantileOf(row.token_ms, q), 2));
  }
  cells.push_back(row.upkeep_ms ? PercentCell(100.0 * *row.upkeep_ms / Mean(row.token_ms))
                                : Cell{});
  if (ours) {
    const MedianInterval i = IntervalOfMedian(row.ratios);
    cells.insert(cells.end(), {RatioCell(i.median), RatioCell(i.low), RatioCell(i.high),
                               PercentCell(i.coverage_percent)});
  } else {
    cells.resize(cells.size() + 4);
  }
  cells.push_back(row.kl ? FixedCell(*row.kl, 5) : Cell{});
  cells.push_back(row.stats ? BytesCell(TotalBytes(*row.stats)) : Cell{});
  cells.push_back(row.stats ? PercentCell(SharePercent(*row.stats)) : Cell{});
  cells.push_back(BytesCell(row.peak_rss_bytes));
  out.details = {{"n_prompt", row.test.n_prompt},
                 {"n_gen", row.test.n_gen},
                 {"n_depth", row.test.depth},
                 {"config", ours ? ToText(row.cache->config) : ""},
                 {"violations", row.stats ? row.stats->violations : 0},
                 {"samples_ms", row.ms},
                 {"ratios", row.ratios}};
  return out;
}

/// What a reader needs to repeat the numbers.
Json Header(const BenchModelOptions& o, const ModelFacts& model) {
  Json header = {{"command", "bench model"}};
  header.update(MachineFacts());
  header.update({{"model", o.model},
                 {"model_description", model.description},
                 {"model_bytes", model.bytes},
                 {"model_parameters", model.parameters},
                 {"text", o.file.empty() ? "pseudo-random tokens" : o.file},
                 {"threads", o.n_threads},
                 {"batch_tokens", o.n_batch},
                 {"ubatch_tokens", std::min(o.n_batch, o.n_ubatch)},
                 {"repetitions", o.n_repetitions},
                 {"baseline", "llama.cpp CPU backend, f16 cache, flash attention"},
                 {"ratio_interval", "order statistics of the paired ratios"}});
  return header;
}

int BenchModel(const BenchModelOptions& o) {
  Result<ModelBenchPlan> plan = MakePlan(o);
  if (!plan.ok()) return Fail(plan.status());
  if (const Status s = CheckModelFile(o.model); !s.ok()) return Fail(s);
  std::vector<Config*> configs;
  for (CacheChoice& c : plan->caches) configs.push_back(&c.config);
  if (const Status s = UseStatistics(configs, o.model); !s.ok()) return Fail(s);
  if (!o.file.empty()) {
    if (const Result<std::string> text = ReadTextFile(o.file); !text.ok())
      return Fail(text.status());
  }
  if (const Status s = InitLlama(o.verbose); !s.ok()) return Fail(s);
  ModelFacts facts;
  const Result<std::vector<ModelRow>> measured = RunModelBench(*plan, facts);
  if (!measured.ok()) return Fail(measured.status());
  std::vector<BenchRow> rows;
  for (const ModelRow& row : *measured) rows.push_back(MakeRow(row));
  PrintBench(o.format, Header(o, facts), Columns(), rows);
  return kOk;
}

}  // namespace

Command AddBenchModel(CLI::App& bench) {
  auto o = std::make_shared<BenchModelOptions>();
  o->n_threads = UsableCpus();
  CLI::App* app = bench.add_subcommand("model", "whole models: llama-bench's tests, in pairs");
  SetHelp(
      *app,
      "Times llama-bench's tests on llama.cpp's CPU backend (f16 cache, flash attention) and on\n"
      "compressed caches. The two take turns within one run; `x CPU` is the median ratio of "
      "pairs,\n"
      "with a confidence interval from order statistics (6 repetitions or more for 95%).",
      "qevict bench model -m FILE [-p N,..] [-n N,..] [-d N,..] [options]",
      "  qevict bench model -m model.gguf -p 512 -n 32 -d 0,4096 --budget 40%,20%\n"
      "  qevict bench model -m model.gguf -p 0 -n 64 -d 16384 -r 10 --policy full,qevict -o "
      "json\n\n"
      "Tokens are pseudo-random (one seed), or those of -f, and the same for all caches. A prompt\n"
      "of -d tokens is read once per cache; between repetitions the tokens behind it are taken\n"
      "back, and the first one decoded then is not timed. `mean KL` compares the logits of 8\n"
      "tokens behind the prompt with the CPU backend's: a full cache that differs is an error.\n"
      "`TTFT` is the median time to read a pp test's tokens; `upkeep` the part of a token's time\n"
      "that goes into routing, packing, scores, masks and writing.\n"
      "`peak RSS` is the process's so far: both models are loaded, and the caches of earlier "
      "rows.\n");
  AddModel(*app, o->model)->group(kTests);
  AddText(*app, "-p,--n-prompt", o->prompts, "N,..", "prompt tokens (pp), 0 = no such test")
      ->default_str(o->prompts)
      ->group(kTests);
  AddText(*app, "-n,--n-gen", o->generations, "N,..", "generated tokens (tg), 0 = no such test")
      ->default_str(o->generations)
      ->group(kTests);
  AddText(*app, "-d,--n-depth", o->depths, "N,..", "tokens read before a test")
      ->default_str(o->depths)
      ->group(kTests);
  AddInteger(*app, "-r,--repetitions", o->n_repetitions, 1, 1000, "pairs per test and cache")
      ->group(kTests);
  AddText(*app, "-f,--file", o->file, "FILE", "text whose tokens are used")->group(kTests);
  AddInteger(*app, "-t,--threads", o->n_threads, 1, 1024, "CPU threads")->group(kTests);
  AddInteger(*app, "-b,--batch-size", o->n_batch, 1, 65536, "prompt tokens per call")
      ->group(kTests);
  AddInteger(*app, "--ubatch-size", o->n_ubatch, 1, 65536, "prompt tokens per step (also -ub)")
      ->group(kTests);
  o->caches.Register(*app);
  AddFormat(*app, o->format, "table, or with jsonl one line per result", true)->group("Output");
  AddFlag(*app, "-v,--verbose", o->verbose, "show the log of llama.cpp")->group("Output");
  return {app, [o] { return BenchModel(*o); }};
}

}  // namespace qevict::cli
