// The validator: every invariant of the data structures, as sentences about what is wrong.
// Reads only; shared by the tests and by Config::check at run time.
#include <bit>

#include "cache/kv_cache_impl.h"

namespace qevict {
namespace {

using Violations = std::vector<std::string>;

/// Collects sentences; stops adding after a while so that a broken cache does not fill the memory.
class Report {
 public:
  explicit Report(Violations& out) : out_(out) {}
  void Check(bool ok, const std::string& sentence) {
    if (!ok && out_.size() < 100) out_.push_back(sentence);
  }

 private:
  Violations& out_;
};

std::string WindowName(WindowId w) { return "window " + std::to_string(w); }
std::string LayerName(uint32_t il) { return "layer " + std::to_string(il); }

}  // namespace

/// Lists, births, live bits and counters of windows and sequences.
void KvCache::Impl::ValidateWindows(Violations& out) const {
  Report report(out);
  size_t n_listed = 0;
  for (SeqId id = 0; id < sequences.size(); ++id) {
    const Sequence* s = Seq(id);
    if (!s) continue;
    uint64_t live = 0;
    uint32_t last_birth = 0;
    bool sinks_over = false;
    for (const WindowId w : s->windows) {
      ++n_listed;
      if (w >= windows.size() || !windows[w].in_use()) {
        report.Check(false, WindowName(w) + " is listed but not in use");
        continue;
      }
      const WindowRecord& r = windows[w];
      const uint32_t all = r.n_tokens >= 32 ? 0xFFFFFFFFu : (1u << r.n_tokens) - 1;
      report.Check(r.seq == id, WindowName(w) + " is listed by a sequence that is not its own");
      report.Check(r.birth >= last_birth, WindowName(w) + " is out of order in its sequence");
      report.Check(r.n_tokens >= 1 && r.n_tokens <= config.window,
                   WindowName(w) + " holds " + std::to_string(r.n_tokens) + " tokens");
      report.Check(r.live != 0 && (r.live & ~all) == 0, WindowName(w) + " has wrong live bits");
      report.Check(!(r.has(WindowRecord::kSink) && sinks_over),
                   WindowName(w) + " is a sink behind other windows");
      sinks_over = !r.has(WindowRecord::kSink);
      last_birth = r.birth + 1;
      live += static_cast<uint64_t>(std::popcount(r.live));
    }
    report.Check(live == s->live, "sequence " + std::to_string(id) + " counts " +
                                      std::to_string(s->live) + " live tokens, not " +
                                      std::to_string(live));
  }
  size_t n_used = 0, n_free = 0;
  for (const WindowRecord& r : windows) n_used += r.in_use() ? 1 : 0;
  for (WindowId w = free_window; w != kNone && n_free <= windows.size(); w = windows[w].seq) {
    report.Check(!windows[w].in_use(), WindowName(w) + " is both free and in use");
    ++n_free;
  }
  report.Check(n_used == n_listed, std::to_string(n_used) + " windows are in use, but " +
                                       std::to_string(n_listed) + " are listed");
  report.Check(n_free == n_free_windows && n_free + n_used == windows.size(),
               "the list of free windows is wrong");
}

/// Every unit is in order, has a state, and its slots know it.
void KvCache::Impl::ValidateUnits(Violations& out) const {
  Report report(out);
  std::vector<uint32_t> n_units(windows.size());
  uint64_t table_bytes = 0;
  for (SeqId id = 0; id < sequences.size(); ++id) {
    const Sequence* s = Seq(id);
    if (!s) continue;
    for (uint32_t il = 0; il < layers.size(); ++il) {
      table_bytes += CapacityBytes(s->layers[il].units) + CapacityBytes(s->layers[il].ledger);
      uint32_t last_birth = 0;
      for (const UnitRecord& u : s->layers[il].units) {
        const std::string name = LayerName(il) + ", " + WindowName(u.window);
        if (u.window >= windows.size() || windows[u.window].seq != id) {
          report.Check(false, name + ": a unit of a window that is not there");
          continue;
        }
        const WindowRecord& w = windows[u.window];
        ++n_units[u.window];
        report.Check(w.birth >= last_birth, name + ": units are out of order");
        last_birth = w.birth + 1;
        report.Check(u.has(Side::kKeys) && u.has(Side::kValues), name + ": a unit without blocks");
        report.Check(!u.pinned() || u.holds_codes(), name + ": pinned, but full precision");
        const bool codes = u.holds_codes() || u.dormant();
        report.Check(!codes || w.has(WindowRecord::kSealed), name + ": codes, not sealed");
        report.Check(u.dormant() == (FindLedger(s->layers[il], u.window) != nullptr),
                     name + ": the ledger and the unit contradict each other");
      }
    }
  }
  report.Check(table_bytes == unit_table_bytes, "unit tables hold " + std::to_string(table_bytes) +
                                                    " bytes, not " +
                                                    std::to_string(unit_table_bytes));
  for (WindowId w = 0; w < windows.size(); ++w) {
    if (!windows[w].in_use()) continue;
    report.Check(n_units[w] == windows[w].n_units, WindowName(w) + " miscounts its units");
    report.Check(n_units[w] <= windows[w].n_created && windows[w].n_created <= layers.size(),
                 WindowName(w) + " miscounts the layers it was written in");
    report.Check(windows[w].has(WindowRecord::kSealed) || n_units[w] == windows[w].n_created,
                 WindowName(w) + " is evicted somewhere, but not sealed");
    report.Check(n_units[w] > 0 || windows[w].n_created < layers.size(),
                 WindowName(w) + " is evicted everywhere, but still kept");
  }
}

/// Cells and live tokens name each other.
void KvCache::Impl::ValidateCells(Violations& out) const {
  Report report(out);
  std::vector<uint64_t> n_evicted(sequences.size());
  uint64_t n_cells = 0, n_live = 0;
  for (uint32_t stream = 0; stream < n_streams; ++stream) {
    for (uint32_t cell = 0; cell < streams[stream].cells.size(); ++cell) {
      const uint32_t code = streams[stream].cells[cell];
      if (code == kNone) continue;
      const std::string name =
          "cell " + std::to_string(cell) + " of stream " + std::to_string(stream);
      if (!IsToken(code)) {
        const SeqId id = code & ~kEvictedMark;
        report.Check(Seq(id) && Seq(id)->stream == stream, name + ": evicted token of no sequence");
        if (Seq(id)) ++n_evicted[id];
        continue;
      }
      ++n_cells;
      const WindowId w = code / kMaxWindow;
      const uint32_t t = code % kMaxWindow;
      const bool ok = w < windows.size() && windows[w].in_use() && ((windows[w].live >> t) & 1u) &&
                      CellsOf(w)[t] == cell && sequences[windows[w].seq]->stream == stream;
      report.Check(ok, name + ": names a token that is not there");
    }
  }
  for (SeqId id = 0; id < sequences.size(); ++id) {
    if (!Seq(id)) continue;
    n_live += Seq(id)->live;
    report.Check(n_evicted[id] == Seq(id)->evicted,
                 "sequence " + std::to_string(id) + " miscounts its evicted tokens");
  }
  report.Check(n_cells == n_live,
               std::to_string(n_live) + " tokens live in " + std::to_string(n_cells) + " cells");
}

/// Every block is referenced as often as it counts; ledger entries are as they were written.
void KvCache::Impl::ValidateBlocks(Violations& out) const {
  Report report(out);
  std::vector<std::vector<uint32_t>> n_refs(pools.size());
  for (size_t i = 0; i < pools.size(); ++i) n_refs[i].resize(pools[i]->n_handles());
  std::vector<uint64_t> dormant(stores.size());
  const auto count = [&](uint32_t il, const UnitSides& u, Side s, bool is_dormant) {
    const BlockPool& pool = PoolOf(il, s, u.rung(s));
    size_t i = 0;
    while (pools[i].get() != &pool) ++i;
    if (u.block(s) >= n_refs[i].size()) {
      report.Check(false, LayerName(il) + ": a block that is not there");
      return;
    }
    ++n_refs[i][u.block(s)];
    if (is_dormant) dormant[layers[il].store] += pool.block_bytes();
  };
  const_cast<Impl*>(this)->ForBlocks(count);
  for (size_t c = 0; c < stores.size(); ++c)
    report.Check(dormant[c] == stores[c].dormant_bytes, "dormant bytes are miscounted");
  for (size_t i = 0; i < pools.size(); ++i) {
    const BlockPool& pool = *pools[i];
    bool right = true;
    for (BlockId id = 0; id < n_refs[i].size(); ++id) right &= pool.refs(id) == n_refs[i][id];
    report.Check(right, "blocks have wrong reference counts");
    report.Check(pool.page_bytes() == pool.PagesOf(pool.used()), "blocks are not dense");
    for (const size_t slot : pool.Damaged())
      report.Check(false, "block " + std::to_string(slot) + " has changed since it was written");
  }
}

void KvCache::Impl::ValidateBytes(Violations& out) const {
  Report report(out);
  uint64_t committed = 0;
  for (const auto& pool : pools) committed += pool->page_bytes();
  report.Check(committed == arena.bytes(), "the arena's bytes are not the sum of its regions");
  const CacheStats stats = Stats();
  report.Check(stats.bytes.total() == HeldBytes(), "bytes by kind do not add up");
  if (LimitInForce()) {
    report.Check(HeldBytes() <= Limit(), "the cache holds " + std::to_string(HeldBytes()) +
                                             " bytes; its limit is " + std::to_string(Limit()));
  }
}

Violations KvCache::Impl::Validate() const {
  Violations out;
  ValidateWindows(out);
  ValidateUnits(out);
  ValidateCells(out);
  ValidateBlocks(out);
  ValidateBytes(out);
  return out;
}

}  // namespace qevict
