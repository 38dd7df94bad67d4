// What holds beyond equality with the reference: masks, NaN in unseen memory, masses, sinks,
// splitting, memory.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "kernels/attention.h"
#include "kernels/problems/problem.h"
#include "kernels/testing/isa_test.h"

namespace qevict::kernels {
namespace {

class AttentionMaskTest : public IsaTest {};

INSTANTIATE_TEST_SUITE_P(AllIsas, AttentionMaskTest, testing::ValuesIn(FloatIsas()), IsaParamName);

TEST_P(AttentionMaskTest, RowThatSeesNothingIsZero) {
  for (bool sinks : {false, true}) {
    for (uint32_t rows : {1u, 3u, 30u}) {
      ProblemParams p;
      p.n_rows = rows;
      p.sinks = sinks;
      p.blind_row = true;
      p.n_windows = 90;
      p.formats = Formats::kMixed;
      Problem problem(p);
      problem.Run(*pool_, workspace_);
      const AttentionGroup& g = problem.group();
      for (uint32_t h = 0; h < 14; ++h) {
        for (uint32_t c = 0; c < p.head_dim_v; ++c) {
          ASSERT_EQ(problem.out()[rows / 2 * g.out_row_stride + h * g.out_head_stride + c], 0.0f);
        }
      }
    }
  }
}

TEST_P(AttentionMaskTest, MassesAndSinksSumToOne) {
  for (uint32_t rows : {1u, 4u, 40u}) {
    for (bool sinks : {false, true}) {
      ProblemParams p;
      p.n_kv_heads = 3;
      p.n_gqa = 3;
      p.n_rows = rows;
      p.sinks = sinks;
      p.mask = Mask::kHoles;
      p.n_windows = 70;
      p.formats = Formats::kMixed;
      p.mass_first_row = rows / 2;
      Problem problem(p);
      problem.Run(*pool_, workspace_);
      const ReferenceResult want = AttendReference(problem.group());
      for (uint32_t kv_head = 0; kv_head < p.n_kv_heads; ++kv_head) {
        double sum = 0.0;
        for (uint32_t i = 0; i < p.n_windows; ++i)
          sum += problem.mass()[kv_head * problem.group().mass_head_stride + i];
        for (uint32_t r = p.mass_first_row; r < rows; ++r) {
          for (uint32_t g = 0; g < p.n_gqa; ++g)
            sum += want.sink[r * p.n_kv_heads * p.n_gqa + kv_head * p.n_gqa + g];
        }
        const double n = (rows - p.mass_first_row) * p.n_gqa;
        EXPECT_NEAR(sum, n, n * 1e-5);
      }
    }
  }
}

TEST_P(AttentionMaskTest, MassesAreAdded) {
  Problem problem(ProblemParams{});
  problem.Run(*pool_, workspace_);
  const std::vector<float> once = problem.mass();
  Attend({&problem.group(), 1}, *pool_, workspace_);
  for (size_t i = 0; i < once.size(); ++i) EXPECT_FLOAT_EQ(problem.mass()[i], 2.0f * once[i]);
}

/// One, some and many rows (strips of several blocks), one and several chunks of windows.
TEST_P(AttentionMaskTest, TokenMassesMatchTheReference) {
  for (uint32_t window : {1u, 2u, 4u, 8u, 16u, 32u}) {
    for (uint32_t rows : {1u, 5u, 40u, 150u}) {
      ProblemParams p;
      p.window = window;
      p.n_gqa = 3;
      p.head_dim = p.head_dim_v = 24;
      p.rope.n_dims = 24;
      p.n_rows = rows;
      p.n_windows = (rows == 1 ? 1500 : 300) / window + 1;
      p.formats = Formats::kMixed;
      p.mask = rows == 40 ? Mask::kCausal : Mask::kHoles;
      p.token_mass = true;
      p.token_mass_first_row = rows * 3 / 4;
      p.mass = rows != 5;
      p.mass_first_row = rows / 4;
      p.mass_kind = rows == 150 ? MassKind::kMax : MassKind::kSum;
      Problem problem(p);
      problem.Run(*pool_, workspace_);
      EXPECT_EQ(problem.Compare(), "") << p.Name();
    }
  }
}

TEST_P(AttentionMaskTest, TokenMassesOfAWindowAreItsMass) {
  for (uint32_t rows : {1u, 30u}) {
    ProblemParams p;
    p.n_rows = rows;
    p.n_windows = 100;
    p.formats = Formats::kMixed;
    p.mask = Mask::kCausal;
    p.token_mass = true;
    Problem problem(p);
    problem.Run(*pool_, workspace_);
    const AttentionGroup& g = problem.group();
    for (uint32_t h = 0; h < p.n_kv_heads; ++h) {
      for (uint32_t i = 0; i < p.n_windows; ++i) {
        const float mass = problem.mass()[h * g.mass_head_stride + i];
        double sum = 0.0;
        for (uint32_t t = 0; t < p.window; ++t)
          sum += problem.token_mass()[h * g.token_mass_head_stride + i * p.window + t];
        EXPECT_NEAR(sum, mass, 1e-5 * mass + 1e-30);
      }
    }
  }
}

/// Values that a later row sees may be NaN without harm to rows that do not see them.
TEST_P(AttentionMaskTest, NanOfATokenReachesOnlyRowsThatSeeIt) {
  for (uint32_t n_gqa : {1u, 7u}) {  // decode form and prompt form
    ProblemParams p;
    p.n_kv_heads = 1;
    p.n_gqa = n_gqa;
    p.n_rows = 12;
    p.n_windows = 10;
    p.mask = Mask::kCausal;
    p.mass = false;
    Problem problem(p);
    const ReferenceResult want = AttendReference(problem.group());
    const size_t value_row =
        size_t{p.window} * p.head_dim * 2 + 6 * p.head_dim_v * 2;  // token 6 of the last window
    std::memset(problem.blocks().back().data() + value_row, 0xFF, p.head_dim_v * 2);
    problem.Run(*pool_, workspace_);
    const AttentionGroup& g = problem.group();
    for (uint32_t r = 0; r < p.n_rows; ++r) {
      for (uint32_t h = 0; h < n_gqa; ++h) {
        const float got = problem.out()[r * g.out_row_stride + h * g.out_head_stride + 5];
        if (r >= p.n_rows - 2) {
          EXPECT_TRUE(std::isnan(got)) << r;
        } else {
          EXPECT_NEAR(got, want.out[(size_t{r} * n_gqa + h) * p.head_dim_v + 5], 1e-5) << r;
        }
      }
    }
  }
}

TEST_P(AttentionMaskTest, NanKeyReachesTheOutput) {
  ProblemParams p;
  p.mass = false;
  Problem problem(p);
  std::memset(problem.blocks()[3].data(), 0xFF, 2);
  problem.Run(*pool_, workspace_);
  EXPECT_TRUE(std::isnan(problem.out()[0]));
}

TEST_P(AttentionMaskTest, LargeLogitsDoNotOverflow) {
  for (uint32_t rows : {1u, 30u}) {
    ProblemParams p;
    p.n_rows = rows;
    p.n_windows = 40;
    Problem problem(p);
    AttentionShape shape = *problem.group().shape;
    shape.scale = 300.0f;
    AttentionGroup group = problem.group();
    group.shape = &shape;
    Attend({&group, 1}, *pool_, workspace_);
    const ReferenceResult want = AttendReference(group);
    for (uint32_t c = 0; c < p.head_dim_v; ++c) {
      ASSERT_TRUE(std::isfinite(problem.out()[c]));
      ASSERT_NEAR(problem.out()[c], want.out[c], 0.05);
    }
  }
}

TEST_P(AttentionMaskTest, ResultsDoNotDependOnThreads) {
  for (uint32_t rows : {1u, 2u, 70u, 300u}) {
    ProblemParams p;
    p.n_rows = rows;
    p.n_windows = rows > 2 ? 40 : 700;
    p.n_gqa = 4;
    p.mask = Mask::kCausal;
    p.formats = Formats::kMixed;
    p.token_mass = true;
    Problem problem(p);
    problem.Run(*pool_, workspace_);
    const std::vector<float> out = problem.out(), mass = problem.mass(),
                             token_mass = problem.token_mass();
    for (unsigned n_threads : {2u, 3u}) {
      const auto threads = MakeThreadPool(n_threads);
      problem.Run(*threads, workspace_);
      EXPECT_EQ(problem.out(), out) << n_threads;
      EXPECT_EQ(problem.mass(), mass) << n_threads;
      EXPECT_EQ(problem.token_mass(), token_mass) << n_threads;
    }
  }
}

TEST_P(AttentionMaskTest, GroupsOfDifferentSizesInOneCall) {
  std::vector<std::unique_ptr<Problem>> problems;
  std::vector<AttentionGroup> groups;
  const uint32_t rows[] = {1, 40, 0, 3, 1}, windows[] = {200, 30, 5, 0, 1};
  for (int i = 0; i < 5; ++i) {
    ProblemParams p;
    p.seed = static_cast<uint64_t>(i) + 10;
    p.n_rows = rows[i];
    p.n_windows = windows[i];
    p.formats = Formats::kMixed;
    p.n_gqa = i == 1 ? 2 : 7;
    problems.push_back(std::make_unique<Problem>(p));
    groups.push_back(problems.back()->group());
  }
  ASSERT_TRUE(Attend(groups, *pool_, workspace_));
  for (const auto& problem : problems)
    EXPECT_EQ(problem->Compare(), "") << problem->params().Name();
}

TEST_P(AttentionMaskTest, NoGroupsIsNoWork) { EXPECT_TRUE(Attend({}, *pool_, workspace_)); }

TEST_P(AttentionMaskTest, SecondCallOfTheSameShapeDoesNotGrowTheWorkspace) {
  Problem problem(ProblemParams{});
  problem.Run(*pool_, workspace_);
  const size_t bytes = workspace_.bytes();
  problem.Run(*pool_, workspace_);
  EXPECT_EQ(workspace_.bytes(), bytes);
}

TEST_P(AttentionMaskTest, LogitsOfMinusInfinityAreLikeMasks) {
  ProblemParams p;
  p.bias = true;
  p.n_rows = 2;
  p.n_windows = 12;
  Problem problem(p);
  AttentionGroup group = problem.group();
  std::vector<float> bias(p.n_rows * group.bias_stride, -std::numeric_limits<float>::infinity());
  for (uint32_t t = 0; t < p.window; ++t)
    bias[group.bias_stride + 11 * p.window + t] = 0.0f;  // row 1 sees the last window
  group.bias = bias.data();
  Attend({&group, 1}, *pool_, workspace_);
  const ReferenceResult want = AttendReference(group);
  for (uint32_t r = 0; r < p.n_rows; ++r) {
    for (uint32_t c = 0; c < p.head_dim_v; ++c) {
      ASSERT_NEAR(problem.out()[r * group.out_row_stride + c],
                  want.out[size_t{r} * 14 * p.head_dim_v + c], 1e-5);
    }
  }
}

TEST(HeadBytesTest, FollowTheLayout) {
  EXPECT_EQ(FullHeadBytes(8, 64, 64), 2048u);
  EXPECT_EQ(FullHeadBytes(1, 128, 64), 384u);
  EXPECT_EQ(PackedHeadBytes(2, 8, 64, 64), 128u + 256u + 128u + 32u);
  EXPECT_EQ(PackedHeadBytes(4, 32, 128, 72), 2048u + 512u + 1152u + 128u);
  EXPECT_EQ(PackedHeadBytes(2, 1, 8, 8), 2u + 32u + 2u + 4u);
}

TEST(WorkspaceTest, GrowsAndStaysAligned) {
  Workspace workspace;
  uint8_t* first = workspace.Reserve(100);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  EXPECT_EQ(workspace.Reserve(50), first);
  EXPECT_NE(workspace.Reserve(100000), nullptr);
  EXPECT_GE(workspace.bytes(), 100000u);
}

}  // namespace
}  // namespace qevict::kernels
