// Config -> codec. A new format is one file with one class and one line in each function here.
#include "codecs/codec.h"

#include "codecs/kivi_axis.h"
#include "codecs/token.h"
#include "codecs/water_fill.h"

namespace qevict::codecs {

std::shared_ptr<const Codec> MakeCodec(const Config& config, const RowShape& shape) {
  if (config.codec == CodecId::kToken) {
    return std::make_shared<TokenCodec>(config.bits, config.window, shape);
  }
  if (config.codec == CodecId::kWaterFill) {
    return std::make_shared<WaterFillCodec>(QuarterBits(config), config.window, shape, RopeParams{},
                                            std::span<const WaterFillStats>{});
  }
  return std::make_shared<KiviAxisCodec>(config.bits, config.window, shape);
}

BlockBytes CodecBytes(const Config& config, const RowShape& shape) {
  if (config.codec == CodecId::kToken) {
    return TokenCodec::Bytes(config.bits, config.window, shape);
  }
  if (config.codec == CodecId::kWaterFill) {
    return WaterFillCodec::Bytes(QuarterBits(config), config.window, shape);
  }
  return KiviAxisCodec::Bytes(config.bits, config.window, shape);
}

uint8_t CodecTag(const Config& config) {
  if (config.codec == CodecId::kKiviAxis) return static_cast<uint8_t>(config.bits);
  if (config.codec == CodecId::kWaterFill) return 5;
  return static_cast<uint8_t>(config.bits == 8 ? 15 : 8 + config.bits);
}

std::string CodecTagName(uint8_t tag) {
  if (tag == 5) return "wf";
  if (tag < 8) return "kivi, " + std::to_string(tag) + " bits";
  return "token, " + std::to_string(tag == 15 ? 8 : tag - 8) + " bits";
}

size_t LearnedBytes(const Config& config, const RowShape& shape) {
  return Learns(config) ? WaterFillCodec::LearnedBytes(shape) : 0;
}

}  // namespace qevict::codecs
