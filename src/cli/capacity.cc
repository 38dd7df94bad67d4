#include "cli/capacity.h"

#include <algorithm>

#include "base/half.h"
#include "cli/text.h"
#include "codecs/codec.h"
#include "kernels/attention.h"  // before qevict/cache.h: GCC warns of enumerators named as its globals
#include "kernels/rope_table.h"
#include "policy/history.h"
#include "qevict/cache.h"

namespace qevict::cli {
namespace {

// Sizes of src/cache's records; capacity_test compares the outcome with a real KvCache.
constexpr uint64_t kUnitBytes = 27;    // record of a window in a layer, its slot's owner, growth
constexpr uint64_t kWindowBytes = 28;  // record of a window and its place in the sequence
constexpr uint64_t kSequenceBytes = 256;
constexpr uint64_t kLayerSlackBytes = 192;  // per layer of a sequence: list header and growth step
constexpr uint64_t kPoolSlackBytes = 8320;  // per shape: last page of two pools, growth of owners

uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
uint64_t Grown(uint64_t bytes) { return bytes + bytes / 16; }

uint64_t F16TokenBytes(const CacheLayer& l) {
  return uint64_t{2} * l.n_kv_heads * (l.head_dim + l.head_dim_v);
}
uint64_t F16TokenBytes(const CacheLayout& cache) {
  uint64_t bytes = 0;
  for (const CacheLayer& l : cache.layers) bytes += F16TokenBytes(l);
  return bytes;
}

/// Layers that share their pools.
bool SamePools(const Config& config, const CacheLayer& a, const CacheLayer& b) {
  return a.n_kv_heads == b.n_kv_heads && a.head_dim == b.head_dim && a.head_dim_v == b.head_dim_v &&
         BitsOfLayer(config, a.index) == BitsOfLayer(config, b.index);
}

/// Windows of a sequence of n tokens, and which of them are protected.
struct Windows {
  uint64_t sinks = 0, recents = 0, history = 0, reserve = 0;
  uint64_t sink_tokens = 0, recent_tokens = 0;
  uint64_t total() const { return sinks + recents + history; }
};

Windows CountWindows(const Config& c, const CacheLayout& cache) {
  const uint32_t n_tokens = cache.tokens_per_sequence;
  const uint64_t w = c.window;
  Windows out;
  out.sink_tokens = std::min<uint64_t>(c.sinks, n_tokens);
  out.sinks = CeilDiv(out.sink_tokens, w);
  const uint64_t rest = n_tokens - out.sink_tokens;
  const uint64_t n = CeilDiv(rest, w);
  const uint64_t newest = rest % w ? rest % w : w;  // tokens of the newest window
  const uint64_t recents = RecentTokens(c, F16TokenBytes(cache),
                                        c.budget_tokens ? c.budget_tokens : cache.cells_per_stream);
  const uint64_t by_count = CeilDiv(recents, w);
  for (uint64_t rank = 0; rank < n; ++rank) {
    const bool open = rank == 0 && newest < w;
    const bool recent =
        c.local_mode == LocalMode::kAligned ? out.recent_tokens < recents : rank < by_count;
    if (!open && !recent) break;
    out.recent_tokens += rank == 0 ? newest : w;
    ++out.recents;
  }
  out.history = n - out.recents;
  const uint64_t room = n ? w - newest : 0;
  const uint64_t interval = c.EffectiveInterval();
  out.reserve = interval > room ? CeilDiv(interval - room, w) : 0;
  return out;
}

/// Arithmetic of one cache under one configuration.
class CachePlanner {
 public:
  CachePlanner(const Config& config, const CacheLayout& cache, uint32_t rope_dims)
      : config_(config), cache_(cache), windows_(CountWindows(config, cache)) {
    f16_token_bytes_ = F16TokenBytes(cache);
    n_domains_ = config.budget_bytes ? 1 : cache.n_streams;
    n_sequences_ = uint64_t{cache.n_sequences} * (config.budget_bytes ? cache.n_streams : 1);
    fixed_ = FixedBytes(rope_dims);
  }

  /// Of all streams.
  uint64_t f16_bytes() const {
    return f16_token_bytes_ * cache_.tokens_per_sequence * cache_.n_sequences * cache_.n_streams;
  }
  uint64_t budget_bytes() const { return DomainBudget() * n_domains_; }
  uint64_t table_bytes() const { return fixed_ * n_domains_; }
  uint64_t minimum_bytes() const {
    return stream_minimum_bytes() * cache_.n_sequences * cache_.n_streams;
  }
  uint64_t stream_minimum_bytes() const {
    Config config = config_;
    config.budget_tokens = cache_.cells_per_stream;
    return MinimumBudgetBytes(config, Shapes());
  }
  /// As the cache itself raises a budget that is too small.
  Config WithLeast() const {
    return WithLeastBudget(config_, Shapes(), cache_.n_streams, cache_.cells_per_stream);
  }

