#include "codecs/kivi_axis.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/half.h"
#include "kernels/attention.h"

namespace qevict::codecs {
namespace {

constexpr uint32_t kW = 4;

float F16At(const uint8_t* p, size_t i) {
  uint16_t h;
  std::memcpy(&h, p + 2 * i, 2);
  return F16ToF32(h);
}

/// A block with everything that is needed to encode and decode it.
struct Block {
  uint32_t bits, window, d, dv, n;
  KiviAxisLayout at;
  std::vector<uint8_t> bytes;
  std::vector<float> k_hat, v_hat;

  Block(uint32_t bits_, uint32_t window_, uint32_t d_, uint32_t dv_, uint32_t n_,
        const std::vector<float>& k, const std::vector<float>& v)
      : bits(bits_),
        window(window_),
        d(d_),
        dv(dv_),
        n(n_),
        at(LayoutKiviAxis(bits_, window_, d_, dv_)),
        bytes(at.end + 1, 0xAA),
        k_hat(size_t{n_} * d_),
        v_hat(size_t{n_} * dv_) {
    KiviAxisCodec(bits, window, {1, d, dv}).Encode(0, n, k.data(), v.data(), bytes.data());
    EXPECT_EQ(bytes[at.end], 0xAA) << "wrote past the block";
    KiviAxisCodec(bits, window, {1, d, dv}).Decode(0, n, bytes.data(), k_hat.data(), v_hat.data());
  }
  float k_scale(size_t i) const { return F16At(bytes.data() + at.k_scale, i); }
  float k_zero(size_t i) const { return F16At(bytes.data() + at.k_zero, i); }
  float v_scale(size_t i) const { return F16At(bytes.data() + at.v_scale, i); }
  float v_zero(size_t i) const { return F16At(bytes.data() + at.v_zero, i); }
  uint32_t Code(size_t part, size_t j) const {
    return (bytes[part + j * bits / 8] >> (j * bits % 8)) & ((1u << bits) - 1);
  }
};

std::vector<float> Random(std::mt19937& rng, size_t n, float sigma = 1.0f) {
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> x(n);
  for (float& each : x) each = normal(rng);
  return x;
}

// ---- Vectors computed by hand: windows of 4 tokens, two bits ----

TEST(KiviAxisTest, SpecificationVectorKeys) {
  // Eight channels; 0 and 1 carry the vectors, the others are constant.
  const float channel0[4] = {.1f, .4f, -.2f, 1.0f}, channel1[4] = {-2.0f, -1.0f, 1.0f, .5f};
  std::vector<float> k(32, 0.0f), v(32, 0.0f);
  for (size_t t = 0; t < 4; ++t) {
    k[t * 8] = channel0[t];
    k[t * 8 + 1] = channel1[t];
  }
  const Block b(2, kW, 8, 8, 4, k, v);
  EXPECT_EQ(b.k_scale(0), .39990234375f);
  EXPECT_EQ(b.k_zero(0), -.199951171875f);
  EXPECT_EQ(b.bytes[0], 201);
  EXPECT_EQ(b.k_scale(1), 1.0f);
  EXPECT_EQ(b.bytes[1], 180);
  const float expected0[4] = {.199951f, .599854f, -.199951f, .999756f},
              expected1[4] = {-2, -1, 1, 0};
  for (size_t t = 0; t < 4; ++t) {
    EXPECT_NEAR(b.k_hat[t * 8], expected0[t], 1e-6);
    EXPECT_EQ(b.k_hat[t * 8 + 1], expected1[t]);
  }
}

TEST(KiviAxisTest, SpecificationVectorValues) {
  const std::vector<float> rows = {.2f, -.4f, .6f,  .1f, 1,  1,    1,    1,
                                   0,   .3f,  -.3f, .9f, -1, -.5f, .25f, 2};
  // The vectors have four channels; a head has a multiple of eight: each row is given twice.
  std::vector<float> k(32, 0.0f), v;
  for (size_t t = 0; t < 4; ++t) {
    for (int twice = 0; twice < 2; ++twice)
      v.insert(v.end(), rows.begin() + 4 * t, rows.begin() + 4 * t + 4);
  }
  const Block b(2, kW, 8, 8, 4, k, v);
  const uint8_t expected[4] = {178, 0, 201, 208};
  for (size_t t = 0; t < 4; ++t) {
    EXPECT_EQ(b.bytes[b.at.v_codes + 2 * t], expected[t]) << t;
    EXPECT_EQ(b.bytes[b.at.v_codes + 2 * t + 1], expected[t]) << t;
  }
  const float first[4] = {.266602f, -.399902f, .599854f, .266602f};
  for (size_t c = 0; c < 4; ++c) {
    EXPECT_NEAR(b.v_hat[c], first[c], 1e-6);
    EXPECT_EQ(b.v_hat[8 + c], 1.0f);
  }
  EXPECT_EQ(b.v_scale(1), 1.0f);
  EXPECT_EQ(b.v_zero(1), 1.0f);
}

// Code j lies in bits [j * b, (j + 1) * b) of a little-endian word.
TEST(KiviAxisTest, PackingVectors) {
  const std::vector<float> zeros(8, 0.0f);
  const Block four(4, 1, 8, 8, 1, zeros, {0, 2, 4, 5, 6, 8, 10, 15});
  EXPECT_EQ(four.v_scale(0), 1.0f);
  const uint32_t word = 0xFA865420u;
  for (size_t i = 0; i < 4; ++i)
    EXPECT_EQ(four.bytes[four.at.v_codes + i], (word >> (8 * i)) & 0xFF);
  const Block two(2, 1, 8, 8, 1, zeros, {1, 2, 3, 0, 1, 2, 3, 0});
  EXPECT_EQ(two.bytes[two.at.v_codes], 57);
  EXPECT_EQ(two.bytes[two.at.v_codes + 1], 57);
}

TEST(KiviAxisTest, GoldenLayout) {
  const KiviAxisLayout at = LayoutKiviAxis(2, 8, 128, 64);
  EXPECT_EQ(at.k_codes, 0u);
  EXPECT_EQ(at.k_scale, 256u);
  EXPECT_EQ(at.k_zero, 512u);
  EXPECT_EQ(at.v_codes, 768u);
  EXPECT_EQ(at.v_scale, 896u);
  EXPECT_EQ(at.v_zero, 912u);
  EXPECT_EQ(at.end, 928u);
}

// Bytes per token and head: (D + Dv) b / 8 codes, 4 D / W and 4 for grids.
TEST(KiviAxisTest, ByteTable) {
  const uint32_t dims[3] = {64, 128, 256}, int2[3] = {68, 132, 260}, int4[3] = {100, 196, 388};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(kernels::PackedHeadBytes(2, 8, dims[i], dims[i]), 8u * int2[i]);
    EXPECT_EQ(kernels::PackedHeadBytes(4, 8, dims[i], dims[i]), 8u * int4[i]);
    EXPECT_EQ(kernels::FullHeadBytes(8, dims[i], dims[i]), 8u * 4 * dims[i]);
  }
}

TEST(KiviAxisTest, LayoutAgreesWithTheKernels) {
  for (uint32_t bits : {2u, 4u}) {
    for (uint32_t window : {1u, 2u, 4u, 8u, 16u, 32u}) {
      for (uint32_t d : {8u, 64u, 80u, 96u, 128u, 512u}) {
        for (uint32_t dv : {8u, 64u, 128u}) {
          EXPECT_EQ(LayoutKiviAxis(bits, window, d, dv).end,
                    kernels::PackedHeadBytes(bits, window, d, dv))
              << bits << " " << window << " " << d << " " << dv;
        }
      }
    }
  }
}

// ---- Properties ----

/// |x - decoded| <= scale/2 + what rounding the grid to f16 costs.
void ExpectWithinGrid(float x, float decoded, float low, float high, float scale, float zero,
                      uint32_t bits) {
  const double max_code = (1 << bits) - 1;
  const double wanted_scale = (static_cast<double>(high) - low) / max_code;
  const bool constant = wanted_scale < 0x1p-24;
  const double rounding = std::abs(static_cast<double>(low) - zero) +
                          (constant ? high - low : max_code * std::abs(wanted_scale - scale)) +
                          1e-6 * (std::abs(low) + std::abs(high));
  EXPECT_LE(std::abs(static_cast<double>(x) - decoded), (constant ? 0.0 : 0.5 * scale) + rounding)
      << "x " << x << " decoded " << decoded << " in [" << low << ", " << high << "]";
}

void ExpectErrorBound(const Block& b, const std::vector<float>& k, const std::vector<float>& v) {
  for (size_t c = 0; c < b.d; ++c) {
    float low = k[c], high = k[c];
    for (size_t t = 1; t < b.n; ++t) {
      low = std::min(low, k[t * b.d + c]);
      high = std::max(high, k[t * b.d + c]);
    }
    for (size_t t = 0; t < b.n; ++t) {
      ExpectWithinGrid(k[t * b.d + c], b.k_hat[t * b.d + c], low, high, b.k_scale(c), b.k_zero(c),
                       b.bits);
    }
  }
  for (size_t t = 0; t < b.n; ++t) {
    const auto row = v.begin() + static_cast<std::ptrdiff_t>(t * b.dv);
    const auto [low, high] = std::minmax_element(row, row + b.dv);
    for (size_t c = 0; c < b.dv; ++c) {
      ExpectWithinGrid(row[static_cast<std::ptrdiff_t>(c)], b.v_hat[t * b.dv + c], *low, *high,
                       b.v_scale(t), b.v_zero(t), b.bits);
    }
  }
}

TEST(KiviAxisTest, RandomRoundTripsStayWithinTheGrid) {
  std::mt19937 rng(7);
  for (uint32_t bits : {2u, 4u}) {
    for (uint32_t window : {1u, 2u, 4u, 8u, 16u, 32u}) {
      for (uint32_t d : {8u, 64u, 80u}) {
        for (float sigma : {1e-4f, 1.0f, 300.0f}) {
          const uint32_t dv = d == 80 ? 64 : d;
          const uint32_t n = 1 + rng() % window;
          const std::vector<float> k = Random(rng, size_t{n} * d, sigma),
                                   v = Random(rng, size_t{n} * dv, sigma);
          ExpectErrorBound(Block(bits, window, d, dv, n, k, v), k, v);
        }
      }
    }
  }
}

// A grid from 0 to 2^b-1 in exact steps reproduces itself, bytes included.
TEST(KiviAxisTest, ExactValuesAreIdempotent) {
  std::mt19937 rng(8);
  for (uint32_t bits : {2u, 4u}) {
    const uint32_t levels = 1u << bits;
    const float top = static_cast<float>(levels - 1);
    std::vector<float> k(size_t{8} * 16), v(size_t{8} * 16);
    for (float& x : k) x = static_cast<float>(rng() % levels) * 0.25f - 2.0f;
    for (float& x : v) x = static_cast<float>(rng() % levels) * 0.5f + 1.0f;
    for (size_t i = 0; i < 16; ++i) {  // both ends occur in each group
      k[i] = -2.0f;
      k[16 + i] = top * 0.25f - 2.0f;
    }
    for (size_t t = 0; t < 8; ++t) {
      v[t * 16] = 1.0f;
      v[t * 16 + 1] = top * 0.5f + 1.0f;
    }
    const Block first(bits, 8, 16, 16, 8, k, v);
    EXPECT_EQ(first.k_hat, k);
    EXPECT_EQ(first.v_hat, v);
    const Block second(bits, 8, 16, 16, 8, first.k_hat, first.v_hat);
    EXPECT_EQ(first.bytes, second.bytes);
  }
}

TEST(KiviAxisTest, PartialWindowLeavesMissingTokensOutOfTheGrid) {
  std::mt19937 rng(9);
  for (uint32_t n = 1; n <= 8; ++n) {
    const std::vector<float> k = Random(rng, size_t{n} * 16), v = Random(rng, size_t{n} * 16);
    const Block b(2, 8, 16, 16, n, k, v);
    ExpectErrorBound(b, k, v);
    for (size_t c = 0; c < 16; ++c) {
      for (size_t t = n; t < 8; ++t) EXPECT_EQ(b.Code(b.at.k_codes, c * 8 + t), 0u);
    }
    for (size_t t = n; t < 8; ++t) {
      EXPECT_EQ(b.v_scale(t), 0.0f);
      EXPECT_EQ(b.v_zero(t), 0.0f);
      for (size_t c = 0; c < 16; ++c) EXPECT_EQ(b.Code(b.at.v_codes, t * 16 + c), 0u);
    }
  }
}

TEST(KiviAxisTest, ConstantGroups) {
  const std::vector<float> x(64, -3.5f);
  const Block b(2, 8, 8, 8, 8, x, x);
  EXPECT_EQ(b.k_hat, x);
  EXPECT_EQ(b.v_hat, x);
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(b.k_scale(i), 1.0f);
    EXPECT_EQ(b.v_scale(i), 1.0f);
  }
  // A spread below the smallest f16 counts as constant.
  std::vector<float> nearly(64, 0.0f);
  nearly[3] = 1e-9f;
  const Block c(2, 8, 8, 8, 8, nearly, nearly);
  EXPECT_EQ(c.k_scale(3), 1.0f);
  EXPECT_EQ(c.k_hat, std::vector<float>(64, 0.0f));
}

