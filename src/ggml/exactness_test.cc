// At preset=full the plug-in's attention is at least as exact as ggml's own, for every shape that
// models have.
#include <gtest/gtest.h>

#include <string>

#include "ggml/testing/twin.h"

namespace qevict::plugin::testing {
namespace {

struct Shape {
  const char* name;
  uint32_t n_kv_heads, n_gqa, head_dim, head_dim_v;
  ggml_type type_k = GGML_TYPE_F16, type_v = GGML_TYPE_F16;
};

class ShapeTest : public ::testing::TestWithParam<Shape> {
 protected:
  static CacheSpec Spec() {
    const Shape& s = GetParam();
    CacheSpec spec;
    LayerSpec& layer = spec.layers[0];
    layer.n_kv_heads = s.n_kv_heads;
    layer.n_gqa = s.n_gqa;
    layer.head_dim = s.head_dim;
    layer.head_dim_v = s.head_dim_v;
    layer.type_k = s.type_k;
    layer.type_v = s.type_v;
    return spec;
  }
};

std::string NameOf(const ::testing::TestParamInfo<Shape>& shape) { return shape.param.name; }

// Prompt chunks of all sizes, then decoding.
TEST_P(ShapeTest, ChunksThenDecode) {
  CacheSpec spec = Spec();
  spec.n_cells = 512;
  Twin twin(spec);
  ASSERT_TRUE(twin.ours.ok());
  int32_t pos = 0;
  for (const uint32_t n : {1u, 7u, 64u, 200u, 1u, 1u, 1u}) {
    ExpectExact(twin.Step(TokensOf(0, pos, n)),
                (std::string(GetParam().name) + ", rows " + std::to_string(n)).c_str());
    pos += static_cast<int32_t>(n);
  }
}

INSTANTIATE_TEST_SUITE_P(
    HeadDims, ShapeTest,
    ::testing::Values(Shape{"d64", 2, 2, 64, 64}, Shape{"d80", 2, 2, 80, 80},
                      Shape{"d96", 2, 2, 96, 96}, Shape{"d112", 2, 2, 112, 112},
                      Shape{"d128", 2, 2, 128, 128}, Shape{"d256", 1, 4, 256, 256},
                      Shape{"d128v64", 2, 2, 128, 64}, Shape{"d96v128", 2, 2, 96, 128}),
    NameOf);

INSTANTIATE_TEST_SUITE_P(Groups, ShapeTest,
                         ::testing::Values(Shape{"gqa1", 3, 1, 64, 64}, Shape{"gqa3", 3, 3, 64, 64},
                                           Shape{"gqa7", 2, 7, 64, 64},
                                           Shape{"gqa8", 1, 8, 128, 128}),
                         NameOf);

INSTANTIATE_TEST_SUITE_P(
    Types, ShapeTest,
    ::testing::Values(Shape{"bf16", 2, 2, 64, 64, GGML_TYPE_BF16, GGML_TYPE_BF16},
                      Shape{"bf16d128", 2, 4, 128, 128, GGML_TYPE_BF16, GGML_TYPE_BF16},
                      Shape{"f16bf16", 2, 2, 64, 64, GGML_TYPE_F16, GGML_TYPE_BF16},
                      Shape{"bf16f16", 2, 2, 64, 64, GGML_TYPE_BF16, GGML_TYPE_F16}),
    NameOf);

// What is stored is what ggml would store, bit for bit.
TEST(StoredRowsTest, AreGgmlsRows) {
  for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_BF16}) {
    CacheSpec spec;
    spec.layers.resize(2);
    for (LayerSpec& layer : spec.layers) layer.type_k = layer.type_v = type;
    Twin twin(spec);
    twin.Step(TokensOf(0, 0, 37));
    twin.Step(TokensOf(0, 37, 1));
    for (uint32_t il = 0; il < 2; ++il) {
      for (const bool is_k : {true, false}) {
        EXPECT_EQ(twin.ours.Rows(il, is_k, 0), twin.cpu.Rows(il, is_k, 0))
            << ggml_type_name(type) << ", layer " << il;
      }
    }
  }
}

// Layers of one model differ: shapes, RoPE, sinks and soft caps.
TEST(LayersTest, OfDifferentShapes) {
  CacheSpec spec;
  spec.layers.resize(4);
  spec.layers[1].n_kv_heads = 1;
  spec.layers[1].head_dim = spec.layers[1].head_dim_v = 128;
  spec.layers[2].sinks = true;
  spec.layers[2].rope.mode = kNoRope;
  spec.layers[3].softcap = 20.0f;
  spec.layers[3].rope.mode = GGML_ROPE_TYPE_NORMAL;
  spec.layers[3].rope.n_dims = 32;
  Twin twin(spec);
  ExpectExact(twin.Step(TokensOf(0, 0, 50)), "four kinds of layers, prompt");
  ExpectExact(twin.Step(TokensOf(0, 50, 1)), "four kinds of layers, decode");
}

TEST(LayersTest, ThatShareACache) {
  CacheSpec spec;
  spec.layers.resize(3);
  spec.layers[2].shares = 0;
  Twin twin(spec);
  ExpectExact(twin.Step(TokensOf(0, 0, 33)), "shared cache, prompt");
  ExpectExact(twin.Step(TokensOf(0, 33, 1)), "shared cache, decode");
}

// Rows that are views of a wider tensor have strides.
TEST(LayersTest, FusedQkv) {
  for (const int mode : {GGML_ROPE_TYPE_NEOX, GGML_ROPE_TYPE_NORMAL, kNoRope}) {
    CacheSpec spec;
    spec.layers[0].fused_qkv = true;
    spec.layers[0].rope.mode = mode;
    Twin twin(spec);
    ExpectExact(twin.Step(TokensOf(0, 0, 40)), "fused qkv, prompt");
    ExpectExact(twin.Step(TokensOf(0, 40, 1)), "fused qkv, decode");
  }
}

TEST(ThreadsTest, DoNotChangeTheResult) {
  std::vector<std::vector<float>> results;
  for (const int n_threads : {1, 2, 3, 8}) {
    CacheSpec spec;
    spec.n_threads = n_threads;
    Twin twin(spec);
    twin.Step(TokensOf(0, 0, 100));
    results.push_back(twin.last_ours().attention[0]);
    twin.Step(TokensOf(0, 100, 1));
    results.back().insert(results.back().end(), twin.last_ours().attention[0].begin(),
                          twin.last_ours().attention[0].end());
    EXPECT_EQ(results.back(), results.front()) << n_threads << " threads";
  }
}

}  // namespace
}  // namespace qevict::plugin::testing
