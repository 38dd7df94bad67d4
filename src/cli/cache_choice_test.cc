#include "cli/cache_choice.h"

#include <gtest/gtest.h>

namespace qevict::cli {
namespace {

using Names = std::vector<std::string>;

TEST(SplitListTest, KeepsEmptyParts) {
  EXPECT_EQ(SplitList("a,b"), (Names{"a", "b"}));
  EXPECT_EQ(SplitList("a"), Names{"a"});
  EXPECT_EQ(SplitList(""), Names{""});
  EXPECT_EQ(SplitList("a,,b,"), (Names{"a", "", "b", ""}));
}

TEST(CacheChoicesTest, PoliciesTimesBudgetsAndTheFullCacheOnce) {
  const auto choices = CacheChoices("full,qevict,streaming", "40%,64MiB", {}, {});
  ASSERT_TRUE(choices.ok());
  Names names;
  for (const CacheChoice& c : *choices) names.push_back(c.policy + "/" + c.budget);
  EXPECT_EQ(names,
            (Names{"full/", "qevict/40%", "qevict/64MiB", "streaming/40%", "streaming/64MiB"}));
  EXPECT_EQ((*choices)[0].config.preset, Preset::kFull);
  EXPECT_DOUBLE_EQ((*choices)[1].config.budget_fraction, 0.4);
  EXPECT_EQ((*choices)[2].config.budget_bytes, 64u << 20);
}

TEST(CacheChoicesTest, WholeConfigurations) {
  Config base;
  base.sinks = 7;
  const std::vector<std::string> texts = {"preset=pack,budget=100%,codec=wf,bits=2.5",
                                          "preset=qevict,budget=20MiB"};
  const auto choices = CacheChoices("", "20%", texts, base);
  ASSERT_TRUE(choices.ok());
  ASSERT_EQ(choices->size(), 2u);
  EXPECT_EQ((*choices)[0].policy, texts[0]);
  EXPECT_EQ((*choices)[0].config.preset, Preset::kPack);
  EXPECT_EQ((*choices)[0].config.sinks, 7u);
  EXPECT_EQ((*choices)[1].config.budget_bytes, 20u << 20);
  const std::vector<std::string> bad = {"preset=qevict,windw=8"};
  EXPECT_NE(CacheChoices("", "", bad, {}).status().message().find("windw"), std::string::npos);
}

TEST(CacheChoicesTest, ErrorsNameTheValue) {
  EXPECT_NE(CacheChoices("magic", "20%", {}, {}).status().message().find("magic"),
            std::string::npos);
  EXPECT_NE(CacheChoices("qevict", "20%,", {}, {}).status().message().find("budget"),
            std::string::npos);
}

}  // namespace
}  // namespace qevict::cli
