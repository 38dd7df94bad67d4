#include "policy/parts.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "policy/policies.h"
#include "policy/testing.h"

namespace qevict::parts {
namespace {

TEST(PartsTest, TopKBreaksTiesByIndexAndPutsNanLast) {
  const std::vector<float> x = {2, NAN, 5, 2, 5};
  EXPECT_EQ(TopK(x, 3), (std::vector<size_t>{2, 4, 0}));
  EXPECT_EQ(TopK(x, 9), (std::vector<size_t>{2, 4, 0, 3, 1}));
}

TEST(PartsTest, ApportionGivesTheExactTotal) {
  EXPECT_EQ(Apportion(10, std::vector<double>{1, 1, 1}), (std::vector<uint64_t>{4, 3, 3}));
  EXPECT_EQ(Apportion(7, std::vector<double>{0, 0}), (std::vector<uint64_t>{4, 3}));
  const std::vector<double> w = {0.3, 2.2, 0.01, 7.7};
  const std::vector<uint64_t> shares = Apportion(1000003, w);
  EXPECT_EQ(std::accumulate(shares.begin(), shares.end(), uint64_t{0}), 1000003u);
}

// SnapKV's scores over eight keys (two observation rows summed): the mean divides by k at the ends,
// too.
TEST(PartsTest, PoolingVectors) {
  const std::vector<float> s = {.30f, .08f, .06f, .40f, .06f, .22f, .12f, .26f};
  const std::vector<float> mean = {.126667f, .146667f, .18f, .173333f,
                                   .226667f, .133333f, .2f,  .126667f};
  const std::vector<float> largest = {.3f, .3f, .4f, .4f, .4f, .22f, .26f, .26f};
  for (size_t i = 0; i < s.size(); ++i) {
    EXPECT_NEAR(Pool(s, 3, false)[i], mean[i], 1e-6);
    EXPECT_EQ(Pool(s, 3, true)[i], largest[i]);
  }
  EXPECT_EQ(TopK(Pool(s, 3, false), 3), (std::vector<size_t>{4, 6, 2}));
}

TEST(PartsTest, HistorySharesFollowTokensAndWindows) {
  TestView view({100, 20});
  view.Add({1, 2, 3, 4}, 0, 0).is_protected[3] = 1;
  view.Add({1, 2, 3}, 0, 1);
  view.Add({1}, 1, 0);
  view.view();
  view.groups()[1].token_bytes = 384;  // of layer 1; layer 0 has 128 of 512
  view.groups()[0].reserve_bytes = 50;
  const std::vector<uint64_t> shares = HistoryShares(view.view(), {4000});
  // Layer 0: 1000 - 200 (protected) - 50 = 750 for 3 + 1 windows; layer 1: 3000 for 3.
  EXPECT_EQ(shares, (std::vector<uint64_t>{562, 3000, 187}));
}

TEST(PartsTest, InvisibleWindowsStayOnlyWhereBytesAreLeft) {
  TestView view({100, 20});
  GroupColumns& c = view.Add({1, 2, 3});
  c.visible[0] = c.visible[1] = 0;
  std::vector<Placement> placed(3, {kFullRung, kFullRung});
  History history = TakeHistory(view.view().groups[0], 450, placed);
  EXPECT_EQ(history.candidates.size(), 1u);
  EXPECT_EQ(placed[0].k, kGone);
  EXPECT_EQ(placed[1].k, kFullRung) << "the newest one stays";
  EXPECT_EQ(history.bytes, 250u);
}

// One group whose history has all of the budget: the rule of the ranking alone.
TEST(PartsTest, QEvictOnAViewIsItsRuleOnTheHistory) {
  TestView view({100, 20});
  view.Add({1, 5, 3, 2, 4, 0});
  Config config;
  const Plan plan = kQEvictPolicy.plan(view.view(), {700}, config);
  std::vector<Candidate> candidates;
  for (uint32_t i = 0; i < 6; ++i) {
    const float score = std::vector<float>{1, 5, 3, 2, 4, 0}[i];
    candidates.push_back({i, score, Tier::kFull, false, i});
  }
  const HistoryPlan want = PlanQEvict({candidates, {200, 40}, 700}, config);
  for (size_t i = 0; i < 6; ++i) {
    const Rung rung = want.placements[i].tier == Tier::kFull     ? kFullRung
                      : want.placements[i].tier == Tier::kPacked ? Rung{1}
                                                                 : kGone;
    EXPECT_EQ(plan.placements[0][i].k, rung) << i;
  }
}

}  // namespace
}  // namespace qevict::parts
