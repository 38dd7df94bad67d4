// Random histories of a host: batches of any sequences, tokens taken back, contexts shifted,
// prefixes shared, state saved and restored, in any order. With the full cache attention must stay
// ggml's; with a budget it must stay what is held, and the cache must stay sound.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>

#include "ggml/testing/held.h"
#include "ggml/testing/state.h"

namespace qevict::plugin::testing {
namespace {

constexpr uint32_t kSequences = 3, kCells = 512;

class History {
 public:
  History(uint32_t seed, bool streams, const std::string& config, bool budget)
      : random_(seed), streams_(streams), budget_(budget), twin_(Spec(streams), config) {}

  void Run(uint32_t n_ops) {
    for (uint32_t op = 0; op < n_ops && !::testing::Test::HasFailure(); ++op) {
      const std::string what = "operation " + std::to_string(op) + ": ";
      switch (Pick(12)) {
        case 0:
          TakeBack(what);
          break;
        case 1:
          RemoveMiddle(what);
          break;
        case 2:
          Share(what);
          break;
        case 3:
          Forget(what);
          break;
        case 4:
          SaveAndRestore(what);
          break;
        default:
          Batch(what);
      }
    }
  }

 private:
  static CacheSpec Spec(bool streams) {
    CacheSpec spec;
    spec.layers.resize(2);
    spec.layers[0].n_kv_heads = 1;
    spec.layers[1].head_dim_v = 32;
    spec.n_cells = kCells;
    spec.n_streams = streams ? kSequences : 1;
    spec.n_threads = 1;
    return spec;
  }
  uint32_t Pick(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  uint32_t Used(uint32_t stream) const {
    uint32_t used = 0;
    for (uint32_t c = 0; c < kCells; ++c) used += twin_.cells.in_use(stream, c) ? 1 : 0;
    return used;
  }

  void Batch(const std::string& what) {
    // Streams of a batch are neighbours with equally many rows; sequences of a unified cache are
    // free.
    const uint32_t n = Pick(3) == 0 ? 1 + Pick(50) : 1;
    const uint32_t first = Pick(kSequences), last = first + Pick(kSequences - first);
    std::vector<Token> batch;
    for (uint32_t seq = first; seq <= last; ++seq) {
      if (!streams_ && seq != first && Pick(2)) continue;
      const uint32_t rows = streams_ ? n : 1 + Pick(n);
      const int32_t pos = twin_.cells.last_pos(seq) + 1;
      batch = Join({batch, TokensOf(seq, pos, rows)});
    }
    for (uint32_t s = 0; s < twin_.cells.n_streams(); ++s) {
      if (Used(s) + batch.size() > kCells) return Forget(what);
    }
    Step(batch,
         what + std::to_string(batch.size()) + " rows from sequence " + std::to_string(first));
  }
  void Step(const std::vector<Token>& batch, const std::string& what) {
    if (budget_) {
      ExpectHeld(RunHeld(twin_, batch, batch.size() <= kSequences), what);
    } else {
      ExpectExact(twin_.Step(batch), what.c_str(), shifted_ ? 50.0 : 1.0);
    }
  }
  void TakeBack(const std::string& what) {
    const uint32_t seq = Pick(kSequences);
    const int32_t last = twin_.cells.last_pos(seq);
    if (last < 1) return;
    const int32_t n = 1 + static_cast<int32_t>(Pick(Pick(3) ? 6 : static_cast<uint32_t>(last)));
    twin_.cells.Remove(seq, std::max(1, last + 1 - n));
    Step(TokensOf(seq, twin_.cells.last_pos(seq) + 1, 1 + Pick(4)), what + "after taking back");
  }
  void RemoveMiddle(const std::string& what) {
    const uint32_t seq = Pick(kSequences);
    const int32_t last = twin_.cells.last_pos(seq);
    if (last < 30 || shared_) return;  // llama.cpp does not shift cells of two sequences either
    const auto from = static_cast<int32_t>(4 + Pick(10)), n = static_cast<int32_t>(1 + Pick(15));
    twin_.cells.Remove(seq, from, from + n);
    twin_.cells.Shift(seq, from + n, -1, -n);
    shifted_ = true;
    const std::vector<int32_t> shifts = twin_.cells.TakeShifts();
    ASSERT_EQ(twin_.ours.Shift(shifts), GGML_STATUS_SUCCESS) << what;
    ASSERT_EQ(twin_.cpu.Shift(shifts), GGML_STATUS_SUCCESS) << what;
    Step(TokensOf(seq, twin_.cells.last_pos(seq) + 1, 1), what + "after a context shift");
  }
  void Share(const std::string& what) {
    const uint32_t from = Pick(kSequences), to = (from + 1) % kSequences;
    if (twin_.cells.last_pos(from) < 1) return;
    if (streams_) {
      twin_.ours.CopyStream(from, to);
      twin_.cpu.CopyStream(from, to);
      twin_.cells.CopyStream(from, to);
    } else {
      twin_.cells.Remove(to, 0);
      twin_.cells.Copy(from, to);
      shared_ = true;
    }
    Step(TokensOf(to, twin_.cells.last_pos(to) + 1, 1), what + "after sharing");
  }
  void Forget(const std::string&) {
    if (Pick(3) == 0) {
      twin_.cells.Clear();
      twin_.ours.Clear();
      twin_.cpu.Clear();
      shared_ = false;
    } else {
      twin_.cells.Remove(Pick(kSequences), 0);
    }
  }
  // All cells of a stream out and in again, as a whole-context restore does.
  void SaveAndRestore(const std::string& what) {
    if (streams_ || Pick(2)) return;
    uint32_t end = 0;
    for (uint32_t c = 0; c < kCells; ++c) end = twin_.cells.in_use(0, c) ? c + 1 : end;
    if (end == 0 || twin_.cells.last_pos(0) < 1) return;
    const SavedState ours = Save(twin_.ours, 0, 0, end), theirs = Save(twin_.cpu, 0, 0, end);
    twin_.ours.Clear();
    Restore(twin_.ours, 0, 0, ours, Pick(2) ? 1000 : 0);
    Restore(twin_.cpu, 0, 0, theirs);
    Step(TokensOf(0, twin_.cells.last_pos(0) + 1, 1), what + "after a restore");
  }

  std::mt19937 random_;
  bool streams_, budget_, shared_ = false, shifted_ = false;
  Twin twin_;
};

void RunHistories(bool streams, const std::string& config, bool budget, uint32_t n_ops) {
  for (uint32_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    History(seed, streams, config, budget).Run(n_ops);
  }
}

TEST(RandomTest, FullCacheOfStreams) { RunHistories(true, "preset=full", false, 60); }

TEST(RandomTest, FullUnifiedCache) { RunHistories(false, "preset=full", false, 60); }

TEST(RandomTest, BudgetOfStreams) {
  RunHistories(true, "preset=qevict,budget=40%,recents=16,check=1", true, 120);
}

TEST(RandomTest, BudgetOfAUnifiedCache) {
  RunHistories(false, "preset=qevict,budget=70%,recents=16,check=1", true, 120);
}

}  // namespace
}  // namespace qevict::plugin::testing
