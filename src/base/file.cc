#include "base/file.h"

#include <algorithm>
#include <cstdio>

namespace qevict {

std::optional<std::string> ReadFile(const std::string& path, size_t max_bytes) {
  std::FILE* file = std::fopen(path.c_str(), "rbe");
  if (file == nullptr) return std::nullopt;
  std::string contents;
  char buffer[1 << 16];
  while (contents.size() <= max_bytes) {
    const size_t n =
        std::fread(buffer, 1, std::min(sizeof(buffer), max_bytes + 1 - contents.size()), file);
    if (n == 0) break;
    contents.append(buffer, n);
  }
  const bool ok = std::ferror(file) == 0;
  std::fclose(file);
  if (!ok) return std::nullopt;
  return contents;
}

}  // namespace qevict
