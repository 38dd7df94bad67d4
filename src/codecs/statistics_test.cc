#include "codecs/statistics.h"

#include <gtest/gtest.h>

namespace qevict::codecs {
namespace {

CodecStatistics Example() {
  CodecStatistics s;
  s.model_hash = 0x0123456789abcdefu;
  for (const uint32_t model_layer : {0u, 5u}) {
    LayerStatistics layer;
    layer.model_layer = model_layer;
    layer.shape = {2, 8, 16};
    for (uint32_t h = 0; h < 2; ++h) {
      WaterFillStats stats;
      for (int t = 0; t < 3; ++t) {
        float key[8], value[16];
        for (int c = 0; c < 8; ++c) key[c] = static_cast<float>((c + 1) * t) * 0.37f - 1.0f;
        for (int c = 0; c < 16; ++c) value[c] = static_cast<float>(c - t) / 7.0f;
        stats.AddKey(key, 8);
        stats.AddValue(value, 16);
      }
      stats.q_square.assign(8, 1.0 + h);
      layer.heads.push_back(stats);
    }
    s.layers.push_back(layer);
  }
  return s;
}

TEST(StatisticsTest, WhatIsWrittenIsRead) {
  const CodecStatistics s = Example();
  const std::string text = WriteStatistics(s);
  const Result<CodecStatistics> read = ParseStatistics(text);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->model_hash, s.model_hash);
  ASSERT_EQ(read->layers.size(), 2u);
  ASSERT_NE(read->Find(5), nullptr);
  EXPECT_EQ(read->Find(1), nullptr);
  const LayerStatistics& layer = *read->Find(5);
  EXPECT_EQ(layer.shape.head_dim_v, 16u);
  ASSERT_EQ(layer.heads.size(), 2u);
  EXPECT_EQ(layer.heads[1].n, 3u);
  for (size_t c = 0; c < 8; ++c) {
    const WaterFillStats &a = layer.heads[1], &b = s.layers[1].heads[1];
    EXPECT_NEAR(a.k_sum[c], b.k_sum[c], 1e-5);
    EXPECT_NEAR(a.k_square[c], b.k_square[c], 1e-5);
    EXPECT_NEAR(a.q_square[c], b.q_square[c], 1e-6);
  }
  EXPECT_EQ(WriteStatistics(*read), text);
}

TEST(StatisticsTest, TheCodecIsTheSame) {
  const CodecStatistics s = Example();
  const Result<CodecStatistics> read = ParseStatistics(WriteStatistics(s));
  ASSERT_TRUE(read.ok());
  const RowShape shape{2, 8, 16};
  const WaterFillCodec a(8, 8, shape, {}, s.layers[0].heads),
      b(8, 8, shape, {}, read->layers[0].heads);
  EXPECT_EQ(a.token_codes()[0].k.n_words, b.token_codes()[0].k.n_words);
  for (uint32_t j = 0; j < a.token_codes()[0].k.n_places; ++j)
    EXPECT_EQ(a.token_codes()[0].k.channel[j], b.token_codes()[0].k.channel[j]);
}

/// Every line cut off, doubled, or with one character replaced: a sentence or statistics, never
/// more.
TEST(StatisticsTest, DamageIsRefusedWithTheLine) {
  const std::string text = WriteStatistics(Example());
  EXPECT_NE(ParseStatistics("").status().message().find("line 1 "), std::string::npos);
  for (size_t i = 0; i + 1 < text.size(); i += 3) {
    const Result<CodecStatistics> cut = ParseStatistics(std::string_view(text).substr(0, i));
    ASSERT_FALSE(cut.ok()) << i;
    EXPECT_NE(cut.status().message().find("line "), std::string::npos);
    std::string changed = text;
    changed[i] = 'x';
    const Result<CodecStatistics> other = ParseStatistics(changed);
    EXPECT_FALSE(other.ok()) << i;
  }
  for (const char* number : {"nan", "inf", "-1", "1e999"}) {
    std::string bad = text;
    const size_t at = bad.find("k_square ") + 9;
    bad.replace(at, bad.find(' ', at) - at, number);
    EXPECT_FALSE(ParseStatistics(bad).ok()) << number;
  }
}

TEST(StatisticsTest, MissingFile) {
  const Result<CodecStatistics> none = ReadStatistics("/nonexistent/statistics");
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace qevict::codecs
