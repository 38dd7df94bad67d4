// Sessions: several contexts in one process, models with two caches, abort, and the order in which
// hosts free things.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>

#include "ggml/cache_group.h"
#include "ggml/testing/held.h"
#include "ggml/testing/log_capture.h"

namespace qevict::plugin::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

CacheSpec Spec(uint32_t n_cells = 512) {
  CacheSpec spec;
  spec.layers.resize(2);
  spec.n_cells = n_cells;
  return spec;
}

TEST(SessionsTest, HaveTheirOwnConfigurations) {
  Twin full(Spec(), "preset=full");
  Twin small(Spec(), "preset=qevict,budget=30%");
  Twin large(Spec(), "preset=qevict,budget=60%");
  EXPECT_NE(full.ours.session(), small.ours.session());
  EXPECT_EQ(qevict_last_session(), large.ours.session());
  for (Twin* twin : {&small, &large}) ExpectHeld(RunHeld(*twin, TokensOf(0, 0, 300)), "prompt");
  ExpectExact(full.Step(TokensOf(0, 0, 300)), "full, prompt");
  for (int32_t pos = 300; pos < 320; ++pos) {
    ExpectHeld(RunHeld(small, TokensOf(0, pos, 1)), "small");
    ExpectExact(full.Step(TokensOf(0, pos, 1)), "full");
    ExpectHeld(RunHeld(large, TokensOf(0, pos, 1)), "large");
  }
  EXPECT_EQ(full.ours.stats().budget_bytes, 0u);
  EXPECT_EQ(2 * small.ours.stats().budget_bytes, large.ours.stats().budget_bytes);
  EXPECT_EQ(full.ours.stats().packed_tokens, 0u);
  EXPECT_GT(small.ours.stats().evicted_tokens, large.ours.stats().evicted_tokens);
}

// Draft and target models have tensors of the same names.
TEST(SessionsTest, OfDifferentModelsTakeTurns) {
  CacheSpec draft = Spec(256);
  draft.layers.resize(1);
  draft.layers[0].head_dim = draft.layers[0].head_dim_v = 32;
  Twin target(Spec()), small(draft);
  int32_t pos = 0;
  for (const uint32_t n : {40u, 1u, 5u, 1u}) {
    ExpectExact(small.Step(TokensOf(0, pos, n)), "draft model");
    ExpectExact(target.Step(TokensOf(0, pos, n)), "target model");
    pos += static_cast<int32_t>(n);
  }
}

TEST(SessionsTest, RunInThreads) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([i] {
      CacheSpec spec = Spec(256);
      spec.n_threads = 1;
      Twin twin(spec, i == 1 ? "" : "preset=full");
      for (int32_t pos = 0; pos < 60; pos += 20) {
        EXPECT_EQ(twin.ours.Run(twin.Input(TokensOf(0, pos, 20))).status, GGML_STATUS_SUCCESS);
      }
      EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
      EXPECT_EQ(qevict_last_session(), twin.ours.session());
    });
  }
  for (std::thread& t : threads) t.join();
}

TEST(SessionsTest, UnknownOnesAreErrors) {
  qevict_stats stats;
  EXPECT_LT(qevict_get_stats(987654321, &stats), 0);
  EXPECT_THAT(qevict_last_error(), HasSubstr("987654321"));
  EXPECT_LT(qevict_get_stats(987654321, nullptr), 0);
  EXPECT_LT(qevict_set_budget_tokens(987654321, 100), 0);
  EXPECT_LT(qevict_set_phase(987654321, QEVICT_PHASE_AUTO), 0);
  EXPECT_LT(qevict_get_layer(987654321, 0, 0, nullptr, nullptr, nullptr, 0), 0);
  Engine engine(Spec(), Where::kQevict);
  EXPECT_LT(qevict_get_layer(engine.session(), 0, 0, nullptr, nullptr, nullptr, 0),
            0);  // no step yet
  EXPECT_LT(qevict_get_layer(engine.session(), 3, 0, nullptr, nullptr, nullptr, 0), 0);
}

