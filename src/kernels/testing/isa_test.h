// A test that runs once per instruction set.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "base/parallel.h"
#include "kernels/attention.h"
#include "kernels/problems/problem.h"

namespace qevict::kernels {

class IsaTest : public testing::TestWithParam<Isa> {
 protected:
  void SetUp() override {
    before_ = ActiveIsa();
    ASSERT_TRUE(ForceIsa(GetParam()));
  }
  void TearDown() override { ForceIsa(before_); }

  /// The kernels of the instruction set agree with the double-precision reference.
  void Check(const ProblemParams& params) {
    Problem problem(params);
    problem.Run(*pool_, workspace_);
    ASSERT_EQ(problem.Compare(), "") << params.Name();
  }

  std::unique_ptr<ParallelFor> pool_ = MakeSerial();
  Workspace workspace_;

 private:
  Isa before_ = Isa::kScalar;
};

inline std::string IsaParamName(const testing::TestParamInfo<Isa>& isa) {
  return IsaName(isa.param);
}

}  // namespace qevict::kernels
