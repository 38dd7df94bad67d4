#include "cli/bench/stats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace qevict::cli {
namespace {

std::vector<double> UpTo(int n) {
  std::vector<double> values;
  for (int i = n; i >= 1; --i) values.push_back(i);
  return values;
}

TEST(ParseCountsTest, ListsOfIntegers) {
  EXPECT_EQ(*ParseCounts("-p", "512", 0, 1024), std::vector<uint32_t>{512});
  EXPECT_EQ(*ParseCounts("-p", "0,1024,3", 0, 1024), (std::vector<uint32_t>{0, 1024, 3}));
}

TEST(ParseCountsTest, ErrorsNameOptionValueAndLimits) {
  for (const char* text : {"", "x", "1,,2", "1,", "-1", "1025", "1.5"}) {
    const auto counts = ParseCounts("-p", text, 0, 1024);
    ASSERT_FALSE(counts.ok()) << text;
    EXPECT_EQ(counts.status().message(),
              std::string("-p ") + text +
                  " is not legal: expected integers from 0 to 1024, separated by commas");
  }
}

TEST(ModelTestTest, NamesAreThoseOfLlamaBench) {
  EXPECT_EQ((ModelTest{512, 0, 0}).Name(), "pp512");
  EXPECT_EQ((ModelTest{0, 32, 0}).Name(), "tg32");
  EXPECT_EQ((ModelTest{0, 32, 4096}).Name(), "tg32 @ d4096");
}

TEST(ModelTestTest, ZeroMeansNoTest) {
  const std::vector<uint32_t> none = {0}, two = {16, 0, 32};
  EXPECT_TRUE(TestsAt(0, none, none).empty());
  const std::vector<ModelTest> tests = TestsAt(8, two, two);
  ASSERT_EQ(tests.size(), 4u);
  EXPECT_EQ(tests[0].Name(), "pp16 @ d8");
  EXPECT_EQ(tests[3].Name(), "tg32 @ d8");
}

TEST(StatisticsTest, MeanOfValues) {
  EXPECT_EQ(Mean({}), 0.0);
  EXPECT_EQ(Mean(UpTo(4)), 2.5);
}

TEST(StatisticsTest, RatiosPairUp) {
  const std::vector<double> a = {4, 9}, b = {2, 3};
  EXPECT_EQ(Ratios(a, b), (std::vector<double>{2, 3}));
}

// Tables of the sign test: with n values, the k-th smallest and largest enclose the median with
// 1 - 2 P(Bin(n, 1/2) < k).
TEST(MedianIntervalTest, TabulatedRanks) {
  const struct {
    int n, k;
    double coverage;
  } cases[] = {{1, 1, 0.0},    {2, 1, 50.0},    {5, 1, 93.75},   {6, 1, 96.875},  {8, 1, 99.219},
               {9, 2, 96.094}, {10, 2, 97.852}, {20, 6, 95.861}, {50, 18, 96.716}};
  for (const auto& c : cases) {
    const MedianInterval i = IntervalOfMedian(UpTo(c.n));
    EXPECT_DOUBLE_EQ(i.median, (c.n + 1) / 2.0) << c.n;
    EXPECT_EQ(i.low, c.k) << c.n;
    EXPECT_EQ(i.high, c.n + 1 - c.k) << c.n;
    EXPECT_NEAR(i.coverage_percent, c.coverage, 1e-3) << c.n;
  }
}

TEST(MedianIntervalTest, AnyNumberOfValues) {
  EXPECT_EQ(IntervalOfMedian({}).coverage_percent, 0.0);
  for (int n = 1; n <= 1000; n += 37) {
    const MedianInterval i = IntervalOfMedian(UpTo(n));
    EXPECT_LE(i.low, i.median);
    EXPECT_GE(i.high, i.median);
    EXPECT_TRUE(n < 6 || i.coverage_percent >= 95.0) << n;
  }
}

}  // namespace
}  // namespace qevict::cli
