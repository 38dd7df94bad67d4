// The command with a real model: sense instead of noise.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "cli/text.h"

namespace qevict::cli {
namespace {

std::string FromEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

/// Output of `qevict ARGUMENTS -o json` with SmolLM2.
Json Qevict(const std::string& command, const std::string& arguments) {
  const std::string out = testing::TempDir() + "/qevict_model_test.out";
  const std::string line = "'" + FromEnvironment("QEVICT_COMMAND") + "' " + command + " -m '" +
                           FromEnvironment("QEVICT_MODEL_DIR") +
                           "/SmolLM2-135M-Instruct.Q4_1.gguf' " + arguments + " -o json >" + out +
                           " </dev/null";
  EXPECT_EQ(std::system(line.c_str()), 0) << line;
  std::ifstream file(out);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return Json::parse(text.substr(0, text.find("\n{")), nullptr, false);
}

std::string Book() {
  return "'" + FromEnvironment("QEVICT_SOURCE_DIR") + "/tests/data/dorian_gray.txt'";
}

TEST(ModelTest, ChatTemplateAndASensibleAnswer) {
  const std::string prompt = "-p 'What is the capital of France?' -n 24 --preset full ";
  const Json chat = Qevict("run", prompt);
  const Json raw = Qevict("run", prompt + "--no-chat");
  ASSERT_TRUE(chat.is_object() && raw.is_object());
  EXPECT_NE(chat["text"].get<std::string>().find("Paris"), std::string::npos) << chat["text"];
  EXPECT_TRUE(chat["ended"].get<bool>());
  EXPECT_GT(chat["prompt_tokens"].get<int>(), raw["prompt_tokens"].get<int>());
}

TEST(ModelTest, FullPresetDiffersFromTheCpuBackendByRoundingOnly) {
  const Json j =
      Qevict("run", "-p 'Tell me about cats.' -n 32 --preset full --compare --ignore-eos");
  ASSERT_TRUE(j.is_object());
  EXPECT_LT(j["agreement"]["kl_mean"].get<double>(), 0.02);
  EXPECT_GT(j["agreement"]["same_top_percent"].get<double>(), 85.0);
}

// The first JSON line is the chunk of the first budget.
TEST(ModelTest, AFifthOfTheCacheStaysCloseToTheFullOne) {
  const Json j =
      Qevict("eval kld", "-f " + Book() + " --chunks 1 --prompt 1024 --score 64 --budget 20%");
  ASSERT_TRUE(j.is_object());
  EXPECT_LT(j["kv_share_percent"].get<double>(), 20.1);
  EXPECT_GT(j["kv_share_percent"].get<double>(), 15.0);
  EXPECT_LT(j["kl_mean"].get<double>(), 0.5);
  EXPECT_LT(j["ppl_ratio"].get<double>(), 1.5);
}

}  // namespace
}  // namespace qevict::cli
