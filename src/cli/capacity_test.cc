#include "cli/capacity.h"

#include <gtest/gtest.h>

#include "base/half.h"
#include "base/parallel.h"
#include "kernels/attention.h"
#include "qevict/cache.h"

namespace qevict::cli {
namespace {

ModelShape Uniform(uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim) {
  ModelShape model;
  model.architecture = "llama";
  model.rope_dims = head_dim;
  for (uint32_t il = 0; il < n_layers; ++il) {
    model.layers.push_back({il, n_kv_heads, head_dim, head_dim, false});
  }
  return model;
}

CacheUse Context(uint32_t n_ctx, uint32_t n_slots = 1, bool unified = false) {
  CacheUse use;
  use.n_ctx = n_ctx;
  use.n_slots = n_slots;
  use.unified = unified;
  return use;
}

Config Parse(const std::string& text) { return *ParseConfig(text); }

TEST(LayOutTest, SlotsAreStreamsUnlessUnified) {
  const ModelShape model = Uniform(2, 2, 64);
  const auto apart = LayOut(model, Context(4096, 4));
  ASSERT_EQ(apart.size(), 1u);
  EXPECT_EQ(apart[0].n_streams, 4u);
  EXPECT_EQ(apart[0].cells_per_stream, 1024u);
  EXPECT_EQ(apart[0].n_sequences, 1u);
  const auto unified = LayOut(model, Context(4096, 4, true));
  EXPECT_EQ(unified[0].n_streams, 1u);
  EXPECT_EQ(unified[0].cells_per_stream, 4096u);
  EXPECT_EQ(unified[0].n_sequences, 4u);
  EXPECT_EQ(unified[0].tokens_per_sequence, 1024u);
}

TEST(LayOutTest, SlidingLayersHaveASmallCacheOfTheirOwn) {
  ModelShape model = Uniform(6, 1, 256);
  model.n_swa = 512;
  for (int il = 0; il < 5; ++il) model.layers[static_cast<size_t>(il)].sliding = true;
  const auto caches = LayOut(model, Context(32768));
  ASSERT_EQ(caches.size(), 2u);
  EXPECT_EQ(caches[0].layers.size(), 1u);
  EXPECT_EQ(caches[0].cells_per_stream, 32768u);
  EXPECT_EQ(caches[1].layers.size(), 5u);
  EXPECT_EQ(caches[1].cells_per_stream, 1024u);  // n_swa + ubatch, in steps of 256
}

TEST(CapacityTest, FullPresetIsTheF16CacheAndTables) {
  const CapacityPlan plan =
      PlanCapacity(Parse("preset=full,sinks=0"), Uniform(24, 2, 64), Context(32768));
  // 24 layers, K and V, 2 heads of 64 channels of 2 bytes: 12 KiB per token.
  EXPECT_EQ(plan.f16_bytes, uint64_t{32768} * 12288);
  EXPECT_EQ(plan.full_bytes(), plan.f16_bytes);
  EXPECT_EQ(plan.packed_bytes(), 0u);
  ASSERT_EQ(plan.layers.size(), 1u);
  EXPECT_EQ(plan.layers[0].full_tokens, 32768u);
  EXPECT_EQ(plan.layers[0].layers.size(), 24u);
}

// By hand: one layer, 1 kv head of 64 channels, windows of 8 tokens.
//   full window    8 * (64 + 64) * 2                          = 2048 bytes
//   packed window  K 64*8*2/8 + 64*4, V 8*64*2/8 + 8*4        =  128 + 256 + 128 + 32 = 544 bytes
TEST(CapacityTest, WindowsByHand) {
  ASSERT_EQ(kernels::FullHeadBytes(8, 64, 64), 2048u);
  ASSERT_EQ(kernels::PackedHeadBytes(2, 8, 64, 64), 544u);
  const Config config = Parse("budget=512KiB,sinks=8,recents=32,q=0.5");
  ModelShape model = Uniform(1, 1, 64);
  model.rope_dims = 0;
  const CapacityPlan plan = PlanCapacity(config, model, Context(8192));
  const LayerPlan& l = plan.layers.at(0);
  EXPECT_EQ(plan.f16_bytes, 8192u * 256u);
  // 1024 windows: 1 sink, 4 recent, 1019 of history. Mandatory with the reserve of one: 6 * (2048 +
  // 26).
  const uint64_t fixed = (1024 * (28 + 32)) * 17 / 16 + 256 + 192 + 8192 * 4 * 17 / 16 + 8320;
  const uint64_t history = (uint64_t{512} << 10) - fixed - 6 * 2075;
  const uint64_t n_full = history / 2 / 2075, n_packed = history / 2 / 571;
  EXPECT_EQ(l.full_tokens, 8 * (5 + n_full));
  EXPECT_EQ(l.packed_tokens, 8 * n_packed);
  EXPECT_EQ(l.full_tokens + l.packed_tokens + l.evicted_tokens, 8192u);
  EXPECT_EQ(plan.full_bytes(), 2048 * (5 + n_full));
  EXPECT_EQ(plan.packed_bytes(), 544 * n_packed);
  EXPECT_LE(plan.total_bytes(), plan.budget_bytes);
}

TEST(CapacityTest, StreamingPacksNothing) {
  const CapacityPlan plan =
      PlanCapacity(Parse("preset=streaming,budget=20%"), Uniform(4, 2, 64), Context(4096));
  EXPECT_EQ(plan.packed_bytes(), 0u);
  EXPECT_GT(plan.layers[0].full_tokens, 700u);
  EXPECT_LE(plan.total_bytes(), plan.budget_bytes);
}

TEST(CapacityTest, BudgetBelowTheMinimumIsRaised) {
  for (const char* budget : {"budget=16KiB", "budget=0.1%"}) {
    const CapacityPlan plan = PlanCapacity(Parse(budget), Uniform(24, 2, 64), Context(4096));
    EXPECT_LT(plan.asked_bytes, plan.minimum_bytes) << budget;
    EXPECT_GE(plan.budget_bytes, plan.minimum_bytes) << budget;
    EXPECT_LT(plan.budget_bytes, plan.minimum_bytes + plan.minimum_bytes / 8) << budget;
    EXPECT_GT(plan.layers[0].full_tokens, 36u) << budget;
  }
}

TEST(CapacityTest, AbsoluteBudgetIsForAllSlots) {
  const ModelShape model = Uniform(4, 2, 64);
  const auto one = PlanCapacity(Parse("budget=1MiB"), model, Context(8192, 1));
  const auto four = PlanCapacity(Parse("budget=1MiB"), model, Context(8192, 4));
  EXPECT_EQ(one.budget_bytes, four.budget_bytes);
  EXPECT_LE(four.total_bytes(), four.budget_bytes);
  const auto share = PlanCapacity(Parse("budget=20%"), model, Context(8192, 4));
  EXPECT_NEAR(static_cast<double>(share.budget_bytes), 0.2 * static_cast<double>(share.f16_bytes),
              4.0);
}

/// What a real cache holds after a prompt of n tokens and the first decision.
CacheStats Simulate(const Config& config, const ModelShape& model, uint32_t n_tokens) {
  std::vector<LayerShape> shapes;
  for (const CacheLayer& l : model.layers) {
    shapes.push_back({l.n_kv_heads, l.head_dim, l.head_dim_v, Elem::kF16, Elem::kF16});
  }
  auto made = KvCache::Create(config, shapes, 1, n_tokens + 256);
  EXPECT_TRUE(made.ok());
  KvCache& cache = **made;
  EXPECT_TRUE(cache.SetBudget(n_tokens, cache.config().budget_fraction).ok());
  auto pool = MakeSerial();
  const SeqId seq = cache.CreateSequence(0);
  const std::vector<float> row(4096, 0.25f);
  for (uint32_t at = 0; at < n_tokens; at += 64) {
    cache.NoteStep(seq, 64, false);
    std::vector<TokenSpec> tokens;
    for (uint32_t i = 0; i < 64; ++i) {
      tokens.push_back({seq, at + i, static_cast<int32_t>(at + i), true});
    }
    std::vector<TokenRef> refs;
    EXPECT_TRUE(cache.Append(tokens, refs).ok());
    for (uint32_t il = 0; il < cache.n_layers(); ++il) {
      EXPECT_TRUE(cache.WriteK(il, refs, row.data(), 0, *pool).ok());
      EXPECT_TRUE(cache.WriteV(il, refs, row.data(), 0, *pool).ok());
    }
  }
  EXPECT_TRUE(cache.NoteStep(seq, 1, true));
  EXPECT_TRUE(cache.RouteAll(seq, config.EffectiveInterval(), *pool).ok());
  return cache.Stats();
}

// Layers of other bits have pools of their own, as in the cache.
TEST(CapacityTest, PoolsAreCountedByBits) {
  const ModelShape model = Uniform(6, 2, 64);
  const auto tables = [&](const std::string& bits) {
    return PlanCapacity(Parse("codec=kvtuner,bits=4" + bits), model, Context(4096)).table_bytes;
  };
  EXPECT_EQ(tables(",layer_bits=*:2/2"), tables(""));
  EXPECT_EQ(tables(",layer_bits=0:2/2") - tables(""), 8320u);
  EXPECT_EQ(tables(",layer_bits=0:2/2;3:8/8") - tables(""), 2 * 8320u);
}

// The paper's recents: a quarter of what the budget holds, not of the context.
TEST(CapacityTest, RecentsByPercentAreOfTheBudget) {
  const Config config = Parse("budget=20%,recents=25%,window=8");
  const CapacityPlan plan = PlanCapacity(config, Uniform(6, 2, 64), Context(4096));
  EXPECT_EQ(plan.budget_bytes, plan.asked_bytes);
  EXPECT_GT(plan.packed_bytes(), 0u);
  EXPECT_EQ(RecentTokens(config, 1024, 4096), 208u);  // 25% of 820, in windows of 8
  EXPECT_EQ(RecentTokens(Parse("budget=1MiB,recents=10%"), 1024, 4096), 104u);
  EXPECT_EQ(RecentTokens(Parse("recents=10"), 1024, 4096), 10u);
}

TEST(CapacityTest, AgreesWithARealCache) {
  const ModelShape model = Uniform(6, 2, 64);
  for (const char* text :
       {"budget=20%", "budget=40%,q=0.3,bits=4,window=16", "budget=10%,window=32",
        "preset=streaming,budget=25%", "budget=30%,recents=25%"}) {
    const Config config = Parse(text);
    const CapacityPlan plan = PlanCapacity(config, model, Context(4096));
    const CacheStats real = Simulate(config, model, 4096);
    const LayerPlan& l = plan.layers.at(0);
    const double tolerance = 0.02 * 4096;
    EXPECT_NEAR(l.full_tokens, static_cast<double>(real.tokens.full) / 6, tolerance) << text;
    EXPECT_NEAR(l.packed_tokens, static_cast<double>(real.tokens.packed) / 6, tolerance) << text;
    const auto total = static_cast<double>(real.bytes.total());
    EXPECT_NEAR(static_cast<double>(plan.total_bytes()), total, 0.03 * total) << text;
    EXPECT_LE(real.bytes.total(), plan.budget_bytes) << text;
  }
}

}  // namespace
}  // namespace qevict::cli
