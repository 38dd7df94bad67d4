// Whole-cache operations: copies between streams, and state that is saved and restored as bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "ggml/cache_group.h"
#include "ggml/testing/state.h"
#include "ggml/testing/twin.h"

namespace qevict::plugin::testing {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

CacheSpec TwoLayers(uint32_t n_streams = 1) {
  CacheSpec spec;
  spec.layers.resize(2);
  spec.layers[1].head_dim_v = 32;
  spec.n_streams = n_streams;
  return spec;
}

void CopyStream(Twin& twin, uint32_t from, uint32_t to) {
  twin.ours.CopyStream(from, to);
  twin.cpu.CopyStream(from, to);
  twin.cells.CopyStream(from, to);
}

// "One prompt, many answers": later writes to a copy do not change the original, nor the reverse.
TEST(CopyStreamTest, IsAFork) {
  Twin twin(TwoLayers(3));
  twin.Step(TokensOf(0, 0, 60));
  CopyStream(twin, 0, 1);
  EXPECT_EQ(twin.ours.Rows(0, true, 1), twin.cpu.Rows(0, true, 1));
  const std::vector<float> original = twin.ours.Rows(1, true, 0);
  ExpectExact(twin.Step(TokensOf(1, 60, 20)), "copy");
  EXPECT_EQ(twin.ours.Rows(1, true, 0), original);
  ExpectExact(twin.Step({{0, 60}, {1, 80}}), "original and copy");
  CopyStream(twin, 1, 2);
  ExpectExact(twin.Step({{0, 61}, {1, 81}, {2, 81}}), "copy of a copy");
  ExpectExact(twin.Step(TokensOf(0, 62, 30)), "original");
  ExpectExact(twin.Step({{1, 82}, {2, 82}}), "both copies");
}

TEST(CopyStreamTest, ReplacesWhatWasThere) {
  Twin twin(TwoLayers(2));
  twin.Step(TokensOf(0, 0, 20));
  twin.Step(TokensOf(1, 0, 90));
  CopyStream(twin, 0, 1);
  ExpectExact(twin.Step({{0, 20}, {1, 20}}), "after a copy over other tokens");
  CopyStream(twin, 1, 0);
  ExpectExact(twin.Step({{0, 21}, {1, 21}}), "and back");
  CopyStream(twin, 0, 1);  // the same pair once more, in another step
  ExpectExact(twin.Step({{0, 22}, {1, 22}}), "and again");
}

// Copies that follow each other without a graph between them.
TEST(CopyStreamTest, OneAfterTheOther) {
  Twin twin(TwoLayers(3));
  twin.Step(Join({TokensOf(0, 0, 30), TokensOf(1, 0, 30), TokensOf(2, 0, 30)}));
  CopyStream(twin, 0, 1);
  CopyStream(twin, 2, 1);
  ExpectExact(twin.Step({{1, 30}}), "the second copy");
  CopyStream(twin, 0, 1);
  CopyStream(twin, 2, 1);
  CopyStream(twin, 0, 1);
  ExpectExact(twin.Step({{1, 30}}), "the first again");
}

// --- State bytes ---------------------------------------------------------------------------------

struct Slices {
  const char* name;
  size_t size;  ///< 0: everything at once
};

class StateTest : public ::testing::TestWithParam<Slices> {};

TEST_P(StateTest, SurvivesClear) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 70));
  const auto saved = Save(twin.ours, 0, 0, 70, GetParam().size);
  EXPECT_EQ(saved, Save(twin.cpu, 0, 0, 70, 0));
  twin.ours.Clear();
  EXPECT_EQ(twin.ours.stats().full_tokens, 0u);
  Restore(twin.ours, 0, 0, saved, GetParam().size);
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
  EXPECT_EQ(Save(twin.ours, 0, 0, 70, 0), saved);
  ExpectExact(twin.Step(TokensOf(0, 70, 1)), "decode after a restore");
  ExpectExact(twin.Step(TokensOf(0, 71, 40)), "chunk after a restore");
  EXPECT_THAT(twin.ours.cache()->Sequences(0), SizeIs(1));
}

// Another session (a server that was started again) knows nothing of the rows.
TEST_P(StateTest, MovesToAnotherSession) {
  Twin first(TwoLayers()), second(TwoLayers());
  first.Step(TokensOf(0, 0, 70));
  second.Step(TokensOf(0, 0, 70));  // other random rows: the restore replaces them
  const auto saved = Save(first.ours, 0, 0, 70, 0);
  second.ours.Clear();
  Restore(second.ours, 0, 0, saved, GetParam().size);
  Restore(second.cpu, 0, 0, saved, 0);
  ExpectExact(second.Step(TokensOf(0, 70, 1)), "decode in another session");
  ExpectExact(second.Step(TokensOf(0, 71, 40)), "chunk in another session");
}

// A restored sequence may get other cells than it had, beside a sequence that is alive.
TEST_P(StateTest, MovesToOtherCells) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 40));
  const auto saved = Save(twin.ours, 0, 0, 40, GetParam().size);
  twin.Step(TokensOf(1, 0, 50));
  // Cells 90...129 for sequence 2.
  const std::vector<int64_t> cells = twin.cells.Place(TokensOf(2, 0, 40));
  ASSERT_EQ(cells.front(), 90);
  Restore(twin.ours, 0, 90, saved, GetParam().size);
  Restore(twin.cpu, 0, 90, saved, 0);
  ExpectExact(twin.Step(TokensOf(2, 40, 1)), "restored sequence");
  ExpectExact(twin.Step({{0, 40}, {1, 50}, {2, 41}}), "all of them");
}

