// Codecs that are made of a layer's own rows (wf and others): when a layer without packed windows
// packs its first ones, statistics are taken from what it holds in full precision, and stay as they
// are until it has no packed window again.
#include <algorithm>

#include "cache/kv_cache_impl.h"

namespace qevict {
namespace {

/// Tokens that statistics are taken from; more say nothing new.
constexpr size_t kMaxTokens = 2048;

/// Sums of a layer's rows.
class RowSums final : public codecs::CodecLearner {
 public:
  explicit RowSums(const LayerShape& shape)
      : dim_(shape.head_dim), dim_v_(shape.head_dim_v), stats_(shape.n_kv_heads) {}

  void Add(uint32_t kv_head, const float* k_before_rope, const float*, const float* v) override {
    stats_[kv_head].AddKey(k_before_rope, dim_);
    stats_[kv_head].AddValue(v, dim_v_);
  }
  std::shared_ptr<const codecs::Codec> Make(std::span<const float>) override { return nullptr; }

  std::vector<codecs::WaterFillStats>& stats() { return stats_; }

 private:
  uint32_t dim_, dim_v_;
  std::vector<codecs::WaterFillStats> stats_;  // [n_kv_heads]
};

}  // namespace

void KvCache::Impl::AddQueryEnergy(uint32_t il, const float* squares) {
  const LayerShape& shape = StoreOf(il).shape;
  std::vector<float>& energy = layers[il].query_energy;
  energy.resize(size_t{shape.n_kv_heads} * shape.head_dim);
  for (size_t i = 0; i < energy.size(); ++i) energy[i] += squares[i];
}

/// Everything is forgotten.
void KvCache::Impl::Relearn() {
  for (LayerState& layer : layers) {
    if (layer.calibrated) continue;
    for (size_t r = 0; r < layer.codecs.size(); ++r)
      layer.codecs[r] = stores[layer.store].rungs[r].codec;
    layer.learned = false;
    layer.query_energy.clear();
  }
  key_bias = 0.0f;
}

bool KvCache::Impl::HoldsCodes(uint32_t il) const {
  for (const auto& s : sequences) {
    if (!s) continue;
    const LayerSeq& ls = s->layers[il];
    const auto packed = [](const UnitRecord& u) { return u.holds_codes(); };
    if (!ls.ledger.empty() || std::any_of(ls.units.begin(), ls.units.end(), packed)) return true;
  }
  return false;
}

/// Shows the learner what the layer holds in full precision, evenly thinned to `max_tokens`.
void KvCache::Impl::Teach(uint32_t il, size_t max_tokens, codecs::CodecLearner& learner) const {
  const ShapeStore& p = StoreOf(il);
  const uint32_t d = p.shape.head_dim, dv = p.shape.head_dim_v;
  std::vector<const UnitRecord*> units, sinks;
  for (const auto& s : sequences) {
    if (!s) continue;
    for (const UnitRecord& u : s->layers[il].units) {
      if (u.full()) (windows[u.window].has(WindowRecord::kSink) ? sinks : units).push_back(&u);
    }
  }
  // Sinks are unlike all other tokens, and packed only where bytes are so short that little else is
  // held.
  if (units.empty()) units.swap(sinks);
  const size_t n_tokens = units.size() * config.window;
  const size_t step = std::max<size_t>(1, (n_tokens + max_tokens - 1) / max_tokens);
  uint16_t row[kMaxHeadDim];
  float key[kMaxHeadDim], before_rope[kMaxHeadDim], value[kMaxHeadDim];
  for (size_t i = 0; i < units.size(); i += step) {
    const WindowRecord& w = windows[units[i]->window];
    const WindowPhases phases(layers[il].rope, w);
    for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
      const auto head = [&](Side side) {
        return Block(il, *units[i], side) + h * p.rungs[kFullRung].bytes_of_head(side);
      };
      const uint8_t* full = head(Side::kKeys);
      const auto* values = reinterpret_cast<const uint16_t*>(head(Side::kValues));
      for (uint32_t t = 0; t < w.n_tokens; ++t) {
        if (((w.live >> t) & 1u) == 0) continue;
        LoadKeyRow(full, config.window, d, t, row);
        ConvertTo32(row, d, p.shape.elem_k, key);
        std::copy_n(key, d, before_rope);
        phases.Unrotate(t, before_rope);
        ConvertTo32(values + size_t{t} * dv, dv, p.shape.elem_v, value);
        learner.Add(h, before_rope, key, value);
      }
    }
  }
}

