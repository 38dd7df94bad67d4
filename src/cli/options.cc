#include "cli/options.h"

#include <sched.h>

#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>

namespace qevict::cli {
namespace {

/// llama.cpp's names of several letters behind one dash, and what they are here.
constexpr std::pair<std::string_view, std::string_view> kSingleDash[] = {
    {"-ub", "--ubatch-size"},       {"-np", "--parallel"}, {"-kvu", "--kv-unified"},
    {"-no-cnv", "--no-chat"},       {"-cnv", "--chat"},    {"-sys", "--system"},
    {"-no-kvu", "--no-kv-unified"},
};

/// Defaults go behind the description: "-t, --threads N   CPU threads (default 2)".
class HelpFormatter : public CLI::Formatter {
 public:
  explicit HelpFormatter(std::string usage) : usage_(std::move(usage)) { column_width(34); }
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override {
    std::string help = Formatter::make_help(app, std::move(name), mode);
    for (size_t at; (at = help.find("\n\n\n")) != std::string::npos;) help.erase(at, 1);
    return help;
  }
  std::string make_description(const CLI::App* app) const override {
    return app->get_description() + "\n\n";
  }
  std::string make_usage(const CLI::App*, std::string) const override {
    return usage_.empty() ? "" : "Usage: " + usage_ + "\n";
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    return option->get_type_name().empty() ? "" : " " + option->get_type_name();
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    const std::string& fallback = option->get_default_str();
    return option->get_description() + (fallback.empty() ? "" : " (default " + fallback + ")");
  }

 private:
  std::string usage_;
};

[[noreturn]] void Refuse(const std::string& names, const std::string& value,
                         const std::string& legal) {
  const std::string name = names.substr(0, names.find(','));
  throw CLI::ValidationError(name + " " + value + " is not legal: expected " + legal);
}

std::string RealText(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", x);
  return text;
}

}  // namespace

Arguments SplitArguments(int argc, const char* const* argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    if (arguments.has_separator) {
      arguments.passthrough.push_back(std::move(word));
      continue;
    }
    if (word == "--") {
      arguments.has_separator = true;
      continue;
    }
    for (const auto& [single, full] : kSingleDash) {
      if (word == single) word = full;
    }
    arguments.words.push_back(std::move(word));
  }
  return arguments;
}

int Fail(const Status& status) {
  std::string sentence = status.message();
  for (char& c : sentence) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  std::fprintf(stderr, "qevict: %s\n", sentence.c_str());
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kNotFound:
    case StatusCode::kOutOfRange:
    case StatusCode::kUnimplemented:  // a model that qevict does not support
      return kUsageError;
    default:
      return kRuntimeFailure;
  }
}

void SetHelp(CLI::App& app, const std::string& what, const std::string& usage,
             const std::string& examples) {
  app.description(what);
  app.formatter(std::make_shared<HelpFormatter>(usage));
  app.set_help_flag("-h,--help", "print this help")->group("General");
  if (!examples.empty()) app.footer("Examples:\n" + examples);
}

