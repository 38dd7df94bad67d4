#include "codecs/allocate.h"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace qevict::codecs {
namespace {

constexpr uint32_t kMostQuarters = 24;  ///< 6 bits
/// Of a unit Gaussian from 2 bits on: 0.294, 0.275, ... (water_fill.h).
constexpr double kDistortionPerBit = 0.28;
constexpr double kLeastLoss = 1e-5;  ///< so that logarithms are finite

/// What measured losses are worth. A loss is a difference of two mean KLs, so that the smallest are
/// mostly noise, of either sign: allocation by them alone would give and take whole bits by chance.
struct LossModel {
  double noise = 0.0;  ///< RMS of the losses that came out negative, which none is
  double fall = 5.0;   ///< typical loss at 1 bit over that at 2, of losses far above the noise

  explicit LossModel(const CodecStatistics& statistics) {
    double squares = 0.0, logs = 0.0;
    size_t n_negative = 0, n_large = 0;
    const auto for_all = [&statistics](auto&& f) {
      for (const LayerStatistics& layer : statistics.layers) f(layer.k_loss), f(layer.v_loss);
    };
    for_all([&](const std::array<double, 2>& loss) {
      for (const double x : loss) {
        if (x < 0.0) squares += x * x, ++n_negative;
      }
    });
    if (n_negative > 0) noise = std::sqrt(squares / static_cast<double>(n_negative));
    for_all([&](const std::array<double, 2>& loss) {
      if (loss[0] <= 20.0 * noise + kLeastLoss) return;
      logs += std::log(std::clamp(loss[0] / std::max(loss[1], kLeastLoss), 1.5, 16.0));
      ++n_large;
    });
    if (n_large > 0) fall = std::exp(logs / static_cast<double>(n_large));
  }

  /// The mean of what was measured and what is usual, by how sure both are: losses at 2 bits vary
  /// by half around the usual ones.
  std::array<double, 2> Believed(const std::array<double, 2>& measured) const {
    const double at1 = std::max({measured[0], 0.5 * noise, kLeastLoss});
    const double usual = at1 / fall, spread = 0.5 * usual;
    const double sure = spread * spread / (spread * spread + noise * noise);
    const double at2 = sure * measured[1] + (1.0 - sure) * usual;
    return {at1, std::clamp(at2, at1 / 16.0, at1 / 1.5)};  // falls, but not like a cliff
  }
};

/// Keys or values of one layer.
struct Side {
  uint32_t dim, n_heads;
  std::array<double, 2> loss;  ///< at 1 and 2 bits, as believed
  uint32_t quarters;
};

uint32_t WordsOf(const Side& s, uint32_t quarters) {
  return s.n_heads * codecs::WordsOf(quarters, s.dim);
}

/// The most bits that take no more words than the next step takes; `quarters` if there is none.
uint32_t NextStep(const Side& s, uint32_t quarters) {
  uint32_t next = quarters;
  while (next < kMostQuarters && WordsOf(s, next) == WordsOf(s, quarters)) ++next;
  while (next < kMostQuarters && WordsOf(s, next + 1) == WordsOf(s, next)) ++next;
  return WordsOf(s, next) > WordsOf(s, quarters) ? next : quarters;
}

double LossAt(const Side& s, uint32_t quarters) {
  const auto [at1, at2] = s.loss;
  const double bits = quarters / 4.0;
  if (bits <= 2.0) return at2 * std::pow(at1 / at2, 2.0 - bits);
  return at2 * std::pow(kDistortionPerBit, bits - 2.0);
}

std::string BitsText(uint32_t quarters) {
  char buffer[16];
  return {buffer, std::to_chars(buffer, buffer + sizeof(buffer), quarters / 4.0).ptr};
}

}  // namespace

std::string AllocateBits(const CodecStatistics& statistics, double bits) {
  if (statistics.layers.empty()) return {};
  const LossModel model(statistics);
  std::vector<Side> sides;
  double exact_words = 0.0;
  for (const LayerStatistics& layer : statistics.layers) {
    if (!layer.has_loss) return {};
    const RowShape& shape = layer.shape;
    exact_words += shape.n_kv_heads * (shape.head_dim + shape.head_dim_v) * bits / 32.0;
    sides.push_back({shape.head_dim, shape.n_kv_heads, model.Believed(layer.k_loss), 0});
    sides.push_back({shape.head_dim_v, shape.n_kv_heads, model.Believed(layer.v_loss), 0});
  }
  auto words = static_cast<int64_t>(exact_words + 1e-6);
  for (Side& s : sides) {
    s.quarters = NextStep(s, 0);
    words -= WordsOf(s, s.quarters);
  }
  if (words < 0) return {};  // heads too small for a word on either side
  for (;;) {
    Side* best = nullptr;
    double most = 0.0;
    for (Side& s : sides) {
      const uint32_t next = NextStep(s, s.quarters);
      const uint32_t cost = WordsOf(s, next) - WordsOf(s, s.quarters);
      if (cost == 0 || cost > words) continue;
      const double gain = (LossAt(s, s.quarters) - LossAt(s, next)) / cost;
      if (gain > most) most = gain, best = &s;
    }
    if (best == nullptr) break;
    const uint32_t next = NextStep(*best, best->quarters);
    words -= WordsOf(*best, next) - WordsOf(*best, best->quarters);
    best->quarters = next;
  }
  std::string text;
  for (size_t i = 0; i < statistics.layers.size(); ++i) {
    text += (i == 0 ? "" : ";") + std::to_string(statistics.layers[i].model_layer) + ":" +
            BitsText(sides[2 * i].quarters) + "/" + BitsText(sides[2 * i + 1].quarters);
  }
  return text;
}

Result<Config> WithAllocatedBits(const Config& config, const CodecStatistics& statistics) {
  const std::optional<double> average = AverageLayerBits(config);
  if (!config.layer_bits.empty() && !average) return config;
  Config changed = config;
  changed.layer_bits =
      AllocateBits(statistics, average.value_or(config.bits + config.quarter_bits / 4.0));
  if (average && changed.layer_bits.empty()) {
    return InvalidArgument("layer_bits=" + config.layer_bits +
                           " is an average, but the statistics in " + config.statistics +
                           " do not say what packing costs in each layer: take them without "
                           "--loss-chunks 0");
  }
  return changed;
}

}  // namespace qevict::codecs
