// What llama.cpp and the plug-in say: silent by default, remembered for error messages.
#pragma once

#include <string>

namespace qevict::cli {

/// Takes over the log of llama.cpp and ggml. `verbose` passes every line on to stderr; otherwise
/// only warnings of the plug-in are printed. Call before any other function of llama.cpp.
void CaptureLog(bool verbose);
/// Forgets the errors so far; call before an operation whose failure is going to be explained.
void ForgetErrors();
/// Why the last operation failed, as one sentence without the program's name: the plug-in's own
/// sentence if there is one, else the most telling line of llama.cpp, else `fallback`.
std::string WhyFailed(const std::string& fallback);

}  // namespace qevict::cli
