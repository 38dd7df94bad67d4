#include "cli/options.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>

namespace qevict::cli {
namespace {

Arguments Split(std::vector<const char*> words) {
  words.insert(words.begin(), "qevict");
  return SplitArguments(static_cast<int>(words.size()), words.data());
}

/// Parses `words` with the options of a configuration alone.
Result<Config> Parse(std::vector<std::string> words) {
  CLI::App app;
  ConfigOptions options;
  options.Register(app);
  std::reverse(words.begin(), words.end());
  app.parse(std::move(words));
  return options.Build();
}

std::string NumberError(std::vector<std::string> words) {
  CLI::App app;
  int64_t n = 5;
  double x = 0.5;
  AddInteger(app, "-n,--number", n, 1, 10, "");
  AddReal(app, "--real", x, 0.0, 1.0, "");
  std::reverse(words.begin(), words.end());
  try {
    app.parse(std::move(words));
  } catch (const CLI::ParseError& error) {
    return error.what();
  }
  return "n=" + std::to_string(n) + " x=" + FixedText(x, 2);
}

TEST(ArgumentsTest, SingleDashNamesAreRewritten) {
  EXPECT_EQ(
      Split({"run", "-ub", "64", "-no-cnv", "-np", "2"}).words,
      (std::vector<std::string>{"run", "--ubatch-size", "64", "--no-chat", "--parallel", "2"}));
}

TEST(ArgumentsTest, WhatFollowsTheSeparatorIsLeftAlone) {
  const Arguments a = Split({"serve", "-m", "x", "--", "-ub", "64", "--", "y"});
  EXPECT_EQ(a.words, (std::vector<std::string>{"serve", "-m", "x"}));
  EXPECT_EQ(a.passthrough, (std::vector<std::string>{"-ub", "64", "--", "y"}));
  EXPECT_TRUE(a.has_separator);
  EXPECT_FALSE(Split({"run"}).has_separator);
}

TEST(NumberTest, ErrorsNameValueAndLimits) {
  EXPECT_EQ(NumberError({"-n", "10", "--real", "1"}), "n=10 x=1.00");
  EXPECT_EQ(NumberError({"-n", "11"}), "-n 11 is not legal: expected an integer from 1 to 10");
  EXPECT_EQ(NumberError({"-n", "-1"}), "-n -1 is not legal: expected an integer from 1 to 10");
  EXPECT_EQ(NumberError({"-n", "3x"}), "-n 3x is not legal: expected an integer from 1 to 10");
  EXPECT_EQ(NumberError({"--real", "nan"}),
            "--real nan is not legal: expected a number from 0 to 1");
  EXPECT_EQ(NumberError({"--real", "1.5"}),
            "--real 1.5 is not legal: expected a number from 0 to 1");
}

TEST(ConfigOptionsTest, NothingGivenIsTheDefault) { EXPECT_EQ(*Parse({}), Config{}); }

TEST(ConfigOptionsTest, OptionsAndSetReachTheConfig) {
  const Result<Config> c = Parse({"--budget",    "512MiB",
                                  "--policy",    "streaming",
                                  "--window",    "16",
                                  "--q",         "0.5",
                                  "--bits",      "4",
                                  "--sinks",     "1",
                                  "--codec",     "token",
                                  "--recents",   "25%",
                                  "--interval",  "4",
                                  "--promotion", "pinned",
                                  "--prefill",   "bounded",
                                  "--set",       "score=ema",
                                  "--set",       "ema_lambda=0.9,check=true"});
  ASSERT_TRUE(c.ok()) << c.status().message();
  Config wanted;
  wanted.budget_bytes = uint64_t{512} << 20;
  wanted.preset = Preset::kStreaming;
  wanted.window = 16;
  wanted.q_permille = 500;
  wanted.bits = 4;
  wanted.codec = CodecId::kToken;
  wanted.sinks = 1;
  wanted.recents_percent = 25;
  wanted.interval = 4;
  wanted.promotion = Promotion::kPinned;
  wanted.prefill = Prefill::kBounded;
  wanted.score = ScoreKind::kEma;
  wanted.ema_lambda = 0.9;
  wanted.check = true;
  EXPECT_EQ(ToText(*c), ToText(wanted));
}

TEST(ConfigOptionsTest, OptionsWinOverConfig) {
  const Result<Config> c = Parse({"--config", "window=16,sinks=9", "--window", "4"});
  ASSERT_TRUE(c.ok());
  EXPECT_EQ(c->window, 4u);
  EXPECT_EQ(c->sinks, 9u);
}

TEST(ConfigOptionsTest, ErrorsNameTheKey) {
  for (const auto& [words, part] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"--bits", "2.5"}, "bits=2.5 is not legal with codec=kivi: expected 1, 2, 3, 4 or 8"},
           {{"--set", "bits"}, "--set bits has no value"},
           {{"--set", "colour=red"}, "unknown key colour"},
           {{"--window", "8", "--set", "window=8"}, "given twice"},
           {{"--window", "8,sinks=2"}, "without commas"},
           {{"--config", "/nonexistent"}, "neither key=value text nor a readable file"}}) {
    const Result<Config> c = Parse(words);
    ASSERT_FALSE(c.ok()) << words[0];
    EXPECT_NE(c.status().message().find(part), std::string::npos) << c.status().message();
  }
}

TEST(ModelFileTest, OnlyGgufPasses) {
  EXPECT_EQ(CheckModelFile("").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(CheckModelFile("/nonexistent.gguf").code(), StatusCode::kNotFound);
  EXPECT_EQ(CheckModelFile("/").code(), StatusCode::kInvalidArgument);
  const std::string path = testing::TempDir() + "/options_test.gguf";
  std::FILE* file = std::fopen(path.c_str(), "wb");
  std::fputs("GGUF....", file);
  std::fclose(file);
  EXPECT_TRUE(CheckModelFile(path).ok());
  unlink(path.c_str());
}

}  // namespace
}  // namespace qevict::cli
