// Allocations of a call fail, one alone or one and all after it: the cache stays sound, the call
// can be made again, and the next event makes up for what was not done. In a program of its own,
// since it replaces operator new.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <functional>
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

/// A call of the cache whose allocations are refused one by one.
struct Call {
  const char* name;
  /// Makes everything that the call needs; what it returns makes the call.
  std::function<std::function<Status()>(Engine&, SeqId)> prepare;
  bool atomic = true;  ///< on an error nothing has changed that can be asked for
  bool again = true;   ///< a refused call is made again
};
struct CallCase {
  const char* name;
  const char* config;
};
class RefusedCallTest : public testing::TestWithParam<std::tuple<CallCase, Call>> {};

/// What can be asked for: sequences with their windows and tails.
std::vector<uint64_t> Facts(const KvCache& cache) {
  std::vector<uint64_t> facts;
  for (const uint32_t stream : {0u, 1u}) {
    for (const SeqId seq : cache.Sequences(stream)) {
      facts.insert(facts.end(), {seq, cache.n_tokens(seq), cache.tail(seq).window,
                                 static_cast<uint64_t>(cache.tail_pos(seq))});
      for (const WindowId w : cache.windows(seq)) {
        const WindowInfo info = cache.info(w);
        facts.insert(facts.end(), {w, info.live, info.n_tokens, static_cast<uint64_t>(info.pos0)});
      }
    }
  }
  return facts;
}

Status Refused(const std::function<Status()>& call, long n, bool others) {
  others_refused = others;
  n_allocations = 0;
  first_refused = n;
  Status status;
  try {
    status = call();
  } catch (const std::bad_alloc&) {  // of the calls that return no status
    status = ResourceExhausted("thrown");
  }
  first_refused = 0;
  return status;
}

std::unique_ptr<Engine> MakeTwoStreams(const Config& config, SeqId& seq) {
  auto e = std::make_unique<Engine>(
      config, std::vector<LayerShape>{Shape(2, 32, 32), Shape(1, 32, 16)}, 2, 512);
  EXPECT_TRUE(e->status.ok()) << e->status.message();
  e->UseRope(TestRope(16));
  seq = e->NewSequence(0);
  EXPECT_TRUE(e->Prompt(seq, 200, 50).ok());
  EXPECT_TRUE(e->Decode(seq, 40).ok());
  return e;
}

TEST_P(RefusedCallTest, LeavesASoundCache) {
  const auto& [config_case, call] = GetParam();
  const Result<Config> config = ParseConfig(config_case.config);
  ASSERT_TRUE(config.ok()) << config.status().message();
  for (const bool others : {false, true}) {
    for (long n = 1;; n += 1 + n / 24) {
      SeqId seq = kNone;
      const auto e = MakeTwoStreams(*config, seq);
      const std::function<Status()> run = call.prepare(*e, seq);
      const std::vector<uint64_t> before = Facts(e->cache());
      const Status status = Refused(run, n, others);
      const bool all = n_allocations < n;
      const std::string where =
          "allocation " + std::to_string(n) + (others ? " and all after it" : "");
      EXPECT_TRUE(status.ok() || status.code() == StatusCode::kResourceExhausted)
          << where << ": " << status.message();
      EXPECT_TRUE(!all || status.ok()) << status.message();
      e->ExpectSound(where);
      EXPECT_TRUE(status.ok() || !call.atomic || Facts(e->cache()) == before) << where;
      if (!status.ok() && call.again) {
        const Status again = run();
        EXPECT_TRUE(again.ok()) << where << ": " << again.message();
        e->ExpectSound(where + ", again");
      }
      const SeqId fresh = e->NewSequence(0);
      EXPECT_TRUE(e->Prompt(fresh, 30, 15).ok()) << where;
      EXPECT_TRUE(e->Decode(fresh, 20).ok()) << where;
      e->ExpectSound(where + ", decoded");
      if (testing::Test::HasFailure() || all) break;
    }
    if (testing::Test::HasFailure()) return;
  }
}

