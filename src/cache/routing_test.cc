#include <gtest/gtest.h>

#include "cache/test_support.h"

namespace qevict {
namespace {

std::vector<LayerShape> TwoLayers() { return {Shape(2, 32, 32), Shape(2, 32, 32)}; }
constexpr uint64_t kF16Token = 2 * 2 * 2 * 64;  // bytes of one token in both layers

Config SmallConfig(uint32_t tokens) {
  Config config;
  config.budget_fraction = 1.0;
  config.budget_tokens = tokens;
  config.check = true;
  return config;
}

/// Sets scores of one layer by hand: adds mass so that window i of the view gets scores[i].
void AddScores(Engine& e, uint32_t il, SeqId seq, const std::vector<float>& scores) {
  std::vector<kernels::WindowRef> refs;
  std::vector<WindowId> ids;
  e.cache().View(il, seq, refs, ids);
  std::vector<float> mass(2 * ids.size());
  for (size_t i = 0; i < ids.size() && i < scores.size(); ++i) mass[i] = 2.0f * scores[i];
  e.cache().AddMass(il, ids, mass.data(), ids.size(), 2, 1);
}

uint32_t CountFormat(Engine& e, uint32_t il, SeqId seq, bool full) {
  std::vector<kernels::WindowRef> refs;
  std::vector<WindowId> ids;
  e.cache().View(il, seq, refs, ids);
  uint32_t n = 0;
  for (const kernels::WindowRef& r : refs) n += (r.rung_k == kFullRung) == full;
  return n;
}

TEST(NoteStepTest, EventsComeAtStepZeroAndEveryInterval) {
  Engine e(SmallConfig(300), TwoLayers(), 1, 2048);
  ASSERT_TRUE(e.status.ok()) << e.status.message();
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 400, 400).ok());
  EXPECT_EQ(e.n_due, 0u);
  std::vector<int> due;
  for (int step = 0; step < 20; ++step) {
    const uint64_t before = e.n_due;
    ASSERT_TRUE(e.Decode(seq, 1).ok());
    if (e.n_due > before) due.push_back(step);
  }
  EXPECT_EQ(due, (std::vector<int>{0, 8, 16}));
}

TEST(NoteStepTest, SpeculationCountsItsRowsAsSteps) {
  Config config = SmallConfig(300);
  config.first_event = 3;
  Engine e(config, TwoLayers(), 1, 2048);
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 100, 100).ok());
  EXPECT_FALSE(e.cache().NoteStep(seq, 1, true));   // step 0
  EXPECT_TRUE(e.cache().NoteStep(seq, 4, false));   // 1...4 crosses 3
  EXPECT_FALSE(e.cache().NoteStep(seq, 5, false));  // 5...9
  EXPECT_TRUE(e.cache().NoteStep(seq, 3, false));   // 10...12 crosses 11
  EXPECT_FALSE(e.cache().NoteStep(seq, 65, false)) << "a new prompt chunk is no decode step";
}

TEST(NoteStepTest, FullPresetNeverRoutes) {
  Config config = SmallConfig(64);
  config.preset = Preset::kFull;
  Engine e(config, TwoLayers(), 1, 2048);
  ASSERT_TRUE(e.status.ok()) << e.status.message();
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 400, 100).ok());
  ASSERT_TRUE(e.Decode(seq, 50).ok());
  ASSERT_TRUE(e.cache().RouteAll(seq, 8, e.pool()).ok());
  EXPECT_EQ(e.n_due, 0u);
  EXPECT_EQ(e.cache().Stats().tokens.full, 450u * 2);
  EXPECT_EQ(e.cache().Stats().events, 0u);
}

TEST(RouteTest, NothingIsPackedWhileEverythingFits) {
  Engine e(SmallConfig(600), TwoLayers(), 1, 2048);
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 400, 100).ok());
  ASSERT_TRUE(e.Decode(seq, 40).ok());
  EXPECT_EQ(e.cache().Stats().tokens.full, 440u * 2);
  EXPECT_EQ(e.cache().Stats().demotions, 0u);
}

