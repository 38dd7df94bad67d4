// Every single allocation of an event fails once: the cache stays sound, the next event makes up
// for it. In a program of its own, since it replaces operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <optional>

#include "cache/test_support.h"

namespace {

/// Allocations until one fails; 0: none does.
std::atomic<long> allocations_left{0};

void* Allocate(std::size_t n) {
  if (allocations_left.load() > 0 && allocations_left.fetch_sub(1) == 1) throw std::bad_alloc();
  if (void* p = std::malloc(n == 0 ? 1 : n)) return p;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t n) { return Allocate(n); }
void* operator new[](std::size_t n) { return Allocate(n); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }

namespace qevict {
namespace {

struct Case {
  const char* name;
  const char* config;
};

class RefusedMemoryTest : public testing::TestWithParam<Case> {};

/// A cache that has read 400 tokens and decoded 24.
std::unique_ptr<Engine> MakeEngine(const Config& config, unsigned n_threads, SeqId& seq) {
  auto e = std::make_unique<Engine>(
      config, std::vector<LayerShape>{Shape(2, 32, 32), Shape(1, 32, 16)}, 1, 1024);
  EXPECT_TRUE(e->status.ok()) << e->status.message();
  if (!e->status.ok()) return nullptr;
  e->UseRope(TestRope(16));
  e->UsePool(n_threads);
  seq = e->NewSequence(0);
  EXPECT_TRUE(e->Prompt(seq, 400, 50).ok());
  EXPECT_TRUE(e->Decode(seq, 24).ok());
  return e;
}

/// An event whose allocation number n fails. Empty: it has less.
std::optional<Status> RouteWithout(long n, Engine& e, SeqId seq) {
  allocations_left = n;
  Status status = e.cache().RouteAll(seq, 8, e.pool());
  if (allocations_left.exchange(0) > 0) return std::nullopt;
  return status;
}

TEST_P(RefusedMemoryTest, AnEventThatFailsLosesNothingButItself) {
  const Result<Config> config = ParseConfig(GetParam().config);
  ASSERT_TRUE(config.ok()) << config.status().message();
  for (unsigned n_threads : {1u, 3u}) {
    long n = 1;
    for (;; n += 1 + n / 24) {
      SeqId seq = kNone;
      const auto e = MakeEngine(*config, n_threads, seq);
      ASSERT_TRUE(e);
      while (!e->cache().NoteStep(seq, 1, true)) {
        ASSERT_TRUE(e->Store(e->NextTokens(seq, 1)).ok());
      }
      const std::optional<Status> status = RouteWithout(n, *e, seq);
      if (!status) break;
      // What is only given back may fail unseen.
      EXPECT_TRUE(status->ok() || status->code() == StatusCode::kResourceExhausted);
      const std::string where = "allocation " + std::to_string(n) + ", " + status->message();
      e->ExpectSound(where);
      const Status again = e->cache().RouteAll(seq, 8, e->pool());
      ASSERT_TRUE(again.ok()) << where << ": " << again.message();
      ASSERT_TRUE(e->Decode(seq, 20).ok()) << where;
      e->ExpectSound(where + ", decoded");
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_GT(n, 20) << "no allocation was refused";
  }
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, RefusedMemoryTest,
    testing::Values(Case{"Kivi", "check=1,budget=90%,budget_tokens=200"},
                    Case{"ZipCache", "check=1,budget=90%,budget_tokens=200,codec=zipcache,bits=2"},
                    Case{"Kvquant", "check=1,budget=90%,budget_tokens=200,codec=kvquant,bits=2"},
                    Case{"WaterFill", "check=1,budget=95%,budget_tokens=200,codec=wf,bits=2"}),
    [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace qevict
