#include "base/config_keys.h"

#include <charconv>
#include <cmath>
#include <iterator>
#include <optional>

namespace qevict::internal {
namespace {

// ---- Numbers. std::from_chars: no locale, no exceptions; a number must fill the whole text. ----

template <typename T>
std::optional<T> ParseNumber(std::string_view text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end) return std::nullopt;
  return value;
}

/// Shortest text that reads back as the same value.
template <typename T>
std::string NumberText(T value) {
  char buffer[64];
  const auto [end, error] = std::to_chars(buffer, buffer + sizeof buffer, value);
  return error == std::errc() ? std::string(buffer, end) : std::string();
}

// ---- By member. A reader returns false if the text cannot be of the value's type. ----

template <auto kMember>
bool ReadNumber(std::string_view text, Config& config) {
  using T = std::remove_reference_t<decltype(config.*kMember)>;
  const std::optional<T> value = ParseNumber<T>(text);
  if (value) config.*kMember = *value;
  return value.has_value();
}

template <auto kMember>
std::string WriteNumber(const Config& config) {
  return NumberText(config.*kMember);
}

template <auto kMember, uint64_t kLow, uint64_t kHigh>
bool InRange(const Config& config) {
  return config.*kMember >= kLow && config.*kMember <= kHigh;
}

/// Names of the enumerators, in the order of their values.
constexpr std::string_view kPresetNames[] = {"full", "streaming", "qevict", "pack"};
constexpr std::string_view kPromotionNames[] = {"codes", "pinned", "none"};
constexpr std::string_view kCodecNames[] = {
    "kivi",     "token", "wf",   "kivi_clip", "kivi_post", "byte_grid", "kvquant",
    "zipcache", "ott",   "nqkv", "hqe",       "hadamard",  "kvtuner"};
constexpr std::string_view kPrefillNames[] = {"auto", "full", "bounded"};
constexpr std::string_view kReportNames[] = {"budget", "full"};
constexpr std::string_view kScoreNames[] = {"cumulative", "ema", "p_norm", "key_norm"};
constexpr std::string_view kLocalModeNames[] = {"aligned", "windows"};

template <auto kMember, const auto& kNames>
bool ReadName(std::string_view text, Config& config) {
  using E = std::remove_reference_t<decltype(config.*kMember)>;
  for (size_t i = 0; i < std::size(kNames); ++i) {
    if (text == kNames[i]) {
      config.*kMember = static_cast<E>(i);
      return true;
    }
  }
  return false;
}

template <auto kMember, const auto& kNames>
std::string WriteName(const Config& config) {
  const size_t i = static_cast<size_t>(config.*kMember);
  return std::string(i < std::size(kNames) ? kNames[i] : std::string_view("?"));
}

template <auto kMember, const auto& kNames>
bool IsNamed(const Config& config) {
  return static_cast<size_t>(config.*kMember) < std::size(kNames);
}

std::optional<bool> ParseBool(std::string_view text) {
  if (text == "true" || text == "on" || text == "1") return true;
  if (text == "false" || text == "off" || text == "0") return false;
  return std::nullopt;
}

template <auto kMember>
bool ReadBool(std::string_view text, Config& config) {
  const std::optional<bool> value = ParseBool(text);
  if (value) config.*kMember = *value;
  return value.has_value();
}

template <auto kMember>
std::string WriteBool(const Config& config) {
  return config.*kMember ? "true" : "false";
}

bool AlwaysValid(const Config&) { return true; }

// ---- Keys with a form of their own ----
// What is not in force goes back to its default, so that equal texts mean equal configurations.

bool ReadPreset(std::string_view text, Config& config) {
  if (!ReadName<&Config::preset, kPresetNames>(text, config)) return false;
  if (config.preset == Preset::kFull) {
    config.budget_fraction = 1.0;
    config.budget_bytes = 0;
  }
  return true;
}

struct Unit {
  std::string_view name;
  uint64_t bytes;
};
constexpr Unit kUnits[] = {
    {"TiB", uint64_t{1} << 40},
    {"GiB", uint64_t{1} << 30},
    {"MiB", uint64_t{1} << 20},
    {"KiB", 1024},
    {"B", 1},
};
constexpr uint64_t kMaxBudgetBytes = uint64_t{1} << 60;

/// Whole bytes of `number` units; nullopt if it is no number, not positive, or too large.
std::optional<uint64_t> ParseBytes(std::string_view number, uint64_t unit) {
  if (const std::optional<uint64_t> whole = ParseNumber<uint64_t>(number)) {
    if (*whole == 0 || *whole > kMaxBudgetBytes / unit) return std::nullopt;
    return *whole * unit;
  }
  const std::optional<double> value = ParseNumber<double>(number);
  if (!value) return std::nullopt;
  const double bytes = *value * static_cast<double>(unit);
  if (!(bytes >= 1.0 && bytes <= static_cast<double>(kMaxBudgetBytes))) return std::nullopt;
  return static_cast<uint64_t>(bytes);
}

bool ReadBudget(std::string_view text, Config& config) {
  for (const Unit& unit : kUnits) {
    if (!text.ends_with(unit.name)) continue;
    const std::optional<uint64_t> bytes =
        ParseBytes(text.substr(0, text.size() - unit.name.size()), unit.bytes);
    if (!bytes) return false;
    config.budget_bytes = *bytes;
    config.budget_fraction = Config{}.budget_fraction;
    return true;
  }
  const bool percent = text.ends_with('%');
  if (percent) text.remove_suffix(1);
  const std::optional<double> value = ParseNumber<double>(text);
  if (!value) return false;
  config.budget_fraction = percent ? *value / 100.0 : *value;
  config.budget_bytes = 0;
  return true;
}

std::string WriteBudget(const Config& config) {
  if (config.budget_bytes == 0) return NumberText(config.budget_fraction);
  for (const Unit& unit : kUnits) {
    if (config.budget_bytes % unit.bytes == 0) {
      return NumberText(config.budget_bytes / unit.bytes).append(unit.name);
    }
  }
  return {};
}

bool BudgetIsValid(const Config& config) {
  if (config.budget_bytes != 0) return config.budget_bytes <= kMaxBudgetBytes;
  return config.budget_fraction > 0.0 && config.budget_fraction <= 1.0;
}

constexpr uint32_t kMaxRecents = 1u << 20;

bool ReadRecents(std::string_view text, Config& config) {
  const bool percent = text.ends_with('%');
  if (percent) text.remove_suffix(1);
  const std::optional<uint32_t> value = ParseNumber<uint32_t>(text);
  if (!value || (percent && *value == 0)) return false;
  config.recents = percent ? Config{}.recents : *value;
  config.recents_percent = percent ? *value : 0;
  return true;
}

std::string WriteRecents(const Config& config) {
  if (config.recents_percent != 0) return NumberText(config.recents_percent).append("%");
  return NumberText(config.recents);
}

bool RecentsAreValid(const Config& config) {
  return config.recents <= kMaxRecents && config.recents_percent <= 100;
}

bool WindowIsValid(const Config& config) {
  const uint32_t w = config.window;
  return w >= 1 && w <= 32 && (w & (w - 1)) == 0;
}

bool ReadQ(std::string_view text, Config& config) {
  const std::optional<double> value = ParseNumber<double>(text);
  if (!value || !(*value >= 0.0 && *value <= 1.0)) return false;
  const double scaled = *value * 1000.0;
  const uint32_t permille = static_cast<uint32_t>(std::lround(scaled));
  const double rest = scaled - permille;
  if (rest > 1e-6 || rest < -1e-6) return false;
  config.q_permille = permille;
  return true;
}

std::string WriteQ(const Config& config) { return NumberText(config.q_permille / 1000.0); }

bool ReadScores(std::string_view text, Config& config) {
  if (text != "steps" && text != "events") return false;
  config.event_scores = text == "events";
  return true;
}

std::string WriteScores(const Config& config) { return config.event_scores ? "events" : "steps"; }

bool ReadBits(std::string_view text, Config& config) {
  const std::optional<double> value = ParseNumber<double>(text);
  if (!value || !(*value >= 0.0 && *value <= 8.0) || *value * 4.0 != std::floor(*value * 4.0)) {
    return false;
  }
  config.bits = static_cast<uint32_t>(*value);
  config.quarter_bits = static_cast<uint32_t>(*value * 4.0) % 4;
  return true;
}

std::string WriteBits(const Config& config) {
  return NumberText(config.bits + config.quarter_bits / 4.0);
}

bool BitsAreValid(const Config& config) {
  if (config.quarter_bits > 3) return false;
  const uint32_t b = config.bits;
  return (b >= 1 && b <= 4) || b == 8;
}

bool ReadLayerBits(std::string_view text, Config& config) {
  config.layer_bits = text;
  return true;
}

std::string WriteLayerBits(const Config& config) { return config.layer_bits; }

/// Text that a later check reads: names of policies and parameters, which this module does not
/// know.
template <auto kMember>
bool ReadWords(std::string_view text, Config& config) {
  config.*kMember = text;
  return true;
}
template <auto kMember>
std::string WriteWords(const Config& config) {
  return config.*kMember;
}
template <auto kMember>
bool WordsAreValid(const Config& config) {
  constexpr std::string_view kLegal = "abcdefghijklmnopqrstuvwxyz0123456789_-.:/+eE";
  const std::string& text = config.*kMember;
  return text.size() <= 256 && text.find_first_not_of(kLegal) == std::string::npos;
}

bool ReadRungs(std::string_view text, Config& config) {
  config.rungs = text;
  return true;
}

std::string WriteRungs(const Config& config) { return config.rungs; }

bool ReadStatistics(std::string_view text, Config& config) {
  config.statistics = text;
  return true;
}

std::string WriteStatistics(const Config& config) { return config.statistics; }

bool StatisticsAreValid(const Config& config) {
  return config.statistics.size() <= 4096 &&
         config.statistics.find_first_of(",#\n") == std::string::npos;
}

bool LambdaIsValid(const Config& config) {
  return config.ema_lambda > 0.0 && config.ema_lambda < 1.0;
}
bool PNormIsValid(const Config& config) { return config.p_norm >= 1.0 && config.p_norm <= 64.0; }
bool SignIsValid(const Config& config) {
  return config.key_norm_sign == 1 || config.key_norm_sign == -1;
}

constexpr char kCodecLegal[] =
    "kivi, token, wf, kivi_clip, kivi_post, byte_grid, kvquant, zipcache, ott, nqkv, hqe, "
    "hadamard or kvtuner";

// ---- The table, in the order of the canonical text (preset first: it sets other keys). ----

constexpr uint64_t kMaxInt = 0x7FFFFFFF;

constexpr ConfigKey kKeys[] = {
    {"preset", "full, streaming, qevict or pack", ReadPreset,
     WriteName<&Config::preset, kPresetNames>, IsNamed<&Config::preset, kPresetNames>},
    {"budget",
     "a share in (0, 1] such as 20% or 0.2, or bytes with a unit (B, KiB, MiB, GiB, TiB) up to "
     "1048576TiB",
     ReadBudget, WriteBudget, BudgetIsValid},
    {"budget_tokens", "0 to 2147483647 tokens, 0 = the context size",
     ReadNumber<&Config::budget_tokens>, WriteNumber<&Config::budget_tokens>,
     InRange<&Config::budget_tokens, 0, kMaxInt>},
    {"sinks", "0 to 65536 tokens", ReadNumber<&Config::sinks>, WriteNumber<&Config::sinks>,
     InRange<&Config::sinks, 0, 65536>},
    {"recents", "0 to 1048576 tokens or 1% to 100% of the tokens that the budget holds",
     ReadRecents, WriteRecents, RecentsAreValid},
    {"window", "1, 2, 4, 8, 16 or 32 tokens", ReadNumber<&Config::window>,
     WriteNumber<&Config::window>, WindowIsValid},
    {"interval", "0 to 65536 tokens, 0 = the window", ReadNumber<&Config::interval>,
     WriteNumber<&Config::interval>, InRange<&Config::interval, 0, 65536>},
    {"q", "0 to 1 with at most three decimals", ReadQ, WriteQ,
     InRange<&Config::q_permille, 0, 1000>},
    {"policy", "a name that `qevict policies` lists, or nothing for the preset's",
     ReadWords<&Config::policy>, WriteWords<&Config::policy>, WordsAreValid<&Config::policy>},
    {"params", "NAME:VALUE of the policy's parameters, several between slashes",
     ReadWords<&Config::params>, WriteWords<&Config::params>, WordsAreValid<&Config::params>},
    {"codec", kCodecLegal, ReadName<&Config::codec, kCodecNames>,
     WriteName<&Config::codec, kCodecNames>, IsNamed<&Config::codec, kCodecNames>},
    {"bits", "1, 2, 3, 4 or 8, or with codec=wf 1 to 4 in steps of 0.25", ReadBits, WriteBits,
     BitsAreValid},
    {"rungs",
     "1 to 7 packed rungs, best first, as BITS or CODEC:BITS between slashes, such as 4/2.5/1.5",
     ReadRungs, WriteRungs, RungsAreValid},
    {"layer_bits",
     "LAYERS:K/V items such as *:4/2;0:8/8;1-3:4/4, bits 1, 2, 3, 4 or 8, or with codec=wf 0.25 "
     "to 8 in steps of 0.25; or, with statistics, an average of 1 to 4",
     ReadLayerBits, WriteLayerBits, LayerBitsAreValid},
    {"statistics", "the path of a file, without commas or #, at most 4096 characters",
     ReadStatistics, WriteStatistics, StatisticsAreValid},
    {"promotion", "codes, pinned or none", ReadName<&Config::promotion, kPromotionNames>,
     WriteName<&Config::promotion, kPromotionNames>, IsNamed<&Config::promotion, kPromotionNames>},
    {"prefill", "auto, full or bounded", ReadName<&Config::prefill, kPrefillNames>,
     WriteName<&Config::prefill, kPrefillNames>, IsNamed<&Config::prefill, kPrefillNames>},
    {"report", "budget or full", ReadName<&Config::report, kReportNames>,
     WriteName<&Config::report, kReportNames>, IsNamed<&Config::report, kReportNames>},
    {"local_mode", "aligned or windows", ReadName<&Config::local_mode, kLocalModeNames>,
     WriteName<&Config::local_mode, kLocalModeNames>,
     IsNamed<&Config::local_mode, kLocalModeNames>},
    {"charge_dormant", "true or false", ReadBool<&Config::charge_dormant>,
     WriteBool<&Config::charge_dormant>, AlwaysValid},
    {"fill_slack", "true or false", ReadBool<&Config::fill_slack>, WriteBool<&Config::fill_slack>,
     AlwaysValid},
    {"per_head", "true or false", ReadBool<&Config::per_head>, WriteBool<&Config::per_head>,
     AlwaysValid},
    {"scores", "steps or events", ReadScores, WriteScores, AlwaysValid},
    {"init_rows", "0 to 2147483647 rows, 0 = all", ReadNumber<&Config::init_rows>,
     WriteNumber<&Config::init_rows>, InRange<&Config::init_rows, 0, kMaxInt>},
    {"first_event", "0 to 2147483647 steps", ReadNumber<&Config::first_event>,
     WriteNumber<&Config::first_event>, InRange<&Config::first_event, 0, kMaxInt>},
    {"score", "cumulative, ema, p_norm or key_norm", ReadName<&Config::score, kScoreNames>,
     WriteName<&Config::score, kScoreNames>, IsNamed<&Config::score, kScoreNames>},
    {"ema_lambda", "between 0 and 1, both excluded", ReadNumber<&Config::ema_lambda>,
     WriteNumber<&Config::ema_lambda>, LambdaIsValid},
    {"p_norm", "1 to 64", ReadNumber<&Config::p_norm>, WriteNumber<&Config::p_norm>, PNormIsValid},
    {"key_norm_sign", "-1 or 1", ReadNumber<&Config::key_norm_sign>,
     WriteNumber<&Config::key_norm_sign>, SignIsValid},
    {"check", "true or false", ReadBool<&Config::check>, WriteBool<&Config::check>, AlwaysValid},
};

}  // namespace

