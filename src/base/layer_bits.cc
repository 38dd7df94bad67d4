// The text of Config::layer_bits: items separated by `;`, each LAYERS:K/V with LAYERS one layer of
// the model (7), a range (1-3) or * for all. Later items win. Or one number: an average over
// layers, which codecs::WithAllocatedBits replaces by a list.
#include <algorithm>
#include <charconv>

#include "base/config_keys.h"

namespace qevict {
namespace {

struct Item {
  uint32_t first, last;
  LayerBits bits;
};

std::optional<uint32_t> Number(std::string_view text) {
  uint32_t value = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || at != end) return std::nullopt;
  return value;
}

/// Bits in steps of 0.25, in quarters.
std::optional<uint32_t> Quarters(std::string_view text) {
  double value = 0.0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value, std::chars_format::fixed);
  if (error != std::errc() || at != end || !(value >= 0.25 && value <= 8.0)) return std::nullopt;
  const auto quarters = static_cast<uint32_t>(value * 4.0);
  return quarters == value * 4.0 ? std::optional(quarters) : std::nullopt;
}

std::optional<Item> ParseItem(std::string_view text) {
  const size_t colon = text.find(':'), slash = text.find('/');
  if (colon == std::string_view::npos || slash == std::string_view::npos || slash < colon) {
    return std::nullopt;
  }
  const std::string_view layers = text.substr(0, colon);
  Item item{0, UINT32_MAX, {}};
  if (layers != "*") {
    const size_t dash = layers.find('-');
    const std::optional<uint32_t> first = Number(layers.substr(0, dash));
    const std::optional<uint32_t> last =
        dash == std::string_view::npos ? first : Number(layers.substr(dash + 1));
    if (!first || !last || *first > *last) return std::nullopt;
    item.first = *first;
    item.last = *last;
  }
  const std::optional<uint32_t> k = Quarters(text.substr(colon + 1, slash - colon - 1));
  const std::optional<uint32_t> v = Quarters(text.substr(slash + 1));
  if (!k || !v) return std::nullopt;
  item.bits = {static_cast<uint8_t>(*k), static_cast<uint8_t>(*v)};
  return item;
}

/// f(item) for each; false if the text is no such list.
template <typename F>
bool ForItems(std::string_view text, const F& f) {
  while (!text.empty()) {
    const size_t end = text.find(';');
    const std::optional<Item> item = ParseItem(text.substr(0, end));
    if (!item) return false;
    f(*item);
    if (end == std::string_view::npos) return true;
    text.remove_prefix(end + 1);
    if (text.empty()) return false;  // nothing behind the last `;`
  }
  return true;
}

}  // namespace

bool internal::LayerBitsAreValid(const Config& config) {
  return config.layer_bits.size() <= kMaxLayerBitsText &&
         (AverageLayerBits(config) || ForItems(config.layer_bits, [](const Item&) {}));
}

bool internal::LayerBitsFit(const Config& config) {
  const bool any_rate = config.codec == CodecId::kWaterFill;
  const auto fits = [any_rate](uint32_t quarters) {
    return any_rate || (quarters % 4 == 0 && (quarters <= 16 || quarters == 32));
  };
  bool all_fit = true;
  ForItems(config.layer_bits,
           [&](const Item& item) { all_fit = all_fit && fits(item.bits.k) && fits(item.bits.v); });
  return all_fit;
}

std::optional<double> AverageLayerBits(const Config& config) {
  double value = 0.0;
  const char *begin = config.layer_bits.data(), *end = begin + config.layer_bits.size();
  const auto [at, error] = std::from_chars(begin, end, value, std::chars_format::fixed);
  if (error != std::errc() || at != end || !(value >= 1.0 && value <= 4.0)) return std::nullopt;
  return value;
}

std::optional<uint32_t> HighestLayerNamed(const Config& config) {
  std::optional<uint32_t> highest;
  ForItems(config.layer_bits, [&](const Item& item) {
    if (item.last != UINT32_MAX) highest = std::max(highest.value_or(0), item.last);
  });
  return highest;
}

LayerBits BitsOfLayer(const Config& config, uint32_t model_layer) {
  LayerBits bits;
  ForItems(config.layer_bits, [&](const Item& item) {
    if (model_layer >= item.first && model_layer <= item.last) bits = item.bits;
  });
  return bits;
}

}  // namespace qevict
