// Under a budget, everything that hosts do to a cache: sequences that share it, tokens taken back,
// positions moved, streams copied, state saved and restored.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "ggml/cache_group.h"
#include "ggml/testing/held.h"
#include "ggml/testing/state.h"

namespace qevict::plugin::testing {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr const char* kConfig = "preset=qevict,budget=30%,check=1";

CacheSpec Spec(uint32_t n_cells = 512, uint32_t n_streams = 1) {
  CacheSpec spec;
  spec.layers.resize(2);
  spec.layers[1].head_dim_v = 32;
  spec.n_cells = n_cells;
  spec.n_streams = n_streams;
  return spec;
}

// A prompt and some steps of decoding, so that windows are packed and evicted.
void Fill(Twin& twin, uint32_t seq, uint32_t n_prompt, uint32_t n_decode) {
  ExpectHeld(RunHeld(twin, TokensOf(seq, 0, n_prompt)), "prompt");
  for (uint32_t i = 0; i < n_decode; ++i) {
    ExpectHeld(RunHeld(twin, TokensOf(seq, static_cast<int32_t>(n_prompt + i), 1)), "decode");
  }
}

// The same tokens are held, with the same numbers.
void ExpectSameRows(const HeldRows& a, const HeldRows& b, const std::string& what) {
  EXPECT_EQ(a.n_full, b.n_full) << what;
  EXPECT_EQ(a.n_packed, b.n_packed) << what;
  for (size_t c = 0; c < a.window.size(); ++c) {
    EXPECT_EQ(a.window[c] == kNone, b.window[c] == kNone) << what << ", cell " << c;
  }
  EXPECT_EQ(a.rows.k, b.rows.k) << what;
  EXPECT_EQ(a.rows.v, b.rows.v) << what;
}

TEST(UnifiedBudgetTest, TwoSequences) {
  Twin twin(Spec(1024), kConfig);
  ExpectHeld(RunHeld(twin, Join({TokensOf(0, 0, 150), TokensOf(1, 0, 100)})), "prompts");
  for (int32_t i = 0; i < 60; ++i) {
    ExpectHeld(RunHeld(twin, {{0, 150 + i}, {1, 100 + i}}), "decode of both");
  }
  for (int32_t i = 60; i < 80; ++i) ExpectHeld(RunHeld(twin, {{1, 100 + i}}), "one alone");
  ExpectHeld(RunHeld(twin, {{0, 210}, {1, 180}}), "both again");
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(2));
}

// A prompt is read while another sequence decodes (continuous batching).
TEST(UnifiedBudgetTest, PromptBesideDecoding) {
  for (const char* prefill : {"full", "bounded"}) {
    Twin twin(Spec(1024), std::string(kConfig) + ",prefill=" + prefill);
    const bool compare = std::string(prefill) == "full";
    ExpectHeld(RunHeld(twin, TokensOf(0, 0, 200), compare), "first prompt");
    int32_t pos = 200;
    for (; pos < 210; ++pos) ExpectHeld(RunHeld(twin, {{0, pos}}), "first answer");
    for (int32_t chunk = 0; chunk < 200; chunk += 40, ++pos) {
      const auto batch = Join({TokensOf(0, pos, 1), TokensOf(1, chunk, 40)});
      ExpectHeld(RunHeld(twin, batch, compare), std::string("prompt beside decoding, ") + prefill);
    }
    for (int32_t i = 0; i < 30; ++i, ++pos) {
      ExpectHeld(RunHeld(twin, {{0, pos}, {1, 200 + i}}), "both answers");
    }
  }
}

TEST(UnifiedBudgetTest, SharedPrefix) {
  Twin twin(Spec(1024), kConfig);
  Fill(twin, 0, 250, 20);
  twin.cells.Copy(0, 1);
  for (int32_t pos = 270; pos < 320; ++pos) {
    ExpectHeld(RunHeld(twin, {{0, pos}, {1, pos}}), "two branches of a packed prefix");
  }
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(2));
}

TEST(UnifiedBudgetTest, SequencesComeAndGo) {
  Twin twin(Spec(1024), kConfig);
  for (uint32_t round = 0; round < 6; ++round) {
    const uint32_t seq = round % 3;
    twin.cells.Remove(seq, 0);
    Fill(twin, seq, 150 + 10 * round, 20);
  }
}

