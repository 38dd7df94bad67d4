// The output of `qevict eval`.
#include <algorithm>

#include "cli/eval/eval.h"
#include "cli/report.h"
#include "cli/run.h"
#include "kernels/attention.h"
#include "qevict/version.h"

namespace qevict::cli {
namespace {

/// Bytes of packed windows (blocks, and their part of the tables) of what f16 takes for them.
double PackedShare(const qevict_stats& s) {
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
Json Setting(const EvalOptions& o, uint32_t n_step, const Contender& c) {
  return {{"command", o.command},
          {"version", QEVICT_VERSION_STRING},
          {"model", o.model},
          {"file", o.file},
          {"reference", o.reference},
          {"scored", o.generate ? "generated" : "text"},
          {"chunks", o.n_chunks},
          {"prompt_tokens", o.n_prompt},
          {"score_tokens", o.n_score},
          {"step_tokens", n_step},
          {"threads", o.n_threads},
          {"isa", kernels::IsaName(kernels::ActiveIsa())},
          {"config", c.config ? ToText(*c.config) : ""}};
}

Json AgreementJson(const Agreement& a, bool divergence) {
  Json json = {{"positions", a.n}};
  if (divergence) {
    json.update({{"kl_mean", a.kl_mean},
                 {"kl_stderr", a.kl_stderr},
                 {"kl_median", a.kl_median},
                 {"kl_p90", a.kl_p90},
                 {"kl_p99", a.kl_p99},
                 {"kl_p999", a.kl_p999},
                 {"kl_max", a.kl_max},
                 {"delta_p_mean_percent", a.delta_p_mean},
                 {"delta_p_rms_percent", a.delta_p_rms},
                 {"same_top_percent", a.same_top_percent}});
  }
  json.update({{"ppl_reference", a.perplexity_base},
               {"ppl_reference_error", a.perplexity_base_error},
               {"ppl", a.perplexity},
               {"ppl_error", a.perplexity_error},
               {"ppl_ratio", a.perplexity_ratio},
               {"ppl_ratio_error", a.perplexity_ratio_error}});
  return json;
}

/// Part `i` of `n` of the scored tokens of each chunk: [first, end).
std::pair<size_t, size_t> DepthPart(const EvalOptions& o, size_t i) {
  const auto score = static_cast<size_t>(o.n_score), n = static_cast<size_t>(o.n_depths);
  return {score * i / n, score * (i + 1) / n};
}

Agreement AtDepth(const EvalOptions& o, std::span<const Position> positions, size_t i) {
  const auto [first, end] = DepthPart(o, i);
  std::vector<Position> part;
  for (size_t at = 0; at + static_cast<size_t>(o.n_score) <= positions.size();
       at += static_cast<size_t>(o.n_score)) {
    const auto begin = positions.begin() + static_cast<std::ptrdiff_t>(at);
    part.insert(part.end(), begin + static_cast<std::ptrdiff_t>(first),
                begin + static_cast<std::ptrdiff_t>(end));
  }
  return Summarize(part);
}

/// `stats` are sums over `n` chunks; counts come out as means per chunk.
Json ResultOf(const EvalOptions& o, uint32_t n_step, const Contender& c,
              std::span<const Position> positions, const qevict_stats& stats, double n) {
  Json json = {{"type", ""}, {"policy", c.policy}, {"budget", c.budget}};
  json.update(AgreementJson(Summarize(positions), o.divergence));
  for (size_t i = 0; i < static_cast<size_t>(o.n_depths); ++i) {
    const auto [first, end] = DepthPart(o, i);
    Json part = {{"first", first}, {"end", end}};
    part.update(AgreementJson(AtDepth(o, positions, i), o.divergence));
    json["by_depth"].push_back(std::move(part));
  }
  json.update(Setting(o, n_step, c));
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

/// A column whose cells are the numbers of one member of ResultOf.
struct NumberColumn {
  Table::Column column;
  int decimals;
  bool percent = false;
};

std::vector<NumberColumn> NumberColumns(bool divergence) {
  std::vector<NumberColumn> columns = {{{"kv_share_percent", "KV bytes"}, 2, true},
                                       {{"packed_share_percent", "packed windows"}, 2, true}};
  if (divergence) {
    columns.insert(columns.end(), {{{"kl_mean", "mean KL"}, 5},
                                   {{"kl_stderr", "+-"}, 5},
                                   {{"kl_median", "median"}, 5},
                                   {{"kl_p90", "90%"}, 4},
                                   {{"kl_p99", "99%"}, 4},
                                   {{"kl_p999", "99.9%"}, 3},
                                   {{"kl_max", "max"}, 3},
                                   {{"delta_p_rms_percent", "dp RMS"}, 2, true},
                                   {{"same_top_percent", "same top"}, 2, true}});
  }
  columns.insert(columns.end(), {{{"ppl_reference", "PPL full"}, 4},
                                 {{"ppl", "PPL"}, 4},
                                 {{"ppl_error", "+-"}, 4},
                                 {{"ppl_ratio", "ratio"}, 4},
                                 {{"ppl_ratio_error", "+-"}, 4},
                                 {{"full_tokens", "full"}, 0},
                                 {{"packed_tokens", "packed"}, 0},
                                 {{"evicted_tokens", "evicted"}, 0}});
  return columns;
}

Cell NumberCell(const Json& result, const NumberColumn& c) {
  if (!result.contains(c.column.key)) return {};
  const double x = result[c.column.key].get<double>();
  return c.percent ? PercentCell(x, c.decimals) : FixedCell(x, c.decimals);
}

Table MakeTable(const EvalOptions& o, std::span<const Json> results) {
  const std::vector<NumberColumn> numbers = NumberColumns(o.divergence);
  std::vector<Table::Column> columns = {{"policy", "policy"}, {"budget", "budget"}};
  for (const NumberColumn& c : numbers) columns.push_back(c.column);
  Table table(columns);
  for (const Json& r : results) {
    std::vector<Cell> row = {TextCell(r["policy"]), TextCell(r["budget"])};
    for (const NumberColumn& c : numbers) row.push_back(NumberCell(r, c));
    table.Add(std::move(row));
  }
  return table;
}

/// One row per contender and part of the scored tokens.
Table MakeDepthTable(const EvalOptions& o, std::span<const Json> results) {
  std::vector<NumberColumn> numbers;
  if (o.divergence) {
    numbers = {{{"kl_mean", "mean KL"}, 5},
               {{"kl_stderr", "+-"}, 5},
               {{"kl_median", "median"}, 5},
               {{"same_top_percent", "same top"}, 2, true}};
  }
  numbers.insert(numbers.end(), {{{"ppl_reference", "PPL full"}, 4},
                                 {{"ppl", "PPL"}, 4},
                                 {{"ppl_ratio", "ratio"}, 4},
                                 {{"ppl_ratio_error", "+-"}, 4}});
  std::vector<Table::Column> columns = {
      {"policy", "policy"}, {"budget", "budget"}, {"scored_tokens", "scored tokens"}};
  for (const NumberColumn& c : numbers) columns.push_back(c.column);
  Table table(columns);
  for (const Json& r : results) {
    for (size_t i = 0; i < static_cast<size_t>(o.n_depths); ++i) {
      const auto [first, end] = DepthPart(o, i);
      std::vector<Cell> row = {TextCell(r["policy"]), TextCell(r["budget"]),
                               TextCell(CountText(first) + "-" + CountText(end - 1))};
      for (const NumberColumn& c : numbers) row.push_back(NumberCell(r["by_depth"][i], c));
      table.Add(std::move(row));
    }
  }
  return table;
}

}  // namespace

void PrintEvalChunk(const EvalOptions& o, uint32_t n_step, const Contender& c, size_t chunk,
                    std::span<const Position> positions, const qevict_stats& stats) {
  Json line = ResultOf(o, n_step, c, positions, stats, 1.0);
  line["type"] = "chunk";
  line["chunk"] = chunk;
  for (const Position& p : positions) {
    if (o.divergence) line["kl"].push_back(p.kl);
    line["nll"].push_back(p.nll);
  }
  PrintText(JsonLine(line) + "\n");
}

void PrintEval(const EvalOptions& o, uint32_t n_step, std::span<const Contender> contenders) {
  std::vector<Json> results;
  for (const Contender& c : contenders) {
    results.push_back(ResultOf(o, n_step, c, c.positions, c.sum, static_cast<double>(o.n_chunks)));
    results.back()["type"] = "summary";
  }
  if (o.format == Format::kJson) {
    for (const Json& r : results) PrintText(JsonLine(r) + "\n");
    return;
  }
  if (o.format == Format::kCsv) {  // one table, so that it can be read back
    PrintText((o.n_depths == 0 ? MakeTable(o, results) : MakeDepthTable(o, results)).ToCsv());
    return;
  }
  PrintText(MakeTable(o, results).ToMarkdown());
  if (o.n_depths > 0) PrintText("\n" + MakeDepthTable(o, results).ToMarkdown());
}

}  // namespace qevict::cli
