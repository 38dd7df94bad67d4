// Config -> codec. A new format is one file with its specification and one line in MakeHead, or in
// MakeCodec and CodecBytes if it is no grid code.
#include "codecs/codec.h"

#include <algorithm>
#include <cmath>

#include "codecs/grid.h"
#include "codecs/grid_codec.h"
#include "codecs/hadamard.h"
#include "codecs/hqe.h"
#include "codecs/kivi_axis.h"
#include "codecs/kivi_grid.h"
#include "codecs/kvquant.h"
#include "codecs/kvtuner.h"
#include "codecs/nqkv.h"
#include "codecs/ott.h"
#include "codecs/token.h"
#include "codecs/water_fill.h"
#include "codecs/zipcache.h"

namespace qevict::codecs {
namespace {

constexpr uint8_t kWaterFillTag = 5, kUnsavedTag = 6;

LayerBits LayerBitsOf(const Config& config, const RowShape& shape) {
  const auto bits = static_cast<uint8_t>(4 * config.bits);
  return shape.bits.k == 0 ? LayerBits{bits, bits} : shape.bits;
}

/// Grid codes: one kv head's specification, from its rows if there are any.
GridHead MakeHead(const Config& config, const RowShape& shape, const RowSample* sample) {
  switch (config.codec) {
    case CodecId::kKiviClip:
      return KiviClip(config.bits, shape);
    case CodecId::kKiviPost:
      return KiviPost(config.bits, shape);
    case CodecId::kByteGrid:
      return ByteGrid(config.bits, shape, sample);
    case CodecId::kKvQuant:
      return KvQuant(config.bits, config.window, shape, sample);
    case CodecId::kZipCache:
      return ZipCache(config.bits, shape, sample);
    case CodecId::kOtt:
      return Ott(config.bits, shape);
    case CodecId::kNqkv:
      return Nqkv(shape);
    case CodecId::kHqe:
      return Hqe(config.bits, shape);
    case CodecId::kHadamard:
      return Hadamard(config.bits, shape, sample);
    case CodecId::kKvTuner:
      return KvTuner(LayerBitsOf(config, shape), shape);
    case CodecId::kKiviAxis:
      return KiviGrid(config.bits, shape);
    case CodecId::kToken:
    case CodecId::kWaterFill:
      break;  // no grid codes
  }
  return {};
}

bool IsKiviAxis(const Config& config) {
  return config.codec == CodecId::kKiviAxis && (config.bits == 2 || config.bits == 4);
}

class WaterFillLearner final : public CodecLearner {
 public:
  WaterFillLearner(const Config& config, const RowShape& shape, const RopeParams& rope)
      : config_(config), shape_(shape), rope_(rope), stats_(shape.n_kv_heads) {}

  void Add(uint32_t kv_head, const float* k_before_rope, const float*, const float* v) override {
    stats_[kv_head].AddKey(k_before_rope, shape_.head_dim);
    stats_[kv_head].AddValue(v, shape_.head_dim_v);
  }
  std::shared_ptr<const Codec> Make(std::span<const float> query_energy) override {
    for (uint32_t h = 0; h < shape_.n_kv_heads && !query_energy.empty(); ++h) {
      const auto head = query_energy.subspan(size_t{h} * shape_.head_dim, shape_.head_dim);
      stats_[h].q_square.assign(head.begin(), head.end());
    }
    return MakeWaterFill(config_, shape_, rope_, stats_);
  }

 private:
  const Config config_;
  const RowShape shape_;
  const RopeParams rope_;
  std::vector<WaterFillStats> stats_;
};

class GridLearner final : public CodecLearner {
 public:
  GridLearner(const Config& config, const RowShape& shape)
      : config_(config), shape_(shape), samples_(shape.n_kv_heads) {}

  void Add(uint32_t kv_head, const float* k_before_rope, const float* k, const float* v) override {
    RowSample& s = samples_[kv_head];
    const auto append = [](std::vector<float>& to, const float* x, uint32_t n) {
      for (uint32_t i = 0; i < n; ++i) to.push_back(Finite(x[i]));
    };
    append(s.k_before_rope, k_before_rope, shape_.head_dim);
    append(s.k, k, shape_.head_dim);
    append(s.v, v, shape_.head_dim_v);
    ++s.n;
  }
  std::shared_ptr<const Codec> Make(std::span<const float>) override {
    std::vector<GridHead> heads;
    for (const RowSample& s : samples_) heads.push_back(MakeHead(config_, shape_, &s));
    return std::make_shared<GridCodec>(config_.window, shape_, std::move(heads));
  }