/// Bytes that the host program reads from the cache's buffers.
uint64_t Reported(const CacheSpec& spec, const std::string& config) {
  Engine engine(spec, Where::kQevict, config);
  EXPECT_TRUE(engine.ok()) << config;
  uint64_t bytes = 0;
  for (ggml_backend_buffer_t buffer : engine.cache_buffers())
    bytes += ggml_backend_buffer_get_size(buffer);
  return bytes;
}

TEST(ReportedSizeTest, IsTheMostThatCanBeResident) {
  const uint64_t f16 = uint64_t{2} * 2 * 2048 * 2 * 64 * 2;  // layers, K and V, cells, heads
  CacheSpec spec = Spec(2048);
  spec.reserve = false;
  const uint64_t slack = 4 * 64;  // tensors are aligned
  EXPECT_EQ(Reported(spec, "preset=full"), f16);
  EXPECT_EQ(Reported(spec, "budget=30%"), f16);  // a prompt is read in full precision
  EXPECT_EQ(Reported(spec, "budget=30%,prefill=bounded,report=full"), f16);
  EXPECT_NEAR(Reported(spec, "budget=30%,prefill=bounded"), 0.3 * static_cast<double>(f16), slack);
  EXPECT_NEAR(Reported(spec, "budget=600KiB"), 600 * 1024, slack);
  EXPECT_EQ(Reported(spec, "budget=1GiB"), f16);
  spec.n_cells = 1024;
  spec.swa_cells = 1024;
  spec.layers[1].swa = true;
  EXPECT_NEAR(Reported(spec, "budget=500KiB"), 500 * 1024, slack);
}

// Tensors of a buffer that is shorter than they are overlap by address.
TEST(ReportedSizeTest, AShortBufferHoldsTheSameCache) {
  for (const std::string budget : {"budget=40%,prefill=bounded", "budget=400KiB"}) {
    CacheSpec spec = Spec(1024);
    spec.n_streams = 2;
    Twin reported(spec, budget), full(spec, budget + ",report=full");
    const auto step = [&](const std::vector<Token>& tokens) {
      const StepInput input = reported.Input(tokens);
      const StepOutput a = reported.ours.Run(input), b = full.ours.Run(full.Input(tokens));
      EXPECT_EQ(a.status, GGML_STATUS_SUCCESS);
      EXPECT_EQ(a.attention, b.attention) << budget;
    };
    for (int32_t pos = 0; pos < 600; pos += 100) step(TokensOf(0, pos, 100));
    for (int32_t pos = 600; pos < 620; ++pos) step(TokensOf(0, pos, 1));
    EXPECT_EQ(reported.ours.ReadState(1, false, 0, 0, 4096),
              full.ours.ReadState(1, false, 0, 0, 4096));
    EXPECT_GT(reported.ours.stats().packed_tokens, 0u);
    EXPECT_THAT(reported.ours.cache()->Validate(), IsEmpty());
  }
}

TEST(LifetimeTest, BufferGoesFirst) {
  Twin twin(Spec());
  twin.Step(TokensOf(0, 0, 30));
  twin.ours.FreeBuffer();
  EXPECT_EQ(twin.ours.stats().n_layers, 0u);
  twin.ours.FreeBackend();
}

TEST(LifetimeTest, BackendGoesFirst) {
  Twin twin(Spec());
  twin.Step(TokensOf(0, 0, 30));
  const uint64_t session = twin.ours.session();
  twin.ours.FreeBackend();
  qevict_stats stats;
  EXPECT_LT(qevict_get_stats(session, &stats), 0);
  twin.ours.Clear();  // the buffer is still there
  EXPECT_THAT(twin.ours.ReadState(0, true, 0, 0, 64), SizeIs(64));
  twin.ours.FreeBuffer();
}

TEST(LifetimeTest, ContextsComeAndGo) {
  for (int i = 0; i < 20; ++i) {
    Twin twin(Spec(256), i % 2 ? "preset=qevict,budget=40%" : "preset=full");
    EXPECT_EQ(twin.ours.Run(twin.Input(TokensOf(0, 0, 20))).status, GGML_STATUS_SUCCESS);
  }
}

