// Steps and sequences: what the plug-in infers from cells, masks and positions alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "ggml/testing/twin.h"

namespace qevict::plugin::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

CacheSpec TwoLayers(uint32_t n_cells = 512, uint32_t n_streams = 1) {
  CacheSpec spec;
  spec.layers.resize(2);
  spec.layers[0].n_kv_heads = 1;
  spec.layers[0].n_gqa = spec.layers[1].n_gqa = 2;
  spec.n_cells = n_cells;
  spec.n_streams = n_streams;
  return spec;
}

TEST(SequencesTest, InterleavedOnesAreKeptApart) {
  Twin twin(TwoLayers());
  int32_t pos = 0;
  for (const uint32_t n : {20u, 1u, 1u, 9u, 1u}) {
    ExpectExact(twin.Step(Join({TokensOf(0, pos, n), TokensOf(1, pos, n)})), "two sequences");
    pos += static_cast<int32_t>(n);
  }
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(2));
  EXPECT_THAT(twin.HoldersOf(0), SizeIs(1));
  EXPECT_THAT(twin.HoldersOf(1), SizeIs(1));
  EXPECT_NE(twin.HoldersOf(0), twin.HoldersOf(1));
}

TEST(SequencesTest, EqualPositionsInAlternatingRows) {
  Twin twin(TwoLayers());
  for (int32_t pos = 0; pos < 40; ++pos) {
    twin.Step({{0, pos}, {1, pos}, {2, pos}});
  }
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(3));
  for (uint32_t seq = 0; seq < 3; ++seq) EXPECT_THAT(twin.HoldersOf(seq), SizeIs(1)) << seq;
}

// llama_memory_seq_cp inside a unified cache: cells get a second owner, nothing is copied.
TEST(SequencesTest, SharedPrefix) {
  for (const bool original_first : {true, false}) {
    Twin twin(TwoLayers());
    ExpectExact(twin.Step(TokensOf(0, 0, 45)), "prefix");
    twin.cells.Copy(0, 2);
    const uint32_t first = original_first ? 0 : 2, second = original_first ? 2 : 0;
    ExpectExact(twin.Step(TokensOf(first, 45, 1)), "one branch");
    ExpectExact(twin.Step(TokensOf(second, 45, 1)), "the other branch");
    for (int32_t pos = 46; pos < 76; pos += 10) {
      ExpectExact(twin.Step(Join({TokensOf(0, pos, 10), TokensOf(2, pos, 10)})), "both branches");
    }
    ExpectExact(twin.Step(TokensOf(0, 76, 1)), "one branch again");
    EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(2));
    EXPECT_THAT(twin.HoldersOf(0), SizeIs(1));
    EXPECT_THAT(twin.HoldersOf(2), SizeIs(1));
    EXPECT_NE(twin.HoldersOf(0), twin.HoldersOf(2));
  }
}

TEST(SequencesTest, BranchesThatStartInOneBatch) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 30));
  for (uint32_t seq = 1; seq < 4; ++seq) twin.cells.Copy(0, seq);
  for (int32_t pos = 30; pos < 50; ++pos) {
    ExpectExact(twin.Step({{0, pos}, {1, pos}, {2, pos}, {3, pos}}), "four branches");
  }
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(4));
}

// The prefix's owner goes away; the branch lives on.
TEST(SequencesTest, BranchOutlivesItsParent) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 40));
  twin.cells.Copy(0, 1);
  twin.Step(TokensOf(0, 40, 20));
  ExpectExact(twin.Step(TokensOf(1, 40, 20)), "branch");
  twin.cells.Remove(0, 0);
  ExpectExact(twin.Step(TokensOf(1, 60, 1)), "branch alone");
  twin.cells.Seek(0, 40);
  ExpectExact(twin.Step(TokensOf(1, 61, 20)), "branch in its parent's cells");
  ExpectExact(twin.Step(TokensOf(1, 81, 1)), "branch after that");
}

class RollbackTest : public ::testing::TestWithParam<uint32_t> {};

// Speculative decoding: a draft of several rows, part of which is taken back.
TEST_P(RollbackTest, OfADraft) {
  Twin twin(TwoLayers(512, GetParam()));
  twin.Step(TokensOf(0, 0, 50));
  int32_t pos = 50;
  for (const int32_t accepted : {2, 0, 5, 1, 3, 0, 0, 4}) {
    ExpectExact(twin.Step(TokensOf(0, pos, 5)), "draft");
    pos += accepted;
    twin.cells.Remove(0, pos);
  }
  ExpectExact(twin.Step(TokensOf(0, pos, 1)), "after drafts");
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
  EXPECT_EQ(twin.ours.cache()->tail_pos(twin.ours.cache()->Sequences(0)[0]), pos);
}

