// Grid codes of the field: vectors of the specifications, bytes, and that kernels read what is
// decoded.
#include "codecs/grid_codec.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "codecs/hadamard.h"
#include "codecs/hqe.h"
#include "codecs/kivi_grid.h"
#include "codecs/kvquant.h"
#include "codecs/kvtuner.h"
#include "codecs/nqkv.h"
#include "codecs/ott.h"
#include "codecs/zipcache.h"
#include "kernels/problems/reference.h"

namespace qevict::codecs {
namespace {

using kernels::GridAxis;

struct Coded {
  std::vector<uint8_t> bytes;  ///< codes first
  std::vector<float> decoded;
};

/// x [n][dim] as values.
Coded Encoded(const GridSpec& values, const std::vector<float>& x, uint32_t n = 1) {
  const auto dim = static_cast<uint32_t>(x.size() / n);
  GridHead head{values, values, nullptr};
  head.k.pick_numbers = nullptr;
  head.k.grid.n_exact = 0;
  const GridCodec codec(8, {1, dim, dim}, {head});
  std::vector<uint8_t> block(codec.bytes().total());
  codec.Encode(0, n, x.data(), x.data(), block.data());
  Coded coded{{block.begin() + static_cast<std::ptrdiff_t>(codec.bytes().keys), block.end()},
              std::vector<float>(x.size())};
  codec.Decode(0, n, block.data(), nullptr, coded.decoded.data());
  return coded;
}

std::vector<float> RoundTrip(const GridSpec& values, const std::vector<float>& x, uint32_t n = 1) {
  return Encoded(values, x, n).decoded;
}

void ExpectNear(const std::vector<float>& got, const std::vector<float>& want, float bound) {
  for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], bound) << i;
}

GridSpec PerToken(uint32_t bits, uint32_t dim) {
  GridSpec s;
  s.grid.bits = bits;
  s.grid.axis = GridAxis::kToken;
  s.grid.group = dim;
  return s;
}

// KIVI's code by hand; repeated so that a token has 8 channels.
TEST(GridCodecTest, KiviVectors) {
  const Coded value = Encoded(PerToken(2, 8), {0, .1f, .2f, 1, 0, .1f, .2f, 1});
  ExpectNear(value.decoded, {0, 0, .333252f, .999756f}, 1e-6f);
  EXPECT_EQ(value.bytes[0], 208);  // codes 0, 0, 1, 3
  EXPECT_EQ(value.bytes[1], 208);
  // The keys' channels are tokens here: one grid per channel over the window.
  GridHead head = KiviGrid(2, {1, 8, 8});
  head.k.grid.before_rope = false;
  const GridCodec codec(8, {1, 8, 8}, {head});
  std::vector<float> k(4 * 8, 0.0f), v(4 * 8, 0.0f);
  const float a[] = {0, .5f, 1.5f, 3}, b[] = {-1, 2, -.2f, .4f};
  for (size_t t = 0; t < 4; ++t) k[t * 8] = a[t], k[t * 8 + 1] = b[t];
  std::vector<uint8_t> block(codec.bytes().total());
  codec.Encode(0, 4, k.data(), v.data(), block.data());
  EXPECT_EQ(block[0], 0xE0);  // codes 0, 0, 2, 3
  EXPECT_EQ(block[2], 0x5C);  // codes 0, 3, 1, 1
  std::vector<float> out(4 * 8);
  codec.Decode(0, 4, block.data(), out.data(), nullptr);
  const float a2[] = {0, 0, 2, 3}, b2[] = {-1, 2, 0, 0};
  for (size_t t = 0; t < 4; ++t) {
    EXPECT_EQ(out[t * 8], a2[t]);
    EXPECT_EQ(out[t * 8 + 1], b2[t]);
  }
}

TEST(GridCodecTest, KiviVectorOfFourBits) {
  const std::vector<float> x = {-1, -.7f, -.2f, 0, .1f, .5f, .9f, 2};
  const float codes[] = {0, 2, 4, 5, 6, 8, 10, 15};
  const std::vector<float> y = RoundTrip(PerToken(4, 8), x);
  for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(y[i], codes[i] * 0.199951171875f - 1.0f, 1e-6f);
}

