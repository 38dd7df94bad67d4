#include "codecs/water_fill.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "kernels/problems/reference.h"

namespace qevict::codecs {
namespace {

/// Rows with a mean and unequal channels.
struct Source {
  std::mt19937 rng{7};
  std::normal_distribution<float> normal;
  std::vector<float> mean, sigma;
  Source(uint32_t dim, float decay) {
    for (uint32_t c = 0; c < dim; ++c) {
      mean.push_back(3.0f * normal(rng));
      sigma.push_back(std::exp(-decay * static_cast<float>(c * 37 % dim)));
    }
  }
  std::vector<float> Row() {
    std::vector<float> x;
    for (size_t c = 0; c < mean.size(); ++c) x.push_back(mean[c] + sigma[c] * normal(rng));
    return x;
  }
};

constexpr RowShape kShape{1, 64, 64};

std::vector<WaterFillStats> StatsOf(Source& k, Source& v, size_t n) {
  std::vector<WaterFillStats> stats(1);
  for (size_t i = 0; i < n; ++i) {
    stats[0].AddKey(k.Row().data(), 64);
    stats[0].AddValue(v.Row().data(), 64);
  }
  return stats;
}

TEST(WaterFillTest, BytesAreThoseOfTheSpecification) {
  EXPECT_EQ(WaterFillCodec::Bytes(8, 8, kShape).total(), 8u * 34);
  EXPECT_EQ(WaterFillCodec::Bytes(12, 8, kShape).total(), 8u * 50);
  EXPECT_EQ(WaterFillCodec::Bytes(9, 16, kShape).keys, 16u * 21);  // the odd word is the keys'
  EXPECT_EQ(WaterFillCodec::Bytes(9, 16, kShape).values, 16u * 17);
  EXPECT_EQ(WaterFillCodec::Bytes(6, 8, {2, 128, 128}).total(), 8u * 50);
}

TEST(WaterFillTest, EqualChannelsGetEqualBits) {
  const std::vector<double> ones(64, 1.0);
  const WaterFillVector v = FillWater(ones, ones, 4, kernels::kKeyUnit);
  ASSERT_EQ(v.code.n_segments, 1u);
  EXPECT_EQ(v.code.segments[0].bits, 2);
  EXPECT_EQ(v.code.n_places, 64u);
}

TEST(WaterFillTest, StrongChannelsGetMoreBits) {
  std::vector<double> energy(64, 1e-6), sigma(64, 1e-3);
  for (int c = 20; c < 28; ++c) energy[c] = 1.0, sigma[c] = 1.0;
  const WaterFillVector v = FillWater(energy, sigma, 4, kernels::kValueUnit);
  EXPECT_GE(v.code.segments[0].bits, 4);
  for (int j = 0; j < 8; ++j) EXPECT_TRUE(v.channel[j] >= 20 && v.channel[j] < 28);
  // Every channel at most once, and what pads has no step.
  std::vector<int> seen(64);
  for (uint32_t j = 0; j < v.code.n_places; ++j) {
    if (v.step[j] != 0.0f) ++seen[v.channel[j]];
  }
  for (const int n : seen) EXPECT_LE(n, 1);
}

TEST(WaterFillTest, ErrorFollowsTheDistortionOfTheSplit) {
  for (const float decay : {0.0f, 0.05f, 0.1f}) {
    Source k(64, decay), v(64, decay);
    std::fill(v.mean.begin(), v.mean.end(), 0.0f);
    const std::vector<WaterFillStats> stats = StatsOf(k, v, 500);
    double last = 1.0;
    for (const uint32_t quarters : {4u, 6u, 8u, 10u, 12u, 16u}) {
      const WaterFillCodec codec(quarters, 8, kShape, RopeParams{}, stats);
      std::vector<uint8_t> block(codec.bytes().total());
      double error = 0.0, energy = 0.0;
      for (int i = 0; i < 40; ++i) {
        std::vector<float> keys, values, k2(512), v2(512);
        for (int t = 0; t < 8; ++t) {
          std::vector<float> row = k.Row();
          for (size_t c = 0; c < 64; ++c) row[c] -= codec.key_mean(0)[c];
          keys.insert(keys.end(), row.begin(), row.end());
          row = v.Row();
          values.insert(values.end(), row.begin(), row.end());
        }
        codec.Encode(0, 8, keys.data(), values.data(), block.data());
        codec.Decode(0, 8, block.data(), k2.data(), v2.data());
        for (size_t j = 0; j < 512; ++j) {
          error += std::pow(keys[j] - k2[j], 2) + std::pow(values[j] - v2[j], 2);
          energy += std::pow(keys[j], 2) + std::pow(values[j], 2);
        }
      }
      const double distortion = error / energy;
      EXPECT_LT(distortion, last) << quarters << " " << decay;
      last = distortion;
      // A unit Gaussian at 1, 2, 3 and 4 bits; unequal channels are better than that.
      const double gaussian = quarters == 8 ? 0.1175 : quarters == 12 ? 0.0385 : 0.0;
      if (gaussian > 0.0) {
        EXPECT_LT(distortion, 1.1 * gaussian) << quarters << " " << decay;
        if (decay == 0.0f) {
          EXPECT_GT(distortion, 0.8 * gaussian) << quarters;
        }
        if (decay == 0.1f) {
          EXPECT_LT(distortion, 0.5 * gaussian) << quarters;
        }
      }
    }
  }
}

TEST(WaterFillTest, PlacesOf8BitsReachFarOut) {
  // One channel that is mostly quiet and 7 standard deviations away in one token of 50.
  std::vector<WaterFillStats> stats(1);
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  const auto row = [&](float far) {
    std::vector<float> x(64);
    for (float& each : x) each = normal(rng);
    x[11] = far;
    return x;
  };
  for (int t = 0; t < 500; ++t) {
    const float far = t % 50 == 0 ? (t % 100 == 0 ? 70.0f : -70.0f) : 0.0f;
    stats[0].AddKey(row(far).data(), 64);
    stats[0].AddValue(row(far).data(), 64);
  }
  const WaterFillCodec codec(16, 8, kShape, RopeParams{}, stats);
  ASSERT_EQ(codec.token_codes()[0].k.segments[0].bits, 8);
  ASSERT_EQ(codec.token_codes()[0].v.segments[0].bits, 8);
  std::vector<uint8_t> block(codec.bytes().total());
  std::vector<float> k2(64), v2(64);
  for (const float far : {70.0f, -70.0f, 10.0f}) {
    const std::vector<float> x = row(far);
    codec.Encode(0, 1, x.data(), x.data(), block.data());
    codec.Decode(0, 1, block.data(), k2.data(), v2.data());
    EXPECT_NEAR(k2[11], far, 1.0f);
    EXPECT_NEAR(v2[11], far, 1.0f);
  }
}

TEST(WaterFillTest, LayersHaveWordsOfTheirOwn) {
  Source k(64, 0.08f), v(64, 0.03f);
  RowShape shape = kShape;
  shape.bits = {2, 13};  // 0.5 and 3.25 bits
  const WaterFillCodec codec(8, 8, shape, RopeParams{}, StatsOf(k, v, 300));
  EXPECT_EQ(codec.token_codes()[0].k.n_words, 1u);
  EXPECT_EQ(codec.token_codes()[0].v.n_words, 7u);
  EXPECT_EQ(codec.bytes().total(), 8u * (4 * 8 + 2));
}

TEST(WaterFillTest, KernelsReadWhatIsDecoded) {
  Source k(64, 0.08f), v(64, 0.03f);
  for (const uint32_t quarters : {4u, 7u, 9u, 13u, 16u}) {
    RowShape shape = kShape;
    if (quarters == 9) shape.bits = {2, 32};
    const WaterFillCodec codec(quarters, 8, shape, RopeParams{}, StatsOf(k, v, 300));
    std::vector<float> keys(512), values, k2(512), v2(512);
    for (float& x : keys) x = k.normal(k.rng);
    for (int t = 0; t < 8; ++t) {
      const std::vector<float> row = v.Row();
      values.insert(values.end(), row.begin(), row.end());
    }
    std::vector<uint8_t> block(codec.bytes().total());
    codec.Encode(0, 8, keys.data(), values.data(), block.data());
    codec.Decode(0, 8, block.data(), k2.data(), v2.data());
    kernels::AttentionShape s;
    s.n_kv_heads = 1;
    s.head_dim = s.head_dim_v = 64;
    s.n_rungs = 2;
    s.rungs[1] = {codec.format(), block.size(), block.size(), codec.token_codes(), nullptr};
    const kernels::WindowRef window{block.data(), block.data() + codec.bytes().keys, 0, 1, 1, 1};
    std::vector<double> row(64);
    for (uint32_t t = 0; t < 8; ++t) {
      kernels::ReferenceKey(s, window, 0, t, row.data());
      for (uint32_t c = 0; c < 64; ++c) {
        ASSERT_NEAR(row[c], k2[t * 64 + c] + codec.key_mean(0)[c], 1e-5) << quarters;
      }
      kernels::ReferenceValue(s, window, 0, t, row.data());
      for (uint32_t c = 0; c < 64; ++c) ASSERT_NEAR(row[c], v2[t * 64 + c], 1e-5) << quarters;
    }
  }
}

TEST(WaterFillTest, KeyBiasIsTheLargestMeanInDeviations) {
  WaterFillStats stats;
  EXPECT_EQ(KeyBias(stats), 0.0f);
  for (int t = 0; t < 100; ++t) {
    const float noise = t % 2 == 0 ? 2.0f : -2.0f;
    const float key[8] = {noise, noise - 30.0f, noise, noise + 10.0f, noise, noise, noise, noise};
    stats.AddKey(key, 8);
    stats.AddValue(key, 8);
  }
  EXPECT_NEAR(KeyBias(stats), 15.0f, 1e-4f);
}

TEST(WaterFillTest, NothingLearnedAndBadNumbersGiveNumbers) {
  std::vector<WaterFillStats> none(1);
  none[0].k_sum.resize(64);
  none[0].k_square.resize(64);
  none[0].v_square.resize(64);
  const WaterFillCodec codec(8, 8, kShape, RopeParams{}, none);
  std::vector<float> x(64, 1.0f), k2(64), v2(64);
  x[1] = std::numeric_limits<float>::quiet_NaN();
  x[2] = std::numeric_limits<float>::infinity();
  x[3] = 1e30f;
  std::vector<uint8_t> block(codec.bytes().total());
  codec.Encode(0, 1, x.data(), x.data(), block.data());
  codec.Decode(0, 1, block.data(), k2.data(), v2.data());
  for (const float y : k2) EXPECT_TRUE(std::isfinite(y));
  for (const float y : v2) EXPECT_TRUE(std::isfinite(y));
}

TEST(WaterFillTest, HoldsNoMoreThanItSays) {
  Source k(64, 0.05f), v(64, 0.05f);
  for (uint32_t quarters = 4; quarters <= 16; ++quarters) {
    const WaterFillCodec codec(quarters, 8, kShape, RopeParams{}, StatsOf(k, v, 100));
    EXPECT_LE(codec.static_bytes(), WaterFillCodec::LearnedBytes(kShape)) << quarters;
  }
}

}  // namespace
}  // namespace qevict::codecs
