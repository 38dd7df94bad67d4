#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

#include "policy/policies.h"
#include "policy/testing.h"

namespace qevict {
namespace {

/// Indices of windows that a plan keeps in a group.
std::vector<size_t> Kept(const Plan& plan, size_t group = 0) {
  std::vector<size_t> kept;
  for (size_t i = 0; i < plan.placements[group].size(); ++i) {
    if (plan.placements[group][i].k != kGone) kept.push_back(i);
  }
  return kept;
}

Config SnapKv(uint32_t window, const std::string& params) {
  Config config;
  config.policy = "snapkv";
  config.window = window;
  config.params = params;
  EXPECT_TRUE(CheckPolicy(config).ok()) << params;
  return config;
}

/// What stays of tokens in windows of one, if `n` fit.
std::vector<size_t> KeptTokens(const std::vector<float>& mass, uint64_t n, const char* params) {
  TestView view({100, 20});
  GroupColumns& c = view.Add(std::vector<float>(mass.size(), 0.0f));
  c.n_tokens.assign(mass.size(), 1);
  for (size_t i = 0; i < mass.size(); ++i) c.position[i] = static_cast<int32_t>(i);
  view.groups()[0].tokens = mass;
  return Kept(kSnapKvPolicy.plan(view.view(), {200 * n + 199}, SnapKv(1, params)));
}

// Two rows over eight keys:
//   [.20 .02 .04 .30 .02 .02 .10 .10] and [.10 .06 .02 .10 .04 .20 .02 .16], summed.
const std::vector<float> kSums = {.30f, .08f, .06f, .40f, .06f, .22f, .12f, .26f};

TEST(SnapKvTest, VectorsOfPooling) {
  EXPECT_EQ(KeptTokens(kSums, 3, "kernel:3"), (std::vector<size_t>{2, 4, 6}));
  EXPECT_EQ(KeptTokens(kSums, 3, "kernel:3/max_pool:1"), (std::vector<size_t>{2, 3, 4}));
  EXPECT_EQ(KeptTokens(kSums, 3, "kernel:1"), (std::vector<size_t>{0, 3, 7}));
}

// The mean of that head and a second one, before pooling.
TEST(SnapKvTest, VectorOfTwoQueryHeads) {
  const std::vector<float> mean = {.16f, .19f, .04f, .21f, .04f, .12f, .21f, .14f};
  EXPECT_EQ(KeptTokens(mean, 3, "kernel:3/max_pool:1"), (std::vector<size_t>{2, 3, 4}));
}

TEST(SnapKvTest, EverythingStaysWhileItFits) {
  EXPECT_EQ(KeptTokens(kSums, 8, "").size(), 8u);
  EXPECT_EQ(KeptTokens(kSums, 0, "").size(), 0u);
}

TEST(SnapKvTest, GroupsGetTheSameAndProtectedWindowsStay) {
  TestView view({100, 20});
  view.Add({9, 8, 7, 6, 9}, 0, 0, 0).is_protected = {1, 0, 0, 0, 1};
  view.Add({1, 1, 2, 3, 9}, 0, 0, 1).is_protected = {1, 0, 0, 0, 1};
  const Plan plan = kSnapKvPolicy.plan(view.view(), {2 * 3 * 200}, SnapKv(8, "kernel:1"));
  EXPECT_EQ(Kept(plan, 0), (std::vector<size_t>{0, 1, 4}));
  EXPECT_EQ(Kept(plan, 1), (std::vector<size_t>{0, 3, 4}));
}

// The budget holds during the answer: its windows push out the lowest of the prompt.
TEST(SnapKvTest, GeneratedWindowsStay) {
  TestView view({100, 20});
  view.Add({5, 1, 4, 2, 0, 0});
  const Config config = SnapKv(8, "kernel:1");
  EXPECT_EQ(Kept(kSnapKvPolicy.plan(view.view(), {800}, config)),
            (std::vector<size_t>{0, 2, 4, 5}));
  EXPECT_EQ(Kept(kSnapKvPolicy.plan(view.view(), {200}, config)), (std::vector<size_t>{5}));
}

// A second computation of everything: pools by looping over positions, and takes the best window
// as often as the bytes allow.
std::vector<size_t> NaiveKept(const std::vector<float>& tokens, uint32_t window, size_t n,
                              int kernel, bool maximum, bool window_max) {
  const int n_tokens = static_cast<int>(tokens.size());
  const size_t n_windows = tokens.size() / window;
  std::vector<float> score(n_windows);
  for (size_t w = 0; w < n_windows; ++w) {
    double sum = 0, top = -1;
    for (int t = static_cast<int>(w * window); t < static_cast<int>((w + 1) * window); ++t) {
      double total = 0, best = -1;
      for (int d = -(kernel / 2); d <= kernel / 2; ++d) {
        if (t + d < 0 || t + d >= n_tokens) continue;
        total += static_cast<double>(tokens[static_cast<size_t>(t + d)]);
        best = std::max(best, static_cast<double>(tokens[static_cast<size_t>(t + d)]));
      }
      const auto pooled = static_cast<float>(maximum ? best : total / kernel);
      sum += static_cast<double>(pooled);
      top = std::max(top, static_cast<double>(pooled));
    }
    score[w] = static_cast<float>(window_max ? top : sum / window);
  }
  std::vector<bool> in(n_windows);
  for (size_t k = 0; k < std::min(n, n_windows); ++k) {
    size_t best = n_windows;
    for (size_t w = 0; w < n_windows; ++w) {
      if (!in[w] && (best == n_windows || score[w] > score[best])) best = w;
    }
    in[best] = true;
  }
  std::vector<size_t> kept;
  for (size_t w = 0; w < n_windows; ++w) {
    if (in[w]) kept.push_back(w);
  }
  return kept;
}

TEST(SnapKvTest, RandomViewsAgreeWithANaiveComputation) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const uint32_t window = 1u << random() % 4;
    const size_t n_windows = 1 + random() % 40;
    const int kernel = 1 + 2 * static_cast<int>(random() % 5);
    const bool maximum = random() % 2, window_max = random() % 2;
    std::vector<float> tokens(n_windows * window);
    for (float& x : tokens) x = static_cast<float>(1 + random() % 12) / 64.0f;  // many ties
    TestView view({100, 20});
    GroupColumns& c = view.Add(std::vector<float>(n_windows, 0.0f));
    c.n_tokens.assign(n_windows, static_cast<uint8_t>(window));
    for (size_t i = 0; i < n_windows; ++i) c.position[i] = static_cast<int32_t>(i * window);
    view.groups()[0].tokens = tokens;
    const uint64_t n = random() % (n_windows + 2);
    const Config config =
        SnapKv(window, "kernel:" + std::to_string(kernel) + "/max_pool:" + std::to_string(maximum) +
                           "/window_max:" + std::to_string(window_max));
    const Plan plan = kSnapKvPolicy.plan(view.view(), {n * 200 + random() % 200}, config);
    ASSERT_EQ(Kept(plan), NaiveKept(tokens, window, n, kernel, maximum, window_max)) << seed;
  }
}

}  // namespace
}  // namespace qevict
