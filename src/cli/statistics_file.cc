#include "cli/statistics_file.h"

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <optional>
#include <system_error>
#include <vector>

#include "cli/progress.h"
#include "codecs/allocate.h"

namespace qevict::cli {
namespace {

std::string HashText(uint64_t hash) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

}  // namespace

Result<uint64_t> HashFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file)
    return NotFound("file " + path + " cannot be read: " + std::generic_category().message(errno));
  Progress progress("hashing " + path, static_cast<uint64_t>(file.tellg()), "bytes");
  file.seekg(0);
  uint64_t hash = 0xcbf29ce484222325u, n_done = 0;
  std::vector<char> buffer(size_t{1} << 20);
  while (file.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) ||
         file.gcount() > 0) {
    const auto n = static_cast<size_t>(file.gcount());
    for (size_t i = 0; i < n; ++i) {
      hash = (hash ^ static_cast<uint8_t>(buffer[i])) * 0x100000001b3u;
    }
    progress.Update(n_done += n);
  }
  return hash;
}

Result<Config> UseStatistics(const Config& config, const std::string& model) {
  Config changed = config;
  Config* const one[] = {&changed};
  QEVICT_RETURN_IF_ERROR(UseStatistics(one, model));
  return changed;
}

Status UseStatistics(std::span<Config* const> configs, const std::string& model) {
  std::optional<uint64_t> hash;
  for (Config* config : configs) {
    if (config->statistics.empty()) continue;
    const Result<codecs::CodecStatistics> statistics = codecs::ReadStatistics(config->statistics);
    if (!statistics.ok()) return statistics.status();
    if (!hash) {
      const Result<uint64_t> read = HashFile(model);
      if (!read.ok()) return read.status();
      hash = *read;
    }
    if (*hash != statistics->model_hash) {
      return InvalidArgument("the statistics in " + config->statistics +
                             " were taken from another model (hash " +
                             HashText(statistics->model_hash) + "; " + model + " has " +
                             HashText(*hash) + "): run `qevict calibrate codec -m " + model + "`");
    }
    *config = codecs::WithAllocatedBits(*config, *statistics);
  }
  return {};
}

}  // namespace qevict::cli