// Nearest levels of NF4 times the largest magnitude of a token.
TEST(GridCodecTest, NormalFloatVector) {
  const Coded coded = Encoded(Nqkv({1, 8, 8}).v, {.3f, -1.2f, .05f, 2, -.6f, 0, 1.1f, -2.4f});
  ExpectNear(coded.decoded, {.386232f, -1.260175f, 0, 1.735096f, -.682659f, 0, 1.057704f, -2.4f},
             1e-3f);
  const uint8_t codes[] = {9 | 2 << 4, 7 | 14 << 4, 4 | 7 << 4, 12};
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(coded.bytes[i], codes[i]) << i;
}

/// NF4 (QLoRA, arXiv 2305.14314, appendix E): quantiles of the Gaussian at equal
/// distances, over the largest.
TEST(GridCodecTest, NormalFloatLevelsAreQuantiles) {
  const auto below = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
  constexpr double kLast = 0.9677083;
  double largest = 0.0;
  for (double step = 1.0; step > 1e-12; step /= 2) {
    if (below(largest + step) < kLast) largest += step;
  }
  const std::vector<float> levels = Nqkv({1, 8, 8}).v.levels;
  for (size_t i = 0; i < 8; ++i) {
    const double share = kLast - (kLast - 0.5) * static_cast<double>(i) / 8.0;
    EXPECT_NEAR(below(levels[15 - i] * largest), share, 1e-7) << i;
  }
  for (size_t i = 0; i < 7; ++i) {
    const double share = kLast - (kLast - 0.5) * static_cast<double>(i) / 7.0;
    EXPECT_NEAR(below(-levels[i] * largest), share, 1e-7) << i;
  }
  EXPECT_EQ(levels[7], 0.0f);
}

// The normal code of hqe.h: groups of 4 tokens of a channel.
TEST(GridCodecTest, NormalCodeVectors) {
  for (const uint32_t bits : {1u, 2u}) {
    GridSpec s;
    s.grid.bits = bits;
    s.grid.axis = GridAxis::kChannel;
    SetNormalCode(bits, s);
    std::vector<float> x(4 * 8);
    const float column[] = {1, 2, 3, 6};
    for (size_t i = 0; i < x.size(); ++i) x[i] = column[i / 8];
    const std::vector<float> y = RoundTrip(s, x, 4);
    const float one[] = {1.542936f, 1.542936f, 1.542936f, 4.457064f};
    const float two[] = {.514961f, 2.31166f, 2.31166f, 5.485039f};
    for (size_t t = 0; t < 4; ++t) EXPECT_NEAR(y[t * 8], bits == 1 ? one[t] : two[t], 1e-3f);
  }
}

// HqeKV codes anew from codes: 2 bits to 1 is not nested.
TEST(GridCodecTest, RequantizationChain) {
  const std::vector<float> x = {-1, -.52f, .04f, .3f, .55f, .9f, 1.2f, 2};
  const std::vector<float> two = RoundTrip(PerToken(2, 8), x);
  ExpectNear(two, {-1, -1, 0, 0, 1, 1, 1, 2}, 1e-3f);
  GridSpec normal = PerToken(1, 8);
  SetNormalCode(1, normal);
  ExpectNear(RoundTrip(normal, x), {-.211658f, -.211658f, -.211658f, -.211658f, 1.079158f}, 1e-3f);
  ExpectNear(RoundTrip(normal, two), {-.340404f, -.340404f, -.340404f, -.340404f, 1.090404f},
             1e-3f);
  // 8 -> 4 -> 2 is, but for the rounding of grids.
  ExpectNear(RoundTrip(PerToken(2, 8), RoundTrip(PerToken(4, 8), RoundTrip(PerToken(8, 8), x))),
             two, 2e-3f);
}

