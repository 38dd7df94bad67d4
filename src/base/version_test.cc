#include "qevict/version.h"

#include <gtest/gtest.h>

namespace qevict {
namespace {

TEST(VersionTest, LibraryAndHeadersAgree) { EXPECT_STREQ(Version(), QEVICT_VERSION_STRING); }

}  // namespace
}  // namespace qevict
