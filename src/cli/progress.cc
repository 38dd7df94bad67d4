#include "cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "cli/text.h"

namespace qevict::cli {
namespace {

constexpr double kQuietMs = 2000.0;
constexpr double kTerminalMs = 200.0, kLogMs = 10000.0;

std::string Duration(double seconds) {
  const auto s = static_cast<uint64_t>(seconds + 0.5);
  if (s < 100) return std::to_string(s) + " s";
  if (s < 6000) return std::to_string((s + 30) / 60) + " min";
  return FixedText(static_cast<double>(s) / 3600.0, 1) + " h";
}

}  // namespace

double Milliseconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double, std::milli>(d).count();
}

Progress::Progress(std::string what, uint64_t total, std::string unit)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      total_(std::max<uint64_t>(total, 1)),
      terminal_(isatty(STDERR_FILENO) == 1) {}

void Progress::Update(uint64_t done) {
  const double ms = timer_.ms();
  const double period = terminal_ ? kTerminalMs : kLogMs;
  if (ms < kQuietMs || done == 0 || (last_ms_ > 0.0 && ms - last_ms_ < period)) return;
  last_ms_ = ms;
  const double rate = static_cast<double>(done) / ms * 1000.0;
  std::string line = what_ + ": " + CountText(done) + " of " + CountText(total_) + " " + unit_ +
                     " (" + std::to_string(100 * done / total_) + "%), " +
                     FixedText(rate, rate < 10 ? 1 : 0) + " " + unit_ + "/s";
  if (done < total_) {
    line += ", " + Duration(static_cast<double>(total_ - done) / rate) + " left";
  }
  if (terminal_) {
    const size_t n = line.size();
    line.resize(std::max(n, width_), ' ');
    width_ = n;
    std::fprintf(stderr, "\r%s", line.c_str());
  } else {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
  std::fflush(stderr);
}

void Progress::Finish() {
  if (!terminal_ || width_ == 0) return;
  std::fprintf(stderr, "\r%*s\r", static_cast<int>(width_), "");
  std::fflush(stderr);
  width_ = 0;
}

}  // namespace qevict::cli