/// Rows of the first cells, as a save reads them: by layer and side.
std::vector<std::vector<uint16_t>> SavedRows(Engine& e, uint32_t n_cells) {
  std::vector<std::vector<uint16_t>> rows;
  for (const bool is_k : {true, false}) {
    for (uint32_t il = 0; il < e.n_layers(); ++il) {
      const LayerShape& s = e.shapes()[il];
      const size_t n_words = s.n_kv_heads * (is_k ? s.head_dim : s.head_dim_v);
      auto& out = rows.emplace_back(n_cells * n_words);
      for (uint32_t c = 0; c < n_cells; ++c) {
        if (is_k) e.cache().ReadRowK(il, 0, c, out.data() + c * n_words);
        if (!is_k) e.cache().ReadRowV(il, 0, c, out.data() + c * n_words);
      }
    }
  }
  return rows;
}

std::function<Status()> RestoreAll(Engine& e, uint32_t stream) {
  constexpr uint32_t kCells = 240;
  const auto rows = std::make_shared<std::vector<std::vector<uint16_t>>>(SavedRows(e, kCells));
  return [&e, rows, stream] {
    Status first;
    for (uint32_t i = 0; i < 2 * e.n_layers(); ++i) {
      const uint32_t il = i % e.n_layers();
      Status status = i < e.n_layers()
                          ? e.cache().RestoreRowsK(il, stream, 0, kCells, (*rows)[i].data())
                          : e.cache().RestoreRowsV(il, stream, 0, kCells, (*rows)[i].data());
      if (first.ok()) first = std::move(status);
    }
    e.cache().FinishRestore();
    return first;
  };
}

/// Deltas that split windows: every third token stays.
std::vector<int32_t> SplittingDelta() {
  std::vector<int32_t> delta(2 * 512, 0);
  for (size_t i = 10; i < 512; ++i) delta[i] = i % 3 == 0 ? 0 : 70;
  return delta;
}