 private:
  const Config config_;
  const RowShape shape_;
  std::vector<RowSample> samples_;
};

}  // namespace

std::shared_ptr<const Codec> MakeWaterFill(const Config& config, const RowShape& shape,
                                           const RopeParams& rope,
                                           std::span<const WaterFillStats> stats) {
  return std::make_shared<WaterFillCodec>(QuarterBits(config), config.window, shape, rope, stats);
}

std::vector<Config> RungConfigs(const Config& config) {
  std::vector<Config> rungs;
  for (const RungSpec& spec : RungsOf(config)) {
    Config rung = config;
    rung.codec = spec.codec;
    rung.bits = spec.quarter_bits / 4;
    rung.quarter_bits = spec.quarter_bits % 4;
    if (!config.rungs.empty()) rung.layer_bits.clear();
    rung.rungs.clear();
    rungs.push_back(std::move(rung));
  }
  return rungs;
}

std::shared_ptr<const Codec> MakeCodec(const Config& config, const RowShape& shape) {
  if (config.codec == CodecId::kToken) {
    return std::make_shared<TokenCodec>(config.bits, config.window, shape);
  }
  if (config.codec == CodecId::kWaterFill) return MakeWaterFill(config, shape, {}, {});
  if (IsKiviAxis(config)) {
    return std::make_shared<KiviAxisCodec>(config.bits, config.window, shape);
  }
  return std::make_shared<GridCodec>(config.window, shape,
                                     SameHeads(shape, MakeHead(config, shape, nullptr)));
}

BlockBytes CodecBytes(const Config& config, const RowShape& shape) {
  if (config.codec == CodecId::kToken) {
    return TokenCodec::Bytes(config.bits, config.window, shape);
  }
  if (config.codec == CodecId::kWaterFill) {
    return WaterFillCodec::Bytes(QuarterBits(config), config.window, shape);
  }
  if (IsKiviAxis(config)) return KiviAxisCodec::Bytes(config.bits, config.window, shape);
  return MakeCodec(config, shape)->bytes();
}

bool Learns(const Config& config) {
  switch (config.codec) {
    case CodecId::kWaterFill:
    case CodecId::kByteGrid:
    case CodecId::kKvQuant:
    case CodecId::kZipCache:
    case CodecId::kHadamard:
      return true;
    case CodecId::kKiviAxis:
    case CodecId::kKiviClip:
    case CodecId::kKiviPost:
    case CodecId::kOtt:
    case CodecId::kNqkv:
    case CodecId::kHqe:
    case CodecId::kKvTuner:
    case CodecId::kToken:
      break;
  }
  return false;
}

std::unique_ptr<CodecLearner> MakeLearner(const Config& config, const RowShape& shape,
                                          const RopeParams& rope) {
  if (!Learns(config)) return nullptr;
  if (config.codec == CodecId::kWaterFill) {
    return std::make_unique<WaterFillLearner>(config, shape, rope);
  }
  return std::make_unique<GridLearner>(config, shape);
}

size_t LearnedBytes(const Config& config, const RowShape& shape) {
  if (!Learns(config)) return 0;
  if (config.codec == CodecId::kWaterFill) return WaterFillCodec::LearnedBytes(shape);
  return MakeCodec(config, shape)->static_bytes();
}

double ExpectedDistortion(const Config& rung, const RowShape& shape, Side side) {
  constexpr double kLost[] = {1.0,      0.3634,  0.1175,   0.03454, 0.009497,
                              0.002499, 0.00064, 0.000162, 0.000041};  // 0 to 8 bits
  const LayerBits bits = LayerBitsOf(rung, shape);
  const double b = shape.bits.k == 0 ? rung.bits + rung.quarter_bits / 4.0
                                     : (side == Side::kKeys ? bits.k : bits.v) / 4.0;
  const auto low = static_cast<size_t>(std::clamp(b, 0.0, 7.999));
  const double part = std::min(b, 8.0) - static_cast<double>(low);
  return std::exp((1.0 - part) * std::log(kLost[low]) + part * std::log(kLost[low + 1]));
}

bool IgnoresKeyMean(const Config& config) {
  return (config.codec == CodecId::kToken && config.bits < 8) || config.codec == CodecId::kNqkv ||
         config.codec == CodecId::kZipCache;
}

bool SavesCodes(const Config& config) {
  return config.codec == CodecId::kToken || IsKiviAxis(config);
}

uint8_t CodecTag(const Config& config) {
  if (IsKiviAxis(config)) return static_cast<uint8_t>(config.bits);
  if (config.codec == CodecId::kWaterFill) return kWaterFillTag;
  if (config.codec != CodecId::kToken) return kUnsavedTag;
  return static_cast<uint8_t>(config.bits == 8 ? 15 : 8 + config.bits);
}

std::string CodecTagName(uint8_t tag) {
  if (tag == kWaterFillTag) return "wf";
  if (tag == kUnsavedTag) return "a codec whose codes are not saved";
  if (tag < 8) return "kivi, " + std::to_string(tag) + " bits";
  return "token, " + std::to_string(tag == 15 ? 8 : tag - 8) + " bits";
}

}  // namespace qevict::codecs