class TakenBackTest : public ::testing::TestWithParam<uint32_t> {};

TEST_P(TakenBackTest, Drafts) {
  Twin twin(Spec(512, GetParam()), kConfig);
  Fill(twin, 0, 250, 3);
  int32_t pos = 253;
  for (uint32_t step = 0; step < 40; ++step) {
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 5)), "draft");
    pos += static_cast<int32_t>(step * 7 % 6);
    twin.cells.Remove(0, pos);
  }
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
}

// A server keeps a common prefix that has been packed and partly evicted, and reads another prompt.
TEST_P(TakenBackTest, DownToACommonPrefix) {
  Twin twin(Spec(512, GetParam()), kConfig);
  Fill(twin, 0, 250, 20);
  for (const int32_t common : {140, 77, 3}) {
    twin.cells.Remove(0, common);
    twin.cells.Seek(0, static_cast<uint32_t>(common));
    ExpectHeld(RunHeld(twin, TokensOf(0, common, 50), false), "another prompt");
    ExpectHeld(RunHeld(twin, TokensOf(0, common + 50, 50), false), "another prompt, second chunk");
    for (int32_t i = 0; i < 20; ++i) {
      ExpectHeld(RunHeld(twin, TokensOf(0, common + 100 + i, 1)), "another answer");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Streams, TakenBackTest, ::testing::Values(1u, 2u));

TEST(SlidingBudgetTest, CellsAreTakenAgain) {
  Twin twin(Spec(512), "preset=qevict,budget=40%,check=1", {200, false});
  twin.swa = 200;
  for (int32_t pos = 0; pos < 900; pos += 30) {
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 30)), "chunk at " + std::to_string(pos));
  }
  for (int32_t pos = 900; pos < 960; ++pos) {
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "decode at " + std::to_string(pos));
  }
}

// Attention depends on distances alone: when everything moves, it stays as it was.
void ExpectShiftInvariance(const CacheSpec& spec, const std::string& what) {
  Twin still(spec, kConfig), moved(spec, kConfig);
  Fill(still, 0, 250, 20);
  Fill(moved, 0, 250, 20);
  const HeldRows before = ReadHeld(moved.ours, 0, 0);
  moved.cells.Shift(0, 0, -1, 37);
  ASSERT_EQ(moved.ours.Shift(moved.cells.TakeShifts()), GGML_STATUS_SUCCESS) << what;
  EXPECT_THAT(moved.ours.cache()->Validate(), IsEmpty()) << what;
  EXPECT_EQ(ReadHeld(moved.ours, 0, 0).n_packed, before.n_packed) << what;
  EXPECT_GT(before.n_packed, 10u) << what;
  for (int32_t pos = 270; pos < 274; ++pos) {  // before the next event, whose rank ties may turn
    const StepInput a = still.Input(TokensOf(0, pos, 1)), b = moved.Input(TokensOf(0, pos + 37, 1));
    const StepOutput there = still.ours.Run(a), here = moved.ours.Run(b);
    ASSERT_EQ(here.status, GGML_STATUS_SUCCESS) << what;
    for (size_t il = 0; il < 2; ++il) {
      const std::vector<double> want(there.attention[il].begin(), there.attention[il].end());
      EXPECT_LE(Compare(here.attention[il], want).rms, 4e-3) << what << ", position " << pos;
    }
  }
}

TEST(ShiftBudgetTest, MovesPackedWindowsToo) {
  RopeSpec ropes[6];
  ropes[1].mode = GGML_ROPE_TYPE_NORMAL;
  ropes[2].n_dims = 48;
  ropes[3].factors = true;
  ropes[4].freq_scale = 0.5f;
  ropes[5].mode = GGML_ROPE_TYPE_MROPE;
  const int sections[4] = {8, 12, 12, 0};
  std::copy_n(sections, 4, ropes[5].sections);
  for (size_t i = 0; i < 6; ++i) {
    CacheSpec spec = Spec();
    for (LayerSpec& layer : spec.layers) layer.rope = ropes[i];
    ExpectShiftInvariance(spec, "rope " + std::to_string(i));
  }
}