// --- Abort ---------------------------------------------------------------------------------------

struct AbortAfter {
  int nodes;
  int calls = 0;
};

void SetAbort(Engine& engine, AbortAfter* when) {
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(engine.backend()));
  auto* set = reinterpret_cast<ggml_backend_set_abort_callback_t>(
      ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_abort_callback"));
  ASSERT_NE(set, nullptr);
  set(
      engine.backend(),
      [](void* data) {
        auto* w = static_cast<AbortAfter*>(data);
        return w->calls++ >= w->nodes;
      },
      when);
}

// The host takes the tokens of an aborted batch back and may send them again.
TEST(AbortTest, EndsTheGraphAndLeavesASoundCache) {
  for (int nodes = 0; nodes < 6; ++nodes) {
    Twin twin(Spec());
    twin.Step(TokensOf(0, 0, 50));
    AbortAfter when{nodes};
    SetAbort(twin.ours, &when);
    const StepInput in = twin.Input(TokensOf(0, 50, 20));
    EXPECT_EQ(twin.ours.Run(in).status, GGML_STATUS_ABORTED) << nodes;
    EXPECT_EQ(when.calls, nodes + 1);
    EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty()) << nodes;
    when.nodes = 1 << 30;
    twin.cells.Remove(0, 50);
    ExpectExact(twin.Step(TokensOf(0, 50, 20)), "the same batch again");
    ExpectExact(twin.Step(TokensOf(0, 70, 1)), "and on");
    EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
  }
}

TEST(AbortTest, UnderABudget) {
  for (int nodes = 0; nodes < 6; ++nodes) {
    Twin twin(Spec(), "preset=qevict,budget=30%,check=1");
    RunHeld(twin, TokensOf(0, 0, 300), false);
    for (int32_t pos = 300; pos < 308; ++pos) RunHeld(twin, TokensOf(0, pos, 1), false);
    AbortAfter when{nodes};
    SetAbort(twin.ours, &when);
    EXPECT_EQ(twin.ours.Run(twin.Input(TokensOf(0, 308, 1))).status, GGML_STATUS_ABORTED) << nodes;
    EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty()) << nodes;
    when.nodes = 1 << 30;
    twin.cells.Remove(0, 308);
    for (int32_t pos = 308; pos < 330; ++pos) {
      ExpectHeld(RunHeld(twin, TokensOf(0, pos, 1)), "after an abort");
    }
  }
}

// --- Two caches (sliding windows in some layers) -------------------------------------------------

CacheSpec TwoCaches(uint32_t n_streams = 1) {
  CacheSpec spec;
  spec.layers.resize(4);
  for (const size_t il : {0u, 1u, 3u}) spec.layers[il].swa = true;
  spec.n_cells = 512;
  spec.swa_cells = 256;
  spec.n_streams = n_streams;
  return spec;
}

TEST(TwoCachesTest, OneStepWritesToBoth) {
  for (const uint32_t n_streams : {1u, 2u}) {
    Twin twin(TwoCaches(n_streams));
    twin.swa = 60;
    for (const size_t il : {0u, 1u, 3u}) twin.masks[il].swa = 60;
    int32_t pos = 0;
    for (uint32_t step = 0; step < 12; ++step) {
      const uint32_t n = step % 3 == 2 ? 1 : 40;
      const auto batch =
          n_streams == 1 ? TokensOf(0, pos, n) : Join({TokensOf(0, pos, n), TokensOf(1, pos, n)});
      ExpectExact(twin.Step(batch), "two caches");
      pos += static_cast<int32_t>(n);
    }
    EXPECT_EQ(twin.ours.stats().n_layers, 4u);
    EXPECT_EQ(twin.ours.cache(0)->n_layers(), 1u);
    EXPECT_EQ(twin.ours.cache(1)->n_layers(), 3u);
    EXPECT_THAT(twin.ours.cache(1)->Sequences(0), SizeIs(1));
    ASSERT_NE(twin.ours.cache(1), nullptr);
  }
}

