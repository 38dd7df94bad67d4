// Progress on stderr for work that takes longer than two seconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace qevict::cli {

double Milliseconds(std::chrono::steady_clock::duration d);

/// Stopwatch, started at construction.
class Timer {
 public:
  double ms() const { return Milliseconds(std::chrono::steady_clock::now() - start_); }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// "reading the prompt: 2,048 of 8,192 tokens (25%), 310 tokens/s, 20 s left". On a terminal one
/// line that is rewritten; else a line every ten seconds. Says nothing during the first two
/// seconds.
class Progress {
 public:
  Progress(std::string what, uint64_t total, std::string unit = "tokens");
  ~Progress() { Finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  /// `done` units of the total are done.
  void Update(uint64_t done);
  /// Replaces what is being done.
  void SetWhat(std::string what) { what_ = std::move(what); }
  /// Removes the line.
  void Finish();

 private:
  std::string what_, unit_;
  uint64_t total_;
  Timer timer_;
  bool terminal_;
  double last_ms_ = 0.0;
  size_t width_ = 0;  // of the line on the terminal
};

}  // namespace qevict::cli