/// Of 128,000 numbers none changes but by the rounding of grids, and one bit after
/// two has a larger error than at once.
TEST(GridCodecTest, RequantizationOfManyNumbers) {
  std::mt19937 rng(10);
  std::normal_distribution<float> gauss;
  GridSpec normal = PerToken(1, 32);
  SetNormalCode(1, normal);
  double direct = 0.0, chained = 0.0;
  size_t n_changed = 0, n = 0;
  std::vector<float> x(8 * 32);
  for (; n < 128000; n += x.size()) {
    for (float& each : x) each = gauss(rng);
    const auto code = [&x](const GridSpec& spec, const std::vector<float>& from) {
      return RoundTrip(spec, from, 8);
    };
    const std::vector<float> two = code(PerToken(2, 32), x),
                             again = code(PerToken(2, 32),
                                          code(PerToken(4, 32), code(PerToken(8, 32), x))),
                             one = code(normal, x), late = code(normal, two);
    for (size_t i = 0; i < x.size(); ++i) {
      n_changed += std::abs(two[i] - again[i]) > 0.1f ? 1 : 0;
      direct += (x[i] - one[i]) * (x[i] - one[i]);
      chained += (x[i] - late[i]) * (x[i] - late[i]);
    }
  }
  EXPECT_LT(static_cast<double>(n_changed), 1e-3 * static_cast<double>(n));
  EXPECT_NEAR(direct / static_cast<double>(n), 0.358, 0.01);
  EXPECT_NEAR(chained / static_cast<double>(n), 0.410, 0.01);
}

/// What kvquant keeps exactly: keys by distance in half ranges, values by standard deviations.
TEST(GridCodecTest, KvQuantPicksTheFarthest) {
  const GridHead head = KvQuant(2, 8, {1, 8, 8}, nullptr);
  const float offset = 0.1f, factor = 1.1f;
  kernels::GridVector g;
  g.n_exact = 2;
  g.offset = &offset;
  g.factor = &factor;
  const float key[] = {-2, -.9f, -.3f, .1f, .6f, 1.1f, 5};
  EXPECT_EQ(head.k.pick_numbers(g, key, 7, 1), (std::vector<uint32_t>{6, 0}));
  g.n_exact = 4;  // the others are within the thresholds
  EXPECT_EQ(head.k.pick_numbers(g, key, 7, 1), (std::vector<uint32_t>{6, 0}));
  g.n_exact = 2;
  const float value[] = {.1f, -.2f, .05f, 3, -.1f, .2f, 0, -.15f};
  EXPECT_EQ(head.v.pick_numbers(g, value, 1, 8), (std::vector<uint32_t>{3, 1}));
}

// A table of levels and two exact numbers: keys on a static grid, values on one per token.
TEST(GridCodecTest, KvQuantVectors) {
  const std::vector<float> table = {-1, -.35f, .3f, 1};
  GridSpec s;
  s.grid.bits = 2;
  s.grid.axis = GridAxis::kStatic;
  s.grid.n_exact = 2;
  SetCentroids(table, false, {}, s);
  s.offset.assign(8, .1f);
  s.factor.assign(8, 1.1f);
  s.pick_numbers = [](const kernels::GridVector&, const float*, uint32_t, uint32_t) {
    return std::vector<uint32_t>{0, 6};
  };
  ExpectNear(RoundTrip(s, {-2, -.9f, -.3f, .1f, .6f, 1.1f, 5, 0}),
             {-2, -1, -.285f, .43f, .43f, 1.2f, 5}, 1e-6f);
  GridSpec v = PerToken(2, 8);
  v.grid.n_exact = 2;
  v.fit = FitMiddle;
  SetCentroids(table, false, {}, v);
  v.pick_numbers = [](const kernels::GridVector&, const float*, uint32_t, uint32_t) {
    return std::vector<uint32_t>{1, 3};
  };
  ExpectNear(RoundTrip(v, {.1f, -.2f, .05f, 3, -.1f, .2f, 0, -.15f}),
             {.0775f, -.2f, .0775f, 3, -.15f, .2f, -.03625f, -.15f}, 5e-4f);
}

TEST(GridCodecTest, QNormVector) {
  GridSpec s;
  const std::vector<float> x = {-1, -.4f, .2f, .9f, -.3f, .5f};
  SetCentroids({-1, -.35f, .3f, 1}, true, x, s);
  ExpectNear(s.levels, {-.984664f, -.344801f, .295061f, .984144f}, 1e-5f);
}

