#include "cli/report.h"

#include <algorithm>

namespace qevict::cli {
namespace {

constexpr double kNsPerMs = 1e6;

double PerSecond(size_t n, double ms) {
  return ms > 0.0 ? 1000.0 * static_cast<double>(n) / ms : 0.0;
}

Cell MsCell(double ms) { return FixedCell(ms, ms < 100 ? 2 : 0); }

/// Mean over layers of a count summed over layers.
Cell PerLayerCell(uint64_t sum, uint64_t n_layers) {
  return FixedCell(n_layers ? static_cast<double>(sum) / static_cast<double>(n_layers) : 0.0, 1);
}

}  // namespace

Metrics TimeMetrics(size_t n_prompt, const Generation& g) {
  return {
      {"prompt_tokens", "prompt tokens", CountCell(n_prompt)},
      {"generated_tokens", "generated tokens", CountCell(g.tokens.size())},
      {"ttft_ms", "TTFT, ms", MsCell(g.ttft_ms)},
      {"tpot_ms", "TPOT, ms (mean)", MsCell(g.tpot_ms())},
      {"itl_p50_ms", "between tokens, ms (p50)", MsCell(g.itl_quantile_ms(0.5))},
      {"itl_p95_ms", "between tokens, ms (p95)", MsCell(g.itl_quantile_ms(0.95))},
      {"prompt_tokens_per_s", "prompt tokens/s", FixedCell(PerSecond(n_prompt, g.prompt_ms), 1)},
      {"generation_tokens_per_s", "generation tokens/s", FixedCell(PerSecond(1, g.tpot_ms()), 1)},
  };
}

uint64_t TotalBytes(const qevict_stats& s) {
  return s.full_bytes + s.packed_bytes + s.dormant_bytes + s.tables_bytes + s.slack_bytes;
}

double SharePercent(const qevict_stats& s) {
  if (s.f16_bytes == 0) return 0.0;
  return 100.0 * static_cast<double>(TotalBytes(s)) / static_cast<double>(s.f16_bytes);
}

Metrics CacheMetrics(const qevict_stats& s) {
  const auto ms = [](uint64_t ns) { return MsCell(static_cast<double>(ns) / kNsPerMs); };
  return {
      {"kv.total_bytes", "KV cache", BytesCell(TotalBytes(s))},
      {"kv.f16_bytes", "the same tokens in f16", BytesCell(s.f16_bytes)},
      {"kv.share_percent", "share of f16", PercentCell(SharePercent(s))},
      {"kv.full_bytes", "  full precision", BytesCell(s.full_bytes)},
      {"kv.packed_bytes", "  packed", BytesCell(s.packed_bytes)},
      {"kv.dormant_bytes", "  dormant codes", BytesCell(s.dormant_bytes)},
      {"kv.tables_bytes", "  tables", BytesCell(s.tables_bytes)},
      {"kv.slack_bytes", "  slack", BytesCell(s.slack_bytes)},
      {"kv.budget_bytes", "budget in force",
       s.budget_bytes ? BytesCell(s.budget_bytes) : Cell{0, "none"}},
      {"kv.peak_bytes", "peak under the budget", BytesCell(s.peak_bytes)},
      {"kv.arena_resident_bytes", "arena, resident", BytesCell(s.arena_resident_bytes)},
      {"kv.arena_peak_bytes", "arena, peak", BytesCell(s.arena_peak_bytes)},
      {"kv.workspace_bytes", "workspace (not in the budget)", BytesCell(s.workspace_bytes)},
      {"tokens.full", "tokens in full precision, per layer",
       PerLayerCell(s.full_tokens, s.n_layers)},
      {"tokens.packed", "tokens packed, per layer", PerLayerCell(s.packed_tokens, s.n_layers)},
      {"tokens.evicted", "tokens evicted, per layer", PerLayerCell(s.evicted_tokens, s.n_layers)},
      {"routing.events", "routing events", CountCell(s.events)},
      {"routing.promotions", "promotions (windows)", CountCell(s.promotions)},
      {"routing.demotions", "demotions (windows)", CountCell(s.demotions)},
      {"routing.evictions", "evictions (windows)", CountCell(s.evictions)},
      {"routing.first_encodings", "windows encoded", CountCell(s.first_encodings)},
      {"time.attention_ms", "attention, ms", ms(s.attention_ns)},
      {"time.route_ms", "routing, ms", ms(s.route_ns)},
      {"time.write_ms", "cache writes, ms", ms(s.write_ns)},
      {"time.mask_ms", "masks, ms", ms(s.mask_ns)},
      {"time.score_ms", "scores, ms", ms(s.score_ns)},
      {"violations", "violated invariants", CountCell(s.violations)},
  };
}

Metrics FullCacheMetrics(uint64_t f16_bytes) {
  return {
      {"kv.total_bytes", "KV cache", BytesCell(f16_bytes)},
      {"kv.f16_bytes", "the same tokens in f16", BytesCell(f16_bytes)},
      {"kv.share_percent", "share of f16", PercentCell(100.0)},
  };
}

Json ToJson(const Metrics& metrics) {
  Json json = Json::object();
  for (const Metric& m : metrics) {
    const size_t dot = m.key.find('.');
    if (dot == std::string::npos) {
      json[m.key] = m.cell.value;
    } else {
      json[m.key.substr(0, dot)][m.key.substr(dot + 1)] = m.cell.value;
    }
  }
  return json;
}

Table ToTable(const std::vector<std::pair<std::string, Metrics>>& columns) {
  std::vector<Table::Column> headers = {{"metric", ""}};
  std::vector<Metric> rows;  // the union, in the order of the longest set
  size_t longest = 0;
  for (size_t c = 0; c < columns.size(); ++c) {
    headers.push_back({columns[c].first, columns[c].first});
    if (columns[c].second.size() > columns[longest].second.size()) longest = c;
  }
  if (!columns.empty()) rows = columns[longest].second;
  Table table(headers);
  for (const Metric& row : rows) {
    std::vector<Cell> cells = {{row.key, row.label}};
    for (const auto& [name, metrics] : columns) {
      const auto it = std::find_if(metrics.begin(), metrics.end(),
                                   [&](const Metric& m) { return m.key == row.key; });
      cells.push_back(it == metrics.end() ? Cell{} : it->cell);
    }
    table.Add(std::move(cells));
  }
  return table;
}

}  // namespace qevict::cli
