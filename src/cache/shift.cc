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

/// Distinct moves of a window's live tokens, in order of their first token.
static std::vector<Part> PartsOf(const WindowRecord& w, const uint32_t* cells,
                                 std::span<const int32_t> delta) {
  std::vector<Part> parts;
  for (uint32_t t = 0; t < w.n_tokens; ++t) {
    if (((w.live >> t) & 1u) == 0) continue;
    const int32_t d = cells[t] < delta.size() ? delta[cells[t]] : 0;
    auto part =
        std::find_if(parts.begin(), parts.end(), [d](const Part& p) { return p.delta == d; });
    if (part == parts.end()) part = parts.insert(part, Part{d, 0});
    part->live |= 1u << t;
  }
  return parts;
}

/// Grows the pools for copies of the units of `splits` (window, number of copies).
Status KvCache::Impl::ReserveSplits(const std::vector<std::pair<WindowId, uint32_t>>& splits) {
  std::vector<size_t> n_full(pools.size()), n_packed(pools.size());
  uint64_t records = 0;
  uint32_t n_windows = 0;
  for (const auto& [id, copies] : splits) {
    n_windows += copies;
    for (uint32_t il = 0; il < layers.size(); ++il) {
      const UnitRecord* u = FindUnit(windows[id].seq, il, id);
      if (!u) continue;
      n_full[layers[il].pools] += u->has_full() ? copies : 0;
      n_packed[layers[il].pools] += u->has_codes() ? copies : 0;
      records += copies * kRecordBytes + 64;
    }
  }
  if (LimitInForce()) {
    const uint64_t tables = TableBytes() + TableGrowth(n_windows, 0) + records;
    arena.SetLimit(Limit() > tables ? Limit() - tables : 0);
  }
  Status status;
  for (size_t i = 0; i < pools.size() && status.ok(); ++i) {
    status = pools[i].full.region->Resize(pools[i].full.used() + n_full[i]);
    if (status.ok()) status = pools[i].packed.region->Resize(pools[i].packed.used() + n_packed[i]);
  }
  if (!status.ok()) TrimPools();
  UpdateLimit();
  return status;
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
    if (const UnitRecord* u = FindUnit(seq, il, id)) DuplicateUnit(il, UnitRecord(*u), part);
  }
  // The rest of a split window takes no tokens: offsets behind its last live one are not its own.
  windows[id].flags |= WindowRecord::kSealed;
  windows[part].flags |= WindowRecord::kSealed;
}

Status KvCache::Impl::ShiftPositions(std::span<const int32_t> delta) {
  if (delta.size() != size_t{n_streams} * cells_per_stream) {
    return InvalidArgument("a shift needs " + std::to_string(size_t{n_streams} * cells_per_stream) +
                           " deltas, one per cell, not " + std::to_string(delta.size()));
  }
  for (uint32_t il = 0; il < layers.size(); ++il) {
    if (RopeMagnitude(layers[il].rope) != 1.0f && HoldsCodes(il) && !ScalesKeys(*layers[il].codec))
      return Unimplemented(std::string("a context shift with a RoPE that scales keys (YaRN) is not "
                                       "supported with codec=") +
                           CodecName(config.codec) +
                           ": use codec=kivi with 2 or 4 bits, or codec=token");
  }
  const auto of_stream = [&](uint32_t stream) {
    return delta.subspan(size_t{stream} * cells_per_stream, cells_per_stream);
  };
  std::vector<std::pair<WindowId, uint32_t>> splits;
  for (const auto& s : sequences) {
    if (!s) continue;
    for (const WindowId id : s->windows) {
      const size_t n = PartsOf(windows[id], CellsOf(id), of_stream(s->stream)).size();
      if (n > 1) splits.emplace_back(id, static_cast<uint32_t>(n - 1));
    }
  }
  if (!splits.empty()) {
    Status status = ReserveSplits(splits);
    if (!status.ok() && LimitInForce() && MakeRoomForSplits(splits)) {
      std::erase_if(splits, [&](const auto& split) { return !windows[split.first].in_use(); });
      status = ReserveSplits(splits);
    }
    QEVICT_RETURN_IF_ERROR(status);
  }
  for (const auto& s : sequences) {
    if (!s) continue;
    if (s->tail.window != kNone) {
      s->tail_pos += of_stream(s->stream)[CellsOf(s->tail.window)[s->tail.offset]];
    }
    const std::vector<WindowId> ids = s->windows;
    for (const WindowId id : ids) {
      const std::vector<Part> parts = PartsOf(windows[id], CellsOf(id), of_stream(s->stream));
      for (size_t i = 1; i < parts.size(); ++i) SplitWindow(id, parts[i].live, parts[i].delta);
      windows[id].pos0 += parts.front().delta;
    }
  }
  for (const WindowRecord& w : windows) {
    if (!w.in_use()) continue;
    max_pos = std::max({max_pos, w.pos0 + static_cast<int32_t>(kMaxWindow), -w.pos0});
  }
  for (auto& table : rope_tables) table->Grow(max_pos);
  FinishChange();
  return {};
}

/// Routes the sequences that are about to be split, with the copies as reserve.
bool KvCache::Impl::MakeRoomForSplits(const std::vector<std::pair<WindowId, uint32_t>>& splits) {
  const std::unique_ptr<ParallelFor> serial = MakeSerial();
  std::vector<uint32_t> copies(sequences.size());
  for (const auto& [id, n] : splits) copies[windows[id].seq] += n;
  for (SeqId seq = 0; seq < copies.size(); ++seq) {
    if (copies[seq] == 0) continue;
    Sequence& s = *sequences[seq];
    const uint32_t before = s.reserved;
    for (uint32_t il = 0; il < layers.size(); ++il) {
      const Status routed = Route(il, seq, before + (2 * copies[seq] + 1) * config.window, *serial);
      if (!routed.ok()) return false;
    }
    if (!Chunked(s)) s.reserved = before;
  }
  return true;
}

