#include "cli/bench/bench.h"

#include "cli/commands.h"
#include "cli/run.h"

namespace qevict::cli {

void PrintBench(Format format, const Json& header, const std::vector<Table::Column>& columns,
                const std::vector<BenchRow>& rows) {
  Table table(columns);
  for (const BenchRow& row : rows) table.Add(row.cells);
  if (format == Format::kMarkdown || format == Format::kCsv) {
    PrintText(format == Format::kCsv ? table.ToCsv() : table.ToMarkdown());
    return;
  }
  Json results = table.ToJson();
  for (size_t i = 0; i < rows.size(); ++i) results[i].update(rows[i].details);
  if (format == Format::kJson) {
    Json document = header;
    document["results"] = std::move(results);
    PrintText(JsonText(document) + "\n");
    return;
  }
  for (const Json& result : results) {
    Json line = header;
    line.update(result);
    PrintText(JsonLine(line) + "\n");
  }
}

std::vector<Command> AddBench(CLI::App& root) {
  CLI::App* bench = root.add_subcommand("bench", "measure speed beside llama.cpp's own cache");
  SetHelp(*bench, "Measures speed beside llama.cpp's CPU backend, in turns within one run.",
          "qevict bench WHAT [options]",
          "  qevict bench model -m model.gguf -d 4096 -n 32\n"
          "  qevict bench attention --shapes 14/2x64 --tokens 16384\n");
  bench->require_subcommand(1)->group("Commands");
  return {AddBenchModel(*bench), AddBenchAttention(*bench), AddBenchCodecs(*bench)};
}

}  // namespace qevict::cli
