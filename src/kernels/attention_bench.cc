// Attention at 16,384 tokens (decode, 4 layers with storage of their own, window masses on) and
// prompts of 512 rows at depth 8,192, for every ISA of the CPU. A result that differs from the
// reference is an error, never a time.
//
//   kernels_bench --benchmark_filter=decode/avx512
//
// Counters: gflops = 4 * rows * tokens * head_dim * heads (products with masked tokens count),
// bytes = K and V read.
#include <benchmark/benchmark.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/problems/layer_problem.h"
#include "kernels/problems/problem.h"

namespace qevict::kernels {
namespace {

constexpr int kLayers = 4;

struct Scenario {
  const char* model;
  LayerShape shape;
};
constexpr Scenario kScenarios[] = {{"14x2_d64", {2, 7, 64, RopePairing::kHalves}},
                                   {"32x8_d128", {8, 4, 128, RopePairing::kInterleaved}},
                                   {"9x3_d64", {3, 3, 64, RopePairing::kInterleaved}}};

/// A result that is wrong is an error, never a time.
bool IsRight(const ProblemParams& p, benchmark::State& state) {
  const std::string error = CheckShort(p);
  if (!error.empty()) state.SkipWithError(error.c_str());
  return error.empty();
}

void BM_Attend(benchmark::State& state, Isa isa, ProblemParams p, int n_layers,
               unsigned n_threads) {
  const Isa before = ActiveIsa();
  ForceIsa(isa);
  if (IsRight(p, state)) {
    std::vector<std::unique_ptr<Problem>> layers;
    for (int i = 0; i < n_layers; ++i, ++p.seed) layers.push_back(std::make_unique<Problem>(p));
    const auto pool = MakeThreadPool(n_threads);
    Workspace workspace;
    for (auto _ : state) {
      for (const auto& layer : layers) Attend({&layer->group(), 1}, *pool, workspace);
    }
    const size_t bytes = layers[0]->bytes();
    const double tokens = static_cast<double>(p.n_windows) * p.window,
                 heads = p.n_kv_heads * p.n_gqa;
    const double flops = 4.0 * p.n_rows * tokens * p.head_dim * heads * n_layers;
    using benchmark::Counter;
    state.counters["gflops"] = Counter(flops * 1e-9, Counter::kIsIterationInvariantRate);
    state.counters["bytes_per_second"] =
        Counter(static_cast<double>(bytes) * n_layers, Counter::kIsIterationInvariantRate,
                Counter::kIs1024);
    state.counters["kv_bytes"] = static_cast<double>(bytes);
  }
  ForceIsa(before);
}

void Register() {
  for (Isa isa : AllIsas()) {
    for (const Scenario& s : kScenarios) {
      for (const Formats formats : kAllFormats) {
        for (unsigned threads : {1u, 2u}) {
          const std::string tail = std::string(IsaName(isa)) + "/" + s.model + "/" +
                                   FormatsName(formats) + "/threads:" + std::to_string(threads);
          const ProblemParams decode = LayerParams(s.shape, formats, 1, 16384);
          benchmark::RegisterBenchmark(("decode/" + tail).c_str(), BM_Attend, isa, decode, kLayers,
                                       threads)
              ->Unit(benchmark::kMillisecond)
              ->UseRealTime();
          const ProblemParams prompt = LayerParams(s.shape, formats, 512, 8192 + 512);
          benchmark::RegisterBenchmark(("prompt/" + tail).c_str(), BM_Attend, isa, prompt, 1,
                                       threads)
              ->Unit(benchmark::kMillisecond)
              ->UseRealTime();
        }
      }
    }
  }
}

const bool kRegistered = (Register(), true);

}  // namespace
}  // namespace qevict::kernels
