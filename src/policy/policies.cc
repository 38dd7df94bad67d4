// How a configuration names a policy and its parameters.
#include "policy/policies.h"

#include <charconv>
#include <optional>
#include <string>

namespace qevict {
namespace {

struct Param {
  std::string_view name;
  std::optional<double> value;
};

/// Cuts the first NAME:VALUE off `text`.
Param NextParam(std::string_view& text) {
  const std::string_view item = text.substr(0, text.find('/'));
  text.remove_prefix(std::min(text.size(), item.size() + 1));
  const size_t colon = item.find(':');
  Param param{item.substr(0, colon), std::nullopt};
  if (colon == std::string_view::npos) return param;
  const std::string_view number = item.substr(colon + 1);
  double value = 0.0;
  const auto [at, error] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (error == std::errc() && at == number.data() + number.size()) param.value = value;
  return param;
}

std::string NumberText(double x) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text), x);
  return error == std::errc() ? std::string(text, end) : "?";
}

std::string LegalParams(const Policy& policy) {
  if (policy.params.empty()) return "none";
  std::string legal;
  for (const PolicyParam& p : policy.params) {
    legal += (legal.empty() ? "" : ", ") + std::string(p.name) + " from " + NumberText(p.lowest) +
             " to " + NumberText(p.highest);
  }
  return legal;
}

}  // namespace

std::span<const Policy* const> Policies() { return kPolicies; }

const Policy* FindPolicy(std::string_view name) {
  for (const Policy* policy : kPolicies) {
    if (policy->name == name) return policy;
  }
  return nullptr;
}

const Policy& PolicyOf(const Config& config) {
  const Policy* policy =
      FindPolicy(config.policy.empty() ? PresetName(config.preset) : config.policy);
  return policy != nullptr ? *policy : kFullPolicy;
}

Status CheckPolicy(const Config& config) {
  if (!config.policy.empty() && FindPolicy(config.policy) == nullptr) {
    std::string names;
    for (const Policy* policy : kPolicies)
      names += (names.empty() ? "" : ", ") + std::string(policy->name);
    return InvalidArgument("policy=" + config.policy + " does not exist: expected one of " + names);
  }
  const Policy& policy = PolicyOf(config);
  for (std::string_view rest = config.params; !rest.empty();) {
    const Param param = NextParam(rest);
    bool legal = false;
    for (const PolicyParam& p : policy.params) {
      legal |= p.name == param.name && param.value && *param.value >= p.lowest &&
               *param.value <= p.highest;
    }
    if (legal) continue;
    return InvalidArgument("params=" + config.params + " is not legal with the policy " +
                           std::string(policy.name) + ": expected " + LegalParams(policy));
  }
  return {};
}

double ParamOf(const Config& config, const Policy& policy, std::string_view name) {
  double value = 0.0;
  for (const PolicyParam& p : policy.params) {
    if (p.name == name) value = p.standard;
  }
  for (std::string_view rest = config.params; !rest.empty();) {
    const Param param = NextParam(rest);
    if (param.name == name && param.value) value = *param.value;
  }
  return value;
}

bool DueEveryInterval(const Phase& phase, const Config& config) {
  if (phase.kind != Phase::kDecode) return false;
  const uint64_t interval = config.EffectiveInterval();
  for (uint64_t step = phase.step; step < phase.step + phase.n_rows; ++step) {
    if (step >= config.first_event && (step - config.first_event) % interval == 0) return true;
  }
  return false;
}

}  // namespace qevict
