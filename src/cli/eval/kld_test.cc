#include "cli/eval/kld.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace qevict::cli {
namespace {

/// Logits of probabilities, moved by a constant: distributions do not change.
std::vector<float> LogitsOf(const std::vector<double>& p, double shift = 0.0) {
  std::vector<float> logits;
  for (const double x : p) logits.push_back(static_cast<float>(std::log(x) + shift));
  return logits;
}

double Kl(const std::vector<float>& p, const std::vector<float>& q) {
  return KlDivergence(ReferenceRow(p), q, LogSumExp(q));
}

TEST(KldTest, EqualDistributionsHaveNoDivergence) {
  const std::vector<float> p = LogitsOf({0.5, 0.25, 0.25});
  EXPECT_NEAR(Kl(p, p), 0.0, 1e-15);
  EXPECT_NEAR(Kl(p, LogitsOf({0.5, 0.25, 0.25}, 7.0)), 0.0, 1e-6);
}

TEST(KldTest, KnownDistributions) {
  const std::vector<float> p = LogitsOf({0.5, 0.25, 0.25});
  const std::vector<float> u = LogitsOf({1.0 / 3, 1.0 / 3, 1.0 / 3}, -3.0);
  const double entropy = 1.5 * std::log(2.0);
  EXPECT_NEAR(Kl(p, u), std::log(3.0) - entropy, 1e-6);
  EXPECT_NEAR(Kl(u, p), (std::log(2.0 / 3) + 2 * std::log(4.0 / 3)) / 3, 1e-6);
  // Two Bernoullis: 0.9 log(0.9/0.6) + 0.1 log(0.1/0.4).
  EXPECT_NEAR(Kl(LogitsOf({0.9, 0.1}), LogitsOf({0.6, 0.4})), 0.226289, 1e-6);
}

TEST(KldTest, LargeLogitsDoNotOverflow) {
  const std::vector<float> p = {1e4f, 1e4f - 1.0f, -1e4f};
  EXPECT_NEAR(LogSumExp(p), 1e4 + std::log1p(std::exp(-1.0)), 1e-7);
  EXPECT_NEAR(Kl(p, p), 0.0, 1e-12);
}

TEST(KldTest, ExcludedTokensCountOnlyWhereTheReferenceAllowsThem) {
  const float never = -std::numeric_limits<float>::infinity();
  const std::vector<float> p = {0.0f, 0.0f, never}, q = {0.0f, 0.0f, 0.0f};
  EXPECT_NEAR(Kl(p, q), std::log(1.5), 1e-7);
  EXPECT_EQ(Kl(q, p), std::numeric_limits<double>::infinity());
  EXPECT_NEAR(Kl(p, p), 0.0, 1e-15);
}

TEST(KldTest, NeverNegative) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 5.0f);
  for (int round = 0; round < 200; ++round) {
    std::vector<float> p(50), q(50);
    for (float& x : p) x = normal(random);
    for (size_t i = 0; i < q.size(); ++i) q[i] = p[i] + 1e-3f * normal(random);
    EXPECT_GE(Kl(p, q), -1e-7);
  }
}

TEST(KldTest, TopTokenIsTheFirstOfEqualOnes) {
  EXPECT_EQ(TopToken(std::vector<float>{1.0f, 3.0f, 3.0f, 2.0f}), 1u);
}

TEST(KldTest, PositionComparesLabelsAndTopTokens) {
  const std::vector<float> base = LogitsOf({0.7, 0.2, 0.1});
  const Position p = ComparePosition(ReferenceRow(base), LogitsOf({0.3, 0.6, 0.1}), 1);
  EXPECT_NEAR(p.nll_base, -std::log(0.2), 1e-6);
  EXPECT_NEAR(p.nll, -std::log(0.6), 1e-6);
  EXPECT_FALSE(p.same_top);
  EXPECT_NEAR(p.kl, 0.7 * std::log(0.7 / 0.3) + 0.2 * std::log(0.2 / 0.6), 1e-6);
}

TEST(KldTest, SummaryOfKnownPositions) {
  const std::vector<Position> positions = {
      {0.0, 1.0, 1.0, true}, {0.2, 2.0, 2.5, true}, {0.4, 3.0, 3.5, false}, {0.6, 2.0, 2.0, true}};
  const Agreement a = Summarize(positions);
  EXPECT_EQ(a.n, 4u);
  EXPECT_NEAR(a.kl_mean, 0.3, 1e-12);
  // Sample variance 0.2 / 3, divided by 4.
  EXPECT_NEAR(a.kl_stderr, std::sqrt(0.2 / 3.0 / 4.0), 1e-12);
  EXPECT_NEAR(a.kl_median, 0.3, 1e-12);
  EXPECT_NEAR(a.kl_max, 0.6, 1e-12);
  EXPECT_NEAR(a.same_top_percent, 75.0, 1e-12);
  EXPECT_NEAR(a.perplexity_base, std::exp(2.0), 1e-12);
  EXPECT_NEAR(a.perplexity, std::exp(2.25), 1e-12);
  EXPECT_NEAR(a.perplexity_ratio, std::exp(0.25), 1e-12);
  // Differences 0, .5, .5, 0: sample variance 1/12. Reference 1, 2, 3, 2: 2/3.
  EXPECT_NEAR(a.perplexity_ratio_error, std::exp(0.25) * std::sqrt(1.0 / 12 / 4), 1e-12);
  EXPECT_NEAR(a.perplexity_base_error, std::exp(2.0) * std::sqrt(2.0 / 3 / 4), 1e-12);
  const double d1 = std::exp(-2.5) - std::exp(-2.0), d2 = std::exp(-3.5) - std::exp(-3.0);
  EXPECT_NEAR(a.delta_p_mean, 100.0 * (d1 + d2) / 4, 1e-12);
  EXPECT_NEAR(a.delta_p_rms, 100.0 * std::sqrt((d1 * d1 + d2 * d2) / 4), 1e-12);
}

TEST(KldTest, PerplexityNeedsNoReferenceLogits) {
  const Position p = ComparePerplexity(1.5, LogitsOf({0.7, 0.2, 0.1}), 1);
  EXPECT_EQ(p.nll_base, 1.5);
  EXPECT_NEAR(p.nll, -std::log(0.2), 1e-6);
  EXPECT_EQ(p.kl, 0.0);
}

TEST(KldTest, SummaryOfNothingAndOfOne) {
  EXPECT_EQ(Summarize({}).n, 0u);
  const std::vector<Position> one = {{0.5, 1.0, 2.0, false}};
  EXPECT_EQ(Summarize(one).kl_stderr, 0.0);
  EXPECT_EQ(Summarize(one).kl_p999, 0.5);
}

}  // namespace
}  // namespace qevict::cli
