// The command as people run it: exit codes, one sentence per error, output that programs can read.
#include <map>

#include "cli/testing/command.h"
#include "qevict/config.h"
#include "qevict/policy.h"

namespace qevict::cli {
namespace {

class CommandTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    ASSERT_FALSE(FromEnvironment("QEVICT_COMMAND").empty()) << "run by ctest";
    text_ = testing::TempDir() + "/qevict_command_test.txt";
    std::ofstream(text_) << Contents(Book()).substr(2000, 900);
  }
  static void TearDownTestSuite() { std::remove(text_.c_str()); }

  static std::string Run(const std::string& more, const std::string& model = "llama-hd64") {
    return "run -m " + Tiny(model) + " -f " + text_ + " -t 1 -n 24 --ignore-eos " + more;
  }
  static Json RunJson(const std::string& more, const std::string& model = "llama-hd64") {
    const Outcome o = Qevict(Run(more + " -o json", model));
    EXPECT_EQ(o.code, 0) << o.err;
    return Json::parse(o.out, nullptr, false);
  }
  static inline std::string text_;
};

TEST_F(CommandTest, UsageErrorsAreOneSentenceAndCode2) {
  const std::string model = Tiny("llama-hd64");
  const std::pair<std::string, std::string> cases[] = {
      {"", "command is missing"},
      {"fly", "unknown command fly"},
      {"eval", "command is missing"},
      {"run --fly", "unknown option --fly"},
      {"run", "no model"},
      {"run -m", "needs one value"},
      {"run -m /nonexistent -p x", "/nonexistent cannot be read"},
      {"run -m " + Book() + " -p x", "is not GGUF"},
      {"run -m " + model + " -p ''", "the prompt is empty"},
      {"run -m " + model + " -f /nonexistent", "/nonexistent cannot be read"},
      {"run -m " + model + " -p x -n 0", "-n 0 is not legal: expected an integer from 1"},
      {"run -m " + model + " -p x -n many", "-n many is not legal"},
      {"run -m " + model + " -p x --temp -1", "--temp -1 is not legal"},
      {"run -m " + model + " -p x --budget 120%", "budget=120% is not legal"},
      {"run -m " + model + " -p x --bits 2.5",
       "bits=2.5 is not legal with codec=kivi: expected 1, 2, 3, 4 or 8"},
      {"run -m " + model + " -p x --policy magic", "preset=magic is not legal"},
      {"run -m " + model + " -p x --set a=b", "unknown key a"},
      {"run -m " + model + " -p x -o xml", "-o xml is not legal: expected md, csv or json"},
      {"run -m " + model + " -p x --system y", "--system needs a chat template"},
      {"run -m " + model + " -p x --chat", "has none"},
      {"run -m " + model + " -p x --chat --no-chat", "contradict"},
      {"run -m " + model + " -f " + text_ + " -c 64", "-c allows 64"},
      {"run -hf x/y -p x", "-hf is none of qevict's"},
      {"run -m " + model + " -p x -ctk q8_0", "-ctk is none of qevict's"},
      {"run -m " + model + " -p x -ngl 0", "-ngl is none of qevict's"},
      {"run -m " + model + " -p x --flash-attn=on", "--flash-attn is none of qevict's"},
      {"run -m " + model + " -p x --preset full --budget 5%", "--budget 5% means nothing"},
      {"plan -m " + model + " --preset full --codec wf", "--codec wf means nothing"},
      {"run -m " + model + " -p x -- --port 1", "only `qevict serve`"},
      {"serve -m " + model + " --server /nonexistent --dry-run", "/nonexistent"},
      {"serve -m " + model + " --dry-run -- --device CPU", "--device"},
      {"eval kld -m " + model + " -f " + text_, "tokens, but 8 chunks of 4096 tokens need"},
      {"eval kld -m " + model + " -f " + text_ + " --step 3", "--step 3 does not divide"},
      {"eval kld -m " + model, "there is no text"},
      {"eval ppl -m " + model + " -f " + text_ + " --by-depth 2000", "--by-depth 2000 is more"},
      {"eval kld -m " + model + " -f " + Book() + " --pack-all --budget 20%",
       "--pack-all and --budget 20% exclude"},
      {"eval kld -m " + model + " -f " + Book() + " --temp 1", "--temp requires --generate"},
      {"policies --explain magic", "policy=magic does not exist: expected one of full, streaming"},
      {"calibrate codec -m " + model, "there is no text"},
      {"eval ppl -m " + Tiny("gpt2-hd64") + " -f " + Book() + " --chunks 1 --prompt 5000 --score 8",
       "positions that this model has learned"},
      {"calibrate codec -m " + model + " -f " + text_ + " --tokens 4096", "--tokens asks for 4096"},
      {"run -m " + model + " -p x --set codec=wf,statistics=/nonexistent", "/nonexistent cannot"},
      {"bench", "command is missing"},
      {"bench fly -r 3", "unknown command fly"},
      {"bench model", "no model"},
      {"bench model -m " + model + " -p x", "-p x is not legal: expected integers from 0"},
      {"bench model -m " + model + " -p 0 -n 0", "there is no test"},
      {"bench model -m " + model + " -r 0", "-r 0 is not legal"},
      {"bench model -m " + model + " --policy full,magic", "preset=magic is not legal"},
      {"bench model -m " + model + " -o xml", "expected md, csv, json or jsonl"},
      {"bench model -m " + model + " -f " + text_ + " -d 4096", "but the longest test needs"},
      {"bench attention --shapes 14/3x64", "--shapes 14/3x64 is not legal"},
      {"bench attention --tokens 7", "--tokens 7 is not legal: expected integers from 8"},
      {"bench attention --tokens 12", "--tokens 12 is not legal: expected windows of 8"},
      {"bench attention --tiers packed3", "--tiers packed3 is not legal"},
      {"bench attention --layers 0", "--layers 0 is not legal"},
  };
  for (const auto& [arguments, part] : cases) {
    const Outcome o = Qevict(arguments);
    EXPECT_EQ(o.code, 2) << arguments << "\n" << o.err;
    EXPECT_EQ(o.n_error_lines(), 1u) << arguments << "\n" << o.err;
    EXPECT_EQ(o.err.rfind("qevict: ", 0), 0u) << o.err;
    EXPECT_NE(o.err.find(part), std::string::npos) << arguments << "\n" << o.err;
    EXPECT_EQ(o.out, "") << arguments;
  }
}

