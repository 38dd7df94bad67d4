#include <gtest/gtest.h>

#include <vector>

#include "policy/history.h"

namespace qevict {
namespace {

HistoryPlan PlanFor(const std::vector<Candidate>& candidates, uint64_t history_bytes) {
  Config config;
  config.preset = Preset::kPack;
  return PlanHistory({candidates, {100, 20}, history_bytes}, config);
}

const std::vector<Candidate> kFour = {{0, 9.0f, Tier::kFull, false, 0},
                                      {1, 1.0f, Tier::kPacked, true, 1},
                                      {2, 5.0f, Tier::kFull, true, 2},
                                      {3, 0.0f, Tier::kFull, false, 3}};

TEST(PackTest, EverythingIsPackedEvenIfItWouldFit) {
  const HistoryPlan plan = PlanFor(kFour, 100000);
  for (const HistoryPlacement& p : plan.placements) EXPECT_EQ(p.tier, Tier::kPacked);
}

TEST(PackTest, TheOldestAreEvictedIfPackedWindowsDoNotFit) {
  const HistoryPlan plan = PlanFor(kFour, 59);
  EXPECT_EQ(plan.n_packed_capacity, 2u);
  EXPECT_EQ(plan.placements[0].tier, Tier::kEvicted);
  EXPECT_EQ(plan.placements[1].tier, Tier::kEvicted);
  EXPECT_EQ(plan.placements[2].tier, Tier::kPacked);
  EXPECT_EQ(plan.placements[3].tier, Tier::kPacked);
}

TEST(PackTest, NothingToDo) {
  EXPECT_TRUE(PlanFor({}, 100).placements.empty());
  EXPECT_EQ(PlanFor(kFour, 0).placements[3].tier, Tier::kEvicted);
}

}  // namespace
}  // namespace qevict