void KvCache::Impl::RotateLayer(uint32_t il, std::span<const int32_t> delta, ParallelFor& pool) {
  if (il >= layers.size() || delta.size() != size_t{n_streams} * cells_per_stream) return;
  const RopeParams& rope = layers[il].rope;
  if (rope.pairing == RopePairing::kNone) return;
  const float magnitude = RopeMagnitude(rope);
  std::vector<const UnitRecord*> units;
  for (const auto& s : sequences) {
    if (!s) continue;
    for (const UnitRecord& u : s->layers[il].units) units.push_back(&u);
  }
  pool.For(units.size(), [&](size_t i, unsigned) {
    const UnitRecord& u = *units[i];
    const WindowRecord& w = windows[u.window];
    const int32_t* moves = delta.data() + size_t{sequences[w.seq]->stream} * cells_per_stream;
    if (u.has_full()) RotateUnit(il, u, moves);
    if (!u.has_codes()) return;
    if (!layers[il].codec->before_rope()) {
      RotateCodes(il, u, moves);
    } else if (magnitude != 1.0f) {
      ScaleKeyGrid(il, u, magnitude);
    }
  });
}

void KvCache::Impl::RotateUnit(uint32_t il, const UnitRecord& u, const int32_t* delta) {
  const ShapePools& p = PoolsOf(il);
  const RopeParams& rope = layers[il].rope;
  const WindowRecord& w = windows[u.window];
  const bool scales = RopeMagnitude(rope) != 1.0f;
  float phases[kMaxHeadDim], key[kMaxHeadDim];
  uint16_t row[kMaxHeadDim];
  int32_t known = 0;
  bool have_phases = false;
  for (uint32_t t = 0; t < w.n_tokens; ++t) {
    if (((w.live >> t) & 1u) == 0) continue;
    const int32_t d = delta[CellsOf(u.window)[t]];
    if (d == 0 && !scales) continue;
    if (!have_phases || d != known) RopeCosSin(rope, d, phases);
    known = d;
    have_phases = true;
    for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
      uint8_t* block = FullSlot(il, u) + h * p.full_head_bytes;
      LoadKeyRow(block, config.window, p.shape.head_dim, t, row);
      ConvertTo32(row, p.shape.head_dim, p.shape.elem_k, key);
      RopeRotate(rope, phases, key);
      ConvertTo16(key, p.shape.head_dim, p.shape.elem_k, row);
      StoreKeyRow(block, config.window, p.shape.head_dim, t, row);
    }
  }
}

/// Multiplies the grids of rotated key channels; codes stay as they were written.
void KvCache::Impl::ScaleKeyGrid(uint32_t il, const UnitRecord& u, float factor) {
  ShapePools& p = PoolsOf(il);
  const RopeParams& rope = layers[il].rope;
  const codecs::KiviAxisLayout at =
      codecs::LayoutKiviAxis(config.bits, config.window, p.shape.head_dim, p.shape.head_dim_v);
  for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
    uint8_t* block = PackedSlot(il, u) + h * p.packed_head_bytes;
    for (const size_t grid : {at.k_scale, at.k_zero}) {
      for (uint32_t i = rope.offset; i < rope.offset + rope.n_dims; ++i) {
        uint16_t word;
        std::memcpy(&word, block + grid + size_t{2} * i, 2);
        word = F32ToF16(F16ToF32(word) * factor);
        std::memcpy(block + grid + size_t{2} * i, &word, 2);
      }
    }
  }
  NoteCodes(il, u);
}

/// Keys that were coded after RoPE are coded again at their new positions; values stay.
void KvCache::Impl::RotateCodes(uint32_t il, const UnitRecord& u, const int32_t* delta) {
  ShapePools& p = PoolsOf(il);
  const RopeParams& rope = layers[il].rope;
  const WindowRecord& w = windows[u.window];
  const uint32_t d = p.shape.head_dim;
  bool moves = RopeMagnitude(rope) != 1.0f;
  for (uint32_t t = 0; t < w.n_tokens; ++t) {
    moves |= ((w.live >> t) & 1u) != 0 && delta[CellsOf(u.window)[t]] != 0;
  }
  if (!moves) return;
  std::vector<float> k(size_t{w.n_tokens} * d), v(size_t{w.n_tokens} * p.shape.head_dim_v);
  std::vector<uint8_t> block(p.packed_head_bytes);
  float phases[kMaxHeadDim];
  for (uint32_t h = 0; h < p.shape.n_kv_heads; ++h) {
    uint8_t* codes = PackedSlot(il, u) + h * p.packed_head_bytes;
    layers[il].codec->Decode(h, w.n_tokens, codes, k.data(), v.data());
    for (uint32_t t = 0; t < w.n_tokens; ++t) {
      if (((w.live >> t) & 1u) == 0) continue;
      RopeCosSin(rope, delta[CellsOf(u.window)[t]], phases);
      RopeRotate(rope, phases, k.data() + size_t{t} * d);
    }
    layers[il].codec->Encode(h, w.n_tokens, k.data(), v.data(), block.data());
    std::memcpy(codes, block.data(), layers[il].codec->bytes().keys);
  }
  NoteCodes(il, u);
}

}  // namespace qevict
