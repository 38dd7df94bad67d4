// Memory: injected allocation failures, and counted bytes against what the system says.
#include <gtest/gtest.h>

#include "cache/test_support.h"

namespace qevict {
namespace {

std::vector<LayerShape> Layers() { return {Shape(2, 32, 32), Shape(1, 32, 16), Shape(2, 32, 32)}; }

Config MakeConfig(bool bounded) {
  Config config;
  config.check = true;
  if (bounded) {
    config.budget_bytes = 120000;
  } else {
    config.budget_fraction = 0.9;
    config.budget_tokens = 200;
  }
  return config;
}

/// Everything a reader of the cache can see, as one number.
uint64_t Fingerprint(Engine& e, uint32_t n_streams) {
  uint64_t hash = 14695981039346656037u;
  const auto add = [&hash](uint64_t x) { hash = (hash ^ x) * 1099511628211u; };
  for (uint32_t stream = 0; stream < n_streams; ++stream) {
    for (const SeqId seq : e.cache().Sequences(stream)) {
      for (uint32_t il = 0; il < e.n_layers(); ++il) {
        std::vector<kernels::WindowRef> refs;
        std::vector<WindowId> ids;
        e.cache().View(il, seq, refs, ids);
        kernels::RungCode rungs[kernels::kMaxRungs];
        e.cache().Rungs(il, rungs);
        const size_t n_heads = e.shapes()[il].n_kv_heads;
        for (size_t i = 0; i < refs.size(); ++i) {
          add(ids[i]);
          add(static_cast<uint64_t>(refs[i].pos0));
          const size_t n_k = rungs[refs[i].rung_k].k_head_bytes * n_heads;
          const size_t n_v = rungs[refs[i].rung_v].v_head_bytes * n_heads;
          for (size_t b = 0; b < n_k; ++b) add(refs[i].k[b]);
          for (size_t b = 0; b < n_v; ++b) add(refs[i].v[b]);
        }
      }
      add(e.cache().n_tokens(seq));
    }
  }
  add(e.cache().Stats().bytes.full);
  add(e.cache().Stats().bytes.packed);
  return hash;
}

class FailureTest : public testing::TestWithParam<bool> {};

TEST_P(FailureTest, AFailedGrowthLeavesASoundCacheThatGoesOn) {
  uint32_t n_failures = 0;
  for (size_t n = 1; n <= 60; ++n) {
    Engine e(MakeConfig(GetParam()), Layers(), 1, 512);
    ASSERT_TRUE(e.status.ok()) << e.status.message();
    e.UseRope(TestRope(16));
    const SeqId seq = e.NewSequence(0);
    e.cache().FailGrowthAt(n);
    for (int step = 0; step < 40; ++step) {
      const bool decode = step >= 8;
      const uint32_t first = e.next_cell(0), rows = decode ? 1 : 40;
      const Status status = e.Step(seq, rows, decode);
      if (status.ok()) continue;
      ++n_failures;
      ASSERT_EQ(status.code(), StatusCode::kResourceExhausted) << status.message();
      e.ExpectSound("growth " + std::to_string(n) + " step " + std::to_string(step));
      // The engine takes the step back and runs it again.
      for (uint32_t i = 0; i < rows; ++i) e.cache().Kill(0, first + i);
      e.next_cell(0) = first;
      e.next_pos(seq) = static_cast<int32_t>(first);
      ASSERT_EQ(e.cache().stream_of(seq) == kNone, first == 0) << "sequence lost";
      if (first == 0) break;
      const Status again = e.Step(seq, rows, decode);
      ASSERT_TRUE(again.ok()) << again.message();
    }
    e.ExpectSound("end");
  }
  EXPECT_GE(n_failures, 30u);
}

TEST_P(FailureTest, AFailedRouteChangesNothing) {
  for (size_t n = 1; n <= 3; ++n) {
    Engine e(MakeConfig(GetParam()), Layers(), 1, 512);
    e.UseRope(TestRope(16));
    const SeqId seq = e.NewSequence(0);
    ASSERT_TRUE(e.Prompt(seq, 80, 20).ok());
    ASSERT_TRUE(e.Decode(seq, 8).ok());
    while (e.cache().NoteStep(seq, 1, true) == false)
      ASSERT_TRUE(e.Store(e.NextTokens(seq, 1)).ok());
    const uint64_t before = Fingerprint(e, 1);
    e.cache().FailGrowthAt(n);
    for (uint32_t il = 0; il < e.n_layers(); ++il) {
      const uint64_t layer_before = Fingerprint(e, 1);
      const Status status = e.cache().Route(il, seq, 8, e.pool());
      if (status.ok()) continue;
      EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.message();
      EXPECT_EQ(Fingerprint(e, 1), layer_before);
    }
    (void)before;
    e.ExpectSound();
  }
}

TEST_P(FailureTest, ACopyThatTheBudgetRefusesLeavesTheTargetEmpty) {
  Config config = MakeConfig(GetParam());
  Engine e(config, Layers(), 2, 512);
  e.UseRope(TestRope(16));
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 300, 40).ok());
  ASSERT_TRUE(e.Decode(seq, 10).ok());
  const uint64_t before = Fingerprint(e, 1);
  const Status status = e.cache().CopyStream(0, 1);
  if (!status.ok()) {
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
    EXPECT_TRUE(e.cache().Sequences(1).empty());
    EXPECT_EQ(Fingerprint(e, 1), before);
  } else {
    EXPECT_EQ(e.cache().n_tokens(e.cache().Sequences(1)[0]), 310u);
  }
  e.ExpectSound();
}