TEST(GridCodecTest, CentroidsOfClustersAreTheirMeans) {
  ExpectNear(Centroids({-1, -1.2f, -.8f, 0, .1f, 2, 2.2f, 3.9f, 4.1f}, 4), {-1, .05f, 2.1f, 4},
             1e-5f);
}

// Channel-separable values, and the ranges of a sample.
TEST(GridCodecTest, ZipCacheVectors) {
  GridSpec s = PerToken(2, 8);
  const float c[] = {2, .316228f, .547723f, .316228f};
  for (size_t i = 0; i < 8; ++i) s.factor.push_back(c[i % 4]);
  ExpectNear(RoundTrip(s, {4, .1f, -.2f, .05f, 4, .1f, -.2f, .05f}), {4, .133838f, -.2f, .133838f},
             2e-3f);
  ExpectNear(RoundTrip(s, {-2, .05f, .3f, -.1f, -2, .05f, .3f, -.1f}),
             {-2, .010061f, .3f, -.153083f}, 2e-3f);
  RowSample sample;
  sample.n = 3;
  sample.k.assign(24, 0.0f);
  sample.v.assign(24, 0.0f);
  const float rows[3][4] = {{4, .1f, -.2f, .05f}, {-2, .05f, .3f, -.1f}, {1, -.08f, .1f, .02f}};
  for (size_t t = 0; t < 3; ++t)
    for (size_t i = 0; i < 4; ++i) sample.v[t * 8 + i] = rows[t][i];
  ExpectNear(ZipCache(2, {1, 8, 8}, &sample).v.factor, {2, .316228f, .547723f, .316228f}, 1e-6f);
  for (size_t t = 0; t < 3; ++t) sample.k[t * 8] = rows[t][0];
  const GridSpec k = ZipCache(2, {1, 8, 8}, &sample).k;  // one grid of -2 ... 4
  EXPECT_EQ(k.offset[0], -2.0f);
  EXPECT_EQ(k.factor[0], 2.0f);
}

// Token 2 has the smallest keys; the grids are those of the other five.
TEST(GridCodecTest, OutlierTokenVector) {
  const float rows[6][2] = {{8, -6},       {7.6f, -5.4f}, {.2f, .1f},
                            {8.3f, -6.3f}, {7.9f, -5.7f}, {8.6f, -6.6f}};
  std::vector<float> k(6 * 8, 0.0f);
  for (size_t t = 0; t < 6; ++t) k[t * 8] = rows[t][0], k[t * 8 + 1] = rows[t][1];
  EXPECT_EQ(SmallestTokens(k.data(), 6, 8, 1), std::vector<uint32_t>{2});
  std::vector<float> bad = k;  // what is not finite counts as 0
  bad[0] = std::numeric_limits<float>::quiet_NaN(), bad[1] = -INFINITY;
  EXPECT_EQ(SmallestTokens(bad.data(), 6, 8, 1), std::vector<uint32_t>{0});
  const RowShape shape{1, 8, 8};
  const GridCodec codec(8, shape, {Ott(2, shape)});
  std::vector<uint8_t> block(codec.bytes().total());
  codec.Encode(0, 6, k.data(), k.data(), block.data());
  std::vector<float> out(6 * 8), values(6 * 8);
  codec.Decode(0, 6, block.data(), out.data(), values.data());
  float error[2] = {};
  for (size_t t = 0; t < 6; ++t) {
    for (size_t c = 0; c < 2; ++c)
      if (t != 2) error[c] = std::max(error[c], std::abs(out[t * 8 + c] - k[t * 8 + c]));
  }
  EXPECT_NEAR(error[0], 0.066667f, 0.01f);
  EXPECT_NEAR(error[1], 0.2f, 0.01f);
  const uint8_t codes[] = {1 | 0 << 2 | 1 << 4 | 2 << 6, 1 | 3 << 2, 2 | 3 << 2 | 2 << 4 | 1 << 6,
                           2 | 0 << 2};  // the mean at token 2
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(block[i], codes[i]) << i;
  for (size_t c = 0; c < 8; ++c) {
    EXPECT_NEAR(out[16 + c], k[16 + c], 1e-3f);
    EXPECT_NEAR(values[16 + c], k[16 + c], 1e-3f);
  }
}

