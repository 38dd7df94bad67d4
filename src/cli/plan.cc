// qevict plan: what a model's KV cache will hold, from the metadata of its file alone.
#include <algorithm>
#include <cstdio>

#include "cli/capacity.h"
#include "cli/commands.h"
#include "cli/log.h"
#include "cli/report.h"
#include "cli/run.h"
#include "cli/statistics_file.h"
#include "qevict/version.h"

namespace qevict::cli {
namespace {

constexpr const char* kModel = "Model";

struct PlanOptions {
  std::string model;
  int64_t n_ctx = 0, n_slots = 1, n_ubatch = 512;
  bool unified = false;
  Format format = Format::kMarkdown;
  ConfigOptions cache;
};

/// "0-4, 6-10"
std::string Ranges(const std::vector<uint32_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t end = i + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
    if (end - i > 1) text += "-" + std::to_string(numbers[end - 1]);
    i = end;
  }
  return text;
}

double Percent(uint64_t part, uint64_t whole) {
  return whole ? 100.0 * static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

Table LayerTable(const CapacityPlan& plan) {
  Table table({{"layers", "layers"},
               {"sliding", "sliding"},
               {"full_tokens", "full tokens"},
               {"packed_tokens", "packed"},
               {"evicted_tokens", "evicted"},
               {"full_bytes", "full"},
               {"packed_bytes", "packed"},
               {"record_bytes", "records"},
               {"f16_bytes", "f16"}});
  for (const LayerPlan& l : plan.layers) {
    table.Add({TextCell(Ranges(l.layers)),
               {l.sliding, l.sliding ? "yes" : "no"},
               CountCell(l.full_tokens),
               CountCell(l.packed_tokens),
               CountCell(l.evicted_tokens),
               BytesCell(l.full_bytes),
               BytesCell(l.packed_bytes),
               BytesCell(l.record_bytes),
               BytesCell(l.f16_bytes)});
  }
  return table;
}

Metrics Totals(const PlanOptions& o, const ModelShape& model, const CapacityPlan& plan) {
  return {
      {"architecture", "architecture", TextCell(model.architecture)},
      {"context_tokens", "context of all slots, tokens", CountCell(static_cast<uint64_t>(o.n_ctx))},
      {"slots", "slots", CountCell(static_cast<uint64_t>(o.n_slots))},
      {"f16_bytes", "f16 cache of a full context", BytesCell(plan.f16_bytes)},
      {"budget_bytes", "budget", BytesCell(plan.budget_bytes)},
      {"minimum_bytes", "least budget that works", BytesCell(plan.minimum_bytes)},
      {"full_bytes", "full precision", BytesCell(plan.full_bytes())},
      {"packed_bytes", "packed", BytesCell(plan.packed_bytes())},
      {"tables_bytes", "tables, at most", BytesCell(plan.all_table_bytes())},
      {"total_bytes", "total", BytesCell(plan.total_bytes())},
      {"share_percent", "share of f16", PercentCell(Percent(plan.total_bytes(), plan.f16_bytes))},
  };
}

int PrintPlan(const PlanOptions& o) {
  Result<Config> config = o.cache.Build();
  if (!config.ok()) return Fail(config.status());
  CaptureLog(false);
  const Result<ModelShape> model = ReadModelShape(o.model);
  if (!model.ok()) return Fail(model.status());
  config = UseStatistics(*config, o.model);
  if (!config.ok()) return Fail(config.status());
  CacheUse use;
  use.n_ctx = static_cast<uint32_t>(o.n_ctx ? o.n_ctx : model->n_ctx_train);
  use.n_slots = static_cast<uint32_t>(o.n_slots);
  use.unified = o.unified;
  use.n_ubatch = static_cast<uint32_t>(o.n_ubatch);
  if (use.n_ctx == 0) {
    return Fail(InvalidArgument("the model names no context length: give -c, at least 1 token"));
  }
  const CapacityPlan plan = PlanCapacity(*config, *model, use);
  if (plan.budget_bytes > plan.asked_bytes) {
    std::fprintf(stderr,
                 "qevict: warning: the budget of %s is raised to %s, the least that holds sinks, "
                 "recents, one interval and one packed window\n",
                 BytesText(plan.asked_bytes).c_str(), BytesText(plan.budget_bytes).c_str());
  }

  PlanOptions shown = o;
  shown.n_ctx = use.n_ctx;
  const Metrics totals = Totals(shown, *model, plan);
  const Table layers = LayerTable(plan);
  if (o.format == Format::kJson) {
    Json json = {{"command", "plan"},
                 {"version", QEVICT_VERSION_STRING},
                 {"model", o.model},
                 {"config", ToText(*config)}};
    json.update(ToJson(totals));
    json["layers"] = layers.ToJson();
    PrintText(JsonText(json) + "\n");
    return kOk;
  }
  const Table table = ToTable({{"value", totals}});
  if (o.format == Format::kCsv) {
    PrintText(table.ToCsv() + "\n" + layers.ToCsv());
  } else {
    PrintText(table.ToMarkdown() +
              "\nTokens per layer and slot; bytes of all the layers and slots of a row:\n\n" +
              layers.ToMarkdown());
  }
  return kOk;
}

}  // namespace

Command AddPlan(CLI::App& root) {
  auto o = std::make_shared<PlanOptions>();
  CLI::App* app = root.add_subcommand("plan", "bytes and tokens by tier, from the file's metadata");
  SetHelp(*app,
          "Computes what a full context will hold under a budget, without loading the weights.",
          "qevict plan -m FILE [-c N] [options]",
          "  qevict plan -m model.gguf -c 32768 --budget 20%\n"
          "  qevict plan -m model.gguf -c 131072 -np 4 --kv-unified --budget 2GiB -o json\n\n"
          "The figures are those of the first decision after a prompt that fills the context.\n");
  AddModel(*app, o->model)->group(kModel);
  AddInteger(*app, "-c,--ctx-size", o->n_ctx, 1, 1 << 28, "context of all slots, tokens")
      ->default_str("the model's")
      ->group(kModel);
  AddInteger(*app, "--parallel", o->n_slots, 1, 256, "slots (also -np)")->group(kModel);
  AddFlag(*app, "--kv-unified", o->unified, "one cache for all slots (also -kvu)")->group(kModel);
  AddInteger(*app, "--ubatch-size", o->n_ubatch, 1, 65536,
             "prompt tokens per step, for sliding windows (also -ub)")
      ->group(kModel);
  o->cache.Register(*app);
  AddFormat(*app, o->format, "form of the output")->group("Output");
  return {app, [o] { return PrintPlan(*o); }};
}

}  // namespace qevict::cli
