// A process that runs another ggml than the plug-in was built for: there is no device, and a
// reason. (Its own program, since it replaces ggml's version function.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ggml.h"
#include "ggml/testing/log_capture.h"
#include "qevict/backend.h"

extern "C" const char* ggml_version() { return "9.8.7"; }
extern "C" ggml_backend_reg* ggml_backend_init();

namespace qevict::plugin::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(VersionTest, AnotherGgmlIsRefused) {
  const LogCapture log;
  EXPECT_EQ(qevict_backend_reg(), nullptr);
  EXPECT_THAT(qevict_last_error(), AllOf(HasSubstr("9.8.7"), HasSubstr("built for ggml 0.")));
  EXPECT_THAT(log.errors(), ElementsAre(HasSubstr("rebuild")));
  EXPECT_EQ(ggml_backend_init(), nullptr);
}

}  // namespace
}  // namespace qevict::plugin::testing
