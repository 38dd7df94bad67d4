#include "cli/statistics_file.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "cli/testing/command.h"

namespace qevict::cli {
namespace {

TEST(HashFileTest, IsKeptBesideTheFileUntilThatChanges) {
  const std::string path = testing::TempDir() + "/qevict_hash_" + std::to_string(getpid());
  const std::string kept = path + ".qevict-hash";
  std::ofstream(path) << "one";
  const uint64_t first = *HashFile(path);
  EXPECT_TRUE(std::filesystem::exists(kept));
  // What was kept is used ...
  std::string line = Contents(kept);
  line.replace(line.rfind(' ') + 1, std::string::npos, "abc\n");
  std::ofstream(kept) << line;
  EXPECT_EQ(*HashFile(path), 0xabcu);
  // ... unless it is damaged or the file has changed.
  std::ofstream(kept) << "nonsense";
  EXPECT_EQ(*HashFile(path), first);
  std::ofstream(path) << "three";
  const uint64_t second = *HashFile(path);
  EXPECT_NE(second, first);
  EXPECT_EQ(*HashFile(path), second);
  std::remove(path.c_str());
  std::remove(kept.c_str());
  EXPECT_FALSE(HashFile(path).ok());
}

}  // namespace
}  // namespace qevict::cli
