// Codecs that are made of a layer's own rows (wf and others): when a layer without packed windows
// packs its first ones, statistics are taken from what it holds in full precision, and stay as they
// are until it has no packed window again.
#include <cmath>

#include "cache/kv_cache_impl.h"
#include "codecs/water_fill.h"

namespace qevict {
namespace {

/// Tokens that statistics are taken from; more say nothing new.
constexpr size_t kMaxTokens = 2048;

/// KvCache::key_bias of one layer.
class KeyBias final : public codecs::CodecLearner {
 public:
  explicit KeyBias(const LayerShape& shape) : dim_(shape.head_dim), stats_(shape.n_kv_heads) {}

  void Add(uint32_t kv_head, const float* k_before_rope, const float*, const float*) override {
    stats_[kv_head].AddKey(k_before_rope, dim_);
    ++stats_[kv_head].n;
  }
  std::shared_ptr<const codecs::Codec> Make(std::span<const double>) override { return nullptr; }

  float Largest() const {
    double largest = 0.0;
    for (const codecs::WaterFillStats& s : stats_) {
      const auto n = static_cast<double>(s.n);
      double mean = 0.0, variance = 0.0;
      for (size_t c = 0; c < s.k_sum.size(); ++c) {
        const double m = s.k_sum[c] / n;
        mean = std::max(mean, std::abs(m));
        variance += std::max(s.k_square[c] / n - m * m, 0.0) / dim_;
      }
      if (variance > 0.0) largest = std::max(largest, mean / std::sqrt(variance));
    }
    return static_cast<float>(largest);
  }

 private:
  uint32_t dim_;
  std::vector<codecs::WaterFillStats> stats_;  // [n_kv_heads]
};

}  // namespace

void KvCache::Impl::AddQueryEnergy(uint32_t il, const float* squares) {
  const LayerShape& shape = PoolsOf(il).shape;
  std::vector<double>& energy = layers[il].query_energy;
  energy.resize(size_t{shape.n_kv_heads} * shape.head_dim);
  for (size_t i = 0; i < energy.size(); ++i) energy[i] += static_cast<double>(squares[i]);
}

/// Everything is forgotten.
void KvCache::Impl::Relearn() {
  for (LayerState& layer : layers) {
    layer.codec = pools[layer.pools].codec;
    layer.learned = false;
    layer.query_energy.clear();
  }
  key_bias = 0.0f;
}

/// Shows the learner what the layer holds in full precision, evenly thinned to kMaxTokens.
void KvCache::Impl::Teach(uint32_t il, codecs::CodecLearner& learner) const {
  const ShapePools& p = PoolsOf(il);
  const uint32_t d = p.shape.head_dim, dv = p.shape.head_dim_v;
  std::vector<const UnitRecord*> units;
  for (const auto& s : sequences) {
    if (!s) continue;
    for (const UnitRecord& u : s->layers[il].units) {
      // Sinks are unlike all other tokens, and never packed.
      if (u.has_full() && !windows[u.window].has(WindowRecord::kSink)) units.push_back(&u);
    }
  }
  const size_t step = std::max<size_t>(1, units.size() * config.window / kMaxTokens);
  uint16_t row[kMaxHeadDim];
  float key[kMaxHeadDim], before_rope[kMaxHeadDim], value[kMaxHeadDim];
  for (size_t i = 0; i < units.size(); i += step) {
    const WindowRecord& w = windows[units[i]->window];
    const WindowPhases phases(layers[il].rope, w);
    for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
      const uint8_t* full = FullSlot(il, *units[i]) + h * p.full_head_bytes;
      const auto* values = reinterpret_cast<const uint16_t*>(full + size_t{config.window} * d * 2);
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
  const ShapePools& p = PoolsOf(il);
  if (!codecs::Learns(config)) {
    if (layer.learned || !codecs::IgnoresKeyMean(config)) return;
    KeyBias bias(p.shape);
    Teach(il, bias);
    key_bias = std::max(key_bias, bias.Largest());
    layer.learned = true;
    return;
  }
  const auto holds = [il](const SlotOwner& owner) { return owner.layer == il; };
  if (layer.learned && std::any_of(p.packed.owners.begin(), p.packed.owners.end(), holds)) return;
  const auto learner = codecs::MakeLearner(config, RowsOf(p.shape), layer.rope);
  Teach(il, *learner);
  layer.codec = learner->Make(layer.query_energy);
  layer.learned = true;
}

}  // namespace qevict
