#include "kernels/logits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "kernels/testing/isa_test.h"

namespace qevict::kernels {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

class LogitsTest : public IsaTest {};

std::vector<float> RandomLogits(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 4.0f);
  std::vector<float> x(n);
  for (float& v : x) v = normal(random);
  return x;
}

float TopOf(const std::vector<float>& x) { return *std::max_element(x.begin(), x.end()); }

TEST_P(LogitsTest, AgreesWithDoublesAtEveryLength) {
  for (size_t n : {0, 1, 2, 7, 8, 9, 15, 16, 17, 127, 128, 129, 255, 256, 257, 1000, 151936}) {
    std::vector<float> p = RandomLogits(n, 1), q = RandomLogits(n, 2);
    for (size_t i = 0; i < n; i += 5) q[i] = p[i] + 0.01f * q[i];
    const float top = n == 0 ? 0.0f : TopOf(p);
    double sum = 0.0, cross = 0.0, size = 0.0;
    for (size_t i = 0; i < n; ++i) {
      const double e = std::exp(static_cast<double>(p[i]) - static_cast<double>(top));
      const double term = e * (static_cast<double>(p[i]) - static_cast<double>(q[i]));
      sum += e;
      cross += term;
      size += std::abs(term);
    }
    EXPECT_NEAR(SumExp(p, top), sum, 3e-7 * sum) << n;
    EXPECT_NEAR(SumExpDifference(p, q, top), cross, 4e-7 * size) << n;
    p.insert(p.begin(), 99.0f);  // rows begin anywhere
    q.insert(q.begin(), 99.0f);
    const auto p1 = std::span(p).subspan(1), q1 = std::span(q).subspan(1);
    EXPECT_NEAR(SumExp(p1, top), sum, 3e-7 * sum) << n;
    EXPECT_NEAR(SumExpDifference(p1, q1, top), cross, 4e-7 * size) << n;
  }
}

TEST_P(LogitsTest, ExcludedTokensWeighNothing) {
  for (size_t at : {0, 3, 16, 20}) {
    std::vector<float> p(21, 1.0f), q(21, 1.0f);
    p[at] = kNever;
    EXPECT_EQ(SumExp(p, 1.0f), 20.0) << at;
    EXPECT_EQ(SumExpDifference(p, q, 1.0f), 0.0) << at;
    q[at] = kNever;
    EXPECT_EQ(SumExpDifference(p, q, 1.0f), 0.0) << at;
    p[at] = 1.0f;
    EXPECT_EQ(SumExpDifference(p, q, 1.0f), std::numeric_limits<double>::infinity()) << at;
  }
}

TEST_P(LogitsTest, NoNumberStaysNone) {
  for (size_t at : {0, 16, 20}) {
    std::vector<float> p(21, 1.0f), q(21, 1.0f);
    q[at] = std::numeric_limits<float>::quiet_NaN();
    EXPECT_TRUE(std::isnan(SumExp(q, 1.0f))) << at;
    EXPECT_TRUE(std::isnan(SumExpDifference(p, q, 1.0f))) << at;
    p[at] = q[at];
    q[at] = 1.0f;
    EXPECT_TRUE(std::isnan(SumExpDifference(p, q, 1.0f))) << at;
  }
}

INSTANTIATE_TEST_SUITE_P(AllIsas, LogitsTest, testing::ValuesIn(AllIsas()), IsaParamName);

}  // namespace
}  // namespace qevict::kernels