/// A prompt of n tokens in chunks of 40 over both caches.
void ReadPrompt(Twin& twin, int32_t n) {
  ASSERT_TRUE(twin.ours.ok());
  twin.swa = 60;
  for (const size_t il : {0u, 1u, 3u}) twin.masks[il].swa = 60;
  for (int32_t pos = 0; pos < n; pos += 40) {
    ASSERT_EQ(twin.ours.Run(twin.Input(TokensOf(0, pos, 40))).status, GGML_STATUS_SUCCESS);
  }
}

// A ring of a fraction's size could not hold what always stays: the other cache makes up for it.
TEST(TwoCachesTest, AFractionLeavesARingItsMinimum) {
  CacheSpec spec = TwoCaches();
  spec.n_cells = 1024;
  Twin twin(spec, "preset=qevict,budget=25%,recents=16,check=1");
  ASSERT_NO_FATAL_FAILURE(ReadPrompt(twin, 600));
  for (int32_t pos = 600; pos < 620; ++pos) {
    ASSERT_EQ(twin.ours.Run(twin.Input(TokensOf(0, pos, 1))).status, GGML_STATUS_SUCCESS);
  }
  const qevict_stats s = twin.ours.stats();
  EXPECT_NEAR(static_cast<double>(s.budget_bytes), 0.25 * static_cast<double>(s.capacity_f16_bytes),
              2.0);
  EXPECT_LE(s.full_bytes + s.packed_bytes + s.dormant_bytes + s.tables_bytes + s.slack_bytes,
            s.budget_bytes);
  EXPECT_GT(twin.ours.cache(1)->config().budget_fraction, 0.26);
  EXPECT_LT(twin.ours.cache(0)->config().budget_fraction, 0.24);
}

TEST(TwoCachesTest, ShareAnAbsoluteBudget) {
  Twin twin(TwoCaches(), "preset=qevict,budget=400KiB,recents=16,check=1");
  ASSERT_NO_FATAL_FAILURE(ReadPrompt(twin, 400));
  for (int32_t pos = 400; pos < 430; ++pos) {
    ASSERT_EQ(twin.ours.Run(twin.Input(TokensOf(0, pos, 1))).status, GGML_STATUS_SUCCESS);
    const qevict_stats s = twin.ours.stats();
    EXPECT_LE(s.full_bytes + s.packed_bytes + s.dormant_bytes + s.tables_bytes + s.slack_bytes,
              s.budget_bytes);
    EXPECT_LE(s.budget_bytes, 400u * 1024);
    EXPECT_GE(s.budget_bytes, 400u * 1024 - 2);
  }
  EXPECT_GT(twin.ours.stats().packed_tokens, 0u);
}

// Host options can leave layers in ordinary memory: the first graph says so, once.
TEST(CoverageTest, SaysWhatStaysUncompressed) {
  for (const int first_layer : {-1, 0, 3}) {
    const LogCapture log;
    ggml_backend_reg_t reg = qevict_backend_reg();
    ggml_backend_ptr backend(ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, 0), nullptr));
    ggml_context_ptr ctx = MakeContext(2, false);
    ggml_backend_buffer_ptr buffer;
    if (first_layer >= 0) {
      for (const char* kind : {"k", "v"}) {
        ggml_tensor* t = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, 64, 256, 1);
        ggml_format_name(t, "cache_%s_l%d", kind, first_layer);
      }
      buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
      ASSERT_NE(buffer, nullptr);
    }
    auto* set_n_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"));
    for (int graph = 0; graph < 3; ++graph) set_n_threads(backend.get(), 2);
    if (first_layer < 0) {
      EXPECT_THAT(log.warnings(), ElementsAre(HasSubstr("-nkvo")));
    } else if (first_layer == 0) {
      EXPECT_THAT(log.warnings(), IsEmpty());
    } else {
      EXPECT_THAT(log.warnings(), ElementsAre(HasSubstr("layers 0...2")));
    }
  }
}

}  // namespace
}  // namespace qevict::plugin::testing
