// Byte arithmetic: what the budget is, what is held, what a layer may hold.
//
//   domain    the sequences that share one budget: a stream (fraction), or all streams (absolute)
//   fixed     tables that are not charged to units (window records, cell maps, RoPE tables), their
//             next growth step, and the last page of every pool
//   share     (domain budget - fixed - prompt reserve) * layer's f16 bytes / all layers' f16 bytes
//
// When the budget is in force. With prefill=bounded always. With prefill=full unless a sequence
// reads its first prompt: one that has had no event yet, and whose last chunk came no more than an
// interval of decode steps ago (of the sequence that has made most of them; a prompt that stays
// behind was cancelled, or its slot idles, and its bytes count like all others). Then the bytes are
// kept by the next event, whichever sequence it is due for.
// What may exceed it, and for how long: the rows being read by such a prompt, until it has had its
// first event; a layer's new codes beside its old rows, during an event (commit.cc); and a step
// whose rows do not fit although everything but sinks and open windows has been given up
// (MakeRoom), until the next event. No step fails because of the budget.
//
// Prompt reserve. While a prompt is read under a limit, each layer first stores a chunk in full
// precision, attends, and is then routed back to its share. Layers take turns, so one chunk of the
// largest layer (with per_head: of all its heads) is what all of them need together; of all prompts
// that are being read, since one step may have rows of each.
#include <cmath>
#include <set>

#include "cache/kv_cache_impl.h"

