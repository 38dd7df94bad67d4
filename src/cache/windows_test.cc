#include <gtest/gtest.h>

#include "cache/test_support.h"

namespace qevict {
namespace {

class WindowsTest : public testing::Test {
 protected:
  static Config MakeConfig() {
    Config config;
    config.budget_fraction = 0.5;
    config.check = true;
    return config;
  }
  void Make(Config config = MakeConfig(), uint32_t n_streams = 1, uint32_t cells = 1024) {
    e_ = std::make_unique<Engine>(
        config, std::vector<LayerShape>{Shape(2, 16, 16), Shape(2, 16, 16)}, n_streams, cells);
    ASSERT_TRUE(e_->status.ok()) << e_->status.message();
    e_->UseRope(TestRope(16));
  }
  KvCache& cache() { return e_->cache(); }
  std::vector<uint32_t> Sizes(SeqId seq) {
    std::vector<uint32_t> sizes;
    for (const WindowId w : cache().windows(seq)) sizes.push_back(cache().info(w).n_tokens);
    return sizes;
  }
  std::unique_ptr<Engine> e_;
};

TEST_F(WindowsTest, SinksHaveWindowsOfTheirOwn) {
  Make();
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 30, 7).ok());
  EXPECT_EQ(Sizes(seq), (std::vector<uint32_t>{5, 8, 8, 8, 1}));
  EXPECT_TRUE(cache().info(cache().windows(seq)[0]).sink);
  EXPECT_FALSE(cache().info(cache().windows(seq)[1]).sink);
  EXPECT_EQ(cache().info(cache().windows(seq)[1]).pos0, 5);
}

TEST_F(WindowsTest, SinksBeyondOneWindowFillSeveral) {
  Config config = MakeConfig();
  config.window = 4;
  config.sinks = 6;
  Make(config);
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 12, 12).ok());
  EXPECT_EQ(Sizes(seq), (std::vector<uint32_t>{4, 2, 4, 2}));
}

TEST_F(WindowsTest, AJumpOfPositionsStartsAWindow) {
  Make();
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 7, 7).ok());
  e_->next_pos(seq) = 20;
  ASSERT_TRUE(e_->Prompt(seq, 3, 3).ok());
  EXPECT_EQ(Sizes(seq), (std::vector<uint32_t>{5, 2, 3}));
  EXPECT_EQ(cache().info(cache().windows(seq)[2]).pos0, 20);
}

TEST_F(WindowsTest, TokensWithoutPositionsHaveWindowsOfTheirOwn) {
  Make();
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 6, 6).ok());
  ASSERT_TRUE(e_->Store(e_->NextTokens(seq, 3, false)).ok());
  EXPECT_EQ(Sizes(seq), (std::vector<uint32_t>{5, 1, 3}));
  const WindowInfo info = cache().info(cache().windows(seq)[2]);
  EXPECT_EQ(info.pos_stride, 0);
  EXPECT_EQ(info.pos0, 0);
}

TEST_F(WindowsTest, ARewrittenTokenTakesTheSequenceBack) {
  Make();
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 20, 20).ok());
  e_->next_pos(seq) -= 4;
  e_->next_cell(0) -= 4;
  ASSERT_TRUE(e_->Prompt(seq, 2, 2).ok());
  EXPECT_EQ(Sizes(seq), (std::vector<uint32_t>{5, 8, 5}));
  EXPECT_EQ(cache().n_tokens(seq), 18u);
  EXPECT_EQ(cache().tail_pos(seq), 17);
  ASSERT_TRUE(e_->Prompt(seq, 4, 4).ok());
  EXPECT_EQ(Sizes(seq), (std::vector<uint32_t>{5, 8, 8, 1}));
  e_->ExpectSound();
}

