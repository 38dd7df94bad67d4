// Positions: read from the ROPE behind the rows, and moved by K-shift.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "base/rope.h"
#include "ggml/cache_group.h"
#include "ggml/testing/twin.h"

namespace qevict::plugin::testing {
namespace {

using ::testing::SizeIs;

// Every live token's position, as the cache knows it, is the one its cell has.
void ExpectPositionsOfCells(Twin& twin, bool positional = true) {
  const KvCache& cache = *twin.ours.cache();
  for (uint32_t s = 0; s < twin.cells.n_streams(); ++s) {
    for (uint32_t c = 0; c < twin.cells.n_cells(); ++c) {
      if (!twin.cells.in_use(s, c)) continue;
      const TokenRef ref = cache.lookup(s, c);
      ASSERT_NE(ref.window, kNone) << "cell " << c;
      const WindowInfo info = cache.info(ref.window);
      ASSERT_EQ(info.pos_stride, positional ? 1 : 0) << "cell " << c;
      if (!positional) continue;
      ASSERT_EQ(info.pos0 + static_cast<int32_t>(ref.offset), twin.cells.pos(s, c)) << "cell " << c;
    }
  }
}

CacheSpec OneLayer(const RopeSpec& rope) {
  CacheSpec spec;
  spec.layers[0].rope = rope;
  return spec;
}

RopeSpec Mode(int mode) {
  RopeSpec rope;
  rope.mode = mode;
  return rope;
}

RopeSpec Multi(int mode) {
  RopeSpec rope = Mode(mode);
  rope.sections[0] = 8;
  rope.sections[1] = rope.sections[2] = 12;
  return rope;
}

TEST(PositionsTest, OfAllRopes) {
  RopeSpec partial = Mode(GGML_ROPE_TYPE_NEOX);
  partial.n_dims = 32;
  for (const RopeSpec& rope : {Mode(GGML_ROPE_TYPE_NORMAL), Mode(GGML_ROPE_TYPE_NEOX), partial,
                               Multi(GGML_ROPE_TYPE_MROPE), Multi(GGML_ROPE_TYPE_IMROPE)}) {
    Twin twin(OneLayer(rope));
    ExpectExact(twin.Step(TokensOf(0, 0, 30)), "prompt");
    ExpectExact(twin.Step(TokensOf(0, 30, 1)), "decode");
    ExpectPositionsOfCells(twin);
  }
}

TEST(PositionsTest, NeedNotBeginAtZeroNorBeConsecutive) {
  Twin twin(OneLayer(Mode(GGML_ROPE_TYPE_NEOX)));
  twin.Step(Join({TokensOf(0, 100, 20), TokensOf(0, 500, 3), TokensOf(0, 504, 30)}));
  ExpectExact(twin.Step(TokensOf(0, 4000, 1)), "far position");
  ExpectPositionsOfCells(twin);
}

TEST(PositionsTest, OfEachSequenceOfABatch) {
  Twin twin(OneLayer(Mode(GGML_ROPE_TYPE_NEOX)));
  twin.Step(Join({TokensOf(0, 0, 20), TokensOf(1, 70, 9), TokensOf(2, 5, 13)}));
  ExpectExact(twin.Step({{2, 18}, {0, 20}, {1, 79}}), "three sequences");
  ExpectPositionsOfCells(twin);
}

TEST(PositionsTest, WithoutRopeThereAreNone) {
  Twin twin(OneLayer(Mode(kNoRope)));
  ExpectExact(twin.Step(TokensOf(0, 0, 30)), "no RoPE, prompt");
  ExpectExact(twin.Step(TokensOf(0, 30, 1)), "no RoPE, decode");
  ExpectPositionsOfCells(twin, false);
}

// SmolLM3 and others leave RoPE out in some layers.
TEST(PositionsTest, SomeLayersWithoutRope) {
  CacheSpec spec;
  spec.layers.resize(4);
  spec.layers[3].rope.mode = kNoRope;
  Twin twin(spec);
  ExpectExact(twin.Step(TokensOf(0, 0, 30)), "prompt");
  ExpectExact(twin.Step(TokensOf(0, 30, 1)), "decode");
  ExpectPositionsOfCells(twin);
}

// Image tokens share a position and differ in y and x: no single number says how they were rotated.
TEST(PositionsTest, ImageTokensHaveNone) {
  Twin twin(OneLayer(Multi(GGML_ROPE_TYPE_MROPE)));
  ExpectExact(twin.Step(TokensOf(0, 0, 10)), "text");
  std::vector<Token> image;
  for (int32_t y = 0; y < 4; ++y) {
    for (int32_t x = 0; x < 6; ++x) image.push_back({0, 10, 10 + y, 10 + x});
  }
  ExpectExact(twin.Step(image), "image");
  ExpectExact(twin.Step(TokensOf(0, 16, 9)), "text after the image");
  const KvCache& cache = *twin.ours.cache();
  EXPECT_THAT(cache.Sequences(0), SizeIs(1));
  for (uint32_t c = 0; c < 43; ++c) {
    const WindowInfo info = cache.info(cache.lookup(0, c).window);
    // The first token of the image (y == x == position) is rotated like a text token.
    EXPECT_EQ(info.pos_stride, c <= 10 || c >= 34 ? 1 : 0) << "cell " << c;
  }
}

// --- K-shift -------------------------------------------------------------------------------------

struct ShiftCase {
  const char* name;
  RopeSpec rope;
};

RopeSpec Yarn() {
  RopeSpec rope;
  rope.ext_factor = 1.0f;
  rope.freq_scale = 0.25f;
  rope.attn_factor = 1.2f;
  return rope;
}

RopeSpec Factors() {
  RopeSpec rope = Mode(GGML_ROPE_TYPE_NORMAL);
  rope.factors = true;
  return rope;
}

RopeSpec Partial() {
  RopeSpec rope;
  rope.n_dims = 48;
  return rope;
}

class ShiftTest : public ::testing::TestWithParam<ShiftCase> {
 protected:
  static CacheSpec Spec() {
    CacheSpec spec;
    spec.layers.resize(2);
    for (LayerSpec& layer : spec.layers) layer.rope = GetParam().rope;
    return spec;
  }
};

// Context shift: the head is removed and everything after it moves down.
TEST_P(ShiftTest, ContextShift) {
  Twin twin(Spec());
  twin.Step(TokensOf(0, 0, 120));
  for (int i = 0; i < 2; ++i) {
    const int32_t last = twin.cells.last_pos(0);
    twin.cells.Remove(0, 4, 44);
    twin.cells.Shift(0, 44, -1, -40);
    ASSERT_EQ(twin.Shift(), GGML_STATUS_SUCCESS);
    EXPECT_EQ(twin.cells.last_pos(0), last - 40);
    ExpectExact(twin.Step(TokensOf(0, last - 39, 1)), "decode after a shift");
    ExpectExact(twin.Step(TokensOf(0, last - 38, 37)), "chunk after a shift");
    ExpectPositionsOfCells(twin);
  }
}

// Rows are those of ggml's RoPE on an f16 cache. ggml's compiler may fuse multiply and add, which
// moves a value now and then by one unit of f16.
TEST_P(ShiftTest, RowsEqualGgmls) {
  Twin twin(Spec());
  twin.Step(TokensOf(0, 0, 60));
  twin.cells.Shift(0, 21, -1, 13);  // not at a window's edge
  ASSERT_EQ(twin.Shift(), GGML_STATUS_SUCCESS);
  for (uint32_t il = 0; il < 2; ++il) {
    const std::vector<float> ours = twin.ours.Rows(il, true, 0), ggml = twin.cpu.Rows(il, true, 0);
    size_t differ = 0;
    for (size_t i = 0; i < ours.size(); ++i) {
      differ += ours[i] != ggml[i] ? 1 : 0;
      ASSERT_NEAR(ours[i], ggml[i], 0.001 * std::fabs(ggml[i]) + 6e-8) << "layer " << il;
    }
    EXPECT_LE(differ, ours.size() / 1000) << "layer " << il;
    EXPECT_EQ(twin.ours.Rows(il, false, 0), twin.cpu.Rows(il, false, 0)) << "layer " << il;
  }
  ExpectPositionsOfCells(twin);
  ExpectExact(twin.Step(TokensOf(0, 73, 1)), "decode after a shift in the middle");
}

INSTANTIATE_TEST_SUITE_P(
    Ropes, ShiftTest,
    ::testing::Values(ShiftCase{"neox", Mode(GGML_ROPE_TYPE_NEOX)},
                      ShiftCase{"normal", Mode(GGML_ROPE_TYPE_NORMAL)},
                      ShiftCase{"partial", Partial()}, ShiftCase{"factors", Factors()},
                      ShiftCase{"yarn", Yarn()}, ShiftCase{"mrope", Multi(GGML_ROPE_TYPE_MROPE)}),
    [](const ::testing::TestParamInfo<ShiftCase>& rope) { return rope.param.name; });

TEST(ShiftOfStreamsTest, MovesEachByItsOwn) {
  CacheSpec spec;
  spec.n_streams = 3;
  Twin twin(spec);
  twin.Step(Join({TokensOf(0, 0, 50), TokensOf(1, 0, 50), TokensOf(2, 0, 50)}));
  twin.cells.Shift(0, 0, -1, 5);
  twin.cells.Remove(2, 0, 10);
  twin.cells.Shift(2, 10, -1, -10);
  ASSERT_EQ(twin.Shift(), GGML_STATUS_SUCCESS);
  ExpectExact(twin.Step({{0, 55}, {1, 50}, {2, 40}}), "streams after a shift");
  ExpectPositionsOfCells(twin);
}

TEST(ShiftOfSequencesTest, OneOfAUnifiedCache) {
  Twin twin(CacheSpec{});
  twin.Step(Join({TokensOf(0, 0, 30), TokensOf(1, 0, 30)}));
  twin.cells.Shift(1, 0, -1, 7);
  ASSERT_EQ(twin.Shift(), GGML_STATUS_SUCCESS);
  ExpectExact(twin.Step({{0, 30}, {1, 37}}), "one sequence moved");
  ExpectPositionsOfCells(twin);
}

// Two shifts in a row, from a host that does not announce its graphs.
TEST(ShiftOfSequencesTest, TwiceWithoutAnnouncement) {
  Twin twin(CacheSpec{});
  twin.ours.AnnounceGraphs(false);
  twin.Step(TokensOf(0, 0, 40));
  for (int i = 0; i < 2; ++i) {
    twin.cells.Shift(0, 0, -1, 11);
    ASSERT_EQ(twin.Shift(), GGML_STATUS_SUCCESS);
  }
  ExpectPositionsOfCells(twin);
  ExpectExact(twin.Step(TokensOf(0, 62, 1)), "two shifts");
}

// Keys that have been through more than a RoPE come without positions; K-shift moves them all the
// same.
TEST(ShiftOfNormedKeysTest, MovesThem) {
  CacheSpec spec;
  spec.layers.resize(2);
  for (LayerSpec& layer : spec.layers) layer.norm_after_rope = true;
  Twin twin(spec);
  twin.Step(TokensOf(0, 0, 100));
  ExpectPositionsOfCells(twin, false);
  for (int i = 0; i < 2; ++i) {
    const int32_t last = twin.cells.last_pos(0);
    twin.cells.Remove(0, 4, 34);
    twin.cells.Shift(0, 34, -1, -30);
    ASSERT_EQ(twin.Shift(), GGML_STATUS_SUCCESS);
    ExpectExact(twin.Step(TokensOf(0, last - 29, 1)), "normed keys after a shift");
    ExpectExact(twin.Step(TokensOf(0, last - 28, 20)), "chunk after a shift of normed keys");
  }
}

// Self-extend divides positions: neighbours come to share one.
TEST(ShiftOfSequencesTest, ByDifferentAmountsPerToken) {
  Twin twin(CacheSpec{});
  twin.Step(TokensOf(0, 0, 40));
  for (int32_t pos = 0; pos < 40; ++pos) twin.cells.Shift(0, pos, pos + 1, pos / 2 - pos);
  ASSERT_EQ(twin.Shift(), GGML_STATUS_SUCCESS);
  ExpectPositionsOfCells(twin);
  ExpectExact(twin.Step(TokensOf(0, 20, 1)), "after positions were halved");
}

// ggml has no bf16 RoPE, so llama.cpp cannot shift such a cache; the plug-in can.
TEST(ShiftOfBf16Test, RotatesWithinRounding) {
  CacheSpec spec;
  spec.layers[0].type_k = spec.layers[0].type_v = GGML_TYPE_BF16;
  Twin twin(spec);
  twin.Step(TokensOf(0, 0, 40));
  const std::vector<float> before = twin.ours.Rows(0, true, 0);
  twin.cells.Shift(0, 0, -1, 9);
  ASSERT_EQ(twin.Shift(), GGML_STATUS_SUCCESS);
  const std::vector<float> after = twin.ours.Rows(0, true, 0);
  RopeParams rope;
  rope.pairing = RopePairing::kHalves;
  rope.n_dims = 64;
  std::vector<float> cos_sin(64);
  RopeCosSin(rope, 9, cos_sin.data());
  for (size_t i = 0; i < 40u * 128; i += 64) {
    std::vector<float> row(before.begin() + static_cast<ptrdiff_t>(i),
                           before.begin() + static_cast<ptrdiff_t>(i) + 64);
    RopeRotate(rope, cos_sin.data(), row.data());
    for (size_t j = 0; j < 64; ++j) {
      ASSERT_NEAR(after[i + j], row[j], 0.004 * std::fabs(row[j]) + 1e-6) << i + j;
    }
  }
}

}  // namespace
}  // namespace qevict::plugin::testing
