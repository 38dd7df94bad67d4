// Logging of the plug-in: through ggml's sink, so that it lands where the host program's own log
// does.
#pragma once

#include <string>

namespace qevict::plugin {

void LogInfo(const std::string& message);
void LogWarn(const std::string& message);
void LogError(const std::string& message) noexcept;
/// LogError for what the host program answers by ending. Waits a moment, because a host that writes
/// its log in another thread (llama.cpp's programs do) may end before that thread got to it.
void LogRefusal(const std::string& message) noexcept;
/// Keeps `message` as the calling thread's qevict_last_error().
void SetLastError(const std::string& message);
const char* LastError();

}  // namespace qevict::plugin
