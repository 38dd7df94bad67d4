// Allocations of an event fail, one alone or one and all after it: the cache stays sound, and the
// next event makes up for it. In a program of its own, since it replaces operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <optional>

#include "cache/test_support.h"

namespace {

std::atomic<long> n_allocations{0};
std::atomic<long> first_refused{0};  // 0: none is
std::atomic<bool> others_refused{false};

void* Allocate(std::size_t n) {
  const long number = ++n_allocations, first = first_refused;
  if (first != 0 && (number == first || (number > first && others_refused))) throw std::bad_alloc();
  if (void* p = std::malloc(n == 0 ? 1 : n)) return p;
  throw std::bad_alloc();
}

}  // namespace

void* operator new(std::size_t n) { return Allocate(n); }
void* operator new[](std::size_t n) { return Allocate(n); }
void* operator new(std::size_t n, const std::nothrow_t&) noexcept { return std::malloc(n); }
void* operator new[](std::size_t n, const std::nothrow_t&) noexcept { return std::malloc(n); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }

namespace qevict {
namespace {

struct Case {
  const char* name;
  const char* config;
  uint32_t n_decoded;  ///< tokens after the prompt and before the event
  bool promotes;       ///< the event takes windows back to full precision
};

class RefusedMemoryTest : public testing::TestWithParam<Case> {};

/// A cache that has read 400 tokens and decoded some.
std::unique_ptr<Engine> MakeEngine(const Config& config, uint32_t n_decoded, unsigned n_threads,
                                   SeqId& seq) {
  auto e = std::make_unique<Engine>(
      config, std::vector<LayerShape>{Shape(2, 32, 32), Shape(1, 32, 16)}, 1, 1024);
  EXPECT_TRUE(e->status.ok()) << e->status.message();
  if (!e->status.ok()) return nullptr;
  e->UseRope(TestRope(16));
  e->UsePool(n_threads);
  seq = e->NewSequence(0);
  EXPECT_TRUE(e->Prompt(seq, 400, 50).ok());
  EXPECT_TRUE(e->Decode(seq, n_decoded).ok());
  return e;
}

/// An event whose allocation number n fails, or (others) all from there on. Empty: it has less.
std::optional<Status> RouteWithout(long n, bool others, Engine& e, SeqId seq) {
  others_refused = others;
  n_allocations = 0;
  first_refused = n;
  Status status = e.cache().RouteAll(seq, 8, e.pool());
  first_refused = 0;
  if (n_allocations < n) return std::nullopt;
  return status;
}

TEST_P(RefusedMemoryTest, AnEventThatFailsLosesNothingButItself) {
  const Result<Config> config = ParseConfig(GetParam().config);
  ASSERT_TRUE(config.ok()) << config.status().message();
  for (const auto& [n_threads, others] : {std::pair{1u, false}, {1u, true}, {3u, false}}) {
    int n_refused = 0;
    for (long n = 1;; n += 1 + n / 48) {
      SeqId seq = kNone;
      const auto e = MakeEngine(*config, GetParam().n_decoded, n_threads, seq);
      ASSERT_TRUE(e);
      while (!e->cache().NoteStep(seq, 1, true)) {
        ASSERT_TRUE(e->Store(e->NextTokens(seq, 1)).ok());
      }
      const CacheStats before = e->cache().Stats();
      const std::optional<Status> status = RouteWithout(n, others, *e, seq);
      if (!status) {  // all of it was allowed: this is what could be undone
        const CacheStats after = e->cache().Stats();
        EXPECT_GT(after.evictions, before.evictions);
        EXPECT_GT(after.first_encodings, before.first_encodings);
        EXPECT_EQ(after.promotions > before.promotions, GetParam().promotes);
        break;
      }
      const std::string where =
          "allocation " + std::to_string(n) + (others ? " and all after it" : "");
      n_refused += status->ok() ? 0 : 1;  // what makes room for others may fail unseen
      EXPECT_TRUE(status->ok() || status->code() == StatusCode::kResourceExhausted)
          << status->message();
      e->ExpectSound(where);
      const Status again = e->cache().RouteAll(seq, 8, e->pool());
      ASSERT_TRUE(again.ok()) << where << ": " << again.message();
      ASSERT_TRUE(e->Decode(seq, 20).ok()) << where;
      e->ExpectSound(where + ", decoded");
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_GT(n_refused, 10);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, RefusedMemoryTest,
    testing::Values(
        Case{"KiviFirst", "budget=90%,budget_tokens=280", 0, false},
        Case{"KiviLater", "budget=95%,budget_tokens=300,q=0.3", 40, true},
        Case{"ZipCacheFirst", "budget=90%,budget_tokens=280,codec=zipcache,bits=2", 0, false},
        Case{"KvquantFirst", "budget=90%,budget_tokens=280,codec=kvquant,bits=2", 0, false},
        Case{"KvquantLater", "budget=95%,budget_tokens=300,codec=kvquant,bits=2,q=0.3", 40, true},
        Case{"WaterFillFirst", "budget=95%,budget_tokens=280,codec=wf,bits=2", 0, false},
        Case{"WaterFillLater", "budget=95%,budget_tokens=320,codec=wf,bits=2,q=0.4", 40, true}),
    [](const auto& param) { return std::string(param.param.name); });

}  // namespace
}  // namespace qevict
