#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "policy/history.h"

namespace qevict {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

Config QEvict(uint32_t q_permille = 700) {
  Config c;
  c.q_permille = q_permille;
  return c;
}

std::vector<Candidate> FullWindows(const std::vector<float>& scores) {
  std::vector<Candidate> windows;
  for (uint32_t i = 0; i < scores.size(); ++i)
    windows.push_back({i, scores[i], Tier::kFull, false, i});
  return windows;
}

/// Window ids in a tier.
std::vector<uint32_t> InTier(const std::vector<Candidate>& c, const HistoryPlan& plan, Tier tier) {
  std::vector<uint32_t> ids;
  for (size_t i = 0; i < c.size(); ++i) {
    if (plan.placements[i].tier == tier) ids.push_back(c[i].window);
  }
  return ids;
}

using Ids = std::vector<uint32_t>;

/// Bytes that a plan occupies: rows and codes, dormant ones if asked.
uint64_t PlanBytes(const HistoryInput& in, const HistoryPlan& plan, bool with_dormant) {
  uint64_t total = 0;
  for (size_t i = 0; i < in.candidates.size(); ++i) {
    const Tier tier = plan.placements[i].tier;
    if (tier == Tier::kPacked) total += in.costs.packed_bytes;
    if (tier != Tier::kFull) continue;
    total += in.costs.full_bytes;
    if (with_dormant && in.candidates[i].has_codes) total += in.costs.packed_bytes;
  }
  return total;
}

// ---- Capacities: 8 kv heads, D = 128, W = 8 ----

HistoryCosts LlamaCosts(uint32_t bits, uint64_t meta) {
  const uint64_t heads = 8, d = 128, w = 8;
  return {4 * heads * d * w, 2 * heads * d * w * bits / 8 + 4 * heads * d + 4 * heads * w + meta};
}

TEST(QEvictTest, CapacityTable) {
  EXPECT_EQ(LlamaCosts(2, 0).full_bytes, 32768u);
  EXPECT_EQ(LlamaCosts(2, 0).packed_bytes, 8448u);
  EXPECT_EQ(LlamaCosts(4, 0).packed_bytes, 12544u);
  struct Row {
    uint64_t tokens, permille, history, k_f, k_q, k_q_meta, accessible, k_q_int4;
  };
  const Row rows[] = {{32768, 200, 26689536, 244, 2211, 2207, 19677, 1489},
                      {32768, 50, 6557696, 60, 543, 542, 4861, 365},
                      {4096, 50, 684032, 6, 56, 56, 533, 38}};
  for (const Row& r : rows) {
    const uint64_t budget_tokens = r.tokens * r.permille / 1000;
    const uint64_t history = (budget_tokens - 5 - 32) * 4096;
    EXPECT_EQ(history, r.history);
    const auto capacity = [&](uint32_t bits, uint64_t meta) {
      const HistoryPlan plan = PlanQEvict({{}, LlamaCosts(bits, meta), history}, QEvict());
      return std::pair(plan.n_full_capacity, plan.n_packed_capacity);
    };
    EXPECT_EQ(capacity(2, 0), std::pair(r.k_f, r.k_q));
    EXPECT_EQ(capacity(2, 16), std::pair(r.k_f, r.k_q_meta));
    EXPECT_EQ(capacity(4, 0), std::pair(r.k_f, r.k_q_int4));
    EXPECT_EQ((r.k_f + r.k_q) * 8 + 5 + 32, r.accessible);
  }
}

TEST(QEvictTest, CapacitiesSurviveHugeBudgets) {
  const uint64_t history = uint64_t{1} << 59;
  const HistoryPlan plan = PlanQEvict({{}, {1 << 20, 1 << 18}, history}, QEvict(1000));
  EXPECT_EQ(plan.n_full_capacity, 0u);
  EXPECT_EQ(plan.n_packed_capacity, uint64_t{1} << 41);
}

// ---- Routing: sequences of events, computed by hand ----

/// The cache as the vectors see it: windows with scores, tiers and a write-once ledger.
struct Simulation {
  struct Window {
    float score = 0;
    Tier tier = Tier::kFull;
    bool has_codes = false;
  };
  std::map<uint32_t, Window> windows;
  std::set<uint32_t> quantized;  // in all events
  std::vector<Candidate> candidates;
  HistoryPlan plan;

