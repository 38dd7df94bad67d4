// qevict calibrate codec: the statistics of codec=wf from a text, so that they need not come from
// each prompt, and what packing costs in each layer, so that layers get bits by need.
#include <cstdio>
#include <filesystem>

#include "cli/commands.h"
#include "cli/eval/eval.h"
#include "cli/report.h"
#include "cli/run.h"
#include "cli/statistics_file.h"
#include "codecs/allocate.h"

namespace qevict::cli {
namespace {

struct CalibrateOptions {
  std::string model, file, output;
  int64_t n_tokens = 4096, n_batch = 512, n_threads = 0;
  int64_t n_loss_chunks = 1;
  bool verbose = false;
  Format format = Format::kMarkdown;
};

/// Tokens of a chunk that costs are measured on.
constexpr size_t kLossPrompt = 1024, kLossScore = 512;

/// Where the file grows; it gets its name when it is complete.
std::string PartOf(const CalibrateOptions& o) { return o.output + ".part"; }

/// Whether the name can stand in a configuration, and nothing that is read is written over.
Status CheckOutput(const CalibrateOptions& o) {
  if (const Result<Config> config = ParseConfig("codec=wf,window=8,statistics=" + o.output);
      !config.ok() || config->statistics != o.output) {
    return InvalidArgument(
        "--write " + o.output +
        " is not legal: expected a path without commas, # and line breaks, which "
        "a configuration can name");
  }
  for (const std::string& output : {o.output, PartOf(o)}) {
    std::error_code error;
    for (const std::string& input : {o.model, o.file}) {
      if (!std::filesystem::equivalent(output, input, error)) continue;
      return InvalidArgument("--write " + o.output + " writes " + output +
                             ", which is read by this command, too: name another file");
    }
    if (std::filesystem::exists(output, error) &&
        !std::filesystem::is_regular_file(output, error)) {
      return InvalidArgument("--write " + o.output + ": " + output + " is no regular file");
    }
  }
  return {};
}

/// Everything stays full precision while a prompt is read; with wf queries are noted, too.
Config FullPrecision() {
  Config config;
  config.preset = Preset::kPack;
  config.codec = CodecId::kWaterFill;
  config.prefill = Prefill::kFull;
  config.budget_fraction = 1.0;
  return config;
}

Status Collect(const CalibrateOptions& o, const std::string& text, uint64_t hash) {
  const Result<Model> model = Model::Load(o.model, Device::kQEvict);
  if (!model.ok()) return model.status();
  Result<std::vector<llama_token>> tokens = model->Tokenize(text, true, false);
  if (!tokens.ok()) return tokens.status();
  const auto n_tokens = static_cast<size_t>(o.n_tokens);
  const auto refuse = [&](const std::string& what, size_t needed) {
    return InvalidArgument("file " + o.file + " has " + std::to_string(tokens->size()) +
                           " tokens, but " + what + " asks for " + std::to_string(needed));
  };
  if (tokens->size() < n_tokens) return refuse("--tokens", n_tokens);
  const auto n_loss = static_cast<size_t>(o.n_loss_chunks) * (kLossPrompt + kLossScore) + 1;
  if (o.n_loss_chunks > 0 && tokens->size() < n_loss)
    return refuse("--loss-chunks " + std::to_string(o.n_loss_chunks), n_loss);
  tokens->resize(n_tokens);
  ContextOptions options;
  options.n_ctx = ContextCells(n_tokens);
  options.n_batch = options.n_ubatch = static_cast<uint32_t>(o.n_batch);
  options.n_threads = static_cast<int>(o.n_threads);
  Result<Context> context = Context::Create(*model, options, FullPrecision());
  if (!context.ok()) return context.status();
  QEVICT_RETURN_IF_ERROR(
      ReadPrompt(*context, *tokens, options.n_batch, "reading the calibration text"));
  return context->SaveStatistics(PartOf(o), hash, static_cast<uint32_t>(o.n_tokens));
}

/// Mean KL of each layer's keys and values at 1 and 2 bits, all else at 4, over that of all at 4.
class LossMeasurement {
 public:
  LossMeasurement(const CalibrateOptions& o, codecs::CodecStatistics& statistics)
      : statistics_(statistics) {
    eval_.command = "calibrate codec";
    eval_.model = o.model;
    eval_.file = o.file;
    eval_.n_chunks = o.n_loss_chunks;
    eval_.n_prompt = kLossPrompt;
    eval_.n_score = kLossScore;
    eval_.n_batch = std::max<int64_t>(o.n_batch, kWindow);
    eval_.n_threads = o.n_threads;
    base_.preset = Preset::kPack;
    base_.budget_fraction = 1.0;
    base_.sinks = 8;
    base_.window = kWindow;
    base_.codec = CodecId::kWaterFill;
    base_.statistics = PartOf(o);
  }