void KvCache::Impl::LearnCodec(uint32_t il) {
  LayerState& layer = layers[il];
  const ShapeStore& p = StoreOf(il);
  if (codecs::IgnoresKeyMean(config) && !layer.learned) {
    RowSums sums(p.shape);
    Teach(il, kMaxTokens, sums);
    for (const codecs::WaterFillStats& stats : sums.stats())
      key_bias = std::max(key_bias, codecs::KeyBias(stats));
    layer.learned = !codecs::Learns(config);
  }
  if (layer.calibrated || (layer.learned && HoldsCodes(il))) return;
  const std::vector<Config> rungs = codecs::RungConfigs(config);
  for (size_t r = 0; r < rungs.size(); ++r) {
    if (!codecs::Learns(rungs[r])) continue;
    const auto learner = codecs::MakeLearner(rungs[r], RowsOf(p.shape), layer.rope);
    Teach(il, kMaxTokens, *learner);
    layer.codecs[r + 1] = learner->Make(layer.query_energy);
    layer.learned = true;
  }
}

Status KvCache::SetCodecStatistics(uint32_t il, std::span<const codecs::WaterFillStats> stats) {
  Impl& c = *impl_;
  if (il >= c.layers.size()) return OutOfRange("layer " + std::to_string(il) + " does not exist");
  const LayerShape& shape = c.StoreOf(il).shape;
  const auto fits = [&shape](const codecs::WaterFillStats& s) {
    return s.n > 0 && s.k_sum.size() == shape.head_dim && s.k_square.size() == shape.head_dim &&
           s.v_square.size() == shape.head_dim_v &&
           (s.q_square.empty() || s.q_square.size() == shape.head_dim);
  };
  if (stats.size() != shape.n_kv_heads || !std::all_of(stats.begin(), stats.end(), fits)) {
    return InvalidArgument(
        "codec statistics of " + std::to_string(stats.size()) + " kv heads do not fit layer " +
        std::to_string(il) + ", which has " + std::to_string(shape.n_kv_heads) + " of " +
        std::to_string(shape.head_dim) + "/" + std::to_string(shape.head_dim_v) + " channels");
  }
  LayerState& layer = c.layers[il];
  if (c.HoldsCodes(il)) {
    return FailedPrecondition("layer " + std::to_string(il) +
                              " holds packed windows; its codec cannot change now");
  }
  const std::vector<Config> rungs = codecs::RungConfigs(c.config);
  for (size_t r = 0; r < rungs.size(); ++r) {
    if (rungs[r].codec == CodecId::kWaterFill)
      layer.codecs[r + 1] = codecs::MakeWaterFill(rungs[r], RowsOf(shape), layer.rope, stats);
  }
  layer.learned = layer.calibrated = true;
  return {};
}

std::vector<codecs::WaterFillStats> KvCache::CodecStatistics(uint32_t il, size_t max_tokens) const {
  const Impl& c = *impl_;
  if (il >= c.layers.size()) return {};
  const LayerShape& shape = c.StoreOf(il).shape;
  RowSums sums(shape);
  c.Teach(il, std::max<size_t>(max_tokens, 1), sums);
  const std::vector<float>& energy = c.layers[il].query_energy;
  for (uint32_t h = 0; h < shape.n_kv_heads && !energy.empty(); ++h) {
    const auto head = std::span(energy).subspan(size_t{h} * shape.head_dim, shape.head_dim);
    sums.stats()[h].q_square.assign(head.begin(), head.end());
  }
  return std::move(sums.stats());
}

}  // namespace qevict
