#include "cli/cache_choice.h"

#include <algorithm>

namespace qevict::cli {

std::vector<std::string> SplitList(std::string_view text) {
  std::vector<std::string> items;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    items.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return items;
}

Result<std::vector<CacheChoice>> CacheChoices(std::string_view policies, std::string_view budgets,
                                              const Config& base) {
  std::vector<CacheChoice> choices;
  for (const std::string& policy : SplitList(policies)) {
    for (const std::string& budget : SplitList(budgets)) {
      Result<Config> config = ParseConfig("preset=" + policy, base);
      if (!config.ok()) return config.status();
      if (const Status status = ParseBudget(budget, *config); !status.ok()) return status;
      const bool full = config->preset == Preset::kFull;
      choices.push_back({policy, full ? "" : budget, *config});
      if (full) break;
    }
  }
  return choices;
}

}  // namespace qevict::cli
