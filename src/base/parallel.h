// Parallel-for: one interface, so that the core runs on std::thread (visible to the thread
// sanitizer) and the plug-in can bring the threads that ggml already keeps warm.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <type_traits>

namespace qevict {

/// Runs tasks on a fixed number of threads. Run() may not be called concurrently on one object.
class ParallelFor {
 public:
  using Task = void (*)(void* context, size_t task, unsigned thread);
  virtual ~ParallelFor() = default;
  virtual unsigned n_threads() const = 0;
  /// Calls task(context, i, thread) once for each i in [0, n), thread in [0, n_threads()), and
  /// returns when all are done. Tasks are handed out dynamically; each result must not depend on
  /// which thread ran it. Tasks do not throw.
  virtual void Run(size_t n, Task task, void* context) = 0;

  /// The same for any callable f(size_t task, unsigned thread). If calls threw, one of what they
  /// threw is thrown here when all tasks are done: the others have run.
  template <typename F>
  void For(size_t n, F&& f) {
    using Fn = std::remove_reference_t<F>;
    struct Job {
      Fn& f;
      std::atomic_flag thrown{};
      std::exception_ptr error = nullptr;
    } job{f};
    Run(
        n,
        [](void* c, size_t i, unsigned t) {
          Job& j = *static_cast<Job*>(c);
          try {
            j.f(i, t);
          } catch (...) {
            if (!j.thrown.test_and_set()) j.error = std::current_exception();
          }
        },
        &job);
    if (job.error) std::rethrow_exception(job.error);
  }
};

/// Runs everything on the calling thread.
std::unique_ptr<ParallelFor> MakeSerial();
/// A pool of n_threads (>= 1; the caller is one of them) std::threads that sleep between calls.
std::unique_ptr<ParallelFor> MakeThreadPool(unsigned n_threads);

}  // namespace qevict