TEST_F(CommandTest, ModelsThatQevictCannotHoldAreRefused) {
  for (const char* name : {"mamba", "deepseek2-mla"}) {
    const Outcome o = Qevict(Run("", name));
    EXPECT_EQ(o.code, 2) << name << o.err;
    EXPECT_EQ(o.n_error_lines(), 1u) << o.err;
    EXPECT_NE(o.err.find("not support"), std::string::npos) << o.err;
  }
}

TEST_F(CommandTest, HelpOfEveryCommand) {
  for (const char* command :
       {"", "run", "serve", "plan", "policies", "info", "eval", "eval kld", "eval ppl", "calibrate",
        "calibrate codec", "bench", "bench model", "bench attention", "bench codecs"}) {
    const Outcome o = Qevict(std::string(command) + " --help");
    EXPECT_EQ(o.code, 0) << command;
    EXPECT_EQ(o.err, "") << command;
    EXPECT_NE(o.out.find("Usage: qevict"), std::string::npos) << command;
    EXPECT_NE(o.out.find("Examples:"), std::string::npos) << command;
    EXPECT_EQ(o.out.find("\n\n\n"), std::string::npos) << command;
  }
  EXPECT_EQ(Qevict("--version").out.rfind("qevict ", 0), 0u);
  EXPECT_EQ(Qevict("-V").out, Qevict("--version").out);
  EXPECT_EQ(Qevict("help eval kld").out, Qevict("eval kld --help").out);
  EXPECT_NE(Qevict("help").out.find("Exit codes: 0"), std::string::npos);
}

TEST_F(CommandTest, OutputThatCannotBeWrittenIsAFailure) {
  if (!std::ifstream("/dev/full")) GTEST_SKIP() << "the system has no /dev/full";
  for (const char* command : {"info", "--help", "--version"}) {
    const Outcome o = Qevict(std::string(command) + " >/dev/full #");
    EXPECT_EQ(o.code, 1) << command;
  }
}

