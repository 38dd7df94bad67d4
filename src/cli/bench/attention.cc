// qevict bench attention: our kernels beside ggml's flash attention, decode of one token.
#include "cli/bench/attention.h"

#include <algorithm>
#include <cstdio>

#include "cli/bench/bench.h"
#include "cli/bench/stats.h"
#include "cli/cache_choice.h"
#include "cli/machine.h"
#include "cli/quantile.h"

namespace qevict::cli {
namespace {

constexpr const char* kTests = "Tests";
constexpr int64_t kMaxHeads = 1024, kMaxHeadDim = 512;
constexpr uint32_t kMaxTokens = 1 << 20, kWindow = 8;

struct BenchAttentionOptions {
  std::string shapes = "14/2x64,32/8x128", tokens = "1024,4096,16384",
              tiers = "full,packed2,packed4,token";
  int64_t n_threads = 0, n_repetitions = 20, n_layers = 4;
  bool warm = false;
  Format format = Format::kMarkdown;
};

Result<AttentionBenchPlan> MakePlan(const BenchAttentionOptions& o) {
  AttentionBenchPlan plan;
  Result<std::vector<HeadShape>> shapes = ParseShapes(o.shapes);
  if (!shapes.ok()) return shapes.status();
  Result<std::vector<uint32_t>> tokens = ParseCounts("--tokens", o.tokens, kWindow, kMaxTokens);
  if (!tokens.ok()) return tokens.status();
  for (const uint32_t n : *tokens) {
    if (n % kWindow) {
      return InvalidArgument("--tokens " + std::to_string(n) +
                             " is not legal: expected windows of " + std::to_string(kWindow) +
                             " tokens");
    }
  }
  Result<std::vector<kernels::Formats>> tiers = ParseTiers(o.tiers);
  if (!tiers.ok()) return tiers.status();
  plan.shapes = std::move(*shapes);
  plan.tokens = std::move(*tokens);
  plan.tiers = std::move(*tiers);
  plan.n_layers = static_cast<uint32_t>(o.n_layers);
  plan.n_repetitions = static_cast<uint32_t>(o.n_repetitions);
  plan.n_threads = static_cast<int>(o.n_threads);
  plan.warm = o.warm;
  return plan;
}

const std::vector<Table::Column>& Columns() {
  static const std::vector<Table::Column> columns = {{"shape", "heads"},
                                                     {"tokens", "tokens"},
                                                     {"kernel", "kernel"},
                                                     {"error", "error"},
                                                     {"mass_error", "mass error"},
                                                     {"layer_bytes", "K and V"},
                                                     {"layer_ms", "ms/layer"},
                                                     {"ns_per_token_kv_head", "ns/token/KV head"},
                                                     {"gbps", "GB/s"},
                                                     {"read_share_percent", "of read"},
                                                     {"ratio_median", "x ggml f16"},
                                                     {"ratio_q1", "25%"},
                                                     {"ratio_q3", "75%"}};
  return columns;
}

Cell ErrorCell(double error) {
  if (error < 0.0) return {};
  char text[32];
  std::snprintf(text, sizeof(text), "%.1e", error);
  return {error, text};
}

BenchRow MakeRow(const AttentionRow& row, double read_gbps) {
  const double ms = QuantileOf(row.layer_ms, 0.5);
  const double gbps = static_cast<double>(row.layer_bytes) / ms / 1e6;
  const double ns = ms * 1e6 / row.n_tokens / row.shape.n_kv_heads;
  BenchRow out;
  out.cells = {TextCell(row.shape.Name()), CountCell(row.n_tokens),
               TextCell(row.kernel),       ErrorCell(row.error),
               ErrorCell(row.mass_error),  BytesCell(row.layer_bytes),
               FixedCell(ms, 4),           FixedCell(ns, 2),
               FixedCell(gbps, 2),         PercentCell(100.0 * gbps / read_gbps)};
  for (const double q : {0.5, 0.25, 0.75}) {
    out.cells.push_back(FixedCell(QuantileOf(row.ratios, q), 2));
  }
  out.details = {{"layer_ms_samples", row.layer_ms}, {"ratios", row.ratios}};
  return out;
}

Json Header(const BenchAttentionOptions& o, const AttentionBenchResult& result) {
  Json header = {{"command", "bench attention"}};
  header.update(MachineFacts());
  header.update({{"threads", o.n_threads},
                 {"repetitions", o.n_repetitions},
                 {"layers", o.n_layers},
                 {"caches", o.warm ? "warm" : "cold"},
                 {"read_gbps", QuantileOf(result.read_gbps, 0.5)},
                 {"read_bytes", result.read_bytes}});
  return header;
}

int BenchAttention(const BenchAttentionOptions& o) {
  const Result<AttentionBenchPlan> plan = MakePlan(o);
  if (!plan.ok()) return Fail(plan.status());
  const Result<AttentionBenchResult> result = RunAttentionBench(*plan);
  if (!result.ok()) return Fail(result.status());
  std::vector<BenchRow> rows;
  for (const AttentionRow& row : result->rows) {
    rows.push_back(MakeRow(row, QuantileOf(result->read_gbps, 0.5)));
  }
  PrintBench(o.format, Header(o, *result), Columns(), rows);
  return kOk;
}

/// "A/BxC" as three integers.
bool ParseShape(std::string_view text, int64_t (&numbers)[3]) {
  const size_t slash = text.find('/'), x = text.find('x');
  if (slash == std::string_view::npos || x == std::string_view::npos || x < slash) return false;
  return ParseInteger(text.substr(0, slash), numbers[0]) &&
         ParseInteger(text.substr(slash + 1, x - slash - 1), numbers[1]) &&
         ParseInteger(text.substr(x + 1), numbers[2]);
}

}  // namespace

std::string HeadShape::Name() const {
  return std::to_string(n_heads) + "/" + std::to_string(n_kv_heads) + "x" +
         std::to_string(head_dim);
}

Result<std::vector<HeadShape>> ParseShapes(const std::string& text) {
  std::vector<HeadShape> shapes;
  for (const std::string& item : SplitList(text)) {
    int64_t n[3] = {};
    const bool legal = ParseShape(item, n) && n[1] >= 1 && n[0] >= n[1] && n[0] <= kMaxHeads &&
                       n[0] % n[1] == 0 && n[2] >= 32 && n[2] <= kMaxHeadDim && n[2] % 32 == 0;
    if (!legal) {
      return InvalidArgument("--shapes " + item +
                             " is not legal: expected heads/KV headsxchannels as 14/2x64, heads a "
                             "multiple of KV heads, channels of 32 up to " +
                             std::to_string(kMaxHeadDim));
    }
    shapes.push_back(
        {static_cast<uint32_t>(n[0]), static_cast<uint32_t>(n[1]), static_cast<uint32_t>(n[2])});
  }
  return shapes;
}

Result<std::vector<kernels::Formats>> ParseTiers(const std::string& text) {
  std::vector<kernels::Formats> tiers;
  for (const std::string& item : SplitList(text)) {
    const auto* found = std::find_if(
        std::begin(kernels::kAllFormats), std::end(kernels::kAllFormats),
        [&item](kernels::Formats formats) { return item == kernels::FormatsName(formats); });
    if (found == std::end(kernels::kAllFormats)) {
      return InvalidArgument(
          "--tiers " + item +
          " is not legal: expected full, packed2, packed4, token, grid or mixed");
    }
    tiers.push_back(*found);
  }
  return tiers;
}

Command AddBenchAttention(CLI::App& bench) {
  auto o = std::make_shared<BenchAttentionOptions>();
  o->n_threads = UsableCpus();
  CLI::App* app = bench.add_subcommand("attention", "attention alone, beside ggml's");
  SetHelp(
      *app,
      "Times attention of one new token over a cache: our kernels, with windows scattered over\n"
      "memory and the mass of each window returned, and ggml's flash attention on its CPU backend\n"
      "with f16, q8_0 and q4_0 keys and values. All take turns in one process.",
      "qevict bench attention [--shapes H/KVxD,..] [--tokens N,..] [--tiers NAMES] [options]",
      "  qevict bench attention --shapes 32/8x128 --tokens 4096,16384\n"
      "  QEVICT_SIMD=avx2 qevict bench attention --tiers packed2 -t 1 -o json\n\n"
      "`error` is the largest difference from a double-precision result over the stored values,\n"
      "relative to the largest output; a wrong result is never timed. `ns/token/KV head` is the\n"
      "time of a layer, all threads working, over cached tokens and KV heads. `GB/s` counts K and "
      "V\n"
      "as stored; `of read` is its share of what all threads read from memory between the runs:\n"
      "that read also empties the processor's caches, as a model's weights do between two tokens.\n"
      "`x ggml f16` is the median ratio of rounds, beside its quartiles.\n");
  AddText(*app, "--shapes", o->shapes, "H/KVxD,..", "query heads / KV heads x channels")
      ->default_str(o->shapes)
      ->group(kTests);
  AddText(*app, "--tokens", o->tokens, "N,..", "tokens in the cache")
      ->default_str(o->tokens)
      ->group(kTests);
  AddText(*app, "--tiers", o->tiers, "NAMES", "full, packed2, packed4, token, grid (2 bits), mixed")
      ->default_str(o->tiers)
      ->group(kTests);
  AddInteger(*app, "--layers", o->n_layers, 1, 256, "layers in a row, each with its own storage")
      ->group(kTests);
  AddInteger(*app, "-r,--repetitions", o->n_repetitions, 1, 100000, "rounds")->group(kTests);
  AddInteger(*app, "-t,--threads", o->n_threads, 1, 1024, "CPU threads")->group(kTests);
  AddFlag(*app, "--warm", o->warm, "do not empty the processor's caches between runs")
      ->group(kTests);
  AddFormat(*app, o->format, "table, or with jsonl one line per result", true)->group("Output");
  return {app, [o] { return BenchAttention(*o); }};
}

}  // namespace qevict::cli
