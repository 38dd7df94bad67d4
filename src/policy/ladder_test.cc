#include <gtest/gtest.h>

#include <random>

#include "policy/policies.h"
#include "policy/testing.h"

namespace qevict {
namespace {

/// 16, 4, 2.5 and 1.5 bits of 8 tokens of 64 channels, and what they lose.
TestView Rungs() { return TestView({1024, 272, 176, 112}, {0.0f, 0.01f, 0.07f, 0.2f}); }

Plan PlanFor(TestView& view, uint64_t bytes, const char* params = "hold:0") {
  Config config;
  config.policy = "ladder";
  config.params = params;
  return kLadderPolicy.plan(view.view(), {bytes}, config);
}

TEST(LadderTest, EnoughBytesKeepEverythingInFullPrecision) {
  TestView view = Rungs();
  view.Add({1, 2, 3});
  const Plan plan = PlanFor(view, 3 * 2048);
  for (const Placement& p : plan.placements[0]) EXPECT_EQ(p, (Placement{kFullRung, kFullRung}));
}

TEST(LadderTest, PrecisionFallsWithTheScoreAndEvictionComesLast) {
  TestView view = Rungs();
  view.Add({100, 8, 6, 4, 2, 1, 0, 0});
  const std::vector<Placement> placed = PlanFor(view, 2600).placements[0];
  EXPECT_LT(placed[0].k, placed[7].k);
  for (size_t i = 1; i < placed.size(); ++i) {
    EXPECT_LE(placed[i - 1].k, placed[i].k) << i;
    EXPECT_NE(placed[i].k, kGone) << "every window keeps its lowest rung first";
  }
}

TEST(LadderTest, WhatCannotBeHeldIsTheLightest) {
  TestView view = Rungs();
  view.Add({5, 1, 4, 2}).age.assign(4, 1000);
  const std::vector<Placement> placed = PlanFor(view, 2 * 224 + 50).placements[0];
  EXPECT_NE(placed[0].k, kGone);
  EXPECT_NE(placed[2].k, kGone);
  EXPECT_EQ(placed[1].k, kGone);
  EXPECT_EQ(placed[3].k, kGone);
}

// A window that fewer rows have seen needs less mass for the same weight.
TEST(LadderTest, ScoresCountPerRowThatCouldSeeTheWindow) {
  TestView view = Rungs();
  GroupColumns& c = view.Add({10, 10, 10});
  c.age = {1000, 31, 7};
  const Plan plan = PlanFor(view, 3 * 224 + 200);
  EXPECT_GT(plan.placements[0][0].k, plan.placements[0][2].k);
}

TEST(LadderTest, LayersAndSequencesCompete) {
  TestView view = Rungs();
  view.Add({1, 1, 1, 1}, 0, 0);
  view.Add({100, 1, 1, 1}, 1, 1);
  const Plan plan = PlanFor(view, 8 * 224 + 400);
  EXPECT_LT(plan.placements[1][0].k, plan.placements[0][0].k);
}

TEST(LadderTest, InvisibleWindowsGoAndProtectedOnesCount) {
  TestView view = Rungs();
  GroupColumns& c = view.Add({9, 9, 1, 1});
  c.visible[0] = 0;
  c.is_protected[1] = 1;
  const Plan plan = PlanFor(view, 2048 + 2 * 224);
  EXPECT_EQ(plan.placements[0][0].k, kGone);
  EXPECT_EQ(plan.placements[0][2].k, Rung{3});
  EXPECT_EQ(plan.placements[0][3].k, Rung{3});
}

TEST(LadderTest, ScoresThatAreNoNumbersCountAsNone) {
  TestView view = Rungs();
  view.Add({NAN, 5, -INFINITY, 5}).age.assign(4, 1000);
  const Plan plan = PlanFor(view, 2 * 224);
  EXPECT_EQ(plan.placements[0][0].k, kGone);
  EXPECT_NE(plan.placements[0][1].k, kGone);
}

TEST(LadderTest, APlanIsStableWhileWeightsMoveLittle) {
  TestView view = Rungs();
  GroupColumns& c = view.Add({10, 9, 5, 4, 2, 1});
  const Plan first = PlanFor(view, 1900, "hold:0.3");
  for (size_t i = 0; i < c.score.size(); ++i) {
    c.rung_k[i] = first.placements[0][i].k;
    c.rung_v[i] = first.placements[0][i].v;
    c.score[i] *= i % 2 == 0 ? 1.04f : 0.97f;
  }
  EXPECT_EQ(PlanFor(view, 1900, "hold:0.3").placements, first.placements);
}

// The budget is never exceeded, and no step that fits is left out.
TEST(LadderTest, RandomPlansSpendTheBudget) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    TestView view = Rungs();
    for (uint32_t layer = 0; layer < 1 + random() % 3; ++layer) {
      std::vector<float> score(1 + random() % 30);
      for (float& x : score) x = static_cast<float>(random() % 100);
      GroupColumns& c = view.Add(score, 0, layer);
      for (auto& p : c.is_protected) p = random() % 8 == 0;
    }
    uint64_t mandatory = 0, all = 0;
    const View& v = view.view();
    for (const GroupView& g : v.groups) {
      for (size_t i = 0; i < g.size(); ++i) mandatory += g.is_protected[i] ? g.bytes[i] : 0;
      all += 2048 * g.size();
    }
    const uint64_t bytes = mandatory + random() % (all - mandatory + 1);
    const Plan plan = PlanFor(view, bytes);
    const uint64_t cost = CostOf(view.view(), plan);
    ASSERT_LE(cost, bytes) << round;
    for (size_t g = 0; g < v.groups.size(); ++g) {
      for (size_t i = 0; i < v.groups[g].size(); ++i) {
        const bool gone = !v.groups[g].is_protected[i] && plan.placements[g][i].k == kGone;
        ASSERT_TRUE(!gone || cost + 224 > bytes) << "a window is gone though its lowest rung fits";
      }
    }
  }
}

}  // namespace
}  // namespace qevict
