// A test that runs once per instruction set.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/parallel.h"
#include "kernels/attention.h"

namespace qevict::kernels {

class IsaTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    before_ = ActiveIsa();
    ASSERT_TRUE(ForceIsa(GetParam()));
  }
  void TearDown() override { ForceIsa(before_); }

  std::unique_ptr<ParallelFor> pool_ = MakeSerial();
  Workspace workspace_;

 private:
  Isa before_ = Isa::kScalar;
};

inline std::string IsaParamName(const testing::TestParamInfo<Isa>& isa) {
  return IsaName(isa.param);
}

}  // namespace qevict::kernels
