// Codecs that are made of a layer's own rows (wf): when a layer without packed windows packs its
// first ones, statistics are taken from what it holds in full precision, and stay as they are
// until it has no packed window again.
#include "cache/kv_cache_impl.h"

namespace qevict {
namespace {

/// Tokens that statistics are taken from; more say nothing new.
constexpr size_t kMaxTokens = 2048;

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
}

std::vector<codecs::WaterFillStats> KvCache::Impl::GatherStats(uint32_t il) const {
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
  std::vector<codecs::WaterFillStats> stats(p.shape.n_kv_heads);
  uint16_t row[kMaxHeadDim];
  float key[kMaxHeadDim], value[kMaxHeadDim];
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
        phases.Unrotate(t, key);
        stats[h].AddKey(key, d);
        ConvertTo32(values + size_t{t} * dv, dv, p.shape.elem_v, value);
        stats[h].AddValue(value, dv);
      }
    }
  }
  const std::vector<double>& energy = layers[il].query_energy;
  for (uint32_t h = 0; h < p.shape.n_kv_heads && !energy.empty(); ++h) {
    stats[h].q_square.assign(energy.begin() + static_cast<std::ptrdiff_t>(h * d),
                             energy.begin() + static_cast<std::ptrdiff_t>((h + 1) * d));
  }
  return stats;
}

void KvCache::Impl::LearnCodec(uint32_t il) {
  if (!codecs::Learns(config)) return;
  LayerState& layer = layers[il];
  const ShapePools& p = PoolsOf(il);
  const auto holds = [il](const SlotOwner& owner) { return owner.layer == il; };
  if (layer.learned && std::any_of(p.packed.owners.begin(), p.packed.owners.end(), holds)) return;
  layer.codec = std::make_shared<codecs::WaterFillCodec>(
      codecs::QuarterBits(config), config.window, RowsOf(p.shape), layer.rope, GatherStats(il));
  layer.learned = true;
}

}  // namespace qevict
