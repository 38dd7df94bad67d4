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
                                              std::span<const std::string> configs,
                                              const Config& base) {
  std::vector<CacheChoice> choices;
  const std::vector<std::string> names =
      policies.empty() ? std::vector<std::string>{} : SplitList(policies);
  for (const std::string& policy : names) {
    for (const std::string& budget : SplitList(budgets)) {
      Result<Config> config = ParseConfig("preset=" + policy, base);
      if (!config.ok()) return config.status();
      if (const Status status = ParseBudget(budget, *config); !status.ok()) return status;
      const bool full = config->preset == Preset::kFull;
      choices.push_back({policy, full ? "" : budget, *config});
      if (full) break;
    }
  }
  for (const std::string& text : configs) {
    Result<Config> config = ParseConfig(text, base);
    if (!config.ok()) return config.status();
    choices.push_back({text, "", *config});
  }
  return choices;
}

void CacheListOptions::Register(CLI::App& app) {
  budget_option_ = AddText(app, "--budget", budgets_, "SIZES",
                           "budgets, separated by commas: shares of f16 or bytes")
                       ->default_str(budgets_)
                       ->group("Cache");
  policy_option_ = AddText(app, "--preset,--policy", policies_, "NAMES",
                           "presets, separated by commas; full has no budget")
                       ->default_str(policies_)
                       ->group("Cache");
  app.add_option("--cache", caches_,
                 "one more cache as a whole configuration; may be given\nmore than once")
      ->type_name("KEY=VALUE,..")
      ->expected(1)
      ->take_all()
      ->group("Cache");
  AddFlag(app, "--pack-all", pack_all_,
          "compare codecs alone: everything but 8 sinks and the recents is\n"
          "packed, nothing evicted (preset pack, budget 100%)")
      ->group("Cache");
  config_.Register(app, false);
}

Result<std::vector<CacheChoice>> CacheListOptions::Build() const {
  Config defaults;
  if (pack_all_) {
    for (const CLI::Option* option : {policy_option_, budget_option_}) {
      if (option->count() == 0) continue;
      return InvalidArgument("--pack-all and " + option->get_name() + " " +
                             option->as<std::string>() +
                             " exclude each other: it is preset pack at 100%");
    }
    defaults.preset = Preset::kPack;
    defaults.budget_fraction = 1.0;
    defaults.sinks = 8;
  }
  const Result<Config> base = config_.Build(defaults);
  if (!base.ok()) return base.status();
  const bool only_caches = !caches_.empty() && policy_option_->count() == 0;
  const std::string policies = only_caches ? "" : pack_all_ ? "pack" : policies_;
  return CacheChoices(policies, pack_all_ ? "100%" : budgets_, caches_, *base);
}

}  // namespace qevict::cli
