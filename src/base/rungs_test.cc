#include <gtest/gtest.h>

#include "qevict/config.h"

namespace qevict {
namespace {

TEST(RungsTest, WithoutAListThereIsOneRung) {
  const Result<Config> config = ParseConfig("codec=wf,bits=2.5,window=8");
  ASSERT_TRUE(config.ok());
  EXPECT_EQ(RungsOf(*config), (std::vector<RungSpec>{{CodecId::kWaterFill, 10}}));
}

TEST(RungsTest, BitsAreThoseOfTheCodecUnlessOneIsNamed) {
  const Result<Config> config = ParseConfig("codec=wf,rungs=4/token:8/1.5");
  ASSERT_TRUE(config.ok()) << config.status().message();
  const std::vector<RungSpec> expected = {
      {CodecId::kWaterFill, 16}, {CodecId::kToken, 32}, {CodecId::kWaterFill, 6}};
  EXPECT_EQ(RungsOf(*config), expected);
  const Result<Config> again = ParseConfig(ToText(*config));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*again, *config);
}

TEST(RungsTest, WhatIsNoListIsRefused) {
  for (const char* text : {"rungs=x", "rungs=2/", "rungs=2//4", "rungs=kivi:", "rungs=none:2",
                           "rungs=2.1", "rungs=0.5", "rungs=9", "rungs=2/2/2/2/2/2/2/2"}) {
    const Result<Config> config = ParseConfig(text);
    ASSERT_FALSE(config.ok()) << text;
    EXPECT_NE(config.status().message().find("rungs="), std::string::npos)
        << config.status().message();
  }
}

TEST(RungsTest, EachRungMustBeLegalForItsCodec) {
  EXPECT_FALSE(ParseConfig("codec=kivi,rungs=4/2.5").ok());
  EXPECT_FALSE(ParseConfig("rungs=nqkv:2").ok());
  EXPECT_FALSE(ParseConfig("rungs=token:8,window=4").ok());
  EXPECT_FALSE(ParseConfig("codec=kvtuner,rungs=4/2,layer_bits=*:4/2").ok());
}

}  // namespace
}  // namespace qevict
