#include <gtest/gtest.h>

#include "qevict/config.h"

namespace qevict {
namespace {

LayerBits Of(const char* list, uint32_t layer) {
  const Result<Config> config =
      ParseConfig(std::string("codec=kvtuner,window=32,layer_bits=") + list);
  EXPECT_TRUE(config.ok()) << config.status().message();
  return config.ok() ? BitsOfLayer(*config, layer) : LayerBits{};
}

TEST(LayerBitsTest, SinglesRangesAndAll) {
  const char* list = "*:4/2;0:8/8;1-3:4/4";
  EXPECT_EQ(Of(list, 0), (LayerBits{32, 32}));
  EXPECT_EQ(Of(list, 1), (LayerBits{16, 16}));
  EXPECT_EQ(Of(list, 3), (LayerBits{16, 16}));
  EXPECT_EQ(Of(list, 4), (LayerBits{16, 8}));
  EXPECT_EQ(Of(list, 1000), (LayerBits{16, 8}));
}

TEST(LayerBitsTest, LayersThatAreNotNamedHaveNone) { EXPECT_EQ(Of("2:4/2", 3), LayerBits{}); }

TEST(LayerBitsTest, LaterItemsWin) { EXPECT_EQ(Of("0:8/8;*:2/1", 0), (LayerBits{8, 4})); }

TEST(LayerBitsTest, TextIsKept) {
  const Result<Config> config = ParseConfig("codec=kvtuner,window=8,layer_bits=0:8/4;1-3:3/1");
  ASSERT_TRUE(config.ok());
  const Result<Config> again = ParseConfig(ToText(*config));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*again, *config);
}

TEST(LayerBitsTest, BadListsAreNamed) {
  for (const char* list : {"x", "0:8", "0:8/5", "0:0/8", "3-1:4/4", "0:4/4;", ";", "-1:4/4", "*:4/",
                           "0-:4/4", "0:4/4 1:4/4", "**:2/2", "0:2.25/2", "0:6/6", "0:nan/2"}) {
    const Result<Config> config =
        ParseConfig(std::string("codec=kvtuner,window=8,layer_bits=") + list);
    ASSERT_FALSE(config.ok()) << list;
    EXPECT_NE(config.status().message().find(std::string("layer_bits=") + list), std::string::npos)
        << config.status().message();
  }
}

TEST(LayerBitsTest, WaterFillTakesQuarters) {
  const Result<Config> config = ParseConfig("codec=wf,window=8,layer_bits=*:2.25/3;4:1/1.75");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(BitsOfLayer(*config, 0), (LayerBits{9, 12}));
  EXPECT_EQ(BitsOfLayer(*config, 4), (LayerBits{4, 7}));
  for (const char* list : {"0:8.25/8", "0:0/4", "0:2.1/2"})
    EXPECT_FALSE(ParseConfig(std::string("codec=wf,layer_bits=") + list).ok()) << list;
}

TEST(LayerBitsTest, AnAverageNeedsStatistics) {
  const Result<Config> config = ParseConfig("codec=wf,window=8,statistics=x,layer_bits=2.05");
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(AverageLayerBits(*config), 2.05);
  EXPECT_EQ(BitsOfLayer(*config, 3), LayerBits{});
  EXPECT_EQ(ParseConfig(ToText(*config))->layer_bits, "2.05");
  for (const char* text :
       {"codec=wf,window=8,layer_bits=2.05", "codec=kvtuner,window=8,layer_bits=2",
        "codec=wf,window=8,statistics=x,layer_bits=0.5",
        "codec=wf,window=8,statistics=x,layer_bits=4.1",
        "codec=wf,window=8,statistics=x,layer_bits=2e0"}) {
    EXPECT_FALSE(ParseConfig(text).ok()) << text;
  }
  EXPECT_EQ(AverageLayerBits(*ParseConfig("codec=wf,window=8,layer_bits=*:2/2")), std::nullopt);
  EXPECT_EQ(AverageLayerBits(Config{}), std::nullopt);
}

TEST(LayerBitsTest, TheHighestLayerNamed) {
  const auto highest = [](const std::string& list) {
    return HighestLayerNamed(*ParseConfig("codec=kvtuner,window=8,layer_bits=" + list));
  };
  EXPECT_EQ(highest("*:4/2"), std::nullopt);
  EXPECT_EQ(highest("0:4/2"), 0u);
  EXPECT_EQ(highest("*:4/2;3-17:8/8;2:1/1"), 17u);
  EXPECT_EQ(HighestLayerNamed(Config{}), std::nullopt);
}

TEST(LayerBitsTest, OtherCodecsHaveNone) {
  const Result<Config> config = ParseConfig("codec=kivi,layer_bits=0:4/4");
  ASSERT_FALSE(config.ok());
  EXPECT_NE(config.status().message().find("codec=kivi"), std::string::npos);
}

}  // namespace
}  // namespace qevict