TEST(RouteTest, SinksAndRecentsStayInFullPrecision) {
  for (const LocalMode mode : {LocalMode::kAligned, LocalMode::kWindows}) {
    Config config = SmallConfig(120);
    config.local_mode = mode;
    Engine e(config, TwoLayers(), 1, 2048);
    const SeqId seq = e.NewSequence(0);
    ASSERT_TRUE(e.Prompt(seq, 500, 500).ok());
    e.masses = false;
    for (int step = 0; step < 60; ++step) {
      ASSERT_TRUE(e.Decode(seq, 1).ok());
      // Positions of the last 32 tokens at the last event, and the first five.
      const uint32_t at_event = 500 + static_cast<uint32_t>(step / 8) * 8;
      const uint32_t n_recent = mode == LocalMode::kAligned ? 32 : 25;
      for (uint32_t pos = 0; pos <= 500u + static_cast<uint32_t>(step); ++pos) {
        if (pos >= 5 && pos < at_event - n_recent) continue;
        bool packed = true;
        const TokenRef ref = e.cache().lookup(0, pos);
        ASSERT_NE(ref.window, kNone) << "step " << step << " position " << pos;
        ASSERT_FALSE(e.Read(1, ref, true, &packed).empty());
        ASSERT_FALSE(packed) << "step " << step << " position " << pos;
      }
    }
    EXPECT_GT(e.cache().Stats().evictions, 0u);
  }
}

// Events plan the due sequence beside what others were given, and the budget holds all the same.
TEST(RouteTest, SequencesThatDecodeTogetherShareTheBudgetEvenly) {
  Config config = SmallConfig(800);
  config.check = true;
  Engine e(config, TwoLayers(), 1, 8192);
  std::vector<SeqId> ids;
  for (int i = 0; i < 6; ++i) {
    ids.push_back(e.NewSequence(0));
    ASSERT_TRUE(e.Prompt(ids.back(), 300, 100).ok());
  }
  for (int step = 0; step < 60; ++step) {
    for (const SeqId seq : ids) ASSERT_TRUE(e.Decode(seq, 1).ok()) << step;
    ASSERT_LE(e.cache().Stats().bytes.total(), e.cache().Stats().budget_bytes) << step;
  }
  uint32_t least = UINT32_MAX, most = 0;
  for (const SeqId seq : ids) {
    const uint32_t n = CountFormat(e, 1, seq, true) + CountFormat(e, 1, seq, false);
    least = std::min(least, n);
    most = std::max(most, n);
  }
  EXPECT_GE(least * 10, most * 7);
  EXPECT_GT(e.cache().Stats().bytes.total() * 100, e.cache().Stats().budget_bytes * 85);
}

// A draft's rows may all be taken back by the next step: the tokens before them stay recents.
TEST(RouteTest, RejectedDraftsTakeNoRecents) {
  for (const uint32_t n_drafts : {0u, 16u, 31u, 63u}) {
    Engine e(SmallConfig(400), TwoLayers(), 1, 4096);
    const SeqId seq = e.NewSequence(0);
    ASSERT_TRUE(e.Prompt(seq, 1024, 512).ok());
    ASSERT_TRUE(e.Decode(seq, 1).ok());
    for (int step = 0; step < 20; ++step) {
      const uint32_t n = 1 + n_drafts;
      if (e.cache().NoteStep(seq, n, false)) {
        ASSERT_TRUE(e.cache().RouteAll(seq, std::max(n, 8u), e.pool()).ok());
      }
      for (uint32_t back = 1; back <= 25; ++back) {
        const TokenRef ref = e.cache().lookup(0, e.next_cell(0) - back);
        bool packed = true;
        ASSERT_NE(ref.window, kNone) << n_drafts << ", step " << step << ", " << back;
        ASSERT_FALSE(e.Read(0, ref, true, &packed).empty());
        ASSERT_FALSE(packed) << n_drafts << ", step " << step << ", " << back;
      }
      ASSERT_TRUE(e.Store(e.NextTokens(seq, n)).ok());
      e.next_pos(seq) -= static_cast<int32_t>(n_drafts);
      e.next_cell(0) -= n_drafts;
    }
  }
}

