// What cannot be held is refused before anything is computed: the host gets no buffer, and one
// sentence says why.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "ggml/testing/log_capture.h"
#include "ggml/testing/twin.h"

namespace qevict::plugin::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

struct CacheTensor {
  const char* name;
  ggml_type type;
};

// Allocates cache tensors of 64 x 256 in a session of its own. Returns the plug-in's sentences.
std::vector<std::string> ErrorsOf(const std::vector<CacheTensor>& tensors,
                                  bool expect_buffer = false, const char* config = "preset=full",
                                  int64_t ne0 = 64) {
  EXPECT_EQ(qevict_configure(config), 0) << qevict_last_error();
  const LogCapture log;
  ggml_backend_ptr backend(
      ggml_backend_dev_init(ggml_backend_reg_dev_get(qevict_backend_reg(), 0), nullptr));
  ggml_context_ptr ctx(ggml_init({tensors.size() * ggml_tensor_overhead(), nullptr, true}));
  for (const CacheTensor& t : tensors) {
    ggml_set_name(ggml_new_tensor_3d(ctx.get(), t.type, ne0, 256, 1), t.name);
  }
  ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
  EXPECT_EQ(buffer != nullptr, expect_buffer);
  return log.errors();
}

TEST(RefusedCacheTest, AcceptsTheUsualOne) {
  EXPECT_THAT(ErrorsOf({{"cache_k_l0", GGML_TYPE_F16}, {"cache_v_l0", GGML_TYPE_F16}}, true),
              IsEmpty());
  EXPECT_THAT(ErrorsOf({{"cache_k_l0", GGML_TYPE_BF16}, {"cache_v_l0", GGML_TYPE_BF16}}, true),
              IsEmpty());
}

TEST(RefusedCacheTest, RecurrentState) {
  EXPECT_THAT(ErrorsOf({{"cache_r_l0", GGML_TYPE_F32}, {"cache_s_l0", GGML_TYPE_F32}}),
              ElementsAre(AllOf(HasSubstr("recurrent state cache_r_l0"), HasSubstr("-dev none"))));
}

TEST(RefusedCacheTest, QuantizedAndWideTypes) {
  EXPECT_THAT(ErrorsOf({{"cache_k_l0", GGML_TYPE_Q8_0}, {"cache_v_l0", GGML_TYPE_Q8_0}}),
              ElementsAre(AllOf(HasSubstr("q8_0"), HasSubstr("f16 or bf16"))));
  EXPECT_THAT(ErrorsOf({{"cache_k_l0", GGML_TYPE_F32}, {"cache_v_l0", GGML_TYPE_F32}}),
              ElementsAre(AllOf(HasSubstr("f32"), HasSubstr("f16 or bf16"))));
  EXPECT_THAT(ErrorsOf({{"cache_k_l0", GGML_TYPE_F16}, {"cache_v_l0", GGML_TYPE_Q4_0}}),
              ElementsAre(AllOf(HasSubstr("q4_0"), HasSubstr("cache_v_l0"))));
}

TEST(RefusedCacheTest, KeysWithoutValues) {
  EXPECT_THAT(ErrorsOf({{"cache_k_l0", GGML_TYPE_F16}, {"cache_k_l1", GGML_TYPE_F16}}),
              ElementsAre(AllOf(HasSubstr("MLA"), HasSubstr("-dev none"))));
}

TEST(RefusedCacheTest, UnknownKind) {
  EXPECT_THAT(ErrorsOf({{"cache_x_l0", GGML_TYPE_F16}}), ElementsAre(HasSubstr("cache_x_l0")));
}

/// Warnings of an engine that reads a prompt and decodes under `config`.
std::vector<std::string> WarningsOf(const CacheSpec& spec, const std::string& config) {
  const LogCapture log;
  Twin twin(spec, config);
  EXPECT_TRUE(twin.ours.ok()) << config;
  for (int32_t pos = 0; pos < 240; pos += pos < 200 ? 8 : 1) {
    const std::vector<Token> tokens = TokensOf(0, pos, pos < 200 ? 8 : 1);
    EXPECT_EQ(twin.ours.Run(twin.Input(tokens)).status, GGML_STATUS_SUCCESS) << config << pos;
  }
  EXPECT_THAT(log.errors(), IsEmpty()) << config;
  EXPECT_GT(twin.ours.stats().events, 0u) << config;
  return log.warnings();
}