/// kvtuner.h: zero = scale * round(low / scale).
TEST(GridCodecTest, KvTunerZerosAreWholeSteps) {
  // .2 would lie half way between codes, which grids of f16 move: .19.
  const std::vector<float> x = {-0.7f, 0.19f, 1.3f, 0.4f, 0.4f, 0.4f, 0.4f, 0.4f};
  GridSpec s = KvTuner({16, 16}, {1, 8, 8}).v;
  const std::vector<float> y = RoundTrip(s, x);
  const float expected[] = {-0.666667f, 0.133333f, 1.333333f, 0.4f};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(y[i], expected[i], 2e-3f) << i;
  for (const float half : RoundTrip(s, std::vector<float>(8, 0.5f))) EXPECT_NEAR(half, 0.5f, 1e-3f);
}

/// Bytes per token of keys and values, over a window.
TEST(GridCodecTest, BytesAreThoseOfTheTables) {
  const auto bytes = [](const GridHead& head, uint32_t window, uint32_t d) {
    return GridCodec(window, {1, d, d}, {head}).bytes().total() * 1.0 / window;
  };
  EXPECT_EQ(bytes(KiviPost(2, {1, 128, 128}), 32, 128), 96.0);
  EXPECT_EQ(bytes(KiviPost(4, {1, 64, 64}), 32, 64), 80.0);
  EXPECT_EQ(bytes(KiviGrid(2, {1, 128, 128}), 8, 128), 132.0);
  EXPECT_EQ(bytes(Hqe(1, {1, 128, 128}), 32, 128), 64.0);
  EXPECT_EQ(bytes(Hqe(4, {1, 128, 128}), 32, 128), 160.0);
  EXPECT_EQ(bytes(ZipCache(4, {1, 128, 128}, nullptr), 32, 128), 64 + 64 + 4);
  EXPECT_EQ(bytes(Ott(2, {1, 128, 128}), 32, 128), 96 + (4 * 128 + 4) / 32.0);
  // kvtuner: (D b_k + Dv b_v) / 8, 4 D / W for keys, 4 for values.
  EXPECT_EQ(bytes(KvTuner({32, 16}, {1, 128, 128}), 32, 128), 128 + 64 + 16 + 4);
  EXPECT_EQ(bytes(Nqkv({1, 256, 256}), 8, 256), 260.0);
  EXPECT_EQ(bytes(Hadamard(2, {1, 64, 64}, nullptr), 8, 64), 36.0);
  // byte_grid, D = 128, W = 8: grids of 272 bytes for keys; values keep f16 grids here.
  EXPECT_EQ(bytes(ByteGrid(2, {1, 128, 128}, nullptr), 8, 128) * 8, 256 + 272 + 256 + 32);
  EXPECT_EQ(bytes(KvQuant(3, 32, {1, 64, 64}, nullptr), 32, 64) * 32,
            2 * (32 * 24 + 4 * 22) + 32 * 4);
}

std::vector<float> Random(std::mt19937& rng, size_t n) {
  std::normal_distribution<float> normal(0.3f, 1.0f);
  std::vector<float> x(n);
  for (float& each : x) each = normal(rng);
  return x;
}

RowSample RandomSample(std::mt19937& rng, uint32_t d, uint32_t dv) {
  RowSample s;
  s.n = 200;
  s.k = s.k_before_rope = Random(rng, size_t{s.n} * d);
  s.v = Random(rng, size_t{s.n} * dv);
  return s;
}

