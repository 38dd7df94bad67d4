#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "policy/policies.h"
#include "policy/testing.h"

namespace qevict {
namespace {

Config AdaKv(const std::string& params) {
  Config config;
  config.policy = "adakv";
  config.per_head = true;
  config.params = params;
  EXPECT_TRUE(CheckPolicy(config).ok()) << params;
  return config;
}

std::vector<size_t> Kept(const std::vector<Placement>& placed) {
  std::vector<size_t> kept;
  for (size_t i = 0; i < placed.size(); ++i) {
    if (placed[i].k != kGone) kept.push_back(i);
  }
  return kept;
}

using Scores = std::vector<std::vector<float>>;

/// The first n of a stable order by score, by index.
std::vector<size_t> Best(const std::vector<float>& scores, size_t n) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  order.resize(n);
  std::sort(order.begin(), order.end());
  return order;
}

/// How many windows each head of one layer keeps, if `n` fit together. Kept ones are its best.
std::vector<size_t> Budgets(const Scores& heads, uint64_t n, const std::string& params) {
  TestView view({100, 20});
  for (uint32_t h = 0; h < heads.size(); ++h) view.Add(heads[h], 0, 0, h);
  const Plan plan = kAdaKvPolicy.plan(view.view(), {n * 200}, AdaKv(params));
  EXPECT_LE(CostOf(view.view(), plan), n * 200);
  std::vector<size_t> counts;
  for (size_t h = 0; h < heads.size(); ++h) {
    const std::vector<size_t> kept = Kept(plan.placements[h]);
    EXPECT_EQ(kept, Best(heads[h], kept.size())) << "head " << h << " keeps its best";
    counts.push_back(kept.size());
  }
  return counts;
}

// The vectors of the method: base = 3 for two heads. The authors' roundings give [2, 3] in both
// cases with a floor; here the budgets add up to 6.
const Scores kTwo = {{.5f, .3f, .1f, .05f, .03f, .02f}, {.2f, .18f, .17f, .16f, .15f, .14f}};

TEST(AdaKvTest, VectorsOfHeadBudgets) {
  using Counts = std::vector<size_t>;
  EXPECT_EQ(Budgets(kTwo, 6, "kernel:1/alpha:0"), (Counts{2, 4}));
  EXPECT_EQ(Budgets(kTwo, 6, "kernel:1/alpha:0.2"), (Counts{2, 4})) << "2.2 and 3.8";
  EXPECT_EQ(Budgets(kTwo, 6, "kernel:1/alpha:0.5"), (Counts{3, 3})) << "2.5 and 3.5";
  EXPECT_EQ(Budgets(kTwo, 6, "kernel:1/alpha:1"), (Counts{3, 3}));
  EXPECT_EQ(Budgets(kTwo, 6, "kernel:1/alpha:0/normalize:1"), (Counts{3, 3}))
      << "shares of 0.9 and 0.55";
}

TEST(AdaKvTest, TheFloorSavesAHeadOfLowScores) {
  const Scores heads = {{.5f, .4f, .3f, .25f, .2f, .1f}, {.01f, .02f, .01f, .01f, .01f, .01f}};
  EXPECT_EQ(Budgets(heads, 6, "kernel:1/alpha:0"), (std::vector<size_t>{6, 0}));
  EXPECT_EQ(Budgets(heads, 6, "kernel:1/alpha:0.4"), (std::vector<size_t>{5, 1}));
}

TEST(AdaKvTest, WhatAHeadHasNoWindowsForGoesToTheBestOfTheOthers) {
  const Scores heads = {{9}, {1, 2, 3, 4, 5, 6, 7, 8}, {.5f, 8.5f, .5f, .5f}};
  EXPECT_EQ(Budgets(heads, 9, "kernel:1/alpha:1"), (std::vector<size_t>{1, 5, 3}));
  EXPECT_EQ(Budgets(heads, 15, "kernel:1"), (std::vector<size_t>{1, 8, 4}));
}

TEST(AdaKvTest, LayersAndSequencesDoNotShare) {
  TestView view({100, 20});
  view.Add({9, 9, 9, 9}, 0, 0, 0);
  view.Add({1, 1, 1, 1}, 0, 1, 0);
  view.Add({1, 1, 1, 1}, 1, 0, 0);
  view.Add({9, 9, 9, 9}, 1, 1, 0);
  const Plan plan = kAdaKvPolicy.plan(view.view(), {8 * 200}, AdaKv("alpha:0"));
  for (const auto& placed : plan.placements) EXPECT_EQ(Kept(placed).size(), 2u);
}

// Groups may come layer by layer, head by head, sequence by sequence.
TEST(AdaKvTest, HeadsOfASequenceShareWhereverTheyStand) {
  TestView view({100, 20});
  view.Add({9, 9, 9, 9}, 0, 0, 0);
  view.Add({1, 1, 1, 1}, 1, 0, 0);
  view.Add({1, 1, 1, 1}, 0, 0, 1);
  view.Add({9, 9, 9, 9}, 1, 0, 1);
  const Plan plan = kAdaKvPolicy.plan(view.view(), {8 * 200}, AdaKv("kernel:1/alpha:0"));
  EXPECT_EQ(Kept(plan.placements[0]).size(), 4u);
  EXPECT_EQ(Kept(plan.placements[1]).size(), 0u);
  EXPECT_EQ(Kept(plan.placements[2]).size(), 0u);
  EXPECT_EQ(Kept(plan.placements[3]).size(), 4u);
}

TEST(AdaKvTest, WithOneGroupPerLayerItIsSnapKv) {
  std::mt19937 random(7);
  TestView view({100, 20});
  std::vector<float> score(20);
  for (uint32_t layer = 0; layer < 3; ++layer) {
    for (float& x : score) x = static_cast<float>(random() % 100);
    view.Add(score, 0, layer);
  }
  Config snapkv;
  snapkv.params = "kernel:7/max_pool:1";
  EXPECT_EQ(kAdaKvPolicy.plan(view.view(), {6000}, AdaKv("")).placements,
            kSnapKvPolicy.plan(view.view(), {6000}, snapkv).placements);
}

/// The rule by counting: a window is among the n best of the layer if fewer than n beat it.
std::vector<size_t> NaiveBudgets(const Scores& heads, size_t n, int alpha_tenths) {
  size_t all = 0;
  for (const auto& head : heads) all += head.size();
  n = std::min(n, all);
  std::vector<size_t> count(heads.size(), 0);
  for (size_t h = 0; h < heads.size(); ++h) {
    for (size_t i = 0; i < heads[h].size(); ++i) {
      size_t beaten_by = 0;
      for (size_t g = 0; g < heads.size(); ++g) {
        for (size_t j = 0; j < heads[g].size(); ++j) {
          const float x = heads[g][j], y = heads[h][i];
          beaten_by += x > y || (x == y && (j < i || (j == i && g < h)));
        }
      }
      count[h] += beaten_by < n;
    }
  }
  // In units of 1 / (10 H), so that remainders are exact.
  const size_t unit = 10 * heads.size();
  std::vector<size_t> budget(heads.size()), rest(heads.size());
  size_t given = 0;
  for (size_t h = 0; h < heads.size(); ++h) {
    const size_t alpha = static_cast<size_t>(alpha_tenths);
    const size_t share = count[h] * (10 - alpha) * heads.size() + n * alpha;
    budget[h] = share / unit;
    rest[h] = share % unit;
    given += budget[h];
  }
  for (; given < n; ++given) {
    const auto h = static_cast<size_t>(std::max_element(rest.begin(), rest.end()) - rest.begin());
    ++budget[h];
    rest[h] = 0;
  }
  return budget;
}

TEST(AdaKvTest, RandomBudgetsAgreeWithANaiveComputation) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const size_t n_heads = 1u << random() % 3, n_windows = 4 + random() % 12;
    Scores heads(n_heads, std::vector<float>(n_windows));
    for (auto& head : heads) {
      for (float& x : head) x = static_cast<float>(1 + random() % 30);
    }
    const size_t n = n_heads * (1 + random() % n_windows);  // every head's share is whole windows
    const int alpha = random() % 2 == 0 ? 0 : 5;  // exact in binary: remainders tie as they should
    const std::string params = "kernel:1/alpha:" + std::string(alpha == 0 ? "0" : "0.5");
    ASSERT_EQ(Budgets(heads, n, params), NaiveBudgets(heads, n, alpha)) << seed;
  }
}

}  // namespace
}  // namespace qevict
