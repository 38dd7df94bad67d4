// Token codes against the double-precision reference: bits, segments, orders, windows, masks; and
// the same integers on every ISA.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "kernels/attention.h"
#include "kernels/problems/problem.h"
#include "kernels/testing/isa_test.h"

namespace qevict::kernels {
namespace {

class TokenCodeTest : public IsaTest {};

INSTANTIATE_TEST_SUITE_P(AllIsas, TokenCodeTest, testing::ValuesIn(AllIsas()), IsaParamName);

ProblemParams TokenParams() {
  ProblemParams p;
  p.formats = Formats::kToken;
  p.n_kv_heads = 1;
  p.n_gqa = 3;
  return p;
}

/// Bits and places of each segment; as many units as hold them.
using Split = std::vector<std::pair<uint8_t, uint32_t>>;
std::vector<TokenSegment> Segments(const Split& split, uint32_t unit) {
  std::vector<TokenSegment> segments;
  for (const auto& [bits, places] : split) {
    segments.push_back({bits, static_cast<uint16_t>((places + unit - 1) / unit)});
  }
  return segments;
}

TEST_P(TokenCodeTest, MatchesReferenceForAllBits) {
  for (uint32_t bits : {1u, 2u, 3u, 4u, 8u}) {
    for (uint32_t window : {8u, 16u, 32u}) {
      for (uint32_t rows : {1u, 9u}) {
        for (bool zero : {false, true}) {
          ProblemParams p = TokenParams();
          p.token_bits = bits;
          p.token_zero = zero;
          p.token_byte_scale = bits % 2 == 1;
          p.window = window;
          p.n_rows = rows;
          p.n_kv_heads = 2;
          p.n_windows = 72 / window + 2;
          p.mask = rows == 1 ? Mask::kPartialLast : Mask::kHoles;
          Check(p);
        }
      }
    }
  }
}

TEST_P(TokenCodeTest, MatchesReferenceForAllHeadDims) {
  for (uint32_t d : {8u, 16u, 40u, 64u, 72u, 80u, 96u, 112u, 128u, 256u, 512u}) {
    for (uint32_t bits : {1u, 2u, 3u, 4u, 8u}) {
      if (d > 96 && bits != 3) continue;
      for (uint32_t rows : {1u, 9u}) {
        ProblemParams p = TokenParams();
        p.head_dim = d;
        p.head_dim_v = d == 8 ? 72 : d - 8;
        p.rope.n_dims = d;
        p.token_bits = bits;
        p.n_rows = rows;
        p.n_windows = 9;
        p.mask = Mask::kCausal;
        Check(p);
      }
    }
  }
}

TEST_P(TokenCodeTest, MatchesReferenceForUnequalBitsInAnyOrder) {
  const Split splits[] = {
      {{4, 16}, {2, 16}, {1, 32}},                  // all of 64 channels
      {{8, 8}, {4, 8}, {3, 32}, {2, 16}},           // every kind but one
      {{4, 24}, {2, 16}},                           // 24 channels without a place
      {{4, 4}, {3, 20}, {2, 12}, {1, 28}},          // odd numbers of units
      {{3, 12}, {2, 4}, {1, 4}},                    // fields that begin anywhere
      {{8, 8}, {4, 16}, {3, 24}, {2, 8}, {1, 16}},  // with padding
  };
  for (const auto& split_k : splits) {
    for (const auto& split_v : splits) {
      for (uint32_t rows : {1u, 2u, 9u}) {
        ProblemParams p = TokenParams();
        p.token_k = Segments(split_k, kKeyUnit);
        p.token_v = Segments(split_v, kValueUnit);
        p.token_zero = rows == 2;
        p.token_byte_scale = rows == 9;
        p.n_rows = rows;
        p.n_windows = 9;
        p.mask = rows == 2 ? Mask::kHoles : Mask::kCausal;
        Check(p);
      }
    }
  }
}

TEST_P(TokenCodeTest, MatchesReferenceForAllGroupSizesAndRowsAmongOtherTiers) {
  for (uint32_t n_gqa : {1u, 2u, 3u, 5u, 7u, 8u, 9u, 20u}) {
    for (uint32_t rows : {1u, 2u, 5u, 16u, 33u}) {
      if (n_gqa * rows > 60) continue;
      ProblemParams p = TokenParams();
      p.formats = Formats::kMixed;
      p.n_gqa = n_gqa;
      p.head_dim = 40;
      p.head_dim_v = 24;
      p.rope.n_dims = 40;
      p.n_rows = rows;
      p.n_windows = 19;
      p.mask = rows % 2 == 0 ? Mask::kCausal : Mask::kHoles;
      p.mass_first_row = rows / 3;
      p.blind_row = rows == 5;
      p.bias = p.slopes = rows == 2;
      p.sinks = rows == 5;
      Check(p);
    }
  }
}

TEST_P(TokenCodeTest, MatchesReferenceForWindowCountsAroundTiles) {
  for (uint32_t n : {1u, 2u, 7u, 8u, 9u, 16u, 17u, 65u}) {
    for (uint32_t rows : {1u, 6u}) {
      ProblemParams p = TokenParams();
      p.n_gqa = 4;
      p.n_rows = rows;
      p.n_windows = n;
      p.mask = rows == 1 ? Mask::kPartialLast : Mask::kCausal;
      Check(p);
    }
  }
}

TEST_P(TokenCodeTest, MeansAreAddedAtEveryPosition) {
  RopeParams shapes[4] = {};
  for (RopeParams& r : shapes) r.pairing = RopePairing::kHalves, r.n_dims = 64;
  shapes[0].freq_base = 1e6f;
  shapes[1].pairing = RopePairing::kInterleaved;
  shapes[2].n_dims = 20, shapes[2].offset = 8;
  shapes[3].freq_base = 50.0f;  // all pairs turn fast
  shapes[3].attn_factor = 1.3f;
  for (const RopeParams& rope : shapes) {
    for (const int32_t first_pos : {3, 61, 5000, -60}) {
      for (const uint32_t rows : {1u, 2u, 9u}) {
        for (const uint32_t window : {8u, 16u}) {
          ProblemParams p = TokenParams();
          p.rope = rope;
          p.token_mean = true;
          p.token_zero = rows == 2;
          p.window = window;
          p.token_k = Segments({{4, 16}, {2, 16}, {1, 32}}, kKeyUnit);
          p.first_pos = first_pos;
          p.n_rows = rows;
          p.n_windows = 120 / window;
          p.shared_positions = rows == 2;
          p.use_rope = first_pos != 3 || rows != 1;
          p.mask = Mask::kHoles;
          Check(p);
        }
      }
    }
  }
}

TEST_P(TokenCodeTest, ZeroAndHugeQueriesGiveNumbers) {
  ProblemParams p = TokenParams();
  p.n_windows = 20;
  Problem problem(p);
  for (const float q : {0.0f, 1e-38f, 1e30f}) {
    AttentionGroup group = problem.group();
    std::vector<float> queries(group.q_row_stride, q), out(group.out_row_stride);
    group.q = queries.data();
    group.out = out.data();
    ASSERT_TRUE(Attend({&group, 1}, *pool_, workspace_));
    for (uint32_t h = 0; h < 3; ++h) {
      for (uint32_t c = 0; c < 64; ++c) {
        ASSERT_TRUE(std::isfinite(out[h * group.out_head_stride + c])) << q;
      }
    }
  }
}

TEST_P(TokenCodeTest, InstructionSetsAgreeWithTheScalarKernel) {
  ProblemParams p = TokenParams();
  p.token_k = Segments({{4, 16}, {2, 16}, {1, 32}}, kKeyUnit);
  p.token_v = Segments({{4, 16}, {3, 32}, {2, 16}}, kValueUnit);
  p.token_zero = false;
  p.n_windows = 100;
  Problem problem(p);
  problem.Run(*pool_, workspace_);
  const std::vector<float> out = problem.out(), mass = problem.mass();
  ASSERT_TRUE(ForceIsa(Isa::kScalar));
  problem.Run(*pool_, workspace_);
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(out[i], problem.out()[i], 2e-5) << i;
  }
  for (size_t i = 0; i < mass.size(); ++i) {
    ASSERT_NEAR(mass[i], problem.mass()[i], 2e-6 * mass[i]) << i;
  }
}

/// Three rungs as a ladder has them, with each width of units somewhere.
ProblemParams LadderParams() {
  ProblemParams p;
  p.formats = Formats::kMixed;
  p.token_k = {{4, 4}, {3, 8}, {2, 4}};
  p.token_v = {{4, 2}, {3, 4}, {2, 2}};
  p.more_tokens = {{{{8, 1}, {2, 10}, {1, 5}}, {{8, 1}, {2, 5}, {1, 2}}},
                   {{{2, 8}, {1, 8}}, {{1, 8}}}};
  p.token_zero = false;
  p.token_byte_scale = true;
  return p;
}

// Several token codes, full precision and other formats in one call, keys and values of a window on
// rungs of their own.
TEST_P(TokenCodeTest, AnyMixtureOfRungsAgreesWithTheReference) {
  const std::unique_ptr<ParallelFor> pool = MakeThreadPool(2);
  Workspace workspace;
  std::mt19937 random(11);
  for (int round = 0; round < 24; ++round) {
    ProblemParams p = LadderParams();
    p.apart = round % 2 == 1;
    p.mix_grids = round % 3 == 2;
    p.token_mean = round % 4 >= 2;
    p.same_means = round % 8 < 4;
    p.window = 8u << random() % 3;
    p.n_windows = 1 + random() % 60;
    p.n_rows = round % 5 == 4 ? 40 : 1 + random() % 4;
    p.mask = round % 3 == 0 ? Mask::kAll : round % 3 == 1 ? Mask::kHoles : Mask::kCausal;
    p.scattered = round % 2 == 0;
    p.seed = 100 + static_cast<uint64_t>(round);
    Problem problem(p);
    problem.Run(*pool, workspace);
    EXPECT_EQ(problem.Compare(), "") << p.Name();
  }
}

}  // namespace
}  // namespace qevict::kernels
