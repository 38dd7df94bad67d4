// The text of Config::rungs: 1 to kMaxRungs - 1 items separated by `/`, each BITS or CODEC:BITS,
// best first. BITS alone are those of Config::codec.
#include <charconv>
#include <optional>

#include "base/config_keys.h"
#include "qevict/ladder.h"

namespace qevict {
namespace {

std::optional<CodecId> CodecNamed(std::string_view name) {
  for (uint8_t i = 0; i <= static_cast<uint8_t>(CodecId::kKvTuner); ++i) {
    if (name == CodecName(static_cast<CodecId>(i))) return static_cast<CodecId>(i);
  }
  return std::nullopt;
}

std::optional<RungSpec> ParseRung(std::string_view text, CodecId standard) {
  const size_t colon = text.find(':');
  std::optional<CodecId> codec = standard;
  if (colon != std::string_view::npos) {
    codec = CodecNamed(text.substr(0, colon));
    text = text.substr(colon + 1);
  }
  double bits = 0.0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, bits, std::chars_format::fixed);
  if (!codec || error != std::errc() || at != end || !(bits >= 1.0 && bits <= 8.0))
    return std::nullopt;
  const auto quarters = static_cast<uint32_t>(bits * 4.0);
  if (quarters != bits * 4.0) return std::nullopt;
  return RungSpec{*codec, quarters};
}

/// Empty if the text is no such list.
std::vector<RungSpec> ParseRungs(std::string_view text, CodecId standard) {
  std::vector<RungSpec> rungs;
  while (true) {
    const size_t slash = text.find('/');
    const std::optional<RungSpec> rung = ParseRung(text.substr(0, slash), standard);
    if (!rung || rungs.size() + 1 >= kMaxRungs) return {};
    rungs.push_back(*rung);
    if (slash == std::string_view::npos) return rungs;
    text = text.substr(slash + 1);
  }
}

}  // namespace

std::vector<RungSpec> RungsOf(const Config& config) {
  if (config.rungs.empty()) return {{config.codec, config.bits * 4 + config.quarter_bits}};
  return ParseRungs(config.rungs, config.codec);
}

namespace internal {

bool RungsAreValid(const Config& config) {
  return config.rungs.empty() ||
         (config.rungs.size() <= 256 && !ParseRungs(config.rungs, config.codec).empty());
}

Status CheckRungs(const Config& config) {
  if (config.rungs.empty()) return {};
  if (!config.layer_bits.empty()) {
    return InvalidArgument(Join({"layer_bits=", Shown(config.layer_bits),
                                 " is not legal with rungs=", config.rungs, ": expected none"}));
  }
  for (const RungSpec& spec : RungsOf(config)) {
    Config rung = config;
    rung.rungs.clear();
    rung.codec = spec.codec;
    rung.bits = spec.quarter_bits / 4;
    rung.quarter_bits = spec.quarter_bits % 4;
    if (rung.codec != CodecId::kWaterFill) rung.statistics.clear();
    QEVICT_RETURN_IF_ERROR(CheckCodec(rung));
  }
  return {};
}

}  // namespace internal
}  // namespace qevict
