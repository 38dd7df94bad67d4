// per_head: every kv head is a layer of its own in the KvCache and keeps windows of its own.
#include <gtest/gtest.h>

#include "ggml/testing/held.h"

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

TEST(PerHeadTest, HeadsKeepDifferentWindowsWithinTheBudget) {
  Twin twin(TwoHeads(), "preset=qevict,budget=25%,per_head=true,recents=16");
  ASSERT_TRUE(twin.ours.ok());
  ExpectHeld(RunHeld(twin, TokensOf(0, 0, 300), false), "prompt");
  for (int32_t pos = 300; pos < 330; ++pos) ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1), false), "decode");
  EXPECT_GT(twin.ours.stats().evicted_tokens, 0u);
  std::vector<uint32_t> births[2];
  for (uint32_t head = 0; head < 2; ++head) {
    for (const auto& [birth, score] : ScoresOf(twin.ours, head)) births[head].push_back(birth);
  }
  EXPECT_NE(births[0], births[1]);
}

}  // namespace
}  // namespace qevict::plugin::testing