// Keys that are normalised after RoPE are packed as they are, and rotated by what they have moved.
TEST(ShiftBudgetTest, MovesPackedKeysOfUnknownLineage) {
  CacheSpec spec = Spec();
  for (LayerSpec& layer : spec.layers) layer.norm_after_rope = true;
  ExpectShiftInvariance(spec, "norm after RoPE");
}

TEST(ShiftBudgetTest, ContextShift) {
  Twin twin(Spec(), kConfig);
  Fill(twin, 0, 250, 30);
  for (int i = 0; i < 3; ++i) {
    const int32_t last = twin.cells.last_pos(0);
    twin.cells.Remove(0, 5, 105);
    twin.cells.Shift(0, 105, -1, -100);
    ASSERT_EQ(twin.ours.Shift(twin.cells.TakeShifts()), GGML_STATUS_SUCCESS);
    for (int32_t j = 0; j < 40; ++j) {
      ExpectHeld(RunHeld(twin, TokensOf(0, last - 99 + j, 1)), "decode after a context shift");
    }
    ExpectHeld(RunHeld(twin, TokensOf(0, last - 59, 60), false), "chunk after a shift");
  }
}

TEST(CopyBudgetTest, TakesTiersAndScoresAlong) {
  Twin twin(Spec(512, 3), kConfig);
  Fill(twin, 0, 250, 20);
  twin.ours.CopyStream(0, 2);
  twin.cells.CopyStream(0, 2);
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
  std::vector<HeldRows> original;
  for (uint32_t il = 0; il < 2; ++il) {
    original.push_back(ReadHeld(twin.ours, il, 0));
    EXPECT_GT(original[il].n_packed, 0u);
    ExpectSameRows(original[il], ReadHeld(twin.ours, il, 2), "copy");
  }
  for (int32_t pos = 270; pos < 300; ++pos) {
    ExpectHeld(RunHeld(twin, TokensOf(2, pos, 1)), "decode of the copy");
  }
  for (uint32_t il = 0; il < 2; ++il) {
    ExpectSameRows(original[il], ReadHeld(twin.ours, il, 0), "the original");
  }
  // Equal tokens from here on lead to equal plans: scores and counters have been copied.
  Twin other(Spec(512, 3), kConfig);
  Fill(other, 0, 250, 20);
  other.ours.CopyStream(0, 1);
  other.cells.CopyStream(0, 1);
  for (int32_t pos = 270; pos < 290; ++pos) {
    StepInput in = other.Input({{0, pos}, {1, pos}});
    for (size_t il = 0; il < 2; ++il) {  // the same rows for both
      for (std::vector<float>* rows : {&in.rows[il].q, &in.rows[il].k, &in.rows[il].v}) {
        std::copy_n(rows->begin(), rows->size() / 2,
                    rows->begin() + static_cast<ptrdiff_t>(rows->size() / 2));
      }
    }
    const StepOutput out = other.ours.Run(in);
    ASSERT_EQ(out.status, GGML_STATUS_SUCCESS);
    for (const std::vector<float>& a : out.attention) {
      EXPECT_TRUE(std::equal(a.begin(), a.begin() + static_cast<ptrdiff_t>(a.size() / 2),
                             a.begin() + static_cast<ptrdiff_t>(a.size() / 2)))
          << pos;
    }
  }
  for (uint32_t il = 0; il < 2; ++il) {
    ExpectSameRows(ReadHeld(other.ours, il, 0), ReadHeld(other.ours, il, 1), "after equal steps");
  }
}

class SavedBudgetTest : public ::testing::TestWithParam<size_t> {};