namespace qevict {
namespace {

/// Growth steps that even a short vector makes (GrowTight), per layer of a sequence and per pool.
constexpr uint64_t kUnitSlack = 8 * sizeof(UnitRecord) + 4 * sizeof(LedgerEntry);
constexpr uint64_t kPoolSlack = 8 * BlockPool::kRecordBytes + kPageBytes;

/// A cache that is given its minimum still packs and promotes.
constexpr double kHeadroom = 1.1;

uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

/// Windows that n consecutive tokens can touch.
uint64_t WindowsTouched(uint64_t n, uint64_t window) {
  return n == 0 ? 0 : (n + window - 2) / window + 1;
}

uint64_t RoundUp(uint64_t n, uint64_t to) { return CeilDiv(n, to) * to; }

uint64_t RopeBlockBytes(const kernels::RopeTable& table) {
  return RoundUp(table.n_pairs(), 16) * 2 * sizeof(float);
}

uint64_t F16TokenBytes(std::span<const LayerShape> layers) {
  uint64_t bytes = 0;
  for (const LayerShape& l : layers) {
    bytes += uint64_t{2} * l.n_kv_heads * (uint64_t{l.head_dim} + l.head_dim_v);
  }
  return bytes;
}

}  // namespace

uint64_t RecentTokens(const Config& config, uint64_t f16_token_bytes, uint64_t budget_tokens) {
  if (config.recents_percent == 0) return config.recents;
  const uint64_t held = config.budget_bytes > 0
                            ? config.budget_bytes / std::max<uint64_t>(f16_token_bytes, 1)
                            : static_cast<uint64_t>(std::ceil(config.budget_fraction *
                                                              static_cast<double>(budget_tokens)));
  return RoundUp(CeilDiv(config.recents_percent * held, 100), config.window);
}

uint64_t MinimumBudgetBytes(const Config& config, std::span<const LayerShape> layers) {
  const uint64_t w = config.window;
  const uint64_t recents = RecentTokens(config, F16TokenBytes(layers), config.budget_tokens);
  const uint64_t n_sink = CeilDiv(config.sinks, w);
  const uint64_t n_full = n_sink + WindowsTouched(recents + config.EffectiveInterval(), w);
  const std::vector<Config> rungs = codecs::RungConfigs(config);
  uint64_t bytes = sizeof(Sequence);
  uint64_t rope_table = 0;
  std::set<uint64_t> sizes;  // of blocks: each has a pool
  for (const LayerShape& l : layers) {
    rope_table = std::max<uint64_t>(rope_table,
                                    kernels::RopeTable::MaxBytes(l.head_dim, config.window * n_full,
                                                                 codecs::WantsQueryEnergy(config)));
    const uint64_t full =
        l.n_kv_heads * kernels::FullHeadBytes(config.window, l.head_dim, l.head_dim_v);
    const uint64_t records = kUnitBytes + kSides * kBlockBytes;
    uint64_t packed = UINT64_MAX;  // on the smallest rung
    for (const Config& rung : rungs) {
      packed = std::min<uint64_t>(packed, codecs::CodecBytes(rung, RowsOf(l)).total());
      bytes += codecs::LearnedBytes(rung, RowsOf(l));
    }
    bytes += n_full * (full + records) + l.n_kv_heads * packed + records;
    bytes += kUnitSlack + sizeof(LayerSeq);
    for (const Side s : kBothSides) {
      sizes.insert(uint64_t{l.n_kv_heads} * w * 2 * (s == Side::kKeys ? l.head_dim : l.head_dim_v));
    }
    for (const Config& rung : rungs) {
      const codecs::BlockBytes block = codecs::CodecBytes(rung, RowsOf(l));
      sizes.insert({l.n_kv_heads * block.keys, l.n_kv_heads * block.values});
    }
  }
  bytes += sizes.size() * kPoolSlack;
  const uint64_t window_bytes = sizeof(WindowRecord) + 2 * sizeof(uint32_t) * (w + 1);
  return bytes + rope_table + (n_full + 8) * window_bytes;
}

Config WithLeastBudget(const Config& config, std::span<const LayerShape> layers, uint32_t n_streams,
                       uint32_t cells_per_stream) {
  if (config.preset == Preset::kFull) return config;
  Config least = config;
  const auto token_bytes = static_cast<double>(F16TokenBytes(layers));
  constexpr int kMaxRounds = 16;  // recents may be a share of the tokens
  for (int i = 0; i < kMaxRounds; ++i) {
    Config asked = least;
    if (asked.budget_tokens == 0) asked.budget_tokens = cells_per_stream;
    const double minimum = kHeadroom * static_cast<double>(MinimumBudgetBytes(asked, layers));
    // What is short by less than a byte or a token is rounding of the shares.
    if (config.budget_bytes > 0) {
      // Recents that are a share of the budget grow with it: from then on one stream's must fit.
      const auto bytes = static_cast<uint64_t>(minimum * (i == 0 ? n_streams : 1));
      if (bytes <= least.budget_bytes + 1) break;
      least.budget_bytes = bytes;
      continue;
    }
    const double tokens = minimum / (config.budget_fraction * token_bytes);
    if (tokens < asked.budget_tokens + 1.0) break;
    least.budget_tokens = static_cast<uint32_t>(std::min(std::ceil(tokens), 2147483647.0));
  }
  return least;
}

std::vector<double> ShareBudget(const Config& config, std::span<const CacheDemand> caches) {
  double all = 0.0;
  for (const CacheDemand& c : caches) all += static_cast<double>(c.f16_bytes);
  const double fraction = config.budget_bytes > 0 ? static_cast<double>(config.budget_bytes) / all
                                                  : config.budget_fraction;
  std::vector<double> fractions(caches.size(), fraction);
  // What a cache should have at least: no more than its full size, or the fraction would exceed 1.
  const auto least = [](const CacheDemand& c) {
    return std::min(kHeadroom * static_cast<double>(c.minimum_bytes),
                    static_cast<double>(c.f16_bytes));
  };
  double missing = 0.0, spare = 0.0;
  for (const CacheDemand& c : caches) {
    const double over = fraction * static_cast<double>(c.f16_bytes) - least(c);
    (over < 0.0 ? missing : spare) += std::fabs(over);
  }
  if (missing == 0.0 || missing > spare) return fractions;
  for (size_t i = 0; i < caches.size(); ++i) {
    const auto f16 = static_cast<double>(caches[i].f16_bytes);
    const double minimum = least(caches[i]), over = fraction * f16 - minimum;
    fractions[i] = (over < 0.0 ? minimum : minimum + over * (1.0 - missing / spare)) / f16;
  }
  return fractions;
}

uint32_t KvCache::Impl::Recents() const {
  return static_cast<uint32_t>(RecentTokens(config, f16_token_bytes, budget_tokens));
}

uint64_t KvCache::Impl::DomainBudget() const {
  if (config.budget_bytes > 0) return config.budget_bytes;
  return static_cast<uint64_t>(config.budget_fraction * static_cast<double>(budget_tokens) *
                               static_cast<double>(f16_token_bytes));
}

uint64_t KvCache::Impl::TotalBudget() const {
  return config.budget_bytes > 0 ? config.budget_bytes : DomainBudget() * n_streams;
}

/// A prompt that others have left behind.
bool KvCache::Impl::Stalled(const Sequence& s) const {
  return s.prompt_phase && decode_rounds >= s.chunk_round + config.EffectiveInterval();
}

bool KvCache::Impl::RoutedSequence(const Sequence& s) const {
  return Bounded() || s.first_event || Stalled(s);
}

/// See the head of this file.
bool KvCache::Impl::LimitWanted() const {
  if (!Routes()) return false;
  if (Bounded()) return true;
  bool any = false;
  for (const auto& s : sequences) {
    if (!s || (s->empty() && !s->noted)) continue;
    if (!RoutedSequence(*s)) return false;
    any = true;
  }
  return any;
}

uint64_t KvCache::Impl::FixedTableBytes() const {
  uint64_t bytes = CapacityBytes(windows) + CapacityBytes(window_cells);
  for (const Stream& stream : streams) bytes += CapacityBytes(stream.cells);
  for (const auto& s : sequences) {
    if (!s) continue;
    bytes += sizeof(Sequence) + CapacityBytes(s->windows) + CapacityBytes(s->layers);
  }
  for (const auto& table : rope_tables) bytes += table->bytes();
  for (const ShapeStore& store : stores) bytes += store.n_layers * store.learned_bytes;
  return bytes;
}

uint64_t KvCache::Impl::TableBytes() const {
  uint64_t bytes = FixedTableBytes() + unit_table_bytes;
  for (const auto& pool : pools) bytes += pool->table_bytes();
  return bytes;
}

/// Growth of the fixed tables when windows and tokens are added, at most.
uint64_t KvCache::Impl::TableGrowth(uint32_t new_windows, uint32_t new_tokens) const {
  const size_t fresh = new_windows > n_free_windows ? new_windows - n_free_windows : 0;
  uint64_t bytes = GrownBytes(windows, fresh) - CapacityBytes(windows);
  bytes += GrownBytes(window_cells, fresh * config.window) - CapacityBytes(window_cells);
  for (const Stream& stream : streams) {
    const size_t added = std::min<size_t>(new_tokens, cells_per_stream - stream.cells.size());
    bytes += GrownBytes(stream.cells, added) - CapacityBytes(stream.cells);
  }
  for (const auto& s : sequences) {
    if (s) bytes += GrownBytes(s->windows, new_windows) - CapacityBytes(s->windows);
  }
  return bytes;
}

uint64_t KvCache::Impl::DormantBytes() const {
  uint64_t bytes = 0;
  for (const ShapeStore& store : stores) bytes += store.dormant_bytes;
  return bytes;
}

uint64_t KvCache::Impl::Limit() const {
  return TotalBudget() + (config.charge_dormant ? 0 : DormantBytes());
}

/// The limit comes into force when it is wanted and kept (bounded: from the start), and stays as
/// long as it is wanted.
void KvCache::Impl::UpdateLimit() {
  if (!LimitWanted() || overdrawn) {
    limit_on = false;
  } else if (HeldBytes() <= Limit()) {
    limit_on = true;
  }
}

void KvCache::Impl::NotePeak() {
  if (LimitInForce()) counters.peak_bytes = std::max(counters.peak_bytes, HeldBytes());
}

/// Sequences routed together with `seq`, oldest first. With prefill = full, prompts that are still
/// being read are left alone.
std::vector<SeqId> KvCache::Impl::Domain(SeqId seq) const {
  std::vector<SeqId> ids;
  for (SeqId id = 0; id < sequences.size(); ++id) {
    const Sequence* s = Seq(id);
    if (!s || (id != seq && (s->empty() || !RoutedSequence(*s)))) continue;
    if (config.budget_bytes == 0 && s->stream != sequences[seq]->stream) continue;
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end(),
            [&](SeqId a, SeqId b) { return sequences[a]->created < sequences[b]->created; });
  return ids;
}

uint64_t KvCache::Impl::LargestFullCost() const {
  uint64_t largest = 0;
  for (const ShapeStore& store : stores)
    largest = std::max(largest, store.UnitCost(kFullRung, kFullRung) * store.shape.n_together);
  return largest;
}

uint64_t KvCache::Impl::PromptReserve(std::span<const SeqId> domain) const {
  uint64_t n_windows = 0;
  for (const SeqId id : domain) {
    const Sequence& s = *sequences[id];
    if (Chunked(s)) n_windows += CountNewWindows(s, s.chunk_tokens);
  }
  return n_windows * LargestFullCost();
}

/// Bytes that the windows of one layer may hold. Rows of a prompt chunk that the budget cannot hold
/// beside half of everything else go beyond it until their layer has been routed.
uint64_t KvCache::Impl::LayerShare(uint32_t il, std::span<const SeqId> domain) const {
  uint32_t new_tokens = 0;
  for (const SeqId id : domain) {
    const Sequence& s = *sequences[id];
    new_tokens += Chunked(s) ? s.chunk_tokens : s.reserved;
  }
  const uint32_t new_windows =
      new_tokens / config.window + 2 * static_cast<uint32_t>(domain.size());
  uint64_t fixed = FixedTableBytes() + TableGrowth(new_windows, new_tokens);
  for (const auto& table : rope_tables) {
    fixed += (new_tokens / 64 + 2) * RopeBlockBytes(*table);
  }
  size_t n_live = 0;
  for (const auto& s : sequences) n_live += s ? 1 : 0;
  fixed += n_live * layers.size() * kUnitSlack;
  fixed += pools.size() * kPoolSlack;
  if (config.budget_bytes == 0) fixed = CeilDiv(fixed, n_streams);

  fixed += pressure;
  const uint64_t budget = DomainBudget();
  if (budget <= fixed) return 0;
  const uint64_t reserve = std::min(PromptReserve(domain), (budget - fixed) / 2);
  const uint64_t left = budget - fixed - reserve;
  const uint64_t layer_bytes = layers[il].f16_token_bytes;
  return left / f16_token_bytes * layer_bytes +
         left % f16_token_bytes * layer_bytes / f16_token_bytes;
}

/// Growth of everything held by the next rows, exactly; of prompts that are read under a limit, by
/// one layer's rows, since layers take turns.
uint64_t KvCache::Impl::StepGrowth(std::span<const StepRows> rows) const {
  uint64_t chunk_windows = 0, bytes = 0;
  uint32_t n_windows = 0, n_tokens = 0;
  for (const StepRows& r : rows) {
    const Sequence& s = *sequences[r.seq];
    const uint32_t n = std::min(r.n, CountNewWindows(s, r.n) + r.n_breaks);
    n_tokens += r.n;
    if (Chunked(s)) {
      chunk_windows += n;
      continue;
    }
    n_windows += n;
    for (const LayerSeq& ls : s.layers) bytes += GrownBytes(ls.units, n) - CapacityBytes(ls.units);
  }
  std::vector<BlockCount>& blocks = growth_counts;
  blocks.clear();
  for (const ShapeStore& store : stores) {
    for (const Side side : kBothSides) {
      CountBlock(blocks, store.rungs[kFullRung].pool(side), size_t{n_windows} * store.n_layers);
    }
  }
  for (const BlockCount& count : blocks) bytes += count.pool->GrowthBytes(count.n);
  bytes += TableGrowth(n_windows + static_cast<uint32_t>(chunk_windows), n_tokens);
  for (const auto& table : rope_tables) {
    bytes += table->GrowthBytes(max_pos + static_cast<int32_t>(n_tokens));
  }
  return bytes + std::min(chunk_windows * LargestFullCost(), TotalBudget() / 2);
}

/// True if the next rows can be stored without routing.
bool KvCache::Impl::FitsNext(std::span<const StepRows> rows) const {
  return HeldBytes() + StepGrowth(rows) <= Limit();
}

}  // namespace qevict
