#include "policy/history.h"

#include <gtest/gtest.h>

#include <vector>

namespace qevict {
namespace {

std::vector<Tier> Tiers(const HistoryPlan& plan) {
  std::vector<Tier> tiers;
  for (const HistoryPlacement& p : plan.placements) tiers.push_back(p.tier);
  return tiers;
}

std::vector<Candidate> Windows(uint32_t n) {
  std::vector<Candidate> c;
  for (uint32_t i = 0; i < n; ++i)
    c.push_back({i, static_cast<float>(n - i), Tier::kFull, false, i});
  return c;
}

constexpr Tier kF = Tier::kFull, kE = Tier::kEvicted;

TEST(StreamingTest, KeepsTheNewestWhateverTheScores) {
  const std::vector<Candidate> c = Windows(4);
  const HistoryPlan plan = PlanStreaming({c, {300, 100}, 799}, Config{});
  EXPECT_EQ(Tiers(plan), (std::vector<Tier>{kE, kE, kF, kF}));
  EXPECT_EQ(plan.n_full_capacity, 2u);
  EXPECT_EQ(plan.n_packed_capacity, 0u);
}

TEST(StreamingTest, KeepsAllThatFitsAndNothingOfNothing) {
  const std::vector<Candidate> c = Windows(3);
  EXPECT_EQ(Tiers(PlanStreaming({c, {300, 100}, 900}, Config{})), (std::vector<Tier>{kF, kF, kF}));
  EXPECT_EQ(Tiers(PlanStreaming({c, {300, 100}, 299}, Config{})), (std::vector<Tier>{kE, kE, kE}));
  EXPECT_TRUE(PlanStreaming({{}, {300, 100}, 0}, Config{}).placements.empty());
}

TEST(StreamingTest, PaysForCodesThatAnotherPresetLeft) {
  std::vector<Candidate> c = Windows(3);
  c[2].has_codes = true;
  EXPECT_EQ(Tiers(PlanStreaming({c, {300, 100}, 699}, Config{})), (std::vector<Tier>{kE, kE, kF}));
  EXPECT_EQ(Tiers(PlanStreaming({c, {300, 100}, 700}, Config{})), (std::vector<Tier>{kE, kF, kF}));
}

TEST(MakePlanTest, DispatchesOnThePreset) {
  const std::vector<Candidate> c = Windows(3);
  const HistoryInput in{c, {300, 100}, 400};
  Config config;
  config.preset = Preset::kFull;
  EXPECT_EQ(Tiers(PlanHistory(in, config)), (std::vector<Tier>{kF, kF, kF}));
  config.preset = Preset::kStreaming;
  EXPECT_EQ(Tiers(PlanHistory(in, config)), (std::vector<Tier>{kE, kE, kF}));
  config.preset = Preset::kQEvict;
  EXPECT_EQ(Tiers(PlanHistory(in, config)), Tiers(PlanQEvict(in, config)));
  EXPECT_EQ(Tiers(PlanHistory(in, config)), (std::vector<Tier>{Tier::kPacked, Tier::kPacked, kE}));
}

}  // namespace
}  // namespace qevict