INSTANTIATE_TEST_SUITE_P(Slices, StateTest,
                         ::testing::Values(Slices{"whole", 0}, Slices{"b1000", 1000},
                                           Slices{"b7", 7}, Slices{"mib", 1u << 20}),
                         [](const ::testing::TestParamInfo<Slices>& s) { return s.param.name; });

// Nothing has been computed in this session when the state arrives.
TEST(StateBeforeAnyStepTest, IsTakenInAndCutOff) {
  CacheSpec spec = TwoLayers();
  spec.n_cells = 512;
  Twin first(spec), second(spec);
  first.Step(TokensOf(0, 0, 300));
  const SavedState saved = Save(first.ours, 0, 0, 300);
  Restore(second.ours, 0, 0, saved);
  Restore(second.cpu, 0, 0, saved);
  second.cells.Place(TokensOf(0, 0, 300));
  second.cells.Remove(0, 200);
  second.cells.Seek(0, 201);  // cell 200 stays free: nothing is overwritten that would say so
  ExpectExact(second.Step(TokensOf(0, 200, 1)), "after a restore and a rollback");
  for (uint32_t cell = 256; cell < 300; ++cell) {
    EXPECT_EQ(second.ours.cache()->lookup(0, cell).window, kNone) << cell;
  }
}

TEST(StateOfStreamsTest, IsRestoredIntoAnotherStream) {
  Twin twin(TwoLayers(2));
  twin.Step(Join({TokensOf(0, 0, 30), TokensOf(1, 0, 30)}));
  const auto saved = Save(twin.ours, 0, 0, 30, 1000);
  Restore(twin.ours, 1, 0, saved, 1000);
  Restore(twin.cpu, 1, 0, saved, 0);
  ExpectExact(twin.Step({{0, 30}, {1, 30}}), "stream restored from the other one");
}

// A file that ends early: llama.cpp reports the failure and clears with zeros.
TEST(BadStateTest, TruncatedThenCleared) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 40));
  auto saved = Save(twin.ours, 0, 0, 40, 0);
  saved[2].resize(1003);  // K is complete, V is not
  saved[3].clear();
  twin.ours.Clear();
  Restore(twin.ours, 0, 0, saved, 0);
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
  const auto zeros = std::vector<uint8_t>(1u << 20);
  for (const bool is_k : {true, false}) {
    for (uint32_t il = 0; il < 2; ++il) {
      const size_t total = twin.ours.row_bytes(il, is_k) * 256;
      for (size_t at = 0; at < total; at += zeros.size()) {
        twin.ours.WriteState(il, is_k, 0, at, {zeros.data(), std::min(zeros.size(), total - at)});
      }
    }
  }
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
  twin.ours.Clear();
  twin.cpu.Clear();
  twin.cells.Clear();
  ExpectExact(twin.Step(TokensOf(0, 0, 30)), "after a failed restore");
}

// Zeros in slices that cut rows, over a sequence in the middle of the cache; its neighbours stay.
TEST(BadStateTest, ZeroFilledCellsAreGone) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 30));
  twin.Step(TokensOf(1, 0, 20));
  twin.Step(TokensOf(0, 30, 10));
  twin.cells.Remove(1, 0);
  for (const bool is_k : {true, false}) {
    for (uint32_t il = 0; il < 2; ++il) {
      const size_t row = twin.ours.row_bytes(il, is_k);
      const std::vector<uint8_t> zeros(20 * row);
      for (size_t at = 0; at < zeros.size(); at += 1000) {
        const size_t n = std::min<size_t>(1000, zeros.size() - at);
        twin.ours.WriteState(il, is_k, 0, 30 * row + at, {zeros.data(), n});
        twin.cpu.WriteState(il, is_k, 0, 30 * row + at, {zeros.data(), n});
      }
    }
  }
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
  ExpectExact(twin.Step(TokensOf(0, 40, 1)), "the neighbours of zeroed cells");
}

TEST(BadStateTest, RandomBytes) {
  Twin twin(TwoLayers());
  twin.Step(TokensOf(0, 0, 40));
  auto saved = Save(twin.ours, 0, 0, 40, 0);
  uint32_t x = 1;
  for (auto& part : saved) {
    for (uint8_t& b : part) b = static_cast<uint8_t>((x = x * 1664525u + 1013904223u) >> 24);
  }
  Restore(twin.ours, 0, 0, saved, 999);
  EXPECT_THAT(twin.ours.cache()->Validate(), IsEmpty());
  twin.ours.Clear();
  twin.cpu.Clear();
  twin.cells.Clear();
  ExpectExact(twin.Step(TokensOf(0, 0, 30)), "after garbage");
}

TEST(StateBeforeAnyStepTest, ReadsAsZeros) {
  Engine engine(TwoLayers(), Where::kQevict);
  const std::vector<uint8_t> bytes = engine.ReadState(0, true, 0, 5, 999);
  EXPECT_EQ(std::count(bytes.begin(), bytes.end(), 0), 999);
}

}  // namespace
}  // namespace qevict::plugin::testing