TEST(GridCodecTest, KernelsReadWhatIsDecodedAndNothingIsSpoiled) {
  std::mt19937 rng(7);
  const uint32_t window = 16, d = 72, dv = 40, n = 13;
  const RowShape shape{1, d, dv};
  const RowSample sample = RandomSample(rng, d, dv);
  const std::vector<GridHead> heads = {KiviGrid(3, shape),
                                       KiviClip(2, shape),
                                       KiviPost(8, shape),
                                       ByteGrid(2, shape, &sample),
                                       Ott(2, shape),
                                       Nqkv(shape),
                                       KvTuner({16, 8}, shape),
                                       Hqe(1, shape),
                                       Hqe(4, shape),
                                       KvQuant(2, window, shape, &sample),
                                       ZipCache(4, shape, &sample),
                                       KvQuant(4, window, shape, &sample),
                                       Hadamard(3, shape, &sample)};
  std::vector<float> k = Random(rng, size_t{n} * d), v = Random(rng, size_t{n} * dv);
  k[5] = std::numeric_limits<float>::quiet_NaN();
  v[7] = std::numeric_limits<float>::infinity();
  // Numbers of bf16 that f16 cannot hold, and whose range no float can: in a token and channel of
  // their own, so that all others can be compared.
  std::vector<float> huge_k = k, huge_v = v;
  huge_k[0] = huge_v[0] = 3e38f, huge_k[d] = huge_v[dv] = -3e38f;
  for (size_t i = 0; i < heads.size(); ++i) {
    const GridCodec codec(window, shape, {heads[i]});
    std::vector<uint8_t> block(codec.bytes().total() + 1, 0xAA);
    codec.Encode(0, n, k.data(), v.data(), block.data());
    EXPECT_EQ(block.back(), 0xAA);
    std::vector<float> k2(k.size()), v2(v.size());
    codec.Encode(0, n, huge_k.data(), huge_v.data(), block.data());
    codec.Decode(0, n, block.data(), k2.data(), v2.data());
    const auto is_finite = [](float x) { return std::isfinite(x); };
    EXPECT_TRUE(std::all_of(k2.begin(), k2.end(), is_finite)) << i;
    EXPECT_TRUE(std::all_of(v2.begin(), v2.end(), is_finite)) << i;
    codec.Encode(0, n, k.data(), v.data(), block.data());
    codec.Decode(0, n, block.data(), k2.data(), v2.data());
    kernels::AttentionShape s;
    s.n_kv_heads = 1;
    s.head_dim = d;
    s.head_dim_v = dv;
    s.window = window;
    s.n_rungs = 2;
    s.rungs[1] = {codec.format(), block.size() - 1, block.size() - 1, nullptr, codec.grid_codes()};
    const kernels::WindowRef ref{block.data(), block.data() + codec.bytes().keys, 0, 1, 1, 1};
    std::vector<double> row(d);
    double error = 0.0, energy = 0.0;
    for (uint32_t t = 0; t < n; ++t) {
      kernels::ReferenceKey(s, ref, 0, t, row.data());
      for (uint32_t c = 0; c < d; ++c) {
        const float x = k[size_t{t} * d + c], y = k2[size_t{t} * d + c];
        ASSERT_NEAR(row[c], y, 2e-5) << i;
        if (std::isfinite(x)) error += (x - y) * (x - y), energy += x * x;
      }
      kernels::ReferenceValue(s, ref, 0, t, row.data());
      for (uint32_t c = 0; c < dv; ++c) {
        const float x = v[size_t{t} * dv + c], y = v2[size_t{t} * dv + c];
        ASSERT_NEAR(row[c], y, 2e-5) << i;
        if (std::isfinite(x)) error += (x - y) * (x - y), energy += x * x;
      }
    }
    EXPECT_LT(error, 0.5 * energy) << i;
  }
}

TEST(GridCodecTest, HadamardIsItsOwnInverse) {
  std::mt19937 rng(8);
  for (const uint32_t d : {8u, 40u, 64u, 96u}) {
    std::vector<float> x = Random(rng, d), y = x;
    const std::vector<float> sign = HadamardSigns(d);
    HadamardForward(sign.data(), d, y.data());
    double before = 0.0, after = 0.0;
    for (uint32_t c = 0; c < d; ++c) before += x[c] * x[c], after += y[c] * y[c];
    EXPECT_NEAR(before, after, 1e-3);
  }
}

TEST(GridCodecTest, ClippedGridsHaveASmallerError) {
  std::mt19937 rng(9);
  const std::vector<float> x = Random(rng, 64);
  const auto error = [&](FitGrid fit) {
    GridSpec s = PerToken(2, 64);
    s.fit = fit;
    const std::vector<float> y = RoundTrip(s, x);
    double sum = 0.0;
    for (size_t i = 0; i < x.size(); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
    return sum;
  };
  EXPECT_LT(error(FitClipped), 0.8 * error(FitMinMax));
}

}  // namespace
}  // namespace qevict::codecs
