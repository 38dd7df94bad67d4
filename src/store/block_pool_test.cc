#include "store/block_pool.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <set>

namespace qevict {
namespace {

class BlockPoolTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(pool_.Init(arena_, kBytes, 1000, true).ok()); }
  BlockId Make(uint8_t value) {
    EXPECT_TRUE(pool_.Reserve(1).ok());
    const BlockId id = pool_.New();
    std::memset(pool_.data(id), value, kBytes);
    return id;
  }
  uint64_t Held() const { return pool_.page_bytes() + pool_.table_bytes(); }

  static constexpr size_t kBytes = 200;
  Arena arena_;
  BlockPool pool_;
};

TEST_F(BlockPoolTest, HandlesOutliveMoves) {
  const BlockId a = Make(1), b = Make(2), c = Make(3);
  pool_.Unref(a);
  EXPECT_EQ(pool_.used(), 2u);
  EXPECT_EQ(pool_.data(b)[7], 2);
  EXPECT_EQ(pool_.data(c)[7], 3);
  EXPECT_EQ(Make(4), a) << "free handles are used again";
}

TEST_F(BlockPoolTest, SharedBlocksGoWithTheLastReference) {
  const BlockId a = Make(1);
  ASSERT_TRUE(pool_.Ref(a));
  pool_.Unref(a);
  EXPECT_EQ(pool_.used(), 1u);
  pool_.Unref(a);
  EXPECT_EQ(pool_.used(), 0u);
}

TEST_F(BlockPoolTest, ReferencesAreCountedUpToTheirLimit) {
  const BlockId a = Make(1);
  for (uint32_t i = 1; i < BlockPool::kMaxRefs; ++i) ASSERT_TRUE(pool_.Ref(a));
  EXPECT_FALSE(pool_.Ref(a));
  EXPECT_EQ(pool_.refs(a), BlockPool::kMaxRefs);
}

TEST_F(BlockPoolTest, NewBlocksAreZero) {
  pool_.Unref(Make(9));
  ASSERT_TRUE(pool_.Reserve(1).ok());
  const BlockId id = pool_.New();
  EXPECT_EQ(pool_.data(id)[0], 0);
  EXPECT_EQ(pool_.data(id)[kBytes - 1], 0);
}

TEST_F(BlockPoolTest, SealedBlocksThatChangeAreFound) {
  const BlockId a = Make(1), b = Make(2);
  pool_.Seal(a);
  pool_.Seal(b);
  EXPECT_TRUE(pool_.Damaged().empty());
  pool_.data(b)[5] ^= 1;
  EXPECT_EQ(pool_.Damaged().size(), 1u);
}

TEST_F(BlockPoolTest, RefusedGrowthChangesNothing) {
  (void)Make(1);
  const uint64_t before = Held();
  arena_.FailGrowthAt(1);
  EXPECT_FALSE(pool_.Reserve(100).ok());
  EXPECT_EQ(pool_.used(), 1u);
  EXPECT_LE(Held(), before + 200);
}

// Random calls beside a map of what each block must hold.
TEST_F(BlockPoolTest, RandomCallsAgreeWithAMap) {
  std::mt19937 random(7);
  std::map<BlockId, std::pair<uint8_t, uint32_t>> model;
  for (int step = 0; step < 20000; ++step) {
    const uint32_t what = random() % 10;
    auto some = model.begin();
    if (!model.empty()) std::advance(some, random() % model.size());
    if (model.empty() || (what < 4 && model.size() < 300)) {
      const uint64_t growth = pool_.GrowthBytes(1), before = Held();
      ASSERT_TRUE(pool_.Reserve(1).ok());
      ASSERT_EQ(Held(), before + growth);
      const auto value = static_cast<uint8_t>(random());
      const BlockId id = pool_.New();
      ASSERT_FALSE(model.contains(id));
      std::memset(pool_.data(id), value, kBytes);
      pool_.Seal(id);
      model[id] = {value, 1};
    } else if (what == 4) {
      ASSERT_TRUE(pool_.Ref(some->first));
      ++some->second.second;
    } else if (what < 9) {
      pool_.Unref(some->first);
      if (--some->second.second == 0) model.erase(some);
      if (random() % 8 == 0) pool_.Trim();
    } else if (pool_.WantsCompaction() || random() % 50 == 0) {
      const std::vector<BlockId> to = pool_.Compact();
      std::map<BlockId, std::pair<uint8_t, uint32_t>> moved;
      for (const auto& [id, entry] : model) moved[to[id]] = entry;
      model.swap(moved);
    }
    ASSERT_EQ(pool_.used(), model.size());
    if (step % 100 != 0) continue;
    ASSERT_TRUE(pool_.Damaged().empty());
    for (const auto& [id, entry] : model) {
      ASSERT_EQ(pool_.data(id)[step % kBytes], entry.first);
      ASSERT_EQ(pool_.refs(id), entry.second);
    }
  }
}

}  // namespace
}  // namespace qevict