std::span<const ConfigKey> ConfigKeys() { return kKeys; }

std::string Join(std::initializer_list<std::string_view> parts) {
  std::string joined;
  for (const std::string_view part : parts) joined += part;
  return joined;
}

std::string Shown(std::string_view text) {
  constexpr size_t kMaxShown = 60;
  std::string shown(text.substr(0, kMaxShown));
  for (char& c : shown) {
    if (c < 0x20 || c > 0x7E) c = '?';
  }
  if (text.size() > kMaxShown) shown += "...";
  return shown;
}

Status CheckCodec(const Config& config) {
  const auto refuse = [&config](std::string_view key, std::string value, std::string_view legal) {
    const std::string_view codec = kCodecNames[static_cast<size_t>(config.codec)];
    return InvalidArgument(
        Join({key, "=", Shown(value), " is not legal with codec=", codec, ": expected ", legal}));
  };
  const std::string bits = WriteBits(config);
  const bool whole = config.quarter_bits == 0;
  switch (config.codec) {
    case CodecId::kWaterFill:
      if (config.bits * 4 + config.quarter_bits > 16)
        return refuse("bits", bits, "1 to 4 in steps of 0.25");
      break;
    case CodecId::kKvQuant:
    case CodecId::kHadamard:
      if (!whole || config.bits > 4) return refuse("bits", bits, "1, 2, 3 or 4");
      break;
    case CodecId::kNqkv:
      if (!whole || config.bits != 4) return refuse("bits", bits, "4");
      break;
    case CodecId::kHqe:
      if (!whole || config.bits == 3) return refuse("bits", bits, "1, 2, 4 or 8");
      break;
    default:
      if (!whole) return refuse("bits", bits, "1, 2, 3, 4 or 8");
  }
  if (config.codec != CodecId::kKvTuner && config.codec != CodecId::kWaterFill &&
      !config.layer_bits.empty()) {
    return refuse("layer_bits", config.layer_bits, "none");
  }
  if (AverageLayerBits(config) && config.statistics.empty()) {
    return refuse("layer_bits", config.layer_bits,
                  "LAYERS:K/V items; an average needs codec=wf and statistics");
  }
  if (!LayerBitsFit(config)) {
    return refuse("layer_bits", config.layer_bits,
                  config.codec == CodecId::kWaterFill ? "bits of 0.25 to 8 in steps of 0.25"
                                                      : "bits 1, 2, 3, 4 or 8");
  }
  if (config.codec != CodecId::kWaterFill && !config.statistics.empty()) {
    return refuse("statistics", config.statistics, "none");
  }
  const bool any_window =
      config.codec == CodecId::kKiviAxis && (config.bits == 2 || config.bits == 4);
  if (!any_window && config.window < 8) {
    return refuse("window", NumberText(config.window), "8, 16 or 32 tokens");
  }
  return {};
}

}  // namespace qevict::internal

namespace qevict {

const char* PresetName(Preset preset) {
  const size_t i = static_cast<size_t>(preset);
  return i < std::size(internal::kPresetNames) ? internal::kPresetNames[i].data() : "?";
}

const char* CodecName(CodecId codec) {
  const size_t i = static_cast<size_t>(codec);
  return i < std::size(internal::kCodecNames) ? internal::kCodecNames[i].data() : "?";
}

}  // namespace qevict
