// Runs the command as people do, for the tests of what it does.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "cli/text.h"

namespace qevict::cli {

inline std::string FromEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}
inline std::string Tiny(const std::string& name) {
  return FromEnvironment("QEVICT_TINY_DIR") + "/" + name + ".gguf";
}
inline std::string Book() {
  return FromEnvironment("QEVICT_SOURCE_DIR") + "/tests/data/dorian_gray.txt";
}

struct Outcome {
  int code = -1;
  std::string out, err;
  size_t n_error_lines() const {
    return static_cast<size_t>(std::count(err.begin(), err.end(), '\n'));
  }
};

inline std::string Contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Runs `BEFORE qevict ARGUMENTS` (shell syntax), with an empty stdin unless BEFORE pipes one in.
inline Outcome Qevict(const std::string& arguments, const std::string& before = "") {
  const std::string base = testing::TempDir() + "/qevict_command_test_" + std::to_string(getpid());
  const std::string line = before + " '" + FromEnvironment("QEVICT_COMMAND") + "' " + arguments +
                           " >" + base + ".out 2>" + base + ".err" +
                           (before.ends_with("|") ? "" : " </dev/null");
  const int status = std::system(line.c_str());
  Outcome outcome{WIFEXITED(status) ? WEXITSTATUS(status) : -1, Contents(base + ".out"),
                  Contents(base + ".err")};
  std::remove((base + ".out").c_str());
  std::remove((base + ".err").c_str());
  return outcome;
}

inline Json LastLine(const std::string& out) {
  const size_t line = out.rfind('\n', out.size() - 2);
  return Json::parse(line == std::string::npos ? out : out.substr(line + 1), nullptr, false);
}

inline std::vector<Json> Lines(const std::string& text) {
  std::vector<Json> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(Json::parse(line));
  return lines;
}

/// Fields of every line of CSV whose fields have no line breaks.
inline std::vector<size_t> CsvWidths(const std::string& text) {
  std::vector<size_t> widths;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    size_t n = 1;
    bool quoted = false;
    for (const char c : line) {
      if (c == '"') quoted = !quoted;
      n += c == ',' && !quoted ? 1 : 0;
    }
    widths.push_back(n);
  }
  return widths;
}

}  // namespace qevict::cli
