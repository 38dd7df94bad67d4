// What the command measures: divergence, perplexity, calibration.
#include <map>

#include "cli/testing/command.h"

namespace qevict::cli {
namespace {

TEST(CommandEvalTest, KldOfTheFullPresetIsRounding) {
  const Outcome o =
      Qevict("eval kld -m " + Tiny("llama-hd64") + " -f " + Book() +
             " -t 1 --chunks 2 --prompt 400 --score 40 --policy full,qevict --budget 40%"
             " --floor -o json");
  ASSERT_EQ(o.code, 0) << o.err;
  std::map<std::string, Json> summaries;
  size_t n_chunks = 0, begin = 0;
  while (begin < o.out.size()) {
    const size_t end = o.out.find('\n', begin);
    const Json line = Json::parse(o.out.substr(begin, end - begin));
    if (line["type"] == "summary") summaries[line["policy"]] = line;
    if (line["type"] == "chunk") n_chunks += line["kl"].size() == 40 ? 1 : 0;
    begin = end + 1;
  }
  EXPECT_EQ(n_chunks, 6u);
  ASSERT_EQ(summaries.size(), 3u);
  EXPECT_LT(summaries["full"]["kl_mean"].get<double>(), 1e-3);
  EXPECT_LT(summaries["floor"]["kl_mean"].get<double>(), 1e-3);
  EXPECT_GT(summaries["qevict"]["kl_mean"].get<double>(), 1e-3);
  EXPECT_EQ(summaries["qevict"]["positions"], 80);
  EXPECT_LT(summaries["qevict"]["kv_share_percent"].get<double>(), 40.1);
  EXPECT_EQ(summaries["qevict"]["events"], 5.0);
  EXPECT_NEAR(summaries["full"]["ppl_ratio"].get<double>(), 1.0, 1e-2);
}

// A step of R tokens decides as R single tokens do: the logits differ by rounding only.
TEST(CommandEvalTest, KldStepsDoNotChangeTheResult) {
  const std::string start = "eval kld -m " + Tiny("llama-hd64") + " -f " + Book() +
                            " -t 1 --chunks 1 --prompt 400 --score 24 --budget 40% -o json --step ";
  const Json one = LastLine(Qevict(start + "1").out), eight = LastLine(Qevict(start + "8").out);
  EXPECT_NEAR(one["kl_mean"].get<double>(), eight["kl_mean"].get<double>(), 1e-3);
  EXPECT_EQ(one["events"], eight["events"]);
  EXPECT_EQ(one["packed_tokens"], eight["packed_tokens"]);
}

TEST(CommandEvalTest, DepthsAndGeneratedTokens) {
  const Outcome o = Qevict("eval kld -m " + Tiny("llama-hd64") + " -f " + Book() +
                           " -t 1 --chunks 2 --prompt 340 --score 60 --by-depth 3 --generate"
                           " --temp 1 --budget 40% -o json");
  ASSERT_EQ(o.code, 0) << o.err;
  const Json j = LastLine(o.out);
  EXPECT_EQ(j["scored"], "generated");
  EXPECT_EQ(j["positions"], 120);
  ASSERT_EQ(j["by_depth"].size(), 3u);
  double sum = 0.0;
  for (const Json& part : j["by_depth"]) {
    EXPECT_EQ(part["positions"], 40);
    sum += part["kl_mean"].get<double>() / 3;
  }
  EXPECT_NEAR(j["kl_mean"].get<double>(), sum, 1e-9);
}

// What a sliding window has left behind is in no saved state: prompts are read anew.
TEST(CommandEvalTest, ResultsDoNotDependOnTheirOrder) {
  const std::string start = "eval kld -m " + Tiny("gemma3-hd64") + " -f " + Book() +
                            " -t 1 --chunks 1 --prompt 600 --score 16 -o json --budget ";
  const Json alone = LastLine(Qevict(start + "60%").out);
  const Json last = LastLine(Qevict(start + "100%,60%").out);
  EXPECT_EQ(alone["kl_mean"], last["kl_mean"]);
  EXPECT_EQ(alone["packed_tokens"], last["packed_tokens"]);
}

// Perplexity is that of `kld`, without the reference's logits.
TEST(CommandEvalTest, PerplexityAlone) {
  const std::string rest = " -m " + Tiny("llama-hd64") + " -f " + Book() +
                           " -t 1 --chunks 1 --prompt 200 --score 40 --budget 40% -o json";
  const Outcome kld = Qevict("eval kld" + rest), ppl = Qevict("eval ppl" + rest);
  ASSERT_EQ(ppl.code, 0) << ppl.err;
  const Json a = LastLine(kld.out), b = LastLine(ppl.out);
  EXPECT_FALSE(b.contains("kl_mean"));
  for (const char* key : {"ppl", "ppl_error", "ppl_reference", "ppl_ratio", "ppl_ratio_error"})
    EXPECT_EQ(a[key], b[key]) << key;
}

TEST(CommandEvalTest, CalibratedStatisticsBelongToAModel) {
  const std::string file = testing::TempDir() + "/qevict_command_test.statistics";
  const Outcome o = Qevict("calibrate codec -m " + Tiny("llama-hd64") + " -f " + Book() +
                           " -t 1 --tokens 512 --write " + file + " -o json");  // two layers
  ASSERT_EQ(o.code, 0) << o.err;
  const std::string eval = " -f " + Book() +
                           " -t 1 --chunks 1 --prompt 256 --score 64 --pack-all -o json"
                           " --set codec=wf,bits=4,window=32,check=true";
  const Json own = LastLine(Qevict("eval kld -m " + Tiny("llama-hd64") + eval).out);
  const Outcome given = Qevict("eval kld -m " + Tiny("llama-hd64") + eval + ",statistics=" + file);
  ASSERT_EQ(given.code, 0) << given.err;
  const Json j = LastLine(given.out);
  EXPECT_EQ(j["violations"], 0);
  EXPECT_GT(j["packed_tokens"].get<double>(), 200.0);
  EXPECT_NE(j["kl_mean"], own["kl_mean"]);
  EXPECT_LT(j["kl_mean"].get<double>(), 3 * own["kl_mean"].get<double>());
  const Outcome plan =
      Qevict("plan -m " + Tiny("llama-hd64") +
             " -c 4096 --budget 50% --set codec=wf,statistics=" + file + " -o json");
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_NE(Json::parse(plan.out)["config"].get<std::string>().find(",layer_bits=0:"),
            std::string::npos);
  // Refused before anything is written, or lost.
  const std::string again = "calibrate codec -m " + Tiny("llama-hd64") + " -f " + Book() + " -t 1 ";
  for (const std::string& bad : {"--write " + Tiny("llama-hd64"), std::string("--write a,b"),
                                 "--loss-chunks 64 --write " + file}) {
    EXPECT_EQ(Qevict(again + bad).code, 2) << bad;
  }
  EXPECT_NE(Contents(file).find("\nloss "), std::string::npos);
  for (const char* other : {"llama-hd80", "qwen2-hd64"}) {
    const Outcome refused =
        Qevict("run -m " + Tiny(other) + " -p x --set codec=wf,statistics=" + file);
    EXPECT_EQ(refused.code, 2);
    EXPECT_NE(refused.err.find("another model"), std::string::npos) << refused.err;
  }
  // A file that lacks a layer, from the same model.
  const std::string all = Contents(file);
  std::ofstream(file) << all.substr(0, all.find("layer 1 ")) << "end\n";
  const Outcome lacking = Qevict("plan -m " + Tiny("llama-hd64") +
                                 " -c 4096 --budget 50% --set codec=wf,statistics=" + file);
  EXPECT_EQ(lacking.code, 2);
  EXPECT_NE(lacking.err.find("have no layer 1 of"), std::string::npos) << lacking.err;
  std::remove(file.c_str());
}

TEST(CommandEvalTest, BitsOfLayersThatDoNotExistAreRefused) {
  const std::string model = " -m " + Tiny("llama-hd64");  // two layers
  const std::string bits = " --set 'codec=wf,layer_bits=0:2/2;2:1/1'";
  for (const std::string& command :
       {"run" + model + " -p x" + bits, "plan" + model + " -c 4096 --budget 50%" + bits,
        "serve" + model + " --dry-run" + bits, "eval ppl" + model + " -f " + Book() + bits}) {
    const Outcome o = Qevict(command);
    EXPECT_EQ(o.code, 2) << command;
    EXPECT_NE(o.err.find("layer_bits names layer 2, but the last layer"), std::string::npos)
        << command << "\n"
        << o.err;
  }
}

}  // namespace
}  // namespace qevict::cli