TEST_F(CommandTest, InfoSaysWhatThereIs) {
  const Json info = Json::parse(Qevict("info -o json").out);
  EXPECT_EQ(info["presets"], (Json{"qevict", "streaming", "pack", "full"}));
  EXPECT_EQ(info["isas"][0], "scalar");
  EXPECT_EQ(info["plugin"], FromEnvironment("QEVICT_PLUGIN"));
  EXPECT_EQ(Json::parse(Qevict("info -o json", "QEVICT_SIMD=scalar").out)["isa"], "scalar");
  EXPECT_NE(Qevict("info").out.find("ggml"), std::string::npos);
  // The formats are those that a configuration can name, all of them.
  std::string legal = ParseConfig("codec=none").status().message();
  for (const Json& codec : info["codecs"]) {
    const std::string id = codec["id"];
    EXPECT_TRUE(ParseConfig("window=8,codec=" + id + (id == "nqkv" ? ",bits=4" : "")).ok()) << id;
    const size_t at = legal.find(id);
    ASSERT_NE(at, std::string::npos) << id << " " << legal;
    legal.erase(at, id.size());
  }
  std::string rest = legal.substr(legal.find("expected"));
  std::erase_if(rest, [](char c) { return c == ',' || c == ' '; });
  EXPECT_EQ(rest, "expectedor");
}

// What is listed is what a configuration can name, as the policies describe themselves.
TEST_F(CommandTest, PoliciesAreListedAndExplained) {
  const Json list = Json::parse(Qevict("policies -o json").out)["policies"];
  ASSERT_EQ(list.size(), Policies().size());
  const std::string table = Qevict("policies").out, csv = Qevict("policies -o csv").out;
  for (size_t i = 0; i < list.size(); ++i) {
    const Policy& policy = *Policies()[i];
    const std::string name(policy.name);
    EXPECT_EQ(list[i]["name"], name);
    EXPECT_EQ(list[i]["parameters"].size(), policy.params.size());
    EXPECT_TRUE(ParseConfig("policy=" + name).ok()) << name;
    EXPECT_NE(table.find("| " + name), std::string::npos) << table;
    EXPECT_NE(csv.find("\n" + name + ","), std::string::npos) << csv;
    const Outcome one = Qevict("policies --explain " + name);
    EXPECT_EQ(one.code, 0) << one.err;
    EXPECT_EQ(one.out.rfind(name + ": " + std::string(policy.summary), 0), 0u) << one.out;
    for (const PolicyParam& p : policy.params)
      EXPECT_NE(one.out.find("| " + std::string(p.name)), std::string::npos) << one.out;
    EXPECT_NE(one.out.find("charged to the budget"), std::string::npos) << one.out;
  }
  const Json ladder = Json::parse(Qevict("policies --explain ladder -o json").out);
  EXPECT_EQ(ladder["parameters"][0]["name"], "floor");
  EXPECT_EQ(ladder["parameters"][0]["default"], 1.0);
  EXPECT_EQ(ladder["parameters"][0]["highest"], 100.0);
  EXPECT_EQ(ladder["reads"][0]["name"], "score");
}

TEST_F(CommandTest, EveryCsvHasOneTable) {
  for (const char* command : {"policies --explain snapkv", "policies", "info"}) {
    const std::vector<size_t> widths = CsvWidths(Qevict(std::string(command) + " -o csv").out);
    ASSERT_GT(widths.size(), 1u) << command;
    for (const size_t width : widths) EXPECT_EQ(width, widths[0]) << command;
  }
}

TEST_F(CommandTest, RunStreamsTextAndReportsOnStderr) {
  const Outcome o = Qevict(Run("--budget 40%"));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_GT(o.out.size(), 10u);
  EXPECT_NE(o.err.find("TTFT, ms"), std::string::npos);
  EXPECT_NE(o.err.find("share of f16"), std::string::npos);
  EXPECT_EQ(Qevict(Run("--budget 40%")).out, o.out) << "greedy runs repeat";
}

TEST_F(CommandTest, RunJsonAddsUp) {
  const Json j = RunJson("--budget 40% --set check=true");
  ASSERT_TRUE(j.is_object());
  const Json& kv = j["kv"];
  EXPECT_EQ(j["generated_tokens"], 24);
  EXPECT_EQ(kv["total_bytes"].get<uint64_t>(),
            kv["full_bytes"].get<uint64_t>() + kv["packed_bytes"].get<uint64_t>() +
                kv["dormant_bytes"].get<uint64_t>() + kv["tables_bytes"].get<uint64_t>() +
                kv["slack_bytes"].get<uint64_t>());
  EXPECT_LE(kv["total_bytes"].get<uint64_t>(), kv["budget_bytes"].get<uint64_t>());
  EXPECT_GT(j["tokens"]["evicted"].get<double>(), 0.0);
  EXPECT_GT(j["routing"]["events"].get<int>(), 0);
  EXPECT_EQ(j["violations"], 0);
  const double tokens = j["prompt_tokens"].get<double>() + 23.0;  // the last one is not fed back
  EXPECT_DOUBLE_EQ(j["tokens"]["full"].get<double>() + j["tokens"]["packed"].get<double>() +
                       j["tokens"]["evicted"].get<double>(),
                   tokens);
  // 2 layers, K and V, 3 heads of 64 channels of 2 bytes.
  EXPECT_EQ(kv["f16_bytes"].get<double>(), tokens * 2 * 2 * 3 * 64 * 2);
  // A fraction is of prompt and answer, not of the rounded context.
  EXPECT_NEAR(kv["budget_bytes"].get<double>(),
              0.4 * (j["prompt_tokens"].get<double>() + 24) * 2 * 2 * 3 * 64 * 2, 2.0);
}

