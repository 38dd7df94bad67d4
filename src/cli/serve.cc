// qevict serve: starts llama-server of the same build with the plug-in.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <system_error>

#include "cli/capacity.h"
#include "cli/commands.h"
#include "cli/machine.h"
#include "cli/paths.h"
#include "cli/run.h"
#include "cli/statistics_file.h"

namespace qevict::cli {
namespace {

constexpr const char* kPlain =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:=,%+@";
constexpr const char* kServer = "Server";

struct ServeOptions {
  std::string model, server, host;
  int64_t n_ctx = 0, n_slots = 0, n_threads = 0, port = 0;
  bool dry_run = false;
  ConfigOptions cache;
};

using Environment = std::vector<std::pair<std::string, std::string>>;

/// As a shell reads it back.
std::string Quoted(const std::string& text) {
  if (!text.empty() && text.find_first_not_of(kPlain) == std::string::npos) return text;
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

bool Names(const std::string& word, std::initializer_list<std::string_view> options) {
  for (const std::string_view option : options) {
    if (word == option || word.starts_with(std::string(option) + "=")) return true;
  }
  return false;
}

/// Options of llama-server that would take the cache away from the plug-in.
Status CheckPassthrough(const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    if (Names(word, {"-dev", "--device"})) {
      return InvalidArgument("option " + word + " behind `--` is set by `qevict serve`: remove it");
    }
    if (Names(word, {"-nkvo", "--no-kv-offload"})) {
      return InvalidArgument("option " + word +
                             " would leave the KV cache uncompressed: remove it");
    }
  }
  return {};
}

std::vector<std::string> ServerCommand(const ServeOptions& o, const std::string& server,
                                       const std::vector<std::string>& passthrough) {
  std::vector<std::string> words = {server, "-m", o.model};
  const auto add = [&](const char* name, int64_t value) {
    if (value > 0) words.insert(words.end(), {name, std::to_string(value)});
  };
  add("-c", o.n_ctx);
  add("-np", o.n_slots);
  add("-t", o.n_threads);
  add("--port", o.port);
  if (!o.host.empty()) words.insert(words.end(), {"--host", o.host});
  words.insert(words.end(), passthrough.begin(), passthrough.end());
  return words;
}

/// A prompt kept in host memory has the size of f16: without a limit it would undo the budget.
bool SetsPromptCache(const std::vector<std::string>& words) {
  if (std::getenv("LLAMA_ARG_CACHE_RAM")) return true;
  for (const std::string& word : words) {
    if (Names(word, {"-cram", "--cache-ram"})) return true;
  }
  return false;
}

/// The value of an option that llama-server was given, as a number; none if it is not there.
std::optional<uint64_t> NumberOf(const std::vector<std::string>& words,
                                 std::initializer_list<std::string_view> options) {
  std::optional<uint64_t> value;
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    if (std::find(options.begin(), options.end(), words[i]) == options.end()) continue;
    char* end = nullptr;
    const uint64_t number = std::strtoull(words[i + 1].c_str(), &end, 10);
    if (end != words[i + 1].c_str()) value = number;
  }
  return value;
}

/// Memory that llama-server would count on for the cache: without its margin (--fit-target, MiB)
/// and the model.
uint64_t RoomForCache(const std::string& model, const std::vector<std::string>& passthrough) {
  const uint64_t margin = NumberOf(passthrough, {"-fitt", "--fit-target"}).value_or(1024) << 20;
  std::error_code error;
  const uint64_t weights = std::filesystem::file_size(model, error);
  const uint64_t taken = margin + (error ? 0 : weights), available = AvailableBytes();
  return available > taken ? available - taken : 0;
}

/// While a prompt is read its cache has the size of f16. Where that exceeds the free memory,
/// llama-server would take layers away from the cache or shorten the context: chunks are compressed
/// as they arrive instead, and the budget is all that the cache takes.
void FitPrefill(const ServeOptions& o, const std::vector<std::string>& passthrough,
                Config& config) {
  if (config.preset == Preset::kFull || config.prefill != Prefill::kAuto) return;
  const Result<ModelShape> shape = ReadModelShape(o.model);
  if (!shape.ok()) return;  // the server says what it thinks of the model
  CacheUse use;
  const uint64_t n_ctx =
      NumberOf(passthrough, {"-c", "--ctx-size"}).value_or(static_cast<uint64_t>(o.n_ctx));
  use.n_ctx = static_cast<uint32_t>(n_ctx ? n_ctx : shape->n_ctx_train);
  use.unified = true;  // slots share the context: their caches have one size together
  uint64_t f16 = 0;
  for (const CacheLayout& cache : LayOut(*shape, use)) f16 += F16Bytes(cache);
  const uint64_t room = RoomForCache(o.model, passthrough);
  if (f16 <= room) return;
  config.prefill = Prefill::kBounded;
  std::fprintf(stderr,
               "qevict: an f16 cache of %s exceeds the free memory of %s: prompts are compressed "
               "while they are read (prefill=bounded)\n",
               BytesText(f16).c_str(), BytesText(room).c_str());
}

int Serve(const ServeOptions& o, const std::vector<std::string>& passthrough) {
  Result<Config> config = o.cache.Build();
  if (!config.ok()) return Fail(config.status());
  if (const Status s = CheckModelFile(o.model); !s.ok()) return Fail(s);
  config = UseStatistics(*config, o.model);
  if (!config.ok()) return Fail(config.status());
  if (const Status s = CheckPassthrough(passthrough); !s.ok()) return Fail(s);
  FitPrefill(o, passthrough, *config);
  const Result<std::string> plugin = FindPlugin();
  if (!plugin.ok()) return Fail(plugin.status());
  const Result<std::string> server = FindServer(o.server);
  if (!server.ok()) return Fail(server.status());

  Environment environment = {{"GGML_BACKEND_PATH", *plugin},
                             {"LLAMA_ARG_DEVICE", "QEVICT"},
                             {"QEVICT_CONFIG", ToText(*config)}};
  if (!SetsPromptCache(passthrough)) environment.emplace_back("LLAMA_ARG_CACHE_RAM", "0");
  const std::vector<std::string> words = ServerCommand(o, *server, passthrough);
  if (o.dry_run) {
    std::string line;
    for (const auto& [name, value] : environment) line += name + "=" + Quoted(value) + " ";
    for (const std::string& word : words) line += Quoted(word) + " ";
    line.back() = '\n';
    PrintText(line);
    return kOk;
  }
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  std::vector<char*> argv;
  for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  execv(server->c_str(), argv.data());
  return Fail(Internal(*server + " cannot be started: " + std::generic_category().message(errno)));
}

}  // namespace

