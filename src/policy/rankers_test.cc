#include "policy/rankers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

namespace qevict {
namespace {

Config With(ScoreKind kind) {
  Config c;
  c.score = kind;
  return c;
}

std::vector<size_t> Order(const std::vector<float>& scores) {
  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  return order;
}

/// Scores after three steps from start values, the windows' masses as one head's.
std::vector<float> ThreeSteps(const Config& config) {
  const float steps[3][3] = {{.3f, .1f, .05f}, {0, .2f, .3f}, {0, .1f, .45f}};
  std::vector<float> scores = {1.0f, .2f, .1f};
  for (const auto& step : steps) UpdateScores(config, {step, 3, 1, 1, 1}, scores);
  return scores;
}

void ExpectScores(const std::vector<float>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-6) << i;
}

TEST(RankersTest, CumulativeVector) {
  const std::vector<float> s = ThreeSteps(With(ScoreKind::kCumulative));
  ExpectScores(s, {1.3, .6, .9});
  EXPECT_EQ(Order(s), (std::vector<size_t>{0, 2, 1}));
}

TEST(RankersTest, EmaVectors) {
  Config config = With(ScoreKind::kEma);
  const std::vector<float> slow = ThreeSteps(config);
  ExpectScores(slow, {.973239, .19802, .10499});
  EXPECT_EQ(Order(slow), (std::vector<size_t>{0, 1, 2}));
  config.ema_lambda = 0.5;
  const std::vector<float> fast = ThreeSteps(config);
  ExpectScores(fast, {.1625, .1375, .31875});
  EXPECT_EQ(Order(fast), (std::vector<size_t>{2, 0, 1}));
}

TEST(RankersTest, PNormVectors) {
  const float steps[2][4] = {{.3f, .1f, .1f, .1f}, {0, .4f, .2f, .2f}};  // [head][window]
  const auto run = [&](double p) {
    Config config = With(ScoreKind::kPNorm);
    config.p_norm = p;
    std::vector<float> scores = {0, 0};
    for (const auto& step : steps) UpdateScores(config, {step, 2, 2, 1, 1}, scores);
    return scores;
  };
  ExpectScores(run(1), {.3, .4});
  ExpectScores(run(2), {.07, .11});
  ExpectScores(run(4), {.0049, .0137});
  EXPECT_NEAR(std::sqrt(run(2)[0]), .264575, 1e-6);
  EXPECT_NEAR(std::sqrt(run(2)[1]), .331662, 1e-6);
  EXPECT_NEAR(std::pow(run(4)[0], .25), .264575, 1e-6);
  EXPECT_NEAR(std::pow(run(4)[1], .25), .342121, 1e-6);
}

TEST(RankersTest, KeyNormVector) {
  Config config = With(ScoreKind::kKeyNorm);
  const float first[4] = {3, 4, 0, 1}, second[4] = {1, 1, 2, 0};
  const double sum0 = KeyNormSum(first, 2, 2), sum1 = KeyNormSum(second, 2, 2);
  config.key_norm_sign = 1;
  EXPECT_NEAR(KeyNormScore(config, sum0, 1, 2), 3.0, 1e-6);
  EXPECT_NEAR(KeyNormScore(config, sum1, 1, 2), 1.707107, 1e-6);
  config.key_norm_sign = -1;
  EXPECT_LT(KeyNormScore(config, sum0, 1, 2), KeyNormScore(config, sum1, 1, 2));
  // Frozen at birth: attention does not touch it.
  const float mass = 0.7f;
  EXPECT_EQ(UpdateScore(config, -3.0f, {&mass, 1, 1, 1, 1}, 0), -3.0f);
}

// The sum of the definition by hand: two query heads, two steps, one window of two tokens.
TEST(RankersTest, SpecificationScore) {
  const Config config;
  float score = 1.5f;
  const float step1[2] = {.1f + .2f, .05f + .05f}, step2[2] = {.3f + .1f, 0.0f + .2f};
  score = UpdateScore(config, score, {step1, 1, 2, 1, 1}, 0);
  score = UpdateScore(config, score, {step2, 1, 2, 1, 1}, 0);
  EXPECT_NEAR(score, 2.0f, 1e-6);
  // The same heads as one group, both steps in one call.
  const float grouped = step1[0] + step1[1] + step2[0] + step2[1];
  EXPECT_NEAR(UpdateScore(config, 1.5f, {&grouped, 1, 1, 2, 2}, 0), 2.0f, 1e-6);
}

TEST(RankersTest, EmaOfEqualRowsEqualsTheRecursion) {
  const Config config = With(ScoreKind::kEma);
  const float one = 0.25f, ten = 2.5f;
  float step_by_step = 0.8f;
  for (int i = 0; i < 10; ++i)
    step_by_step = UpdateScore(config, step_by_step, {&one, 1, 1, 1, 1}, 0);
  EXPECT_NEAR(UpdateScore(config, 0.8f, {&ten, 1, 1, 1, 10}, 0), step_by_step, 1e-6);
}

// Config::event_scores: the step of an event stands for the whole interval.
TEST(RankersTest, RepeatCountsTheCallSeveralTimes) {
  const float mass[2] = {0.3f, 0.1f};  // two heads, one window
  for (ScoreKind kind : {ScoreKind::kCumulative, ScoreKind::kEma, ScoreKind::kPNorm}) {
    const Config config = With(kind);
    float expected = 0.5f;
    for (int i = 0; i < 8; ++i) expected = UpdateScore(config, expected, {mass, 1, 2, 1, 1}, 0);
    EXPECT_NEAR(UpdateScore(config, 0.5f, {mass, 1, 2, 1, 1, 8}, 0), expected, 1e-6);
  }
}

TEST(RankersTest, NoRowsLeaveScoresAlone) {
  const float mass = 0.0f;
  for (ScoreKind kind :
       {ScoreKind::kCumulative, ScoreKind::kEma, ScoreKind::kPNorm, ScoreKind::kKeyNorm}) {
    EXPECT_EQ(UpdateScore(With(kind), 1.25f, {&mass, 1, 1, 1, 0}, 0), 1.25f);
  }
  EXPECT_EQ(KeyNormScore(Config{}, 1.0, 0, 8), 0.0f);
}

// fp32 scores keep the contributions of a decode step after a long prompt. fp16 would lose them:
// above 2048 its numbers are 2 apart.
TEST(RankersTest, SmallContributionsSurviveLargeSums) {
  const Config config;
  const float mass = 1e-3f;
  float score = 2048.0f;
  for (int i = 0; i < 1000; ++i) score = UpdateScore(config, score, {&mass, 1, 1, 1, 1}, 0);
  EXPECT_NEAR(score, 2049.0, 0.03);
}

}  // namespace
}  // namespace qevict
