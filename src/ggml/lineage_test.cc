// Lineage and masks: what single tensors of a graph say.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/half.h"
#include "ggml-cpp.h"
#include "ggml/lineage.h"
#include "ggml/mask.h"

namespace qevict::plugin {
namespace {

TEST(CacheNameTest, IsTakenApart) {
  EXPECT_EQ(ParseCacheName("cache_k_l0").kind, 'k');
  EXPECT_EQ(ParseCacheName("cache_v_l31").kind, 'v');
  EXPECT_EQ(ParseCacheName("cache_v_l31").layer, 31);
  EXPECT_EQ(ParseCacheName("cache_r_l2").kind, 'r');
  EXPECT_EQ(ParseCacheName("cache_mtp_k_l4").kind, 'k');  // llama.cpp's name tags
  EXPECT_EQ(ParseCacheName("cache_mtp_k_l4").layer, 4);
  for (const char* other :
       {"", "cache_", "cache_k", "cache_k_l", "cache_k_lx", "blk.0.attn_k.weight", "leaf_3",
        "node_7", "cache", "xcache_k_l0", "cache_k_l0 (view)x_y"}) {
    EXPECT_EQ(ParseCacheName(other).kind, 0) << other;
  }
}

class GraphTest : public ::testing::Test {
 protected:
  GraphTest() : ctx_(ggml_init({1u << 20, nullptr, false})) {}
  ggml_tensor* Rows(int64_t d = 64, int64_t heads = 2, int64_t n = 3) {
    return ggml_new_tensor_3d(ctx_.get(), GGML_TYPE_F32, d, heads, n);
  }
  ggml_tensor* Positions(std::vector<int32_t> pos) {
    ggml_tensor* t =
        ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_I32, static_cast<int64_t>(pos.size()));
    std::memcpy(t->data, pos.data(), pos.size() * sizeof(int32_t));
    return t;
  }
  ggml_tensor* Rope(ggml_tensor* rows, int mode = GGML_ROPE_TYPE_NEOX) {
    return ggml_rope_ext(ctx_.get(), rows, Positions({5, 6, 7}), nullptr, 48, mode, 4096, 50000.0f,
                         0.5f, 1.0f, 1.25f, 16.0f, 2.0f);
  }
  ggml_context_ptr ctx_;
};

TEST_F(GraphTest, RopeIsFoundThroughViews) {
  ggml_tensor* rope = Rope(Rows());
  EXPECT_EQ(FindRope(rope), rope);
  ggml_tensor* flat = ggml_view_2d(ctx_.get(), rope, 128, 3, rope->nb[2], 0);
  EXPECT_EQ(FindRope(flat), rope);
  EXPECT_EQ(FindRope(ggml_reshape_2d(ctx_.get(), flat, 128, 3)), rope);
  EXPECT_EQ(FindRope(ggml_cont(ctx_.get(), flat)), rope);
}

TEST_F(GraphTest, RopeIsNotFoundBehindOtherOperations) {
  EXPECT_EQ(FindRope(Rows()), nullptr);
  EXPECT_EQ(FindRope(ggml_rms_norm(ctx_.get(), Rope(Rows()), 1e-6f)),
            nullptr);  // a norm after RoPE
  EXPECT_EQ(FindRope(ggml_scale(ctx_.get(), Rope(Rows()), 2.0f)), nullptr);
  EXPECT_EQ(FindRope(ggml_add(ctx_.get(), Rope(Rows()), Rows())), nullptr);
}

TEST_F(GraphTest, RopeBehindOtherOperations) {
  ggml_tensor* rope = Rope(Rows());
  ggml_tensor* normed = ggml_mul(ctx_.get(), ggml_rms_norm(ctx_.get(), rope, 1e-6f),
                                 ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, 64));
  EXPECT_EQ(FindRopeBehind(rope), rope);
  EXPECT_EQ(FindRopeBehind(normed), rope);
  EXPECT_EQ(FindRopeBehind(ggml_view_2d(ctx_.get(), normed, 128, 3, normed->nb[2], 0)), rope);
  EXPECT_EQ(FindRopeBehind(ggml_scale(ctx_.get(), rope, 2.0f)), rope);
  EXPECT_EQ(FindRopeBehind(Rows()), nullptr);
  EXPECT_EQ(FindRopeBehind(ggml_rms_norm(ctx_.get(), Rows(), 1e-6f)), nullptr);
  // What a projection is made of is not the rows' own lineage.
  ggml_tensor* weight = ggml_new_tensor_2d(ctx_.get(), GGML_TYPE_F32, 64, 64);
  EXPECT_EQ(FindRopeBehind(ggml_mul_mat(ctx_.get(), weight, rope)), nullptr);
}

