// What goes wrong where the host cannot be told: the next step says so, and nothing is computed
// over tokens that are not there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "codecs/statistics.h"
#include "ggml/cache_group.h"
#include "ggml/testing/held.h"
#include "ggml/testing/log_capture.h"
#include "ggml/testing/state.h"

namespace qevict::plugin::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

CacheSpec Spec(uint32_t n_cells = 512, uint32_t n_streams = 1) {
  CacheSpec spec;
  spec.layers.resize(2);
  spec.n_cells = n_cells;
  spec.n_streams = n_streams;
  return spec;
}

/// A budget of a share of what `n_tokens` tokens of Spec() take in f16.
std::string Budget(uint32_t n_tokens, double share) {
  const Twin twin(Spec());
  const auto token_bytes = static_cast<double>(twin.ours.stats().capacity_f16_bytes) / 512.0;
  return "budget=" + std::to_string(static_cast<uint64_t>(token_bytes * n_tokens * share)) + "B";
}

TEST(LostTest, StatisticsOfAnotherModelFailEveryStepAlike) {
  codecs::LayerStatistics layer;
  layer.shape = {1, 8, 8};
  layer.heads.resize(1);
  layer.heads[0].n = 1;
  layer.heads[0].k_sum.assign(8, 0.0);
  layer.heads[0].k_square = layer.heads[0].v_square = std::vector<double>(8, 1.0);
  codecs::CodecStatistics statistics;
  statistics.layers.push_back(layer);
  const std::string path = ::testing::TempDir() + "/qevict_lost_test.statistics";
  ASSERT_TRUE(codecs::SaveStatistics(path, statistics).ok());
  Twin twin(Spec(), "preset=pack,budget=100%,codec=wf,statistics=" + path);
  std::remove(path.c_str());
  for (int i = 0; i < 3; ++i) {
    const LogCapture log;
    EXPECT_EQ(twin.Step(TokensOf(0, 10 * i, 10)).status, GGML_STATUS_FAILED);
    EXPECT_THAT(log.errors(), Contains(HasSubstr("do not fit layer 0")));
    twin.ours.Clear();
  }
}

TEST(LostTest, ARestoreThatTheBudgetRefusedFailsTheNextStep) {
  Twin full(Spec()), twin(Spec(), "preset=qevict,codec=wf,prefill=bounded," + Budget(300, 0.6));
  full.Step(TokensOf(0, 0, 300));
  {
    const LogCapture log;
    Restore(twin.ours, 0, 0, Save(full.ours, 0, 0, 300));
    EXPECT_THAT(log.errors(), Contains(HasSubstr("restoring state")));
  }
  twin.cells.Place(TokensOf(0, 0, 300));
  for (int i = 0; i < 2; ++i) {
    const LogCapture log;
    EXPECT_EQ(twin.RunInput(twin.Input(TokensOf(0, 300, 1))).status, GGML_STATUS_FAILED);
    EXPECT_THAT(log.errors(), Contains(HasSubstr("lacks tokens that were to be restored")));
  }
  // Another sequence, and the same one from its beginning, see nothing that is missing.
  ExpectHeld(RunHeld(twin, TokensOf(1, 0, 20), false), "another sequence");
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
}

TEST(LostTest, ACopyThatTheBudgetRefusedFailsTheNextStep) {
  Twin twin(Spec(512, 2), "preset=qevict," + Budget(300, 0.4));
  for (int32_t pos = 0; pos < 400; pos += 50)
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 50), false), "0");
  for (int32_t pos = 400; pos < 410; ++pos) ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "0");
  twin.ours.CopyStream(0, 1);
  twin.cells.CopyStream(0, 1);
  {
    const LogCapture log;
    EXPECT_EQ(twin.RunInput(twin.Input(TokensOf(1, 410, 1))).status, GGML_STATUS_FAILED);
    EXPECT_THAT(log.errors(), Contains(HasSubstr("stream 1 lacks tokens")));
  }
  ExpectHeld(RunHeld(twin, TokensOf(0, 410, 1)), "the original");
}

