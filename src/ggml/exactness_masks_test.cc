// Exactness at preset=full under everything that changes the softmax or what rows see: sinks, soft
// caps, ALiBi, sliding windows, holes, rows that see nothing, streams, interleaved sequences, cells
// that are written again.
#include <gtest/gtest.h>

#include <string>

#include "ggml/testing/twin.h"

namespace qevict::plugin::testing {
namespace {

// Prompt chunks and decode steps of one sequence.
void RunSequence(Twin& twin, const char* what) {
  int32_t pos = 0;
  for (const uint32_t n : {33u, 100u, 1u, 5u, 1u}) {
    ExpectExact(twin.Step(TokensOf(0, pos, n)), what);
    pos += static_cast<int32_t>(n);
  }
}

TEST(LogitsTest, AttentionSinks) {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16}) {
    CacheSpec spec;
    spec.layers[0].sinks = true;
    spec.layers[0].n_gqa = 4;
    spec.layers[0].type_k = spec.layers[0].type_v = type;
    Twin twin(spec);
    RunSequence(twin, "sinks");
  }
}

TEST(LogitsTest, SoftCap) {
  for (const float cap : {5.0f, 50.0f}) {
    CacheSpec spec;
    spec.layers[0].softcap = cap;
    Twin twin(spec);
    RunSequence(twin, "soft cap");
  }
}

TEST(LogitsTest, SoftCapAndSinks) {
  CacheSpec spec;
  spec.layers[0].softcap = 10.0f;
  spec.layers[0].sinks = true;
  Twin twin(spec);
  RunSequence(twin, "soft cap and sinks");
}

TEST(LogitsTest, Alibi) {
  for (const uint32_t n_kv_heads :
       {1u, 2u, 3u}) {  // 4, 8 and 12 heads: slopes beyond a power of two
    CacheSpec spec;
    spec.layers[0].n_kv_heads = n_kv_heads;
    spec.layers[0].n_gqa = 4;
    spec.layers[0].max_bias = 8.0f;
    spec.layers[0].rope.mode = kNoRope;
    Twin twin(spec, "preset=full", {0, true});
    RunSequence(twin, "ALiBi");
  }
}

TEST(LogitsTest, AlibiOfInterleavedSequences) {
  CacheSpec spec;
  spec.layers[0].max_bias = 8.0f;
  spec.layers[0].rope.mode = kNoRope;
  Twin twin(spec, "preset=full", {0, true});
  for (int32_t pos = 0; pos < 60; pos += 20) {
    ExpectExact(twin.Step(Join({TokensOf(0, pos, 20), TokensOf(1, pos, 20)})),
                "ALiBi, two sequences");
  }
}

TEST(MaskTest, SlidingWindow) {
  CacheSpec spec;
  spec.layers.resize(2);
  Twin twin(spec);
  twin.masks[1].swa = 24;  // one cache whose layers see different spans
  RunSequence(twin, "sliding window of 24 in one of two layers");
}

// llama.cpp's SWA caches are short and take the cells of tokens that left the window again.
TEST(MaskTest, SlidingWindowTakesCellsAgain) {
  CacheSpec spec;
  spec.n_cells = 256;
  Twin twin(spec, "preset=full", {100, false});
  twin.swa = 100;
  int32_t pos = 0;
  for (uint32_t step = 0; step < 40; ++step) {
    const uint32_t n = step % 4 == 3 ? 1 : 30;
    ExpectExact(twin.Step(TokensOf(0, pos, n)),
                ("SWA cache, position " + std::to_string(pos)).c_str());
    pos += static_cast<int32_t>(n);
  }
  EXPECT_GT(pos, 900);  // cells have been overwritten several times
}

TEST(MaskTest, Holes) {
  Twin twin(CacheSpec{});
  twin.Step(TokensOf(0, 0, 90));
  for (uint32_t cell = 3; cell < 90; cell += 5) twin.holes.push_back(cell);
  for (uint32_t cell = 40; cell < 56; ++cell) twin.holes.push_back(cell);
  ExpectExact(twin.Step(TokensOf(0, 90, 1)), "holes, decode");
  ExpectExact(twin.Step(TokensOf(0, 91, 70)), "holes, prompt");
  twin.holes.clear();
  ExpectExact(twin.Step(TokensOf(0, 161, 1)), "hidden tokens seen again");
}

TEST(MaskTest, RowsThatSeeNothingGiveZeros) {
  Twin twin(CacheSpec{});
  twin.blind_rows = {0, 3, 17};
  ExpectExact(twin.Step(TokensOf(0, 0, 20)), "blind rows of a prompt");
  const LayerSpec layer;
  const size_t row = size_t{layer.n_heads()} * layer.head_dim_v;
  for (const uint32_t r : twin.blind_rows) {
    for (size_t i = 0; i < row; ++i)
      ASSERT_EQ(twin.last_ours().attention[0][r * row + i], 0.0f) << "row " << r;
  }
  twin.blind_rows = {0};
  ExpectExact(twin.Step(TokensOf(0, 20, 1)), "a blind decode row");
  for (const float f : twin.last_ours().attention[0]) ASSERT_EQ(f, 0.0f);
  twin.blind_rows.clear();
  ExpectExact(twin.Step(TokensOf(0, 21, 1)), "after a blind row");
}

