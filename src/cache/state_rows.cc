// Rows out: what an engine's save reads from the cells. See docs/formats/state-row.md.
#include <bit>
#include <cstring>
#include <utility>

#include "cache/kv_cache_impl.h"
#include "cache/row_format.h"

namespace qevict {
namespace {

uint32_t FirstLive(const WindowRecord& w) {
  return static_cast<uint32_t>(std::countr_zero(w.live));
}

RowRecord PlaceOf(const WindowRecord& w, uint32_t t, const Config& config) {
  RowRecord r;
  r.bits = codecs::CodecTag(config);
  r.window = static_cast<uint8_t>(config.window);
  if (w.has(WindowRecord::kPositional)) r.flags |= RowRecord::kPositional;
  if (w.has(WindowRecord::kSink)) r.flags |= RowRecord::kSink;
  r.offset = static_cast<uint8_t>(t);
  r.n_tokens = w.n_tokens;
  r.birth = w.birth;
  r.pos0 = w.pos0;
  return r;
}

}  // namespace

void KvCache::Impl::ReadFullRow(uint32_t il, const UnitRecord& u, uint32_t t, Side side,
                                uint16_t* row) const {
  const ShapeStore& store = StoreOf(il);
  const uint32_t d = HeadDim(il, side);
  for (uint32_t h = 0; h < store.shape.n_kv_heads; ++h) {
    const uint8_t* block = Block(il, u, side) + h * store.rungs[kFullRung].bytes_of_head(side);
    LoadRow(side, block, config.window, d, t, row + size_t{h} * d);
  }
}

void KvCache::Impl::WriteFullRow(uint32_t il, const UnitRecord& u, uint32_t t, Side side,
                                 const uint16_t* row) {
  const ShapeStore& store = StoreOf(il);
  const uint32_t d = HeadDim(il, side);
  for (uint32_t h = 0; h < store.shape.n_kv_heads; ++h) {
    uint8_t* block = Block(il, u, side) + h * store.rungs[kFullRung].bytes_of_head(side);
    StoreRow(side, block, config.window, d, t, row + size_t{h} * d);
  }
}

/// Copies a record's share of a block of codes from or to `bytes`.
void KvCache::Impl::CopyShare(uint32_t il, uint8_t* block, Side side, const RowRecord& record,
                              uint8_t* bytes, bool to_block) const {
  const size_t total = StoreOf(il).rungs[1].pool(side).block_bytes();
  const size_t share = (total + record.n_shares - 1) / record.n_shares;
  const size_t begin = std::min(total, record.share * share);
  const size_t n = std::min(total - begin, share);
  if (to_block) {
    std::memcpy(block + begin, bytes, n);
  } else {
    std::memcpy(bytes, block + begin, n);
  }
}

/// Rows of a window as the full tier would hold them: all kv heads of one token.
void KvCache::Impl::ReadDecodedRow(uint32_t il, const UnitRecord& u, uint32_t t, Side side,
                                   uint16_t* row) const {
  const LayerShape& shape = StoreOf(il).shape;
  const uint32_t d = HeadDim(il, side);
  std::vector<float> k(size_t{config.window} * shape.head_dim);
  std::vector<float> v(size_t{config.window} * shape.head_dim_v);
  const WindowPhases phases(layers[il].rope, windows[u.window]);
  for (uint32_t h = 0; h < shape.n_kv_heads; ++h) {
    LoadRows(il, u, phases, h, k.data(), v.data());
    ConvertTo16((side == Side::kKeys ? k : v).data() + size_t{t} * d, d,
                side == Side::kKeys ? shape.elem_k : shape.elem_v, row + size_t{h} * d);
  }
}

void KvCache::Impl::ReadRow(uint32_t il, uint32_t stream, uint32_t cell, Side side, uint16_t* row) {
  if (il >= layers.size()) return;
  RowRecord record;
  const bool remember = FillRow(il, stream, cell, side, row, record);
  // Engines save K of every layer, then V of every layer: K after V begins another state.
  if (side == Side::kKeys && std::exchange(reading.values, false)) reading.chains.clear();
  reading.values = side == Side::kValues;
  if (side == Side::kValues) return;
  reading.chains.resize(layers.size());
  const uint64_t hash = reading.chains[il].Next(il, cell, row, RowWords(il, Side::kKeys));
  if (remember) RememberRow(hash, record);
}

/// The bytes of a row. True if they do not say where it stands, and `record` should be remembered.
bool KvCache::Impl::FillRow(uint32_t il, uint32_t stream, uint32_t cell, Side side, uint16_t* row,
                            RowRecord& record) const {
  const size_t n_words = RowWords(il, side);
  std::fill_n(row, n_words, uint16_t{0});
  const uint32_t code = stream < n_streams ? Cell(stream, cell) : kNone;
  if (code == kNone) return false;
  const bool room = n_words * 2 >= kRowHeaderBytes;  // tiny rows cannot say that they are evicted
  if (!IsToken(code)) {
    record.kind = side == Side::kKeys ? RowKind::kEvictedK : RowKind::kEvictedV;
    record.bits = codecs::CodecTag(config);
    record.window = static_cast<uint8_t>(config.window);
    record.birth = kNone;
    if (room) WriteRowHeader(record, row);
    return false;
  }
  const WindowId id = code / kMaxWindow;
  const uint32_t t = code % kMaxWindow;
  const WindowRecord& w = windows[id];
  const UnitRecord* u = FindUnit(w.seq, il, id);
  record = PlaceOf(w, t, config);
  if (!u) {
    record.kind = side == Side::kKeys ? RowKind::kEvictedK : RowKind::kEvictedV;
    if (room) WriteRowHeader(record, row);
    return false;
  }
  record.score = u->total_score();
  if (!u->full(side)) {
    record.kind = side == Side::kKeys ? RowKind::kPackedK : RowKind::kPackedV;
    record.n_shares = static_cast<uint8_t>(std::popcount(w.live));
    record.share = static_cast<uint8_t>(std::popcount(w.live & ((1u << t) - 1)));
    if (SavesCodes(il, *u) && SharesFit(il, record.n_shares)) {
      WriteRowHeader(record, row);
      uint8_t* bytes = reinterpret_cast<uint8_t*>(row) + kRowHeaderBytes;
      CopyShare(il, Block(il, *u, side), side, record, bytes, false);
      return false;
    }
    ReadDecodedRow(il, *u, t, side, row);
  } else {
    ReadFullRow(il, *u, t, side, row);
  }
  // Layer 0 finds the token's place again, the first live row of a window its score per layer.
  record.kind = RowKind::kFull;
  return side == Side::kKeys && (il == 0 || t == FirstLive(w));
}

/// True if the codes of a unit mean the same to any cache of this configuration: both sides on the
/// only packed rung, in a codec that learns nothing. Rows of other units are decoded.
bool KvCache::Impl::SavesCodes(uint32_t il, const UnitRecord& u) const {
  return StoreOf(il).rungs.size() == 2 && !u.full(Side::kKeys) && !u.full(Side::kValues) &&
         codecs::SavesCodes(config);
}

/// True if the codes of a window with n live tokens fit behind the headers of its K and V rows.
bool KvCache::Impl::SharesFit(uint32_t il, uint32_t n) const {
  if (StoreOf(il).rungs.size() != 2 || !codecs::SavesCodes(config)) return false;
  for (const Side side : kBothSides) {
    const size_t share = (StoreOf(il).rungs[1].pool(side).block_bytes() + n - 1) / n;
    if (kRowHeaderBytes + share > RowWords(il, side) * 2) return false;
  }
  return true;
}

}  // namespace qevict
