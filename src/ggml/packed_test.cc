// With a budget: attention is what the stored windows say, scores are the column sums, events come
// when they should, and the budget is never exceeded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/half.h"
#include "codecs/kivi_axis.h"
#include "ggml/cache_group.h"
#include "ggml/testing/held.h"

namespace qevict::plugin::testing {
namespace {

using ::testing::ElementsAre;

CacheSpec Spec(uint32_t n_layers = 2, uint32_t n_cells = 512, uint32_t n_streams = 1) {
  CacheSpec spec;
  spec.layers.resize(n_layers);
  spec.n_cells = n_cells;
  spec.n_streams = n_streams;
  return spec;
}

struct Setting {
  const char* name;
  const char* config;
  int rope_mode = GGML_ROPE_TYPE_NEOX;
  ggml_type type = GGML_TYPE_F16;
  uint32_t head_dim = 64;
  uint32_t n_gqa = 2;
};

class SettingTest : public ::testing::TestWithParam<Setting> {
 protected:
  static CacheSpec SpecOf(const Setting& s) {
    CacheSpec spec = Spec();
    for (LayerSpec& layer : spec.layers) {
      layer.rope.mode = s.rope_mode;
      layer.type_k = layer.type_v = s.type;
      layer.head_dim = layer.head_dim_v = s.head_dim;
      layer.n_gqa = s.n_gqa;
    }
    return spec;
  }
};

TEST_P(SettingTest, PromptThenDecode) {
  Twin twin(SpecOf(GetParam()), GetParam().config);
  const std::string config = GetParam().config;
  const bool token = config.find("codec=token") != std::string::npos ||
                     config.find("codec=wf") != std::string::npos;
  const double rms = token ? kTokenRms : kRms;
  ASSERT_TRUE(twin.ours.ok());
  ExpectHeld(RunHeld(twin, TokensOf(0, 0, 200)), "prompt");
  ExpectHeld(RunHeld(twin, TokensOf(0, 200, 100)), "second chunk");
  EXPECT_EQ(twin.ours.stats().packed_tokens, 0u);
  for (int32_t pos = 300; pos < 340; ++pos) {
    const HeldReport report = RunHeld(twin, TokensOf(0, pos, 1));
    ExpectHeld(report, "decode at " + std::to_string(pos), rms);
    ASSERT_GT(report.budget_bytes, 0u);
  }
  const qevict_stats stats = twin.ours.stats();
  EXPECT_GT(stats.packed_tokens + stats.evicted_tokens, 0u);
  EXPECT_LE(stats.peak_bytes, stats.budget_bytes);
  const uint32_t n_layers = twin.ours.cache()->n_layers();  // kv heads count under per_head
  EXPECT_EQ(stats.full_tokens + stats.packed_tokens + stats.evicted_tokens, n_layers * 340u);
}

INSTANTIATE_TEST_SUITE_P(
    Budgets, SettingTest,
    ::testing::Values(Setting{"b20", "preset=qevict,budget=20%,recents=16"},
                      Setting{"b30", "preset=qevict,budget=30%"},
                      Setting{"streaming", "preset=streaming,budget=30%"},
                      Setting{"perhead", "preset=qevict,budget=30%,per_head=1"},
                      Setting{"b40", "preset=qevict,budget=40%"},
                      Setting{"bits4", "preset=qevict,budget=30%,bits=4"},
                      Setting{"pinned", "preset=qevict,budget=30%,promotion=pinned"},
                      Setting{"none", "preset=qevict,budget=30%,promotion=none"},
                      Setting{"slack", "preset=qevict,budget=30%,fill_slack=1"},
                      Setting{"pack", "preset=pack,budget=90%"},
                      Setting{"packwf", "preset=pack,budget=90%,codec=wf,bits=3,window=16"},
                      Setting{"token2", "preset=qevict,budget=30%,codec=token"},
                      Setting{"token8", "preset=qevict,budget=50%,codec=token,bits=8,window=16"},
                      Setting{"wf2", "preset=qevict,budget=30%,codec=wf"},
                      Setting{"wf3perhead", "preset=qevict,budget=30%,codec=wf,bits=3,per_head=1"},
                      Setting{"wflayers",
                              "preset=qevict,budget=40%,codec=wf,window=16,"
                              "layer_bits=0:0.5/3;1:4/1.25"},
                      Setting{"kivi3", "preset=qevict,budget=40%,bits=3"},
                      Setting{"kivipost", "preset=pack,budget=90%,codec=kivi_post,window=32"},
                      Setting{"clip", "preset=pack,budget=90%,codec=kivi_clip"},
                      Setting{"bytes", "preset=qevict,budget=30%,codec=byte_grid"},
                      Setting{"kvquant", "preset=qevict,budget=40%,codec=kvquant,window=32"},
                      Setting{"zipcache", "preset=pack,budget=90%,codec=zipcache,bits=4"},
                      Setting{"ott", "preset=qevict,budget=40%,codec=ott,window=32"},
                      Setting{"nqkv", "preset=pack,budget=90%,codec=nqkv,bits=4"},
                      Setting{"kvtuner",
                              "preset=qevict,budget=40%,codec=kvtuner,window=32,layer_bits=0:8/3"},
                      Setting{"hqe1", "preset=qevict,budget=50%,codec=hqe,bits=1,window=32"},
                      Setting{"hadamard", "preset=qevict,budget=30%,codec=hadamard,bits=3"},
                      Setting{"w4", "preset=qevict,budget=40%,window=4"},
                      Setting{"w16", "preset=qevict,budget=30%,window=16"},
                      Setting{"w32", "preset=qevict,budget=40%,window=32,interval=8"}),
    [](const ::testing::TestParamInfo<Setting>& s) { return s.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Models, SettingTest,
    ::testing::Values(
        Setting{"normal", "preset=qevict,budget=30%", GGML_ROPE_TYPE_NORMAL},
        Setting{"norope", "preset=qevict,budget=30%", kNoRope},
        Setting{"bf16", "preset=qevict,budget=30%", GGML_ROPE_TYPE_NEOX, GGML_TYPE_BF16},
        Setting{"wfnormal", "preset=qevict,budget=30%,codec=wf", GGML_ROPE_TYPE_NORMAL},
        Setting{"wfnorope", "preset=qevict,budget=30%,codec=wf", kNoRope},
        Setting{"wfd80", "preset=qevict,budget=30%,codec=wf,bits=2.25", GGML_ROPE_TYPE_NEOX,
                GGML_TYPE_BF16, 80, 1},
        Setting{"kvquantd80", "preset=qevict,budget=40%,codec=kvquant,bits=3",
                GGML_ROPE_TYPE_NORMAL, GGML_TYPE_BF16, 80, 1},
        Setting{"hadamardnorope", "preset=qevict,budget=30%,codec=hadamard", kNoRope},
        Setting{"d80", "preset=qevict,budget=30%", GGML_ROPE_TYPE_NEOX, GGML_TYPE_F16, 80, 1},
        Setting{"d128", "preset=qevict,budget=30%", GGML_ROPE_TYPE_NEOX, GGML_TYPE_F16, 128, 7}),
    [](const ::testing::TestParamInfo<Setting>& s) { return s.param.name; });

// What is packed are the keys before RoPE: codes decode to the model's unrotated rows, within half
// a step of their grid. This is what a wrong lineage (mode, dimensions, factors, YaRN) would break.
struct Lineage {
  const char* name;
  RopeSpec rope;
};

class LineageTest : public ::testing::TestWithParam<Lineage> {};

TEST_P(LineageTest, CodesAreUnrotatedKeys) {
  CacheSpec spec = Spec(1);
  spec.layers[0].rope = GetParam().rope;
  Twin twin(spec, "preset=qevict,budget=40%");
  std::vector<float> keys;  // by cell, before RoPE
  for (const uint32_t n : {200u, 100u, 1u}) {
    const StepInput in = twin.Input(TokensOf(0, static_cast<int32_t>(keys.size() / 128), n));
    keys.insert(keys.end(), in.rows[0].k.begin(), in.rows[0].k.end());
    ASSERT_EQ(twin.ours.Run(in).status, GGML_STATUS_SUCCESS);
  }
  const KvCache& cache = *twin.ours.cache();
  std::vector<kernels::WindowRef> refs;
  std::vector<WindowId> ids;
  cache.View(0, cache.Sequences(0)[0], refs, ids);
  size_t n_packed = 0;
  kernels::RungCode rungs[kernels::kMaxRungs];
  ASSERT_EQ(cache.Rungs(0, rungs), 2u);
  const codecs::KiviAxisLayout at = codecs::LayoutKiviAxis(2, 8, 64, 64);
  std::vector<float> k(8 * 64);
  for (size_t w = 0; w < refs.size(); ++w) {
    if (refs[w].rung_k == kFullRung) continue;
    const WindowInfo info = cache.info(ids[w]);
    for (size_t h = 0; h < 2; ++h) {
      const uint8_t* block = refs[w].k + h * rungs[1].k_head_bytes;
      codecs::KiviAxisCodec(2, 8, {1, 64, 64}).Decode(0, 8, block, k.data(), nullptr);
      ++n_packed;
      for (size_t t = 0; t < 8; ++t) {
        for (size_t i = 0; i < 64; ++i) {
          uint16_t scale;
          std::memcpy(&scale, block + at.k_scale + 2 * i, 2);
          const float want = keys[(info.cells[t] * 2 + h) * 64 + i];
          ASSERT_NEAR(k[t * 64 + i], want, 0.5f * F16ToF32(scale) + 0.02f) << "channel " << i;
        }
      }
    }
  }
  EXPECT_GT(n_packed, 10u);
}

RopeSpec Rope(int mode, int n_dims = 0) {
  RopeSpec rope;
  rope.mode = mode;
  rope.n_dims = n_dims;
  return rope;
}

RopeSpec Sections(int mode, int a, int b, int c, int d) {
  RopeSpec rope = Rope(mode);
  const int sections[4] = {a, b, c, d};
  std::copy_n(sections, 4, rope.sections);
  return rope;
}

RopeSpec Yarn(int mode) {
  RopeSpec rope = Rope(mode);
  rope.ext_factor = 1.0f;
  rope.freq_scale = 0.25f;
  rope.attn_factor = 1.2f;
  return rope;
}

RopeSpec Factors(int mode) {
  RopeSpec rope = Rope(mode);
  rope.factors = true;
  return rope;
}

INSTANTIATE_TEST_SUITE_P(
    Ropes, LineageTest,
    ::testing::Values(Lineage{"none", Rope(kNoRope)},
                      Lineage{"normal", Rope(GGML_ROPE_TYPE_NORMAL)},
                      Lineage{"neox", Rope(GGML_ROPE_TYPE_NEOX)},
                      Lineage{"partial", Rope(GGML_ROPE_TYPE_NEOX, 48)},
                      Lineage{"partialnormal", Rope(GGML_ROPE_TYPE_NORMAL, 32)},
                      Lineage{"factors", Factors(GGML_ROPE_TYPE_NORMAL)},
                      Lineage{"yarn", Yarn(GGML_ROPE_TYPE_NEOX)},
                      Lineage{"mrope", Sections(GGML_ROPE_TYPE_MROPE, 8, 12, 12, 0)},
                      Lineage{"mropewithrest", Sections(GGML_ROPE_TYPE_MROPE, 8, 10, 10, 4)},
                      Lineage{"imrope", Sections(GGML_ROPE_TYPE_IMROPE, 12, 10, 10, 0)},
                      Lineage{"imropewithrest", Sections(GGML_ROPE_TYPE_IMROPE, 10, 8, 8, 6)}),
    [](const ::testing::TestParamInfo<Lineage>& l) { return l.param.name; });

TEST(EventsTest, AtDecodeStepZeroAndEveryInterval) {
  for (const uint32_t interval : {8u, 12u}) {
    Twin twin(Spec(), "preset=qevict,budget=30%,interval=" + std::to_string(interval));
    RunHeld(twin, TokensOf(0, 0, 150), false);
    RunHeld(twin, TokensOf(0, 150, 150), false);
    std::vector<uint32_t> steps;
    uint64_t events = twin.ours.stats().events;
    EXPECT_EQ(events, 0u);
    for (uint32_t step = 0; step < 40; ++step) {
      ExpectHeld(RunHeld(twin, TokensOf(0, 300 + static_cast<int32_t>(step), 1), false), "decode");
      if (twin.ours.stats().events != events) steps.push_back(step);
      events = twin.ours.stats().events;
    }
    std::vector<uint32_t> expected;
    for (uint32_t step = 0; step < 40; step += interval) expected.push_back(step);
    EXPECT_EQ(steps, expected) << "interval " << interval;
  }
}

TEST(ScoresTest, AreTheColumnSums) {
  for (const char* config : {"preset=qevict,budget=30%,init_rows=0",
                             "preset=qevict,budget=25%,window=4,recents=16,init_rows=0"}) {
    CacheSpec spec = Spec();
    spec.layers[1].n_gqa = 7;
    spec.layers[1].sinks = true;
    Twin twin(spec, config);
    std::vector<Scores> sums(2);
    int32_t pos = 0;
    for (uint32_t step = 0; step < 40; ++step) {
      const uint32_t n = step == 0 ? 170 : step == 1 ? 90 : 1;
      const HeldReport report = RunHeld(twin, TokensOf(0, pos, n));
      ExpectHeld(report, config);
      pos += static_cast<int32_t>(n);
      for (uint32_t il = 0; il < 2; ++il) {
        for (const auto& [birth, mass] : report.masses[il]) sums[il][birth] += mass;
        for (const auto& [birth, score] : ScoresOf(twin.ours, il)) {
          ASSERT_NEAR(score, sums[il][birth], 1e-5 * sums[il][birth] + 1e-7)
              << config << ", step " << step << ", layer " << il << ", window " << birth;
        }
      }
    }
  }
}

// Decoding until the cache is full, and on with removed cells: the budget holds all the way.
TEST(BudgetTest, HoldsOverALongAnswer) {
  Twin twin(Spec(1, 512), "preset=qevict,budget=25%,recents=16");
  RunHeld(twin, TokensOf(0, 0, 100), false);
  for (int32_t pos = 100; pos < 500; ++pos) {
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1), pos % 20 == 0), std::to_string(pos));
  }
  EXPECT_LE(twin.ours.stats().peak_bytes, twin.ours.stats().budget_bytes);
  EXPECT_GT(twin.ours.stats().evicted_tokens, 100u);
}

