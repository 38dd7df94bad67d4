#include "cli/quantile.h"

#include <gtest/gtest.h>

namespace qevict::cli {
namespace {

TEST(QuantileTest, QuantilesInterpolate) {
  const std::vector<double> x = {1.0, 2.0, 3.0, 5.0};
  EXPECT_DOUBLE_EQ(Quantile(x, 0.0), 1.0);
  EXPECT_DOUBLE_EQ(Quantile(x, 0.5), 2.5);
  EXPECT_DOUBLE_EQ(Quantile(x, 1.0), 5.0);
  EXPECT_DOUBLE_EQ(Quantile(std::vector<double>{4.0}, 0.9), 4.0);
  EXPECT_DOUBLE_EQ(Quantile({}, 0.5), 0.0);
}

TEST(QuantileTest, OrderDoesNotMatter) {
  EXPECT_EQ(QuantileOf({}, 0.5), 0.0);
  EXPECT_EQ(QuantileOf({5, 1, 3}, 0.5), 3.0);
  EXPECT_EQ(QuantileOf({5, 1, 3}, 1.0), 5.0);
}

}  // namespace
}  // namespace qevict::cli
