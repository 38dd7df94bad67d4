#include "cli/machine.h"

#include <sys/resource.h>

#include <cstdlib>
#include <fstream>

#include "cli/options.h"
#include "kernels/attention.h"
#include "llama.h"
#include "qevict/version.h"

namespace qevict::cli {

std::string CpuName() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const size_t at = line.find(": ");
    if (at != std::string::npos) return line.substr(at + 2);
  }
  return "unknown";
}

uint64_t PeakRssBytes() {
  rusage usage{};
  if (getrusage(RUSAGE_SELF, &usage) != 0) return 0;
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;  // Linux counts in KiB
}

uint64_t AvailableBytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("MemAvailable:"))
      return std::strtoull(line.c_str() + 13, nullptr, 10) << 10;
  }
  return UINT64_MAX / 2;
}

Json MachineFacts() {
  return {{"version", QEVICT_VERSION_STRING},
          {"cpu", CpuName()},
          {"cpus", UsableCpus()},
          {"isa", kernels::IsaName(kernels::ActiveIsa())},
          {"llama_version", llama_version()},
          {"ggml_version", ggml_version()}};
}

}  // namespace qevict::cli
