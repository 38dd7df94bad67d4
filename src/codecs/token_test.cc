#include "codecs/token.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "codecs/grid.h"
#include "kernels/problems/reference.h"

namespace qevict::codecs {
namespace {

std::vector<float> Random(std::mt19937& rng, size_t n) {
  std::normal_distribution<float> normal(0.3f, 1.0f);
  std::vector<float> x(n);
  for (float& each : x) each = normal(rng);
  return x;
}

TEST(TokenCodecTest, BytesAreThoseOfTheSpecification) {
  // 64 + 64 channels of 2 bits and two grids of 4 bytes.
  EXPECT_EQ(TokenCodec::Bytes(2, 8, {2, 64, 64}).total(), 8u * 40);
  EXPECT_EQ(TokenCodec::Bytes(2, 8, {2, 64, 64}).keys, 8u * 20);
  EXPECT_EQ(TokenCodec::Bytes(4, 8, {2, 128, 128}).total(), 8u * 136);
  EXPECT_EQ(TokenCodec::Bytes(3, 16, {2, 64, 64}).total(), 16u * 56);
  EXPECT_EQ(TokenCodec::Bytes(8, 8, {2, 64, 64}).total(), 8u * 136);
  EXPECT_EQ(TokenCodec::Bytes(1, 8, {2, 64, 64}).total(), 8u * 24);
  // Units: 80 channels of 1 bit take 96 places, 72 of 2 bits take 80.
  EXPECT_EQ(TokenCodec::Bytes(1, 8, {1, 80, 72}).total(), 8u * (12 + 4 + 12 + 4));
  EXPECT_EQ(TokenCodec::Bytes(2, 8, {1, 80, 72}).total(), 8u * (20 + 4 + 20 + 4));
}

TEST(TokenCodecTest, CodesLieWhereTheSpecificationSays) {
  // Two bits: place 4 i + j of a key in byte j from bit 2 i on.
  const TokenCodec codec(2, 8, {1, 16, 16});
  std::vector<float> k(16), v(16);
  for (int c = 0; c < 16; ++c) k[c] = v[c] = static_cast<float>(c % 4);
  std::vector<uint8_t> block(codec.bytes().total());
  codec.Encode(0, 1, k.data(), v.data(), block.data());
  uint32_t word = 0;
  std::memcpy(&word, block.data(), 4);
  EXPECT_EQ(word, 0xFFAA5500u);  // place 4 i + j holds code j
  // Values: lane l has token 0 of places l and 8 + l in bits 0-1 and 8-9.
  for (uint32_t lane = 0; lane < 8; ++lane) {
    std::memcpy(&word, block.data() + codec.bytes().keys + 4 * lane, 4);
    EXPECT_EQ(word, (lane % 4) | (lane % 4) << 8) << lane;
  }
  // A second token of values goes to the upper half.
  k.resize(32);
  v.resize(32, 3.0f);
  v[16] = 0.0f;  // so that its grid is 0, 1, 2, 3
  codec.Encode(0, 2, k.data(), v.data(), block.data());
  std::memcpy(&word, block.data() + codec.bytes().keys + 4, 4);
  EXPECT_EQ(word, 0x03030101u);
}

TEST(TokenCodecTest, RoundTripErrorIsHalfAStep) {
  std::mt19937 rng(1);
  for (const uint32_t bits : {1u, 2u, 3u, 4u, 8u}) {
    for (const uint32_t window : {8u, 16u, 32u}) {
      for (const uint32_t d : {8u, 64u, 80u, 128u}) {
        const RowShape shape{1, d, d + 8};
        const TokenCodec codec(bits, window, shape);
        const uint32_t n = window - 3;
        const std::vector<float> k = Random(rng, n * d), v = Random(rng, n * (d + 8));
        std::vector<uint8_t> block(codec.bytes().total() + 1, 0xAA);
        codec.Encode(0, n, k.data(), v.data(), block.data());
        EXPECT_EQ(block.back(), 0xAA);
        std::vector<float> k2(k.size()), v2(v.size());
        codec.Decode(0, n, block.data(), k2.data(), v2.data());
        const auto check = [&](const std::vector<float>& x, const std::vector<float>& y,
                               uint32_t dim) {
          for (uint32_t t = 0; t < n; ++t) {
            float low = 0, high = 0;
            RowRange(&x[t * dim], dim, &low, &high);
            const float step = (high - low) / static_cast<float>((1u << bits) - 1);
            for (uint32_t c = 0; c < dim; ++c) {
              ASSERT_NEAR(x[t * dim + c], y[t * dim + c], 0.5f * step + 0.004f) << bits << " " << d;
            }
          }
        };
        check(k, k2, d);
        check(v, v2, d + 8);
      }
    }
  }
}

TEST(TokenCodecTest, KernelsReadWhatIsDecoded) {
  std::mt19937 rng(2);
  for (const uint32_t bits : {1u, 2u, 3u, 4u, 8u}) {
    const TokenCodec codec(bits, 16, {1, 72, 40});
    const std::vector<float> k = Random(rng, 16 * 72), v = Random(rng, 16 * 40);
    std::vector<uint8_t> block(codec.bytes().total());
    codec.Encode(0, 16, k.data(), v.data(), block.data());
    std::vector<float> k2(k.size()), v2(v.size());
    codec.Decode(0, 16, block.data(), k2.data(), v2.data());
    kernels::AttentionShape s;
    s.n_kv_heads = 1;
    s.head_dim = 72;
    s.head_dim_v = 40;
    s.window = 16;
    s.n_rungs = 2;
    s.rungs[1] = {codec.format(), block.size(), block.size(), codec.token_codes(), nullptr};
    const kernels::WindowRef window{block.data(), block.data() + codec.bytes().keys, 0, 1, 1, 1};
    std::vector<double> row(72);
    for (uint32_t t = 0; t < 16; ++t) {
      kernels::ReferenceKey(s, window, 0, t, row.data());
      for (uint32_t c = 0; c < 72; ++c) ASSERT_NEAR(row[c], k2[t * 72 + c], 1e-5) << bits;
      kernels::ReferenceValue(s, window, 0, t, row.data());
      for (uint32_t c = 0; c < 40; ++c) ASSERT_NEAR(row[c], v2[t * 40 + c], 1e-5) << bits;
    }
  }
}

TEST(TokenCodecTest, BadNumbersStayAlone) {
  const TokenCodec codec(4, 8, {1, 16, 16});
  std::vector<float> k(32, 1.0f), v(32);
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);
  k[3] = std::numeric_limits<float>::quiet_NaN();
  v[5] = std::numeric_limits<float>::infinity();
  v[20] = 1e30f;
  std::vector<uint8_t> block(codec.bytes().total());
  codec.Encode(0, 2, k.data(), v.data(), block.data());
  std::vector<float> k2(32), v2(32);
  codec.Decode(0, 2, block.data(), k2.data(), v2.data());
  for (const float x : k2) EXPECT_TRUE(std::isfinite(x));
  for (const float x : v2) EXPECT_TRUE(std::isfinite(x));
  EXPECT_EQ(k2[3], 0.0f);
  EXPECT_EQ(k2[20], 1.0f);
  EXPECT_NEAR(v2[15], 15.0f, 0.6f);
}

}  // namespace
}  // namespace qevict::codecs
