#include "ggml/log.h"

#include <chrono>
#include <exception>
#include <string>
#include <thread>

#include "ggml-impl.h"

namespace qevict::plugin {
namespace {
thread_local std::string last_error;
constexpr std::chrono::milliseconds kHostLogDelay{50};
}  // namespace

void LogInfo(const std::string& message) { GGML_LOG_INFO("qevict: %s\n", message.c_str()); }
void LogWarn(const std::string& message) { GGML_LOG_WARN("qevict: %s\n", message.c_str()); }
void LogError(const std::string& message) noexcept {
  try {
    SetLastError(message);
    GGML_LOG_ERROR("qevict: %s\n", message.c_str());
  } catch (const std::exception&) {  // no memory for words
  }
}
void LogRefusal(const std::string& message) noexcept {
  LogError(message);
  std::this_thread::sleep_for(kHostLogDelay);
}
void SetLastError(const std::string& message) { last_error = message; }
const char* LastError() { return last_error.c_str(); }

}  // namespace qevict::plugin