  LayerPlan Layer(const CacheLayer& l) const {
    const uint64_t full =
        l.n_kv_heads * kernels::FullHeadBytes(config_.window, l.head_dim, l.head_dim_v);
    const uint64_t packed = l.n_kv_heads * codecs::CodecBytes(config_, RowsOf(l)).total();
    const HistoryCosts costs{full + kUnitBytes, packed + kUnitBytes};
    std::vector<Candidate> candidates;
    for (uint32_t i = 0; i < windows_.history; ++i) {
      candidates.push_back({i, 1.0f, Tier::kFull, false, i});
    }
    uint64_t history = UINT64_MAX / 4;
    if (config_.preset != Preset::kFull) {
      const uint64_t share = Share(l);
      const uint64_t mandatory =
          n_sequences_ * (windows_.sinks + windows_.recents + windows_.reserve) * costs.full_bytes;
      history = share > mandatory ? (share - mandatory) / n_sequences_ : 0;
    }
    const HistoryPlan plan = PlanHistory({candidates, costs, history}, config_);
    return Count(l, plan, full, packed);
  }

 private:
  std::vector<LayerShape> Shapes() const {
    std::vector<LayerShape> shapes;
    for (const CacheLayer& l : cache_.layers) {
      shapes.push_back({l.n_kv_heads, l.head_dim, l.head_dim_v, Elem::kF16, Elem::kF16,
                        BitsOfLayer(config_, l.index)});
    }
    return shapes;
  }

  codecs::RowShape RowsOf(const CacheLayer& l) const {
    return {l.n_kv_heads, l.head_dim, l.head_dim_v, BitsOfLayer(config_, l.index)};
  }

  uint64_t DomainBudget() const {
    if (config_.preset == Preset::kFull) return f16_bytes() / n_domains_;
    if (config_.budget_bytes) return config_.budget_bytes;
    return static_cast<uint64_t>(config_.budget_fraction *
                                 (config_.budget_tokens
                                      ? static_cast<double>(config_.budget_tokens)
                                      : static_cast<double>(cache_.cells_per_stream)) *
                                 static_cast<double>(f16_token_bytes_));
  }

  uint64_t Share(const CacheLayer& l) const {
    const uint64_t budget = DomainBudget();
    const double left = budget > fixed_ ? static_cast<double>(budget - fixed_) : 0.0;
    return static_cast<uint64_t>(left * static_cast<double>(F16TokenBytes(l)) /
                                 static_cast<double>(f16_token_bytes_));
  }

  /// Tables of one domain that belong to no layer.
  uint64_t FixedBytes(uint32_t rope_dims) const {
    const uint64_t window = kWindowBytes + 4 * uint64_t{config_.window};
    uint64_t n_shapes = 0;
    for (size_t i = 0; i < cache_.layers.size(); ++i) {
      size_t first = 0;
      while (!SamePools(config_, cache_.layers[first], cache_.layers[i])) ++first;
      n_shapes += first == i ? 1 : 0;
    }
    const uint64_t n_cells = uint64_t{cache_.cells_per_stream} * cache_.n_streams / n_domains_;
    const uint64_t rope = kernels::RopeTable::MaxBytes(rope_dims, cache_.tokens_per_sequence,
                                                       codecs::WantsQueryEnergy(config_)) /
                          n_domains_;
    uint64_t learned = 0;
    for (const CacheLayer& l : cache_.layers) {
      learned += codecs::LearnedBytes(config_, RowsOf(l));
    }
    return learned / n_domains_ +
           n_sequences_ * (Grown(windows_.total() * window) + kSequenceBytes +
                           cache_.layers.size() * kLayerSlackBytes) +
           Grown(4 * n_cells) + n_shapes * kPoolSlackBytes + rope;
  }

  LayerPlan Count(const CacheLayer& l, const HistoryPlan& plan, uint64_t full,
                  uint64_t packed) const {
    uint64_t n_full = 0, n_packed = 0;
    for (const HistoryPlacement& p : plan.placements) {
      n_full += p.tier == Tier::kFull;
      n_packed += p.tier == Tier::kPacked;
    }
    const uint64_t n_everywhere = uint64_t{cache_.n_sequences} * cache_.n_streams;
    const uint64_t full_windows = windows_.sinks + windows_.recents + n_full;
    LayerPlan out;
    out.layers = {l.index};
    out.sliding = cache_.sliding;
    out.full_tokens = static_cast<uint32_t>(windows_.sink_tokens + windows_.recent_tokens +
                                            n_full * config_.window);
    out.packed_tokens = static_cast<uint32_t>(n_packed * config_.window);
    out.evicted_tokens = cache_.tokens_per_sequence - out.full_tokens - out.packed_tokens;
    out.full_bytes = n_everywhere * full_windows * full;
    out.packed_bytes = n_everywhere * n_packed * packed;
    out.record_bytes = n_everywhere * (full_windows + n_packed) * kUnitBytes;
    out.f16_bytes = n_everywhere * cache_.tokens_per_sequence * F16TokenBytes(l);
    return out;
  }