TEST_F(CommandTest, CsvIsOneRowPerMetric) {
  const Outcome o = Qevict(Run("--budget 40% -o csv"));
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.out.rfind("metric,value\nprompt_tokens,", 0), 0u) << o.out;
}

TEST_F(CommandTest, FullPresetIsTheCpuBackend) {
  const Json j = RunJson("--preset full --compare");
  EXPECT_EQ(j["full"]["text"], j["compressed"]["text"]);
  EXPECT_EQ(j["agreement"]["same_tokens"], 24);
  EXPECT_EQ(j["agreement"]["positions"], 24);
  EXPECT_LT(j["agreement"]["kl_mean"].get<double>(), 1e-3);
  EXPECT_EQ(j["agreement"]["same_top_percent"], 100.0);
}

TEST_F(CommandTest, CompareMeasuresTheDifference) {
  const Json j = RunJson("--budget 30% --compare");
  EXPECT_GT(j["agreement"]["kl_mean"].get<double>(), 1e-3);
  EXPECT_LT(j["compressed"]["kv"]["share_percent"].get<double>(), 30.1);
  EXPECT_EQ(j["full"]["kv"]["total_bytes"], j["compressed"]["kv"]["f16_bytes"]);
  EXPECT_GT(j["agreement"]["full_tokens_per_s"].get<double>(), 0.0);
}

TEST_F(CommandTest, SamplingIsRepeatableBySeed) {
  const std::string sample = "--budget 40% --temp 1.5 --top-k 0 --top-p 1 --min-p 0 ";
  const std::string one = Qevict(Run(sample + "-s 1")).out;
  EXPECT_EQ(Qevict(Run(sample + "-s 1")).out, one);
  EXPECT_NE(Qevict(Run(sample + "-s 2")).out, one);
}

TEST_F(CommandTest, PromptFromStdin) {
  const std::string arguments = "run -m " + Tiny("llama-hd64") + " -t 1 -n 4 --ignore-eos -o json";
  const Outcome piped = Qevict(arguments, "cat " + text_ + " |");
  EXPECT_EQ(piped.code, 0) << piped.err;
  EXPECT_EQ(Json::parse(piped.out)["prompt_tokens"], RunJson("")["prompt_tokens"]);
}

TEST_F(CommandTest, InterruptEndsTheAnswerAndReports) {
  const std::string arguments =
      "run -m " + Tiny("llama-hd64") + " -p hello -t 1 -n 8000 --ignore-eos -o json";
  const Outcome o = Qevict(arguments, "timeout --signal INT 1");
  const Json j = Json::parse(o.out, nullptr, false);
  ASSERT_TRUE(j.is_object()) << o.err;
  EXPECT_GT(j["generated_tokens"].get<int>(), 0);
  EXPECT_LT(j["generated_tokens"].get<int>(), 8000);
  EXPECT_EQ(j["ended"], false);
}

TEST_F(CommandTest, VerboseShowsTheLogOfLlama) {
  EXPECT_NE(Qevict(Run("--budget 40% -v")).err.find("llama_context"), std::string::npos);
}

TEST_F(CommandTest, PlanReadsMetadataOnly) {
  const Json j =
      Json::parse(Qevict("plan -m " + Tiny("llama-hd64") + " -c 4096 --budget 20% -o json").out);
  EXPECT_EQ(j["f16_bytes"], 4096 * 2 * 2 * 3 * 64 * 2);
  EXPECT_EQ(j["layers"].size(), 1u);
  EXPECT_EQ(j["layers"][0]["layers"], "0-1");
  EXPECT_LE(j["total_bytes"].get<uint64_t>(), j["budget_bytes"].get<uint64_t>());
  EXPECT_GT(j["share_percent"].get<double>(), 18.0);
  const Outcome sliding = Qevict("plan -m " + Tiny("gemma3-hd64") + " -c 8192 -np 2 -kvu");
  EXPECT_EQ(sliding.code, 0) << sliding.err;
  EXPECT_NE(sliding.out.find("yes"), std::string::npos) << sliding.out;
}