/// A sequence with 64 history windows whose scores rise with their age, after its first event.
struct Promoted {
  explicit Promoted(Promotion promotion, bool charge = true) {
    Config config = SmallConfig(200);
    config.promotion = promotion;
    config.charge_dormant = charge;
    config.q_permille = 600;
    e = std::make_unique<Engine>(config, TwoLayers(), 1, 2048);
    e->masses = false;
    e->UseRope(TestRope(32));
    seq = e->NewSequence(0);
    EXPECT_TRUE(e->Prompt(seq, 517, 517).ok());
    AddScores(*e, 0, seq, Ramp(66, 1.0f));
    AddScores(*e, 1, seq, Ramp(66, 1.0f));
    EXPECT_TRUE(e->Decode(seq, 8).ok());
  }
  static std::vector<float> Ramp(int n, float factor) {
    std::vector<float> out;
    for (int i = 0; i < n; ++i) out.push_back(factor * static_cast<float>(n - i));
    return out;
  }
  /// Gives every packed window a high score and routes.
  void Reverse(float by) {
    for (uint32_t il = 0; il < 2; ++il) {
      std::vector<kernels::WindowRef> refs;
      std::vector<WindowId> ids;
      e->cache().View(il, seq, refs, ids);
      std::vector<float> scores;
      for (const kernels::WindowRef& r : refs) {
        scores.push_back(r.rung_k == kFullRung ? 0.0f : by);
      }
      AddScores(*e, il, seq, scores);
    }
    ASSERT_TRUE(e->Decode(seq, 8).ok());
    e->ExpectSound();
  }
  std::unique_ptr<Engine> e;
  SeqId seq = 0;
};

TEST(PromotionTest, CodesComeBackAndStayInTheLedger) {
  Promoted p(Promotion::kCodes);
  const CacheStats first = p.e->cache().Stats();
  EXPECT_GT(first.first_encodings, 0u);
  EXPECT_EQ(first.promotions, 0u);
  EXPECT_EQ(first.bytes.dormant, 0u);
  p.Reverse(1000.0f);
  const CacheStats second = p.e->cache().Stats();
  EXPECT_GT(second.promotions, 0u);
  EXPECT_GT(second.bytes.dormant, 0u);
  EXPECT_LE(second.bytes.total(), 200 * kF16Token);
  p.Reverse(5000.0f);
  const CacheStats third = p.e->cache().Stats();
  EXPECT_GT(third.demotions, second.demotions);
  EXPECT_LT(third.first_encodings - second.first_encodings, third.demotions - second.demotions)
      << "windows with codes were encoded again";
}

TEST(PromotionTest, APromotedWindowReadsWhatItsCodesRead) {
  Promoted p(Promotion::kCodes);
  std::map<uint32_t, std::vector<float>> packed_rows;
  for (uint32_t cell = 0; cell < 525; ++cell) {
    const TokenRef ref = p.e->cache().lookup(0, cell);
    bool packed = false;
    if (ref.window == kNone) continue;
    std::vector<float> row = p.e->Read(0, ref, true, &packed);
    if (packed) packed_rows[cell] = std::move(row);
  }
  p.Reverse(1000.0f);
  int n = 0;
  for (const auto& [cell, row] : packed_rows) {
    const TokenRef ref = p.e->cache().lookup(0, cell);
    bool packed = true;
    if (ref.window == kNone) continue;
    const std::vector<float> now = p.e->Read(0, ref, true, &packed);
    if (packed || now.empty()) continue;
    ++n;
    for (size_t i = 0; i < row.size(); ++i) {
      ASSERT_EQ(now[i], ToF32(FromF32(row[i], Elem::kF16), Elem::kF16)) << cell << " " << i;
    }
  }
  EXPECT_GT(n, 0);
}

