#include "cli/bench/attention.h"

#include <gtest/gtest.h>

namespace qevict::cli {
namespace {

TEST(ShapesTest, HeadsOverKvHeadsTimesChannels) {
  const auto shapes = ParseShapes("14/2x64,32/32x128");
  ASSERT_TRUE(shapes.ok());
  ASSERT_EQ(shapes->size(), 2u);
  EXPECT_EQ((*shapes)[0].Name(), "14/2x64");
  EXPECT_EQ((*shapes)[0].layer().n_gqa, 7u);
  EXPECT_EQ((*shapes)[1].layer().n_gqa, 1u);
  EXPECT_EQ((*shapes)[1].head_dim, 128u);
}

TEST(ShapesTest, ErrorsNameTheShape) {
  for (const char* text : {"", "14", "14/2", "14x64", "64x14/2", "14/3x64", "2/14x64", "14/0x64",
                           "14/2x48", "14/2x544", "14/2x0", "-14/2x64", "14/2x64x", "a/bxc"}) {
    const auto shapes = ParseShapes(text);
    ASSERT_FALSE(shapes.ok()) << text;
    EXPECT_EQ(shapes.status().message().rfind("--shapes " + std::string(text) + " is not legal", 0),
              0u)
        << shapes.status().message();
  }
}

TEST(TiersTest, NamesOfFormats) {
  const auto tiers = ParseTiers("packed2,full");
  ASSERT_TRUE(tiers.ok());
  EXPECT_EQ(*tiers,
            (std::vector<kernels::Formats>{kernels::Formats::kPacked2, kernels::Formats::kFull}));
  EXPECT_FALSE(ParseTiers("packed3").ok());
  EXPECT_FALSE(ParseTiers("").ok());
}

}  // namespace
}  // namespace qevict::cli