TEST_F(CommandTest, ServeDryRunPrintsEnvironmentAndCommand) {
  const std::string start = "serve --dry-run -m " + Tiny("llama-hd64");
  const Outcome o = Qevict(start + " -c 4096 -np 2 --budget 25% -- --api-key 'a b'");
  EXPECT_EQ(o.code, 0) << o.err;
  for (const char* part : {"GGML_BACKEND_PATH=", "LLAMA_ARG_DEVICE=QEVICT", "budget=0.25",
                           "-c 4096", "-np 2", "--api-key 'a b'", "LLAMA_ARG_CACHE_RAM=0"}) {
    EXPECT_NE(o.out.find(part), std::string::npos) << part << " in " << o.out;
  }
  EXPECT_EQ(Qevict(start + " -- --cache-ram 64").out.find("LLAMA_ARG_CACHE_RAM"),
            std::string::npos);
}

TEST_F(CommandTest, ShortPromptsRunUnderEveryBudget) {
  const std::string model = Tiny("llama-hd64");
  for (const char* budget : {"1KiB", "1%", "20%"}) {
    const Outcome o = Qevict("run -m " + model + " -p x -n 40 --no-chat --budget " + budget);
    EXPECT_EQ(o.code, 0) << budget << o.err;
    EXPECT_NE(o.err.find("is raised to"), std::string::npos) << budget << o.err;
    EXPECT_EQ(o.err.find("is raised to"), o.err.rfind("is raised to")) << budget << o.err;
  }
  const Outcome plan = Qevict("plan -m " + model + " -c 4096 --budget 1KiB");
  EXPECT_EQ(plan.code, 0) << plan.err;
  EXPECT_NE(plan.err.find("1.00 KiB is raised to"), std::string::npos) << plan.err;
}

// llama-server fits layers and context to what the cache may take: an f16 cache that is too large
// for the machine must not be what it is told.
TEST_F(CommandTest, ServeBoundsThePromptWhereF16DoesNotFit) {
  const std::string start = "serve --dry-run -m " + Tiny("llama-hd64") + " -c 65536 --budget 5%";
  EXPECT_NE(Qevict(start).out.find("prefill=auto"), std::string::npos);
  const std::string large = " -- --fit-target 1000000000";  // MiB kept free
  const Outcome bounded = Qevict(start + large);
  EXPECT_EQ(bounded.code, 0) << bounded.err;
  EXPECT_NE(bounded.out.find("prefill=bounded"), std::string::npos) << bounded.out;
  EXPECT_NE(bounded.err.find("exceeds the free memory"), std::string::npos) << bounded.err;
  EXPECT_NE(Qevict(start + " --prefill full" + large).out.find("prefill=full"), std::string::npos);
}

TEST_F(CommandTest, ServeStartsTheServer) {
  const std::string server = testing::TempDir() + "/qevict_fake_server";
  std::ofstream(server) << "#!/bin/sh\necho \"$GGML_BACKEND_PATH|$QEVICT_CONFIG|$*\"\n";
  ASSERT_EQ(std::system(("chmod +x " + server).c_str()), 0);
  const Outcome o =
      Qevict("serve -m " + Tiny("llama-hd64") + " --server " + server + " -- --slots");
  EXPECT_EQ(o.code, 0) << o.err;
  EXPECT_EQ(o.out.rfind(FromEnvironment("QEVICT_PLUGIN") + "|preset=qevict,budget=0.2,", 0), 0u)
      << o.out;
  EXPECT_NE(o.out.find("--slots\n"), std::string::npos);
  std::remove(server.c_str());
}

std::string Names(const std::vector<Json>& rows) {
  std::string names;
  for (const Json& row : rows) {
    names += row["policy"].get<std::string>() + "|" + row["test"].get<std::string>() + " ";
  }
  return names;
}

