// qevict info: what this build is and what it finds.
#include "cli/commands.h"
#include "cli/llm.h"
#include "cli/paths.h"
#include "cli/run.h"
#include "kernels/attention.h"
#include "qevict/version.h"

namespace qevict::cli {
namespace {

Json Codecs() {
  constexpr const char* kAnyBits = "1, 2, 3, 4, 8";
  const struct {
    const char *id, *bits, *keys, *values;
  } rows[] = {
      {"kivi", kAnyBits, "per channel over the window, before RoPE", "per token"},
      {"token", kAnyBits, "per token, after RoPE", "per token"},
      {"wf", "1 to 4 by 0.25", "static transform, a scale per token, after RoPE",
       "static transform, a scale per token"},
      {"kivi_clip", kAnyBits, "as kivi, least squares", "per token, least squares"},
      {"kivi_post", kAnyBits, "per channel over the window, after RoPE",
       "per token and 32 channels"},
      {"byte_grid", kAnyBits, "as kivi, grids of one byte", "per token"},
      {"kvquant", "1 to 4", "static per channel before RoPE, non-uniform, 1% exact",
       "per token, non-uniform, 1% exact"},
      {"zipcache", kAnyBits, "static per channel, after RoPE", "channel-separable, per token"},
      {"ott", kAnyBits, "as kivi_post, an exact token per window", "the same token exact"},
      {"nqkv", "4", "NormalFloat per token, after RoPE", "NormalFloat per token"},
      {"hqe", "1, 2, 4, 8", "as kivi_post; 1 bit: normal code", "as kivi_post; 1 bit: normal code"},
      {"hadamard", "1 to 4", "rotated per token before RoPE, static mean", "rotated per token"},
      {"kvtuner", "1, 2, 3, 4, 8 by layer", "per channel over the window, after RoPE",
       "per token; layer_bits names bits per layer"},
  };
  Json codecs = Json::array();
  for (const auto& c : rows)
    codecs.push_back({{"id", c.id}, {"bits", c.bits}, {"keys", c.keys}, {"values", c.values}});
  return codecs;
}

Json OrNull(const Result<std::string>& path) { return path.ok() ? Json(*path) : Json(nullptr); }

Json Info() {
  Json isas = Json::array();
  for (const kernels::Isa isa : kernels::kAllIsas) {
    if (kernels::IsaSupported(isa)) isas.push_back(kernels::IsaName(isa));
  }
  Json presets = Json::array();
  for (const Preset preset : {Preset::kQEvict, Preset::kStreaming, Preset::kPack, Preset::kFull}) {
    presets.push_back(PresetName(preset));
  }
  return {{"version", QEVICT_VERSION_STRING},
          {"isa", kernels::IsaName(kernels::ActiveIsa())},
          {"isas", isas},
          {"cpus", UsableCpus()},
          {"presets", presets},
          {"codecs", Codecs()},
          {"llama_version", llama_version()},
          {"ggml_version", ggml_version()},
          {"plugin", OrNull(FindPlugin())},
          {"server", OrNull(FindServer(""))}};
}

std::string Joined(const Json& list, const char* member) {
  std::string text;
  for (const Json& item : list) {
    text += (text.empty() ? "" : ", ") + (member ? item[member] : item).get<std::string>();
  }
  return text;
}

int PrintInfo(Format format) {
  const Json info = Info();
  if (format == Format::kJson) {
    PrintText(JsonText(info) + "\n");
    return kOk;
  }
  Table table({{"name", ""}, {"value", "value"}});
  const auto add = [&](const char* key, const std::string& label, const Json& value) {
    table.Add({{key, label}, TextCell(value.is_null() ? "not found" : value.get<std::string>())});
  };
  add("version", "qevict", info["version"]);
  add("isa", "kernels in use", info["isa"]);
  add("isas", "kernels this CPU can run", Joined(info["isas"], nullptr));
  add("cpus", "CPUs", std::to_string(UsableCpus()));
  add("presets", "presets", Joined(info["presets"], nullptr));
  add("codecs", "packed formats", Joined(info["codecs"], "id"));
  add("llama_version", "llama.cpp", info["llama_version"]);
  add("ggml_version", "ggml", info["ggml_version"]);
  add("plugin", "plug-in", info["plugin"]);
  add("server", "llama-server", info["server"]);
  PrintText(format == Format::kCsv ? table.ToCsv() : table.ToMarkdown());
  return kOk;
}

}  // namespace

Command AddInfo(CLI::App& root) {
  auto format = std::make_shared<Format>(Format::kMarkdown);
  CLI::App* app = root.add_subcommand("info", "version, kernels, presets, where things are");
  SetHelp(*app,
          "Prints version, kernels, presets, packed formats, and where plug-in and server are.",
          "qevict info [-o md|csv|json]",
          "  qevict info\n"
          "  QEVICT_SIMD=scalar qevict info -o json\n");
  AddFormat(*app, *format, "form of the output")->group("Output");
  return {app, [format] { return PrintInfo(*format); }};
}

}  // namespace qevict::cli
