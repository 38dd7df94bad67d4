// Fixed cases of the attention kernels for counting instructions (tests/instructions/check.py):
//
//   kernel_cases          lists the cases
//   kernel_cases CASE N   attends N times, on one thread
//
// Problems are made of a fixed seed, so that the same build executes the same instructions.
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "kernels/problems/layer_problem.h"

namespace qevict::kernels {
namespace {

struct Case {
  const char* name;
  LayerShape shape;
  Formats formats;
  uint32_t rows, tokens;
};
constexpr LayerShape kSmall{2, 7, 64, RopePairing::kHalves};
constexpr LayerShape kLarge{2, 4, 128, RopePairing::kInterleaved};
constexpr Case kCases[] = {
    {"decode_full_d64", kSmall, Formats::kFull, 1, 1024},
    {"decode_packed2_d64", kSmall, Formats::kPacked2, 1, 1024},
    {"decode_packed4_d64", kSmall, Formats::kPacked4, 1, 1024},
    {"decode_token2_d64", kSmall, Formats::kToken, 1, 1024},
    {"decode_mixed_d128", kLarge, Formats::kMixed, 1, 1024},
    {"prompt_full_d64", kSmall, Formats::kFull, 64, 512},
    {"prompt_packed2_d64", kSmall, Formats::kPacked2, 64, 512},
    {"prompt_token2_d64", kSmall, Formats::kToken, 64, 512},
};

int Main(int argc, char** argv) {
  if (argc == 1) {
    for (const Case& c : kCases) std::printf("%s\n", c.name);
    return 0;
  }
  for (const Case& c : kCases) {
    if (argc != 3 || std::string_view(argv[1]) != c.name) continue;
    const Problem problem(LayerParams(c.shape, c.formats, c.rows, c.tokens));
    const auto pool = MakeSerial();
    Workspace workspace;
    for (int i = 0; i < std::atoi(argv[2]); ++i) {
      if (!Attend({&problem.group(), 1}, *pool, workspace)) return 1;
    }
    return 0;
  }
  std::fprintf(stderr, "kernel_cases: usage: kernel_cases [CASE N]\n");
  return 2;
}

}  // namespace
}  // namespace qevict::kernels

int main(int argc, char** argv) { return qevict::kernels::Main(argc, argv); }
