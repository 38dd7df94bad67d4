// The qevict command: parses the command line and calls one command.
// Exit codes: 0 success, 1 runtime failure, 2 usage error (one sentence on stderr).
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>

#include "cli/commands.h"
#include "qevict/version.h"

namespace qevict::cli {
namespace {

/// llama.cpp's options that mean nothing here. As single letters they would be taken for others:
/// `-ngl 0` for `-n gl`.
struct ForeignOption {
  std::string_view names;  ///< each between spaces
  std::string_view instead;
};
constexpr ForeignOption kForeign[] = {
    {" -hf -hfr --hf-repo -mu --model-url ",
     "models are read from files: download it, then -m FILE"},
    {" -ctk -ctv --cache-type-k --cache-type-v ",
     "packed windows have the format of --codec and --bits"},
    {" -ngl --gpu-layers --n-gpu-layers ", "every layer's cache is held: leave it out"},
    {" -fa --flash-attn ", "flash attention is always on: leave it out"},
    {" -dev --device ", "the device is QEVICT: leave it out"},
    {" -nkvo --no-kv-offload ", "it would leave the KV cache uncompressed: leave it out"},
};

Status CheckForeignOptions(const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    const std::string name = " " + word.substr(0, word.find('=')) + " ";
    for (const ForeignOption& option : kForeign) {
      if (option.names.find(name) == std::string_view::npos) continue;
      return InvalidArgument("llama.cpp's option" + name + "is none of qevict's; " +
                             std::string(option.instead));
    }
  }
  return {};
}

/// The command that was being parsed, for "see `qevict run --help`".
std::string NameOf(const CLI::App& root) {
  std::string name = "qevict";
  const CLI::App* app = &root;
  while (!app->get_subcommands().empty()) {
    app = app->get_subcommands().front();
    name += " " + app->get_name();
  }
  return name;
}

std::string SentenceOf(const CLI::ParseError& error, const CLI::App& root,
                       const std::vector<std::string>& words) {
  const std::string command = NameOf(root);
  const std::string see = "; see `" + command + " --help`";
  const std::string text = error.what();
  if (dynamic_cast<const CLI::ExtrasError*>(&error)) {
    const std::vector<std::string> extras = root.remaining(true);
    const std::string first = extras.empty() ? "?" : extras.front();
    return (first.starts_with("-") ? "unknown option " : "unexpected argument ") + first + see;
  }
  if (dynamic_cast<const CLI::RequiredError*>(&error)) {
    if (text == "A subcommand is required") {
      // Behind the commands that were understood: what was to be the next one, if anything.
      const size_t depth = static_cast<size_t>(std::count(command.begin(), command.end(), ' '));
      const bool named = words.size() > depth && !words[depth].starts_with("-");
      return (named ? "unknown command " + words[depth] : "a command is missing") + see;
    }
    return "option " + text.substr(0, text.find(' ')) + " is missing" + see;
  }
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error)) {
    return "option " + text.substr(0, text.find(':')) + " needs one value" + see;
  }
  return text;
}

int Main(int argc, char** argv) {
  Arguments arguments = SplitArguments(argc, argv);
  if (const Status status = CheckForeignOptions(arguments.words); !status.ok()) return Fail(status);
  if (!arguments.words.empty() && arguments.words.front() == "help") {  // `help run`: `run --help`
    arguments.words.erase(arguments.words.begin());
    arguments.words.emplace_back("--help");
  }
  CLI::App root;
  SetHelp(root, "qevict: a KV cache under a byte budget, for llama.cpp.",
          "qevict COMMAND [options]   (qevict COMMAND --help explains one)",
          "  qevict run -m model.gguf -p \"Why is the sky blue?\" --budget 20%\n"
          "  qevict serve -m model.gguf -c 32768 --budget 1GiB -- --port 8080\n\n"
          "Exit codes: 0 success, 1 a failure, 2 wrong use; one sentence on stderr says why.\n");
  root.set_version_flag("-V,--version", "qevict " QEVICT_VERSION_STRING)
      ->description("print the version")
      ->group("General");
  root.require_subcommand(1);
  const std::vector<Command> commands = AddCommands(root, arguments);
  for (const Command& command : commands) command.app->group("Commands");
  try {
    std::vector<std::string> words(arguments.words.rbegin(), arguments.words.rend());
    root.parse(std::move(words));
  } catch (const CLI::CallForHelp&) {
    const CLI::App* app = &root;
    while (!app->get_subcommands().empty()) app = app->get_subcommands().front();
    std::fputs(app->help().c_str(), stdout);
    return kOk;
  } catch (const CLI::CallForVersion& version) {
    std::printf("%s\n", version.what());
    return kOk;
  } catch (const CLI::ParseError& error) {
    return Fail(InvalidArgument(SentenceOf(error, root, arguments.words)));
  }
  for (const Command& command : commands) {
    if (!command.app->parsed()) continue;
    if (arguments.has_separator && !command.takes_passthrough) {
      return Fail(InvalidArgument("only `qevict serve` takes options behind `--`"));
    }
    return command.run();
  }
  return Fail(Internal("no command ran"));
}

/// The output may be a full disk: what could not be written is a failure.
int CheckOutput(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  const int failed = Fail(Internal("the output cannot be written"));
  return code == kOk ? failed : code;
}

}  // namespace
}  // namespace qevict::cli

int main(int argc, char** argv) {
  try {
    return qevict::cli::CheckOutput(qevict::cli::Main(argc, argv));
  } catch (const std::exception& error) {
    return qevict::cli::Fail(qevict::Internal(error.what()));
  }
}
