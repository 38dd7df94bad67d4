#include "base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace qevict {
namespace {

TEST(ParallelTest, EveryTaskRunsOnce) {
  for (unsigned n_threads : {0u, 1u, 2u, 4u, 7u}) {
    const auto pool = MakeThreadPool(n_threads);
    ASSERT_GE(pool->n_threads(), 1u);
    ASSERT_LE(pool->n_threads(), std::max(n_threads, 1u));
    for (size_t n : {0, 1, 2, 3, 7, 64, 1000}) {
      std::vector<int> calls(n, 0);
      pool->For(n, [&](size_t i, unsigned thread) {
        EXPECT_LT(thread, pool->n_threads());
        ++calls[i];
      });
      for (size_t i = 0; i < n; ++i) EXPECT_EQ(calls[i], 1) << "task " << i << " of " << n;
    }
  }
}

// Many short jobs in a row: a worker that wakes late must neither miss a job's end nor touch the
// next one's context.
TEST(ParallelTest, ManyShortJobsSeeTheirOwnContext) {
  const auto pool = MakeThreadPool(4);
  for (uint64_t job = 0; job < 3000; ++job) {
    const size_t n = 1 + job % 9;
    std::vector<uint64_t> result(n, 0);
    pool->For(n, [&](size_t i, unsigned) { result[i] = job * 100 + i; });
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(result[i], job * 100 + i);
  }
}

TEST(ParallelTest, PerThreadScratchIsNotShared) {
  const auto pool = MakeThreadPool(3);
  std::vector<uint64_t> sums(pool->n_threads(),
                             0);  // one writer per entry, or the thread sanitizer complains
  pool->For(1000, [&](size_t i, unsigned thread) { sums[thread] += i; });
  EXPECT_EQ(std::accumulate(sums.begin(), sums.end(), uint64_t{0}), 499500u);
}

TEST(ParallelTest, WhatATaskThrowsComesOutWhenAllHaveRun) {
  for (unsigned n_threads : {1u, 2u, 4u}) {
    const auto pool = MakeThreadPool(n_threads);
    for (int round = 0; round < 100; ++round) {
      std::vector<int> calls(64, 0);
      const auto task = [&](size_t i, unsigned) {
        ++calls[i];
        if (i % 9 == 5) throw std::runtime_error(std::to_string(i));
      };
      EXPECT_THROW(pool->For(calls.size(), task), std::runtime_error);
      EXPECT_EQ(std::accumulate(calls.begin(), calls.end(), 0), 64);
    }
    size_t sum = 0;
    pool->For(1, [&](size_t, unsigned) { sum += 1; });
    EXPECT_EQ(sum, 1u);
  }
}

TEST(ParallelTest, UnusedPoolStops) {
  for (int i = 0; i < 50; ++i) MakeThreadPool(4);
}

TEST(ParallelTest, SerialKeepsOrder) {
  const auto serial = MakeSerial();
  EXPECT_EQ(serial->n_threads(), 1u);
  std::vector<size_t> order;
  serial->For(5, [&](size_t i, unsigned thread) {
    EXPECT_EQ(thread, 0u);
    order.push_back(i);
  });
  EXPECT_EQ(order, (std::vector<size_t>{0, 1, 2, 3, 4}));
}

TEST(ParallelTest, ConstCallableRuns) {
  const auto pool = MakeThreadPool(2);
  std::atomic<size_t> sum{0};
  const auto add = [&](size_t i, unsigned) { sum += i; };
  pool->For(100, add);
  EXPECT_EQ(sum.load(), 4950u);
}

}  // namespace
}  // namespace qevict