TEST_F(WindowsTest, ARewrittenTokenSparesThoseOfItsOwnStep) {
  Make();
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 20, 20).ok());
  // Position 15 again, in a new cell; then 16 over the cell of the old 16.
  ASSERT_TRUE(e_->Store({{seq, 500, 15, true}, {seq, 16, 16, true}, {seq, 17, 17, true}}).ok());
  for (const TokenRef& ref : e_->last_refs) EXPECT_NE(ref.window, kNone);
  EXPECT_EQ(cache().lookup(0, 500).window, e_->last_refs[0].window);
  EXPECT_EQ(cache().lookup(0, 18).window, kNone);
  EXPECT_EQ(cache().tail_pos(seq), 17);
  e_->ExpectSound();
}

TEST_F(WindowsTest, ARingWithoutPositionsForgetsOnlyWhatIsOverwritten) {
  Make(MakeConfig(), 1, 512);
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Store(e_->NextTokens(seq, 512, false)).ok());
  ASSERT_TRUE(e_->Store(e_->NextTokens(seq, 3, false)).ok());
  EXPECT_EQ(cache().n_tokens(seq), 512u);
  e_->ExpectSound();
}

TEST_F(WindowsTest, KilledTailIsCutOffAndTheWindowContinues) {
  Make();
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 24, 24).ok());
  for (uint32_t cell = 18; cell < 24; ++cell) cache().Kill(0, cell);
  EXPECT_EQ(Sizes(seq), (std::vector<uint32_t>{5, 8, 8}))
      << "a window without live tokens is freed";
  e_->next_pos(seq) = 18;
  e_->next_cell(0) = 100;  // other cells
  ASSERT_TRUE(e_->Prompt(seq, 4, 4).ok());
  EXPECT_EQ(Sizes(seq), (std::vector<uint32_t>{5, 8, 8, 1}));
  EXPECT_EQ(cache().n_tokens(seq), 22u);
  EXPECT_EQ(cache().lookup(0, 100).offset, 5u);
  e_->ExpectSound();
}

TEST_F(WindowsTest, RollbackIntoAPackedWindowStartsANewOne) {
  Config config = MakeConfig();
  config.recents = 8;
  config.budget_tokens = 400;
  Make(config);
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 600, 100).ok());
  ASSERT_TRUE(e_->Decode(seq, 1).ok());
  const std::vector<WindowId> before(cache().windows(seq).begin(), cache().windows(seq).end());
  for (uint32_t cell = 570; cell < 601; ++cell) cache().Kill(0, cell);
  e_->next_pos(seq) = 570;
  e_->next_cell(0) = 570;
  ASSERT_TRUE(e_->Decode(seq, 1).ok());
  const WindowInfo last = cache().info(cache().windows(seq).back());
  EXPECT_EQ(last.pos0, 570);
  EXPECT_EQ(last.n_tokens, 1);
  e_->ExpectSound();
}

TEST_F(WindowsTest, ASequenceDisappearsWithItsLastToken) {
  Make(MakeConfig(), 2);
  const SeqId a = e_->NewSequence(0), b = e_->NewSequence(1);
  ASSERT_TRUE(e_->Prompt(a, 10, 10).ok());
  ASSERT_TRUE(e_->Prompt(b, 10, 10).ok());
  for (uint32_t cell = 0; cell < 10; ++cell) cache().Kill(0, cell);
  EXPECT_TRUE(cache().Sequences(0).empty());
  EXPECT_EQ(cache().Sequences(1), (std::vector<SeqId>{b}));
  EXPECT_EQ(cache().Stats().bytes.full, 2u * 2 * 8 * 2 * 2 * 32);
  e_->ExpectSound();
}

TEST_F(WindowsTest, ANewSequenceOverOldCellsKillsTheOldOne) {
  Make();
  const SeqId a = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(a, 20, 20).ok());
  const SeqId b = e_->NewSequence(0);
  e_->next_cell(0) = 0;
  ASSERT_TRUE(e_->Prompt(b, 15, 15).ok());
  EXPECT_EQ(cache().n_tokens(a), 5u);
  EXPECT_EQ(Sizes(b), (std::vector<uint32_t>{5, 8, 2}));
  e_->ExpectSound();
}

