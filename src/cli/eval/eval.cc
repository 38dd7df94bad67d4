// qevict eval kld and ppl: how far compressed caches are from the full one, logit by logit or in
// perplexity alone.
#include "cli/eval/eval.h"
#include "cli/commands.h"
#include "cli/run.h"
#include "cli/statistics_file.h"

namespace qevict::cli {
namespace {

constexpr const char* kInput = "Input";

int Eval(const EvalOptions& o) {
  if (o.reference != "fa" && o.reference != "none-fa") {
    return Fail(
        InvalidArgument("--reference " + o.reference + " is not legal: expected fa or none-fa"));
  }
  if (o.n_depths > o.n_score) {
    return Fail(InvalidArgument("--by-depth " + std::to_string(o.n_depths) + " is more than the " +
                                std::to_string(o.n_score) + " scored tokens"));
  }
  Result<std::vector<Contender>> contenders = MakeContenders(o);
  if (!contenders.ok()) return Fail(contenders.status());
  const Result<uint32_t> step = StepTokens(o, *contenders);
  if (!step.ok()) return Fail(step.status());
  if (const Status s = CheckModelFile(o.model); !s.ok()) return Fail(s);
  std::vector<Config*> configs;
  for (Contender& c : *contenders) {
    if (c.config) configs.push_back(&*c.config);
  }
  if (const Status s = UseStatistics(configs, o.model); !s.ok()) return Fail(s);
  if (o.file.empty()) return Fail(InvalidArgument("there is no text: give -f FILE"));
  const Result<std::string> text = ReadTextFile(o.file);
  if (!text.ok()) return Fail(text.status());
  if (const Status s = InitLlama(o.verbose); !s.ok()) return Fail(s);
  const Status status = RunEval(o, *step, *text, *contenders,
                                [&](const Contender& c, size_t chunk,
                                    std::span<const Position> positions, const qevict_stats& s) {
                                  if (o.format != Format::kJson) return;
                                  PrintEvalChunk(o, *step, c, chunk, positions, s);
                                });
  if (!status.ok()) return Fail(status);
  PrintEval(o, *step, *contenders);
  return kOk;
}

void AddInput(CLI::App& app, EvalOptions& o) {
  AddModel(app, o.model)->group(kInput);
  AddText(app, "-f,--file", o.file, "FILE", "text, read as raw tokens")->group(kInput);
  AddInteger(app, "--chunks", o.n_chunks, 1, 1 << 20, "consecutive chunks of the text")
      ->group(kInput);
  AddInteger(app, "--prompt", o.n_prompt, 1, 1 << 24, "tokens read before the first decision")
      ->group(kInput);
  AddInteger(app, "--score", o.n_score, 1, 1 << 20, "tokens compared after them")->group(kInput);
  AddInteger(app, "--by-depth", o.n_depths, 0, 1 << 16,
             "equal parts of the compared tokens that are\nreported apart")
      ->group(kInput);
  CLI::Option* generate =
      AddFlag(app, "--generate", o.generate,
              "compare on what the full cache generates after\nthe prompt instead of on the text")
          ->group(kInput);
  AddInteger(app, "--step", o.n_step, 1, 4096, "tokens per step")
      ->default_str("interval")
      ->group(kInput);
  AddInteger(app, "-b,--batch-size", o.n_batch, 1, 65536, "prompt tokens per step")->group(kInput);
  AddInteger(app, "-t,--threads", o.n_threads, 1, 1024, "CPU threads")->group(kInput);
  AddText(app, "--reference", o.reference, "fa|none-fa", "flash attention of the reference")
      ->default_str("fa")
      ->group(kInput);
  AddFlag(app, "--floor", o.floor, "compare the reference with its own other attention, too")
      ->group(kInput);
  for (CLI::Option* option : o.sampling.Register(app)) option->needs(generate);
  o.caches.Register(app);
  AddFormat(app, o.format, "table, or with json one line per chunk and result")->group("Output");
  AddFlag(app, "-v,--verbose", o.verbose, "show the log of llama.cpp")->group("Output");
}

Command AddKld(CLI::App& eval) {
  auto o = std::make_shared<EvalOptions>();
  o->command = "eval kld";
  o->n_threads = UsableCpus();
  CLI::App* app = eval.add_subcommand("kld", "KL divergence from the full cache, logit by logit");
  SetHelp(
      *app,
      "Feeds chunks of a text to the full cache and to compressed ones, and compares their logits.",
      "qevict eval kld -m FILE -f TEXT [options]",
      "  qevict eval kld -m model.gguf -f wiki.test.raw --budget 40%,20% --policy "
      "qevict,streaming\n"
      "  qevict eval kld -m model.gguf -f book.txt --chunks 4 --prompt 7168 --floor -o json > "
      "kld.jsonl\n"
      "  qevict eval kld -m model.gguf -f wiki.test.raw --pack-all --prompt 1024 \\\n"
      "    --cache codec=wf,bits=2,window=32 --cache codec=kivi,window=32\n\n"
      "The reference is llama.cpp's CPU backend with an f16 cache. --floor adds what that backend\n"
      "differs from itself with and without flash attention: smaller values mean nothing.\n"
      "`dp RMS` is the root mean square change of the text's next token's probability, `ratio`\n"
      "the perplexity over the full cache's; +- is one standard error, of paired differences for\n"
      "the ratio. `packed windows`: their bytes, records and statistics included, of f16.\n");
  AddInput(*app, *o);
  return {app, [o] { return Eval(*o); }};
}

Command AddPpl(CLI::App& eval) {
  auto o = std::make_shared<EvalOptions>();
  o->command = "eval ppl";
  o->divergence = false;
  o->n_threads = UsableCpus();
  CLI::App* app = eval.add_subcommand("ppl", "perplexity of the full cache and of compressed ones");
  SetHelp(
      *app,
      "Feeds chunks of a text to the full cache and to compressed ones: perplexity alone, which\n"
      "needs no memory for the reference's logits.",
      "qevict eval ppl -m FILE -f TEXT [options]",
      "  qevict eval ppl -m model.gguf -f book.txt --prompt 16384 --score 512 --budget 20%\n\n"
      "The tokens behind a chunk's prompt are scored while windows are packed and evicted as in\n"
      "generation. `ratio` is the perplexity over the full cache's; +- is one standard error,\n"
      "of paired differences for the ratio.\n");
  AddInput(*app, *o);
  return {app, [o] { return Eval(*o); }};
}

}  // namespace

std::vector<Command> AddEval(CLI::App& root) {
  CLI::App* eval = root.add_subcommand("eval", "measure what compression does to a model");
  SetHelp(*eval, "Measures what compression does to a model.", "qevict eval TASK [options]",
          "  qevict eval kld -m model.gguf -f wiki.test.raw\n"
          "  qevict eval ppl -m model.gguf -f wiki.test.raw\n");
  eval->require_subcommand(1)->group("Commands");
  return {AddKld(*eval), AddPpl(*eval)};
}

}  // namespace qevict::cli
