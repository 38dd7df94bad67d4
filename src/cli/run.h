// qevict run: a prompt, an answer, and what the cache did.
#pragma once

#include "cli/generate.h"
#include "cli/options.h"

namespace qevict::cli {

/// What `run` and its comparison share.
struct RunOptions {
  std::string model, prompt, file, system;
  int64_t n_predict = 256, n_ctx = 0, n_batch = 512, n_ubatch = 512, n_threads = 0;
  bool chat = false, no_chat = false, compare = false, verbose = false;
  Format format = Format::kMarkdown;
  Sampling sampling;
  ConfigOptions cache;

  ContextOptions context_options() const;
};

/// A prompt ready to be read, and the sizes that follow from it.
struct Task {
  std::vector<llama_token> prompt;
  uint32_t n_predict = 0;
  uint32_t n_ctx = 0;
  uint32_t n_total() const { return static_cast<uint32_t>(prompt.size()) + n_predict; }
};

/// run --compare. `model` is on the device QEVICT. Returns the exit code.
int RunCompare(const RunOptions& options, const Config& config, const Model& model,
               const Task& task);

/// Writes text to stdout at once.
void PrintText(const std::string& text);

}  // namespace qevict::cli