TEST_F(GraphTest, ConstantsAreRead) {
  const RopeParams p = ReadRope(Rope(Rows()));
  EXPECT_EQ(p.pairing, RopePairing::kHalves);
  EXPECT_EQ(p.n_dims, 48u);
  EXPECT_EQ(p.offset, 0u);
  EXPECT_EQ(p.n_ctx_orig, 4096u);
  EXPECT_EQ(p.freq_base, 50000.0f);
  EXPECT_EQ(p.freq_scale, 0.5f);
  EXPECT_EQ(p.ext_factor, 1.0f);
  EXPECT_EQ(p.attn_factor, 1.25f);
  EXPECT_EQ(p.beta_fast, 16.0f);
  EXPECT_EQ(p.beta_slow, 2.0f);
  EXPECT_TRUE(p.freq_factors.empty());
  EXPECT_EQ(ReadRope(Rope(Rows(), GGML_ROPE_TYPE_NORMAL)).pairing, RopePairing::kInterleaved);
}

TEST_F(GraphTest, VisionRopeIsNotUnderstood) {
  int sections[4] = {16, 16, 0, 0};
  ggml_tensor* pos = Positions(std::vector<int32_t>(12));
  ggml_tensor* rope =
      ggml_rope_multi(ctx_.get(), Rows(), pos, nullptr, 32, sections, GGML_ROPE_TYPE_VISION, 4096,
                      10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
  EXPECT_EQ(ReadRope(rope).pairing, RopePairing::kNone);
}

TEST_F(GraphTest, PositionsOfOnePlane) {
  std::vector<int32_t> pos;
  std::vector<uint8_t> positional;
  ReadPositions(Rope(Rows()), 3, pos, positional);
  EXPECT_THAT(pos, ::testing::ElementsAre(5, 6, 7));
  EXPECT_THAT(positional, ::testing::ElementsAre(1, 1, 1));
}

TEST_F(GraphTest, PositionsOfFourPlanes) {
  int sections[4] = {8, 12, 12, 0};
  // A text token, an image token, and a text token whose fourth plane repeats the position.
  ggml_tensor* rope = ggml_rope_multi(
      ctx_.get(), Rows(), Positions({5, 6, 7, 5, 6, 7, 5, 9, 7, 0, 0, 7}), nullptr, 64, sections,
      GGML_ROPE_TYPE_MROPE, 4096, 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
  std::vector<int32_t> pos;
  std::vector<uint8_t> positional;
  ReadPositions(rope, 3, pos, positional);
  EXPECT_THAT(pos, ::testing::ElementsAre(5, 6, 7));
  EXPECT_THAT(positional, ::testing::ElementsAre(1, 0, 1));
}

TEST_F(GraphTest, FrequencyFactorsAreRead) {
  ggml_tensor* factors = ggml_new_tensor_1d(ctx_.get(), GGML_TYPE_F32, 32);
  for (int i = 0; i < 32; ++i) static_cast<float*>(factors->data)[i] = 1.0f + static_cast<float>(i);
  ggml_tensor* rope =
      ggml_rope_ext(ctx_.get(), Rows(), Positions({0, 1, 2}), factors, 64, GGML_ROPE_TYPE_NORMAL,
                    4096, 10000.0f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f);
  const RopeParams p = ReadRope(rope);
  ASSERT_EQ(p.freq_factors.size(), 32u);
  EXPECT_EQ(p.freq_factors[31], 32.0f);
}

// --- Masks ---------------------------------------------------------------------------------------

TEST_F(GraphTest, MaskBitsAreTheVisibleCells) {
  std::mt19937 random(1);
  for (const int64_t n_kv : {1, 31, 32, 63, 64, 65, 127, 256, 300}) {
    ggml_tensor* mask = ggml_new_tensor_4d(ctx_.get(), GGML_TYPE_F16, n_kv, 5, 1, 2);
    auto* m = static_cast<uint16_t*>(mask->data);
    for (int64_t i = 0; i < ggml_nelements(mask); ++i)
      m[i] = random() % 3 ? 0xFC00 : random() % 2 ? 0 : 0x8000;
    for (uint32_t s = 0; s < 2; ++s) {
      MaskBits bits;
      bits.Read(mask, s, 5, static_cast<uint32_t>(n_kv));
      EXPECT_FALSE(bits.has_values());  // -0 is no value
      for (uint32_t r = 0; r < 5; ++r) {
        const uint16_t* row = m + (s * 5 + r) * n_kv;
        for (uint32_t c = 0; c < n_kv + 40; ++c) {
          const bool visible = c < n_kv && row[c] != 0xFC00;
          ASSERT_EQ(bits.test(r, c), visible) << n_kv << " cells, row " << r << ", cell " << c;
          for (const uint32_t n : {1u, 5u, 8u, 32u}) {
            uint32_t want = 0;
            for (uint32_t t = 0; t < n; ++t)
              want |= uint32_t{c + t < n_kv && row[c + t] != 0xFC00} << t;
            ASSERT_EQ(bits.range(r, c, n), want)
                << n_kv << " cells, row " << r << ", from " << c << ", " << n;
          }
        }
      }
    }
  }
}

TEST_F(GraphTest, MaskValues) {
  ggml_tensor* mask = ggml_new_tensor_4d(ctx_.get(), GGML_TYPE_F16, 70, 2, 1, 1);
  auto* m = static_cast<uint16_t*>(mask->data);
  for (int i = 0; i < 140; ++i) m[i] = F32ToF16(static_cast<float>(-(i % 70)));
  m[3] = 0xFC00;
  MaskBits bits;
  bits.Read(mask, 0, 2, 70);
  EXPECT_TRUE(bits.has_values());
  EXPECT_EQ(bits.value(0, 69), -69.0f);
  EXPECT_EQ(bits.value(1, 3), -3.0f);
  EXPECT_FALSE(bits.test(0, 3));
  EXPECT_TRUE(bits.test(1, 3));
}

TEST_F(GraphTest, NoMaskShowsEverything) {
  for (const uint32_t n_kv : {1u, 63u, 64u, 65u, 200u}) {
    MaskBits bits;
    bits.Read(nullptr, 0, 3, n_kv);
    EXPECT_FALSE(bits.has_values());
    for (uint32_t c = 0; c < n_kv + 9; ++c) ASSERT_EQ(bits.test(2, c), c < n_kv) << n_kv;
  }
}

// One mask for all streams.
TEST_F(GraphTest, MaskIsBroadcastOverStreams) {
  ggml_tensor* mask = ggml_new_tensor_4d(ctx_.get(), GGML_TYPE_F16, 8, 1, 1, 1);
  std::memset(mask->data, 0, ggml_nbytes(mask));
  MaskBits bits;
  bits.Read(mask, 3, 1, 8);
  EXPECT_EQ(bits.range(0, 0, 8), 0xFFu);
}

}  // namespace
}  // namespace qevict::plugin
