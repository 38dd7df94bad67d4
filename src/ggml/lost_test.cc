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

TEST(LostTest, ARestoreThatTheSystemRefusedFailsTheNextStep) {
  Twin full(Spec()), twin(Spec(), "preset=qevict,codec=wf,prefill=bounded," + Budget(300, 0.6));
  full.Step(TokensOf(0, 0, 300));
  Save(twin.ours, 0, 0, 1);  // now there is a cache
  {
    const LogCapture log;
    twin.ours.cache()->FailGrowthAt(20);
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

// A state that does not fit beside what is held, or at all, is held to the budget.
TEST(LostTest, ARestoreBeyondTheBudgetIsHeldToIt) {
  Twin full(Spec()),
      twin(Spec(), "preset=qevict,codec=wf,prefill=bounded,check=1," + Budget(300, 0.6));
  full.Step(TokensOf(0, 0, 300));
  Restore(twin.ours, 0, 0, Save(full.ours, 0, 0, 300));
  twin.cells.Place(TokensOf(0, 0, 300));
  for (int32_t pos = 300; pos < 320; ++pos) {
    EXPECT_EQ(twin.RunInput(twin.Input(TokensOf(0, pos, 1))).status, GGML_STATUS_SUCCESS);
    twin.cells.Place(TokensOf(0, pos, 1));
    const auto stats = twin.ours.stats();
    EXPECT_LE(stats.full_bytes + stats.packed_bytes + stats.dormant_bytes + stats.tables_bytes +
                  stats.slack_bytes,
              stats.budget_bytes);
  }
  EXPECT_GT(twin.ours.stats().packed_tokens, 0u);
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
}

// Copies share what they hold, so that the budget has no reason to refuse one.
TEST(LostTest, ACopyGoesOnByItself) {
  Twin twin(Spec(512, 2), "preset=qevict,check=1," + Budget(300, 0.4));
  for (int32_t pos = 0; pos < 400; pos += 50)
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 50), false), "0");
  for (int32_t pos = 400; pos < 410; ++pos) ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "0");
  twin.ours.CopyStream(0, 1);
  twin.cells.CopyStream(0, 1);
  for (int32_t pos = 410; pos < 430; ++pos) {
    ExpectHeld(RunHeld(twin, TokensOf(1, pos, 1)), "the copy");
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "the original");
  }
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
