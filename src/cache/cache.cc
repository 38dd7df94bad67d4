// KvCache: creation, accessors, and the public calls that only forward.
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>

#include "cache/kv_cache_impl.h"

namespace qevict {
namespace {

Status CheckShape(const LayerShape& s, size_t il) {
  const auto bad = [](uint32_t d) { return d == 0 || d % 8 != 0 || d > kMaxHeadDim; };
  if (s.n_kv_heads != 0 && !bad(s.head_dim) && !bad(s.head_dim_v)) return {};
  return InvalidArgument(
      "layer " + std::to_string(il) + " has " + std::to_string(s.n_kv_heads) + " kv heads of " +
      std::to_string(s.head_dim) + "/" + std::to_string(s.head_dim_v) +
      " channels; head sizes must be multiples of 8 up to " + std::to_string(kMaxHeadDim));
}

Status CheckBudget(const Config& config, std::span<const LayerShape> shapes, uint64_t budget) {
  if (config.preset == Preset::kFull) return {};
  const uint64_t minimum = MinimumBudgetBytes(config, shapes);
  if (budget >= minimum) return {};
  return InvalidArgument("the budget of " + std::to_string(budget) +
                         " bytes is below the minimum of " + std::to_string(minimum) +
                         " bytes for sinks, recents and one packed window");
}

std::vector<LayerShape> ShapesOf(const std::vector<LayerState>& layers,
                                 const std::vector<ShapeStore>& stores) {
  std::vector<LayerShape> shapes;
  shapes.reserve(layers.size());
  for (const LayerState& l : layers) shapes.push_back(stores[l.store].shape);
  return shapes;
}

/// The system may refuse memory anywhere: calls say so, and throw nothing.
template <typename F>
Status Guarded(const F& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return OutOfMemory();
  }
}

uint64_t Nanoseconds() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace

KvCache::KvCache() : impl_(std::make_unique<Impl>()) {}
KvCache::~KvCache() = default;

Result<std::unique_ptr<KvCache>> KvCache::Create(const Config& config,
                                                 std::vector<LayerShape> layers, uint32_t n_streams,
                                                 uint32_t cells_per_stream) {
  QEVICT_RETURN_IF_ERROR(ValidateConfig(config));
  QEVICT_RETURN_IF_ERROR(CheckPolicy(config));
  if (layers.empty() || layers.size() > 0xFFFF) {
    return InvalidArgument("a cache needs 1 to 65535 layers, not " + std::to_string(layers.size()));
  }
  if (n_streams == 0 || cells_per_stream == 0) {
    return InvalidArgument("a cache needs at least one stream and one cell");
  }
  for (size_t il = 0; il < layers.size(); ++il) {
    QEVICT_RETURN_IF_ERROR(CheckShape(layers[il], il));
    if (config.per_head && layers[il].n_kv_heads != 1) {
      return InvalidArgument(
          "per_head ranks every kv head alone, so each must be a layer of its own; layer " +
          std::to_string(il) + " has " + std::to_string(layers[il].n_kv_heads) + " kv heads");
    }
  }
  std::unique_ptr<KvCache> cache(new KvCache);
  Impl& c = *cache->impl_;
  c.config = config;
  const char* check = std::getenv("QEVICT_CHECK");  // NOLINT(concurrency-mt-unsafe): read only
  if (check && std::strcmp(check, "1") == 0) c.config.check = true;
  c.n_streams = n_streams;
  c.cells_per_stream = cells_per_stream;
  c.budget_tokens = config.budget_tokens ? config.budget_tokens : cells_per_stream;
  c.streams.resize(n_streams);
  const std::vector<LayerShape> shapes = layers;
  QEVICT_RETURN_IF_ERROR(c.InitStores(std::move(layers)));
  QEVICT_RETURN_IF_ERROR(CheckBudget(config, shapes, c.DomainBudget()));
  c.UpdateLimit();
  return cache;
}

const Config& KvCache::config() const { return impl_->config; }
uint32_t KvCache::n_layers() const { return static_cast<uint32_t>(impl_->layers.size()); }
const LayerShape& KvCache::layer(uint32_t il) const { return impl_->StoreOf(il).shape; }

Status KvCache::SetRope(uint32_t il, const RopeParams& rope) {
  Impl& c = *impl_;
  if (il >= c.layers.size()) return OutOfRange("layer " + std::to_string(il) + " does not exist");
  LayerState& layer = c.layers[il];
  if (layer.rope == rope) return {};
  const LayerShape& shape = c.StoreOf(il).shape;
  if (rope.pairing != RopePairing::kNone &&
      (rope.n_dims == 0 || rope.n_dims % 2 != 0 || rope.offset + rope.n_dims > shape.head_dim)) {
    return InvalidArgument("RoPE over channels " + std::to_string(rope.offset) + "..." +
                           std::to_string(rope.offset + rope.n_dims) + " does not fit a head of " +
                           std::to_string(shape.head_dim));
  }
  for (const auto& s : c.sequences) {
    if (!s) continue;
    for (const UnitRecord& u : s->layers[il].units) {
      if (!u.holds_codes() && !u.dormant()) continue;
      const WindowRecord& w = c.windows[u.window];
      const bool unrotated = !w.has(WindowRecord::kPositional) && w.pos0 == 0;
      if (unrotated && RopeMagnitude(rope) == 1.0f) continue;  // no RoPE changes what is at 0
      return FailedPrecondition("layer " + std::to_string(il) +
                                " holds packed keys; its RoPE cannot change now");
    }
  }
  layer.rope = rope;
  const uint32_t old_table = layer.rope_table;
  layer.rope_table = kNone;
  if (old_table != kNone) c.DropUnusedRopeTable(old_table);
  if (rope.pairing == RopePairing::kNone) return {};
  for (uint32_t i = 0; i < c.rope_tables.size(); ++i) {
    if (c.rope_tables[i]->params() == rope) layer.rope_table = i;
  }
  if (layer.rope_table == kNone) {
    layer.rope_table = static_cast<uint32_t>(c.rope_tables.size());
    c.rope_tables.push_back(std::make_unique<kernels::RopeTable>(rope));
    if (codecs::WantsQueryEnergy(c.config)) c.rope_tables.back()->AddBasis();
    c.rope_tables.back()->Grow(c.max_pos);
  }
  c.UpdateLimit();
  return {};
}

void KvCache::Impl::DropUnusedRopeTable(uint32_t table) {
  for (const LayerState& layer : layers) {
    if (layer.rope_table == table) return;
  }
  rope_tables.erase(rope_tables.begin() + table);
  for (LayerState& layer : layers) {
    if (layer.rope_table != kNone && layer.rope_table > table) --layer.rope_table;
  }
}

const kernels::RopeTable* KvCache::rope_table(uint32_t il) const {
  const uint32_t i = impl_->layers[il].rope_table;
  return i == kNone ? nullptr : impl_->rope_tables[i].get();
}

SeqId KvCache::CreateSequence(uint32_t stream) { return impl_->CreateSequence(stream); }
SeqId KvCache::BranchSequence(SeqId parent) { return impl_->BranchSequence(parent); }
Status KvCache::MoveWindows(std::span<const WindowId> ids, SeqId to) {
  impl_->FinishRestore();
  return impl_->MoveWindows(ids, to);
}
Status KvCache::MergeSequence(SeqId from, SeqId into) {
  impl_->FinishRestore();
  return impl_->MergeSequence(from, into);
}
void KvCache::SetHidden(WindowId window, bool hidden) {
  uint8_t& flags = impl_->windows[window].flags;
  flags =
      static_cast<uint8_t>(hidden ? flags | WindowRecord::kHidden : flags & ~WindowRecord::kHidden);
}
void KvCache::SetTail(TokenRef token) { impl_->SetTail(token); }

std::vector<SeqId> KvCache::Sequences(uint32_t stream) const {
  std::vector<SeqId> ids;
  Sequences(stream, ids);
  return ids;
}

void KvCache::Sequences(uint32_t stream, std::vector<SeqId>& ids) const {
  ids.clear();
  for (SeqId id = 0; id < impl_->sequences.size(); ++id) {
    const Sequence* s = impl_->Seq(id);
    if (s && s->stream == stream) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end(), [&](SeqId a, SeqId b) {
    return impl_->sequences[a]->created < impl_->sequences[b]->created;
  });
}

bool KvCache::IsChain(SeqId seq) const {
  const Sequence* s = impl_->Seq(seq);
  return s && s->chain;
}

uint32_t KvCache::stream_of(SeqId seq) const {
  const Sequence* s = impl_->Seq(seq);
  return s ? s->stream : kNone;
}

std::span<const WindowId> KvCache::windows(SeqId seq) const {
  const Sequence* s = impl_->Seq(seq);
  if (!s) return {};
  return s->windows;
}

WindowInfo KvCache::info(WindowId window) const {
  const WindowRecord& w = impl_->windows[window];
  WindowInfo out{};
  out.seq = w.seq;
  out.birth = w.birth;
  out.pos0 = w.pos0;
  out.n_tokens = w.n_tokens;
  out.pos_stride = w.has(WindowRecord::kPositional) ? 1 : 0;
  out.sink = w.has(WindowRecord::kSink);
  out.hidden = w.has(WindowRecord::kHidden);
  out.live = w.live;
  out.cells = impl_->CellsOf(window);
  return out;
}

TokenRef KvCache::lookup(uint32_t stream, uint32_t cell) const {
  if (stream >= impl_->n_streams) return {};
  const uint32_t code = impl_->Cell(stream, cell);
  if (code == kNone || !Impl::IsToken(code)) return {};
  return {code / kMaxWindow, code % kMaxWindow};
}

bool KvCache::Holds(uint32_t stream, uint32_t cell) const {
  return stream < impl_->n_streams && impl_->Cell(stream, cell) != kNone;
}

SeqId KvCache::SequenceOf(uint32_t stream, uint32_t cell) const {
  if (stream >= impl_->n_streams) return kNone;
  const uint32_t code = impl_->Cell(stream, cell);
  if (code == kNone) return kNone;
  return Impl::IsToken(code) ? impl_->windows[code / kMaxWindow].seq : code & ~kEvictedMark;
}

uint64_t KvCache::n_tokens(SeqId seq) const {
  const Sequence* s = impl_->Seq(seq);
  return s ? s->live + s->evicted : 0;
}

TokenRef KvCache::tail(SeqId seq) const {
  const Sequence* s = impl_->Seq(seq);
  return s ? s->tail : TokenRef{};
}

int32_t KvCache::tail_pos(SeqId seq) const {
  const Sequence* s = impl_->Seq(seq);
  return s ? s->tail_pos : 0;
}

Status KvCache::Append(std::span<const TokenSpec> tokens, std::vector<TokenRef>& refs) {
  refs.clear();
  impl_->FinishRestore();
  return Guarded([&] { return impl_->Append(tokens, refs); });
}

Status KvCache::WriteK(uint32_t il, std::span<const TokenRef> refs, const float* rows,
                       size_t row_stride, ParallelFor& pool) {
  return Guarded([&] { return impl_->Write(il, refs, rows, row_stride, Side::kKeys, pool); });
}

Status KvCache::WriteV(uint32_t il, std::span<const TokenRef> refs, const float* rows,
                       size_t row_stride, ParallelFor& pool) {
  return Guarded([&] { return impl_->Write(il, refs, rows, row_stride, Side::kValues, pool); });
}

void KvCache::Kill(uint32_t stream, uint32_t cell) {
  if (stream >= impl_->n_streams || impl_->Cell(stream, cell) == kNone) return;
  impl_->FinishRestore();
  impl_->ReleaseCell(stream, cell);
  impl_->FinishChange();
}

void KvCache::Kill(uint32_t stream, std::span<const uint32_t> cells) {
  if (stream >= impl_->n_streams || cells.empty()) return;
  impl_->FinishRestore();
  impl_->ReleaseCells(stream, cells);
  impl_->FinishChange();
}

void KvCache::View(uint32_t il, SeqId seq, std::vector<kernels::WindowRef>& refs,
                   std::vector<WindowId>& ids) const {
  const Impl& c = *impl_;
  const Sequence* s = c.Seq(seq);
  if (!s || il >= c.layers.size()) return;
  const std::vector<UnitRecord>& units = s->layers[il].units;
  const size_t first = refs.size();
  refs.resize(first + units.size());
  ids.resize(first + units.size());
  for (size_t i = 0; i < units.size(); ++i) {
    const UnitRecord& u = units[i];
    const WindowRecord& w = c.windows[u.window];
    kernels::WindowRef& ref = refs[first + i];
    ref.k = c.Block(il, u, Side::kKeys);
    ref.v = c.Block(il, u, Side::kValues);
    ref.pos0 = w.pos0;
    ref.rung_k = u.rung(Side::kKeys);
    ref.rung_v = u.rung(Side::kValues);
    ref.pos_stride = w.has(WindowRecord::kPositional) ? 1 : 0;
    ids[first + i] = u.window;
  }
}

uint32_t KvCache::Rungs(uint32_t il, kernels::RungCode* rungs) const {
  const ShapeStore& store = impl_->StoreOf(il);
  for (size_t r = 0; r < store.rungs.size(); ++r) {
    const codecs::Codec* codec = impl_->layers[il].codecs[r].get();
    rungs[r].format = codec ? codec->format() : kernels::WindowFormat::kFull;
    rungs[r].k_head_bytes = store.rungs[r].bytes_of_head(Side::kKeys);
    rungs[r].v_head_bytes = store.rungs[r].bytes_of_head(Side::kValues);
    rungs[r].token = codec ? codec->token_codes() : nullptr;
    rungs[r].grid = codec ? codec->grid_codes() : nullptr;
  }
  return static_cast<uint32_t>(store.rungs.size());
}

const codecs::Codec& KvCache::codec(uint32_t il, Rung rung) const {
  return *impl_->layers[il].codecs[rung];
}

void KvCache::AddQueryEnergy(uint32_t il, const float* squares) {
  if (WantsQueryEnergy(il)) impl_->AddQueryEnergy(il, squares);
}

bool KvCache::WantsQueryEnergy(uint32_t il) const {
  return il < impl_->layers.size() && codecs::WantsQueryEnergy(impl_->config) &&
         !impl_->layers[il].learned;
}

float KvCache::key_bias() const { return impl_->key_bias; }

float KvCache::score(uint32_t il, WindowId window) const {
  const UnitRecord* unit = impl_->FindUnit(impl_->windows[window].seq, il, window);
  return unit ? unit->total_score() : 0.0f;
}

void KvCache::AddMass(uint32_t il, std::span<const WindowId> ids, const float* mass,
                      size_t head_stride, uint32_t n_heads, uint32_t n_queries) {
  impl_->AddMass(il, ids, mass, head_stride, n_heads, n_queries);
}

bool KvCache::NoteStep(SeqId seq, uint32_t n, StepKind kind) {
  impl_->FinishRestore();
  return impl_->NoteStep(seq, n, kind);
}

void KvCache::ConfirmTail(SeqId seq) {
  if (Sequence* s = impl_->Seq(seq)) s->tail_confirmed = true;
}

uint32_t KvCache::last_rows(SeqId seq) const {
  const Sequence* s = impl_->Seq(seq);
  return s ? s->last_rows : 0;
}

bool KvCache::decoded(SeqId seq) const {
  const Sequence* s = impl_->Seq(seq);
  return s && s->decoded;
}

/// With Config::check: what Validate finds wrong.
Status KvCache::Impl::CheckSound() const {
  if (!config.check) return {};
  try {
    const std::vector<std::string> violations = Validate();
    return violations.empty() ? Status() : Internal(violations.front());
  } catch (const std::bad_alloc&) {  // nothing has been found
    return {};
  }
}

/// Runs an event, or one layer of it; `last`: the event ends with it.
template <typename F>
Status KvCache::Impl::RunEvent(bool last, const F& event) {
  const uint64_t start = Nanoseconds();
  FinishRestore();
  Status status;
  try {
    status = event();
  } catch (const std::bad_alloc&) {
    status = OutOfMemory();
  }
  if (status.ok() && last && Routes()) ++counters.events;
  counters.route_ns += Nanoseconds() - start;
  FinishChange();
  return status.ok() && last ? CheckSound() : status;
}

Status KvCache::Route(uint32_t il, SeqId seq, uint32_t reserve_tokens, ParallelFor& pool) {
  return impl_->RunEvent(il + 1 == n_layers(),
                         [&] { return impl_->RouteChunk(il, seq, reserve_tokens, pool); });
}

Status KvCache::RouteAll(SeqId seq, uint32_t reserve_tokens, ParallelFor& pool) {
  return impl_->RunEvent(true, [&] { return impl_->RouteAll(seq, reserve_tokens, pool); });
}

Status KvCache::PrepareStep(std::span<const StepRows> rows, ParallelFor& pool) {
  for (const StepRows& r : rows) {
    if (!impl_->Seq(r.seq))
      return OutOfRange("sequence " + std::to_string(r.seq) + " does not exist");
  }
  Impl& c = *impl_;
  const uint64_t start = Nanoseconds();
  c.FinishRestore();
  Status status;
  try {
    status = c.PrepareStep(rows, pool);
  } catch (const std::bad_alloc&) {
    status = OutOfMemory();
  }
  c.counters.route_ns += Nanoseconds() - start;
  c.FinishChange();
  return status.ok() ? c.CheckSound() : status;
}

bool KvCache::overdrawn() const { return impl_->overdrawn; }

bool KvCache::NeedsBoundedRoute(uint32_t il, SeqId seq) const {
  return impl_->NeedsBoundedRoute(il, seq);
}

Status KvCache::SetBudget(uint32_t tokens, double fraction) {
  Impl& c = *impl_;
  for (const auto& s : c.sequences) {
    if (s && s->first_event) {
      return FailedPrecondition("the budget's tokens cannot change after the first routing event");
    }
  }
  if (tokens == 0) return InvalidArgument("a budget needs at least one token");
  const std::pair before(c.budget_tokens, c.config.budget_fraction);
  c.budget_tokens = c.config.budget_tokens = tokens;
  c.config.budget_fraction = fraction;
  Status status = Guarded(
      [&] { return CheckBudget(c.config, ShapesOf(c.layers, c.stores), c.DomainBudget()); });
  if (!status.ok()) {
    std::tie(c.budget_tokens, c.config.budget_fraction) = before;
    c.config.budget_tokens = c.budget_tokens;
  }
  c.UpdateLimit();
  return status;
}

void KvCache::Clear() { impl_->Clear(); }
Status KvCache::CopyStream(uint32_t src, uint32_t dst) {
  impl_->FinishRestore();
  return Guarded([&] { return impl_->CopyStream(src, dst); });
}
Status KvCache::ShiftPositions(std::span<const int32_t> delta) {
  impl_->FinishRestore();
  return Guarded([&] { return impl_->ShiftPositions(delta); });
}
Status KvCache::RotateLayer(uint32_t il, std::span<const int32_t> delta, ParallelFor& pool) {
  return Guarded([&] { return impl_->RotateLayer(il, delta, pool); });
}
void KvCache::ReadRowK(uint32_t il, uint32_t stream, uint32_t cell, uint16_t* row) {
  impl_->ReadRow(il, stream, cell, Side::kKeys, row);
}
void KvCache::ReadRowV(uint32_t il, uint32_t stream, uint32_t cell, uint16_t* row) {
  impl_->ReadRow(il, stream, cell, Side::kValues, row);
}
Status KvCache::RestoreRowsK(uint32_t il, uint32_t stream, uint32_t cell0, uint32_t n,
                             const uint16_t* rows) {
  return Guarded([&] { return impl_->RestoreRows(il, stream, cell0, n, Side::kKeys, rows); });
}
Status KvCache::RestoreRowsV(uint32_t il, uint32_t stream, uint32_t cell0, uint32_t n,
                             const uint16_t* rows) {
  return Guarded([&] { return impl_->RestoreRows(il, stream, cell0, n, Side::kValues, rows); });
}
void KvCache::FinishRestore() { impl_->FinishRestore(); }
CacheStats KvCache::Stats() const { return impl_->Stats(); }
uint64_t KvCache::ResidentBytes() const { return impl_->arena.ResidentBytes(); }
std::vector<std::string> KvCache::Validate() const { return impl_->Validate(); }
void KvCache::FailGrowthAt(size_t n) { impl_->arena.FailGrowthAt(n); }

}  // namespace qevict