  void Event(const Config& config) {
    candidates.clear();
    for (const auto& [id, w] : windows)
      candidates.push_back({id, w.score, w.tier, w.has_codes, id});
    plan = PlanQEvict({candidates, {300, 100}, 500}, config);  // K_f = 1, K_q = 2 at q = 0.4
    EXPECT_EQ(plan.n_full_capacity, 1u);
    EXPECT_EQ(plan.n_packed_capacity, 2u);
    for (size_t i = 0; i < candidates.size(); ++i) {
      const uint32_t id = candidates[i].window;
      if (plan.placements[i].tier == Tier::kEvicted) {
        windows.erase(id);
        continue;
      }
      Window& w = windows[id];
      w.tier = plan.placements[i].tier;
      if (w.tier == Tier::kPacked && !w.has_codes) {
        w.has_codes = true;
        EXPECT_TRUE(quantized.insert(id).second) << "window " << id << " quantized twice";
      }
    }
  }
  Ids In(Tier tier) const { return InTier(candidates, plan, tier); }
};

TEST(QEvictTest, SpecificationEvents) {
  Config config = QEvict(400);
  config.charge_dormant = false;
  Simulation s;
  s.windows = {{0, {3.0f}}, {1, {1.0f}}, {2, {2.0f}}, {3, {.5f}}};
  s.Event(config);
  EXPECT_EQ(s.In(Tier::kFull), Ids{0});
  EXPECT_EQ(s.In(Tier::kPacked), (Ids{1, 2}));
  EXPECT_EQ(s.In(Tier::kEvicted), Ids{3});
  EXPECT_EQ(s.quantized, (std::set<uint32_t>{1, 2}));

  s.windows[0].score += .1f;
  s.windows[1].score += 2.5f;
  s.windows[2].score += .2f;
  s.windows[4].score = .6f;
  s.Event(config);
  EXPECT_EQ(s.In(Tier::kFull), Ids{1});
  EXPECT_EQ(s.In(Tier::kPacked), (Ids{0, 2}));
  EXPECT_EQ(s.In(Tier::kEvicted), Ids{4});
  EXPECT_EQ(s.quantized, (std::set<uint32_t>{0, 1, 2}));

  s.windows[0].score += 1.0f;
  s.windows[1].score += .1f;
  s.windows[2].score += .2f;
  s.windows[5].score = .9f;
  s.Event(config);
  EXPECT_EQ(s.In(Tier::kFull), Ids{0});
  EXPECT_EQ(s.In(Tier::kPacked), (Ids{1, 2}));
  EXPECT_EQ(s.In(Tier::kEvicted), Ids{5});
  EXPECT_EQ(s.quantized.size(), 3u);
}

TEST(QEvictTest, SpecificationEventsWithDormantCodesCharged) {
  const Config config = QEvict(400);
  Simulation s;
  s.windows = {{0, {3.0f}}, {1, {1.0f}}, {2, {2.0f}}, {3, {.5f}}};
  s.Event(config);
  EXPECT_EQ(s.In(Tier::kPacked), (Ids{1, 2}));
  s.windows[0].score = 3.1f;
  s.windows[1].score = 3.5f;
  s.windows[2].score = 2.2f;
  s.windows[4].score = .6f;
  s.Event(config);
  EXPECT_EQ(s.In(Tier::kFull), Ids{1});
  EXPECT_EQ(s.In(Tier::kPacked), Ids{0});
  EXPECT_EQ(s.In(Tier::kEvicted), (Ids{2, 4}));
}

// ---- Items of 5.4.3 ----

TEST(QEvictTest, EverythingStaysFullUntilTheBudgetBinds) {
  const std::vector<Candidate> c = FullWindows({1, 2, 3, 4});
  const HistoryPlan fits = PlanQEvict({c, {300, 100}, 1200}, QEvict());
  EXPECT_EQ(InTier(c, fits, Tier::kFull), (Ids{0, 1, 2, 3}));
  const HistoryPlan binds = PlanQEvict({c, {300, 100}, 1199}, QEvict());
  EXPECT_EQ(InTier(c, binds, Tier::kFull), Ids{3});
  EXPECT_EQ(InTier(c, binds, Tier::kPacked), (Ids{0, 1, 2}));
}

TEST(QEvictTest, DormantCodesCountBeforeTheBudgetBinds) {
  std::vector<Candidate> c = FullWindows({1, 2});
  c[0].has_codes = true;
  EXPECT_EQ(InTier(c, PlanQEvict({c, {300, 100}, 700}, QEvict()), Tier::kFull).size(), 2u);
  EXPECT_LT(InTier(c, PlanQEvict({c, {300, 100}, 699}, QEvict()), Tier::kFull).size(), 2u);
}

TEST(QEvictTest, NothingIsEvictedWhileCapacitiesCoverAll) {
  std::vector<Candidate> c = FullWindows({5, 4, 3, 2, 1});
  c[4].tier = Tier::kPacked;
  c[4].has_codes = true;
  const HistoryPlan plan = PlanQEvict({c, {300, 100}, 3000}, QEvict());  // K_f = 3, K_q = 21
  EXPECT_EQ(InTier(c, plan, Tier::kFull), (Ids{0, 1, 2}));
  EXPECT_EQ(InTier(c, plan, Tier::kPacked), (Ids{3, 4}));
}

TEST(QEvictTest, ZeroHistoryEvictsAll) {
  const std::vector<Candidate> c = FullWindows({1, 2, 3});
  const HistoryPlan plan = PlanQEvict({c, {300, 100}, 0}, QEvict());
  EXPECT_EQ(InTier(c, plan, Tier::kEvicted), (Ids{0, 1, 2}));
  EXPECT_TRUE(PlanQEvict({{}, {300, 100}, 0}, QEvict()).placements.empty());
}

TEST(QEvictTest, ShareZeroAndOne) {
  const std::vector<Candidate> c = FullWindows({1, 5, 3, 4, 2});
  const HistoryPlan none_packed = PlanQEvict({c, {300, 100}, 600}, QEvict(0));
  EXPECT_EQ(InTier(c, none_packed, Tier::kFull), (Ids{1, 3}));
  EXPECT_EQ(InTier(c, none_packed, Tier::kEvicted), (Ids{0, 2, 4}));
  const HistoryPlan none_full = PlanQEvict({c, {300, 100}, 400}, QEvict(1000));
  EXPECT_EQ(InTier(c, none_full, Tier::kFull), Ids{});
  EXPECT_EQ(InTier(c, none_full, Tier::kPacked), (Ids{1, 2, 3, 4}));
}

TEST(QEvictTest, TiesGoToTheIncumbentThenToTheOlder) {
  std::vector<Candidate> c = FullWindows({1, 1, 1, 1, 1, 1});
  for (size_t i : {0, 1, 5}) {
    c[i].tier = Tier::kPacked;
    c[i].has_codes = true;
  }
  const HistoryPlan plan = PlanQEvict({c, {300, 100}, 500}, QEvict(400));  // K_f = 1, K_q = 2
  EXPECT_EQ(InTier(c, plan, Tier::kFull), Ids{2});
  EXPECT_EQ(InTier(c, plan, Tier::kPacked), (Ids{0, 1}));
}

TEST(QEvictTest, OrderDecidesTiesNotTheId) {
  std::vector<Candidate> c = FullWindows({1, 1, 1, 1});
  for (uint32_t i = 0; i < 4; ++i) c[i].window = 100 - i;
  const HistoryPlan plan = PlanQEvict({c, {300, 100}, 500}, QEvict(400));
  EXPECT_EQ(InTier(c, plan, Tier::kFull), Ids{100});
}

TEST(QEvictTest, NaNRanksLast) {
  const std::vector<Candidate> c =
      FullWindows({kNaN, -1e30f, kNaN, -std::numeric_limits<float>::infinity(), 0});
  const HistoryPlan plan = PlanQEvict({c, {300, 100}, 500}, QEvict(400));
  EXPECT_EQ(InTier(c, plan, Tier::kFull), Ids{4});
  EXPECT_EQ(InTier(c, plan, Tier::kPacked), (Ids{1, 3}));
  const std::vector<Candidate> all_nan = FullWindows({kNaN, kNaN, kNaN, kNaN});
  EXPECT_EQ(InTier(all_nan, PlanQEvict({all_nan, {300, 100}, 500}, QEvict(400)), Tier::kFull),
            Ids{0});
}

TEST(QEvictTest, WithoutPromotionPackedWindowsStayPacked) {
  Config config = QEvict(400);
  config.promotion = Promotion::kNone;
  std::vector<Candidate> c = FullWindows({9, 8, 1, 2});
  for (size_t i : {0, 1}) {
    c[i].tier = Tier::kPacked;
    c[i].has_codes = true;
  }
  HistoryPlan plan = PlanQEvict({c, {300, 100}, 500}, config);
  EXPECT_EQ(InTier(c, plan, Tier::kFull), Ids{3});
  EXPECT_EQ(InTier(c, plan, Tier::kPacked), (Ids{0, 1}));
  EXPECT_EQ(InTier(c, plan, Tier::kEvicted), Ids{2});
  // F shrinks if too few windows may enter it.
  c.resize(2);
  plan = PlanQEvict({c, {300, 100}, 500}, config);
  EXPECT_EQ(InTier(c, plan, Tier::kPacked), (Ids{0, 1}));
}

TEST(QEvictTest, PinnedWindowsBuyPackedOnes) {
  Config config = QEvict(400);
  config.promotion = Promotion::kPinned;
  std::vector<Candidate> c = FullWindows({9, 8, 7, 6, 5, 4});
  c[0].tier = Tier::kPacked;
  c[0].has_codes = true;
  const HistoryPlan plan = PlanQEvict({c, {300, 100}, 500}, config);
  // F = {0}, pinned at 100 bytes instead of 300: 200 + 200 bytes for four more.
  EXPECT_EQ(plan.placements[0].tier, Tier::kPacked);
  EXPECT_TRUE(plan.placements[0].pinned);
  EXPECT_EQ(InTier(c, plan, Tier::kFull), Ids{});
  EXPECT_EQ(InTier(c, plan, Tier::kPacked), (Ids{0, 1, 2, 3, 4}));
  for (size_t i = 1; i < c.size(); ++i) EXPECT_FALSE(plan.placements[i].pinned);
}

TEST(QEvictTest, SlackKeepsNeverQuantizedWindowsFull) {
  Config config = QEvict();
  config.fill_slack = true;
  std::vector<Candidate> c = FullWindows({5, 4, 3, 2, 1});
  c[1].tier = Tier::kPacked;
  c[1].has_codes = true;
  // K_f = 1; four packed: 300 + 400 = 700 of 1100. Two upgrades of 200 fit; the packed window is
  // passed over.
  const HistoryPlan plan = PlanQEvict({c, {300, 100}, 1100}, config);
  EXPECT_EQ(InTier(c, plan, Tier::kFull), (Ids{0, 2, 3}));
  EXPECT_EQ(InTier(c, plan, Tier::kPacked), (Ids{1, 4}));
}

// More dormant codes in F than the packed share holds: F gives way, a plan never exceeds the bytes.
TEST(QEvictTest, DormantCodesBeyondThePackedShareShrinkF) {
  std::vector<Candidate> c = FullWindows({9, 8, 7, 6});
  for (Candidate& each : c) each.has_codes = true;
  const HistoryInput in{c, {300, 100}, 1000};
  const HistoryPlan plan = PlanQEvict(in, QEvict(100));  // K_f = 3, K_q = 1; 3 * 400 > 1000
  EXPECT_EQ(plan.n_full_capacity, 3u);
  EXPECT_EQ(InTier(c, plan, Tier::kFull), (Ids{0, 1}));
  EXPECT_EQ(InTier(c, plan, Tier::kPacked), (Ids{2, 3}));
  EXPECT_EQ(PlanBytes(in, plan, true), 1000u);
}

// ---- Properties ----

std::vector<Candidate> RandomCandidates(std::mt19937& rng, size_t n) {
  std::vector<Candidate> c;
  for (uint32_t i = 0; i < n; ++i) {
    Candidate each{i * 3, static_cast<float>(rng() % 12), Tier::kFull, false, i};
    if (rng() % 20 == 0) each.score = kNaN;
    if (rng() % 2) each.tier = Tier::kPacked;
    each.has_codes = each.tier == Tier::kPacked || rng() % 3 == 0;
    c.push_back(each);
  }
  return c;
}

/// The rule as a sentence: repeat "the best of what is left" by linear search.
HistoryPlan NaivePlan(const HistoryInput& in, const Config& config) {
  HistoryPlan plan;
  plan.placements.resize(in.candidates.size());
  const uint64_t k_f = in.history_bytes * (1000 - config.q_permille) / (1000 * in.costs.full_bytes);
  const uint64_t k_q = in.history_bytes * config.q_permille / (1000 * in.costs.packed_bytes);
  std::vector<bool> taken(in.candidates.size(), false);
  const auto best = [&](Tier incumbent) {
    size_t at = SIZE_MAX;
    const auto key = [&](size_t i) {
      const Candidate& c = in.candidates[i];
      const bool nan = std::isnan(c.score);
      return std::tuple(nan, nan ? 0.0f : -c.score, c.tier != incumbent, c.order);
    };
    for (size_t i = 0; i < taken.size(); ++i) {
      if (!taken[i] && (at == SIZE_MAX || key(i) < key(at))) at = i;
    }
    if (at != SIZE_MAX) taken[at] = true;
    return at;
  };
  uint64_t n_dormant = 0;
  for (uint64_t n = 0; n < k_f; ++n) {
    const size_t i = best(Tier::kFull);
    if (i == SIZE_MAX) break;
    plan.placements[i].tier = Tier::kFull;
    n_dormant += in.candidates[i].has_codes;
  }
  if (!config.charge_dormant) n_dormant = 0;
  for (uint64_t n = n_dormant; n < k_q; ++n) {
    const size_t i = best(Tier::kPacked);
    if (i == SIZE_MAX) break;
    plan.placements[i].tier = Tier::kPacked;
  }
  return plan;
}

TEST(QEvictTest, MatchesTheNaiveRule) {
  std::mt19937 rng(5);
  int compared = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<Candidate> c = RandomCandidates(rng, rng() % 30);
    if (!c.empty()) {  // the budget has bound before
      c[0].tier = Tier::kPacked;
      c[0].has_codes = true;
    }
    const HistoryInput in{c, {320, 84}, rng() % 8000};
    Config config = QEvict(rng() % 1001);
    config.charge_dormant = rng() % 2;
    const HistoryPlan naive = NaivePlan(in, config);
    if (config.charge_dormant && PlanBytes(in, naive, true) > in.history_bytes)
      continue;  // see the test above
    const HistoryPlan plan = PlanQEvict(in, config);
    ++compared;
    for (size_t i = 0; i < c.size(); ++i)
      ASSERT_EQ(plan.placements[i].tier, naive.placements[i].tier) << round;
  }
  EXPECT_GT(compared, 2000);
}

