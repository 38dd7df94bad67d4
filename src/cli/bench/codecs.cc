// qevict bench codecs: what packed formats cost the kernels, bytes and time.
#include "cli/bench/codecs.h"

#include "cli/bench/bench.h"
#include "cli/bench/stats.h"
#include "cli/machine.h"
#include "cli/quantile.h"

namespace qevict::cli {
namespace {

constexpr const char* kTests = "Tests";

struct BenchCodecsOptions {
  std::string shape = "14/2x64";
  std::vector<std::string> caches;
  int64_t n_tokens = 16384, n_layers = 4, n_repetitions = 20, n_threads = 0;
  Format format = Format::kMarkdown;
};

/// What is compared where nothing is asked for.
const std::vector<std::string>& DefaultCaches() {
  static const std::vector<std::string> caches = {"codec=kivi", "codec=token", "codec=wf",
                                                  "codec=wf,bits=3", "codec=hadamard"};
  return caches;
}

Result<CodecBenchPlan> MakePlan(const BenchCodecsOptions& o) {
  CodecBenchPlan plan;
  const Result<std::vector<HeadShape>> shapes = ParseShapes(o.shape);
  if (!shapes.ok()) return shapes.status();
  if (shapes->size() != 1)
    return InvalidArgument("--shape " + o.shape + " is not legal: expected one shape");
  plan.shape = (*shapes)[0];
  Config base;
  base.window = 32;
  Result<std::vector<CacheChoice>> caches =
      CacheChoices("", "", o.caches.empty() ? DefaultCaches() : o.caches, base);
  if (!caches.ok()) return caches.status();
  for (const CacheChoice& c : *caches) {
    if (c.config.layer_bits.empty() && c.config.statistics.empty()) continue;
    return InvalidArgument(
        "--cache " + c.policy +
        ": layer_bits and statistics belong to the layers of a model, and here is "
        "none: set bits");
  }
  plan.caches = std::move(*caches);
  plan.n_tokens = static_cast<uint32_t>(o.n_tokens);
  plan.n_layers = static_cast<uint32_t>(o.n_layers);
  plan.n_repetitions = static_cast<uint32_t>(o.n_repetitions);
  plan.n_threads = static_cast<int>(o.n_threads);
  return plan;
}

const std::vector<Table::Column>& Columns() {
  static const std::vector<Table::Column> columns = {
      {"format", "format"},
      {"token_head_bytes", "bytes/token/KV head"},
      {"static_bytes", "tables/layer"},
      {"error", "error"},
      {"layer_ms", "ms/layer"},
      {"ns_per_token_kv_head", "ns/token/KV head"},
      {"ratio_median", "x full"},
      {"ratio_q1", "25%"},
      {"ratio_q3", "75%"},
      {"encode_us_per_token_kv_head", "encoding, us/token/KV head"},
      {"workspace_bytes", "workspace"}};
  return columns;
}

BenchRow MakeRow(const CodecBenchPlan& plan, const CodecRow& row) {
  const double ms = QuantileOf(row.layer_ms, 0.5);
  const double units = double{plan.n_tokens * 1.0} * plan.shape.n_kv_heads;
  BenchRow out;
  out.cells = {TextCell(row.name),
               FixedCell(static_cast<double>(row.layer_bytes) / units, 1),
               BytesCell(row.static_bytes),
               FixedCell(row.error, 5),
               FixedCell(ms, 4),
               FixedCell(ms * 1e6 / units, 2)};
  for (const double q : {0.5, 0.25, 0.75}) {
    out.cells.push_back(FixedCell(QuantileOf(row.ratios, q), 2));
  }
  out.cells.push_back(row.encode_us.empty() ? Cell{} : FixedCell(Mean(row.encode_us), 2));
  out.cells.push_back(BytesCell(row.workspace_bytes));
  out.details = {{"layer_ms_samples", row.layer_ms}, {"ratios", row.ratios}};
  return out;
}

int BenchCodecs(const BenchCodecsOptions& o) {
  const Result<CodecBenchPlan> plan = MakePlan(o);
  if (!plan.ok()) return Fail(plan.status());
  const Result<std::vector<CodecRow>> measured = RunCodecBench(*plan);
  if (!measured.ok()) return Fail(measured.status());
  Json header = {{"command", "bench codecs"}};
  header.update(MachineFacts());
  header.update({{"threads", o.n_threads},
                 {"repetitions", o.n_repetitions},
                 {"layers", o.n_layers},
                 {"shape", plan->shape.Name()},
                 {"tokens", o.n_tokens}});
  std::vector<BenchRow> rows;
  for (const CodecRow& row : *measured) rows.push_back(MakeRow(*plan, row));
  PrintBench(o.format, header, Columns(), rows);
  return kOk;
}

}  // namespace

Command AddBenchCodecs(CLI::App& bench) {
  auto o = std::make_shared<BenchCodecsOptions>();
  o->n_threads = UsableCpus();
  CLI::App* app = bench.add_subcommand("codecs", "packed formats, beside full precision");
  SetHelp(*app,
          "Packs random rows (unequal channels, a key bias, RoPE) with each codec, and times\n"
          "attention of one new token over the windows, beside full precision and in turns.",
          "qevict bench codecs [--shape H/KVxD] [--tokens N] [--cache KEY=VALUE,..].. [options]",
          "  qevict bench codecs --cache codec=wf,bits=2 --cache codec=token,bits=2\n"
          "  qevict bench codecs --shape 32/8x128 --cache codec=kivi,window=8 -o json\n\n"
          "`error` is the largest difference from a double-precision result over the decoded\n"
          "values, relative to the largest output; a wrong result is never timed. `x full` is the\n"
          "median ratio of rounds, beside its quartiles. `workspace` is what the kernels take for\n"
          "themselves: no format is decoded into memory as a whole. Processor caches are emptied\n"
          "before each run; windows lie in random order.\n");
  AddText(*app, "--shape", o->shape, "H/KVxD", "query heads / KV heads x channels")
      ->default_str(o->shape)
      ->group(kTests);
  AddInteger(*app, "--tokens", o->n_tokens, 32, 1 << 20, "tokens in the cache")->group(kTests);
  app->add_option("--cache", o->caches,
                  "a format as a configuration (window=32 unless it\nsays otherwise); may be given "
                  "more than once")
      ->type_name("KEY=VALUE,..")
      ->expected(1)
      ->take_all()
      ->group(kTests);
  AddInteger(*app, "--layers", o->n_layers, 1, 256, "layers in a row, each with its own storage")
      ->group(kTests);
  AddInteger(*app, "-r,--repetitions", o->n_repetitions, 1, 100000, "rounds")->group(kTests);
  AddInteger(*app, "-t,--threads", o->n_threads, 1, 1024, "CPU threads")->group(kTests);
  AddFormat(*app, o->format, "table, or with jsonl one line per result", true)->group("Output");
  return {app, [o] { return BenchCodecs(*o); }};
}

}  // namespace qevict::cli
