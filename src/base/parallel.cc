// Thread pool behind ParallelFor.
//
// One mutex guards the job; tasks are handed out by one atomic counter. A worker *joins* a job that
// is still open and the caller waits only for those that joined, so a worker that the system wakes
// late delays nobody:
//
//   caller   publish job, wake | take tasks ...              | close job, wait until none is active
//   worker   sleep or spin     | join: active, take tasks    | leave, look for the next generation
//
// Sleeping is a condition variable behind a short spin: jobs of one decode step follow each other
// within microseconds.
#include "base/parallel.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace qevict {
namespace {

constexpr int kSpins =
    1000;  // some 10 us on current cores; longer would take time from the compute threads of a host

inline void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Serial final : public ParallelFor {
 public:
  unsigned n_threads() const override { return 1; }
  void Run(size_t n, Task task, void* context) override {
    for (size_t i = 0; i < n; ++i) task(context, i, 0);
  }
};

class ThreadPool final : public ParallelFor {
 public:
  explicit ThreadPool(unsigned n_threads) {
    const unsigned n_workers = n_threads > 1 ? n_threads - 1 : 0;
    workers_.reserve(n_workers);
    for (unsigned t = 1; t <= n_workers; ++t) {
      try {
        workers_.emplace_back(&ThreadPool::WorkerLoop, this, t);
      } catch (const std::system_error&) {
        break;  // the system refuses more threads: work with those we have
      }
    }
  }

  ~ThreadPool() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  unsigned n_threads() const override { return static_cast<unsigned>(workers_.size()) + 1; }

  void Run(size_t n, Task task, void* context) override {
    if (n <= 1 || workers_.empty()) {
      for (size_t i = 0; i < n; ++i) task(context, i, 0);
      return;
    }
    const Job job{n, task, context};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      job_ = job;
      open_ = true;
      next_.store(0, std::memory_order_relaxed);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    TakeTasks(job, 0);
    for (int i = 0; i < kSpins && n_active_.load(std::memory_order_acquire) != 0; ++i) CpuRelax();
    std::unique_lock<std::mutex> lock(mutex_);
    open_ = false;  // nobody joins any more: the job and its context may die
    done_.wait(lock, [this] { return n_active_.load(std::memory_order_acquire) == 0; });
  }

 private:
  struct Job {
    size_t n = 0;
    Task task = nullptr;
    void* context = nullptr;
  };

  void TakeTasks(const Job& job, unsigned thread) {
    for (;;) {
      const size_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= job.n) return;
      job.task(job.context, i, thread);
    }
  }

  void WorkerLoop(unsigned thread) {
    uint64_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i)
        CpuRelax();
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      if (stop_) return;
      seen = generation_.load(std::memory_order_relaxed);
      if (!open_) continue;
      const Job job = job_;
      n_active_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      TakeTasks(job, thread);
      lock.lock();
      if (n_active_.fetch_sub(1, std::memory_order_acq_rel) == 1) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Job job_;                              // guarded by mutex_
  bool open_ = false, stop_ = false;     // guarded by mutex_
  std::atomic<uint64_t> generation_{0};  // written under mutex_; read outside only to spin
  std::atomic<unsigned> n_active_{0};    // written under mutex_; read outside only to spin
  std::atomic<size_t> next_{0};
  std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<ParallelFor> MakeSerial() { return std::make_unique<Serial>(); }

std::unique_ptr<ParallelFor> MakeThreadPool(unsigned n_threads) {
  if (n_threads <= 1) return MakeSerial();
  return std::make_unique<ThreadPool>(n_threads);
}

}  // namespace qevict
