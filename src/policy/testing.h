// A view for tests of policies: groups whose columns are plain vectors.
#pragma once

#include <memory>
#include <vector>

#include "qevict/policy.h"

namespace qevict {

/// Owns the columns of one group.
struct GroupColumns {
  std::vector<uint64_t> identity, bytes;
  std::vector<int32_t> position;
  std::vector<uint8_t> n_tokens, codes_k, codes_v, is_protected, visible;
  std::vector<Rung> rung_k, rung_v;
  std::vector<uint32_t> age;
  std::vector<float> score;
};

class TestView {
 public:
  Ladder ladder;

  /// Two or more rungs: bytes per side of each, full precision first.
  explicit TestView(const std::vector<uint32_t>& rung_bytes,
                    const std::vector<float>& distortion = {}) {
    ladder.n_rungs = static_cast<uint32_t>(rung_bytes.size());
    for (auto& side : ladder.cost) {
      for (size_t r = 0; r < rung_bytes.size(); ++r)
        side[r] = {rung_bytes[r], r < distortion.size() ? distortion[r] : 0.0f};
    }
  }

  /// A group of full-precision windows with these scores, none of them protected.
  GroupColumns& Add(const std::vector<float>& score, uint32_t sequence = 0, uint32_t layer = 0,
                    uint32_t head = 0) {
    columns_.push_back(std::make_unique<GroupColumns>());
    GroupColumns& c = *columns_.back();
    const size_t n = score.size();
    c.score = score;
    for (size_t i = 0; i < n; ++i) {
      c.identity.push_back(i);
      c.position.push_back(static_cast<int32_t>(8 * i));
      c.age.push_back(static_cast<uint32_t>(8 * (n - 1 - i)));
    }
    c.n_tokens.assign(n, 8);
    c.visible.assign(n, 1);
    for (auto* column : {&c.codes_k, &c.codes_v, &c.is_protected, &c.rung_k, &c.rung_v})
      column->assign(n, 0);
    GroupView g;
    g.sequence = sequence;
    g.layer = layer;
    g.head = head;
    g.token_bytes = 128;
    g.n_rows_scored = 64;
    groups_.push_back(g);
    return c;
  }

  const View& view() {
    for (size_t i = 0; i < groups_.size(); ++i) {
      GroupView& g = groups_[i];
      GroupColumns& c = *columns_[i];
      g.ladder = &ladder;
      c.bytes.clear();
      for (size_t w = 0; w < c.score.size(); ++w)
        c.bytes.push_back(ladder.UnitCost(c.rung_k[w], c.rung_v[w]));
      g.identity = c.identity;
      g.position = c.position;
      g.n_tokens = c.n_tokens;
      g.age = c.age;
      g.rung_k = c.rung_k;
      g.rung_v = c.rung_v;
      g.codes_k = c.codes_k;
      g.codes_v = c.codes_v;
      g.bytes = c.bytes;
      g.is_protected = c.is_protected;
      g.visible = c.visible;
      for (auto& stat : g.stats) stat = c.score;
    }
    view_.groups = groups_;
    return view_;
  }
  std::vector<GroupView>& groups() { return groups_; }

 private:
  std::vector<std::unique_ptr<GroupColumns>> columns_;
  std::vector<GroupView> groups_;
  View view_;
};

/// What a plan costs, protected windows as they are.
inline uint64_t CostOf(const View& view, const Plan& plan) {
  uint64_t bytes = 0;
  for (size_t g = 0; g < view.groups.size(); ++g) {
    const GroupView& group = view.groups[g];
    bytes += group.reserve_bytes;
    for (size_t i = 0; i < group.size(); ++i) {
      const Placement& p = plan.placements[g][i];
      bytes += group.is_protected[i] ? group.bytes[i] : group.ladder->UnitCost(p.k, p.v);
    }
  }
  return bytes;
}

}  // namespace qevict
