#include "policy/policies.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

namespace qevict {
namespace {

TEST(PoliciesTest, NamesAreUniqueAndPresetsHaveOne) {
  std::set<std::string_view> names;
  for (const Policy* policy : Policies()) {
    EXPECT_TRUE(names.insert(policy->name).second) << policy->name;
    EXPECT_EQ(FindPolicy(policy->name), policy);
    EXPECT_FALSE(policy->summary.empty());
    EXPECT_TRUE(policy->rule.ends_with(".")) << policy->name;
    EXPECT_LT(policy->needs, 1u << static_cast<unsigned>(Stat::kCount));
  }
  for (const Preset preset : {Preset::kFull, Preset::kStreaming, Preset::kQEvict, Preset::kPack})
    EXPECT_NE(FindPolicy(PresetName(preset)), nullptr) << PresetName(preset);
  EXPECT_EQ(FindPolicy("none"), nullptr);
}

TEST(PoliciesTest, APolicyIsNamedByPresetOrKey) {
  Config config;
  EXPECT_EQ(&PolicyOf(config), &kQEvictPolicy);
  config.policy = "ladder";
  EXPECT_EQ(&PolicyOf(config), &kLadderPolicy);
}

TEST(PoliciesTest, ParametersHaveStandardValuesAndRanges) {
  Config config;
  config.policy = "ladder";
  EXPECT_EQ(ParamOf(config, kLadderPolicy, "floor"), 1.0);
  config.params = "floor:2.5/hold:0";
  ASSERT_TRUE(CheckPolicy(config).ok());
  EXPECT_EQ(ParamOf(config, kLadderPolicy, "floor"), 2.5);
  EXPECT_EQ(ParamOf(config, kLadderPolicy, "hold"), 0.0);
  for (const char* bad : {"floor", "floor:", "floor:x", "floor:-1", "nothing:1", "hold:2", ":1"}) {
    config.params = bad;
    const Status status = CheckPolicy(config);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << bad;
    EXPECT_NE(status.message().find("floor from 0 to 100"), std::string::npos) << status.message();
  }
  config.policy = "unknown";
  EXPECT_NE(CheckPolicy(config).message().find("expected one of full"), std::string::npos);
}

// docs/policies.md has a heading for every policy, and every parameter with its standard value.
TEST(PoliciesTest, TheDocumentationNamesThemAll) {
  const char* folder = std::getenv("QEVICT_SOURCE_DIR");
  if (folder == nullptr) GTEST_SKIP() << "QEVICT_SOURCE_DIR is not set; ctest sets it";
  std::ifstream file(std::string(folder) + "/docs/policies.md");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  ASSERT_FALSE(text.empty());
  for (const Policy* policy : Policies()) {
    const size_t begin = text.find("\n## `" + std::string(policy->name) + "`");
    ASSERT_NE(begin, std::string::npos) << policy->name;
    const std::string section = text.substr(begin, text.find("\n## ", begin + 1) - begin);
    for (const PolicyParam& p : policy->params) {
      std::ostringstream row;
      row << "| `" << p.name << "` | " << p.standard << " | " << p.lowest << " to " << p.highest;
      EXPECT_NE(section.find(row.str()), std::string::npos) << policy->name << ": " << row.str();
    }
  }
}

TEST(PoliciesTest, EventsComeEveryIntervalFromTheFirstOn) {
  Config config;
  config.first_event = 3;
  const auto due = [&](uint64_t step, uint64_t n) {
    return DueEveryInterval({Phase::kDecode, step, n}, config);
  };
  EXPECT_FALSE(due(0, 1));
  EXPECT_TRUE(due(3, 1));
  EXPECT_FALSE(due(4, 7));
  EXPECT_TRUE(due(4, 8));
  EXPECT_FALSE(DueEveryInterval({Phase::kPromptChunk, 3, 8}, config));
}

}  // namespace
}  // namespace qevict
