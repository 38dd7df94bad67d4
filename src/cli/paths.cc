#include "cli/paths.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

namespace qevict::cli {
namespace {

namespace fs = std::filesystem;

Result<std::string> FirstFile(const std::string& what, const std::vector<fs::path>& places) {
  std::string tried;
  for (const fs::path& place : places) {
    std::error_code error;
    if (fs::is_regular_file(place, error)) return fs::weakly_canonical(place, error).string();
    tried += (tried.empty() ? "" : ", ") + place.string();
  }
  return NotFound(what + " is not there: looked at " + tried);
}

}  // namespace

std::string ProgramFolder() {
  std::error_code error;
  return fs::read_symlink("/proc/self/exe", error).parent_path().string();
}

Result<std::string> FindPlugin() {
  const char* named = std::getenv("QEVICT_PLUGIN");
  if (named && *named) return FirstFile("the plug-in named by QEVICT_PLUGIN", {named});
  const fs::path here = ProgramFolder();
  const fs::path file = "libggml-qevict.so";
  return FirstFile("the plug-in", {here / file, here / ".." / "lib" / file,
                                   here / ".." / QEVICT_INSTALL_LIBDIR / file, QEVICT_PLUGIN_FILE});
}

Result<std::string> FindServer(const std::string& wanted) {
  if (!wanted.empty()) return FirstFile("the program of --server", {wanted});
  return FirstFile("llama-server", {fs::path(ProgramFolder()) / "llama-server",
                                    fs::path(QEVICT_LLAMA_BIN_DIR) / "llama-server"});
}

}  // namespace qevict::cli
