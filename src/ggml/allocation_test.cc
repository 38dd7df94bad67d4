// A decode step of a cache that neither grows nor routes asks the system for no memory, on no
// thread. This program counts every malloc while the plug-in computes its part of a graph.
#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>

#include "ggml-backend-impl.h"
#include "ggml/cache_group.h"
#include "ggml/testing/held.h"

namespace {

std::atomic<bool> counting{false};
std::atomic<int> n_allocations{0};

void Note() {
  if (counting.load(std::memory_order_relaxed)) ++n_allocations;
}

}  // namespace

// glibc's own names of what is replaced here.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t n) {
  Note();
  return __libc_malloc(n);
}
void* calloc(size_t n, size_t size) {
  Note();
  return __libc_calloc(n, size);
}
void* realloc(void* p, size_t n) {
  Note();
  return __libc_realloc(p, n);
}
void* aligned_alloc(size_t alignment, size_t n) {
  Note();
  return __libc_memalign(alignment, n);
}
int posix_memalign(void** p, size_t alignment, size_t n) {
  Note();
  *p = __libc_memalign(alignment, n);
  return *p == nullptr ? 12 : 0;  // ENOMEM
}
}

namespace qevict::plugin::testing {
namespace {

ggml_status (*original_compute)(ggml_backend_t, ggml_cgraph*) = nullptr;

ggml_status CountedCompute(ggml_backend_t backend, ggml_cgraph* graph) {
  counting = true;
  const ggml_status status = original_compute(backend, graph);
  counting = false;
  return status;
}

struct Setting {
  const char* config;
  uint32_t n_streams;
};

class AllocationTest : public ::testing::TestWithParam<Setting> {
 protected:
  static CacheSpec Spec(uint32_t n_streams) {
    CacheSpec spec;
    spec.layers.resize(2);
    spec.n_cells = 512;
    spec.n_streams = n_streams;
    return spec;
  }

  /// One token per sequence.
  static std::vector<Token> Batch(uint32_t n_sequences, int32_t pos) {
    std::vector<Token> batch;
    for (uint32_t seq = 0; seq < n_sequences; ++seq) batch.push_back({seq, pos, -1, -1});
    return batch;
  }
};

TEST_P(AllocationTest, DecodeStepsAskForNoMemory) {
  constexpr uint32_t kSequences = 2;
  Twin twin(Spec(GetParam().n_streams), GetParam().config);
  ASSERT_TRUE(twin.ours.ok());
  for (uint32_t seq = 0; seq < kSequences; ++seq) twin.Step(TokensOf(seq, 0, 200));
  ggml_backend_t backend = twin.ours.backend();
  original_compute = backend->iface.graph_compute;
  backend->iface.graph_compute = CountedCompute;
  int n_steps = 0;
  for (int32_t pos = 200; pos < 240; ++pos) {
    const qevict_stats before = twin.ours.stats();
    n_allocations = 0;
    ASSERT_EQ(twin.Step(Batch(kSequences, pos)).status, GGML_STATUS_SUCCESS);
    const int counted = n_allocations;
    const qevict_stats after = twin.ours.stats();
    // Warm-up, steps that open a window or lengthen a table, and routing events may.
    const bool grows =
        after.tables_bytes + after.arena_bytes > before.tables_bytes + before.arena_bytes;
    if (pos < 210 || grows || after.events != before.events) continue;
    EXPECT_EQ(counted, 0) << "position " << pos;
    ++n_steps;
  }
  EXPECT_GT(n_steps, 15);
}

INSTANTIATE_TEST_SUITE_P(Caches, AllocationTest,
                         ::testing::Values(Setting{"preset=full", 1}, Setting{"preset=full", 2},
                                           Setting{"preset=qevict,budget=40%", 1},
                                           Setting{"preset=qevict,budget=40%", 2},
                                           Setting{"preset=pack,budget=100%,codec=token", 2},
                                           Setting{"preset=qevict,budget=40%,codec=wf,per_head=on",
                                                   2}));

TEST(AllocationCounterTest, Counts) {
  n_allocations = 0;
  counting = true;
  void* volatile p = std::malloc(1);
  counting = false;
  std::free(p);
  EXPECT_EQ(n_allocations, 1);
}

}  // namespace
}  // namespace qevict::plugin::testing