TEST(KiviAxisTest, AllZeroes) {
  const std::vector<float> zeros(64, 0.0f);
  const Block b(4, 8, 8, 8, 8, zeros, zeros);
  EXPECT_EQ(b.k_hat, zeros);
  EXPECT_EQ(b.v_hat, zeros);
}

// bf16 rows reach 3e38; the f16 grid ends at 65504.
TEST(KiviAxisTest, GridsBeyondF16Clamp) {
  std::vector<float> x(64, 0.0f);
  x[0] = -1e30f;
  x[8] = 1e30f;
  x[1] = std::numeric_limits<float>::max();
  x[9] = -std::numeric_limits<float>::max();  // the difference overflows f32
  x[2] = 1e6f;
  x[10] = 1e6f + 1;
  const Block b(2, 8, 8, 8, 8, x, x);
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_LE(std::abs(b.k_scale(i)), 65504.0f);
    EXPECT_LE(std::abs(b.k_zero(i)), 65504.0f);
    EXPECT_LE(std::abs(b.v_scale(i)), 65504.0f);
    EXPECT_LE(std::abs(b.v_zero(i)), 65504.0f);
  }
  for (float y : b.k_hat) EXPECT_TRUE(std::isfinite(y));
  for (float y : b.v_hat) EXPECT_TRUE(std::isfinite(y));
  EXPECT_EQ(b.k_hat[0], -65504.0f);
  EXPECT_EQ(b.k_hat[8], 2 * 65504.0f);
}