TEST_P(SavedBudgetTest, TiersSurvive) {
  Twin twin(Spec(), kConfig);
  Fill(twin, 0, 250, 21);
  std::vector<HeldRows> before;
  for (uint32_t il = 0; il < 2; ++il) before.push_back(ReadHeld(twin.ours, il, 0));
  ASSERT_GT(before[0].n_packed, 0u);
  const Scores scores = ScoresOf(twin.ours, 1);
  const SavedState saved = Save(twin.ours, 0, 0, 271, GetParam());
  twin.ours.Clear();
  Restore(twin.ours, 0, 0, saved, GetParam());
  twin.ours.cache()->FinishRestore();
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
  for (uint32_t il = 0; il < 2; ++il) {
    ExpectSameRows(before[il], ReadHeld(twin.ours, il, 0), "restored");
  }
  std::vector<double> a, b;  // births are new, their order is not
  for (const auto& [birth, score] : scores) a.push_back(score);
  for (const auto& [birth, score] : ScoresOf(twin.ours, 1)) b.push_back(score);
  EXPECT_EQ(a, b);
  for (int32_t pos = 271; pos < 300; ++pos) {
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "decode after a restore");
  }
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
}

TEST_P(SavedBudgetTest, MovesToAnotherStream) {
  Twin twin(Spec(512, 2), kConfig);
  Fill(twin, 0, 250, 21);
  const SavedState saved = Save(twin.ours, 0, 0, 271, GetParam());
  Restore(twin.ours, 1, 0, saved, GetParam());
  twin.cells.CopyStream(0, 1);
  twin.ours.cache()->FinishRestore();
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
  for (uint32_t il = 0; il < 2; ++il) {
    ExpectSameRows(ReadHeld(twin.ours, il, 0), ReadHeld(twin.ours, il, 1), "other stream");
  }
  for (int32_t pos = 271; pos < 300; ++pos) {
    ExpectHeld(RunHeld(twin, {{0, pos}, {1, pos}}), "both streams");
  }
}

INSTANTIATE_TEST_SUITE_P(Slices, SavedBudgetTest, ::testing::Values(0, 1000, 333));

// A full cache that is restored into a session with a budget is compressed by the next events.
TEST(RestoreBudgetTest, StateOfAFullCache) {
  Twin full(Spec()), twin(Spec(), kConfig);
  full.Step(TokensOf(0, 0, 300));
  Restore(twin.ours, 0, 0, Save(full.ours, 0, 0, 300));
  twin.cells.Place(TokensOf(0, 0, 300));
  for (int32_t pos = 300; pos < 330; ++pos) {
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "decode after a restore");
  }
  EXPECT_GT(twin.ours.stats().packed_tokens, 0u);
}

TEST(RestoreBudgetTest, BesideALiveSequence) {
  Twin twin(Spec(1024), kConfig);
  Fill(twin, 0, 250, 20);
  const SavedState saved = Save(twin.ours, 0, 0, 270);
  Fill(twin, 1, 200, 20);
  const std::vector<int64_t> cells = twin.cells.Place(TokensOf(2, 0, 270));
  Restore(twin.ours, 0, static_cast<uint32_t>(cells.front()), saved);
  for (int32_t i = 0; i < 30; ++i) {
    ExpectHeld(RunHeld(twin, {{0, 270 + i}, {1, 220 + i}, {2, 270 + i}}), "three sequences");
  }
}

TEST(RestoreBudgetTest, DamagedState) {
  for (uint32_t damage = 0; damage < 40; ++damage) {
    Twin twin(Spec(), kConfig);
    Fill(twin, 0, 250, 2);
    SavedState saved = Save(twin.ours, 0, 0, 252);
    twin.ours.Clear();
    uint64_t x = damage * 7919 + 1;
    const auto random = [&x](size_t n) {
      x = x * 6364136223846793005u + 1442695040888963407u;
      return static_cast<size_t>(x >> 33) % n;
    };
    std::vector<uint8_t>& part = saved[random(saved.size())];
    if (damage % 4 == 0) {
      part.resize(random(part.size()));  // truncated
    } else {
      for (uint32_t i = 0; i < damage * 3; ++i)
        part[random(part.size())] ^= static_cast<uint8_t>(1u << random(8));
    }
    Restore(twin.ours, 0, 0, saved, damage % 2 ? 1000 : 0);
    twin.ours.cache()->FinishRestore();
    ASSERT_THAT(twin.ours.cache()->Validate(), IsEmpty()) << "damage " << damage;
    for (int32_t pos = 252; pos < 256; ++pos) {
      // Damaged numbers may be anything, NaN too: only the cache must stay sound.
      ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1), false), "damage " + std::to_string(damage));
    }
  }
}

}  // namespace
}  // namespace qevict::plugin::testing