TEST(QEvictTest, PlansNeverExceedTheBytes) {
  std::mt19937 rng(6);
  const HistoryCosts costs[] = {{32768, 8464}, {300, 100}, {256, 292},
                                {1, 1},        {7, 1000},  {1000, 7}};
  for (int round = 0; round < 20000; ++round) {
    const std::vector<Candidate> c = RandomCandidates(rng, rng() % 40);
    const HistoryCosts& cost = costs[rng() % std::size(costs)];
    const uint64_t everything = c.size() * (cost.full_bytes + cost.packed_bytes);
    const HistoryInput in{c, cost, rng() % (everything + 2)};
    Config config = QEvict(rng() % 4 == 0 ? 1000 * (rng() % 2) : rng() % 1001);
    config.promotion = static_cast<Promotion>(rng() % 3);
    config.charge_dormant = rng() % 2;
    config.fill_slack = rng() % 2;
    const HistoryPlan plan = PlanQEvict(in, config);
    ASSERT_EQ(plan.placements.size(), c.size());
    ASSERT_LE(PlanBytes(in, plan, config.charge_dormant), in.history_bytes) << "round " << round;
    for (size_t i = 0; i < c.size(); ++i) {
      const HistoryPlacement& p = plan.placements[i];
      ASSERT_TRUE(!p.pinned || (p.tier == Tier::kPacked && config.promotion == Promotion::kPinned));
      if (c[i].tier == Tier::kPacked && config.promotion != Promotion::kCodes) {
        ASSERT_NE(p.tier, Tier::kFull);
      }
    }
    const HistoryPlan again = PlanQEvict(in, config);
    for (size_t i = 0; i < c.size(); ++i)
      ASSERT_EQ(plan.placements[i].tier, again.placements[i].tier);
  }
}

}  // namespace
}  // namespace qevict