TEST_P(RollbackTest, OverSeveralWindows) {
  Twin twin(TwoLayers(512, GetParam()));
  twin.Step(TokensOf(0, 0, 90));
  twin.cells.Remove(0, 33);
  ExpectExact(twin.Step(TokensOf(0, 33, 1)), "first token after a long rollback");
  ExpectExact(twin.Step(TokensOf(0, 34, 30)), "chunk after a long rollback");
  ExpectExact(twin.Step(TokensOf(0, 64, 60)), "chunk beyond the old end");
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
}

// A server that finds a common prefix keeps it and writes the rest anew.
TEST_P(RollbackTest, ToACommonPrefix) {
  Twin twin(TwoLayers(512, GetParam()));
  for (const int32_t common : {0, 60, 13, 5, 1}) {
    twin.cells.Remove(0, common);
    if (common == 0) twin.cells.Clear();
    ExpectExact(twin.Step(TokensOf(0, common, 80)), "prompt after a common prefix");
    ExpectExact(twin.Step(TokensOf(0, common + 80, 1)), "answer");
  }
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
}

TEST_P(RollbackTest, WithOtherCellsAfterwards) {
  Twin twin(TwoLayers(512, GetParam()));
  twin.Step(TokensOf(0, 0, 40));
  twin.cells.Remove(0, 30);
  twin.cells.Seek(0, 60);
  for (int32_t pos = 30; pos < 50; ++pos) {
    ExpectExact(twin.Step(TokensOf(0, pos, 1)), "other cells after a rollback");
  }
}

INSTANTIATE_TEST_SUITE_P(Streams, RollbackTest, ::testing::Values(1u, 2u));

// llama.cpp shows cells up to the last one in use, in steps of 256: what lies beyond is gone.
TEST(CellsTest, BeyondTheVisibleOnesAreDead) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 300));
  KvCache& cache = *twin.ours.cache();
  EXPECT_EQ(cache.n_tokens(cache.Sequences(0)[0]), 300u);
  twin.cells.Remove(0, 100);
  ExpectExact(twin.Step(TokensOf(0, 100, 1)), "after most was removed");
  for (uint32_t cell = 256; cell < 300; ++cell) EXPECT_EQ(cache.lookup(0, cell).window, kNone);
  EXPECT_LE(cache.n_tokens(cache.Sequences(0)[0]), 256u);
}

// The same where nothing is overwritten: only the number of visible cells tells.
TEST(CellsTest, BeyondTheVisibleOnesAreDeadInAnotherSequence) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 100));
  twin.Step(TokensOf(1, 0, 300));
  twin.cells.Remove(1, 150);
  ExpectExact(twin.Step(TokensOf(0, 100, 1)), "after another sequence lost its end");
  KvCache& cache = *twin.ours.cache();
  for (uint32_t cell = 251; cell < 256; ++cell) EXPECT_NE(cache.lookup(0, cell).window, kNone);
  for (uint32_t cell = 256; cell < 400; ++cell) EXPECT_EQ(cache.lookup(0, cell).window, kNone);
}

TEST(CellsTest, OverwrittenSequenceDisappears) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 50));
  twin.Step(TokensOf(1, 0, 50));
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(2));
  twin.cells.Remove(0, 0);
  twin.cells.Seek(0, 0);
  ExpectExact(twin.Step(TokensOf(1, 50, 50)), "cells of a removed sequence");
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
}

// Sequence 0 loses its end, and another sequence takes the cells: it is still one sequence.
TEST(CellsTest, TailTakenByAnotherSequence) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 60));
  twin.cells.Remove(0, 45);
  ExpectExact(twin.Step(TokensOf(1, 0, 30)), "another sequence in cells of the tail");
  ExpectExact(twin.Step(TokensOf(0, 45, 1)), "first token after that");
  ExpectExact(twin.Step(Join({TokensOf(0, 46, 20), TokensOf(1, 30, 20)})), "both");
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(2));
  EXPECT_THAT(twin.HoldersOf(0), SizeIs(1));
}

