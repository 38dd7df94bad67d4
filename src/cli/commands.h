// All commands.
#pragma once

#include <vector>

#include "cli/options.h"

namespace qevict::cli {

Command AddRun(CLI::App& root);
Command AddPlan(CLI::App& root);
Command AddServe(CLI::App& root, const Arguments& arguments);
Command AddInfo(CLI::App& root);
Command AddPolicies(CLI::App& root);
/// `qevict eval` with its own subcommands.
std::vector<Command> AddEval(CLI::App& root);
/// `qevict calibrate` with its own subcommands.
std::vector<Command> AddCalibrate(CLI::App& root);
/// `qevict bench` with its own subcommands.
std::vector<Command> AddBench(CLI::App& root);

inline std::vector<Command> AddCommands(CLI::App& root, const Arguments& arguments) {
  std::vector<Command> commands = {AddRun(root), AddServe(root, arguments), AddPlan(root),
                                   AddPolicies(root), AddInfo(root)};
  for (Command& command : AddEval(root)) commands.push_back(std::move(command));
  for (Command& command : AddCalibrate(root)) commands.push_back(std::move(command));
  for (Command& command : AddBench(root)) commands.push_back(std::move(command));
  return commands;
}

}  // namespace qevict::cli
