// Where the plug-in and llama-server are.
#pragma once

#include <string>

#include "qevict/status.h"

namespace qevict::cli {

/// Folder of the running program.
std::string ProgramFolder();
/// libggml-qevict.so: QEVICT_PLUGIN of the environment, beside the program, in its lib folder, or
/// where it was built. Errors: kNotFound naming the places.
Result<std::string> FindPlugin();
/// llama-server: `wanted` if not empty, beside the program, or of the llama.cpp that qevict was
/// built for.
Result<std::string> FindServer(const std::string& wanted);

}  // namespace qevict::cli
