#include "qevict/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>

namespace qevict {
namespace {

Config Parse(std::string_view text, const Config& base = {}) {
  Result<Config> config = ParseConfig(text, base);
  EXPECT_TRUE(config.ok()) << config.status().message();
  return config.ok() ? *config : Config{};
}

// init_rows apart: docs/results.md says why.
TEST(ConfigTest, DefaultsAreThePapers) {
  const Config c = Parse("");
  EXPECT_EQ(c, Config{});
  EXPECT_EQ(c.preset, Preset::kQEvict);
  EXPECT_EQ(c.sinks, 5u);
  EXPECT_EQ(c.recents, 32u);
  EXPECT_EQ(c.window, 8u);
  EXPECT_EQ(c.EffectiveInterval(), 8u);
  EXPECT_EQ(c.q_permille, 700u);
  EXPECT_EQ(c.bits, 2u);
  EXPECT_EQ(c.EffectivePrefill(), Prefill::kFull);
  EXPECT_TRUE(ValidateConfig(Config{}).ok());
}

TEST(ConfigTest, EveryKeyIsRead) {
  const Config c = Parse(
      "preset=streaming,budget=35%,budget_tokens=4608,sinks=4,recents=64,window=16,interval=4,q=0."
      "125,codec=wf,bits=2.75,"
      "promotion=pinned,prefill=bounded,report=full,local_mode=windows,charge_dormant=false,fill_"
      "slack=on,per_"
      "head=1,"
      "scores=events,init_rows=32,first_event=8,score=p_norm,ema_lambda=0.5,p_norm=4,key_norm_sign="
      "1,check=true");
  EXPECT_EQ(c.preset, Preset::kStreaming);
  EXPECT_EQ(c.budget_fraction, 0.35);
  EXPECT_EQ(c.budget_bytes, 0u);
  EXPECT_EQ(c.budget_tokens, 4608u);
  EXPECT_EQ(c.sinks, 4u);
  EXPECT_EQ(c.recents, 64u);
  EXPECT_EQ(c.recents_percent, 0u);
  EXPECT_EQ(c.window, 16u);
  EXPECT_EQ(c.interval, 4u);
  EXPECT_EQ(c.EffectiveInterval(), 4u);
  EXPECT_EQ(c.q_permille, 125u);
  EXPECT_EQ(c.codec, CodecId::kWaterFill);
  EXPECT_EQ(c.bits, 2u);
  EXPECT_EQ(c.quarter_bits, 3u);
  EXPECT_EQ(c.promotion, Promotion::kPinned);
  EXPECT_EQ(c.prefill, Prefill::kBounded);
  EXPECT_EQ(c.report, ReportedSize::kFull);
  EXPECT_EQ(c.local_mode, LocalMode::kWindows);
  EXPECT_FALSE(c.charge_dormant);
  EXPECT_TRUE(c.fill_slack);
  EXPECT_TRUE(c.per_head);
  EXPECT_TRUE(c.event_scores);
  EXPECT_EQ(c.init_rows, 32u);
  EXPECT_EQ(c.first_event, 8u);
  EXPECT_EQ(c.score, ScoreKind::kPNorm);
  EXPECT_EQ(c.ema_lambda, 0.5);
  EXPECT_EQ(c.p_norm, 4.0);
  EXPECT_EQ(c.key_norm_sign, 1);
  EXPECT_TRUE(c.check);
}

TEST(ConfigTest, BudgetForms) {
  EXPECT_EQ(Parse("budget=20%").budget_fraction, 0.2);
  EXPECT_EQ(Parse("budget=0.2").budget_fraction, 0.2);
  EXPECT_EQ(Parse("budget=12.5%").budget_fraction, 0.125);
  EXPECT_EQ(Parse("budget=1").budget_fraction, 1.0);
  EXPECT_EQ(Parse("budget=100%").budget_fraction, 1.0);
  EXPECT_EQ(Parse("budget=1000000B").budget_bytes, 1000000u);
  EXPECT_EQ(Parse("budget=64KiB").budget_bytes, 65536u);
  EXPECT_EQ(Parse("budget=512MiB").budget_bytes, 512u << 20);
  EXPECT_EQ(Parse("budget=1.5GiB").budget_bytes, 3u << 29);
  EXPECT_EQ(Parse("budget=1TiB").budget_bytes, uint64_t{1} << 40);
  EXPECT_EQ(Parse("budget=9007199254740993B").budget_bytes,
            9007199254740993u);  // above 2^53: exact
  EXPECT_EQ(Parse("budget=512MiB").EffectivePrefill(), Prefill::kBounded);
  EXPECT_EQ(Parse("budget=512MiB,prefill=full").EffectivePrefill(), Prefill::kFull);
}

TEST(ConfigTest, LastBudgetFormIsInForce) {
  const Config bytes = Parse("budget=1MiB", Parse("budget=50%"));
  EXPECT_EQ(bytes.budget_bytes, 1u << 20);
  const Config share = Parse("budget=50%", bytes);
  EXPECT_EQ(share.budget_bytes, 0u);
  EXPECT_EQ(share.budget_fraction, 0.5);
}

TEST(ConfigTest, ParseBudgetChangesNothingOnError) {
  Config c = Parse("budget=1MiB");
  const Config before = c;
  EXPECT_EQ(ParseBudget("200%", c).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(c, before);
  EXPECT_TRUE(ParseBudget(" 25% ", c).ok());
  EXPECT_EQ(c.budget_fraction, 0.25);
  EXPECT_EQ(c.budget_bytes, 0u);
}

TEST(ConfigTest, RecentsAsShare) {
  const Config c = Parse("recents=25%");
  EXPECT_EQ(c.recents_percent, 25u);
  EXPECT_EQ(Parse("recents=16", c).recents_percent, 0u);
}

TEST(ConfigTest, PresetFullIsTheWholeBudgetUnlessToldOtherwise) {
  EXPECT_EQ(Parse("preset=full").budget_fraction, 1.0);
  EXPECT_EQ(Parse("preset=full", Parse("budget=1MiB")).budget_bytes, 0u);
  EXPECT_EQ(Parse("preset=full,budget=50%").budget_fraction, 0.5);
  EXPECT_STREQ(PresetName(Preset::kFull), "full");
  EXPECT_STREQ(PresetName(Preset::kStreaming), "streaming");
  EXPECT_STREQ(PresetName(Preset::kQEvict), "qevict");
  EXPECT_STREQ(PresetName(static_cast<Preset>(99)), "?");
}

TEST(ConfigTest, FileForm) {
  const Config c = Parse(
      "# a comment, with key=value inside\r\n"
      "\n"
      "budget = 10%   # of the f16 cache\n"
      "  q=0.9\r\n"
      "window = 16, interval = 8,\n");
  EXPECT_EQ(c.budget_fraction, 0.1);
  EXPECT_EQ(c.q_permille, 900u);
  EXPECT_EQ(c.window, 16u);
  EXPECT_EQ(c.interval, 8u);
}

// One sentence that names key, value and legal range.
TEST(ConfigTest, BadInputIsNamed) {
  struct Case {
    const char* text;
    const char* parts[3];
  };
  const Case cases[] = {
      {"budget=0", {"budget", "0", "(0, 1]"}},
      {"budget=0%", {"budget", "0%", "(0, 1]"}},
      {"budget=101%", {"budget", "101%", "(0, 1]"}},
      {"budget=1.01", {"budget", "1.01", "(0, 1]"}},
      {"budget=-20%", {"budget", "-20%", "(0, 1]"}},
      {"budget=nan", {"budget", "nan", "(0, 1]"}},
      {"budget=512", {"budget", "512", "unit"}},
      {"budget=512MB", {"budget", "512MB", "MiB"}},
      {"budget=512 MiB", {"budget", "512 MiB", "MiB"}},
      {"budget=0B", {"budget", "0B", "unit"}},
      {"budget=-1MiB", {"budget", "-1MiB", "unit"}},
      {"budget=MiB", {"budget", "MiB", "unit"}},
      {"budget=99999999999TiB", {"budget", "99999999999TiB", "1048576TiB"}},
      {"budget=infGiB", {"budget", "infGiB", "unit"}},
      {"budget=", {"budget", "", "(0, 1]"}},
      {"budget_tokens=-1", {"budget_tokens", "-1", "2147483647"}},
      {"budget_tokens=3000000000", {"budget_tokens", "3000000000", "2147483647"}},
      {"sinks=five", {"sinks", "five", "65536"}},
      {"sinks=70000", {"sinks", "70000", "65536"}},
      {"sinks=5.0", {"sinks", "5.0", "65536"}},
      {"sinks=5 tokens", {"sinks", "5 tokens", "65536"}},
      {"recents=2000000", {"recents", "2000000", "1048576"}},
      {"recents=0%", {"recents", "0%", "1%"}},
      {"recents=101%", {"recents", "101%", "100%"}},
      {"window=0", {"window", "0", "32"}},
      {"window=12", {"window", "12", "8, 16 or 32"}},
      {"window=64", {"window", "64", "32"}},
      {"interval=99999", {"interval", "99999", "65536"}},
      {"q=1.5", {"q=", "1.5", "0 to 1"}},
      {"q=-0.1", {"q=", "-0.1", "0 to 1"}},
      {"q=0.7005", {"q=", "0.7005", "three decimals"}},
      {"q=70%", {"q=", "70%", "0 to 1"}},
      {"bits=2.5", {"bits=2.5", "codec=kivi", "1, 2, 3, 4 or 8"}},
      {"codec=nqkv", {"bits=2", "codec=nqkv", "expected 4"}},
      {"codec=kvquant,bits=8", {"bits=8", "codec=kvquant", "1, 2, 3 or 4"}},
      {"codec=hqe,bits=3", {"bits=3", "codec=hqe", "1, 2, 4 or 8"}},
      {"codec=ott,window=4", {"window=4", "codec=ott", "8, 16 or 32"}},
      {"bits=1.3", {"bits", "1.3", "steps of 0.25"}},
      {"codec=token,bits=2.25", {"bits=2.25", "codec=token", "1, 2, 3, 4 or 8"}},
      {"codec=wf,bits=4.25", {"bits=4.25", "codec=wf", "1 to 4"}},
      {"codec=wf,window=4", {"window=4", "codec=wf", "8, 16 or 32"}},
      {"statistics=a\xffz", {"statistics=a?z", "codec=kivi", "expected none"}},
      {"codec=zip",
       {"codec", "zip",
        "kivi, token, wf, kivi_clip, kivi_post, byte_grid, kvquant, zipcache, ott, "
        "nqkv, hqe, hadamard or kvtuner"}},
      {"bits=int2", {"bits", "int2", "1, 2, 3, 4 or 8"}},
      {"promotion=exact", {"promotion", "exact", "codes, pinned or none"}},
      {"prefill=never", {"prefill", "never", "auto, full or bounded"}},
      {"report=none", {"report", "none", "budget or full"}},
      {"local_mode=Aligned", {"local_mode", "Aligned", "aligned or windows"}},
      {"charge_dormant=2", {"charge_dormant", "2", "true or false"}},
      {"fill_slack=", {"fill_slack", "", "true or false"}},
      {"per_head=maybe", {"per_head", "maybe", "true or false"}},
      {"scores=all", {"scores", "all", "steps or events"}},
      {"init_rows=-5", {"init_rows", "-5", "2147483647"}},
      {"first_event=1e3", {"first_event", "1e3", "2147483647"}},
      {"score=h2o", {"score", "h2o", "cumulative"}},
      {"ema_lambda=1", {"ema_lambda", "1", "excluded"}},
      {"ema_lambda=0", {"ema_lambda", "0", "excluded"}},
      {"p_norm=0.5", {"p_norm", "0.5", "1 to 64"}},
      {"p_norm=inf", {"p_norm", "inf", "1 to 64"}},
      {"key_norm_sign=0", {"key_norm_sign", "0", "-1 or 1"}},
      {"check=yes", {"check", "yes", "true or false"}},
      {"preset=snapkv", {"preset", "snapkv", "full, streaming, qevict or pack"}},
      {"budgets=20%", {"budgets", "20%", "budget budget_tokens"}},
      {"=5", {"unknown key", "5", "preset"}},
      {"q", {"q", "no value", "key=value"}},
      {"q=0.5,window", {"window", "no value", "key=value"}},
      {"q=0.5,q=0.7", {"q ", "0.7", "once"}},
      {"recents=4,local_mode=windows", {"recents=4", "local_mode=windows", "8 tokens"}},
  };
  for (const Case& c : cases) {
    const Result<Config> config = ParseConfig(c.text);
    ASSERT_FALSE(config.ok()) << c.text;
    EXPECT_EQ(config.status().code(), StatusCode::kInvalidArgument) << c.text;
    const std::string& message = config.status().message();
    for (const char* part : c.parts)
      EXPECT_NE(message.find(part), std::string::npos) << c.text << ": " << message;
    EXPECT_EQ(message.find('\n'), std::string::npos);
  }
}

TEST(ConfigTest, MessagesShowShortPrintableText) {
  const Result<Config> config =
      ParseConfig("sinks=" + std::string("\x01\xFF\0", 3) + std::string(10000, 'x'));
  ASSERT_FALSE(config.ok());
  EXPECT_LT(config.status().message().size(), 200u);
  for (char ch : config.status().message()) EXPECT_TRUE(ch >= 0x20 && ch <= 0x7E);
}

TEST(ConfigTest, ValidateCatchesWhatNoTextCanSay) {
  Config c;
  c.q_permille = 1001;
  EXPECT_FALSE(ValidateConfig(c).ok());
  c = {};
  c.promotion = static_cast<Promotion>(7);
  EXPECT_FALSE(ValidateConfig(c).ok());
  c = {};
  c.budget_fraction = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(ValidateConfig(c).ok());
  c.budget_bytes = 1 << 20;  // in force: the fraction no longer matters
  EXPECT_TRUE(ValidateConfig(c).ok());
}

TEST(ConfigTest, TextRoundTrip) {
  EXPECT_EQ(Parse(ToText(Config{})), Config{});
  std::mt19937 rng(3);
  const auto pick = [&](uint32_t n) { return static_cast<uint32_t>(rng() % n); };
  for (int i = 0; i < 2000; ++i) {
    Config c;
    c.preset = static_cast<Preset>(pick(3));
    if (pick(2)) {
      c.budget_bytes = 1 + (uint64_t{rng()} << pick(28));
    } else {
      c.budget_fraction = (1 + pick(1000000)) / 1000000.0;
    }
    c.budget_tokens = pick(100000);
    c.sinks = pick(100);
    if (pick(2)) {
      c.recents = pick(1000) + 32;
    } else {
      c.recents_percent = 1 + pick(100);
    }
    c.window = 1u << pick(6);
    c.interval = pick(100);
    c.q_permille = pick(1001);
    c.bits = pick(2) ? 2 : 4;
    c.promotion = static_cast<Promotion>(pick(3));
    c.prefill = static_cast<Prefill>(pick(3));
    c.report = static_cast<ReportedSize>(pick(2));
    c.local_mode = static_cast<LocalMode>(pick(2));
    c.charge_dormant = pick(2);
    c.fill_slack = pick(2);
    c.per_head = pick(2);
    c.event_scores = pick(2);
    c.init_rows = pick(1000);
    c.first_event = pick(1000);
    c.score = static_cast<ScoreKind>(pick(4));
    c.ema_lambda = (1 + pick(9999)) / 10000.0;
    c.p_norm = 1.0 + pick(1000) / 17.0;
    c.key_norm_sign = pick(2) ? 1 : -1;
    c.check = pick(2);
    ASSERT_TRUE(ValidateConfig(c).ok()) << ValidateConfig(c).message();
    ASSERT_EQ(Parse(ToText(c)), c) << ToText(c);
    ASSERT_EQ(ToText(Parse(ToText(c))), ToText(c));
  }
}

class ConfigFileTest : public ::testing::Test {
 protected:
  std::string Write(const std::string& contents) {
    path_ = ::testing::TempDir() + "qevict_config_" + std::to_string(getpid()) + ".conf";
    std::FILE* file = std::fopen(path_.c_str(), "wb");
    EXPECT_NE(file, nullptr);
    std::fwrite(contents.data(), 1, contents.size(), file);
    std::fclose(file);
    return path_;
  }
  void TearDown() override {
    if (!path_.empty()) std::remove(path_.c_str());
  }
  std::string path_;
};

TEST_F(ConfigFileTest, PathOrText) {
  EXPECT_EQ(LoadConfig("q=0.5")->q_permille, 500u);
  EXPECT_EQ(*LoadConfig("  "), Config{});
  const std::string path = Write("q = 0.25\nbits = 4\n");
  const Result<Config> config = LoadConfig(" " + path + "\n", Parse("sinks=9"));
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->q_permille, 250u);
  EXPECT_EQ(config->bits, 4u);
  EXPECT_EQ(config->sinks, 9u);
}

TEST_F(ConfigFileTest, ErrorsNameTheFile) {
  const std::string path = Write("bits = 5\n");
  const Result<Config> config = LoadConfig(path);
  ASSERT_FALSE(config.ok());
  EXPECT_EQ(config.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(config.status().message().find("bits=5"), std::string::npos);
  EXPECT_NE(config.status().message().find("qevict_config"), std::string::npos);
}

TEST_F(ConfigFileTest, MissingFolderOrHugeFile) {
  EXPECT_EQ(LoadConfig("/no/such/file").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(LoadConfig("qevict").status().code(), StatusCode::kNotFound);
  EXPECT_EQ(LoadConfig("/tmp").status().code(), StatusCode::kNotFound);
  const std::string path = Write(std::string((1 << 20) + 1, '\n'));
  EXPECT_EQ(LoadConfig(path).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace qevict
