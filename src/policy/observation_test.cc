#include "policy/observation.h"

#include <gtest/gtest.h>

#include <cmath>

#include "policy/testing.h"

namespace qevict::parts {
namespace {

/// Windows of a ranking, best first.
std::vector<size_t> Order(const std::vector<Ranked>& ranking) {
  std::vector<size_t> order;
  for (const Ranked& r : ranking) order.push_back(r.window);
  return order;
}

constexpr Pooling kNone{.kernel = 1};

TEST(ObservationTest, WindowsAreTheMeanOrTheBestOfTheirTokens) {
  TestView view({100, 20});
  GroupColumns& c = view.Add({0, 0});
  c.n_tokens = {4, 4};
  c.position = {0, 4};
  const std::vector<float> tokens = {8, 0, 0, 0, 3, 3, 3, 3};
  view.groups()[0].tokens = tokens;
  const GroupView& g = view.view().groups[0];
  EXPECT_EQ(Order(RankObserved(g, 4, kNone)), (std::vector<size_t>{1, 0}));
  EXPECT_EQ(Order(RankObserved(g, 4, {.kernel = 1, .window_max = true})),
            (std::vector<size_t>{0, 1}));
  // Neighbours of other windows are pooled, too: 8/3 + 8/3 + 1 against 2 + 3 + 3 + 2.
  const std::vector<Ranked> pooled = RankObserved(g, 4, {.kernel = 3});
  EXPECT_NEAR(pooled[0].score, 10.0 / 4, 1e-6);
  EXPECT_NEAR(pooled[1].score, (8.0 / 3 + 8.0 / 3 + 1) / 4, 1e-6);
}

TEST(ObservationTest, TokensShareTheSumOfTheirWindow) {
  TestView view({100, 20});
  view.Add({16, 8, 24});
  const std::vector<Ranked> ranking = RankObserved(view.view().groups[0], 8, kNone);
  EXPECT_EQ(Order(ranking), (std::vector<size_t>{2, 0, 1}));
  EXPECT_EQ(ranking[0].score, 3.0f);
}

TEST(ObservationTest, PoolingEndsWhereAWindowIsMissing) {
  TestView view({100, 20});
  GroupColumns& c = view.Add({1, 9, 1});
  c.n_tokens = {1, 1, 1};
  c.position = {0, 1, 3};  // 2 is gone
  const std::vector<Ranked> ranking =
      RankObserved(view.view().groups[0], 1, {.kernel = 3, .maximum = true});
  EXPECT_EQ(Order(ranking), (std::vector<size_t>{0, 1, 2}));
  EXPECT_EQ(ranking[1].score, 9.0f);
  EXPECT_EQ(ranking[2].score, 1.0f);
}

TEST(ObservationTest, ProtectedWindowsAtTheEndAreNoNeighbours) {
  TestView view({100, 20});
  GroupColumns& c = view.Add({5, 2, 1, 99});
  c.n_tokens.assign(4, 1);
  c.position = {0, 1, 2, 3};
  c.is_protected = {1, 0, 0, 1};
  const std::vector<Ranked> ranking =
      RankObserved(view.view().groups[0], 1, {.kernel = 3, .maximum = true});
  EXPECT_EQ(Order(ranking), (std::vector<size_t>{1, 2}));
  EXPECT_EQ(ranking[0].score, 5.0f) << "a sink is a neighbour";
  EXPECT_EQ(ranking[1].score, 2.0f) << "an observing row is none";
}

TEST(ObservationTest, GeneratedWindowsComeFirstAndInvisibleOnesLast) {
  TestView view({100, 20});
  GroupColumns& c = view.Add({7, 0, 3, 8, 0, 0});
  c.visible[0] = 0;
  const std::vector<Ranked> ranking = RankObserved(view.view().groups[0], 8, kNone);
  EXPECT_EQ(Order(ranking), (std::vector<size_t>{5, 4, 3, 2, 1, 0}));
  EXPECT_EQ(ranking[1].kind, Ranked::kGenerated);
  EXPECT_EQ(ranking[4].kind, Ranked::kObserved) << "its mass is 0, but it came before window 3";
}

TEST(ObservationTest, EqualScoresGoByAgeAndNanIsLast) {
  TestView view({100, 20});
  view.Add({NAN, 2, 5, 2, 1});
  EXPECT_EQ(Order(RankObserved(view.view().groups[0], 8, kNone)),
            (std::vector<size_t>{2, 1, 3, 4, 0}));
}

TEST(ObservationTest, WithoutAnyMassTheNewestStay) {
  TestView view({100, 20});
  view.Add({1, 1, 1});
  view.view();
  view.groups()[0].stats = {};
  EXPECT_EQ(Order(RankObserved(view.groups()[0], 8, kNone)), (std::vector<size_t>{2, 1, 0}));
}

// A second prompt begins: its rows have not attended yet, and what was earned before still counts.
TEST(ObservationTest, BeforeAPromptHasLookedScoresCount) {
  TestView view({100, 20});
  view.Add({3, 9, 5});
  view.view();
  const std::vector<float> none(3, 0.0f);
  view.groups()[0].stats[static_cast<size_t>(Stat::kPromptMass)] = none;
  EXPECT_EQ(Order(RankObserved(view.groups()[0], 8, kNone)), (std::vector<size_t>{1, 2, 0}));
}

TEST(ObservationTest, KeepFirstSpendsBytesInOrder) {
  TestView view({100, 20});
  GroupColumns& c = view.Add({4, 3, 2, 1});
  c.rung_k[1] = c.rung_v[1] = 1;
  const GroupView& g = view.view().groups[0];
  const std::vector<Ranked> ranking = RankObserved(g, 8, kNone);
  const auto kept = [&](size_t n, uint64_t bytes) {
    std::vector<Placement> placed = {{0, 0}, {1, 1}, {0, 0}, {0, 0}};
    KeepFirst(g, ranking, n, bytes, placed);
    std::vector<size_t> windows;
    for (size_t i = 0; i < 4; ++i) {
      if (placed[i].k != kGone) windows.push_back(i);
    }
    return std::make_pair(windows, bytes);
  };
  EXPECT_EQ(kept(4, 640), (std::make_pair(std::vector<size_t>{0, 1, 2, 3}, uint64_t{0})));
  EXPECT_EQ(kept(4, 439), (std::make_pair(std::vector<size_t>{0, 1}, uint64_t{199})));
  EXPECT_EQ(kept(1, 640), (std::make_pair(std::vector<size_t>{0}, uint64_t{440})));
  EXPECT_EQ(kept(4, 199).first, std::vector<size_t>{});
}

}  // namespace
}  // namespace qevict::parts