// A copy shares its blocks: what it takes are records.
TEST_P(FailureTest, ACopyAddsNoBlocks) {
  Config config = MakeConfig(GetParam());
  if (GetParam()) config.budget_bytes *= 4;
  Engine e(config, Layers(), 2, 512);
  e.UseRope(TestRope(16));
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 300, 40).ok());
  ASSERT_TRUE(e.Decode(seq, 10).ok());
  const CacheStats before = e.cache().Stats();
  e.cache().FailGrowthAt(1);  // no page is asked for
  ASSERT_TRUE(e.cache().CopyStream(0, 1).ok());
  e.cache().FailGrowthAt(0);
  const CacheStats after = e.cache().Stats();
  EXPECT_EQ(after.arena_bytes, before.arena_bytes);
  EXPECT_EQ(after.bytes.full, before.bytes.full);
  EXPECT_EQ(after.bytes.packed, before.bytes.packed);
  e.ExpectSound("copy");
  // Both go on by themselves.
  const SeqId copy = e.cache().Sequences(1)[0];
  e.next_pos(copy) = e.next_pos(seq);
  e.next_cell(1) = e.next_cell(0);
  ASSERT_TRUE(e.Decode(copy, 40).ok());
  ASSERT_TRUE(e.Decode(seq, 40).ok());
  e.ExpectSound("both");
  for (uint32_t cell = 0; cell < 512; ++cell) e.cache().Kill(0, cell);
  e.ExpectSound("one is gone");
  EXPECT_EQ(e.cache().n_tokens(copy), 350u);
}

INSTANTIATE_TEST_SUITE_P(Prefill, FailureTest, testing::Bool(),
                         [](const auto& param) { return param.param ? "Bounded" : "Full"; });

TEST(ResidentTest, CountedBytesAreResidentBytes) {
  Config config;
  config.budget_fraction = 0.3;
  Engine e(config, {Shape(4, 64, 64), Shape(4, 64, 64), Shape(4, 64, 64)}, 1, 3000);
  e.UseRope(TestRope(64));
  const SeqId seq = e.NewSequence(0);
  ASSERT_TRUE(e.Prompt(seq, 2500, 500).ok());
  const auto check = [&e] {
    const CacheStats stats = e.cache().Stats();
    const double resident = static_cast<double>(e.cache().ResidentBytes());
    EXPECT_NEAR(resident, static_cast<double>(stats.arena_bytes), 0.02 * resident);
    EXPECT_LE(stats.bytes.slack + stats.bytes.tables, stats.bytes.total() / 20);
  };
  check();
  ASSERT_TRUE(e.Decode(seq, 200).ok());
  check();
}

TEST(ResidentTest, MinimumBudgetIsEnoughForItsStream) {
  for (const char* codec : {"codec=kivi", "codec=wf", "codec=wf,bits=3", "codec=token",
                            "codec=kvquant", "codec=hadamard,bits=4"}) {
    for (const uint32_t window : {8u, 16u, 32u}) {
      for (const uint32_t head_dim : {32u, 64u, 256u}) {
        Config config = *ParseConfig(codec + (",window=" + std::to_string(window)));
        config.check = true;
        const std::vector<LayerShape> shapes(6, Shape(2, head_dim, head_dim));
        config.budget_bytes = MinimumBudgetBytes(config, shapes);
        const std::string what = ToText(config) + ", " + std::to_string(head_dim) + " channels: ";
        Engine e(config, shapes, 1, 600);
        ASSERT_TRUE(e.status.ok()) << what << e.status.message();
        e.UseRope(TestRope(head_dim));
        const SeqId seq = e.NewSequence(0);
        const Status prompt = e.Prompt(seq, 200, window);
        ASSERT_TRUE(prompt.ok()) << what << prompt.message();
        const Status decode = e.Decode(seq, 100);
        ASSERT_TRUE(decode.ok()) << what << decode.message();
        EXPECT_LE(e.cache().Stats().bytes.total(), config.budget_bytes) << what;
      }
    }
  }
}

}  // namespace
}  // namespace qevict
