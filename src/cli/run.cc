#include "cli/run.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <iostream>
#include <iterator>

#include "cli/commands.h"
#include "cli/report.h"
#include "cli/statistics_file.h"
#include "kernels/attention.h"
#include "qevict/version.h"

namespace qevict::cli {
namespace {

constexpr const char* kInput = "Input";
constexpr const char* kModel = "Model";

void OnSignal(int) { Interrupt(); }

/// The first Ctrl-C ends the answer and prints the report, the second one ends the program.
void StopAtSigint() {
  struct sigaction action = {};
  action.sa_handler = OnSignal;
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
}

/// Text of -f, then of -p; of stdin if neither is given.
Result<std::string> PromptText(const RunOptions& o) {
  std::string text;
  if (!o.file.empty()) {
    Result<std::string> file = ReadTextFile(o.file);
    if (!file.ok()) return file;
    text = std::move(*file);
  }
  if (!o.prompt.empty()) text += (text.empty() ? "" : "\n\n") + o.prompt;
  if (o.file.empty() && o.prompt.empty()) {
    if (isatty(STDIN_FILENO) == 1) {
      return InvalidArgument("there is no prompt: give -p TEXT or -f FILE, or pipe a text in");
    }
    text.assign(std::istreambuf_iterator<char>(std::cin), {});
  }
  if (text.empty()) return InvalidArgument("the prompt is empty: at least one character is needed");
  return text;
}

Result<std::vector<llama_token>> PromptTokens(const RunOptions& o, const Model& model) {
  const Result<std::string> text = PromptText(o);
  if (!text.ok()) return text.status();
  if (o.chat && !model.has_chat_template()) {
    return InvalidArgument("--chat needs a chat template, but the model " + o.model + " has none");
  }
  const bool wanted = o.chat || (!o.no_chat && model.has_chat_template());
  if (!wanted) {
    if (!o.system.empty()) {
      return InvalidArgument("--system needs a chat template, but none is in use");
    }
    return model.Tokenize(*text, true, false);
  }
  const Result<std::string> prompt = model.ApplyChatTemplate(o.system, *text);
  if (!prompt.ok()) {
    if (o.chat) return prompt.status();
    std::fprintf(stderr, "qevict: warning: %s; the prompt is used as it is\n",
                 prompt.status().message().c_str());
    return model.Tokenize(*text, true, false);
  }
  Result<std::vector<llama_token>> tokens = model.Tokenize(*prompt, true, true);
  const llama_token bos = llama_vocab_bos(model.vocab());
  if (tokens.ok() && tokens->size() > 1 && (*tokens)[0] == bos && (*tokens)[1] == bos) {
    tokens->erase(tokens->begin());  // the template wrote one already
  }
  return tokens;
}

Result<Task> MakeTask(const RunOptions& o, const Model& model) {
  Result<std::vector<llama_token>> tokens = PromptTokens(o, model);
  if (!tokens.ok()) return tokens.status();
  Task task;
  task.prompt = std::move(*tokens);
  if (task.prompt.empty()) return InvalidArgument("the prompt has no tokens: at least 1 is needed");
  const size_t n_prompt = task.prompt.size();
  const uint64_t wanted = n_prompt + static_cast<uint64_t>(o.n_predict);
  const uint64_t limit = o.n_ctx ? static_cast<uint64_t>(o.n_ctx) : model.n_ctx_train();
  if (n_prompt >= limit) {
    return InvalidArgument(
        "the prompt has " + std::to_string(n_prompt) + " tokens, but " +
        (o.n_ctx ? "-c allows " : "the model was trained for ") + std::to_string(limit) +
        " with the answer: " + (o.n_ctx ? "raise -c or shorten it" : "shorten it or set -c"));
  }
  task.n_predict = static_cast<uint32_t>(std::min(wanted, limit) - n_prompt);
  if (task.n_predict < o.n_predict) {
    std::fprintf(stderr,
                 "qevict: warning: the answer is limited to %u tokens by a context of %llu\n",
                 task.n_predict, static_cast<unsigned long long>(limit));
  }
  const uint32_t rounded = ContextCells(std::min(wanted, limit));
  task.n_ctx = o.n_ctx ? static_cast<uint32_t>(limit) : rounded;
  return task;
}

Json Header(const RunOptions& o, const Config& config, const Task& task) {
  return {{"command", "run"},
          {"version", QEVICT_VERSION_STRING},
          {"model", o.model},
          {"config", ToText(config)},
          {"isa", kernels::IsaName(kernels::ActiveIsa())},
          {"threads", o.n_threads},
          {"context_tokens", task.n_ctx},
          {"budget_tokens", task.n_total()}};
}

int RunOnce(const RunOptions& o, const Config& config, const Model& model, const Task& task) {
  ContextOptions options = o.context_options();
  options.n_ctx = task.n_ctx;
  Result<Context> context = Context::Create(model, options, config, task.n_total());
  if (!context.ok()) return Fail(context.status());
  const Sampler sampler = MakeSampler(model, o.sampling);
  const bool stream = o.format == Format::kMarkdown;
  const Result<Generation> g =
      Generate(model, *context, sampler.get(), task.prompt, task.n_predict, options.n_batch,
               "reading the prompt", [&](llama_token token) {
                 if (stream) PrintText(model.Piece(token));
               });
  if (!g.ok()) return Fail(g.status());
  if (stream) PrintText("\n");
  const Result<qevict_stats> stats = context->Stats();
  if (!stats.ok()) return Fail(stats.status());

  Metrics metrics = TimeMetrics(task.prompt.size(), *g);
  for (Metric& m : CacheMetrics(*stats)) metrics.push_back(std::move(m));
  const Table table = ToTable({{"value", metrics}});
  if (o.format == Format::kMarkdown) {
    std::fprintf(stderr, "\n%s", table.ToMarkdown().c_str());
  } else if (o.format == Format::kCsv) {
    PrintText(table.ToCsv());
  } else {
    Json json = Header(o, config, task);
    json.update(ToJson(metrics));
    json["ended"] = g->ended;
    json["text"] = model.Text(g->tokens);
    PrintText(JsonText(json) + "\n");
  }
  return kOk;
}

int Run(RunOptions& o) {
  if (o.chat && o.no_chat)
    return Fail(InvalidArgument("--chat and --no-chat contradict each other"));
  if (o.n_ubatch > o.n_batch) o.n_ubatch = o.n_batch;
  Result<Config> config = o.cache.Build();
  if (!config.ok()) return Fail(config.status());
  if (const Status status = CheckModelFile(o.model); !status.ok()) return Fail(status);
  config = UseStatistics(*config, o.model);
  if (!config.ok()) return Fail(config.status());
  if (!o.file.empty()) {
    if (const Result<std::string> file = ReadTextFile(o.file); !file.ok())
      return Fail(file.status());
  }
  if (const Status status = InitLlama(o.verbose); !status.ok()) return Fail(status);
  const Result<Model> model = Model::Load(o.model, Device::kQEvict);
  if (!model.ok()) return Fail(model.status());
  const Result<Task> task = MakeTask(o, *model);
  if (!task.ok()) return Fail(task.status());
  StopAtSigint();
  return o.compare ? RunCompare(o, *config, *model, *task) : RunOnce(o, *config, *model, *task);
}

}  // namespace

void PrintText(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

ContextOptions RunOptions::context_options() const {
  ContextOptions options;
  options.n_batch = static_cast<uint32_t>(n_batch);
  options.n_ubatch = static_cast<uint32_t>(n_ubatch);
  options.n_threads = static_cast<int>(n_threads);
  return options;
}

Command AddRun(CLI::App& root) {
  auto o = std::make_shared<RunOptions>();
  o->n_threads = UsableCpus();
  CLI::App* app = root.add_subcommand("run", "answer a prompt with a compressed KV cache");
  SetHelp(
      *app,
      "Answers a prompt with the KV cache under a budget, and reports time, bytes and tokens by "
      "tier.",
      "qevict run -m FILE [-p TEXT | -f FILE] [options]   (without -p and -f the prompt is stdin)",
      "  qevict run -m model.gguf -f paper.txt -p \"Summarize this paper.\" --budget 20%\n"
      "  qevict run -m model.gguf -f book.txt --no-chat -n 512 --budget 512MiB --compare -o "
      "json\n");
  AddModel(*app, o->model)->group(kInput);
  AddText(*app, "-p,--prompt", o->prompt, "TEXT", "prompt; with -f it follows the file's text")
      ->group(kInput);
  AddText(*app, "-f,--file", o->file, "FILE", "file that holds the prompt")->group(kInput);
  AddText(*app, "--system,--system-prompt", o->system, "TEXT",
          "system message of the chat template")
      ->group(kInput);
  AddFlag(*app, "--chat", o->chat, "use the model's chat template (default if it has one)")
      ->group(kInput);
  AddFlag(*app, "--no-chat,--no-conversation", o->no_chat, "use the prompt as it is (also -no-cnv)")
      ->group(kInput);

  AddInteger(*app, "-n,--predict,--n-predict", o->n_predict, 1, 1 << 24,
             "most tokens of the answer")
      ->group(kModel);
  AddInteger(*app, "-c,--ctx-size", o->n_ctx, 1, 1 << 28, "context, tokens: prompt and answer")
      ->default_str("prompt + answer")
      ->group(kModel);
  AddInteger(*app, "-t,--threads", o->n_threads, 1, 1024, "CPU threads")->group(kModel);
  AddInteger(*app, "-b,--batch-size", o->n_batch, 1, 65536, "prompt tokens per call")
      ->group(kModel);
  AddInteger(*app, "--ubatch-size", o->n_ubatch, 1, 65536, "prompt tokens per step (also -ub)")
      ->group(kModel);

  o->cache.Register(*app);
  o->sampling.Register(*app);

  AddFlag(*app, "--compare", o->compare,
          "run the full cache on llama.cpp's CPU backend, too, and report how far the two differ")
      ->group("Output");
  AddFormat(*app, o->format, "form of the report; csv and json go to stdout, md to stderr")
      ->group("Output");
  AddFlag(*app, "-v,--verbose", o->verbose, "show the log of llama.cpp")->group("Output");
  return {app, [o] { return Run(*o); }};
}

}  // namespace qevict::cli
