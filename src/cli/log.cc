#include "cli/log.h"

#include <cstdio>
#include <mutex>
#include <string_view>
#include <vector>

#include "llama.h"

namespace qevict::cli {
namespace {

constexpr std::string_view kPluginPrefix = "qevict: ";
constexpr std::string_view kTelling = "error loading model: ";
constexpr size_t kMaxLines = 64;

// llama.cpp logs from any thread; its callback has no owner that could hold this state.
struct Capture {
  std::mutex mutex;
  bool verbose = false;
  ggml_log_level level = GGML_LOG_LEVEL_NONE;  // of the line in progress
  std::string line;
  std::vector<std::string> errors;
};

Capture& TheCapture() {
  static auto* capture = new Capture;  // never destroyed: logs arrive during exit
  return *capture;
}

void EndLine(Capture& c) {
  const bool ours = c.line.starts_with(kPluginPrefix);
  if (c.level == GGML_LOG_LEVEL_ERROR && c.errors.size() < kMaxLines) c.errors.push_back(c.line);
  if (c.level == GGML_LOG_LEVEL_WARN && ours && !c.verbose) {
    std::fprintf(stderr, "qevict: warning: %s\n", c.line.c_str() + kPluginPrefix.size());
  }
  c.line.clear();
}

void OnLog(ggml_log_level level, const char* text, void*) {
  Capture& c = TheCapture();
  const std::lock_guard lock(c.mutex);
  if (c.verbose) std::fputs(text, stderr);
  if (level != GGML_LOG_LEVEL_CONT) c.level = level;
  for (const char* p = text; *p != '\0'; ++p) {
    if (*p == '\n') {
      EndLine(c);
    } else {
      c.line += *p;
    }
  }
}

/// "function: text" -> "text".
std::string WithoutFunction(const std::string& line) {
  const size_t at = line.find(": ");
  const bool is_function = at != std::string::npos && line.find(' ') > at;
  return is_function ? line.substr(at + 2) : line;
}

}  // namespace

void CaptureLog(bool verbose) {
  TheCapture().verbose = verbose;
  llama_log_set(OnLog, nullptr);
}

void ForgetErrors() {
  Capture& c = TheCapture();
  const std::lock_guard lock(c.mutex);
  c.errors.clear();
}

std::string WhyFailed(const std::string& fallback) {
  Capture& c = TheCapture();
  const std::lock_guard lock(c.mutex);
  for (size_t i = c.errors.size(); i-- > 0;) {
    if (c.errors[i].starts_with(kPluginPrefix)) return c.errors[i].substr(kPluginPrefix.size());
  }
  if (c.errors.empty()) return fallback;
  for (const std::string& line : c.errors) {
    const size_t at = line.find(kTelling);
    if (at == std::string::npos || c.errors.front().starts_with("gguf_")) continue;
    return fallback + ": " + WithoutFunction(line.substr(at + kTelling.size()));
  }
  return fallback + ": " + WithoutFunction(c.errors.front());
}

}  // namespace qevict::cli
