#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace qevict {
namespace {

TEST(HalfTest, EveryF16SurvivesTheRoundTrip) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float f = F16ToF32(static_cast<uint16_t>(h));
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(F16ToF32(F32ToF16(f))));
    } else {
      EXPECT_EQ(F32ToF16(f), h);
    }
  }
}

TEST(HalfTest, EveryBF16SurvivesTheRoundTrip) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const float f = BF16ToF32(static_cast<uint16_t>(h));
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(BF16ToF32(F32ToBF16(f))));
    } else {
      EXPECT_EQ(F32ToBF16(f), h);
    }
  }
}

// Nearest: no neighbour is closer. Ties: the even mantissa.
TEST(HalfTest, F16RoundsToNearestEven) {
  for (uint32_t h = 0; h < 0x7BFF; ++h) {
    const float low = F16ToF32(static_cast<uint16_t>(h)),
                high = F16ToF32(static_cast<uint16_t>(h + 1));
    const float middle = 0.5f * (low + high);
    EXPECT_EQ(F32ToF16(middle), h % 2 == 0 ? h : h + 1) << h;
    EXPECT_EQ(F32ToF16(std::nextafter(middle, 0.0f)), h) << h;
    EXPECT_EQ(F32ToF16(-std::nextafter(middle, 1e9f)), 0x8000 | (h + 1)) << h;
  }
}

TEST(HalfTest, BF16RoundsToNearestEven) {
  for (uint32_t h = 0; h < 0x7F7F; ++h) {
    const uint32_t middle = (h << 16) | 0x8000u;
    EXPECT_EQ(F32ToBF16(std::bit_cast<float>(middle)), h % 2 == 0 ? h : h + 1);
    EXPECT_EQ(F32ToBF16(std::bit_cast<float>(middle - 1)), h);
    EXPECT_EQ(F32ToBF16(std::bit_cast<float>(middle + 1)), h + 1);
  }
}

TEST(HalfTest, Extremes) {
  EXPECT_EQ(F32ToF16(65504.0f), 0x7BFF);
  EXPECT_EQ(F32ToF16(65519.99f), 0x7BFF);
  EXPECT_EQ(F32ToF16(65520.0f), 0x7C00);
  EXPECT_EQ(F32ToF16(std::numeric_limits<float>::infinity()), 0x7C00);
  EXPECT_EQ(F32ToF16(-std::numeric_limits<float>::max()), 0xFC00);
  EXPECT_EQ(F32ToF16(-0.0f), 0x8000);
  EXPECT_EQ(F32ToF16(0x1p-25f), 0);
  EXPECT_EQ(F32ToF16(0x1.8p-25f), 1);
  EXPECT_EQ(F32ToF16(std::numeric_limits<float>::denorm_min()), 0);
}

TEST(HalfTest, ElemSelectsTheType) {
  EXPECT_EQ(ToF32(0x3C00, Elem::kF16), 1.0f);
  EXPECT_EQ(ToF32(0x3F80, Elem::kBF16), 1.0f);
  EXPECT_EQ(FromF32(1.0f, Elem::kF16), 0x3C00);
  EXPECT_EQ(FromF32(1.0f, Elem::kBF16), 0x3F80);
}

}  // namespace
}  // namespace qevict
