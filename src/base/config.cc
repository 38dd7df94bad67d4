// Text form of Config, driven by one table (config_keys.cc): a row per key says how it is read,
// written and checked, and what is legal. Every error message is made from that table, so the range
// that is stated is the range that is enforced.
#include "qevict/config.h"

#include <array>
#include <optional>
#include <span>

#include "base/config_keys.h"
#include "base/file.h"

namespace qevict {

using internal::CheckCodec;
using internal::ConfigKey;
using internal::ConfigKeys;
using internal::Join;
using internal::Shown;

namespace {

// ---- Messages ----

Status BadValue(const ConfigKey& key, std::string_view value) {
  return InvalidArgument(
      Join({key.name, "=", Shown(value), " is not legal: expected ", key.legal}));
}

Status UnknownKey(std::string_view name, std::string_view value) {
  std::string message =
      Join({"unknown key ", Shown(name), " (value ", Shown(value), "): expected one of"});
  for (const ConfigKey& key : ConfigKeys()) message += Join({" ", key.name});
  return InvalidArgument(std::move(message));
}

const ConfigKey* FindKey(std::string_view name) {
  for (const ConfigKey& key : ConfigKeys()) {
    if (key.name == name) return &key;
  }
  return nullptr;
}

// ---- Text ----

constexpr std::string_view kSpace = " \t\r\n\v\f";

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

/// Cuts the part before the first `separator` off `text`.
std::string_view TakeUntil(std::string_view& text, char separator) {
  const size_t at = text.find(separator);
  const std::string_view head = text.substr(0, at);
  text = at == std::string_view::npos ? std::string_view{} : text.substr(at + 1);
  return head;
}

Status SetValue(const ConfigKey& key, std::string_view value, Config& config) {
  if (!key.read(value, config) || !key.valid(config)) return BadValue(key, value);
  return {};
}

/// Applies one `key=value`; `seen` marks keys that this text has already set.
Status ApplyItem(std::string_view item, std::span<bool> seen, Config& config) {
  const size_t equals = item.find('=');
  if (equals == std::string_view::npos) {
    return InvalidArgument(Join({"`", Shown(item), "` has no value: expected key=value"}));
  }
  const std::string_view name = Trim(item.substr(0, equals));
  const std::string_view value = Trim(item.substr(equals + 1));
  const ConfigKey* key = FindKey(name);
  if (key == nullptr) return UnknownKey(name, value);
  bool& was_seen = seen[static_cast<size_t>(key - ConfigKeys().data())];
  if (was_seen) {
    return InvalidArgument(Join(
        {"key ", name, " is given twice (the second value is ", Shown(value), "): expected once"}));
  }
  was_seen = true;
  return SetValue(*key, value, config);
}

constexpr size_t kMaxFileBytes = size_t{1} << 20;

}  // namespace

Status ParseBudget(std::string_view text, Config& config) {
  Config changed = config;
  QEVICT_RETURN_IF_ERROR(SetValue(*FindKey("budget"), Trim(text), changed));
  config = changed;
  return {};
}

Result<Config> ParseConfig(std::string_view text, const Config& base) {
  Config config = base;
  std::array<bool, 64> seen{};  // more than there are keys
  while (!text.empty()) {
    std::string_view line = TakeUntil(text, '\n');
    line = TakeUntil(line, '#');
    while (!line.empty()) {
      const std::string_view item = Trim(TakeUntil(line, ','));
      if (item.empty()) continue;
      QEVICT_RETURN_IF_ERROR(ApplyItem(item, seen, config));
    }
  }
  QEVICT_RETURN_IF_ERROR(ValidateConfig(config));
  return config;
}

Result<Config> LoadConfig(std::string_view text_or_path, const Config& base) {
  const std::string_view text = Trim(text_or_path);
  if (text.empty() || text.find('=') != std::string_view::npos) return ParseConfig(text, base);
  const std::optional<std::string> contents = ReadFile(std::string(text), kMaxFileBytes);
  if (!contents)
    return NotFound(Join({"`", Shown(text), "` is neither key=value text nor a readable file"}));
  if (contents->size() > kMaxFileBytes) {
    return InvalidArgument(Join({"configuration file ", Shown(text), " is larger than 1 MiB"}));
  }
  Result<Config> config = ParseConfig(*contents, base);
  if (config.ok()) return config;
  return Status(config.status().code(),
                Join({"in ", Shown(text), ": ", config.status().message()}));
}

Status ValidateConfig(const Config& config) {
  for (const ConfigKey& key : ConfigKeys()) {
    if (!key.valid(config)) return BadValue(key, key.write(config));
  }
  QEVICT_RETURN_IF_ERROR(CheckCodec(config));
  QEVICT_RETURN_IF_ERROR(internal::CheckRungs(config));
  if (config.local_mode == LocalMode::kWindows && config.recents_percent == 0 &&
      config.recents < config.window) {
    return InvalidArgument(
        Join({"recents=", std::to_string(config.recents),
              " is not legal with local_mode=windows: expected at least one window of ",
              std::to_string(config.window), " tokens"}));
  }
  return {};
}

std::string ToText(const Config& config) {
  std::string text;
  for (const ConfigKey& key : ConfigKeys()) {
    if (!text.empty()) text += ',';
    text += Join({key.name, "=", key.write(config)});
  }
  return text;
}

}  // namespace qevict
