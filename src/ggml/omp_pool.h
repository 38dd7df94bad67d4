// ParallelFor on OpenMP: the same threads that ggml's CPU backend keeps warm, so no wake-up per
// layer.
#pragma once

#include "base/parallel.h"

namespace qevict::plugin {

class OmpPool final : public ParallelFor {
 public:
  explicit OmpPool(unsigned n_threads) : n_threads_(n_threads) {}
  unsigned n_threads() const override { return n_threads_; }
  void set_n_threads(unsigned n) { n_threads_ = n ? n : 1; }
  void Run(size_t n, Task task, void* context) override;

 private:
  unsigned n_threads_;
};

}  // namespace qevict::plugin
