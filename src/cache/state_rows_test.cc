#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "cache/row_format.h"
#include "cache/test_support.h"

namespace qevict {
namespace {

constexpr uint32_t kCells = 512;

Config MakeConfig() {
  Config config;
  config.budget_fraction = 0.5;
  config.budget_tokens = 400;
  config.check = true;
  return config;
}
std::vector<LayerShape> Layers() { return {Shape(2, 32, 32), Shape(2, 32, 32)}; }

/// All rows of one stream: [layer][K, V].
struct Saved {
  std::vector<std::vector<uint16_t>> k, v;
};

size_t Words(const Engine& e, uint32_t il, bool is_k) {
  const LayerShape& s = e.shapes()[il];
  return size_t{s.n_kv_heads} * (is_k ? s.head_dim : s.head_dim_v);
}

Saved Save(Engine& e, uint32_t stream, uint32_t n = kCells) {
  Saved saved;
  for (uint32_t il = 0; il < e.n_layers(); ++il) {
    saved.k.emplace_back(n * Words(e, il, true));
    saved.v.emplace_back(n * Words(e, il, false));
    for (uint32_t c = 0; c < n; ++c) {
      e.cache().ReadRowK(il, stream, c, saved.k[il].data() + c * Words(e, il, true));
    }
  }
  for (uint32_t il = 0; il < e.n_layers(); ++il) {
    for (uint32_t c = 0; c < n; ++c) {
      e.cache().ReadRowV(il, stream, c, saved.v[il].data() + c * Words(e, il, false));
    }
  }
  return saved;
}

/// Restores the first n cells; the first error is returned, but all rows are offered.
Status Restore(Engine& e, uint32_t stream, const Saved& saved, uint32_t n = kCells) {
  Status first;
  for (const bool is_k : {true, false}) {
    for (uint32_t il = 0; il < e.n_layers(); ++il) {
      Status status = is_k ? e.cache().RestoreRowsK(il, stream, 0, n, saved.k[il].data())
                           : e.cache().RestoreRowsV(il, stream, 0, n, saved.v[il].data());
      if (first.ok()) first = std::move(status);
    }
  }
  e.cache().FinishRestore();
  e.ExpectSound("restored");
  return first;
}

class StateRowsTest : public testing::Test {
 protected:
  void SetUp() override { Make(MakeConfig(), Layers()); }
  void Make(const Config& config, const std::vector<LayerShape>& layers) {
    e_ = std::make_unique<Engine>(config, layers, 2, kCells);
    ASSERT_TRUE(e_->status.ok()) << e_->status.message();
    e_->UseRope(TestRope(8));
    seq_ = e_->NewSequence(0);
  }
  /// A sequence with windows in every tier.
  void Fill(uint32_t prompt = 400, uint32_t decode = 12) {
    ASSERT_TRUE(e_->Prompt(seq_, prompt, 100).ok());
    ASSERT_TRUE(e_->Decode(seq_, decode).ok());
  }
  /// Cell of some packed token in layer il.
  uint32_t PackedCell(uint32_t il) {
    for (uint32_t cell = 0; cell < kCells; ++cell) {
      bool packed = false;
      const TokenRef ref = e_->cache().lookup(0, cell);
      if (ref.window != kNone && !e_->Read(il, ref, true, &packed).empty() && packed) return cell;
    }
    return kNone;
  }
  std::unique_ptr<Engine> e_;
  SeqId seq_ = 0;
};

TEST_F(StateRowsTest, AStreamComesBackBitByBit) {
  Fill();
  const CacheStats before = e_->cache().Stats();
  ASSERT_GT(before.tokens.packed, 0u);
  ASSERT_GT(before.tokens.evicted, 0u);
  const Status status = Restore(*e_, 1, Save(*e_, 0));
  ASSERT_TRUE(status.ok()) << status.message();
  const CacheStats after = e_->cache().Stats();
  EXPECT_EQ(after.tokens.packed, 2 * before.tokens.packed);
  EXPECT_EQ(after.tokens.full, 2 * before.tokens.full);
  EXPECT_EQ(after.tokens.evicted, 2 * before.tokens.evicted);
  for (uint32_t cell = 0; cell < kCells; ++cell) {
    const TokenRef a = e_->cache().lookup(0, cell), b = e_->cache().lookup(1, cell);
    ASSERT_EQ(a.window == kNone, b.window == kNone) << cell;
    if (a.window == kNone) continue;
    ASSERT_EQ(a.offset, b.offset);
    ASSERT_EQ(e_->cache().info(a.window).pos0, e_->cache().info(b.window).pos0);
    ASSERT_EQ(e_->cache().info(a.window).sink, e_->cache().info(b.window).sink);
    for (uint32_t il = 0; il < 2; ++il) {
      ASSERT_EQ(e_->Read(il, a, true), e_->Read(il, b, true)) << cell;
      ASSERT_EQ(e_->Read(il, a, false), e_->Read(il, b, false)) << cell;
      ASSERT_EQ(e_->cache().score(il, a.window), e_->cache().score(il, b.window));
    }
  }
}

TEST_F(StateRowsTest, ARestoredSequenceGoesOn) {
  Fill();
  ASSERT_TRUE(Restore(*e_, 1, Save(*e_, 0)).ok());
  ASSERT_EQ(e_->cache().Sequences(1).size(), 1u);
  const SeqId copy = e_->cache().Sequences(1)[0];
  EXPECT_EQ(e_->cache().tail_pos(copy), e_->cache().tail_pos(seq_));
  EXPECT_EQ(e_->cache().n_tokens(copy), e_->cache().n_tokens(seq_));
  const size_t n_windows = e_->cache().windows(copy).size();
  e_->next_pos(copy) = e_->cache().tail_pos(copy) + 1;
  e_->next_cell(1) = e_->next_cell(0);
  ASSERT_TRUE(e_->Decode(copy, 1).ok());
  EXPECT_LE(e_->cache().windows(copy).size(), n_windows + 1);
  ASSERT_TRUE(e_->Decode(copy, 40).ok());
  e_->ExpectSound();
}

TEST_F(StateRowsTest, HeaderBytesAreAsSpecified) {
  RowRecord r;
  r.kind = RowKind::kPackedV;
  r.bits = 2;
  r.window = 8;
  r.flags = RowRecord::kPositional;
  r.offset = 3;
  r.n_tokens = 7;
  r.share = 2;
  r.n_shares = 6;
  r.birth = 0x01020304;
  r.pos0 = -2;
  r.score = 1.0f;
  uint16_t row[16] = {};
  WriteRowHeader(r, row);
  const uint8_t want[kRowHeaderBytes] = {0xD1, 0x7F, 0xD6, 0x7F, 1,    2,    0x32, 1,
                                         3,    7,    2,    6,    0x04, 0x03, 0x02, 0x01,
                                         0xFE, 0xFF, 0xFF, 0xFF, 0,    0,    0x80, 0x3F};
  EXPECT_EQ(std::memcmp(row, want, sizeof want), 0);
  Config config;
  const Result<RowRecord> back = ReadRowHeader(row, 16, config, false);
  ASSERT_TRUE(back.ok()) << back.status().message();
  EXPECT_EQ(back->birth, r.birth);
  EXPECT_EQ(back->pos0, -2);
  EXPECT_EQ(back->score, 1.0f);
  EXPECT_EQ(back->n_shares, 6);
}

// Keys of a model without RoPE are equal wherever a token is repeated.
TEST(RowChainTest, EqualRowsAtOtherPlacesDiffer) {
  const uint16_t a[8] = {1, 2, 3}, b[8] = {4, 5, 6};
  RowChain saved, restored;
  std::vector<uint64_t> first, second;
  for (uint32_t i = 0; i < 20; ++i) first.push_back(saved.Next(1, i, i % 3 ? a : b, 8));
  for (uint32_t i = 0; i < 20; ++i) second.push_back(restored.Next(1, 70 + i, i % 3 ? a : b, 8));
  EXPECT_EQ(first, second);
  EXPECT_EQ(saved.Next(1, 19, a, 8), first.back()) << "the same cell, read again";
  std::sort(first.begin(), first.end());
  EXPECT_EQ(std::unique(first.begin(), first.end()), first.end());
  EXPECT_NE(RowChain{}.Next(0, 0, a, 8), RowChain{}.Next(1, 0, a, 8));
}

TEST_F(StateRowsTest, CellsNeverWrittenAreZerosAndZerosKill) {
  Fill(60, 4);
  std::vector<uint16_t> row(64, 1);
  e_->cache().ReadRowK(0, 0, 300, row.data());
  EXPECT_TRUE(IsZeroRow(row.data(), 64));
  const std::vector<uint16_t> zeros(64 * 64);
  ASSERT_TRUE(e_->cache().RestoreRowsK(0, 0, 0, 64, zeros.data()).ok());
  e_->cache().FinishRestore();
  EXPECT_TRUE(e_->cache().Sequences(0).empty());
  e_->ExpectSound();
}

TEST_F(StateRowsTest, UnknownRowsBecomeTokensWithoutPositions) {
  Saved saved;
  for (uint32_t il = 0; il < 2; ++il) {
    saved.k.emplace_back(kCells * 64);
    saved.v.emplace_back(kCells * 64);
    for (size_t i = 0; i < 40 * 64; ++i) {
      saved.k[il][i] = F32ToF16(Noise(991, il, i));
      saved.v[il][i] = F32ToF16(Noise(992, il, i));
    }
  }
  ASSERT_TRUE(Restore(*e_, 1, saved).ok());
  const SeqId seq = e_->cache().Sequences(1).at(0);
  EXPECT_EQ(e_->cache().n_tokens(seq), 40u);
  for (const WindowId w : e_->cache().windows(seq)) EXPECT_EQ(e_->cache().info(w).pos_stride, 0);
  const TokenRef ref = e_->cache().lookup(1, 17);
  EXPECT_EQ(e_->Read(0, ref, true)[5],
            Noise(991, 0, 17 * 64 + 5) == 0 ? 0.0f : F16ToF32(saved.k[0][17 * 64 + 5]));
}

TEST_F(StateRowsTest, DamagedRecordsLoseTheirTokenAndNothingElse) {
  Fill();
  const Saved good = Save(*e_, 0);
  const uint32_t cell = PackedCell(0);
  ASSERT_NE(cell, kNone);
  struct Damage {
    size_t byte;
    uint8_t value;
    StatusCode code;
  };
  for (const Damage& d :
       {Damage{4, 2, StatusCode::kUnimplemented}, Damage{4, 0, StatusCode::kDataLoss},
        Damage{5, 9, StatusCode::kDataLoss}, Damage{5, 2, StatusCode::kDataLoss},
        Damage{6, 0x34, StatusCode::kDataLoss}, Damage{6, 0x42, StatusCode::kDataLoss},
        Damage{7, 0x80, StatusCode::kDataLoss}, Damage{8, 31, StatusCode::kDataLoss},
        Damage{9, 9, StatusCode::kDataLoss}, Damage{10, 40, StatusCode::kDataLoss},
        Damage{11, 0, StatusCode::kDataLoss}, Damage{19, 0x7F, StatusCode::kDataLoss}}) {
    Saved bad = good;
    reinterpret_cast<uint8_t*>(bad.k[0].data() + cell * Words(*e_, 0, true))[d.byte] = d.value;
    const Status status = Restore(*e_, 1, bad);
    EXPECT_EQ(status.code(), d.code) << "byte " << d.byte << ": " << status.message();
    EXPECT_EQ(e_->cache().lookup(1, cell).window, kNone) << "byte " << d.byte;
    uint32_t n_lost = 0;
    for (uint32_t c = 0; c < kCells; ++c) {
      const bool there = e_->cache().lookup(0, c).window != kNone;
      n_lost += there && e_->cache().lookup(1, c).window == kNone ? 1 : 0;
    }
    EXPECT_LE(n_lost, 8u) << "byte " << d.byte;
  }
}

TEST_F(StateRowsTest, AnIncompleteRestoreKeepsWhatIsComplete) {
  Fill();
  const Saved saved = Save(*e_, 0);
  ASSERT_TRUE(Restore(*e_, 1, saved, 203).ok());
  EXPECT_GT(e_->cache().n_tokens(e_->cache().Sequences(1).at(0)), 0u);
  // Keys without values.
  ASSERT_TRUE(e_->cache().RestoreRowsK(0, 1, 0, kCells, saved.k[0].data()).ok());
  e_->ExpectSound("keys of one layer");
  e_->cache().FinishRestore();
  e_->ExpectSound("finished");
}

TEST_F(StateRowsTest, ValuesWithoutKeysAreRefusedAndNothingIsLost) {
  Fill();
  const Saved saved = Save(*e_, 0);
  const uint64_t n = e_->cache().n_tokens(seq_);
  EXPECT_EQ(e_->cache().RestoreRowsV(0, 0, 0, kCells, saved.v[0].data()).code(),
            StatusCode::kFailedPrecondition);
  EXPECT_EQ(e_->cache().n_tokens(seq_), n);
  e_->ExpectSound();
}

TEST_F(StateRowsTest, RecordsOfAnotherConfigurationAreRefused) {
  Fill();
  const Saved saved = Save(*e_, 0);
  Config other = MakeConfig();
  other.bits = 4;
  Engine e(other, Layers(), 2, kCells);
  e.UseRope(TestRope(8));
  const Status status = Restore(e, 1, saved);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("bits"), std::string::npos);
}

TEST_F(StateRowsTest, RowsTooShortForRecordsComeBackAsRows) {
  Make(MakeConfig(), std::vector<LayerShape>(8, Shape(1, 8, 8)));
  Fill();
  ASSERT_GT(e_->cache().Stats().tokens.packed, 0u);
  const Saved saved = Save(*e_, 0);
  ASSERT_TRUE(Restore(*e_, 1, saved).ok());
  for (uint32_t cell = 0; cell < kCells; ++cell) {
    const TokenRef a = e_->cache().lookup(0, cell), b = e_->cache().lookup(1, cell);
    if (a.window == kNone || b.window == kNone) continue;
    const std::vector<float> want = e_->Read(0, a, true), got = e_->Read(0, b, true);
    for (size_t i = 0; i < want.size() && i < got.size(); ++i) {
      ASSERT_NEAR(want[i], got[i], 0.001f) << cell;
    }
  }
}

TEST_F(StateRowsTest, ARestoreUnderTheLimitMakesRoom) {
  Config config;
  config.budget_bytes = 100000;
  config.check = true;
  Make(config, Layers());
  // Two sequences share the budget; one is saved and taken away, the other one takes its place.
  const SeqId other = e_->NewSequence(1);
  for (const SeqId seq : {seq_, other}) {
    const Status prompt = e_->Prompt(seq, 300, 50);
    ASSERT_TRUE(prompt.ok()) << prompt.message();
    ASSERT_TRUE(e_->Decode(seq, 9).ok());
  }
  const Saved saved = Save(*e_, 0);
  for (uint32_t cell = 0; cell < kCells; ++cell) e_->cache().Kill(0, cell);
  ASSERT_TRUE(e_->Prompt(other, 150, 75).ok());  // more rows than a draft brings
  ASSERT_TRUE(e_->Decode(other, 9).ok());
  ASSERT_GT(e_->cache().Stats().bytes.total(), 70000u);
  const Status status = Restore(*e_, 0, saved);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(e_->cache().n_tokens(e_->cache().Sequences(0).at(0)), 309u);
  EXPECT_LE(e_->cache().Stats().bytes.total(), config.budget_bytes);
  ASSERT_TRUE(e_->Decode(other, 9).ok());
}

TEST_F(StateRowsTest, APositionBeyondTheBudgetsRopeTablesIsRefused) {
  Config config;
  config.budget_bytes = 110000;
  config.check = true;
  Make(config, Layers());
  e_->UseRope(TestRope(8));
  ASSERT_TRUE(e_->Prompt(seq_, 300, 50).ok());
  ASSERT_TRUE(e_->Decode(seq_, 9).ok());
  Saved saved = Save(*e_, 0);
  const uint32_t cell = PackedCell(0);
  ASSERT_NE(cell, kNone);
  reinterpret_cast<uint8_t*>(saved.k[0].data() + cell * Words(*e_, 0, true))[18] = 0x20;
  const Status status = Restore(*e_, 1, saved);
  EXPECT_EQ(status.code(), StatusCode::kDataLoss) << status.message();
  EXPECT_LE(e_->cache().Stats().bytes.total(), config.budget_bytes);
  e_->ExpectSound("restore");
}

TEST_F(StateRowsTest, RandomRowsNeverBreakTheCache) {
  Fill();
  const Saved good = Save(*e_, 0);
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    Saved bad = good;
    for (int i = 0; i < 40; ++i) {
      auto& rows = (random() & 1) ? bad.k : bad.v;
      auto& words = rows[random() % 2];
      uint8_t* bytes = reinterpret_cast<uint8_t*>(words.data());
      const size_t row = random() % kCells;
      bytes[row * 128 + random() % kRowHeaderBytes] = static_cast<uint8_t>(random());
    }
    (void)Restore(*e_, random() % 2, bad);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace qevict
