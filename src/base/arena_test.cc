#include "base/arena.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

namespace qevict {
namespace {

size_t Page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }
size_t Pages(size_t bytes) { return (bytes + Page() - 1) / Page() * Page(); }

ArenaRegion* Add(Arena& arena, size_t slot_bytes, size_t max_slots) {
  Result<ArenaRegion*> region = arena.AddRegion(slot_bytes, max_slots);
  EXPECT_TRUE(region.ok()) << region.status().message();
  return region.ok() ? *region : nullptr;
}

TEST(ArenaTest, ReservationCostsNoMemory) {
  Arena arena;
  ArenaRegion* region = Add(arena, 32768, 1 << 20);  // 32 GiB of address space
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(region->n_slots(), 0u);
  EXPECT_EQ(region->max_slots(), size_t{1} << 20);
  EXPECT_EQ(arena.bytes(), 0u);
  EXPECT_EQ(arena.ResidentBytes(), 0u);
}

TEST(ArenaTest, CountsWholePagesAndPeak) {
  Arena arena;
  ArenaRegion* region = Add(arena, 1000, 100);
  ASSERT_TRUE(region->Resize(1).ok());
  EXPECT_EQ(arena.bytes(), Page());
  ASSERT_TRUE(region->Resize(4).ok());
  EXPECT_EQ(arena.bytes(), Pages(4000));
  ASSERT_TRUE(region->Resize(50).ok());
  EXPECT_EQ(arena.bytes(), Pages(50000));
  ASSERT_TRUE(region->Resize(0).ok());
  EXPECT_EQ(arena.bytes(), 0u);
  EXPECT_EQ(arena.ResidentBytes(), 0u);
  EXPECT_EQ(arena.peak_bytes(), Pages(50000));
  arena.ResetPeak();
  EXPECT_EQ(arena.peak_bytes(), 0u);
}

TEST(ArenaTest, SlotsKeepTheirAddressAndContents) {
  Arena arena;
  ArenaRegion* region = Add(arena, 544, 10000);
  ASSERT_TRUE(region->Resize(3).ok());
  uint8_t* first = region->slot(0);
  std::memset(region->slot(2), 7, 544);
  ASSERT_TRUE(region->Resize(9000).ok());
  EXPECT_EQ(region->slot(0), first);
  EXPECT_EQ(region->slot(2)[543], 7);
  EXPECT_EQ(region->slot(3)[0], 0);
}

TEST(ArenaTest, NewSlotsAreZeroAfterShrinking) {
  Arena arena;
  ArenaRegion* region = Add(arena, 100, 1000);
  constexpr size_t bytes = size_t{200} * 100;
  ASSERT_TRUE(region->Resize(200).ok());
  std::memset(region->slot(0), 0xFF, bytes);
  ASSERT_TRUE(region->Resize(1).ok());
  ASSERT_TRUE(region->Resize(200).ok());
  for (size_t i = 0; i < 100; ++i) ASSERT_EQ(region->slot(0)[i], 0xFF);
  for (size_t i = 100; i < bytes; ++i) ASSERT_EQ(region->slot(0)[i], 0) << i;
}

TEST(ArenaTest, LimitRefusesGrowthAndChangesNothing) {
  Arena arena;
  ArenaRegion* a = Add(arena, Page(), 100);
  ArenaRegion* b = Add(arena, Page(), 100);
  arena.SetLimit(10 * Page());
  ASSERT_TRUE(a->Resize(6).ok());
  const Status refused = b->Resize(5);
  EXPECT_EQ(refused.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find(std::to_string(10 * Page())), std::string::npos)
      << refused.message();
  EXPECT_EQ(b->n_slots(), 0u);
  EXPECT_EQ(arena.bytes(), 6 * Page());
  ASSERT_TRUE(b->Resize(4).ok());
  EXPECT_EQ(arena.bytes(), arena.limit());
  // Lowering the limit below what is held refuses growth only.
  arena.SetLimit(Page());
  EXPECT_FALSE(a->Resize(7).ok());
  ASSERT_TRUE(a->Resize(5).ok());
  EXPECT_EQ(arena.ResidentBytes(), 9 * Page());
}

TEST(ArenaTest, GrowthInsideACommittedPageIsAlwaysAllowed) {
  Arena arena;
  ArenaRegion* region = Add(arena, 16, 100);
  ASSERT_TRUE(region->Resize(1).ok());
  arena.SetLimit(0);
  EXPECT_TRUE(region->Resize(100).ok());
}

TEST(ArenaTest, ReservationIsAHardEnd) {
  Arena arena;
  ArenaRegion* region = Add(arena, 64, 10);
  EXPECT_EQ(region->Resize(11).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(region->Resize(SIZE_MAX).code(), StatusCode::kResourceExhausted);
  EXPECT_TRUE(region->Resize(10).ok());
}

TEST(ArenaTest, ImpossibleRegionsAreRefused) {
  Arena arena;
  EXPECT_EQ(arena.AddRegion(0, 1).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(arena.AddRegion(SIZE_MAX, 2).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(arena.AddRegion(1, SIZE_MAX / 2 - 5 * Page()).status().code(),
            StatusCode::kResourceExhausted);
  ArenaRegion* empty = Add(arena, 8, 0);
  EXPECT_TRUE(empty->Resize(0).ok());
  EXPECT_FALSE(empty->Resize(1).ok());
}

TEST(ArenaTest, GrowthFailsAtTheNthCall) {
  Arena arena;
  ArenaRegion* region = Add(arena, 64, 1000);
  arena.FailGrowthAt(2);
  EXPECT_TRUE(region->Resize(1).ok());
  EXPECT_TRUE(region->Resize(0).ok());  // no growth
  EXPECT_EQ(region->Resize(5).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(region->n_slots(), 0u);
  EXPECT_TRUE(region->Resize(5).ok());  // the hook fires once
}

TEST(ArenaDeathTest, MemoryOutsideTheSlotsIsNotAccessible) {
  Arena arena;
  ArenaRegion* region = Add(arena, Page(), 4);
  ASSERT_TRUE(region->Resize(2).ok());
  EXPECT_DEATH(*static_cast<volatile uint8_t*>(region->slot(2)) = 1, "");
  EXPECT_DEATH(*static_cast<volatile uint8_t*>(region->slot(0) - 1) = 1, "");
}

// Random growing, shrinking, failing and writing against vectors that do the same without any
// memory tricks.
TEST(ArenaTest, MatchesNaiveModel) {
  std::mt19937 rng(42);
  const auto pick = [&](size_t n) { return static_cast<size_t>(rng() % n); };
  Arena arena;
  struct Model {
    ArenaRegion* region;
    size_t slot_bytes, max_slots;
    std::vector<std::vector<uint8_t>> slots;
  };
  std::vector<Model> models;
  for (size_t slot_bytes : {16, 100, 544, 4096, 5000, 33000}) {
    const size_t max_slots = 400000 / slot_bytes + 1;
    models.push_back({Add(arena, slot_bytes, max_slots), slot_bytes, max_slots, {}});
  }
  arena.SetLimit(600000);
  size_t peak = 0;
  for (int step = 0; step < 2000; ++step) {
    Model& m = models[pick(models.size())];
    const bool small = pick(2) == 0;
    const size_t now = m.slots.size();
    const size_t n = small ? std::min(m.max_slots, now + pick(3)) - (now > 1 ? pick(2) : 0)
                           : pick(m.max_slots + 2);
    const bool injected = pick(10) == 0;
    arena.FailGrowthAt(injected ? 1 : 0);
    const size_t others = arena.bytes() - m.region->bytes();
    const bool grows = n > now;
    const bool fits = n <= m.max_slots && !(grows && injected) &&
                      (Pages(n * m.slot_bytes) <= m.region->bytes() ||
                       others + Pages(n * m.slot_bytes) <= 600000);
    ASSERT_EQ(m.region->Resize(n).ok(), fits) << "step " << step;
    arena.FailGrowthAt(0);
    if (fits) m.slots.resize(n, std::vector<uint8_t>(m.slot_bytes, 0));
    if (!m.slots.empty()) {
      const size_t i = pick(m.slots.size());
      const uint8_t value = static_cast<uint8_t>(rng());
      std::fill(m.slots[i].begin(), m.slots[i].end(), value);
      std::memset(m.region->slot(i), value, m.slot_bytes);
    }
    size_t total = 0;
    for (const Model& each : models) {
      ASSERT_EQ(each.region->n_slots(), each.slots.size());
      ASSERT_EQ(each.region->bytes(), Pages(each.slots.size() * each.slot_bytes));
      total += each.region->bytes();
    }
    ASSERT_EQ(arena.bytes(), total);
    peak = std::max(peak, total);
    ASSERT_EQ(arena.peak_bytes(), peak);
    for (size_t i = 0; i < m.slots.size(); ++i) {
      ASSERT_EQ(std::memcmp(m.region->slot(i), m.slots[i].data(), m.slot_bytes), 0)
          << "step " << step << " slot " << i;
    }
    if (step % 50 == 0) {
      ASSERT_EQ(arena.ResidentBytes(), arena.bytes()) << "step " << step;
    }
  }
}

// Neighbouring regions of equal permission must not blur each other's figures.
TEST(ArenaTest, ResidentBytesTellArenasApart) {
  Arena a, b;
  std::vector<ArenaRegion*> in_a, in_b;
  for (int i = 0; i < 20; ++i) {
    in_a.push_back(Add(a, Page(), 3));
    in_b.push_back(Add(b, Page(), 3));
  }
  for (ArenaRegion* region : in_a) ASSERT_TRUE(region->Resize(3).ok());
  for (ArenaRegion* region : in_b) ASSERT_TRUE(region->Resize(1).ok());
  EXPECT_EQ(a.bytes(), 60 * Page());
  EXPECT_EQ(a.ResidentBytes(), 60 * Page());
  EXPECT_EQ(b.ResidentBytes(), 20 * Page());
}

}  // namespace
}  // namespace qevict
