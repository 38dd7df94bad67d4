// K-shift and copies: what the random model does not pin down.
#include <gtest/gtest.h>

#include "cache/test_support.h"

namespace qevict {
namespace {

constexpr uint32_t kCells = 512;

Config MakeConfig() {
  Config config;
  config.budget_fraction = 0.5;
  config.budget_tokens = 400;
  config.check = true;
  return config;
}

class ShiftTest : public testing::Test {
 protected:
  void Make(RopeParams rope, uint32_t n_streams = 1, CodecId codec = CodecId::kKiviAxis) {
    Config config = MakeConfig();
    config.codec = codec;
    e_ = std::make_unique<Engine>(
        config, std::vector<LayerShape>{Shape(2, 32, 32), Shape(2, 32, 32)}, n_streams, kCells);
    ASSERT_TRUE(e_->status.ok()) << e_->status.message();
    e_->UseRope(rope);
    seq_ = e_->NewSequence(0);
    ASSERT_TRUE(e_->Prompt(seq_, 400, 100).ok());
    ASSERT_TRUE(e_->Decode(seq_, 1).ok());
    ASSERT_GT(e_->cache().Stats().tokens.packed, 0u);
  }
  void Shift(uint32_t from_cell, int32_t by) {
    std::vector<int32_t> delta(kCells);
    for (uint32_t c = from_cell; c < kCells; ++c) delta[c] = by;
    const Status status = e_->cache().ShiftPositions(delta);
    ASSERT_TRUE(status.ok()) << status.message();
    for (uint32_t il = 0; il < 2; ++il)
      ASSERT_TRUE(e_->cache().RotateLayer(il, delta, e_->pool()).ok());
    e_->ExpectSound("shift");
  }
  std::map<uint32_t, std::vector<float>> Keys(uint32_t il) {
    std::map<uint32_t, std::vector<float>> rows;
    for (uint32_t c = 0; c < kCells; ++c) {
      const TokenRef ref = e_->cache().lookup(0, c);
      if (ref.window != kNone) rows[c] = e_->Read(il, ref, true);
      if (ref.window != kNone && rows[c].empty()) rows.erase(c);
    }
    return rows;
  }
  std::unique_ptr<Engine> e_;
  SeqId seq_ = 0;
};

TEST_F(ShiftTest, AWindowAcrossTheBorderIsSplit) {
  Make(TestRope(32));
  const size_t before = e_->cache().windows(seq_).size();
  const uint32_t border = 5 + 8 * 47 + 3;  // inside the recents
  ASSERT_NE(e_->cache().lookup(0, border).window, kNone);
  Shift(border, -10);
  EXPECT_EQ(e_->cache().windows(seq_).size(), before + 1);
  const TokenRef left = e_->cache().lookup(0, border - 1), right = e_->cache().lookup(0, border);
  EXPECT_NE(left.window, right.window);
  EXPECT_EQ(left.offset + 1, right.offset) << "offsets stay";
  EXPECT_EQ(e_->cache().info(right.window).pos0 + static_cast<int32_t>(right.offset),
            static_cast<int32_t>(border) - 10);
  EXPECT_EQ(e_->cache().tail_pos(seq_), 390);
  EXPECT_EQ(e_->cache().info(left.window).live & e_->cache().info(right.window).live, 0u);
}

TEST_F(ShiftTest, ShiftingThereAndBackKeepsPackedKeysExactly) {
  Make(TestRope(32));
  const auto before = Keys(1);
  Shift(0, -3);
  Shift(0, 3);
  const auto after = Keys(1);
  ASSERT_EQ(before.size(), after.size());
  for (const auto& [cell, row] : before) {
    bool packed = false;
    (void)e_->Read(1, e_->cache().lookup(0, cell), true, &packed);
    for (size_t i = 0; i < row.size(); ++i) {
      ASSERT_NEAR(row[i], after.at(cell)[i], packed ? 0.0f : 0.002f) << cell;
    }
  }
}

TEST_F(ShiftTest, MagnitudeIsAppliedOnceMoreToEveryTierAsLlamaCppDoes) {
  RopeParams rope = TestRope(32);
  rope.attn_factor = 1.25f;
  Make(rope);
  const auto before = Keys(0);
  Shift(0, 0);
  const auto after = Keys(0);
  ASSERT_EQ(before.size(), after.size());
  for (const auto& [cell, row] : before) {
    for (size_t i = 0; i < row.size(); ++i) {
      ASSERT_NEAR(row[i] * 1.25f, after.at(cell)[i], 0.004f) << cell << " channel " << i;
    }
  }
}

TEST_F(ShiftTest, MagnitudeIsRefusedWhereCodesCannotTakeIt) {
  RopeParams rope = TestRope(32);
  rope.attn_factor = 1.25f;
  for (const CodecId codec : {CodecId::kHadamard, CodecId::kKvQuant, CodecId::kWaterFill}) {
    Make(rope, 1, codec);
    const auto before = Keys(0);
    const Status status = e_->cache().ShiftPositions(std::vector<int32_t>(kCells, 3));
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << status.message();
    EXPECT_NE(status.message().find(CodecName(codec)), std::string::npos) << status.message();
    EXPECT_EQ(Keys(0), before);
    e_->ExpectSound("refused shift");
    Make(TestRope(32), 1, codec);  // without a magnitude all codecs move
    Shift(0, 3);
  }
}

TEST_F(ShiftTest, WrongNumberOfDeltasIsRefused) {
  Make(TestRope(32));
  EXPECT_EQ(e_->cache().ShiftPositions(std::vector<int32_t>(7)).code(),
            StatusCode::kInvalidArgument);
}

TEST_F(ShiftTest, ACopyIsIndependent) {
  Make(TestRope(32), 2);
  ASSERT_TRUE(e_->cache().CopyStream(0, 1).ok());
  const SeqId copy = e_->cache().Sequences(1).at(0);
  EXPECT_EQ(e_->cache().n_tokens(copy), e_->cache().n_tokens(seq_));
  EXPECT_EQ(e_->cache().windows(copy).size(), e_->cache().windows(seq_).size());
  const auto before = Keys(0);
  for (uint32_t c = 0; c < kCells; ++c) e_->cache().Kill(1, c);
  EXPECT_TRUE(e_->cache().Sequences(1).empty());
  EXPECT_EQ(Keys(0), before);
  EXPECT_EQ(e_->cache().CopyStream(0, 2).code(), StatusCode::kOutOfRange);
  EXPECT_TRUE(e_->cache().CopyStream(0, 0).ok());
  EXPECT_EQ(Keys(0), before);
  e_->ExpectSound();
}

}  // namespace
}  // namespace qevict
