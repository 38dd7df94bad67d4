// Every kernel against the double-precision reference, over formats, shapes and lengths.
#include "kernels/attention.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/problems/problem.h"
#include "kernels/testing/isa_test.h"

namespace qevict::kernels {
namespace {

class AttentionTest : public IsaTest {};

INSTANTIATE_TEST_SUITE_P(AllIsas, AttentionTest, testing::ValuesIn(FloatIsas()), IsaParamName);

constexpr Formats kFormats[] = {Formats::kFull, Formats::kPacked2, Formats::kPacked4,
                                Formats::kMixed};

TEST_P(AttentionTest, MatchesReferenceForAllFormatsAndWindowLengths) {
  for (Formats formats : kFormats) {
    for (uint32_t window : {1u, 2u, 4u, 8u, 16u, 32u}) {
      for (uint32_t rows : {1u, 5u}) {
        ProblemParams p;
        p.formats = formats;
        p.window = window;
        p.n_rows = rows;
        p.n_windows = 150 / window + 3;
        p.mask = rows == 1 ? Mask::kPartialLast : Mask::kHoles;
        p.rope.pairing = rows == 1 ? RopePairing::kHalves : RopePairing::kInterleaved;
        p.first_pos = 1000;
        Check(p);
      }
    }
  }
}

TEST_P(AttentionTest, MatchesReferenceForAllHeadDims) {
  for (Formats formats : kFormats) {
    for (uint32_t d : {8u, 16u, 40u, 64u, 72u, 80u, 96u, 112u, 128u, 256u, 512u}) {
      for (uint32_t rows : {1u, 7u}) {
        ProblemParams p;
        p.formats = formats;
        p.n_gqa = 3;
        p.head_dim = d;
        p.head_dim_v = d;
        p.rope.n_dims = d;
        p.rope.pairing = d % 16 == 0 ? RopePairing::kHalves : RopePairing::kInterleaved;
        p.n_rows = rows;
        p.n_windows = 11;
        p.mask = Mask::kCausal;
        Check(p);
        p.n_kv_heads = 1;
        p.head_dim_v = d == 8 ? 72 : d - 8;
        p.rope.pairing = d % 16 == 0 ? RopePairing::kInterleaved : RopePairing::kHalves;
        Check(p);
      }
    }
  }
}

TEST_P(AttentionTest, MatchesReferenceForAllGroupSizesAndRows) {
  for (uint32_t n_gqa : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 20u}) {
    for (uint32_t rows : {1u, 2u, 5u, 16u, 33u, 100u}) {
      if (n_gqa * rows > 400) continue;
      ProblemParams p;
      p.n_gqa = n_gqa;
      p.n_kv_heads = 1;
      p.head_dim = 40;
      p.head_dim_v = 24;
      p.rope.n_dims = 40;
      p.n_rows = rows;
      p.n_windows = 17;
      p.mask = rows % 2 == 0 ? Mask::kCausal : Mask::kHoles;
      p.formats = Formats::kMixed;
      p.mass_first_row = rows / 3;
      Check(p);
      p.mass_kind = MassKind::kMax;
      p.mass_per_head = rows > 2;
      Check(p);
    }
  }
}

TEST_P(AttentionTest, MatchesReferenceForWindowCountsAroundTiles) {
  for (uint32_t n :
       {0u, 1u, 2u, 7u, 8u, 9u, 15u, 16u, 17u, 31u, 64u, 65u, 127u, 128u, 129u, 300u}) {
    for (Formats formats : kFormats) {
      for (uint32_t rows : {1u, 6u}) {
        ProblemParams p;
        p.n_gqa = 4;
        p.head_dim = p.head_dim_v = p.rope.n_dims = 32;
        p.n_rows = rows;
        p.n_windows = n;
        p.formats = formats;
        p.mask = rows == 1 ? Mask::kPartialLast : Mask::kCausal;
        Check(p);
      }
    }
  }
}

TEST_P(AttentionTest, MatchesReferenceForBrainFloat) {
  for (uint32_t rows : {1u, 20u}) {
    for (uint32_t window : {2u, 8u}) {
      for (int elems = 1; elems < 4; ++elems) {
        ProblemParams p;
        p.n_rows = rows;
        p.window = window;
        p.n_windows = 30;
        p.elem_k = elems & 1 ? Elem::kBF16 : Elem::kF16;
        p.elem_v = elems & 2 ? Elem::kBF16 : Elem::kF16;
        p.head_dim = 72;
        p.rope.n_dims = 72;
        p.formats = Formats::kMixed;
        Check(p);
      }
    }
  }
}

TEST_P(AttentionTest, MatchesReferenceForAllRotations) {
  for (RopePairing pairing :
       {RopePairing::kNone, RopePairing::kHalves, RopePairing::kInterleaved}) {
    for (uint32_t dims : {80u, 32u, 20u, 18u}) {  // 18: an odd number of pairs
      for (uint32_t offset : {0u, 8u, 10u, 3u}) {
        if (offset + dims > 88) continue;
        for (uint32_t rows : {1u, 9u}) {
          ProblemParams p;
          p.n_gqa = 2;
          p.head_dim = 88;
          p.rope.pairing = pairing;
          p.rope.n_dims = dims;
          p.rope.offset = offset;
          p.n_rows = rows;
          p.window = offset == 10 ? 16 : 8;
          p.formats = dims == 32 ? Formats::kPacked4 : Formats::kPacked2;
          p.shared_positions = dims == 80 || offset == 3;
          p.use_rope = pairing != RopePairing::kNone || offset != 0;
          p.first_pos = 5000;
          Check(p);
        }
      }
    }
  }
}

TEST_P(AttentionTest, MatchesReferenceForFarAndNegativePositionsAndYarn) {
  for (int32_t pos : {-40, -100000, 100000, 1000000}) {
    for (uint32_t window : {1u, 8u, 32u}) {
      ProblemParams p;
      p.window = window;
      p.first_pos = pos;
      p.formats = Formats::kPacked2;
      p.n_rows = window == 8 ? 4 : 1;
      p.rope.ext_factor = 1.0f;
      p.rope.attn_factor = 1.2f;
      p.rope.freq_scale = 0.25f;
      p.rope.n_ctx_orig = 4096;
      Check(p);
    }
  }
}

TEST_P(AttentionTest, MatchesReferenceWithSoftcapBiasSlopesAndSinks) {
  for (int flags = 1; flags < 16; ++flags) {
    for (uint32_t rows : {1u, 11u}) {
      ProblemParams p;
      p.softcap = flags & 1 ? 3.0f : 0.0f;
      p.bias = flags & 2;
      p.slopes = flags & 4;
      p.sinks = flags & 8;
      p.n_rows = rows;
      p.n_windows = 19;
      p.blind_row = true;
      p.mask = Mask::kHoles;
      p.formats = Formats::kMixed;
      Check(p);
    }
  }
}

/// Draws everything at random.
ProblemParams RandomParams(uint64_t seed) {
  std::mt19937_64 rng(seed);
  const auto pick = [&](auto... values) {
    const uint32_t list[] = {static_cast<uint32_t>(values)...};
    return list[rng() % sizeof...(values)];
  };
  ProblemParams p;
  p.seed = seed;
  p.n_kv_heads = pick(1, 2, 3);
  p.n_gqa = pick(1, 2, 3, 4, 7, 8, 12);
  p.head_dim = pick(8, 24, 40, 64, 80, 96, 112, 128, 192);
  p.head_dim_v = pick(0, 0, 8, 40, 64, 104);
  if (p.head_dim_v == 0) p.head_dim_v = p.head_dim;
  p.window = pick(1, 2, 4, 8, 8, 8, 8, 16, 32);
  p.n_rows = pick(1, 1, 2, 3, 8, 17, 40);
  p.n_windows = pick(1, 2, 7, 9, 20, 40, 70);
  p.elem_k = pick(0, 1) == 0 ? Elem::kF16 : Elem::kBF16;
  p.elem_v = pick(0, 1) == 0 ? Elem::kF16 : Elem::kBF16;
  constexpr Formats kPicked[] = {Formats::kFull, Formats::kPacked2, Formats::kPacked4,
                                 Formats::kMixed};
  p.formats = kPicked[pick(0, 1, 2, 3, 3)];
  p.mask = static_cast<Mask>(pick(0, 1, 2, 3));
  p.rope.pairing = pick(0, 1) == 0 ? RopePairing::kHalves : RopePairing::kInterleaved;
  p.rope.n_dims = p.head_dim / pick(1, 1, 2, 4) / 2 * 2;
  p.rope.offset = pick(0, 0, 1) == 0 ? 0 : p.head_dim - p.rope.n_dims;
  p.use_rope = pick(0, 1, 1, 1) != 0;
  p.first_pos = static_cast<int32_t>(rng() % 20000) - 1000;
  p.shared_positions = pick(0, 0, 1) != 0;
  p.softcap = pick(0, 0, 0, 5);
  p.bias = pick(0, 0, 1) != 0;
  p.slopes = pick(0, 1) != 0;
  p.sinks = pick(0, 0, 1) != 0;
  p.mass = pick(0, 1, 1) != 0;
  p.blind_row = pick(0, 0, 1) != 0;
  p.mass_first_row = pick(0, 0, 1, 5);
  p.mass_kind = pick(0, 0, 1) == 0 ? MassKind::kSum : MassKind::kMax;
  p.mass_per_head = pick(0, 0, 1) != 0;
  p.head_gap = pick(0, 0, 2, 64);
  p.token_mass = pick(0, 1) != 0;
  p.token_mass_first_row = pick(0, 0, 1, 5);
  return p;
}

TEST_P(AttentionTest, MatchesReferenceForRandomProblems) {
  int done = 0;
  for (uint64_t seed = 1; done < 150; ++seed) {
    const ProblemParams p = RandomParams(seed);
    const double work = double(p.n_kv_heads) * p.n_gqa * p.n_rows * p.n_windows * p.window *
                        (p.head_dim + p.head_dim_v);
    if (work > 3e6) continue;
    Check(p);
    if (HasFatalFailure()) return;
    ++done;
  }
}

}  // namespace
}  // namespace qevict::kernels