TEST(PromotionTest, PinnedWindowsRankAsFullButStayPacked) {
  Promoted p(Promotion::kPinned);
  const uint32_t packed_before = CountFormat(*p.e, 0, p.seq, false);
  p.Reverse(1000.0f);
  const CacheStats stats = p.e->cache().Stats();
  EXPECT_GT(stats.promotions, 0u);
  EXPECT_EQ(stats.bytes.dormant, 0u);
  EXPECT_GE(CountFormat(*p.e, 0, p.seq, false), packed_before);
}

TEST(PromotionTest, NoneKeepsPackedWindowsPacked) {
  Promoted p(Promotion::kNone);
  p.Reverse(1000.0f);
  EXPECT_EQ(p.e->cache().Stats().promotions, 0u);
  EXPECT_EQ(p.e->cache().Stats().bytes.dormant, 0u);
}

TEST(PromotionTest, UnchargedDormantCodesComeOnTopOfTheBudget) {
  Promoted p(Promotion::kCodes, false);
  p.Reverse(1000.0f);
  const CacheStats stats = p.e->cache().Stats();
  EXPECT_GT(stats.bytes.dormant, 0u);
  EXPECT_LE(stats.bytes.total() - stats.bytes.dormant, 200 * kF16Token);
}

TEST(RouteTest, StreamsOfDifferentLengthsKeepTheirOwnBudgets) {
  Config config = SmallConfig(160);
  Engine e(config, TwoLayers(), 3, 1024);
  const SeqId a = e.NewSequence(0), b = e.NewSequence(1), c = e.NewSequence(2);
  ASSERT_TRUE(e.Prompt(a, 700, 100).ok());
  ASSERT_TRUE(e.Decode(a, 20).ok());
  ASSERT_TRUE(e.Prompt(b, 90, 90).ok());
  ASSERT_TRUE(e.Prompt(c, 400, 100).ok());
  EXPECT_EQ(e.cache().Stats().budget_bytes, 0u) << "two prompts are not routed yet";
  for (int i = 0; i < 40; ++i) {
    for (const SeqId seq : {a, b, c}) ASSERT_TRUE(e.Decode(seq, 1).ok());
  }
  const CacheStats stats = e.cache().Stats();
  EXPECT_EQ(stats.budget_bytes, 3 * 160 * kF16Token);
  EXPECT_LE(stats.bytes.total(), stats.budget_bytes);
  EXPECT_EQ(CountFormat(e, 0, b, false), 0u) << "the short one fits in full precision";
  EXPECT_GT(CountFormat(e, 0, a, false), 0u);
}

TEST(RouteTest, AbsoluteBudgetIsSharedByStreams) {
  Config config;
  config.budget_bytes = 300 * kF16Token;
  config.check = true;
  Engine e(config, TwoLayers(), 2, 1024);
  const SeqId a = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(a, 900, 60).ok());
  ASSERT_TRUE(e.Decode(a, 10).ok());
  const uint64_t before = CountFormat(e, 0, a, true) + CountFormat(e, 0, a, false);
  const SeqId b = e.NewSequence(1);
  const Status prompt = e.Prompt(b, 900, 60);
  ASSERT_TRUE(prompt.ok()) << prompt.message();
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(e.Decode(a, 1).ok());
    ASSERT_TRUE(e.Decode(b, 1).ok());
    ASSERT_LE(e.cache().Stats().bytes.total(), config.budget_bytes);
  }
  EXPECT_LT(CountFormat(e, 0, a, true) + CountFormat(e, 0, a, false), before);
}

TEST(RouteTest, IdleSequencesGiveUpTheirRecentsFirst) {
  Config config;
  config.budget_bytes = 150 * kF16Token;
  config.check = true;
  Engine e(config, TwoLayers(), 4, 1024);
  ASSERT_TRUE(e.status.ok()) << e.status.message();
  for (uint32_t stream = 0; stream < 4; ++stream) {
    const SeqId seq = e.NewSequence(stream);
    const Status prompt = e.Prompt(seq, 60, 16);
    ASSERT_TRUE(prompt.ok()) << stream << ": " << prompt.message();
    ASSERT_TRUE(e.Decode(seq, 4).ok()) << stream;
  }
  const SeqId idle = e.cache().Sequences(0)[0], busy = e.cache().Sequences(3)[0];
  EXPECT_LT(CountFormat(e, 0, idle, true), CountFormat(e, 0, busy, true));
  EXPECT_GE(CountFormat(e, 0, busy, true), 1u + 4u);
  EXPECT_LE(e.cache().Stats().bytes.total(), config.budget_bytes);
}

