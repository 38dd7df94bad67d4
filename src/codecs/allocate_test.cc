#include "codecs/allocate.h"

#include <gtest/gtest.h>

namespace qevict::codecs {
namespace {

LayerStatistics Layer(uint32_t model_layer, double k_loss, double v_loss, uint32_t dim = 64) {
  LayerStatistics layer;
  layer.model_layer = model_layer;
  layer.shape = {2, dim, dim};
  layer.has_loss = true;
  layer.k_loss = {k_loss, k_loss / 4};
  layer.v_loss = {v_loss, v_loss / 4};
  return layer;
}

/// Words per token of all layers.
uint32_t WordsOf(const CodecStatistics& s, const std::string& layer_bits) {
  Config config;
  config.codec = CodecId::kWaterFill;
  config.layer_bits = layer_bits;
  uint32_t words = 0;
  for (const LayerStatistics& layer : s.layers) {
    RowShape shape = layer.shape;
    shape.bits = BitsOfLayer(config, layer.model_layer);
    words += static_cast<uint32_t>(WaterFillCodec::Bytes(0, 8, shape).total() / 8 - 2) / 4;
  }
  return words;
}

TEST(AllocateTest, EqualLossesGetEqualBits) {
  CodecStatistics s;
  for (const uint32_t layer : {0u, 1u, 7u}) s.layers.push_back(Layer(layer, 0.01, 0.01));
  EXPECT_EQ(AllocateBits(s, 2.0), "0:2/2;1:2/2;7:2/2");
}

TEST(AllocateTest, BitsFollowTheLossAndTheSumIsKept) {
  CodecStatistics s;
  s.layers = {Layer(0, 0.001, 0.001), Layer(1, 0.1, 0.001), Layer(2, 0.001, 0.016)};
  for (const double bits : {1.0, 1.5, 2.0, 3.0, 3.5}) {
    const std::string text = AllocateBits(s, bits);
    Config config;
    config.layer_bits = text;
    const LayerBits weak = BitsOfLayer(config, 0), strong = BitsOfLayer(config, 1);
    EXPECT_GT(strong.k, weak.k) << text;
    EXPECT_EQ(strong.v, weak.v) << text;
    EXPECT_GT(BitsOfLayer(config, 2).v, weak.v) << text;
    EXPECT_EQ(WordsOf(s, text), 3 * 4 * bits) << text;
    EXPECT_TRUE(ParseConfig("codec=wf,window=8,layer_bits=" + text).ok()) << text;
  }
}

TEST(AllocateTest, OddHeadSizesStayWithinTheSum) {
  for (const uint32_t dim : {8u, 40u, 72u, 80u, 96u, 112u, 128u, 256u}) {
    CodecStatistics s;
    for (uint32_t i = 0; i < 5; ++i) s.layers.push_back(Layer(i, 0.001 * (i + 1), 0.02, dim));
    for (const double bits : {1.0, 2.0, 2.75, 4.0}) {
      const std::string text = AllocateBits(s, bits);
      const auto most = static_cast<uint32_t>(5 * 2 * 2 * dim * bits / 32) / 2;  // two heads
      if (most < 10) {  // a word each for keys and values is more
        EXPECT_EQ(text, "");
        continue;
      }
      EXPECT_LE(WordsOf(s, text), most) << dim << " " << bits << " " << text;
      EXPECT_GE(WordsOf(s, text) + 2 * ((dim + 127) / 128), most) << dim << " " << bits;
      EXPECT_TRUE(ParseConfig("codec=wf,window=8,layer_bits=" + text).ok()) << text;
    }
  }
}

TEST(AllocateTest, NoiseIsNoReasonForExtremes) {
  CodecStatistics s;
  s.layers = {Layer(0, 0.0, -0.001), Layer(1, 0.01, 0.01)};
  s.layers[1].k_loss = {0.001, 0.002};  // at 2 bits more than at 1
  const std::string text = AllocateBits(s, 2.0);
  EXPECT_EQ(WordsOf(s, text), 16u) << text;
}

TEST(AllocateTest, LossesWithinTheNoiseDecideNothing) {
  CodecStatistics s;
  for (uint32_t i = 0; i < 8; ++i) {
    s.layers.push_back(Layer(i, 0.01, 0.01));
    // At 2 bits the same loss, but for noise of 0.0002 that is larger than it.
    const double noise = i % 2 == 0 ? 0.0002 : -0.0002;
    s.layers[i].k_loss = {0.0004, 0.0001 + noise};
  }
  Config config;
  config.layer_bits = AllocateBits(s, 3.0);
  for (uint32_t i = 1; i < 8; ++i) {
    const int first = BitsOfLayer(config, 0).k, other = BitsOfLayer(config, i).k;
    EXPECT_LE(std::abs(first - other), 2) << config.layer_bits;  // a word, for the sum's sake
  }
  // Without negative losses there is no sign of noise: the same differences count.
  for (uint32_t i = 0; i < 8; ++i) s.layers[i].k_loss = {0.04, i % 2 == 0 ? 0.003 : 0.02};
  config.layer_bits = AllocateBits(s, 3.0);
  EXPECT_GE(BitsOfLayer(config, 1).k, BitsOfLayer(config, 0).k + 4) << config.layer_bits;
}

TEST(AllocateTest, WithoutLossesNothingChanges) {
  CodecStatistics s;
  EXPECT_EQ(AllocateBits(s, 2.0), "");
  s.layers = {Layer(0, 0.1, 0.1), Layer(1, 0.1, 0.1)};
  s.layers[1].has_loss = false;
  EXPECT_EQ(AllocateBits(s, 2.0), "");
  s.layers[1].has_loss = true;
  Config own;
  own.layer_bits = "*:2/3";
  EXPECT_EQ(WithAllocatedBits(own, s)->layer_bits, "*:2/3");
}

TEST(AllocateTest, AnyAverageOverLayers) {
  CodecStatistics s;
  for (uint32_t i = 0; i < 10; ++i) s.layers.push_back(Layer(i, 0.001 * (i + 1), 0.02));
  Config config = *ParseConfig("codec=wf,window=8,statistics=x,layer_bits=2.05");
  const std::string text = WithAllocatedBits(config, s)->layer_bits;
  EXPECT_EQ(WordsOf(s, text), 10 * 8 + 2) << text;
  EXPECT_EQ(WordsOf(s, AllocateBits(s, 2.0)), 10 * 8u);
  s.layers[3].has_loss = false;
  const Status none = WithAllocatedBits(config, s).status();
  EXPECT_EQ(none.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(none.message().find("layer_bits=2.05"), std::string::npos) << none.message();
}

}  // namespace
}  // namespace qevict::codecs
