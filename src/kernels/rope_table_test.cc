#include "kernels/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace qevict::kernels {
namespace {

RopeParams Params(uint32_t n_dims) {
  RopeParams p;
  p.pairing = RopePairing::kHalves;
  p.n_dims = n_dims;
  p.attn_factor = 1.25f;
  return p;
}

TEST(RopeTableTest, PhasesMatchSinesOfAnglesInDoublePrecision) {
  const RopeParams params = Params(40);
  RopeTable table(params);
  table.Grow(200000);
  const std::vector<double> omega = RopeFrequencies(params);
  std::vector<float> c(20), s(20);
  for (int32_t pos : {0, 1, 63, 64, 65, 4095, 100000, 200000, -1, -64, -777, -200000}) {
    table.Phases(pos, c.data(), s.data());
    for (uint32_t i = 0; i < 20; ++i) {
      EXPECT_NEAR(c[i], table.magnitude() * std::cos(omega[i] * pos), 4e-7) << pos << " " << i;
      EXPECT_NEAR(s[i], table.magnitude() * std::sin(omega[i] * pos), 4e-7) << pos << " " << i;
    }
  }
}

TEST(RopeTableTest, PhasesMatchTheForwardPassAtShortRange) {
  const RopeParams params = Params(64);
  RopeTable table(params);
  table.Grow(2048);
  std::vector<float> c(32), s(32), want(64);
  for (int32_t pos : {0, 5, 100, 2048}) {
    table.Phases(pos, c.data(), s.data());
    RopeCosSin(params, pos, want.data());
    for (uint32_t i = 0; i < 32; ++i) {
      EXPECT_NEAR(c[i], want[2 * i], 1e-6 * (pos + 1)) << pos << " " << i;
      EXPECT_NEAR(s[i], want[2 * i + 1], 1e-6 * (pos + 1)) << pos << " " << i;
    }
  }
}

TEST(RopeTableTest, NoTableIsLargerThanTheMost) {
  for (const uint32_t n_dims : {2u, 6u, 16u, 34u, 64u, 128u, 256u}) {
    for (const float base : {100.0f, 10000.0f, 1e6f}) {
      RopeParams params = Params(n_dims);
      params.freq_base = base;
      for (const int32_t max_pos : {0, 63, 64, 5000}) {
        RopeTable table(params);
        table.Grow(max_pos);
        const auto n_positions = static_cast<uint64_t>(max_pos) + 1;
        const auto check = [&](bool with_basis) {
          const size_t most = RopeTable::MaxBytes(n_dims, n_positions, with_basis);
          EXPECT_LE(table.bytes(), most) << n_dims << " " << base << " " << max_pos;
          EXPECT_GE(table.bytes() * 2, most) << n_dims << " " << base << " " << max_pos;
        };
        check(false);
        table.AddBasis();
        check(true);
      }
    }
  }
}

TEST(RopeTableTest, GrowingKeepsWhatWasThere) {
  RopeTable table(Params(16));
  table.Grow(100);
  std::vector<float> before(16), after(16);
  table.Phases(99, before.data(), before.data() + 8);
  table.Grow(5000);
  table.Grow(50);
  EXPECT_EQ(table.max_pos(), 5000);
  table.Phases(99, after.data(), after.data() + 8);
  EXPECT_EQ(before, after);
}

TEST(RopeTableTest, StepsAreRotationsWithinASubBlock) {
  const RopeParams params = Params(12);  // 6 pairs
  RopeTable table(params);
  const std::vector<double> omega = RopeFrequencies(params);
  for (uint32_t channels : {1u, 2u}) {
    for (uint32_t i = 0; i < 6; ++i) {
      for (uint32_t t = 0; t < 8; ++t) {
        const size_t cell = i / channels * 16 * channels + t * channels + i % channels;
        EXPECT_FLOAT_EQ(table.steps(channels)[cell], static_cast<float>(std::cos(omega[i] * t)));
        EXPECT_FLOAT_EQ(table.steps(channels)[cell + 8 * channels],
                        static_cast<float>(std::sin(omega[i] * t)));
        EXPECT_EQ(table.zero_steps(channels)[cell], 1.0f);
        EXPECT_EQ(table.zero_steps(channels)[cell + 8 * channels], 0.0f);
      }
    }
  }
}

TEST(RopeTableTest, LayerWithoutRopeIsEmpty) {
  RopeTable table{RopeParams{}};
  table.Grow(1000);
  EXPECT_EQ(table.n_pairs(), 0u);
}

}  // namespace
}  // namespace qevict::kernels
