// Grid codes against the double-precision reference: bits, axes, tables, exact numbers, transforms,
// RoPE, windows, masks, shapes.
#include <gtest/gtest.h>

#include <string>

#include "kernels/attention.h"
#include "kernels/problems/problem.h"
#include "kernels/testing/isa_test.h"

namespace qevict::kernels {
namespace {

class GridCodeTest : public IsaTest {};

INSTANTIATE_TEST_SUITE_P(AllIsas, GridCodeTest, testing::ValuesIn(AllIsas()), IsaParamName);

ProblemParams GridProblem() {
  ProblemParams p;
  p.formats = Formats::kGrid;
  p.n_kv_heads = 1;
  p.n_gqa = 3;
  return p;
}

/// One of each kind.
std::vector<GridParams> Kinds() {
  std::vector<GridParams> kinds(9);
  kinds[0].axis = GridAxis::kChannel;
  kinds[1].axis = GridAxis::kToken;
  kinds[2] = {.axis = GridAxis::kToken, .group = 8, .zero = false, .levels = true};
  kinds[3] = {.axis = GridAxis::kStatic, .factor = true, .offset = true};
  kinds[4] = {.axis = GridAxis::kToken, .factor = true};
  kinds[5] = {.axis = GridAxis::kChannel, .bytes = true, .offset = true};
  kinds[6] = {.axis = GridAxis::kToken, .zero = false, .levels = true, .sign = true};
  kinds[7] = {
      .axis = GridAxis::kStatic, .levels = true, .factor = true, .offset = true, .n_exact = 7};
  kinds[8] = {.axis = GridAxis::kChannel, .n_exact_tokens = 3};
  return kinds;
}

TEST_P(GridCodeTest, MatchesReferenceForAllBitsAndKinds) {
  for (GridParams kind : Kinds()) {
    for (const uint32_t bits : {1u, 2u, 3u, 4u, 8u}) {
      if (kind.levels && bits == 8) continue;
      for (const uint32_t window : {8u, 16u, 32u}) {
        for (const uint32_t rows : {1u, 9u}) {
          ProblemParams p = GridProblem();
          kind.bits = bits;
          kind.before_rope = window != 16;
          p.grid_k = p.grid_v = kind;
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

TEST_P(GridCodeTest, MatchesReferenceForAllHeadDims) {
  for (const uint32_t d : {8u, 16u, 24u, 40u, 72u, 80u, 96u, 128u, 256u, 512u}) {
    for (GridParams kind : Kinds()) {
      for (const uint32_t rows : {1u, 9u}) {
        ProblemParams p = GridProblem();
        kind.bits = 3;
        kind.before_rope = true;
        p.grid_k = p.grid_v = kind;
        p.head_dim = d;
        p.head_dim_v = d == 8 ? 72 : d - 8;
        p.rope.n_dims = d;
        p.n_rows = rows;
        p.n_windows = 5;
        p.mask = Mask::kCausal;
        Check(p);
      }
    }
  }
}

TEST_P(GridCodeTest, RotatesOddNumbersOfPairsOfBothKindsAtAnyPosition) {
  for (const bool halves : {false, true}) {
    for (const uint32_t dims : {6u, 14u, 32u}) {
      for (const int32_t first : {-40, 0, 1000}) {
        ProblemParams p = GridProblem();
        p.grid_k.before_rope = true;
        p.rope.pairing = halves ? RopePairing::kHalves : RopePairing::kInterleaved;
        p.rope.n_dims = dims;
        p.rope.offset = dims == 32 ? 16 : 3;
        p.first_pos = first;
        p.shared_positions = true;
        Check(p);
        p.n_rows = 12;
        p.mask = Mask::kCausal;
        Check(p);
      }
    }
  }
}

TEST_P(GridCodeTest, MatchesReferenceAmongOtherTiersWithBiasAndMasses) {
  for (const uint32_t n_gqa : {1u, 7u, 9u}) {
    for (const uint32_t rows : {1u, 3u, 33u}) {
      ProblemParams p = GridProblem();
      p.formats = Formats::kMixed;
      p.mix_grids = true;
      p.n_gqa = n_gqa;
      p.n_kv_heads = 2;
      p.n_rows = rows;
      p.n_windows = 21;
      p.head_gap = 16;
      p.bias = p.sinks = rows == 3;
      p.mask = Mask::kHoles;
      p.grid_k.before_rope = true;
      p.seed = n_gqa * 100 + rows;
      Check(p);
    }
  }
}

}  // namespace
}  // namespace qevict::kernels