TEST(KiviAxisTest, NonFiniteInputsCountAsZero) {
  std::mt19937 rng(10);
  std::vector<float> k = Random(rng, 64), v = Random(rng, 64);
  std::vector<float> clean_k = k, clean_v = v;
  const float bad[3] = {std::numeric_limits<float>::quiet_NaN(),
                        std::numeric_limits<float>::infinity(),
                        -std::numeric_limits<float>::infinity()};
  for (size_t i = 0; i < 64; i += 5) {
    k[i] = v[i] = bad[i % 3];
    clean_k[i] = clean_v[i] = 0.0f;
  }
  EXPECT_EQ(Block(2, 8, 8, 8, 8, k, v).bytes, Block(2, 8, 8, 8, 8, clean_k, clean_v).bytes);
}

TEST(KiviAxisTest, EitherSideMayBeDecodedAlone) {
  std::mt19937 rng(11);
  const std::vector<float> k = Random(rng, 64), v = Random(rng, 64);
  const Block b(4, 8, 8, 8, 8, k, v);
  std::vector<float> k_only(64), v_only(64);
  KiviAxisCodec(4, 8, {1, 8, 8}).Decode(0, 8, b.bytes.data(), k_only.data(), nullptr);
  KiviAxisCodec(4, 8, {1, 8, 8}).Decode(0, 8, b.bytes.data(), nullptr, v_only.data());
  EXPECT_EQ(k_only, b.k_hat);
  EXPECT_EQ(v_only, b.v_hat);
}

// Ties of the grid go to the even code: 0.5 to 0 and 2.5 to 2.
TEST(KiviAxisTest, RoundsHalfToEven) {
  std::vector<float> k(32, 0.0f), v(32, 0.0f);
  const float channel[4] = {0.0f, 3.0f, 0.5f, 2.5f};  // scale 1, zero 0
  for (size_t t = 0; t < 4; ++t) k[t * 8] = channel[t];
  const Block b(2, 4, 8, 8, 4, k, v);
  EXPECT_EQ(b.k_hat[16], 0.0f);
  EXPECT_EQ(b.k_hat[24], 2.0f);
}

}  // namespace
}  // namespace qevict::codecs
