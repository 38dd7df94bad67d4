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

void KvCache::Impl::ReadFullRow(uint32_t il, const UnitRecord& u, uint32_t t, bool is_k,
                                uint16_t* row) const {
  const ShapePools& p = PoolsOf(il);
  const uint32_t d = p.shape.head_dim, dv = p.shape.head_dim_v;
  for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
    const uint8_t* block = FullSlot(il, u) + h * p.full_head_bytes;
    if (is_k) {
      LoadKeyRow(block, config.window, d, t, row + size_t{h} * d);
    } else {
      std::memcpy(row + size_t{h} * dv, block + size_t{config.window} * d * 2 + size_t{t} * dv * 2,
                  size_t{dv} * 2);
    }
  }
}

void KvCache::Impl::WriteFullRow(uint32_t il, const UnitRecord& u, uint32_t t, bool is_k,
                                 const uint16_t* row) {
  const ShapePools& p = PoolsOf(il);
  const uint32_t d = p.shape.head_dim, dv = p.shape.head_dim_v;
  for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
    uint8_t* block = FullSlot(il, u) + h * p.full_head_bytes;
    if (is_k) {
      StoreKeyRow(block, config.window, d, t, row + size_t{h} * d);
    } else {
      std::memcpy(block + size_t{config.window} * d * 2 + size_t{t} * dv * 2, row + size_t{h} * dv,
                  size_t{dv} * 2);
    }
  }
}

/// Bytes of all heads' keys (or values) in a packed slot, codes and grids.
size_t KvCache::Impl::PartBytes(uint32_t il, bool is_k) const {
  const LayerShape& shape = PoolsOf(il).shape;
  const codecs::BlockBytes bytes = PoolsOf(il).codec->bytes();
  return shape.n_kv_heads * (is_k ? bytes.keys : bytes.values);
}

/// Copies a record's share of a packed slot from or to `bytes`. The part is seen as one run of
/// bytes: head 0's keys (values), head 1's, ...
void KvCache::Impl::CopyShare(uint32_t il, uint8_t* slot, bool is_k, const RowRecord& record,
                              uint8_t* bytes, bool to_slot) const {
  const ShapePools& p = PoolsOf(il);
  const size_t total = PartBytes(il, is_k), per_head = total / p.shape.n_kv_heads;
  const size_t first = is_k ? 0 : p.packed_head_bytes - per_head;
  const size_t share = (total + record.n_shares - 1) / record.n_shares;
  const size_t end = std::min(total, (record.share + size_t{1}) * share);
  for (size_t at = record.share * share; at < end;) {
    const size_t head = at / per_head, inside = at % per_head;
    const size_t n = std::min(per_head - inside, end - at);
    uint8_t* place = slot + head * p.packed_head_bytes + first + inside;
    if (to_slot) {
      std::memcpy(place, bytes, n);
    } else {
      std::memcpy(bytes, place, n);
    }
    bytes += n;
    at += n;
  }
}

/// Row of a packed token as the full tier would hold it.
void KvCache::Impl::ReadDecodedRow(uint32_t il, const UnitRecord& u, uint32_t t, bool is_k,
                                   uint16_t* row) const {
  const ShapePools& p = PoolsOf(il);
  std::vector<uint8_t> full(p.full_bytes());
  std::vector<float> scratch(size_t{config.window} * (p.shape.head_dim + p.shape.head_dim_v));
  DecodeUnit(il, u, full.data(), scratch.data(),
             scratch.data() + size_t{config.window} * p.shape.head_dim);
  const uint32_t d = p.shape.head_dim, dv = p.shape.head_dim_v;
  for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
    const uint8_t* block = full.data() + h * p.full_head_bytes;
    if (is_k) {
      LoadKeyRow(block, config.window, d, t, row + size_t{h} * d);
    } else {
      std::memcpy(row + size_t{h} * dv, block + size_t{config.window} * d * 2 + size_t{t} * dv * 2,
                  size_t{dv} * 2);
    }
  }
}

void KvCache::Impl::ReadRow(uint32_t il, uint32_t stream, uint32_t cell, bool is_k, uint16_t* row) {
  if (il >= layers.size()) return;
  RowRecord record;
  const bool remember = FillRow(il, stream, cell, is_k, row, record);
  // Engines save K of every layer, then V of every layer: K after V begins another state.
  if (is_k && std::exchange(reading.values, false)) reading.chains.clear();
  reading.values = !is_k;
  if (!is_k) return;
  reading.chains.resize(layers.size());
  const uint64_t hash = reading.chains[il].Next(il, cell, row, RowWords(il, true));
  if (remember) RememberRow(hash, record);
}

/// The bytes of a row. True if they do not say where it stands, and `record` should be remembered.
bool KvCache::Impl::FillRow(uint32_t il, uint32_t stream, uint32_t cell, bool is_k, uint16_t* row,
                            RowRecord& record) const {
  const size_t n_words = RowWords(il, is_k);
  std::fill_n(row, n_words, uint16_t{0});
  const uint32_t code = stream < n_streams ? Cell(stream, cell) : kNone;
  if (code == kNone) return false;
  const bool room = n_words * 2 >= kRowHeaderBytes;  // tiny rows cannot say that they are evicted
  if (!IsToken(code)) {
    record.kind = is_k ? RowKind::kEvictedK : RowKind::kEvictedV;
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
    record.kind = is_k ? RowKind::kEvictedK : RowKind::kEvictedV;
    if (room) WriteRowHeader(record, row);
    return false;
  }
  record.score = u->total_score();
  if (!u->has_full()) {
    record.kind = is_k ? RowKind::kPackedK : RowKind::kPackedV;
    record.n_shares = static_cast<uint8_t>(std::popcount(w.live));
    record.share = static_cast<uint8_t>(std::popcount(w.live & ((1u << t) - 1)));
    if (SharesFit(il, record.n_shares)) {
      WriteRowHeader(record, row);
      uint8_t* bytes = reinterpret_cast<uint8_t*>(row) + kRowHeaderBytes;
      CopyShare(il, PackedSlot(il, *u), is_k, record, bytes, false);
      return false;
    }
    ReadDecodedRow(il, *u, t, is_k, row);
  } else {
    ReadFullRow(il, *u, t, is_k, row);
  }
  // Layer 0 finds the token's place again, the first live row of a window its score per layer.
  record.kind = RowKind::kFull;
  return is_k && (il == 0 || t == FirstLive(w));
}

/// True if the codes of a window with n live tokens fit behind the headers of its K and V rows.
/// Codes that mean nothing without what this cache has learned stay here: rows are then decoded.
bool KvCache::Impl::SharesFit(uint32_t il, uint32_t n) const {
  if (!codecs::SavesCodes(config)) return false;
  for (const bool is_k : {true, false}) {
    const size_t share = (PartBytes(il, is_k) + n - 1) / n;
    if (kRowHeaderBytes + share > RowWords(il, is_k) * 2) return false;
  }
  return true;
}

}  // namespace qevict