TEST(LeastBudgetTest, IsWhatAlwaysStays) {
  CacheSpec spec;
  for (const uint32_t head_dim : {32u, 64u, 256u}) {  // what a cache tensor does not tell
    spec.layers.resize(2);
    for (LayerSpec& layer : spec.layers) layer.head_dim = layer.head_dim_v = head_dim;
    for (const char* budget : {"10%", "0.1%", "2KiB", "20KiB"}) {
      EXPECT_THAT(WarningsOf(spec, std::string("budget=") + budget),
                  ElementsAre(AllOf(HasSubstr("is raised to"), HasSubstr("2 layers"))))
          << budget;
    }
  }
  spec.layers[0].head_dim = spec.layers[0].head_dim_v = 64;
  EXPECT_THAT(WarningsOf(spec, "budget=95%"), IsEmpty());
}

// Every stream of an absolute budget has sinks and recents.
TEST(LeastBudgetTest, CountsEveryStream) {
  CacheSpec spec;
  spec.n_streams = 4;
  EXPECT_THAT(WarningsOf(spec, "budget=100KiB"), ElementsAre(HasSubstr("is raised to")));
  spec.n_streams = 1;
  EXPECT_THAT(WarningsOf(spec, "budget=100KiB"), IsEmpty());
}

TEST(RefusedCacheTest, HeadsThatKernelsCannotRead) {
  CacheSpec spec;
  spec.layers[0].head_dim = spec.layers[0].head_dim_v = 36;
  const LogCapture log;
  Engine engine(spec, Where::kQevict);
  StepInput in;
  if (engine.ok()) {
    Twin twin(spec);
    EXPECT_NE(twin.Step(TokensOf(0, 0, 4)).status, GGML_STATUS_SUCCESS);
  }
  EXPECT_THAT(log.errors(), ElementsAre(HasSubstr("36")));
}

TEST(BadConfigurationTest, OfTheCApiIsRefusedAtOnce) {
  EXPECT_NE(qevict_configure("preset=qevict,budget=banana"), 0);
  EXPECT_THAT(qevict_last_error(), AllOf(HasSubstr("budget"), HasSubstr("banana")));
}

// A bad QEVICT_CONFIG must not make the device vanish, or the program would run on without us.
TEST(BadConfigurationTest, OfTheEnvironmentRefusesTheCache) {
  if (std::getenv("QEVICT_CONFIG") == nullptr) {
    // qevict_configure() overrides the environment for the rest of the process, so this runs in
    // another one.
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
  EXPECT_EXIT(
      {
        setenv("QEVICT_CONFIG", "preset=qevict,colour=blue", 1);
        const LogCapture log;
        ggml_backend_ptr backend(
            ggml_backend_dev_init(ggml_backend_reg_dev_get(qevict_backend_reg(), 0), nullptr));
        ggml_context_ptr ctx(ggml_init({4 * ggml_tensor_overhead(), nullptr, true}));
        ggml_set_name(ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, 64, 256, 1), "cache_k_l0");
        ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
        const bool said =
            log.errors().size() == 1 && log.errors()[0].find("colour") != std::string::npos;
        std::exit(backend && !buffer && said ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

// --- Graphs that we cannot compute ---------------------------------------------------------------

TEST(RefusedGraphTest, FlashAttentionOff) {
  CacheSpec spec;
  spec.layers.resize(2);
  spec.reserve = false;
  Engine engine(spec, Where::kQevict);
  const LogCapture log;
  GraphKind kind;
  kind.flash_attention = false;
  EXPECT_FALSE(engine.Reserve(16, kind));
  EXPECT_THAT(log.errors(),
              ElementsAre(AllOf(HasSubstr("flash attention is off"), HasSubstr("-fa on"))));
}

TEST(RefusedGraphTest, UnknownOperationOverTheCache) {
  CacheSpec spec;
  spec.reserve = false;
  Engine engine(spec, Where::kQevict);
  const LogCapture log;
  GraphKind kind;
  kind.cast_before = true;
  EXPECT_FALSE(engine.Reserve(16, kind));
  EXPECT_THAT(log.errors(), ElementsAre(AllOf(HasSubstr("CPY"), HasSubstr("not supported"))));
}

TEST(RefusedGraphTest, AllocationWithoutReserve) {
  CacheSpec spec;
  spec.reserve = false;
  Twin twin(spec);
  const LogCapture log;
  GraphKind kind;
  kind.flash_attention = false;
  EXPECT_EQ(twin.ours.Run(twin.Input(TokensOf(0, 0, 4)), kind).status, GGML_STATUS_ALLOC_FAILED);
  EXPECT_THAT(log.errors(), ElementsAre(HasSubstr("flash attention is off")));
}

// llama.cpp's `-fa auto` and `--fit` look at graphs over a cache without memory.
TEST(MeasureTest, DummyBuffersWork) {
  CacheSpec spec;
  spec.dummy = true;
  Engine engine(spec, Where::kQevict);
  EXPECT_TRUE(engine.ok());
  EXPECT_TRUE(engine.Reserve(64));
  const LogCapture log;
  EXPECT_THAT(log.errors(), IsEmpty());
}

}  // namespace
}  // namespace qevict::plugin::testing