TEST(StepsTest, GraphIsReusedWithOtherInputs) {
  Twin twin(TwoLayers(512, 2));
  twin.Step(Join({TokensOf(0, 0, 40), TokensOf(1, 0, 40)}));
  ExpectExact(twin.Step({{0, 40}, {1, 40}}), "graph built");
  for (int32_t pos = 41; pos < 60; ++pos) {
    ExpectExact(twin.Restep({{0, pos}, {1, pos}}), "graph reused");
  }
}

TEST(StepsTest, ReusedGraphAfterARollback) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 40));
  twin.Step(TokensOf(0, 40, 4));
  twin.cells.Remove(0, 41);
  ExpectExact(twin.Restep(TokensOf(0, 41, 4)), "graph reused after a rollback");
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
}

// Programs that do not announce graphs: a second write to the same layer begins a step.
TEST(StepsTest, WithoutTheThreadCountCallback) {
  Twin twin(TwoLayers());
  twin.ours.AnnounceGraphs(false);
  int32_t pos = 0;
  for (const uint32_t n : {30u, 1u, 1u, 8u, 1u}) {
    ExpectExact(twin.Step(TokensOf(0, pos, n)), "unannounced step");
    pos += static_cast<int32_t>(n);
  }
}

// A step that fails leaves nothing behind that the next one could take for its own.
TEST(StepsTest, AfterAFailedStep) {
  for (const bool announced : {true, false}) {
    Twin twin(TwoLayers());
    twin.ours.AnnounceGraphs(announced);
    twin.Step(TokensOf(0, 0, 30));
    StepInput in = twin.Input(TokensOf(0, 30, 4));
    const std::vector<int64_t> cells = in.cells;
    in.cells[2] = 99999;
    EXPECT_EQ(twin.ours.Run(in).status, GGML_STATUS_FAILED);
    in.cells = cells;
    ExpectExact(twin.RunInput(in), "the step with good cells");
    ExpectExact(twin.Step(TokensOf(0, 34, 1)), "the next step");
  }
}

// Evaluation callbacks (imatrix, debugging) make every node a graph of its own.
TEST(StepsTest, NodeByNode) {
  for (const uint32_t n_streams : {1u, 2u}) {
    Twin twin(TwoLayers(512, n_streams));
    ggml_backend_sched_set_eval_callback(
        twin.ours.sched(), [](ggml_tensor*, bool, void*) { return true; }, nullptr);
    ExpectExact(twin.Step(Join({TokensOf(0, 0, 20), TokensOf(1, 0, 20)})), "node by node, prompt");
    ExpectExact(twin.Step({{0, 20}, {1, 20}}), "node by node, decode");
    EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(n_streams == 1 ? 2 : 1));
  }
}

// A graph that only reads: a layer whose keys and values are another layer's writes nothing.
TEST(StepsTest, GraphWithoutWrites) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 30));
  const StepInput in = twin.Input(TokensOf(0, 30, 1));
  StepInput blind = in;  // the token's own cell has not been written yet
  blind.masks[0][30] = 0xFC00;
  GraphKind kind;
  kind.write = false;
  ExpectExact(twin.RunInput(blind, false, kind), "graph without writes");
  ExpectExact(twin.RunInput(in), "the same token, written");
}

TEST(ClearTest, ForgetsEverything) {
  Twin twin(TwoLayers(512, 2));
  twin.Step(Join({TokensOf(0, 0, 40), TokensOf(1, 0, 40)}));
  twin.cells.Clear();
  twin.ours.Clear();
  twin.cpu.Clear();
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(0));
  EXPECT_EQ(twin.ours.stats().full_tokens, 0u);
  EXPECT_EQ(twin.ours.stats().full_bytes, 0u);
  ExpectExact(twin.Step(TokensOf(1, 0, 30)), "after clear");
}

// What llama.cpp does first: warm-up with dummy tokens, then clear.
TEST(ClearTest, WarmUpLeavesNoTrace) {
  Twin twin(TwoLayers());
  ASSERT_TRUE(twin.ours.Reserve(64));
  twin.Step(TokensOf(0, 0, 2));
  twin.ours.Clear();
  twin.cpu.Clear();
  twin.cells.Clear();
  ExpectExact(twin.Step(TokensOf(0, 0, 50)), "after the warm-up");
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
  EXPECT_EQ(twin.ours.cache()->n_tokens(twin.ours.cache()->Sequences(0)[0]), 50u);
}

}  // namespace
}  // namespace qevict::plugin::testing
