// What codecs are made of: statistics of a layer's rows, or those that it is given.
#include <gtest/gtest.h>

#include "cache/test_support.h"
#include "codecs/water_fill.h"

namespace qevict {
namespace {

constexpr uint32_t kDim = 32;

Config WaterFill() {
  Config config;
  config.preset = Preset::kPack;
  config.codec = CodecId::kWaterFill;
  config.budget_fraction = 1.0;
  config.check = true;
  return config;
}

Engine MakeEngine() { return Engine(WaterFill(), {Shape(2, kDim, kDim)}, 1, 512); }

/// Mean and energy of a channel over the rows that the engine makes, sinks left out.
void ExpectMeans(const Engine& e, const codecs::WaterFillStats& stats, uint32_t head) {
  const uint32_t sinks = WaterFill().sinks;
  for (uint32_t c = 0; c < kDim; ++c) {
    double k = 0.0, v_square = 0.0;
    for (uint32_t id = sinks; id < 100; ++id) {
      k += e.RowOf(id, 0, true)[head * kDim + c];
      const double v = e.RowOf(id, 0, false)[head * kDim + c];
      v_square += v * v;
    }
    EXPECT_NEAR(stats.k_sum[c] / static_cast<double>(stats.n), k / (100 - sinks), 1e-3) << c;
    EXPECT_NEAR(stats.v_square[c] / static_cast<double>(stats.n), v_square / (100 - sinks), 1e-3);
  }
}

TEST(LearnTest, StatisticsAreThoseOfTheRows) {
  Engine e = MakeEngine();
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 100, 30).ok());
  const std::vector<float> squares(2 * kDim, 6.0f);
  e.cache().AddQueryEnergy(0, squares.data());
  const std::vector<codecs::WaterFillStats> stats = e.cache().CodecStatistics(0, 1000);
  ASSERT_EQ(stats.size(), 2u);
  for (uint32_t h = 0; h < 2; ++h) {
    EXPECT_EQ(stats[h].n, 100 - WaterFill().sinks);
    ExpectMeans(e, stats[h], h);
    EXPECT_EQ(stats[h].q_square, std::vector<double>(kDim, 6.0));
  }
  EXPECT_LE(e.cache().CodecStatistics(0, 40)[0].n, 40u) << "thinned";
}

// A budget that is short for many sequences packs sinks, too, and the codec must be made of something.
TEST(LearnTest, SinksTeachWhereNothingElseIsHeld) {
  Engine e = MakeEngine();
  ASSERT_TRUE(e.Prompt(e.NewSequence(0), WaterFill().sinks, 30).ok());
  EXPECT_EQ(e.cache().CodecStatistics(0, 1000)[0].n, WaterFill().sinks);
}

TEST(LearnTest, GivenStatisticsMakeTheCodec) {
  Engine teacher = MakeEngine(), given = MakeEngine(), own = MakeEngine();
  ASSERT_TRUE(teacher.Prompt(teacher.NewSequence(0), 100, 30).ok());
  std::vector<codecs::WaterFillStats> stats = teacher.cache().CodecStatistics(0, 1000);
  for (codecs::WaterFillStats& s : stats) {
    for (double& sum : s.k_sum) sum += 5.0 * static_cast<double>(s.n);  // a bias of 5
    for (double& square : s.k_square) square += 30.0 * static_cast<double>(s.n);
  }
  ASSERT_TRUE(given.cache().SetCodecStatistics(0, stats).ok());
  EXPECT_FALSE(given.cache().WantsQueryEnergy(0));
  EXPECT_TRUE(own.cache().WantsQueryEnergy(0));
  for (Engine* e : {&given, &own}) {
    const SeqId seq = e->NewSequence(0);
    ASSERT_TRUE(e->Prompt(seq, 100, 30).ok());
    ASSERT_TRUE(e->Decode(seq, 10).ok());
    EXPECT_GT(e->cache().Stats().tokens.packed, 0u);
  }
  EXPECT_EQ(given.cache().SetCodecStatistics(0, stats).code(), StatusCode::kFailedPrecondition);
  const float mean = given.cache().codec(0).key_mean(0)[3];
  EXPECT_NEAR(given.cache().codec(0).key_mean(0)[3], own.cache().codec(0).key_mean(0)[3] + 5.0f,
              0.2f);
  given.cache().Clear();
  EXPECT_EQ(given.cache().codec(0).key_mean(0)[3], mean);
}

TEST(LearnTest, KeyBiasIsMeasuredWhereTheCodecIgnoresIt) {
  for (const CodecId codec :
       {CodecId::kToken, CodecId::kZipCache, CodecId::kKiviAxis, CodecId::kWaterFill}) {
    Config config = WaterFill();
    config.codec = codec;
    Engine e(config, {Shape(2, kDim, kDim)}, 1, 512);
    const SeqId seq = e.NewSequence(0);
    ASSERT_TRUE(e.Prompt(seq, 100, 30).ok());
    EXPECT_EQ(e.cache().key_bias(), 0.0f) << "nothing is packed";
    ASSERT_TRUE(e.Decode(seq, 2).ok());
    const bool ignores = codec == CodecId::kToken || codec == CodecId::kZipCache;
    EXPECT_EQ(e.cache().key_bias() > 0.0f, ignores);
    EXPECT_LT(e.cache().key_bias(), 1.0f) << "rows without a mean";
  }
}

TEST(LearnTest, StatisticsOfAnotherShapeAreRefused) {
  Engine e = MakeEngine();
  ASSERT_TRUE(e.Prompt(e.NewSequence(0), 100, 30).ok());
  std::vector<codecs::WaterFillStats> stats = e.cache().CodecStatistics(0, 1000);
  EXPECT_FALSE(e.cache().SetCodecStatistics(1, stats).ok());
  EXPECT_FALSE(e.cache().SetCodecStatistics(0, std::span(stats).first(1)).ok());
  stats[1].v_square.pop_back();
  const Status status = e.cache().SetCodecStatistics(0, stats);
  ASSERT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("32/32"), std::string::npos) << status.message();
}

}  // namespace
}  // namespace qevict
