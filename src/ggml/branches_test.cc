// What hosts do with sequences that cells, masks and positions alone must tell: drafts that are
// taken back, branches, slots that read new prompts, windows that slide away. Rows attend to what
// their masks show whatever is inferred; here it is counted, too: sequences, first tokens that are
// kept for good, and bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ggml/cache_group.h"
#include "ggml/testing/held.h"
#include "ggml/testing/twin.h"

namespace qevict::plugin::testing {
namespace {

using ::testing::SizeIs;

CacheSpec TwoLayers(uint32_t n_cells, uint32_t n_streams = 1) {
  CacheSpec spec;
  spec.layers.resize(2);
  spec.n_cells = n_cells;
  spec.n_streams = n_streams;
  return spec;
}

/// Numbers that look random, the same in every run.
class Dice {
 public:
  explicit Dice(uint32_t seed) : state_(seed) {}
  uint32_t Below(uint32_t n) {
    state_ = state_ * 1664525u + 1013904223u;
    return (state_ >> 16) % n;
  }

 private:
  uint32_t state_;
};

/// Runs a step of our engine alone, which must succeed and leave the cache sound.
void RunStep(Twin& twin, const std::vector<Token>& batch) {
  const StepInput in = twin.Input(batch);
  ASSERT_EQ(twin.ours.Run(in).status, GGML_STATUS_SUCCESS) << qevict_last_error();
  const std::vector<std::string> violations = twin.ours.cache()->Validate();
  ASSERT_TRUE(violations.empty()) << violations.front();
}

uint32_t SinkTokens(const KvCache& cache) {
  uint32_t n = 0;
  for (const SeqId seq : cache.Sequences(0)) {
    for (const WindowId w : cache.windows(seq)) {
      n += cache.info(w).sink ? cache.info(w).n_tokens : 0;
    }
  }
  return n;
}

uint64_t HeldBytes(const Engine& engine) {
  const qevict_stats s = engine.stats();
  return s.full_bytes + s.packed_bytes + s.dormant_bytes + s.tables_bytes + s.slack_bytes;
}

/// Tokens per layer that are held in full precision.
uint64_t FullTokens(const Engine& engine) { return engine.stats().full_tokens / 2; }

struct Speculation {
  std::string config;
  uint32_t n_slots;
  uint32_t n_drafts;
  bool lone_row_first;  ///< one step of a single row before the first draft
};

class SpeculationTest : public ::testing::TestWithParam<Speculation> {};

// Every slot brings a draft in every step, and some of it is taken back: there are as many
// sequences as slots, no first tokens but theirs are kept for good, and the budget holds.
TEST_P(SpeculationTest, KeepsSequencesSinksAndBytes) {
  const Speculation& p = GetParam();
  Twin twin(TwoLayers(2048), p.config);
  std::vector<int32_t> pos(p.n_slots, 200);
  for (uint32_t s = 0; s < p.n_slots; ++s) RunStep(twin, TokensOf(s, 0, 200));
  std::vector<Token> batch;
  for (uint32_t s = 0; s < p.n_slots && p.lone_row_first; ++s) batch.push_back({s, pos[s]++});
  if (!batch.empty()) RunStep(twin, batch);
  Dice dice(12345);
  for (int step = 0; step < 60; ++step) {
    batch.clear();
    for (uint32_t s = 0; s < p.n_slots; ++s) {
      for (uint32_t i = 0; i <= p.n_drafts; ++i) {
        batch.push_back({s, pos[s] + static_cast<int32_t>(i)});
      }
    }
    RunStep(twin, batch);
    if (HasFatalFailure()) return;
    for (uint32_t s = 0; s < p.n_slots; ++s) {
      pos[s] += 1 + static_cast<int32_t>(dice.Below(std::min(p.n_drafts + 1, 5u)));
      twin.cells.Remove(s, pos[s]);
    }
    if (step < 10) continue;
    EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(p.n_slots)) << "step " << step;
    EXPECT_EQ(SinkTokens(*twin.ours.cache()), 5 * p.n_slots) << "step " << step;
    if (p.config.find("full") != std::string::npos) continue;
    EXPECT_GT(twin.ours.stats().budget_bytes, 0u) << "step " << step;
    EXPECT_LE(HeldBytes(twin.ours), twin.ours.stats().budget_bytes) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Slots, SpeculationTest,
                         ::testing::Values(Speculation{"preset=qevict,budget=15%", 1, 4, true},
                                           Speculation{"preset=qevict,budget=15%", 1, 4, false},
                                           Speculation{"preset=qevict,budget=15%", 1, 48, false},
                                           Speculation{"preset=qevict,budget=15%", 1, 63, true},
                                           Speculation{"preset=qevict,budget=20%", 2, 4, true},
                                           Speculation{"preset=qevict,budget=20%", 2, 4, false},
                                           Speculation{"preset=qevict,budget=20%,prefill=bounded",
                                                       2, 4, true},
                                           Speculation{"preset=qevict,budget=30%", 4, 4, false},
                                           Speculation{"preset=qevict,budget=30%", 4, 4, true},
                                           Speculation{"preset=full", 2, 4, true}));

// Slots chat in turns; a chat template that tokenizes the end of the last answer anew takes some
// tokens back before each turn. The other slots go on beside its prompt.
TEST(ChatTest, TokensTakenBackBeforeATurnBeginNoSequence) {
  constexpr uint32_t kSlots = 4;
  Twin twin(TwoLayers(4096), "preset=qevict,budget=10%");
  std::vector<int32_t> pos(kSlots, 0);
  Dice dice(7);
  for (int turn = 0; turn < 6; ++turn) {
    for (uint32_t s = 0; s < kSlots; ++s) {
      if (pos[s] > 0) {
        pos[s] -= static_cast<int32_t>(dice.Below(5));
        twin.cells.Remove(s, pos[s]);
      }
      std::vector<Token> batch;
      for (uint32_t o = 0; o < kSlots; ++o) {
        if (o != s && pos[o] > 0) batch.push_back({o, pos[o]++});
      }
      for (int i = 0; i < 24; ++i) batch.push_back({s, pos[s]++});
      RunStep(twin, batch);
      for (int step = 0; step < 12; ++step) {
        batch.clear();
        for (uint32_t o = 0; o < kSlots; ++o) {
          if (pos[o] > 0) batch.push_back({o, pos[o]++});
        }
        RunStep(twin, batch);
        if (HasFatalFailure()) return;
      }
    }
  }
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(kSlots));
  EXPECT_EQ(SinkTokens(*twin.ours.cache()), 5 * kSlots);
  EXPECT_GT(twin.ours.stats().budget_bytes, 0u);
  EXPECT_LE(HeldBytes(twin.ours), twin.ours.stats().budget_bytes);
}

// Lookahead decoding: one token of a batch belongs to all sequences, and each goes on behind it.
TEST(BranchTest, OneTokenOfABatchBelongsToManySequences) {
  for (const uint32_t winner : {0u, 1u, 2u}) {
    Twin twin(TwoLayers(512));
    ExpectExact(twin.Step(TokensOf(0, 0, 30)), "prompt");
    int32_t pos = 30;
    for (int round = 0; round < 6; ++round) {
      twin.cells.Copy(0, 1);
      twin.cells.Copy(0, 2);
      StepInput in =
          twin.Input(Join({TokensOf(0, pos, 4), TokensOf(1, pos + 1, 3), TokensOf(2, pos + 1, 3)}));
      // The first token is that of all three, as llama_batch can say.
      twin.cells.Copy(0, 1, pos, pos + 1);
      twin.cells.Copy(0, 2, pos, pos + 1);
      for (uint32_t row = 4; row < in.n_tokens(); ++row) {
        for (auto& mask : in.masks) {
          mask[size_t{row} * in.n_kv + static_cast<size_t>(in.cells[0])] = 0;
        }
      }
      ExpectExact(twin.RunInput(in), "three branches behind one token");
      for (uint32_t s = 0; s < 3; ++s) {
        if (s != winner) twin.cells.Remove(s, 0);
      }
      if (winner != 0) twin.cells.Copy(winner, 0);
      if (winner != 0) twin.cells.Remove(winner, 0);
      pos += 1 + round % 3;
      twin.cells.Remove(0, pos);
      ExpectExact(twin.Step(TokensOf(0, pos, 1)), "the branch that was taken");
      ++pos;
    }
    EXPECT_EQ(SinkTokens(*twin.ours.cache()), 5u);
    EXPECT_LE(twin.ours.cache()->Sequences(0).size(), 5u) << "ancestors are merged";
  }
}

// The same where every branch starts in cells that earlier branches have left.
TEST(BranchTest, BranchesInCellsOfEarlierOnes) {
  Twin twin(TwoLayers(512));
  ExpectExact(twin.Step(TokensOf(0, 0, 1)), "first token");
  for (uint32_t seq = 1; seq < 4; ++seq) twin.cells.Copy(0, seq);
  StepInput in = twin.Input(
      Join({TokensOf(0, 1, 1), TokensOf(1, 2, 3), TokensOf(2, 2, 3), TokensOf(3, 2, 3)}));
  for (uint32_t seq = 1; seq < 4; ++seq) twin.cells.Copy(0, seq, 1, 2);
  for (uint32_t row = 1; row < in.n_tokens(); ++row) {
    for (auto& mask : in.masks) {
      mask[size_t{row} * in.n_kv + static_cast<size_t>(in.cells[0])] = 0;
    }
  }
  ExpectExact(twin.RunInput(in), "three branches behind one token");
  for (const uint32_t seq : {0u, 1u, 3u}) twin.cells.Remove(seq, 0);
  twin.cells.Copy(2, 0);
  twin.cells.Remove(2, 0);
  twin.cells.Remove(0, 4);
  for (uint32_t seq = 1; seq < 4; ++seq) twin.cells.Copy(0, seq);
  ExpectExact(
      twin.Step(Join({TokensOf(0, 4, 2), TokensOf(1, 4, 2), TokensOf(2, 4, 2), TokensOf(3, 4, 2)})),
      "four branches of the one that was taken");
}

// Two branches in turns, step by step: nothing of either is lost, and both keep their recents.
TEST(BranchTest, BranchesThatTakeTurns) {
  Twin twin(TwoLayers(1024), "preset=qevict,budget=30%");
  RunStep(twin, TokensOf(0, 0, 200));
  RunStep(twin, TokensOf(0, 200, 1));
  twin.cells.Copy(0, 1);
  for (int32_t pos = 201; pos < 260; ++pos) {
    for (const uint32_t seq : {0u, 1u}) {
      RunStep(twin, TokensOf(seq, pos, 1));
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(2));
  EXPECT_EQ(SinkTokens(*twin.ours.cache()), 5u);
  const HeldRows held = ReadHeld(twin.ours, 0, 0);
  for (uint32_t cell = 0; cell < 1024; ++cell) {
    if (!twin.cells.in_use(0, cell) || twin.cells.pos(0, cell) < 236) continue;
    EXPECT_NE(held.window[cell], kNone) << "position " << twin.cells.pos(0, cell);
  }
}

// A stream for every slot: what a slot held before is gone when it reads another prompt, which is
// then read like its first one.
TEST(StreamTest, ASecondPromptIsANewOne) {
  Twin twin(TwoLayers(1024, 2), "preset=qevict,budget=20%");
  std::vector<uint64_t> full;
  for (int round = 0; round < 3; ++round) {
    for (int32_t pos = 0; pos < 600; pos += 100) RunStep(twin, TokensOf(0, pos, 100));
    full.push_back(FullTokens(twin.ours));
    for (int32_t pos = 600; pos < 620; ++pos) RunStep(twin, TokensOf(0, pos, 1));
    if (HasFatalFailure()) return;
    EXPECT_LE(HeldBytes(twin.ours), twin.ours.stats().budget_bytes);
    twin.cells.Remove(0, 0);
  }
  EXPECT_EQ(full, std::vector<uint64_t>(3, 600)) << "prefill=full holds whole prompts";
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
}

// Without RoPE no position tells; a hole that a context shift has left is filled by new tokens.
TEST(NoPositionsTest, TokensBehindAHoleLive) {
  CacheSpec spec = TwoLayers(512);
  for (LayerSpec& layer : spec.layers) layer.rope.mode = kNoRope;
  Twin twin(spec);
  ExpectExact(twin.Step(TokensOf(0, 0, 40)), "prompt");
  twin.cells.Remove(0, 4, 24);
  twin.cells.Shift(0, 24, 40, -20);
  (void)twin.cells.TakeShifts();
  for (int32_t pos = 20; pos < 50; ++pos) {
    ExpectExact(twin.Step(TokensOf(0, pos, 1)), "after a hole");
  }
  twin.cells.Remove(0, 45);
  ExpectExact(twin.Step(TokensOf(0, 45, 9)), "after a rollback");
  twin.cells.Copy(0, 1);
  ExpectExact(twin.Step({{0, 54}, {1, 54}}), "branches");
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(2));
}

/// Tokens of sequence 0 in layer 0 that the next row sees through a sliding window, and others.
std::pair<uint32_t, uint32_t> SeenAndUnseen(Twin& twin, int32_t pos, int32_t swa) {
  const HeldRows held = ReadHeld(twin.ours, 0, 0);
  std::pair<uint32_t, uint32_t> n;
  for (uint32_t cell = 0; cell < twin.cells.n_cells(); ++cell) {
    if (held.window[cell] == kNone || !twin.cells.in_use(0, cell)) continue;
    ++(pos - twin.cells.pos(0, cell) < swa ? n.first : n.second);
  }
  return n;
}

// What has left a sliding window gives its bytes up before anything that rows can see.
TEST(SlidingWindowTest, WhatNoRowSeesRanksLast) {
  for (const std::string preset : {"qevict", "streaming", "pack"}) {
    Twin twin(TwoLayers(2048), "preset=" + preset + ",budget=10%", {128, false});
    int32_t pos = 0;
    for (; pos < 400; pos += 100) RunStep(twin, TokensOf(0, pos, 100));
    for (; pos < 700; ++pos) RunStep(twin, TokensOf(0, pos, 1));
    if (HasFatalFailure()) return;
    const auto [seen, unseen] = SeenAndUnseen(twin, pos, 128);
    EXPECT_GE(seen, 120u) << preset << ": all of the window is held, but for its oldest edge";
    EXPECT_GT(seen, unseen) << preset;
  }
}

TEST(SlidingWindowTest, ARingHoldsItsWindowFirst) {
  Twin twin(TwoLayers(1024), "preset=qevict,budget=20%", {512, false});
  twin.swa = 512;
  int32_t pos = 0;
  for (; pos < 1000; pos += 100) RunStep(twin, TokensOf(0, pos, 100));
  for (; pos < 1500; ++pos) {
    RunStep(twin, TokensOf(0, pos, 1));
    if (HasFatalFailure()) return;
    if (pos < 1100 || pos % 50 != 0) continue;
    const auto [seen, unseen] = SeenAndUnseen(twin, pos, 512);
    EXPECT_LE(unseen, 16u) << "position " << pos << ": at most what has left since the last event";
    EXPECT_GT(seen, 280u) << "position " << pos;
  }
}

// A prompt's row that is alone in its batch, beside another slot's chunk, is no answer.
TEST(PhaseTest, ALonePromptRowStartsNoDecoding) {
  for (const bool lone : {false, true}) {
    Twin twin(TwoLayers(2048), "preset=qevict,budget=10%");
    int32_t pos = lone ? 1 : 0;
    RunStep(twin, lone ? Join({TokensOf(0, 0, 63), TokensOf(1, 0, 1)}) : TokensOf(0, 0, 63));
    for (int chunk = 0; chunk < 6; ++chunk, pos += 64) RunStep(twin, TokensOf(1, pos, 64));
    if (HasFatalFailure()) return;
    EXPECT_EQ(FullTokens(twin.ours), 63u + static_cast<uint64_t>(pos)) << lone;
    EXPECT_EQ(twin.ours.stats().events, 0u) << lone;
  }
}

TEST(PhaseTest, TheHostsWordOverridesWhatRowsSay) {
  Twin twin(TwoLayers(2048), "preset=qevict,budget=10%");
  ASSERT_EQ(qevict_set_phase(twin.ours.session(), QEVICT_PHASE_DECODE), 0);
  RunStep(twin, TokensOf(0, 0, 20));
  EXPECT_GT(twin.ours.stats().events, 0u);
  ASSERT_EQ(qevict_set_phase(twin.ours.session(), QEVICT_PHASE_PROMPT), 0);
  const uint64_t events = twin.ours.stats().events;
  for (int32_t pos = 20; pos < 60; ++pos) RunStep(twin, TokensOf(0, pos, 1));
  EXPECT_EQ(twin.ours.stats().events, events) << "rows of a prompt, one by one";
}

// A slot's prompt is cancelled half way: its bytes count once the others have gone on without it.
TEST(PhaseTest, ACancelledPromptSuspendsNoBudget) {
  Twin twin(TwoLayers(4096), "preset=qevict,budget=15%");
  for (int32_t pos = 0; pos < 400; pos += 100) RunStep(twin, TokensOf(0, pos, 100));
  int32_t pos = 400;
  for (; pos < 420; ++pos) RunStep(twin, TokensOf(0, pos, 1));
  for (int32_t other = 0; other < 2400; other += 240) {
    RunStep(twin, Join({TokensOf(0, pos++, 1), TokensOf(1, other, 240)}));
    EXPECT_EQ(twin.ours.stats().budget_bytes, 0u) << "a prompt is being read";
  }
  for (int step = 0; step < 20; ++step) RunStep(twin, TokensOf(0, pos++, 1));
  if (HasFatalFailure()) return;
  EXPECT_GT(twin.ours.stats().budget_bytes, 0u);
  EXPECT_LE(HeldBytes(twin.ours), twin.ours.stats().budget_bytes);
}

}  // namespace
}  // namespace qevict::plugin::testing
