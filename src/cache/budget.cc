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

#include "cache/kv_cache_impl.h"

namespace qevict {
namespace {

/// Growth steps that even a short vector makes (GrowTight), per layer of a sequence and per pool.
constexpr uint64_t kUnitSlack = 8 * sizeof(UnitRecord);
constexpr uint64_t kPoolSlack = 2 * (8 * sizeof(SlotOwner) + kPageBytes);

uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

/// Windows that n consecutive tokens can touch.
uint64_t WindowsTouched(uint64_t n, uint64_t window) {
  return n == 0 ? 0 : (n + window - 2) / window + 1;
}

uint64_t RoundUp(uint64_t n, uint64_t to) { return CeilDiv(n, to) * to; }

uint64_t RopeBlockBytes(const kernels::RopeTable& table) {
  return RoundUp(table.n_pairs(), 16) * 2 * sizeof(float);
}

}  // namespace

uint64_t MinimumBudgetBytes(const Config& config, std::span<const LayerShape> layers) {
  const uint64_t w = config.window;
  uint64_t recents = config.recents;
  if (config.recents_percent > 0) {
    recents = RoundUp(CeilDiv(uint64_t{config.recents_percent} * config.budget_tokens, 100), w);
  }
  const uint64_t n_sink = CeilDiv(config.sinks, w);
  const uint64_t n_full = n_sink + WindowsTouched(recents + config.EffectiveInterval(), w);
  uint64_t bytes = sizeof(Sequence);
  uint64_t rope_table = 0;
  for (const LayerShape& l : layers) {
    rope_table = std::max<uint64_t>(rope_table,
                                    kernels::RopeTable::MaxBytes(l.head_dim, config.window * n_full,
                                                                 codecs::WantsQueryEnergy(config)));
    const uint64_t full =
        l.n_kv_heads * kernels::FullHeadBytes(config.window, l.head_dim, l.head_dim_v);
    const uint64_t packed = l.n_kv_heads * codecs::CodecBytes(config, RowsOf(l)).total();
    bytes += n_full * (full + kRecordBytes) + packed + kRecordBytes;
    bytes += kUnitSlack + sizeof(LayerSeq) + codecs::LearnedBytes(config, RowsOf(l));
    const auto same_shape = [&l](const LayerShape& other) { return SameShape(l, other); };
    if (std::find_if(layers.begin(), layers.end(), same_shape) ==
        layers.begin() + (&l - layers.data())) {
      bytes += kPoolSlack;  // once per distinct shape
    }
  }
  const uint64_t window_bytes = sizeof(WindowRecord) + 2 * sizeof(uint32_t) * (w + 1);
  return bytes + rope_table + (n_full + 8) * window_bytes;
}

std::vector<double> ShareBudget(const Config& config, std::span<const CacheDemand> caches) {
  constexpr double kHeadroom = 1.1;  // a cache that is given its minimum still packs and promotes
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
  if (config.recents_percent == 0) return config.recents;
  const uint64_t tokens = CeilDiv(uint64_t{config.recents_percent} * budget_tokens, 100);
  return static_cast<uint32_t>(RoundUp(tokens, config.window));
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
  for (const ShapePools& p : pools) bytes += p.n_layers * p.learned_bytes;
  return bytes;
}

uint64_t KvCache::Impl::TableBytes() const {
  uint64_t bytes = FixedTableBytes() + unit_table_bytes;
  for (const ShapePools& p : pools) {
    bytes += CapacityBytes(p.full.owners) + CapacityBytes(p.packed.owners);
  }
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
  for (const ShapePools& p : pools) bytes += p.n_dormant * p.packed_bytes();
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
  if (!LimitInForce()) {
    arena.SetLimit(SIZE_MAX);
    return;
  }
  const uint64_t tables = TableBytes();
  arena.SetLimit(Limit() > tables ? Limit() - tables : 0);
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
  for (const ShapePools& p : pools)
    largest = std::max(largest, p.costs().full_bytes * p.shape.n_together);
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

Result<uint64_t> KvCache::Impl::LayerShare(uint32_t il, std::span<const SeqId> domain) const {
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
  fixed += n_live * layers.size() * kUnitSlack + pools.size() * kPoolSlack;
  if (config.budget_bytes == 0) fixed = CeilDiv(fixed, n_streams);

  uint64_t reserve = PromptReserve(domain);
  const uint64_t budget = DomainBudget();
  if (budget < fixed) {
    return ResourceExhausted("the budget of " + std::to_string(budget) +
                             " bytes cannot hold tables of " + std::to_string(fixed) +
                             " bytes; raise the budget");
  }
  // A chunk that does not fit beside the rest exceeds the budget while a layer attends to it.
  if (budget < fixed + reserve) reserve = 0;
  const uint64_t left = budget - fixed - reserve;
  const uint64_t layer_bytes = layers[il].f16_token_bytes;
  return left / f16_token_bytes * layer_bytes +
         left % f16_token_bytes * layer_bytes / f16_token_bytes;
}

/// True if the next rows of some sequences can be stored without routing.
bool KvCache::Impl::FitsNext(std::span<const StepRows> rows) const {
  uint64_t bytes = 0;
  uint32_t all_windows = 0, all_rows = 0;
  for (const StepRows& r : rows) {
    const Sequence& s = *sequences[r.seq];
    const uint32_t n_windows = CountNewWindows(s, r.n);
    all_windows += n_windows;
    all_rows += r.n;
    if (Chunked(s)) {
      bytes += n_windows * LargestFullCost();
    } else {
      for (const ShapePools& p : pools) bytes += p.n_layers * n_windows * p.costs().full_bytes;
    }
    for (const LayerSeq& ls : s.layers) {  // growth steps are larger than a record
      const uint64_t grown = GrownBytes(ls.units, n_windows) - CapacityBytes(ls.units);
      bytes += grown > n_windows * kUnitBytes ? grown - n_windows * kUnitBytes : 0;
    }
  }
  bytes += HeldBytes() + TableGrowth(all_windows, all_rows);
  for (const ShapePools& p : pools) {
    const uint64_t owners = GrownBytes(p.full.owners, size_t{all_windows} * p.n_layers);
    bytes += kPageBytes + owners - CapacityBytes(p.full.owners);
  }
  return bytes <= Limit();
}

}  // namespace qevict
