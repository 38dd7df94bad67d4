// Lists of the command line, and the caches that `--policy A,B --budget X,Y` asks for.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cli/options.h"
#include "qevict/config.h"

namespace qevict::cli {

/// Parts of a text between commas; one empty part of an empty text.
std::vector<std::string> SplitList(std::string_view text);

/// One compressed cache under the names that the user gave.
struct CacheChoice {
  std::string policy, budget;  ///< policy: or a whole configuration; then, and for the full
                               ///< preset, no budget
  Config config;
};
/// policies x budgets on top of `base`, the full preset once, as it has no budget (no policies:
/// none); then `configs`, each a configuration on top of `base`. Errors: kInvalidArgument.
Result<std::vector<CacheChoice>> CacheChoices(std::string_view policies, std::string_view budgets,
                                              std::span<const std::string> configs,
                                              const Config& base);

/// The options of commands that try several caches: --policy and --budget (lists), --cache (any
/// number of times, beside or, if --policy is not given, instead of them), --pack-all, and
/// ConfigOptions.
class CacheListOptions {
 public:
  CacheListOptions(std::string policies, std::string budgets)
      : policies_(std::move(policies)), budgets_(std::move(budgets)) {}
  void Register(CLI::App& app);
  /// Errors: kInvalidArgument, kNotFound (file of --config).
  Result<std::vector<CacheChoice>> Build() const;

 private:
  std::string policies_, budgets_;
  std::vector<std::string> caches_;
  bool pack_all_ = false;
  const CLI::Option *policy_option_ = nullptr, *budget_option_ = nullptr;
  ConfigOptions config_;
};

}  // namespace qevict::cli