bool ParseInteger(std::string_view text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

CLI::Option* AddInteger(CLI::App& app, const std::string& names, int64_t& target, int64_t low,
                        int64_t high, const std::string& help) {
  const std::string legal = std::to_string(low) + " to " + std::to_string(high);
  return app
      .add_option_function<std::string>(
          names,
          [&target, names, low, high, legal](const std::string& text) {
            int64_t value = 0;
            if (!ParseInteger(text, value) || value < low || value > high) {
              Refuse(names, text, "an integer from " + legal);
            }
            target = value;
          },
          help)
      ->type_name("N")
      ->default_str(std::to_string(target));
}

CLI::Option* AddReal(CLI::App& app, const std::string& names, double& target, double low,
                     double high, const std::string& help) {
  return app
      .add_option_function<std::string>(
          names,
          [&target, names, low, high](const std::string& text) {
            double value = 0.0;
            const char* end = text.data() + text.size();
            const auto [at, error] = std::from_chars(text.data(), end, value);
            if (error != std::errc() || at != end || !(value >= low && value <= high)) {
              Refuse(names, text, "a number from " + RealText(low) + " to " + RealText(high));
            }
            target = value;
          },
          help)
      ->type_name("X")
      ->default_str(RealText(target));
}

CLI::Option* AddFlag(CLI::App& app, const std::string& names, bool& target,
                     const std::string& help) {
  return app.add_flag(names, target, help);
}

CLI::Option* AddText(CLI::App& app, const std::string& names, std::string& target,
                     const std::string& type, const std::string& help) {
  return app.add_option(names, target, help)->type_name(type);
}

CLI::Option* AddFormat(CLI::App& app, Format& target, const std::string& help, bool json_lines) {
  return app
      .add_option_function<std::string>(
          "-o,--output",
          [&target, json_lines](const std::string& text) {
            if (text == "md") {
              target = Format::kMarkdown;
            } else if (text == "csv") {
              target = Format::kCsv;
            } else if (text == "json") {
              target = Format::kJson;
            } else if (json_lines && text == "jsonl") {
              target = Format::kJsonLines;
            } else {
              Refuse("-o", text, json_lines ? "md, csv, json or jsonl" : "md, csv or json");
            }
          },
          help)
      ->type_name(json_lines ? "md|csv|json|jsonl" : "md|csv|json")
      ->default_str("md");
}

CLI::Option* AddModel(CLI::App& app, std::string& target) {
  return AddText(app, "-m,--model", target, "FILE", "GGUF model file");
}

// --- Configuration of a cache
// ----------------------------------------------------------------------

void ConfigOptions::AddKey(CLI::App& app, const std::string& names, const std::string& key,
                           const std::string& type, const std::string& fallback,
                           const std::string& help) {
  app.add_option_function<std::string>(
         names, [this, key](const std::string& value) { values_.emplace_back(key, value); }, help)
      ->type_name(type)
      ->default_str(fallback)
      ->group("Cache");
}

void ConfigOptions::Register(CLI::App& app, bool budget_and_preset) {
  if (budget_and_preset) {
    AddKey(app, "--budget", "budget", "SIZE", "20%",
           "share of the f16 cache (20%, 0.2) or bytes (512MiB)");
    AddKey(app, "--preset,--policy", "preset", "NAME", "qevict", "qevict, streaming, pack or full");
  }
  AddKey(app, "--window", "window", "N", "8", "tokens that move together: 1, 2, 4, 8, 16 or 32");
  AddKey(app, "--interval", "interval", "N", "window", "generated tokens between two decisions");
  AddKey(app, "--q", "q", "X", "0.7", "share of the history's bytes that is packed, 0 to 1");
  AddKey(app, "--codec", "codec", "NAME", "kivi",
         "format of packed windows (qevict info lists them)");
  AddKey(app, "--bits", "bits", "N", "2",
         "bits of packed codes; kivi, token: 1, 2, 3, 4, 8;\nwf: 1 to 4 by 0.25");
  AddKey(app, "--sinks", "sinks", "N", "5", "first tokens, always full precision");
  AddKey(app, "--recents", "recents", "N", "32", "last tokens, always full precision; or 25%");
  AddKey(app, "--promotion", "promotion", "HOW", "codes", "codes, pinned or none");
  AddKey(app, "--prefill", "prefill", "HOW", "auto",
         "full (compress once), bounded (per chunk) or auto");
  app.add_option("--set", sets_, "any configuration key; may be given more than once")
      ->type_name("KEY=VALUE")
      ->expected(1)
      ->take_all()
      ->group("Cache");
  app.add_option("--config", base_,
                 "key=value text, or a file with one per line; other options win")
      ->type_name("FILE|TEXT")
      ->group("Cache");
}

Result<Config> ConfigOptions::Build(const Config& defaults) const {
  Config config = defaults;
  if (!base_.empty()) {
    Result<Config> base = LoadConfig(base_, defaults);
    if (!base.ok()) return base;
    config = *base;
  }
  std::string text;
  for (const auto& [key, value] : values_) {
    if (value.empty() || value.find_first_of(",#\n") != std::string::npos) {
      return InvalidArgument("--" + key + " `" + value +
                             "` is not legal: expected one value without commas");
    }
    text.append(key).append("=").append(value).append("\n");
  }
  for (const std::string& item : sets_) {
    if (item.find('=') == std::string::npos) {
      return InvalidArgument("--set " + item + " has no value: expected key=value");
    }
    text.append(item).append("\n");
  }
  Result<Config> built = ParseConfig(text, config);
  if (!built.ok() || built->preset != Preset::kFull) return built;
  for (const auto& [key, value] : values_) {
    if (key == "preset") continue;
    return InvalidArgument("--" + key + " " + value +
                           " means nothing with preset full, which keeps everything as it is");
  }
  return built;
}

// --- Files and machine
// -----------------------------------------------------------------------------

Status CheckModelFile(const std::string& path) {
  if (path.empty()) return InvalidArgument("there is no model: give -m FILE");
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return NotFound("model file " + path +
                    " cannot be read: " + std::generic_category().message(errno));
  char magic[4] = {};
  if (!file.read(magic, sizeof(magic)) || std::memcmp(magic, "GGUF", 4) != 0) {
    return InvalidArgument("model file " + path +
                           " is not GGUF: its first four bytes are not `GGUF`");
  }
  return {};
}

Result<std::string> ReadTextFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return NotFound("file " + path + " cannot be read: " + std::generic_category().message(errno));
  std::ostringstream contents;
  contents << file.rdbuf();
  if (file.bad() || contents.fail()) {
    return NotFound("file " + path + " cannot be read or is empty");
  }
  return contents.str();
}

unsigned UsableCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  const int n = CPU_COUNT(&set);
  return n > 0 ? static_cast<unsigned>(n) : 1;
}

}  // namespace qevict::cli
