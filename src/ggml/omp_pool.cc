#include "ggml/omp_pool.h"

#include <omp.h>

namespace qevict::plugin {

void OmpPool::Run(size_t n, Task task, void* context) {
  if (n == 0) return;
  if (n == 1 || n_threads_ == 1) {
    for (size_t i = 0; i < n; ++i) task(context, i, 0);
    return;
  }
  const long count = static_cast<long>(n);
#pragma omp parallel for num_threads(n_threads_) schedule(dynamic, 1)
  for (long i = 0; i < count; ++i) {
    task(context, static_cast<size_t>(i), static_cast<unsigned>(omp_get_thread_num()));
  }
}

}  // namespace qevict::plugin