// Sinks, recents and reserve may exceed the budget; an event then protects less and does not fail.
TEST(RouteTest, WhatIsProtectedShrinksWhenTheBudgetCannotHoldIt) {
  Config config = SmallConfig(150);
  Engine e(config, TwoLayers(), 1, 4096);
  ASSERT_TRUE(e.status.ok()) << e.status.message();
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 4000, 1000).ok());
  const Status status = e.cache().RouteAll(seq, 400, e.pool());
  ASSERT_TRUE(status.ok()) << status.message();
  e.ExpectSound();
  const Status decoded = e.Decode(seq, 100);
  ASSERT_TRUE(decoded.ok()) << decoded.message();
  e.ExpectSound();
}

TEST(RouteTest, SetBudgetWorksBeforeTheFirstEventOnly) {
  Config config;
  config.budget_fraction = 0.2;
  Engine e(config, TwoLayers(), 1, 2048);
  const SeqId seq = e.NewSequence(0);
  EXPECT_EQ(e.cache().SetBudget(100, e.cache().config().budget_fraction).code(),
            StatusCode::kInvalidArgument);
  ASSERT_TRUE(e.cache().SetBudget(1000, e.cache().config().budget_fraction).ok());
  ASSERT_TRUE(e.Prompt(seq, 900, 300).ok());
  ASSERT_TRUE(e.Decode(seq, 1).ok());
  EXPECT_EQ(e.cache().Stats().budget_bytes, 200 * kF16Token);
  EXPECT_EQ(e.cache().SetBudget(2000, e.cache().config().budget_fraction).code(),
            StatusCode::kFailedPrecondition);
}

TEST(RouteTest, StreamingKeepsTheNewest) {
  Config config = SmallConfig(120);
  config.preset = Preset::kStreaming;
  Engine e(config, TwoLayers(), 1, 1024);
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 600, 100).ok());
  ASSERT_TRUE(e.Decode(seq, 8).ok());
  EXPECT_EQ(e.cache().Stats().tokens.packed, 0u);
  const std::span<const WindowId> windows = e.cache().windows(seq);
  EXPECT_EQ(e.cache().info(windows[0]).pos0, 0);
  EXPECT_GT(e.cache().info(windows[1]).pos0, 490);
}

TEST(RouteTest, KeyNormScoresRankByTheKeys) {
  Config config = SmallConfig(150);
  config.score = ScoreKind::kKeyNorm;
  Engine e(config, TwoLayers(), 1, 1024);
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 500, 100).ok());
  ASSERT_TRUE(e.Decode(seq, 30).ok());
  e.ExpectSound();
  EXPECT_GT(e.cache().Stats().demotions, 0u);
  // They are the keys' own: another prompt chunk changes none of them.
  std::vector<float> before, after;
  const std::vector<WindowId> packed(e.cache().windows(seq).begin(), e.cache().windows(seq).end());
  for (const WindowId id : packed) before.push_back(e.cache().score(0, id));
  e.cache().NoteStep(seq, 100, false);
  for (const WindowId id : packed) after.push_back(e.cache().score(0, id));
  EXPECT_EQ(before, after);
  EXPECT_NE(std::count(before.begin(), before.end(), 0.0f), static_cast<long>(before.size()));
}

TEST(RouteTest, ThreadCountDoesNotChangeThePlan) {
  std::vector<std::vector<float>> rows[2];
  for (int run = 0; run < 2; ++run) {
    Engine e(SmallConfig(150), TwoLayers(), 1, 1024);
    if (run == 1) e.UsePool(3);
    e.UseRope(TestRope(32));
    const SeqId seq = e.NewSequence(0);
    ASSERT_TRUE(e.Prompt(seq, 500, 100).ok());
    ASSERT_TRUE(e.Decode(seq, 30).ok());
    for (uint32_t cell = 0; cell < 530; ++cell) {
      const TokenRef ref = e.cache().lookup(0, cell);
      rows[run].push_back(ref.window == kNone ? std::vector<float>{} : e.Read(1, ref, true));
    }
  }
  EXPECT_EQ(rows[0], rows[1]);
}

