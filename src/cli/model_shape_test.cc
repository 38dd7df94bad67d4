#include "cli/model_shape.h"

#include <gtest/gtest.h>

#include <cstdlib>

#include "cli/capacity.h"
#include "cli/llm.h"

namespace qevict::cli {
namespace {

std::string Tiny(const std::string& name) {
  const char* folder = std::getenv("QEVICT_TINY_DIR");
  return std::string(folder ? folder : ".") + "/" + name + ".gguf";
}

ModelShape Read(const std::string& name) {
  Result<ModelShape> shape = ReadModelShape(Tiny(name));
  EXPECT_TRUE(shape.ok()) << shape.status().message();
  return shape.ok() ? *shape : ModelShape{};
}

TEST(ModelShapeTest, GroupedHeads) {
  const ModelShape shape = Read("llama-hd64");
  EXPECT_EQ(shape.architecture, "llama");
  EXPECT_EQ(shape.n_ctx_train, 8192u);
  EXPECT_EQ(shape.rope_dims, 64u);
  ASSERT_EQ(shape.layers.size(), 2u);
  EXPECT_EQ(shape.layers[0], (CacheLayer{0, 3, 64, 64, false}));
}

TEST(ModelShapeTest, KeysAndValuesOfDifferentWidth) {
  for (const CacheLayer& layer : Read("mimo2-k96-v64").layers) {
    EXPECT_EQ(layer.head_dim, 96u);
    EXPECT_EQ(layer.head_dim_v, 64u);
  }
}

TEST(ModelShapeTest, WhatTheCacheCannotHoldIsRefused) {
  for (const char* name : {"mamba", "lfm2-hd64", "deepseek2-mla"}) {
    const Result<ModelShape> shape = ReadModelShape(Tiny(name));
    ASSERT_FALSE(shape.ok()) << name;
    EXPECT_EQ(shape.status().code(), StatusCode::kUnimplemented) << name;
  }
  EXPECT_EQ(ReadModelShape("/nonexistent").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(ReadModelShape("/proc/self/status").status().code(), StatusCode::kInvalidArgument);
}

// The layout that plan derives from metadata is the one that llama.cpp sets up.
TEST(ModelShapeTest, LayoutsAreThoseOfLlama) {
  ASSERT_TRUE(InitLlama(false).ok());
  for (const char* name : {"llama-hd64", "llama-hd64-mqa", "llama-hd80", "llama-hd128-mha",
                           "gemma2-hd256", "gemma3-hd64", "gpt-oss-hd64", "mimo2-k96-v64",
                           "qwen2-hd64", "qwen3-hd128", "smollm3-hd64", "phi2-hd80"}) {
    SCOPED_TRACE(name);
    const Result<Model> model = Model::Load(Tiny(name), Device::kQEvict);
    ASSERT_TRUE(model.ok()) << model.status().message();
    ContextOptions options;
    options.n_ctx = 4096;
    const Result<qevict::cli::Context> context =
        qevict::cli::Context::Create(*model, options, *ParseConfig("preset=full"));
    ASSERT_TRUE(context.ok()) << context.status().message();
    const Result<qevict_stats> stats = context->Stats();
    ASSERT_TRUE(stats.ok());
    CacheUse use;
    use.n_ctx = 4096;
    const ModelShape shape = Read(name);
    uint64_t bytes = 0;
    for (const CacheLayout& cache : LayOut(shape, use)) {
      for (const CacheLayer& l : cache.layers) {
        bytes += uint64_t{2} * l.n_kv_heads * (l.head_dim + l.head_dim_v) * cache.cells_per_stream;
      }
    }
    EXPECT_EQ(shape.layers.size(), stats->n_layers);
    EXPECT_EQ(bytes, stats->capacity_f16_bytes);
  }
}

}  // namespace
}  // namespace qevict::cli
