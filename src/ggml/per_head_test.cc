// per_head: every kv head is a layer of its own in the KvCache and keeps windows of its own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ggml/testing/held.h"
#include "ggml/testing/state.h"

namespace qevict::plugin::testing {
namespace {

CacheSpec TwoHeads() {
  CacheSpec spec;
  spec.n_cells = 512;
  spec.layers.resize(2);
  spec.layers[0].n_kv_heads = 2;
  spec.layers[0].n_gqa = 3;
  spec.layers[0].sinks = true;
  spec.layers[1].n_kv_heads = 3;
  spec.layers[1].n_gqa = 1;
  return spec;
}

TEST(PerHeadTest, FullBudgetIsExact) {
  Twin twin(TwoHeads(), "preset=full,per_head=true");
  ASSERT_TRUE(twin.ours.ok());
  ExpectExact(twin.Step(TokensOf(0, 0, 100)), "prompt");
  ExpectExact(twin.Step(TokensOf(0, 100, 1)), "decode");
  EXPECT_EQ(twin.ours.Rows(0, true, 0), twin.cpu.Rows(0, true, 0));
  EXPECT_EQ(twin.ours.Rows(1, false, 0), twin.cpu.Rows(1, false, 0));
}

TEST(PerHeadTest, AttentionIsWhatIsHeld) {
  Twin twin(TwoHeads(), "preset=qevict,budget=25%,per_head=true,recents=16");
  ASSERT_TRUE(twin.ours.ok());
  ExpectHeld(RunHeld(twin, TokensOf(0, 0, 300)), "prompt");
  for (int32_t pos = 300; pos < 330; ++pos) {
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "decode");
  }
  EXPECT_GT(twin.ours.stats().evicted_tokens, 0u);
}

// Heads arrive as columns of the same rows, and rows in slices.
TEST(PerHeadTest, StateSurvives) {
  for (const size_t slice : {0u, 1000u, 77u}) {
    Twin twin(TwoHeads(), "preset=qevict,budget=30%,per_head=true,recents=16,check=1");
    RunHeld(twin, TokensOf(0, 0, 250), false);
    for (int32_t pos = 250; pos < 270; ++pos) RunHeld(twin, TokensOf(0, pos, 1), false);
    std::vector<HeldRows> before;
    for (uint32_t part = 0; part < 2; ++part) before.push_back(ReadHeld(twin.ours, 0, 0, part));
    for (uint32_t part = 0; part < 3; ++part) before.push_back(ReadHeld(twin.ours, 1, 0, part));
    const SavedState saved = Save(twin.ours, 0, 0, 270, slice);
    twin.ours.Clear();
    Restore(twin.ours, 0, 0, saved, slice);
    twin.ours.cache()->FinishRestore();
    EXPECT_THAT(twin.ours.cache()->Validate(), ::testing::IsEmpty());
    for (uint32_t i = 0; i < 5; ++i) {
      const HeldRows after = ReadHeld(twin.ours, i < 2 ? 0 : 1, 0, i < 2 ? i : i - 2);
      EXPECT_EQ(after.n_packed, before[i].n_packed) << "slices of " << slice << ", part " << i;
      EXPECT_EQ(after.rows.k, before[i].rows.k) << "slices of " << slice << ", part " << i;
      EXPECT_EQ(after.rows.v, before[i].rows.v) << "slices of " << slice << ", part " << i;
    }
    for (int32_t pos = 270; pos < 290; ++pos) {
      ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "decode after a restore");
    }
  }
}

// Queries of the first kv head look at tokens 160...199, those of the second at 220...259.
TEST(PerHeadTest, HeadsKeepWhatTheyLookAt) {
  CacheSpec spec = TwoHeads();
  spec.layers.resize(1);
  spec.layers[0].rope.mode = kNoRope;
  Twin twin(spec, "preset=qevict,budget=25%,per_head=true,recents=16,init_rows=0");
  int32_t pos = 0;
  for (const uint32_t n : {300u, 1u}) {
    StepInput in = twin.Input(TokensOf(0, pos, n));
    LayerRows& rows = in.rows[0];
    std::fill(rows.q.begin(), rows.q.end(), 1.0f);
    for (size_t i = 0; i < rows.k.size(); ++i) {
      const size_t token = static_cast<size_t>(pos) + i / 128, head = i / 64 % 2;
      const bool liked = head == 0 ? token / 40 == 4 : token >= 220 && token < 260;
      rows.k[i] = (liked ? 0.5f : 0.0f) + 0.01f * rows.k[i];
    }
    ASSERT_EQ(twin.ours.Run(in).status, GGML_STATUS_SUCCESS);
    pos += static_cast<int32_t>(n);
  }
  for (uint32_t head = 0; head < 2; ++head) {
    const HeldRows held = ReadHeld(twin.ours, 0, 0, head);
    for (uint32_t cell = 160; cell < 200; ++cell) {
      EXPECT_EQ(held.window[cell] != kNone, head == 0) << "head " << head << ", cell " << cell;
    }
    for (uint32_t cell = 224; cell < 256; ++cell) {
      EXPECT_EQ(held.window[cell] != kNone, head == 1) << "head " << head << ", cell " << cell;
    }
  }
}

}  // namespace
}  // namespace qevict::plugin::testing