TEST(BudgetTest, HoldsDuringABoundedPrompt) {
  Twin twin(Spec(2, 1024), "preset=qevict,budget=30%,prefill=bounded");
  for (int32_t pos = 0; pos < 900; pos += 50) {
    const HeldReport report = RunHeld(twin, TokensOf(0, pos, 50), false);
    ExpectHeld(report, "bounded prompt at " + std::to_string(pos));
    EXPECT_GT(report.budget_bytes, 0u);
  }
  for (int32_t pos = 900; pos < 920; ++pos)
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "decode");
  EXPECT_LE(twin.ours.stats().peak_bytes, twin.ours.stats().budget_bytes);
}

// What is resident in memory is what is counted.
TEST(BudgetTest, AgreesWithTheOperatingSystem) {
  Twin twin(Spec(2, 1024), "preset=qevict,budget=20%");
  for (int32_t pos = 0; pos < 800; pos += 200) RunHeld(twin, TokensOf(0, pos, 200), false);
  for (int32_t pos = 800; pos < 820; ++pos) RunHeld(twin, TokensOf(0, pos, 1), false);
  const qevict_stats stats = twin.ours.stats();
  EXPECT_LE(stats.arena_resident_bytes, stats.arena_bytes);
  EXPECT_LE(stats.arena_bytes, stats.budget_bytes);
}