TEST_F(WindowsTest, ARingOfCellsForgetsItsOldest) {
  Config config = MakeConfig();
  config.budget_tokens = 400;
  Make(config, 1, 128);
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 100, 50).ok());
  for (int i = 0; i < 400; ++i) {
    const Status status = e_->Decode(seq, 1);
    ASSERT_TRUE(status.ok()) << i << ": " << status.message();
  }
  EXPECT_EQ(cache().n_tokens(seq), 128u);
  EXPECT_LE(cache().windows(seq).size(), 128u / 8 + 2);
  e_->ExpectSound();
}

TEST_F(WindowsTest, ClearForgetsEverything) {
  Make();
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 600, 300).ok());
  ASSERT_TRUE(e_->Decode(seq, 20).ok());
  cache().Clear();
  EXPECT_TRUE(cache().Sequences(0).empty());
  const CacheStats stats = cache().Stats();
  EXPECT_EQ(stats.arena_bytes, 0u);
  EXPECT_EQ(stats.bytes.full + stats.bytes.packed + stats.bytes.dormant + stats.bytes.slack, 0u);
  EXPECT_EQ(stats.events, 0u);
  e_->ExpectSound();
}

TEST_F(WindowsTest, BadTokensAreRefused) {
  Make();
  const SeqId seq = e_->NewSequence(0);
  std::vector<TokenRef> refs;
  const std::vector<TokenSpec> far = {{seq, 1024, 0, true}};
  EXPECT_EQ(cache().Append(far, refs).code(), StatusCode::kOutOfRange);
  const std::vector<TokenSpec> negative = {{seq, 0, -1, true}};
  EXPECT_EQ(cache().Append(negative, refs).code(), StatusCode::kInvalidArgument);
  const std::vector<TokenSpec> nobody = {{77, 0, 0, true}};
  EXPECT_EQ(cache().Append(nobody, refs).code(), StatusCode::kOutOfRange);
  EXPECT_TRUE(refs.empty());
  e_->ExpectSound();
}

TEST(CreateTest, ShapesThatCannotBeStoredAreRefused) {
  Config config;
  EXPECT_EQ(Engine(config, {Shape(2, 60, 64)}, 1, 4096).status.code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(Engine(config, {Shape(2, 1024, 64)}, 1, 4096).status.code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(Engine(config, {Shape(0, 64, 64)}, 1, 4096).status.code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(Engine(config, {}, 1, 4096).status.code(), StatusCode::kInvalidArgument);
  config.per_head = true;
  EXPECT_EQ(Engine(config, {Shape(2, 64, 64)}, 1, 4096).status.code(),
            StatusCode::kInvalidArgument);
  EXPECT_TRUE(Engine(config, {Shape(1, 64, 64)}, 1, 4096).status.ok());
}

TEST_F(WindowsTest, RopeCannotChangeUnderPackedKeys) {
  Config config = MakeConfig();
  config.budget_tokens = 400;
  Make(config);
  const SeqId seq = e_->NewSequence(0);
  ASSERT_TRUE(e_->Prompt(seq, 400, 400).ok());
  EXPECT_TRUE(cache().SetRope(0, TestRope(8)).ok());
  EXPECT_TRUE(cache().SetRope(0, TestRope(16)).ok());
  ASSERT_TRUE(e_->Decode(seq, 1).ok());
  ASSERT_GT(cache().Stats().tokens.packed, 0u);
  EXPECT_EQ(cache().SetRope(0, TestRope(8)).code(), StatusCode::kFailedPrecondition);
  EXPECT_TRUE(cache().SetRope(0, TestRope(16)).ok());
}

}  // namespace
}  // namespace qevict
