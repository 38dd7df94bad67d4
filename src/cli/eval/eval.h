// What `qevict eval` measures: chunks of a text are read by the full cache and by compressed ones,
// and the rows of logits behind the prompt are compared.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cli/cache_choice.h"
#include "cli/eval/kld.h"
#include "cli/generate.h"

namespace qevict::cli {

struct EvalOptions {
  std::string command;  ///< as in the output: "eval kld"
  std::string model, file;
  std::string reference = "fa";
  int64_t n_chunks = 8, n_prompt = 3072, n_score = 1024, n_step = 0, n_batch = 512, n_threads = 0;
  int64_t n_depths = 0;    ///< parts of a chunk's scored tokens that are reported apart; 0: none
  bool floor = false;      ///< also the reference's own other attention
  bool divergence = true;  ///< false: perplexity alone
  bool generate = false;   ///< score what the reference generates, not the text
  bool verbose = false;
  Sampling sampling;  ///< of `generate`
  Format format = Format::kMarkdown;
  CacheListOptions caches{"qevict", "100%,40%,20%,10%,5%"};

  size_t chunk_tokens() const { return static_cast<size_t>(n_prompt + n_score); }
};

/// One row of the table: a compressed cache, or the CPU backend without flash attention ("floor").
struct Contender {
  std::string policy, budget;
  std::optional<Config> config;     ///< none: floor
  std::vector<Position> positions;  ///< of all chunks so far, in order
  qevict_stats sum{};               ///< over chunks
};

/// "floor" first, then the caches. Errors: kInvalidArgument, kNotFound.
Result<std::vector<Contender>> MakeContenders(const EvalOptions& options);

/// Tokens per step; tiers must not be due to change inside one.
Result<uint32_t> StepTokens(const EvalOptions& options, std::span<const Contender> contenders);

/// Called when a contender has done a chunk.
using OnChunk = std::function<void(const Contender&, size_t chunk, std::span<const Position>,
                                   const qevict_stats&)>;

/// Runs everything on `text`, with progress on stderr. `positions` and `sum` of the contenders are
/// filled; `on_chunk` may be null. Errors: kInvalidArgument, and those of the model and the caches.
Status RunEval(const EvalOptions& options, uint32_t n_step, const std::string& text,
               std::vector<Contender>& contenders, const OnChunk& on_chunk);

/// Output of the whole: JSON has a line per contender, else a table, and one by depth.
void PrintEval(const EvalOptions& options, uint32_t n_step, std::span<const Contender> contenders);
/// One line of JSON of a chunk.
void PrintEvalChunk(const EvalOptions& options, uint32_t n_step, const Contender& contender,
                    size_t chunk, std::span<const Position> positions, const qevict_stats& stats);

}  // namespace qevict::cli
