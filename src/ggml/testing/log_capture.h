// LogCapture: what the plug-in says through ggml's log while this object lives.
#pragma once

#include <string>
#include <vector>

#include "ggml-backend.h"

namespace qevict::plugin::testing {

class LogCapture {
 public:
  LogCapture() { ggml_log_set(Append, this); }
  ~LogCapture() { ggml_log_set(nullptr, nullptr); }
  LogCapture(const LogCapture&) = delete;
  LogCapture& operator=(const LogCapture&) = delete;

  /// Sentences of the plug-in at error and at warning level, without their prefix.
  const std::vector<std::string>& errors() const { return errors_; }
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  static void Append(ggml_log_level level, const char* text, void* self) {
    std::string line = text;
    const std::string prefix = "qevict: ";
    if (line.rfind(prefix, 0) != 0) return;
    line = line.substr(prefix.size());
    while (!line.empty() && line.back() == '\n') line.pop_back();
    auto* capture = static_cast<LogCapture*>(self);
    if (level == GGML_LOG_LEVEL_ERROR) capture->errors_.push_back(line);
    if (level == GGML_LOG_LEVEL_WARN) capture->warnings_.push_back(line);
  }

  std::vector<std::string> errors_, warnings_;
};

}  // namespace qevict::plugin::testing
