#include "base/rope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>
#include <vector>

namespace qevict {
namespace {

// The definition in double, written from the YaRN paper's terms and independent of rope.cc.
struct Reference {
  double angle_per_position;
  double magnitude;
};

Reference ReferencePair(const RopeParams& p, size_t pair) {
  const double i = static_cast<double>(pair);
  const double n = p.n_dims, base = p.freq_base;
  double fast = std::pow(base, -2.0 * i / n);
  if (!p.freq_factors.empty()) fast /= p.freq_factors[pair];
  const double slow = fast * p.freq_scale;
  if (p.ext_factor == 0.0f) return {slow, p.attn_factor};
  // Pair whose wave turns `beta` times within n_ctx_orig positions.
  const auto pair_of = [&](double beta) {
    return n * std::log(p.n_ctx_orig / (beta * 2.0 * std::numbers::pi)) / (2.0 * std::log(base));
  };
  const double low = std::max(0.0, std::floor(pair_of(p.beta_fast)));
  const double high = std::min(n - 1.0, std::ceil(pair_of(p.beta_slow)));
  const double interpolated = std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0);
  const double keep = (1.0 - interpolated) * p.ext_factor;
  return {slow * (1.0 - keep) + fast * keep,
          p.attn_factor * (1.0 + 0.1 * std::log(1.0 / p.freq_scale))};
}

RopeParams Plain(RopePairing pairing, uint32_t n_dims, float base = 10000.0f) {
  RopeParams p;
  p.pairing = pairing;
  p.n_dims = n_dims;
  p.freq_base = base;
  return p;
}

RopeParams Yarn() {
  RopeParams p = Plain(RopePairing::kHalves, 64);
  p.freq_scale = 0.25f;
  p.ext_factor = 1.0f;
  p.n_ctx_orig = 4096;
  return p;
}

std::vector<RopeParams> AllKinds() {
  std::vector<RopeParams> kinds = {Plain(RopePairing::kInterleaved, 64),
                                   Plain(RopePairing::kHalves, 128, 1e6f),
                                   Plain(RopePairing::kHalves, 32, 5e5f), Yarn()};
  kinds[2].offset = 16;
  RopeParams factors = Plain(RopePairing::kInterleaved, 16);
  for (int i = 0; i < 8; ++i) factors.freq_factors.push_back(1.0f + static_cast<float>(i));
  kinds.push_back(factors);
  RopeParams scaled = Yarn();
  scaled.attn_factor = 0.7f;
  scaled.ext_factor = 0.5f;
  kinds.push_back(scaled);
  return kinds;
}

TEST(RopeTest, MatchesDoubleReference) {
  for (const RopeParams& p : AllKinds()) {
    for (int32_t pos : {0, 1, 2, 17, 100, 1000, -3}) {
      std::vector<float> cos_sin(p.n_dims);
      RopeCosSin(p, pos, cos_sin.data());
      for (size_t i = 0; i < p.n_dims / 2; ++i) {
        const Reference r = ReferencePair(p, i);
        const double angle = r.angle_per_position * pos;
        // fp32 keeps theta to i + 3 roundings of 2^-24; theta_scale itself is one of them per step.
        const double tolerance = 1e-6 + std::abs(angle) * static_cast<double>(2 * i + 4) * 0x1p-24;
        EXPECT_NEAR(cos_sin[2 * i], r.magnitude * std::cos(angle), tolerance)
            << "pair " << i << " pos " << pos;
        EXPECT_NEAR(cos_sin[2 * i + 1], r.magnitude * std::sin(angle), tolerance)
            << "pair " << i << " pos " << pos;
      }
    }
  }
}

TEST(RopeTest, FrequenciesMatchTheForwardPass) {
  for (const RopeParams& p : AllKinds()) {
    const std::vector<double> omega = RopeFrequencies(p);
    ASSERT_EQ(omega.size(), p.n_dims / 2);
    const double magnitude = RopeMagnitude(p);
    for (int32_t pos : {1, 100, 4096, 32768}) {
      std::vector<float> cos_sin(p.n_dims);
      RopeCosSin(p, pos, cos_sin.data());
      for (size_t i = 0; i < omega.size(); ++i) {
        const double angle = omega[i] * pos;
        const double tolerance = 1e-6 + angle * static_cast<double>(i + 4) * 0x1p-24;
        EXPECT_NEAR(cos_sin[2 * i], magnitude * std::cos(angle), tolerance)
            << "pair " << i << " pos " << pos;
        EXPECT_NEAR(cos_sin[2 * i + 1], magnitude * std::sin(angle), tolerance)
            << "pair " << i << " pos " << pos;
      }
    }
  }
}

TEST(RopeTest, RotateThenUnrotateIsIdentity) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  for (const RopeParams& p : AllKinds()) {
    const uint32_t head_dim = p.offset + p.n_dims + 8;
    for (int32_t pos : {0, 1, 37, 5000, 100000}) {
      std::vector<float> cos_sin(p.n_dims), row(head_dim);
      for (float& x : row) x = normal(rng);
      const std::vector<float> before = row;
      RopeCosSin(p, pos, cos_sin.data());
      RopeRotate(p, cos_sin.data(), row.data());
      EXPECT_NE(row == before, pos != 0 || RopeMagnitude(p) != 1.0f);
      RopeUnrotate(p, cos_sin.data(), row.data());
      for (uint32_t d = 0; d < head_dim; ++d)
        EXPECT_NEAR(row[d], before[d], 1e-6 * (1 + std::abs(before[d])));
    }
  }
}

