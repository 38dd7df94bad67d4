// Lists of the command line, and the caches that `--policy A,B --budget X,Y` asks for.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "qevict/config.h"

namespace qevict::cli {

/// Parts of a text between commas; one empty part of an empty text.
std::vector<std::string> SplitList(std::string_view text);

/// One compressed cache under the names that the user gave.
struct CacheChoice {
  std::string policy, budget;  ///< no budget for the full preset
  Config config;
};
/// policies x budgets on top of `base`; the full preset once, as it has no budget. Errors:
/// kInvalidArgument.
Result<std::vector<CacheChoice>> CacheChoices(std::string_view policies, std::string_view budgets,
                                              const Config& base);

}  // namespace qevict::cli