TEST_F(CommandTest, BenchModelTimesPairs) {
  const Outcome o = Qevict("bench model -m " + Tiny("llama-hd64") +
                           " -t 1 -p 40 -n 12 -d 400 -r 3 --budget 40% --set check=true -o jsonl");
  ASSERT_EQ(o.code, 0) << o.err;
  const std::vector<Json> rows = Lines(o.out);
  EXPECT_EQ(Names(rows),
            "|pp40 @ d400 full|pp40 @ d400 qevict|pp40 @ d400 "
            "|tg12 @ d400 full|tg12 @ d400 qevict|tg12 @ d400 ");
  for (const Json& row : rows) {
    const bool ours = row["backend"] == "QEVICT";
    EXPECT_GT(row["tokens_per_s_median"].get<double>(), 0.0);
    EXPECT_EQ(row["samples_ms"].size(), ours ? 3u : 6u);
    EXPECT_EQ(row["ratios"].size(), ours ? 3u : 0u);
    EXPECT_EQ(row["violations"], 0);
    EXPECT_EQ(row["tpot_p50_ms"].is_null(), row["n_gen"] == 0);
    if (!ours) continue;
    EXPECT_LE(row["ratio_low"].get<double>(), row["ratio_median"].get<double>());
    EXPECT_GE(row["ratio_high"].get<double>(), row["ratio_median"].get<double>());
    EXPECT_EQ(row["ratio_coverage_percent"], 75.0);
    EXPECT_EQ(row["kl_mean"].get<double>() < 1e-3, row["policy"] == "full") << row;
  }
  EXPECT_GT(rows[4]["kv_share_percent"].get<double>(), 100.0) << "rows and tables";
  EXPECT_LT(rows[5]["kv_share_percent"].get<double>(), 40.1);
}

TEST_F(CommandTest, BenchModelHoldsWhatTheDepthHolds) {
  const Outcome o = Qevict("bench model -m " + Tiny("llama-hd64") + " -f " + Book() +
                           " -t 1 -p 0 -n 16 -d 256 -r 4 --policy full -o json");
  ASSERT_EQ(o.code, 0) << o.err;
  const Json j = Json::parse(o.out);
  EXPECT_EQ(j["command"], "bench model");
  EXPECT_FALSE(j["cpu"].get<std::string>().empty());
  ASSERT_EQ(j["results"].size(), 2u);
  // Tokens that were taken back are gone: 256, the warm-up and 16 in 2 layers of 768 bytes.
  const double f16_bytes = 273.0 * 2 * 2 * 3 * 64 * 2, kv = j["results"][1]["kv_bytes"];
  EXPECT_NEAR(kv * 100.0 / j["results"][1]["kv_share_percent"].get<double>(), f16_bytes, 1.0);
}

TEST_F(CommandTest, BenchAttentionChecksAndTimes) {
  for (const char* more : {"", " --warm"}) {
    const Outcome o = Qevict(
        "bench attention --shapes 4/2x32,3/3x64 --tokens 512 --tiers "
        "full,packed2,packed4,token,mixed"
        " -t 1 -r 2 --layers 2 -o json" +
        std::string(more));
    ASSERT_EQ(o.code, 0) << o.err;
    const Json j = Json::parse(o.out);
    EXPECT_GT(j["read_gbps"].get<double>(), 0.1);
    ASSERT_EQ(j["results"].size(), 16u);
    for (const Json& row : j["results"]) {
      const std::string kernel = row["kernel"];
      const bool ours = kernel.starts_with("qevict");
      // Packed values have weights of 16 bits; token codes, also in `mixed`, queries of 8.
      const bool packed = kernel == "qevict packed2" || kernel == "qevict packed4";
      const double limit = kernel == "qevict full" ? 1e-5 : packed ? 1e-3 : 0.05;
      EXPECT_LT(row["error"].get<double>(), limit) << row;
      EXPECT_EQ(row["mass_error"].is_null(), !ours);
      EXPECT_GT(row["gbps"].get<double>(), 0.0);
      EXPECT_EQ(row["ratios"].size(), 2u);
    }
    EXPECT_EQ(j["results"][0]["kernel"], "ggml f16");
    EXPECT_EQ(j["results"][0]["layer_bytes"], 512 * 2 * 2 * 32 * 2);
    EXPECT_EQ(j["results"][0]["ratio_median"], 1.0);
    EXPECT_EQ(j["results"][3]["kernel"], "qevict full");
    EXPECT_EQ(j["results"][3]["layer_bytes"], 512 * 2 * 2 * 32 * 2);
  }
}

}  // namespace
}  // namespace qevict::cli