  Status Run(const std::string& text) {
    Add("all layers at 4 bits", "");
    for (const codecs::LayerStatistics& layer : statistics_.layers) {
      const std::string name = std::to_string(layer.model_layer);
      for (const char* bits : {"1", "2"}) {
        Add("keys of layer " + name + " at " + bits, ";" + name + ":" + bits + "/4");
        Add("values of layer " + name + " at " + bits, ";" + name + ":4/" + bits);
      }
    }
    QEVICT_RETURN_IF_ERROR(RunEval(eval_, kWindow, text, contenders_, nullptr));
    const double base = MeanKl(0);
    for (size_t i = 0; i < statistics_.layers.size(); ++i) {
      codecs::LayerStatistics& layer = statistics_.layers[i];
      layer.has_loss = true;
      layer.k_loss = {MeanKl(4 * i + 1) - base, MeanKl(4 * i + 3) - base};
      layer.v_loss = {MeanKl(4 * i + 2) - base, MeanKl(4 * i + 4) - base};
    }
    return {};
  }

 private:
  static constexpr uint32_t kWindow = 32;

  void Add(const std::string& name, const std::string& layer_bits) {
    Config config = base_;
    config.layer_bits = "*:4/4" + layer_bits;
    contenders_.push_back({name, "", config, {}, {}});
  }
  double MeanKl(size_t contender) const {
    return Summarize(contenders_[contender].positions).kl_mean;
  }