TEST(RouteTest, EventScoresCountOnlyStepsWithAnEvent) {
  Config config = SmallConfig(300);
  config.event_scores = true;
  Engine e(config, TwoLayers(), 1, 1024);
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 100, 100).ok());
  e.masses = false;
  ASSERT_TRUE(e.Decode(seq, 2).ok());  // step 0 is an event, step 1 is not
  AddScores(e, 0, seq, {1.0f, 1.0f});
  const WindowId second = e.cache().windows(seq)[1];
  EXPECT_EQ(e.cache().score(0, second), 0.0f);
  ASSERT_TRUE(e.Decode(seq, 7).ok());  // step 8
  AddScores(e, 0, seq, {1.0f, 1.0f});
  EXPECT_EQ(e.cache().score(0, second), 8.0f);
}

// A second turn adds to what the first one and its answer have earned.
TEST(NoteStepTest, ASecondPromptErasesNothing) {
  for (const uint32_t rows : {40u, 64u, 65u, 512u}) {
    Engine e(SmallConfig(300), TwoLayers(), 1, 2048);
    e.masses = false;
    const SeqId seq = e.NewSequence(0);
    ASSERT_TRUE(e.Prompt(seq, 100, 100).ok());
    AddScores(e, 0, seq, {1.0f, 1.0f, 1.0f});
    ASSERT_TRUE(e.Decode(seq, 1).ok());
    AddScores(e, 0, seq, {0.0f, 2.0f, 0.0f});
    const WindowId second = e.cache().windows(seq)[1], third = e.cache().windows(seq)[2];
    (void)e.cache().NoteStep(seq, rows, StepKind::kPrompt);
    EXPECT_EQ(e.cache().score(0, second), 3.0f) << rows;
    EXPECT_EQ(e.cache().score(0, third), 1.0f) << rows;
    // The prompt's own chunks replace one another; what came before it stays.
    AddScores(e, 0, seq, {0.0f, 5.0f, 0.0f});
    EXPECT_EQ(e.cache().score(0, second), 8.0f) << rows;
    (void)e.cache().NoteStep(seq, 64, StepKind::kPrompt);
    EXPECT_EQ(e.cache().score(0, second), 3.0f) << rows;
  }
}

TEST(NoteStepTest, LongDraftsAreNoPrompts) {
  Config config = SmallConfig(300);
  config.score = ScoreKind::kEma;
  Engine e(config, TwoLayers(), 1, 2048);
  e.masses = false;
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 100, 100).ok());
  ASSERT_TRUE(e.Decode(seq, 1).ok());
  AddScores(e, 0, seq, {1.0f, 1.0f});
  const WindowId second = e.cache().windows(seq)[1];
  const float before = e.cache().score(0, second);
  EXPECT_TRUE(e.cache().NoteStep(seq, 64, false)) << "64 steps cross an event";
  EXPECT_EQ(e.cache().score(0, second), before);
}

TEST(NoteStepTest, InitRowsKeepWhatTheLastPromptRowsLeft) {
  Config config = SmallConfig(300);
  config.init_rows = 40;
  Engine e(config, TwoLayers(), 1, 1024);
  e.masses = false;
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 100, 100).ok());
  AddScores(e, 0, seq, {1.0f, 1.0f});
  const WindowId second = e.cache().windows(seq)[1];
  (void)e.cache().NoteStep(seq, 10, false);
  EXPECT_EQ(e.cache().score(0, second), 0.75f);  // 30 of the last 40 rows came before this chunk
  (void)e.cache().NoteStep(seq, 40, false);
  EXPECT_EQ(e.cache().score(0, second), 0.0f);
}

}  // namespace
}  // namespace qevict