// The host logs the refusal, decodes on, and asks for the same shift before every step.
TEST(LostTest, ARefusedShiftFailsTheNextStep) {
  CacheSpec spec = Spec();
  for (LayerSpec& layer : spec.layers) {
    layer.rope.freq_scale = 0.5f;
    layer.rope.ext_factor = 1.0f;
    layer.rope.attn_factor = 1.2f;
  }
  Twin twin(spec, "preset=qevict,codec=wf,budget=25%");
  ExpectHeld(RunHeld(twin, TokensOf(0, 0, 200), false), "prompt");
  for (int32_t pos = 200; pos < 220; ++pos) {
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1), false), "answer");
  }
  ASSERT_GT(twin.ours.stats().packed_tokens, 0u);
  twin.cells.Remove(0, 4, 64);
  twin.cells.Shift(0, 64, -1, -60);
  const std::vector<int32_t> shifts = twin.cells.TakeShifts();
  for (int step = 0; step < 2; ++step) {
    const LogCapture log;
    EXPECT_NE(twin.ours.Shift(shifts), GGML_STATUS_SUCCESS);
    EXPECT_EQ(twin.RunInput(twin.Input(TokensOf(0, 160, 1))).status, GGML_STATUS_FAILED);
    EXPECT_THAT(log.errors(), Contains(HasSubstr("could not be shifted")));
    twin.cells.Remove(0, 160);
  }
  twin.cells.Remove(0, 0);
  ExpectHeld(RunHeld(twin, TokensOf(0, 0, 50), false), "the prompt anew");
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
}

TEST(LostTest, RefusedStepsLeaveNoSequences) {
  Twin twin(Spec(), "preset=qevict,budget=50%,check=1");
  ExpectHeld(RunHeld(twin, TokensOf(0, 0, 100)), "a sequence");
  const StepInput in = twin.Input(TokensOf(1, 0, 60));
  for (int i = 0; i < 5; ++i) {
    const LogCapture log;
    twin.ours.cache()->FailGrowthAt(1);
    EXPECT_NE(twin.RunInput(in).status, GGML_STATUS_SUCCESS);
    EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(2));
  }
  EXPECT_EQ(twin.RunInput(in).status, GGML_STATUS_SUCCESS);
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(2));
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
}

// All heads of a layer hold a chunk before any of them is routed.
TEST(LostTest, PromptsUnderABudgetPerHead) {
  CacheSpec spec = Spec();
  for (LayerSpec& layer : spec.layers) layer.n_kv_heads = 4, layer.n_gqa = 1;
  for (const char* budget : {"250KiB", "300KiB", "400KiB"}) {
    Twin twin(spec,
              std::string("preset=qevict,per_head=true,prefill=bounded,check=1,budget=") + budget);
    for (int32_t pos = 0; pos < 500; pos += 100)
      ExpectHeld(RunHeld(twin, TokensOf(0, pos, 100), false), budget);
    EXPECT_GT(twin.ours.stats().evicted_tokens + twin.ours.stats().packed_tokens, 0u) << budget;
  }
}

// Each prompt's chunk needs room, not the longest one's alone.
TEST(LostTest, TwoPromptsInOneStepUnderABudget) {
  Twin twin(Spec(512, 2), "preset=qevict,prefill=bounded,check=1," + Budget(512, 0.5));
  for (int32_t pos = 0; pos < 500; pos += 50) {
    ExpectHeld(RunHeld(twin, Join({TokensOf(0, pos, 50), TokensOf(1, pos, 50)}), false),
               "two prompts");
  }
  EXPECT_GT(twin.ours.stats().evicted_tokens + twin.ours.stats().packed_tokens, 0u);
}

}  // namespace
}  // namespace qevict::plugin::testing