Command AddServe(CLI::App& root, const Arguments& arguments) {
  auto o = std::make_shared<ServeOptions>();
  CLI::App* app = root.add_subcommand("serve", "llama-server with a compressed KV cache");
  SetHelp(
      *app,
      "Starts llama-server with the KV cache under a budget; endpoints and slots work as usual.",
      "qevict serve -m FILE [options] [-- options of llama-server]",
      "  qevict serve -m model.gguf -c 32768 -np 4 --budget 20%\n"
      "  qevict serve -m model.gguf --budget 1GiB --dry-run -- --api-key secret\n\n"
      "Prompts that the server keeps in host memory would have the size of f16, so --cache-ram is "
      "0\n"
      "unless you set it behind `--`. Where an f16 cache does not fit the free memory, prompts "
      "are\n"
      "compressed while they are read (prefill=bounded), so that llama-server keeps every layer "
      "and\n"
      "the whole context.\n");
  AddModel(*app, o->model)->group(kServer);
  AddInteger(*app, "-c,--ctx-size", o->n_ctx, 1, 1 << 28, "context of all slots, tokens")
      ->default_str("llama-server's")
      ->group(kServer);
  AddInteger(*app, "--parallel", o->n_slots, 1, 256, "slots (also -np)")
      ->default_str("llama-server's")
      ->group(kServer);
  AddInteger(*app, "-t,--threads", o->n_threads, 1, 1024, "CPU threads")
      ->default_str("llama-server's")
      ->group(kServer);
  AddText(*app, "--host", o->host, "ADDRESS", "address to listen at")->group(kServer);
  AddInteger(*app, "--port", o->port, 1, 65535, "port to listen at")
      ->default_str("llama-server's")
      ->group(kServer);
  AddText(*app, "--server", o->server, "FILE", "llama-server to start")
      ->default_str("beside qevict, or of the llama.cpp it was built for")
      ->group(kServer);
  AddFlag(*app, "--dry-run", o->dry_run, "print environment and command instead of starting them")
      ->group(kServer);
  o->cache.Register(*app);
  return {app, [o, passthrough = arguments.passthrough] { return Serve(*o, passthrough); }, true};
}

}  // namespace qevict::cli
