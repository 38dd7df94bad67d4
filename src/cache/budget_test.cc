#include <gtest/gtest.h>

#include "cache/test_support.h"

namespace qevict {
namespace {

std::vector<LayerShape> SmallModel() {
  return {Shape(2, 64, 64), Shape(2, 64, 64), Shape(2, 64, 64)};
}

uint64_t F16Bytes(const std::vector<LayerShape>& shapes, uint64_t tokens) {
  uint64_t bytes = 0;
  for (const LayerShape& s : shapes) bytes += 2 * s.n_kv_heads * (s.head_dim + s.head_dim_v);
  return bytes * tokens;
}

TEST(BudgetTest, CreateRefusesABudgetBelowTheMinimumAndNamesBoth) {
  Config config;
  config.budget_bytes = 10000;
  Engine e(config, SmallModel(), 1, 4096);
  ASSERT_EQ(e.status.code(), StatusCode::kInvalidArgument);
  const std::string minimum = std::to_string(MinimumBudgetBytes(config, SmallModel()));
  EXPECT_NE(e.status.message().find("10000"), std::string::npos);
  EXPECT_NE(e.status.message().find(minimum), std::string::npos);
}

std::vector<double> Shares(double fraction, const std::vector<CacheDemand>& caches) {
  Config config;
  config.budget_fraction = fraction;
  return ShareBudget(config, caches);
}

TEST(ShareBudgetTest, ASmallCacheGetsItsMinimumAndATenthFromTheOthers) {
  // Enough for all: everyone gets the fraction asked for.
  EXPECT_EQ(Shares(0.2, {{1000, 100}, {500, 90}}), (std::vector<double>{0.2, 0.2}));
  // The ring needs 88 of 500 and would get 50: the other one gives 38 of the 78 it can spare.
  const std::vector<CacheDemand> ring{{1000, 20}, {500, 80}};
  const std::vector<double> parts = Shares(0.1, ring);
  EXPECT_NEAR(parts[0], 0.062, 1e-12);
  EXPECT_NEAR(parts[1], 0.176, 1e-12);
  // Bytes are shared as the fraction that they are of all caches.
  Config bytes;
  bytes.budget_bytes = 150;
  EXPECT_EQ(ShareBudget(bytes, ring), parts);
  // Those that can spare give in proportion: 12 and 56 above their minimum, 23 are missing.
  const std::vector<double> three = Shares(0.1, {{1000, 80}, {1000, 40}, {100, 30}});
  EXPECT_NEAR(three[0] * 1000, 88 + 12.0 * 45 / 68, 1e-9);
  EXPECT_NEAR(three[1] * 1000, 44 + 56.0 * 45 / 68, 1e-9);
  EXPECT_NEAR(three[2] * 100, 33, 1e-9);
  // A ring that is hardly larger than its minimum gets all that it can use, and no more.
  const std::vector<double> tiny = Shares(0.5, {{1000, 20}, {100, 95}});
  EXPECT_NEAR(tiny[0] * 1000, 450, 1e-9);
  EXPECT_NEAR(tiny[1], 1.0, 1e-12);
  // Not enough: nobody's share is changed, and whoever lacks says so.
  EXPECT_EQ(Shares(0.05, ring), (std::vector<double>{0.05, 0.05}));
  EXPECT_EQ(Shares(0.05, {{1000, 90}}), std::vector<double>{0.05});
}

TEST(BudgetTest, FullPrefillKeepsTheLimitFromTheFirstEventOn) {
  Config config;
  config.budget_fraction = 0.2;
  Engine e(config, SmallModel(), 1, 7168);
  ASSERT_TRUE(e.status.ok()) << e.status.message();
  e.UseRope(TestRope(64));
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 6000, 512).ok());
  EXPECT_EQ(e.cache().Stats().budget_bytes, 0u);
  EXPECT_EQ(e.cache().Stats().tokens.full, 6000u * 3);
  const uint64_t budget = static_cast<uint64_t>(0.2 * 7168) * F16Bytes(SmallModel(), 1);
  uint64_t lowest = UINT64_MAX;
  for (int i = 0; i < 1000; ++i) {
    const Status status = e.Decode(seq, 1);
    ASSERT_TRUE(status.ok()) << status.message() << " at step " << i;
    const CacheStats stats = e.cache().Stats();
    ASSERT_LE(stats.bytes.total(), budget + F16Bytes(SmallModel(), 1)) << "step " << i;
    lowest = std::min(lowest, stats.bytes.total());
    if (i % 50 == 0) e.ExpectSound();
  }
  EXPECT_GT(lowest, budget * 85 / 100) << "the budget is hardly used";
  EXPECT_EQ(e.n_due, 125u);
  EXPECT_EQ(e.cache().Stats().events, 125u);
}

TEST(BudgetTest, BoundedPrefillNeverExceedsTheBudget) {
  Config config;
  config.budget_bytes = F16Bytes(SmallModel(), 7000) / 5;
  Engine e(config, SmallModel(), 1, 7168);
  ASSERT_TRUE(e.status.ok()) << e.status.message();
  e.UseRope(TestRope(64));
  const SeqId seq = e.NewSequence(0);
  for (int chunk = 0; chunk < 12; ++chunk) {
    const Status status = e.Prompt(seq, 500, 500);
    ASSERT_TRUE(status.ok()) << status.message() << " at chunk " << chunk;
    ASSERT_LE(e.cache().Stats().bytes.total(), config.budget_bytes);
    e.ExpectSound("chunk");
  }
  for (int i = 0; i < 1000; ++i) {
    const Status status = e.Decode(seq, 1);
    ASSERT_TRUE(status.ok()) << status.message() << " at step " << i;
    ASSERT_LE(e.cache().Stats().bytes.total(), config.budget_bytes);
    if (i % 50 == 0) e.ExpectSound("decode");
  }
  EXPECT_GT(e.cache().Stats().bytes.total(), config.budget_bytes * 85 / 100);
  EXPECT_LE(e.cache().Stats().peak_bytes, config.budget_bytes);
}

TEST(LeastBudgetTest, OfBytesHoldsRecentsThatAreAShareOfIt) {
  const Result<Config> config = ParseConfig("budget=1KiB,recents=25%,window=8");
  ASSERT_TRUE(config.ok()) << config.status().message();
  for (const uint32_t n_streams : {1u, 2u, 8u}) {
    const std::vector<LayerShape> shapes{Shape(2, 32, 32)};
    const Config least = WithLeastBudget(*config, shapes, n_streams, 256);
    EXPECT_GE(least.budget_bytes, MinimumBudgetBytes(least, shapes)) << n_streams << " streams";
    EXPECT_LE(least.budget_bytes, 512u * 1024 * n_streams);
  }
}

}  // namespace
}  // namespace qevict