TEST(MaskTest, RowsThatSeeNothingButSinks) {
  CacheSpec spec;
  spec.layers[0].sinks = true;
  Twin twin(spec);
  twin.blind_rows = {2};
  ExpectExact(twin.Step(TokensOf(0, 0, 10)), "blind row with attention sinks");
}

class StreamsTest : public ::testing::TestWithParam<uint32_t> {};

TEST_P(StreamsTest, OfDifferentLengths) {
  const uint32_t n = GetParam();
  CacheSpec spec;
  spec.layers.resize(2);
  spec.n_cells = 512;
  spec.n_streams = n;
  Twin twin(spec);
  const std::string what = std::to_string(n) + " streams";
  // Prompts of 30, 60, ... tokens, one after the other; then steps of all of them, and of parts.
  for (uint32_t s = 0; s < n; ++s) {
    ExpectExact(twin.Step(TokensOf(s, 0, 30 * (s + 1))), (what + ", prompts").c_str());
  }
  const auto step = [&](uint32_t s0, uint32_t s1, uint32_t rows) {
    std::vector<Token> batch;
    for (uint32_t s = s0; s < s1; ++s)
      batch = Join({batch, TokensOf(s, twin.cells.last_pos(s) + 1, rows)});
    return twin.Step(batch);
  };
  for (uint32_t i = 0; i < 3; ++i) ExpectExact(step(0, n, 1), (what + ", decode").c_str());
  ExpectExact(step(0, n, 17), (what + ", chunks").c_str());
  ExpectExact(step(n - 1, n, 200), (what + ", the last one alone").c_str());
  ExpectExact(step(n / 2, n, 2), (what + ", the upper half").c_str());
  ExpectExact(step(0, n, 1), (what + ", decode after a long chunk").c_str());
}

INSTANTIATE_TEST_SUITE_P(All, StreamsTest, ::testing::Values(1u, 2u, 3u, 4u));

TEST(UnifiedTest, InterleavedSequences) {
  CacheSpec spec;
  spec.layers.resize(2);
  spec.n_cells = 512;
  Twin twin(spec);
  int32_t a = 0, b = 0;
  for (const uint32_t n : {1u, 13u, 40u, 1u, 1u}) {
    const std::vector<Token> batch = Join({TokensOf(0, a, n), TokensOf(1, b, 2 * n)});
    ExpectExact(twin.Step(batch), ("interleaved sequences, rows " + std::to_string(n)).c_str());
    a += static_cast<int32_t>(n);
    b += static_cast<int32_t>(2 * n);
    ExpectExact(twin.Step(TokensOf(n % 2, n % 2 ? b++ : a++, 1)), "one of them alone");
  }
}

// Tokens of sequences alternate inside one batch.
TEST(UnifiedTest, AlternatingRows) {
  Twin twin(CacheSpec{});
  for (int32_t pos = 0; pos < 60; pos += 6) {
    std::vector<Token> batch;
    for (int32_t i = 0; i < 6; ++i) {
      for (uint32_t seq = 0; seq < 3; ++seq) batch.push_back({seq, pos + i});
    }
    ExpectExact(twin.Step(batch), "alternating rows");
  }
}

TEST(OverwriteTest, RemovedCellsAreWrittenAgain) {
  CacheSpec spec;
  Twin twin(spec);
  twin.Step(TokensOf(0, 0, 120));
  twin.cells.Remove(0, 40, 70);  // context shift without moving: cells 40...69 are free again
  ExpectExact(twin.Step(TokensOf(0, 120, 1)), "after a removal");
  twin.cells.Seek(0, 40);
  ExpectExact(twin.Step(TokensOf(0, 121, 25)), "cells in the middle written again");
  ExpectExact(twin.Step(TokensOf(0, 146, 1)),
              "decode after cells in the middle were written again");
  ExpectExact(twin.Step(TokensOf(0, 147, 40)), "chunk that fills the gap and goes on at the end");
}

TEST(OverwriteTest, RemovedSequenceMakesRoom) {
  CacheSpec spec;
  Twin twin(spec);
  twin.Step(TokensOf(0, 0, 100));
  twin.Step(TokensOf(1, 0, 100));
  twin.cells.Remove(0, 0);
  twin.cells.Seek(0, 0);
  ExpectExact(twin.Step(TokensOf(2, 0, 80)), "a new sequence in the cells of a removed one");
  ExpectExact(twin.Step(Join({TokensOf(1, 100, 1), TokensOf(2, 80, 1)})), "old and new sequence");
}

}  // namespace
}  // namespace qevict::plugin::testing
