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
  CLI::App root;
  SetHelp(root, "qevict: a KV cache under a byte budget, for llama.cpp.",
          "qevict COMMAND [options]   (qevict COMMAND --help explains one)",
          "  qevict run -m model.gguf -p \"Why is the sky blue?\" --budget 20%\n"
          "  qevict serve -m model.gguf -c 32768 --budget 1GiB -- --port 8080\n");
  root.set_version_flag("--version", "qevict " QEVICT_VERSION_STRING)
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

}  // namespace
}  // namespace qevict::cli

int main(int argc, char** argv) {
  try {
    return qevict::cli::Main(argc, argv);
  } catch (const std::exception& error) {
    return qevict::cli::Fail(qevict::Internal(error.what()));
  }
}