TEST(BudgetTest, AbsoluteOverAllStreams) {
  Twin twin(Spec(2, 512, 3), "preset=qevict,budget=400KiB,recents=16");
  for (uint32_t s = 0; s < 3; ++s) {
    for (int32_t pos = 0; pos < 200; pos += 40) {
      ExpectHeld(RunHeld(twin, TokensOf(s, pos, 40), false),
                 "prompt of stream " + std::to_string(s));
    }
  }
  for (int32_t pos = 200; pos < 230; ++pos) {
    const HeldReport report = RunHeld(twin, {{0, pos}, {1, pos}, {2, pos}});
    ExpectHeld(report, "three streams");
    EXPECT_EQ(report.budget_bytes, 400u * 1024);
  }
}

TEST(BudgetTest, FractionPerStream) {
  Twin twin(Spec(2, 512, 2), "preset=qevict,budget=30%");
  ExpectHeld(RunHeld(twin, Join({TokensOf(0, 0, 200), TokensOf(1, 0, 200)})), "prompts");
  for (int32_t pos = 200; pos < 230; ++pos) {
    ExpectHeld(RunHeld(twin, {{0, pos}, {1, pos}}), "two streams");
  }
}

TEST(BudgetTest, TokensToComeCanBeNamed) {
  Twin twin(Spec(2, 1024), "preset=qevict,budget=50%");
  ASSERT_EQ(qevict_set_budget_tokens(twin.ours.session(), 320), 0) << qevict_last_error();
  RunHeld(twin, TokensOf(0, 0, 300), false);
  for (int32_t pos = 300; pos < 310; ++pos)
    ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "decode");
  EXPECT_EQ(twin.ours.stats().budget_bytes, 160u * 2 * 512);
  EXPECT_GT(twin.ours.stats().packed_tokens, 0u);
}

// Phases: with PROMPT one-row batches are prompt, with DECODE every row is a step of its own.
TEST(PhaseTest, CanBeSet) {
  Twin twin(Spec(), "preset=qevict,budget=30%");
  RunHeld(twin, TokensOf(0, 0, 200), false);
  ASSERT_EQ(qevict_set_phase(twin.ours.session(), QEVICT_PHASE_PROMPT), 0);
  ExpectHeld(RunHeld(twin, TokensOf(0, 200, 1)), "last row of the prompt");
  EXPECT_EQ(twin.ours.stats().events, 0u);
  ASSERT_EQ(qevict_set_phase(twin.ours.session(), QEVICT_PHASE_DECODE), 0);
  ExpectHeld(RunHeld(twin, TokensOf(0, 201, 8)), "eight decode steps in a batch");
  EXPECT_EQ(twin.ours.stats().events, 1u);
  ExpectHeld(RunHeld(twin, TokensOf(0, 209, 8)), "eight more");
  EXPECT_EQ(twin.ours.stats().events, 2u);
  EXPECT_NE(qevict_set_phase(twin.ours.session(), static_cast<qevict_phase>(7)), 0);
}

}  // namespace
}  // namespace qevict::plugin::testing
