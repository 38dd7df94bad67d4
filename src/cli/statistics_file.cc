#include "cli/statistics_file.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>
#include <vector>

#include "cli/model_shape.h"
#include "cli/progress.h"
#include "codecs/allocate.h"

namespace qevict::cli {
namespace {

/// Whether `layer_bits` and the statistics speak of the model's layers.
Status CheckLayers(const Config& config, const codecs::CodecStatistics* statistics,
                   const ModelShape& model, const std::string& path) {
  const uint32_t last = model.layers.empty() ? 0 : model.layers.back().index;
  if (const std::optional<uint32_t> named = HighestLayerNamed(config); named && *named > last) {
    return InvalidArgument("layer_bits names layer " + std::to_string(*named) +
                           ", but the last layer with a KV cache of " + path + " is " +
                           std::to_string(last));
  }
  if (statistics == nullptr) return {};
  for (const CacheLayer& l : model.layers) {
    if (statistics->Find(l.index, {l.n_kv_heads, l.head_dim, l.head_dim_v})) continue;
    return InvalidArgument("the statistics in " + config.statistics + " have no layer " +
                           std::to_string(l.index) + " of " + std::to_string(l.n_kv_heads) +
                           " kv heads and " + std::to_string(l.head_dim) + "/" +
                           std::to_string(l.head_dim_v) + " channels, as " + path + " has");
  }
  return {};
}

Result<uint64_t> ReadAndHash(const std::string& path) {
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

/// Size and time of the last change: a hash that was taken under the same stamp still holds. Empty
/// if the system does not say.
std::string StampOf(const std::string& path) {
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  if (error) return {};
  const auto changed = std::filesystem::last_write_time(path, error);
  if (error) return {};
  return std::to_string(size) + " " + std::to_string(changed.time_since_epoch().count());
}

}  // namespace

Result<uint64_t> HashFile(const std::string& path) {
  const std::string stamp = StampOf(path), kept = path + ".qevict-hash";
  std::string line;
  if (std::ifstream file(kept); !stamp.empty() && std::getline(file, line)) {
    uint64_t hash = 0;
    const char* begin = line.data() + std::min(line.size(), stamp.size() + 1);
    const char* end = line.data() + line.size();
    const auto [at, error] = std::from_chars(begin, end, hash, 16);
    if (line.starts_with(stamp + " ") && error == std::errc() && at == end) return hash;
  }
  const Result<uint64_t> hash = ReadAndHash(path);
  if (hash.ok() && !stamp.empty() && StampOf(path) == stamp) {
    std::ofstream(kept) << stamp << ' ' << std::hex << *hash << '\n';  // a folder may be read-only
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
  std::optional<ModelShape> shape;
  for (Config* config : configs) {
    if (config->statistics.empty() && config->layer_bits.empty()) continue;
    if (!shape) {
      Result<ModelShape> read = ReadModelShape(model);
      if (!read.ok()) return read.status();
      shape = std::move(*read);
    }
    if (config->statistics.empty()) {
      QEVICT_RETURN_IF_ERROR(CheckLayers(*config, nullptr, *shape, model));
      continue;
    }
    const Result<codecs::CodecStatistics> statistics = codecs::ReadStatistics(config->statistics);
    if (!statistics.ok()) return statistics.status();
    if (!hash) {
      const Result<uint64_t> read = HashFile(model);
      if (!read.ok()) return read.status();
      hash = *read;
    }
    if (*hash != statistics->model_hash) {
      return InvalidArgument(
          "the statistics in " + config->statistics + " were taken from another model (hash " +
          codecs::HashText(statistics->model_hash) + "; " + model + " has " +
          codecs::HashText(*hash) + "): run `qevict calibrate codec -m " + model + "`");
    }
    QEVICT_RETURN_IF_ERROR(CheckLayers(*config, &*statistics, *shape, model));
    Result<Config> allocated = codecs::WithAllocatedBits(*config, *statistics);
    if (!allocated.ok()) return allocated.status();
    *config = std::move(*allocated);
  }
  return {};
}

}  // namespace qevict::cli