std::vector<Call> Calls() {
  using Run = std::function<Status()>;
  const auto append = [](Engine& e, const std::vector<TokenSpec>& tokens) -> Run {
    auto refs = std::make_shared<std::vector<TokenRef>>();
    return [&e, tokens, refs] {
      refs->shrink_to_fit();
      return e.cache().Append(tokens, *refs);
    };
  };
  const auto shift = [](Engine& e) -> Run {
    return [&e, delta = SplittingDelta()] { return e.cache().ShiftPositions(delta); };
  };
  std::vector<Call> calls;
  calls.push_back({"Append", [=](Engine& e, SeqId seq) { return append(e, e.NextTokens(seq, 90)); },
                   true, true});
  calls.push_back({"AppendOfTwo", [=](Engine& e, SeqId seq) {
                     auto tokens = e.NextTokens(seq, 20);
                     const SeqId other = e.NewSequence(0);
                     for (int i = 0; i < 20; ++i) {
                       tokens.push_back(e.NextTokens(other, 1)[0]);
                       tokens.push_back(e.NextTokens(seq, 1)[0]);
                     }
                     return append(e, tokens);
                   }});
  calls.push_back({"AppendTakesBack", [=](Engine& e, SeqId seq) {
                     e.next_cell(0) -= 30;
                     e.next_pos(seq) -= 30;
                     return append(e, e.NextTokens(seq, 60));
                   }});
  const auto write = [](bool keys) {
    return [keys](Engine& e, SeqId seq) -> Run {
      auto refs = std::make_shared<std::vector<TokenRef>>();
      EXPECT_TRUE(e.cache().Append(e.NextTokens(seq, 90), *refs).ok());
      auto rows = std::make_shared<std::vector<float>>(90 * 64, 0.5f);
      return [&e, keys, refs, rows] {
        return keys ? e.cache().WriteK(0, *refs, rows->data(), 64, e.pool())
                    : e.cache().WriteV(0, *refs, rows->data(), 64, e.pool());
      };
    };
  };
  calls.push_back({"WriteK", write(true), true, true});
  calls.push_back({"WriteV", write(false), true, true});
  calls.push_back({"PrepareStep",
                   [](Engine& e, SeqId seq) -> Run {
                     return [&e, seq] {
                       const StepRows rows{seq, 64, StepKind::kDecode};
                       return e.cache().PrepareStep({&rows, 1}, e.pool());
                     };
                   },
                   false});
  calls.push_back({"Route",
                   [](Engine& e, SeqId seq) -> Run {
                     return [&e, seq] { return e.cache().Route(1, seq, 64, e.pool()); };
                   },
                   false});
  calls.push_back({"CopyStream", [](Engine& e, SeqId) -> Run {
                     return [&e] { return e.cache().CopyStream(0, 1); };
                   }});
  calls.push_back({"ShiftPositions", [=](Engine& e, SeqId) { return shift(e); }});
  calls.push_back({"ShiftOfACopy", [=](Engine& e, SeqId) {
                     EXPECT_TRUE(e.cache().CopyStream(0, 1).ok());
                     return shift(e);
                   }});
  calls.push_back({"RotateLayer", [=](Engine& e, SeqId) -> Run {
                     EXPECT_TRUE(e.cache().CopyStream(0, 1).ok());
                     EXPECT_TRUE(shift(e)().ok());
                     return [&e, delta = SplittingDelta()] {
                       return e.cache().RotateLayer(0, delta, e.pool());
                     };
                   }});
  calls.push_back({"Kill", [](Engine& e, SeqId) -> Run {
                     std::vector<uint32_t> cells(100);
                     for (uint32_t i = 0; i < 100; ++i) cells[i] = 2 * i;
                     return [&e, cells] {
                       e.cache().Kill(0, 1);
                       e.cache().Kill(0, cells);
                       return Status();
                     };
                   }});
  // What has not been restored when memory is refused is dropped.
  calls.push_back({"RestoreOver", [](Engine& e, SeqId) { return RestoreAll(e, 0); }, false});
  calls.push_back({"RestoreBeside", [](Engine& e, SeqId) { return RestoreAll(e, 1); }, false});
  calls.push_back({"SetBudget", [](Engine& e, SeqId) -> Run {
                     e.cache().Clear();
                     return [&e] { return e.cache().SetBudget(310, 0.9); };
                   }});
  calls.push_back({"Clear", [](Engine& e, SeqId) -> Run {
                     return [&e] {
                       e.cache().Clear();
                       return Status();
                     };
                   }});
  calls.push_back({"CreateSequence", [](Engine& e, SeqId) -> Run {
                     return [&e] {
                       (void)e.cache().CreateSequence(0);
                       return Status();
                     };
                   }});
  calls.push_back({"MoveAndMerge",
                   [](Engine& e, SeqId seq) -> Run {
                     const SeqId branch = e.cache().BranchSequence(seq);
                     const auto windows = e.cache().windows(seq);
                     std::vector<WindowId> half(windows.begin() + windows.size() / 2,
                                                windows.end());
                     return [&e, seq, branch, half] {
                       if (e.cache().info(half[0]).seq == seq)
                         QEVICT_RETURN_IF_ERROR(e.cache().MoveWindows(half, branch));
                       return e.cache().MergeSequence(branch, seq);
                     };
                   },
                   false});
  return calls;
}

INSTANTIATE_TEST_SUITE_P(
    Calls, RefusedCallTest,
    testing::Combine(
        testing::Values(CallCase{"Kivi", "budget=95%,budget_tokens=200,recents=32,q=0.3"},
                        CallCase{"ZipCache",
                                 "budget=90%,budget_tokens=200,recents=32,codec=zipcache,bits=2"}),
        testing::ValuesIn(Calls())),
    [](const auto& param) {
      return std::string(std::get<0>(param.param).name) + std::get<1>(param.param).name;
    });

}  // namespace
}  // namespace qevict