  codecs::CodecStatistics& statistics_;
  EvalOptions eval_;
  Config base_;
  std::vector<Contender> contenders_;
};

/// The whole file under its name, as a reader of it sees it.
Result<codecs::CodecStatistics> Write(const CalibrateOptions& o, const std::string& text,
                                      uint64_t hash) {
  QEVICT_RETURN_IF_ERROR(Collect(o, text, hash));
  Result<codecs::CodecStatistics> written = codecs::ReadStatistics(PartOf(o));
  if (written.ok() && o.n_loss_chunks > 0) {
    QEVICT_RETURN_IF_ERROR(LossMeasurement(o, *written).Run(text));
    QEVICT_RETURN_IF_ERROR(codecs::SaveStatistics(PartOf(o), *written));
    written = codecs::ReadStatistics(PartOf(o));
  }
  if (written.ok() && std::rename(PartOf(o).c_str(), o.output.c_str()) != 0)
    return FailedPrecondition("statistics file " + o.output + " cannot be written");
  return written;
}

void PrintSummary(const CalibrateOptions& o, const codecs::CodecStatistics& statistics) {
  float bias = 0.0f;
  uint64_t n_heads = 0;
  for (const codecs::LayerStatistics& layer : statistics.layers) {
    n_heads += layer.heads.size();
    for (const codecs::WaterFillStats& head : layer.heads)
      bias = std::max(bias, codecs::KeyBias(head));
  }
  std::error_code error;
  const uint64_t bytes = std::filesystem::file_size(o.output, error);
  const Metrics metrics = {
      {"output", "statistics file", TextCell(o.output)},
      {"output_bytes", "size", BytesCell(error ? 0 : bytes)},
      {"tokens", "tokens read", CountCell(static_cast<uint64_t>(o.n_tokens))},
      {"layers", "layers", CountCell(statistics.layers.size())},
      {"kv_heads", "kv heads of all layers", CountCell(n_heads)},
      {"key_bias", "largest key bias, standard deviations", FixedCell(double{bias}, 1)},
      {"layer_bits_at_2", "bits of keys/values by layer, 2 on average",
       TextCell(codecs::AllocateBits(statistics, 2.0))}};
  if (o.format == Format::kJson) {
    PrintText(JsonText(ToJson(metrics)) + "\n");
    return;
  }
  const Table table = ToTable({{"value", metrics}});
  PrintText(o.format == Format::kCsv ? table.ToCsv() : table.ToMarkdown());
}

int Calibrate(CalibrateOptions o) {
  if (const Status s = CheckModelFile(o.model); !s.ok()) return Fail(s);
  if (o.file.empty()) return Fail(InvalidArgument("there is no text: give -f FILE"));
  const Result<std::string> text = ReadTextFile(o.file);
  if (!text.ok()) return Fail(text.status());
  if (o.output.empty()) o.output = o.model + ".statistics";
  if (const Status s = CheckOutput(o); !s.ok()) return Fail(s);
  const Result<uint64_t> hash = HashFile(o.model);
  if (!hash.ok()) return Fail(hash.status());
  if (const Status s = InitLlama(o.verbose); !s.ok()) return Fail(s);
  const Result<codecs::CodecStatistics> written = Write(o, *text, *hash);
  if (!written.ok()) {
    std::remove(PartOf(o).c_str());
    return Fail(written.status());
  }
  PrintSummary(o, *written);
  return kOk;
}

Command AddCodec(CLI::App& calibrate) {
  constexpr const char* kInput = "Input";
  auto o = std::make_shared<CalibrateOptions>();
  o->n_threads = UsableCpus();
  CLI::App* app = calibrate.add_subcommand("codec", "statistics of codec=wf from a text");
  SetHelp(
      *app,
      "Reads a text with the full cache and writes what codec=wf is made of: per kv head the\n"
      "mean of the keys and the energy of keys, values and queries per channel; and what it\n"
      "costs to pack the keys or the values of each layer, by which layers get their bits.",
      "qevict calibrate codec -m FILE -f TEXT [options]",
      "  qevict calibrate codec -m model.gguf -f book.txt\n"
      "  qevict run -m model.gguf -f prompt.txt --budget 20% \\\n"
      "    --set codec=wf,statistics=model.gguf.statistics\n\n"
      "Without such a file wf takes its statistics from each prompt, when it packs the first\n"
      "window. The file names the model by a hash of its file; qevict refuses it for another.\n");
  AddModel(*app, o->model)->group(kInput);
  AddText(*app, "-f,--file", o->file, "FILE", "text, read as raw tokens")->group(kInput);
  AddInteger(*app, "--tokens", o->n_tokens, 64, 1 << 20, "tokens of the text that are read")
      ->group(kInput);
  AddInteger(
      *app, "--loss-chunks", o->n_loss_chunks, 0, 64,
      "chunks of 1,536 tokens that layers' costs are measured on;\n0: all layers get the same "
      "bits")
      ->group(kInput);
  AddInteger(*app, "-b,--batch-size", o->n_batch, 1, 65536, "tokens per step")->group(kInput);
  AddInteger(*app, "-t,--threads", o->n_threads, 1, 1024, "CPU threads")->group(kInput);
  AddText(*app, "--write", o->output, "FILE", "file that is written")
      ->default_str("MODEL.statistics")
      ->group("Output");
  AddFormat(*app, o->format, "form of the summary")->group("Output");
  AddFlag(*app, "-v,--verbose", o->verbose, "show the log of llama.cpp")->group("Output");
  return {app, [o] { return Calibrate(*o); }};
}

}  // namespace

std::vector<Command> AddCalibrate(CLI::App& root) {
  CLI::App* calibrate = root.add_subcommand("calibrate", "take statistics from a text");
  SetHelp(*calibrate, "Takes statistics of a model from a text.", "qevict calibrate TASK [options]",
          "  qevict calibrate codec -m model.gguf -f book.txt\n");
  calibrate->require_subcommand(1)->group("Commands");
  return {AddCodec(*calibrate)};
}

}  // namespace qevict::cli