  const Config& config_;
  const CacheLayout& cache_;
  Windows windows_;
  uint64_t f16_token_bytes_ = 0;
  uint64_t n_domains_ = 1;    // parts that have a budget of their own
  uint64_t n_sequences_ = 1;  // in one of them
  uint64_t fixed_ = 0;
};

void AddTo(CapacityPlan& plan, LayerPlan&& layer) {
  for (LayerPlan& known : plan.layers) {
    if (known.sliding != layer.sliding || known.full_tokens != layer.full_tokens ||
        known.packed_tokens != layer.packed_tokens ||
        known.evicted_tokens != layer.evicted_tokens) {
      continue;
    }
    known.layers.push_back(layer.layers.front());
    known.full_bytes += layer.full_bytes;
    known.packed_bytes += layer.packed_bytes;
    known.record_bytes += layer.record_bytes;
    known.f16_bytes += layer.f16_bytes;
    return;
  }
  plan.layers.push_back(std::move(layer));
}

}  // namespace

std::vector<CacheLayout> LayOut(const ModelShape& model, const CacheUse& use) {
  const auto pad = [](uint64_t n) { return static_cast<uint32_t>(CeilDiv(n, 256) * 256); };
  const uint32_t n_ctx = pad(use.n_ctx);
  const uint32_t cells = use.unified ? n_ctx : pad(n_ctx / use.n_slots);
  std::vector<CacheLayout> caches;
  for (const bool sliding : {false, true}) {
    CacheLayout cache;
    cache.sliding = sliding;
    for (const CacheLayer& l : model.layers) {
      if (l.sliding == sliding) cache.layers.push_back(l);
    }
    if (cache.layers.empty()) continue;
    cache.n_streams = use.unified ? 1 : use.n_slots;
    cache.n_sequences = use.unified ? use.n_slots : 1;
    cache.cells_per_stream = cells;
    if (sliding) {
      const uint64_t seen = uint64_t{model.n_swa} * (use.unified ? use.n_slots : 1) + use.n_ubatch;
      cache.cells_per_stream = pad(std::min<uint64_t>(cells, seen));
    }
    cache.tokens_per_sequence = cache.cells_per_stream / cache.n_sequences;
    caches.push_back(std::move(cache));
  }
  return caches;
}

uint64_t F16Bytes(const CacheLayout& cache) {
  return F16TokenBytes(cache) * cache.cells_per_stream * cache.n_streams;
}

uint64_t CapacityPlan::full_bytes() const {
  uint64_t bytes = 0;
  for (const LayerPlan& l : layers) bytes += l.full_bytes;
  return bytes;
}
uint64_t CapacityPlan::packed_bytes() const {
  uint64_t bytes = 0;
  for (const LayerPlan& l : layers) bytes += l.packed_bytes;
  return bytes;
}
uint64_t CapacityPlan::all_table_bytes() const {
  uint64_t bytes = table_bytes;
  for (const LayerPlan& l : layers) bytes += l.record_bytes;
  return bytes;
}

/// Each cache's own fraction, as the plug-in shares one budget among them.
std::vector<double> Fractions(const Config& config, std::span<const CacheLayout> caches,
                              uint32_t rope_dims) {
  std::vector<CacheDemand> demands;
  for (const CacheLayout& cache : caches) {
    const uint64_t minimum = CachePlanner(config, cache, rope_dims).stream_minimum_bytes();
    const bool absolute = config.budget_bytes > 0;
    demands.push_back({F16Bytes(cache) / (absolute ? 1 : cache.n_streams),
                       minimum * (absolute ? cache.n_streams : 1)});
  }
  return ShareBudget(config, demands);
}

CapacityPlan PlanCapacity(const Config& config, const ModelShape& model, const CacheUse& use) {
  CapacityPlan plan;
  const std::vector<CacheLayout> caches = LayOut(model, use);
  const std::vector<double> fractions = Fractions(config, caches, model.rope_dims);
  for (size_t i = 0; i < caches.size(); ++i) {
    const CacheLayout& cache = caches[i];
    Config part = config;
    part.budget_fraction = fractions[i];
    if (config.budget_bytes) {
      part.budget_bytes =
          static_cast<uint64_t>(fractions[i] * static_cast<double>(F16Bytes(cache)));
    }
    plan.asked_bytes += CachePlanner(part, cache, model.rope_dims).budget_bytes();
    part = CachePlanner(part, cache, model.rope_dims).WithLeast();
    const CachePlanner planner(part, cache, model.rope_dims);
    plan.f16_bytes += planner.f16_bytes();
    plan.table_bytes += planner.table_bytes();
    plan.budget_bytes += planner.budget_bytes();
    plan.minimum_bytes += planner.minimum_bytes();
    for (const CacheLayer& layer : cache.layers) {
      AddTo(plan, planner.Layer(layer));
    }
  }
  return plan;
}

}  // namespace qevict::cli
