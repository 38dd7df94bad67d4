// K-shift: positions of tokens move, keys of the full tier are rotated by the difference.
//
// Codes are stored before RoPE, so a packed window only learns its new position. A window whose
// tokens move by different amounts becomes several windows: the same rows and codes, disjoint live
// bits, each with its own position. Dead offsets keep their place, so that token t still has
// position pos0 + t.
//
// Magnitude (YaRN): llama.cpp's K-shift is its ordinary RoPE over all cells, so that it multiplies
// every key, moved or not, by the magnitude once more. Full rows do the same, bit by bit, and the
// grids of packed keys are scaled alike, lest the tiers drift apart.
#include <array>
#include <bit>
#include <cstring>

#include "cache/kv_cache_impl.h"
#include "codecs/kivi_axis.h"

namespace qevict {
namespace {

/// Tokens of a window that move by the same amount.
struct Part {
  int32_t delta;
  uint32_t live;
};

}  // namespace

/// True if packed keys can be multiplied by RoPE's magnitude.
static bool ScalesKeys(const codecs::Codec& codec) {
  if (codec.before_rope()) return codec.grid_codes() == nullptr;  // kivi_axis.h has a grid for it
  return codec.key_mean(0) == nullptr;  // the mean would keep the size it had
}

static bool ScalesAllKeys(const LayerState& layer) {
  return std::all_of(layer.codecs.begin(), layer.codecs.end(),
                     [](const auto& codec) { return codec == nullptr || ScalesKeys(*codec); });
}

/// Distinct moves of a window's live tokens, in order of their first token; returns their number.
static size_t PartsOf(const WindowRecord& w, const uint32_t* cells, std::span<const int32_t> delta,
                      std::array<Part, kMaxWindow>& parts) {
  size_t n = 0;
  for (uint32_t t = 0; t < w.n_tokens; ++t) {
    if (((w.live >> t) & 1u) == 0) continue;
    const int32_t d = cells[t] < delta.size() ? delta[cells[t]] : 0;
    const auto end = parts.begin() + n;
    const auto part = std::find_if(parts.begin(), end, [d](const Part& p) { return p.delta == d; });
    if (part == end) parts[n++] = {d, 0};
    part->live |= 1u << t;
  }
  return n;
}

/// Room for the windows and units that splits of a shift add: splits cannot fail. Throws
/// std::bad_alloc; nothing has changed then but what is reserved.
Status KvCache::Impl::ReserveSplits(std::span<const int32_t> delta) {
  std::array<Part, kMaxWindow> parts;
  size_t n_all = 0;
  int32_t highest = max_pos;
  for (const auto& s : sequences) {
    if (!s) continue;
    const auto moves = delta.subspan(size_t{s->stream} * cells_per_stream, cells_per_stream);
    size_t n_new = 0;
    for (const WindowId id : s->windows) {
      const size_t n = PartsOf(windows[id], CellsOf(id), moves, parts);
      n_new += n > 0 ? n - 1 : 0;
      for (size_t i = 0; i < n; ++i) {
        const int32_t pos0 = windows[id].pos0 + parts[i].delta;
        highest = std::max({highest, pos0 + static_cast<int32_t>(kMaxWindow), -pos0});
      }
    }
    if (n_new == 0) continue;
    n_all += n_new;
    GrowTight(s->windows, s->windows.size() + n_new);
    for (uint32_t il = 0; il < layers.size(); ++il) {
      LayerSeq& ls = s->layers[il];
      GrowUnits(ls, ls.units.size() + n_new);
      if (!ls.ledger.empty()) GrowLedger(ls, ls.ledger.size() + n_new);
    }
  }
  GrowRopeTables(highest);
  GrowWindows(n_all);
  return n_all == 0 ? Status() : ReserveShared(n_all);
}

/// Blocks whose references are used up are copied by a split.
Status KvCache::Impl::ReserveShared(size_t n_splits) {
  std::vector<BlockCount> counts;
  ForBlocks([&](uint32_t il, UnitSides& u, Side side, bool) {
    BlockPool& pool = PoolOf(il, side, u.rung(side));
    if (pool.refs(u.block(side)) + n_splits > BlockPool::kMaxRefs)
      CountBlock(counts, pool, std::min<size_t>(n_splits, kMaxWindow - 1));
  });
  for (const BlockCount& count : counts) QEVICT_RETURN_IF_ERROR(count.pool->Reserve(count.n));
  return {};
}

/// Makes a window of its own for the tokens of `live`, right behind window `id` in the lists.
void KvCache::Impl::SplitWindow(WindowId id, uint32_t live, int32_t delta) {
  const SeqId seq = windows[id].seq;
  Sequence& s = *sequences[seq];
  const WindowId part = NewWindow(seq, 0, true, false);
  s.windows.pop_back();
  s.windows.insert(std::find(s.windows.begin(), s.windows.end(), id) + 1, part);
  windows[part] = windows[id];
  windows[part].live = live;
  windows[part].pos0 += delta;
  windows[id].live &= ~live;
  std::copy_n(CellsOf(id), config.window, CellsOf(part));
  for (WindowRecord& w : windows) {  // behind `id` in every list: branches share windows
    if (w.in_use() && w.birth > windows[id].birth) ++w.birth;
  }
  windows[part].birth = windows[id].birth + 1;
  ++next_birth;
  for (uint32_t t = 0; t < config.window; ++t) {
    if ((live >> t) & 1u) SetCell(s.stream, CellsOf(part)[t], CellCode({part, t}));
  }
  if (s.tail.window == id && ((live >> s.tail.offset) & 1u)) s.tail.window = part;
  for (uint32_t il = 0; il < layers.size(); ++il) {
    s.layers[il].allowance = {};
    if (const UnitRecord* u = FindUnit(seq, il, id)) ShareUnit(il, UnitRecord(*u), part);
  }
  // The rest of a split window takes no tokens: offsets behind its last live one are not its own.
  windows[id].flags |= WindowRecord::kSealed;
  windows[part].flags |= WindowRecord::kSealed;
}

/// Whether every key can be moved, and every position stays in range.
Status KvCache::Impl::CheckShift(std::span<const int32_t> delta) const {
  if (delta.size() != size_t{n_streams} * cells_per_stream) {
    return InvalidArgument("a shift needs " + std::to_string(size_t{n_streams} * cells_per_stream) +
                           " deltas, one per cell, not " + std::to_string(delta.size()));
  }
  for (uint32_t il = 0; il < layers.size(); ++il) {
    if (RopeMagnitude(layers[il].rope) != 1.0f && HoldsCodes(il) && !ScalesAllKeys(layers[il]))
      return Unimplemented(std::string("a context shift with a RoPE that scales keys (YaRN) is not "
                                       "supported with codec=") +
                           CodecName(config.codec) +
                           ": use codec=kivi with 2 or 4 bits, or codec=token");
  }
  for (WindowId id = 0; id < windows.size(); ++id) {
    const WindowRecord& w = windows[id];
    if (!w.in_use()) continue;
    const auto moves = delta.subspan(size_t{sequences[w.seq]->stream} * cells_per_stream);
    for (uint32_t t = 0; t < w.n_tokens; ++t) {
      if (((w.live >> t) & 1u) == 0) continue;
      const int64_t pos = int64_t{w.PosOf(t)} + moves[CellsOf(id)[t]];
      if (pos > -kMaxPosition && pos < kMaxPosition) continue;
      return InvalidArgument("a shift to position " + std::to_string(pos) + " lies outside -" +
                             std::to_string(kMaxPosition) + "..." + std::to_string(kMaxPosition));
    }
  }
  return {};
}

Status KvCache::Impl::ShiftPositions(std::span<const int32_t> delta) {
  QEVICT_RETURN_IF_ERROR(CheckShift(delta));
  Status reserved;
  try {
    reserved = ReserveSplits(delta);
  } catch (const std::bad_alloc&) {
    reserved = OutOfMemory();
  }
  if (reserved.ok()) MoveTokens(delta);
  for (const auto& s : sequences) {
    for (size_t il = 0; s && il < layers.size(); ++il) TrimUnits(s->layers[il]);
  }
  FinishChange();
  if (!reserved.ok()) return reserved;
  for (SeqId id = 0; id < sequences.size(); ++id) FitNow(id);
  return {};
}

/// Tokens and tails get their new positions. Requires room (ReserveSplits).
void KvCache::Impl::MoveTokens(std::span<const int32_t> delta) {
  std::array<Part, kMaxWindow> parts;
  for (const auto& s : sequences) {
    if (!s) continue;
    const auto moves = delta.subspan(size_t{s->stream} * cells_per_stream, cells_per_stream);
    if (s->tail.window != kNone) {
      s->tail_pos += moves[CellsOf(s->tail.window)[s->tail.offset]];
    }
    for (size_t i = s->windows.size(); i-- > 0;) {  // splits stand behind
      const WindowId id = s->windows[i];
      const size_t n = PartsOf(windows[id], CellsOf(id), moves, parts);
      for (size_t k = 1; k < n; ++k) SplitWindow(id, parts[k].live, parts[k].delta);
      if (n > 0) windows[id].pos0 += parts[0].delta;
    }
  }
}

/// True if a unit's keys must be written anew when its tokens move by `delta`.
bool KvCache::Impl::Rotates(uint32_t il, const UnitRecord& u, const int32_t* delta) const {
  if (RopeMagnitude(layers[il].rope) != 1.0f) return true;
  if (!u.full(Side::kKeys) && layers[il].codecs[u.rung(Side::kKeys)]->before_rope()) return false;
  const WindowRecord& w = windows[u.window];
  for (uint32_t t = 0; t < w.n_tokens; ++t) {
    if (((w.live >> t) & 1u) != 0 && delta[CellsOf(u.window)[t]] != 0) return true;
  }
  return false;
}

Status KvCache::Impl::RotateLayer(uint32_t il, std::span<const int32_t> delta, ParallelFor& pool) {
  if (il >= layers.size() || delta.size() != size_t{n_streams} * cells_per_stream)
    return OutOfRange("layer " + std::to_string(il) + " with " + std::to_string(delta.size()) +
                      " deltas does not exist");
  if (layers[il].rope.pairing == RopePairing::kNone) return {};
  std::vector<UnitRecord*> units;
  for (const auto& s : sequences) {
    if (!s) continue;
    const int32_t* moves = delta.data() + size_t{s->stream} * cells_per_stream;
    for (UnitRecord& u : s->layers[il].units) {
      if (!Rotates(il, u, moves) && !u.dormant()) continue;
      QEVICT_RETURN_IF_ERROR(OwnBlocks(il, u, Side::kKeys));
      QEVICT_RETURN_IF_ERROR(OwnLedger(il, u));
      units.push_back(&u);
    }
  }
  const auto each = [&](const auto& f) {  // f(sides, window, deltas, number)
    pool.For(units.size(), [&](size_t i, unsigned) {
      const UnitRecord& u = *units[i];
      const Sequence& s = *sequences[windows[u.window].seq];
      const int32_t* moves = delta.data() + size_t{s.stream} * cells_per_stream;
      f(u, u.window, moves, 2 * i);
      if (u.dormant()) f(*FindLedger(s.layers[il], u.window), u.window, moves, 2 * i + 1);
    });
  };
  // What needs memory first: then nothing has been rotated if the system refuses it.
  std::vector<std::vector<uint8_t>> codes(2 * units.size());
  each([&](const UnitSides& u, WindowId id, const int32_t* moves, size_t i) {
    codes[i] = RotatedCodes(il, u, id, moves);
  });
  each([&](const UnitSides& u, WindowId id, const int32_t* moves, size_t i) {
    RotateSides(il, u, id, moves, codes[i]);
  });
  return {};
}

/// The keys of a unit, or those of its dormant codes. codes: see RotatedCodes.
void KvCache::Impl::RotateSides(uint32_t il, const UnitSides& u, WindowId id, const int32_t* delta,
                                std::span<const uint8_t> codes) {
  if (!u.has(Side::kKeys)) return;
  const float magnitude = RopeMagnitude(layers[il].rope);
  if (u.rung(Side::kKeys) == kFullRung) return RotateFull(il, u, id, delta);
  if (!layers[il].codecs[u.rung(Side::kKeys)]->before_rope()) {
    if (codes.empty()) return;
    std::copy(codes.begin(), codes.end(), Block(il, u, Side::kKeys));
    return PoolOf(il, Side::kKeys, u.rung(Side::kKeys)).Seal(u.block(Side::kKeys));
  }
  if (magnitude != 1.0f) ScaleKeyGrid(il, u, magnitude);
}

/// Dormant codes of keys that are about to change must not be shared with a copy.
Status KvCache::Impl::OwnLedger(uint32_t il, UnitRecord& u) {
  if (!u.dormant()) return {};
  LedgerEntry* entry = FindLedger(sequences[windows[u.window].seq]->layers[il], u.window);
  return entry->has(Side::kKeys) ? OwnBlocks(il, *entry, Side::kKeys) : Status();
}

void KvCache::Impl::RotateFull(uint32_t il, const UnitSides& u, WindowId id, const int32_t* delta) {
  const ShapeStore& store = StoreOf(il);
  const RopeParams& rope = layers[il].rope;
  const WindowRecord& w = windows[id];
  const bool scales = RopeMagnitude(rope) != 1.0f;
  const uint32_t dim = store.shape.head_dim;
  float phases[kMaxHeadDim], key[kMaxHeadDim];
  uint16_t row[kMaxHeadDim];
  int32_t known = 0;
  bool have_phases = false;
  for (uint32_t t = 0; t < w.n_tokens; ++t) {
    if (((w.live >> t) & 1u) == 0) continue;
    const int32_t d = delta[CellsOf(id)[t]];
    if (d == 0 && !scales) continue;
    if (!have_phases || d != known) RopeCosSin(rope, d, phases);
    known = d;
    have_phases = true;
    for (uint32_t h = 0; h < store.shape.n_kv_heads; ++h) {
      uint8_t* block =
          Block(il, u, Side::kKeys) + h * store.rungs[kFullRung].bytes_of_head(Side::kKeys);
      LoadKeyRow(block, config.window, dim, t, row);
      ConvertTo32(row, dim, store.shape.elem_k, key);
      RopeRotate(rope, phases, key);
      ConvertTo16(key, dim, store.shape.elem_k, row);
      StoreKeyRow(block, config.window, dim, t, row);
    }
  }
}

/// Multiplies the grids of rotated key channels; codes stay as they were written.
void KvCache::Impl::ScaleKeyGrid(uint32_t il, const UnitSides& u, float factor) {
  const ShapeStore& store = StoreOf(il);
  const Rung r = u.rung(Side::kKeys);
  const RopeParams& rope = layers[il].rope;
  const codecs::KiviAxisLayout at =
      static_cast<const codecs::KiviAxisCodec&>(*layers[il].codecs[r]).layout();
  for (uint32_t h = 0; h < store.shape.n_kv_heads; ++h) {
    uint8_t* block = Block(il, u, Side::kKeys) + h * store.rungs[r].bytes_of_head(Side::kKeys);
    for (const size_t grid : {at.k_scale, at.k_zero}) {
      for (uint32_t i = rope.offset; i < rope.offset + rope.n_dims; ++i) {
        uint16_t word;
        std::memcpy(&word, block + grid + size_t{2} * i, 2);
        word = F32ToF16(F16ToF32(word) * factor);
        std::memcpy(block + grid + size_t{2} * i, &word, 2);
      }
    }
  }
  PoolOf(il, Side::kKeys, r).Seal(u.block(Side::kKeys));
}

/// Keys that were coded after RoPE, coded again at their new positions; empty: nothing to change.
std::vector<uint8_t> KvCache::Impl::RotatedCodes(uint32_t il, const UnitSides& u, WindowId id,
                                                 const int32_t* delta) const {
  const ShapeStore& store = StoreOf(il);
  const Rung r = u.rung(Side::kKeys);
  if (!u.has(Side::kKeys) || r == kFullRung || layers[il].codecs[r]->before_rope()) return {};
  const codecs::Codec& codec = *layers[il].codecs[r];
  const RopeParams& rope = layers[il].rope;
  const WindowRecord& w = windows[id];
  const uint32_t d = store.shape.head_dim;
  bool moves = RopeMagnitude(rope) != 1.0f;
  for (uint32_t t = 0; t < w.n_tokens; ++t) {
    moves |= ((w.live >> t) & 1u) != 0 && delta[CellsOf(id)[t]] != 0;
  }
  if (!moves) return {};
  const uint8_t* block = Block(il, u, Side::kKeys);
  std::vector<uint8_t> out(block, block + PoolOf(il, Side::kKeys, r).block_bytes());
  std::vector<float> k(size_t{w.n_tokens} * d), v(size_t{w.n_tokens} * store.shape.head_dim_v);
  float phases[kMaxHeadDim];
  for (uint32_t h = 0; h < store.shape.n_kv_heads; ++h) {
    uint8_t* codes = out.data() + h * store.rungs[r].bytes_of_head(Side::kKeys);
    codec.DecodeSides(h, w.n_tokens, codes, nullptr, k.data(), nullptr);
    for (uint32_t t = 0; t < w.n_tokens; ++t) {
      if (((w.live >> t) & 1u) == 0) continue;
      RopeCosSin(rope, delta[CellsOf(id)[t]], phases);
      RopeRotate(rope, phases, k.data() + size_t{t} * d);
    }
    codec.EncodeSides(h, w.n_tokens, k.data(), v.data(), codes, nullptr);
  }
  return out;
}

}  // namespace qevict
