#include "cache/view.h"

namespace qevict {

const Ladder& DomainView::LadderOf(uint32_t il) {
  const uint32_t c = cache_.layers[il].store;
  if (ladders_.size() <= c) ladders_.resize(c + 1);
  if (ladders_[c]) return *ladders_[c];
  const ShapeStore& store = cache_.stores[c];
  auto ladder = std::make_unique<Ladder>();
  ladder->n_rungs = static_cast<uint32_t>(store.rungs.size());
  ladder->unit_bytes = kUnitBytes;
  const std::vector<Config> rungs = codecs::RungConfigs(cache_.config);
  for (Rung r = 0; r < store.rungs.size(); ++r) {
    for (const Side s : kBothSides) {
      const float lost = r == kFullRung ? 0.0f
                                        : static_cast<float>(codecs::ExpectedDistortion(
                                              rungs[r - 1], RowsOf(store.shape), s));
      ladder->cost[static_cast<size_t>(s)][r] = {static_cast<uint32_t>(store.BlockCost(s, r)),
                                                 lost};
    }
  }
  ladders_[c] = std::move(ladder);
  return *ladders_[c];
}

/// One column after the other, so that each loop is over one kind of record.
void DomainView::Fill(uint32_t il, const Sequence& s, Columns& c) const {
  const LayerSeq& ls = s.layers[il];
  for (const UnitRecord& u : ls.units) {
    const WindowRecord& w = cache_.windows[u.window];
    c.identity.push_back(w.birth);
    c.position.push_back(w.pos0);
    c.n_tokens.push_back(w.n_tokens);
    c.visible.push_back(w.has(WindowRecord::kHidden) ? 0 : 1);
    const int64_t behind = int64_t{s.tail_pos} - w.PosOf(w.n_tokens - 1u);
    c.age.push_back(static_cast<uint32_t>(std::max<int64_t>(0, behind)));
    const Rung k = u.rung(Side::kKeys), v = u.rung(Side::kValues);
    c.rung_k.push_back(k);
    c.rung_v.push_back(v);
    const LedgerEntry* entry = u.dormant() ? cache_.FindLedger(ls, u.window) : nullptr;
    const auto codes = [&](Side side, Rung r) {
      uint8_t bits = r == kFullRung ? 0 : static_cast<uint8_t>(1u << r);
      if (entry && entry->has(side)) bits |= static_cast<uint8_t>(1u << entry->rung(side));
      return bits;
    };
    c.codes_k.push_back(codes(Side::kKeys, k));
    c.codes_v.push_back(codes(Side::kValues, v));
    c.bytes.push_back(cache_.UnitBytes(il, u));
    c.score.push_back(u.total_score());
    c.prompt.push_back(u.prompt_score);
    c.decode.push_back(u.score);
  }
}

void DomainView::Add(uint32_t il, const SeqPlan& plan) {
  const Sequence& s = *cache_.sequences[plan.id];
  columns_.push_back(std::make_unique<Columns>());
  Columns& c = *columns_.back();
  Fill(il, s, c);
  const auto known = std::find(sequences_.begin(), sequences_.end(), plan.id);
  GroupView g;
  g.sequence = static_cast<uint32_t>(known - sequences_.begin());
  if (known == sequences_.end()) sequences_.push_back(plan.id);
  const LayerShape& shape = cache_.StoreOf(il).shape;
  g.layer = cache_.config.per_head ? il / std::max(1u, shape.n_together) : il;
  g.head = cache_.config.per_head ? il % std::max(1u, shape.n_together) : 0;
  g.n_heads = shape.n_kv_heads;
  g.ladder = &LadderOf(il);
  g.token_bytes = cache_.layers[il].f16_token_bytes;
  g.reserve_bytes = plan.reserve;
  g.n_rows_scored =
      s.decode_steps + (cache_.config.init_rows ? cache_.config.init_rows : s.live + s.evicted);
  g.identity = c.identity;
  g.position = c.position;
  g.n_tokens = c.n_tokens;
  g.age = c.age;
  g.rung_k = c.rung_k;
  g.rung_v = c.rung_v;
  g.codes_k = c.codes_k;
  g.codes_v = c.codes_v;
  g.bytes = c.bytes;
  g.is_protected = plan.is_protected;
  g.visible = c.visible;
  g.stats[static_cast<size_t>(Stat::kScore)] = c.score;
  g.stats[static_cast<size_t>(Stat::kPromptMass)] = c.prompt;
  g.stats[static_cast<size_t>(Stat::kDecodeMass)] = c.decode;
  groups_.push_back(g);
}

const View& DomainView::view() {
  view_ = {groups_, static_cast<uint32_t>(sequences_.size())};
  return view_;
}

}  // namespace qevict
