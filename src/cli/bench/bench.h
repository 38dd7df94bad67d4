// qevict bench: the plug-in beside llama.cpp's CPU backend, whole models, attention alone, and
// packed formats. Both kinds check the result before they time it, and measure in pairs: the two
// sides take turns within seconds of each other, so that a machine that changes its pace changes
// both.
#pragma once

#include <vector>

#include "cli/options.h"

namespace qevict::cli {

Command AddBenchModel(CLI::App& bench);
Command AddBenchAttention(CLI::App& bench);
Command AddBenchCodecs(CLI::App& bench);

/// One result: cells of the table, and what only JSON shows (samples).
struct BenchRow {
  std::vector<Cell> cells;
  Json details = Json::object();
};
/// Prints all results in the wanted form. `header` is what they have in common; JSON holds it once,
/// JSON lines in each line.
void PrintBench(Format format, const Json& header, const std::vector<Table::Column>& columns,
                const std::vector<BenchRow>& rows);

}  // namespace qevict::cli
