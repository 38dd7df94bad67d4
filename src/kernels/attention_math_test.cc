// The functions that the kernels approximate, in their portable instance, and the choice of the
// instruction set.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "base/half.h"
#include "kernels/attention_softmax-inl.h"
#include "kernels/simd_scalar.h"

namespace qevict::kernels::internal {
namespace {

using S = SimdScalar;

float First(S::V v) {
  float x[8];
  S::Store(x, v);
  return x[0];
}

TEST(Exp2Test, RelativeErrorIsBelowTwoTenMillionths) {
  double worst = 0.0;
  for (int i = 0; i < 400000; ++i) {
    const float x = -126.0f + static_cast<float>(i) * (252.0f / 400000.0f);
    const double want = std::exp2(static_cast<double>(x));
    worst = std::max(worst, std::abs(Exp2Scalar<S>(x) - want) / want);
  }
  EXPECT_LT(worst, 2e-7);
}

TEST(Exp2Test, EdgesAreExact) {
  EXPECT_EQ(Exp2Scalar<S>(0.0f), 1.0f);
  EXPECT_EQ(Exp2Scalar<S>(-3.0f), 0.125f);
  EXPECT_EQ(Exp2Scalar<S>(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(Exp2Scalar<S>(-127.0f), 0.0f);
  EXPECT_EQ(Exp2Scalar<S>(-1e30f), 0.0f);
  EXPECT_TRUE(std::isnan(Exp2Scalar<S>(std::numeric_limits<float>::quiet_NaN())));
}

TEST(TanhTest, RelativeErrorIsSmallEverywhere) {
  for (int i = -200000; i <= 200000; ++i) {
    const float x = static_cast<float>(i) * 1e-4f;
    const double want = std::tanh(static_cast<double>(x));
    ASSERT_NEAR(First(Tanh<S>(S::Set1(x))), want, 4e-7 * std::abs(want)) << x;
  }
  EXPECT_EQ(First(Tanh<S>(S::Set1(1e9f))), 1.0f);
  EXPECT_EQ(First(Tanh<S>(S::Set1(-1e9f))), -1.0f);
}

TEST(SimdScalarTest, WidensEveryHalf) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    const uint16_t raw[8] = {static_cast<uint16_t>(h)};
    const float f16 = First(S::LoadF16(raw)), bf16 = First(S::LoadBf16(raw));
    const float want_f16 = F16ToF32(raw[0]), want_bf16 = BF16ToF32(raw[0]);
    if (std::isnan(want_f16)) {
      ASSERT_TRUE(std::isnan(f16)) << h;
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(f16), std::bit_cast<uint32_t>(want_f16)) << h;
    }
    ASSERT_EQ(std::bit_cast<uint32_t>(bf16), std::bit_cast<uint32_t>(want_bf16)) << h;
  }
}

TEST(IsaTest, ForcingAnUnsupportedIsaChangesNothing) {
  const Isa before = ActiveIsa();
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kNeon}) {
    if (IsaSupported(isa)) continue;
    EXPECT_FALSE(ForceIsa(isa));
    EXPECT_EQ(ActiveIsa(), before);
  }
  EXPECT_TRUE(IsaSupported(Isa::kScalar));
  EXPECT_TRUE(IsaSupported(before));
}

TEST(IsaTest, NamesAreThoseOfTheEnvironmentVariable) {
  EXPECT_STREQ(IsaName(Isa::kScalar), "scalar");
  EXPECT_STREQ(IsaName(Isa::kAvx2), "avx2");
  EXPECT_STREQ(IsaName(Isa::kAvx512), "avx512");
  EXPECT_STREQ(IsaName(Isa::kNeon), "neon");
}

/// In a process of its own, since the variable is read once.
TEST(IsaDeathTest, EnvironmentNamesTheIsaAndNonsenseMeansTheBest) {
#if defined(__linux__) && !defined(__aarch64__)
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto active_with = [](const char* value) {
    setenv("QEVICT_SIMD", value, 1);
    std::exit(10 + static_cast<int>(ActiveIsa()));
  };
  unsetenv("QEVICT_SIMD");
  int best = 0;
  for (int i = 0; i < 4; ++i) best = IsaSupported(static_cast<Isa>(i)) ? i : best;
  EXPECT_EXIT(active_with("scalar"), testing::ExitedWithCode(10), "");
  EXPECT_EXIT(active_with("sse9"), testing::ExitedWithCode(10 + best), "");
  EXPECT_EXIT(active_with("neon"), testing::ExitedWithCode(10 + best), "");
#else
  GTEST_SKIP() << "needs a second process";
#endif
}

}  // namespace
}  // namespace qevict::kernels::internal
