// Options that several commands share, and what CLI11 lacks: llama.cpp's `-ub` style names, numbers
// whose errors name value and limit, help with defaults.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/text.h"
#include "qevict/config.h"

namespace qevict::cli {

/// A command as main() runs it.
struct Command {
  CLI::App* app = nullptr;
  std::function<int()> run;        ///< returns the exit code
  bool takes_passthrough = false;  ///< options behind `--` mean something
};

/// Arguments in the form that CLI11 understands.
struct Arguments {
  std::vector<std::string> words;        ///< in order, without the program's name
  std::vector<std::string> passthrough;  ///< what follows the first `--`
  bool has_separator = false;
};
/// Rewrites llama.cpp's names of several letters behind one dash (-ub N, -np N, -no-cnv) and splits
/// at `--`.
Arguments SplitArguments(int argc, const char* const* argv);

/// Prints "qevict: sentence" to stderr and returns the exit code: 2 for what the user can correct
/// (bad value, missing file), 1 for the rest.
int Fail(const Status& status);

/// Exit codes.
inline constexpr int kOk = 0, kRuntimeFailure = 1, kUsageError = 2;

/// Help as this project prints it: `what`, a usage line, grouped options with defaults, examples.
void SetHelp(CLI::App& app, const std::string& what, const std::string& usage,
             const std::string& examples);

/// An integer option. A value that is no integer in [low, high] is a usage error that says so.
CLI::Option* AddInteger(CLI::App& app, const std::string& names, int64_t& target, int64_t low,
                        int64_t high, const std::string& help);
CLI::Option* AddReal(CLI::App& app, const std::string& names, double& target, double low,
                     double high, const std::string& help);
CLI::Option* AddFlag(CLI::App& app, const std::string& names, bool& target,
                     const std::string& help);
CLI::Option* AddText(CLI::App& app, const std::string& names, std::string& target,
                     const std::string& type, const std::string& help);
/// -o FORMAT; `json_lines` if the command can print a line per result, too.
CLI::Option* AddFormat(CLI::App& app, Format& target, const std::string& help,
                       bool json_lines = false);
/// -m MODEL
CLI::Option* AddModel(CLI::App& app, std::string& target);

/// The configuration of a cache: --budget and its companions, --set, --config.
class ConfigOptions {
 public:
  /// Registers the options in the group "Cache". Without `budget_and_preset` the command has its
  /// own --budget and
  /// --policy (lists).
  void Register(CLI::App& app, bool budget_and_preset = true);
  /// All settings on top of `defaults`. Errors: kInvalidArgument, kNotFound (file of --config).
  Result<Config> Build(const Config& defaults = {}) const;

 private:
  void AddKey(CLI::App& app, const std::string& names, const std::string& key,
              const std::string& type, const std::string& fallback, const std::string& help);

  std::string base_;
  std::vector<std::pair<std::string, std::string>> values_;
  std::vector<std::string> sets_;
};

/// Checks that `path` is a readable GGUF file. Errors: kNotFound, kInvalidArgument.
Status CheckModelFile(const std::string& path);
/// Whole file. Errors: kNotFound.
Result<std::string> ReadTextFile(const std::string& path);
/// CPUs that this process may use.
unsigned UsableCpus();
/// Integer of the whole text, or nothing.
bool ParseInteger(std::string_view text, int64_t& value);

}  // namespace qevict::cli
