// Adds the time of a scope to a counter of nanoseconds.
#pragma once

#include <chrono>
#include <cstdint>

namespace qevict::plugin {

class ScopedTimer {
 public:
  explicit ScopedTimer(uint64_t& total_ns)
      : total_ns_(total_ns), start_(std::chrono::steady_clock::now()) {}
  ~ScopedTimer() {
    total_ns_ += static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                           std::chrono::steady_clock::now() - start_)
                                           .count());
  }
  ScopedTimer(const ScopedTimer&) = delete;
  ScopedTimer& operator=(const ScopedTimer&) = delete;

 private:
  uint64_t& total_ns_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace qevict::plugin