// (1, 0) turned by 3 radians is (cos 3, sin 3).
TEST(RopeTest, SpecificationVector) {
  for (RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalves}) {
    const RopeParams p = Plain(pairing, 2);
    float cos_sin[2], k[2] = {1.0f, 0.0f};
    RopeCosSin(p, 3, cos_sin);
    RopeRotate(p, cos_sin, k);
    EXPECT_NEAR(k[0], -0.989992f, 1e-6);
    EXPECT_NEAR(k[1], 0.141120f, 1e-6);
  }
}

TEST(RopeTest, PairingsPickTheirChannels) {
  for (RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalves}) {
    RopeParams p = Plain(pairing, 4);
    p.offset = 1;
    const float cos_sin[4] = {0.0f, 1.0f, 1.0f, 0.0f};  // quarter turn of pair 0 only
    float row[6] = {9, 1, 2, 3, 4, 9};
    RopeRotate(p, cos_sin, row);
    if (pairing == RopePairing::kInterleaved) {
      EXPECT_EQ(std::vector<float>(row, row + 6), (std::vector<float>{9, -2, 1, 3, 4, 9}));
    } else {
      EXPECT_EQ(std::vector<float>(row, row + 6), (std::vector<float>{9, -3, 2, 1, 4, 9}));
    }
  }
}

TEST(RopeTest, YarnMagnitudeEntersEachRotationOnce) {
  const RopeParams p = Yarn();
  const double expected = 1.0 + 0.1 * std::log(4.0);
  EXPECT_NEAR(RopeMagnitude(p), expected, 1e-6);
  std::vector<float> cos_sin(p.n_dims), row(p.n_dims, 0.0f);
  RopeCosSin(p, 123, cos_sin.data());
  row[5] = 2.0f;
  RopeRotate(p, cos_sin.data(), row.data());
  double squares = 0;
  for (float x : row) squares += static_cast<double>(x) * x;
  EXPECT_NEAR(squares, 4.0 * expected * expected, 1e-5);
}

// Fast waves keep their frequency, slow ones are interpolated.
TEST(RopeTest, YarnRampEndsAtBothKinds) {
  const RopeParams p = Yarn();
  const std::vector<double> omega = RopeFrequencies(p);
  EXPECT_NEAR(omega.front(), 1.0, 1e-9);
  const double last = std::pow(10000.0, -62.0 / 64.0);
  EXPECT_NEAR(omega.back() / (0.25 * last), 1.0, 1e-5);
}

TEST(RopeTest, LayerWithoutRopeLeavesRowsAlone) {
  const RopeParams none;
  float row[2] = {1, 2};
  RopeCosSin(none, 5, nullptr);
  RopeRotate(none, nullptr, row);
  RopeUnrotate(none, nullptr, row);
  EXPECT_EQ(row[0], 1.0f);
  EXPECT_EQ(row[1], 2.0f);
  EXPECT_TRUE(RopeFrequencies(none).empty());
  EXPECT_EQ(RopeMagnitude(none), 1.0f);
}

}  // namespace
}  // namespace qevict
