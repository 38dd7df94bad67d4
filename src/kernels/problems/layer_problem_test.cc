#include "kernels/problems/layer_problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace qevict::kernels {
namespace {

constexpr LayerShape kShape = {2, 3, 32, RopePairing::kHalves};

TEST(BenchUtilTest, PlainResultIsTheReference) {
  for (const Formats formats : kAllFormats) {
    ProblemParams p = LayerParams(kShape, formats, 1, 72);
    p.scattered = true;
    const Problem problem(p);
    const ReferenceResult want = AttendReference(problem.group());
    const PlainResult got =
        AttendPlain(kShape, QueryRow(problem), StoredRows(problem), problem.params().window);
    ASSERT_EQ(got.out.size(), want.out.size());
    // The reference rounds queries for token codes to 8 bits, as the kernels do.
    const bool rounds = formats == Formats::kToken || formats == Formats::kMixed;
    const double bound = rounds ? 5e-2 : 1e-5;
    for (size_t i = 0; i < want.out.size(); ++i) EXPECT_NEAR(got.out[i], want.out[i], bound);
    for (size_t i = 0; i < want.mass.size(); ++i) EXPECT_NEAR(got.mass[i], want.mass[i], bound);
  }
}

TEST(BenchUtilTest, KernelsReadScatteredWindows) {
  for (const Formats formats : kAllFormats) {
    ProblemParams p = LayerParams(kShape, formats, 1, 72);
    p.scattered = true;
    EXPECT_EQ(CheckShort(p), "") << FormatsName(formats);
  }
}

TEST(BenchUtilTest, ScatteredBlocksAreTheSameBytes) {
  ProblemParams p = LayerParams(kShape, Formats::kFull, 1, 72);
  Problem apart(p);
  p.scattered = true;
  Problem scattered(p);
  EXPECT_EQ(scattered.bytes(), apart.bytes());
  EXPECT_EQ(scattered.bytes(), 72u * 2 * 2 * 32 * 2);
  EXPECT_EQ(StoredRows(scattered).keys, StoredRows(apart).keys);
}

TEST(BenchUtilTest, RelativeErrorSeesWhatIsNotFinite) {
  const std::vector<double> want = {1.0, -4.0};
  EXPECT_DOUBLE_EQ(RelativeError(std::vector<float>{1.5f, -4.0f}, want), 0.125);
  EXPECT_TRUE(std::isinf(RelativeError(std::vector<float>{1.0f, NAN}, want)));
}

}  // namespace
}  // namespace qevict::kernels
