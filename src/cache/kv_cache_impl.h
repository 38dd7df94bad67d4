// Insides of KvCache, shared by the files of src/cache. No other module includes this header.
//
//   streams_[s].cells   cell -> window * 32 + offset | evicted mark + sequence | kNone
//   windows_[w]         facts of a window, the same in all layers
//   sequences_[q]       windows in order; per layer the units (accessible windows) in the same
//   order pools_[c]           per distinct layer shape: full slots and packed slots, dense, with
//   owners
//
// A unit is one window in one layer: a full slot, a packed slot, or both (full, codes dormant). A
// window without a unit in a layer is evicted there, or not written yet (n_created tells).
//
// Bytes: everything that grows with the tokens is counted. Vectors grow in steps of 1/16
// (GrowTight) and their capacity counts, not their size.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/half.h"
#include "base/parallel.h"
#include "base/rope.h"
#include "cache/convert.h"
#include "cache/row_format.h"
#include "cache/sequence_facts.h"
#include "codecs/codec.h"
#include "codecs/water_fill.h"
#include "kernels/attention.h"
#include "kernels/rope_table.h"
#include "qevict/cache.h"

namespace qevict {

inline constexpr uint32_t kMaxWindow = 32;
inline constexpr uint32_t kMaxHeadDim = kernels::kMaxChannels;
/// Cell map: bit 31 set (and not kNone) = a token of sequence (value & ~mark) that is evicted in
/// every layer.
inline constexpr uint32_t kEvictedMark = 0x80000000u;
/// First chunk of a prompt after decoding has begun: more rows than any speculation brings.
inline constexpr uint32_t kMaxSpeculation = 64;
inline constexpr size_t kPageBytes = 4096;

/// Grows capacity to at least n in steps of 1/16.
template <typename T>
void GrowTight(std::vector<T>& v, size_t n) {
  if (v.capacity() < n) v.reserve(n + std::max<size_t>(4, n / 16));
}
/// When the system refuses memory. Short enough for a string to hold it without allocating.
inline Status OutOfMemory() { return ResourceExhausted("out of memory"); }
/// Gives capacity beyond two growth steps back, if the system has room for a copy meanwhile.
template <typename T>
void TrimTight(std::vector<T>& v) noexcept {
  const size_t n = v.size();
  if (v.capacity() <= (n == 0 ? 0 : n + 2 * std::max<size_t>(4, n / 16))) return;
  try {
    std::vector<T> fresh;
    if (n > 0) fresh.reserve(n + std::max<size_t>(4, n / 16));
    fresh.assign(v.begin(), v.end());
    v.swap(fresh);
  } catch (const std::bad_alloc&) {  // it stays as large as it is
  }
}
/// Capacity in bytes after growing to size + added.
template <typename T>
uint64_t GrownBytes(const std::vector<T>& v, size_t added) {
  const size_t n = v.size() + added;
  const size_t capacity = v.capacity() >= n ? v.capacity() : n + std::max<size_t>(4, n / 16);
  return capacity * sizeof(T);
}
template <typename T>
uint64_t CapacityBytes(const std::vector<T>& v) {
  return v.capacity() * sizeof(T);
}

/// One window in one layer.
struct UnitRecord {
  static constexpr uint32_t kPinned = 0x80000000u;
  static constexpr uint32_t kNoSlot = 0x7FFFFFFFu;

  WindowId window = kNone;
  uint32_t full_slot = kNone;
  uint32_t packed = kNoSlot;  // bit 31: ranked as full precision, but stays packed
  float score = 0.0f;         // of generated rows and of earlier prompts
  float prompt_score = 0.0f;  // of the last prompt

  float total_score() const { return score + prompt_score; }
  bool has_full() const { return full_slot != kNone; }
  bool has_codes() const { return packed_slot() != kNoSlot; }
  uint32_t packed_slot() const { return packed & ~kPinned; }
  void set_packed_slot(uint32_t slot) { packed = (packed & kPinned) | slot; }
  bool pinned() const { return (packed & kPinned) != 0; }
  void set_pinned(bool on) { packed = on ? packed | kPinned : packed & ~kPinned; }
};
static_assert(sizeof(UnitRecord) == 20);

struct SlotOwner {
  WindowId window;
  uint32_t layer;
};

/// Bytes of records that a unit and each of its slots cost, two growth steps (1/8) included.
inline constexpr uint64_t kUnitBytes = sizeof(UnitRecord) + sizeof(UnitRecord) / 8;
inline constexpr uint64_t kOwnerBytes = sizeof(SlotOwner) + sizeof(SlotOwner) / 8;
inline constexpr uint64_t kRecordBytes = kUnitBytes + kOwnerBytes;

struct WindowRecord {
  static constexpr uint8_t kSink = 1;
  static constexpr uint8_t kPositional = 2;
  static constexpr uint8_t kSealed = 4;  // packed or evicted somewhere: takes no more tokens
  static constexpr uint8_t kHidden = 8;  // no row can see it any more: see KvCache::SetHidden

  uint32_t seq = kNone;  // free record: next free one
  uint32_t birth = kNone;
  int32_t pos0 = 0;
  uint32_t live = 0;
  uint16_t n_units = 0;    // layers that hold it
  uint16_t n_created = 0;  // layers that were written
  uint8_t n_tokens = 0;
  uint8_t flags = 0;

  bool has(uint8_t flag) const { return (flags & flag) != 0; }
  int32_t PosOf(uint32_t offset) const {
    return has(kPositional) ? pos0 + static_cast<int32_t>(offset) : pos0;
  }
  bool in_use() const { return birth != kNone; }
};
static_assert(sizeof(WindowRecord) == 24);

/// Dense slots of one kind.
struct SlotPool {
  ArenaRegion* region = nullptr;
  std::vector<SlotOwner> owners;    // [used]
  std::vector<uint32_t> checksums;  // [used], packed slots under Config::check
  size_t used() const { return owners.size(); }
};

/// Slots shared by the layers of one shape.
struct ShapePools {
  LayerShape shape{};
  uint32_t n_layers = 0;
  size_t full_head_bytes = 0, packed_head_bytes = 0;
  size_t learned_bytes = 0;                    // per layer
  std::shared_ptr<const codecs::Codec> codec;  // of layers that have not learned another
  SlotPool full, packed;
  uint64_t n_dormant = 0;

  uint64_t full_bytes() const { return full_head_bytes * shape.n_kv_heads; }
  uint64_t packed_bytes() const { return packed_head_bytes * shape.n_kv_heads; }
  /// M_f and M_q.
  UnitCosts costs() const { return {full_bytes() + kRecordBytes, packed_bytes() + kRecordBytes}; }
};

struct LayerState {
  uint32_t pools = 0;
  RopeParams rope;
  uint32_t rope_table = kNone;
  uint64_t f16_token_bytes = 0;
  std::shared_ptr<const codecs::Codec> codec;
  std::vector<float> query_energy;  // [n_kv_heads][head_dim], for codecs that learn
  bool learned = false;             // the layer's rows have been looked at
  bool calibrated = false;          // the codec is made of given statistics
};

/// One layer of one sequence.
struct LayerSeq {
  std::vector<UnitRecord> units;
  bool routed = false;  // since the sequence began
  /// What the last plan gave it; tokens appended since were part of the mandatory bytes.
  struct Allowance {
    uint64_t mandatory = 0, history = 0;
    uint32_t n_units = 0;
    bool known = false;  // no plan yet, or units came by another way
  } allowance;
};

struct Sequence : SequenceFacts {
  uint32_t stream = 0;
  uint64_t created = 0;  // creation number: oldest first
  std::vector<WindowId> windows;
  std::vector<LayerSeq> layers;
  TokenRef tail;

  SequenceFacts& facts() { return *this; }
  const SequenceFacts& facts() const { return *this; }
};

struct Stream {
  std::vector<uint32_t> cells;
};

/// What a commit does to one unit.
struct UnitMove {
  SeqId seq;
  uint32_t index;  // in units
  Placement to;
};

/// Moves of a commit by kind; `demote` includes `encode`.
struct SortedMoves {
  std::vector<UnitRecord*> free_packed, free_full;  // of evicted units
  std::vector<UnitRecord*> encode, demote, promote;
  std::vector<std::pair<UnitRecord*, bool>> pin;
};

/// One sequence in the plan of one layer.
struct SeqPlan {
  SeqId id = kNone;
  bool protect_recents = true;
  bool keep_reserve = true;  // bytes for the tokens promised to it
  uint32_t recents = 0;      // tokens
  uint64_t mandatory = 0;
  std::vector<Candidate> candidates;
  std::vector<uint32_t> index;   // unit of each candidate
  std::vector<uint32_t> hidden;  // units that no row sees, oldest first

  size_t n_units() const { return candidates.size() + hidden.size(); }
};

/// Rotations of a window's tokens as the forward pass made them; none without RoPE.
class WindowPhases {
 public:
  /// needed: whether anything will be rotated; if not, nothing may be.
  WindowPhases(const RopeParams& rope, const WindowRecord& w, bool needed = true);
  void Rotate(uint32_t t, float* key) const;
  void Unrotate(uint32_t t, float* key) const;

 private:
  const RopeParams& rope_;
  std::vector<float> phases_;  // [n_tokens][n_dims]
};

struct RestoreSession;
struct WindowMasses;

struct KvCache::Impl {
  Impl();
  ~Impl();

  // --- fixed at creation ---
  Config config;
  std::vector<LayerState> layers;
  std::vector<ShapePools> pools;
  std::vector<std::unique_ptr<kernels::RopeTable>> rope_tables;
  uint32_t n_streams = 0, cells_per_stream = 0, budget_tokens = 0;
  uint64_t f16_token_bytes = 0;

  // --- contents ---
  Arena arena;
  std::vector<Stream> streams;
  std::vector<WindowRecord> windows;
  std::vector<uint32_t> window_cells;  // [window][W]
  std::vector<std::unique_ptr<Sequence>> sequences;
  uint32_t free_window = kNone;
  uint32_t n_free_windows = 0;
  uint32_t next_birth = 0;
  uint64_t clock = 0;
  int32_t max_pos = 0;
  uint64_t unit_table_bytes = 0;      // capacity of all unit vectors
  CacheStats counters;                // events, promotions, ... and peaks
  uint64_t decode_rounds = 0;         // decode steps of the sequence that has made most of them
  std::vector<SeqId> step_sequences;  // that the step being prepared appends to
  bool limit_on = false;
  bool overdrawn = false;  // the step in progress may exceed the limit: see MakeRoom
  bool routing_all = false;

  std::vector<uint8_t*> write_blocks;   // scratch of Write
  std::vector<UnitRecord*> mass_units;  // scratch of AddMass
  std::vector<float> mass_scores, mass_others;

  std::unique_ptr<RestoreSession> restore;  // null between restores (restore.cc)
  struct {
    std::vector<RowChain> chains;  // per layer
    bool values = false;           // the last row read was one of V
  } reading;

  // storage.cc
  Status InitPools(std::vector<LayerShape> shapes);
  void DropUnusedRopeTable(uint32_t table);
  ShapePools& PoolsOf(uint32_t il) { return pools[layers[il].pools]; }
  const ShapePools& PoolsOf(uint32_t il) const { return pools[layers[il].pools]; }
  uint8_t* FullSlot(uint32_t il, const UnitRecord& u) const {
    return PoolsOf(il).full.region->slot(u.full_slot);
  }
  uint8_t* PackedSlot(uint32_t il, const UnitRecord& u) const {
    return PoolsOf(il).packed.region->slot(u.packed_slot());
  }
  Status Write(uint32_t il, std::span<const TokenRef> refs, const float* rows, size_t row_stride,
               bool is_k, ParallelFor& pool);
  Status GrowPool(SlotPool& pool, size_t n_slots);
  Status CreateUnits(uint32_t il, std::span<const TokenRef> refs);
  void RemoveFullSlot(uint32_t il, UnitRecord& u);
  void RemovePackedSlot(uint32_t il, UnitRecord& u);
  void RemoveSlot(uint32_t il, bool packed, uint32_t slot);
  void TrimPools();
  void AddUnit(LayerSeq& ls, const UnitRecord& u);
  void GrowUnits(LayerSeq& ls, size_t n);
  void TrimUnits(LayerSeq& ls);
  UnitRecord* FindUnit(SeqId seq, uint32_t il, WindowId w);
  const UnitRecord* FindUnit(SeqId seq, uint32_t il, WindowId w) const {
    return const_cast<Impl*>(this)->FindUnit(seq, il, w);
  }

  // windows.cc
  SeqId CreateSequence(uint32_t stream);
  Sequence* Seq(SeqId id) { return id < sequences.size() ? sequences[id].get() : nullptr; }
  const Sequence* Seq(SeqId id) const {
    return id < sequences.size() ? sequences[id].get() : nullptr;
  }
  uint32_t Cell(uint32_t stream, uint32_t cell) const {
    const auto& cells = streams[stream].cells;
    return cell < cells.size() ? cells[cell] : kNone;
  }
  void SetCell(uint32_t stream, uint32_t cell, uint32_t code);
  static bool IsToken(uint32_t code) { return (code & kEvictedMark) == 0; }
  static uint32_t CellCode(TokenRef ref) { return ref.window * kMaxWindow + ref.offset; }
  Status CheckAppend(std::span<const TokenSpec> tokens);
  TokenRef AppendOne(const TokenSpec& t);
  bool TakesBack(const TokenSpec& t, TokenRef held) const;
  void Truncate(const TokenSpec& t, TokenRef from);
  WindowId OpenWindowFor(Sequence& s, const TokenSpec& t);
  WindowId NewWindow(SeqId seq, int32_t pos, bool positional, bool sink);
  void ReleaseCell(uint32_t stream, uint32_t cell);
  void ReleaseCells(uint32_t stream, std::span<const uint32_t> cells);
  void KillToken(TokenRef ref);
  void FreeWindow(WindowId w);
  void DropEvictedWindow(WindowId w);
  void ReleaseRecord(WindowId w);
  void DropSequenceIfDead(SeqId id);
  void DropSequence(SeqId id);
  void RemoveUnit(uint32_t il, UnitRecord& u);
  void FinishChange();
  uint32_t CountNewWindows(const Sequence& s, uint32_t n) const;
  uint32_t* CellsOf(WindowId w) { return window_cells.data() + size_t{w} * config.window; }
  const uint32_t* CellsOf(WindowId w) const {
    return window_cells.data() + size_t{w} * config.window;
  }

  // branches.cc
  SeqId BranchSequence(SeqId parent);
  Status MoveWindows(std::span<const WindowId> ids, SeqId to);
  Status MergeSequence(SeqId from, SeqId into);
  void MoveUnits(std::span<const WindowId> ids, SeqId from, SeqId to);
  void SetTail(TokenRef token);

  // budget.cc
  bool Routes() const { return config.preset != Preset::kFull; }
  bool Bounded() const { return config.EffectivePrefill() == Prefill::kBounded; }
  uint32_t Recents() const;
  uint64_t DomainBudget() const;  // of one stream (fraction), or of all
  uint64_t TotalBudget() const;
  bool LimitWanted() const;
  bool LimitInForce() const { return limit_on && !routing_all; }
  bool RoutedSequence(const Sequence& s) const;
  bool Stalled(const Sequence& s) const;
  uint64_t TableBytes() const;
  uint64_t FixedTableBytes() const;
  uint64_t DormantBytes() const;
  uint64_t Limit() const;  // budget, plus what Config::charge_dormant leaves out
  uint64_t HeldBytes() const { return arena.bytes() + TableBytes(); }
  uint64_t TableGrowth(uint32_t new_windows, uint32_t new_tokens) const;
  void UpdateLimit();
  void NotePeak();
  bool Chunked(const Sequence& s) const { return s.prompt_phase && RoutedSequence(s); }
  std::vector<SeqId> Domain(SeqId seq) const;
  uint64_t LargestFullCost() const;
  uint64_t PromptReserve(std::span<const SeqId> domain) const;
  Result<uint64_t> LayerShare(uint32_t il, std::span<const SeqId> domain) const;
  bool FitsNext(std::span<const StepRows> rows) const;

  // routing.cc
  bool NoteStep(SeqId seq, uint32_t n, StepKind kind);
  void NoteRound(Sequence& s);
  bool MakeRoom(std::span<const StepRows> rows, ParallelFor& pool);
  Status RouteForRows(std::span<const StepRows> rows, ParallelFor& pool);
  void KeepLastRows(Sequence& s, uint32_t n);
  void FoldPromptScores(Sequence& s);
  void UpdateUnitScores(const WindowMasses& masses, SeqId of_all);
  Status Route(uint32_t il, SeqId seq, uint32_t reserve_tokens, ParallelFor& pool);
  Status RouteAll(SeqId seq, uint32_t reserve_tokens, ParallelFor& pool);
  Status CheckSound() const;
  template <typename F>
  Status RunEvent(bool last, const F& event);
  bool NeedsBoundedRoute(uint32_t il, SeqId seq) const;
  void AddMass(uint32_t il, std::span<const WindowId> ids, const float* mass, size_t head_stride,
               uint32_t n_heads, uint32_t n_queries);
  bool AddMassToAll(uint32_t il, std::span<const WindowId> ids, const WindowMasses& masses);
  uint64_t UnitBytes(uint32_t il, const UnitRecord& u) const;
  void CollectCandidates(uint32_t il, SeqPlan& plan);
  void PlanSequence(uint32_t il, const SeqPlan& plan, uint64_t history,
                    std::vector<UnitMove>& moves);
  SeqPlan* LongestIdle(std::vector<SeqPlan>& plans, SeqId self) const;
  uint32_t FirstRecentBirth(const Sequence& s, uint32_t recents) const;
  bool PlanAlone(uint32_t il, SeqId seq, std::span<const SeqId> domain, uint64_t share,
                 std::vector<UnitMove>& moves);
  Status PlanDomain(uint32_t il, SeqId seq, std::span<const SeqId> domain, uint64_t share,
                    std::vector<UnitMove>& moves);
  bool GiveUpRecents(uint32_t il, std::vector<SeqPlan>& plans, SeqId self);
  void ScoreByKeyNorm(uint32_t il, UnitRecord& u) const;

  // commit.cc
  Status Commit(uint32_t il, std::vector<UnitMove>& moves, ParallelFor& pool);
  SortedMoves SortMoves(uint32_t il, const std::vector<UnitMove>& moves);
  Status ReserveForCommit(uint32_t il, size_t n_full, size_t n_packed);
  void FreeSlots(uint32_t il, bool packed, std::vector<UnitRecord*>& units);
  template <typename F>
  bool ForUnits(uint32_t il, const std::vector<UnitRecord*>& units, ParallelFor& pool,
                const F& write);
  bool EncodeAll(uint32_t il, const std::vector<UnitRecord*>& units, ParallelFor& pool);
  bool DecodeAll(uint32_t il, const std::vector<UnitRecord*>& units, ParallelFor& pool);
  size_t ForgetEvicted(uint32_t il, const std::vector<UnitMove>& moves);
  void EncodeUnit(uint32_t il, const UnitRecord& u, uint8_t* block, float* k, float* v) const;
  void DecodeUnit(uint32_t il, const UnitRecord& u, uint8_t* full, float* k, float* v) const;

  // copy.cc, shift.cc, state_rows.cc, validate.cc
  void Clear();
  Status CopyStream(uint32_t src, uint32_t dst);
  void CopySequence(SeqId from, uint32_t stream);
  void DropStream(uint32_t stream);
  void CountSlots(uint32_t stream, size_t pool, size_t& n_full, size_t& n_packed) const;
  uint32_t DuplicateSlot(uint32_t il, bool packed, uint32_t slot, WindowId owner);
  void DuplicateUnit(uint32_t il, const UnitRecord& from, WindowId to);
  Status ReserveSplits(const std::vector<std::pair<WindowId, uint32_t>>& splits);
  bool MakeRoomForSplits(const std::vector<std::pair<WindowId, uint32_t>>& splits);
  void SplitWindow(WindowId id, uint32_t live, int32_t delta);
  void RotateUnit(uint32_t il, const UnitRecord& u, const int32_t* delta);
  void ScaleKeyGrid(uint32_t il, const UnitRecord& u, float factor);
  void RotateCodes(uint32_t il, const UnitRecord& u, const int32_t* delta);
  void NoteCodes(uint32_t il, const UnitRecord& u);

  // learn.cc
  void AddQueryEnergy(uint32_t il, const float* squares);
  void LearnCodec(uint32_t il);
  /// True if some window of the layer has codes.
  bool HoldsCodes(uint32_t il) const;
  void Relearn();
  void Teach(uint32_t il, size_t max_tokens, codecs::CodecLearner& learner) const;
  float key_bias = 0.0f;  // KvCache::key_bias
  Status ShiftPositions(std::span<const int32_t> delta);
  void RotateLayer(uint32_t il, std::span<const int32_t> delta, ParallelFor& pool);
  size_t RowWords(uint32_t il, bool is_k) const {
    const LayerShape& shape = PoolsOf(il).shape;
    return size_t{shape.n_kv_heads} * (is_k ? shape.head_dim : shape.head_dim_v);
  }
  void ReadRow(uint32_t il, uint32_t stream, uint32_t cell, bool is_k, uint16_t* row);
  bool FillRow(uint32_t il, uint32_t stream, uint32_t cell, bool is_k, uint16_t* row,
               RowRecord& record) const;
  void ReadFullRow(uint32_t il, const UnitRecord& u, uint32_t t, bool is_k, uint16_t* row) const;
  void WriteFullRow(uint32_t il, const UnitRecord& u, uint32_t t, bool is_k, const uint16_t* row);
  void CopyShare(uint32_t il, uint8_t* slot, bool is_k, const RowRecord& record, uint8_t* bytes,
                 bool to_slot) const;
  void ReadDecodedRow(uint32_t il, const UnitRecord& u, uint32_t t, bool is_k, uint16_t* row) const;
  bool SharesFit(uint32_t il, uint32_t n) const;
  size_t PartBytes(uint32_t il, bool is_k) const;
  Status RestoreRows(uint32_t il, uint32_t stream, uint32_t cell0, uint32_t n, bool is_k,
                     const uint16_t* rows);
  void BeginRestore(uint32_t il, uint32_t stream, bool is_k);
  void FinishRestore();
  void ForgetRestore(SeqId seq);
  void ForgetRestoredWindow(WindowId id);
  Status RestoreRow(uint32_t il, uint32_t stream, uint32_t cell, bool is_k, const uint16_t* row);
  Status RestoreToken(uint32_t cell, const RowRecord* record, uint64_t hash, TokenRef& ref);
  bool RoomForPosition(int32_t pos0);
  WindowId RestoredWindow(const RowRecord& record);
  Status RestoreUnit(uint32_t il, TokenRef ref, bool is_k, const RowRecord* record, uint64_t hash,
                     const uint16_t* row);
  Status RestoreShare(uint32_t il, TokenRef ref, bool is_k, const RowRecord& record,
                      const uint16_t* row);
  Status CreatePackedUnit(uint32_t il, WindowId w, float score);
  bool MakeRoomForRestore(uint32_t il);
  Status RoomForRestoredRow(uint32_t il, bool is_k);
  void SortRestored(SeqId seq);
  CacheStats Stats() const;
  std::vector<std::string> Validate() const;
  void ValidateWindows(std::vector<std::string>& out) const;
  void ValidateUnits(std::vector<std::string>& out) const;
  void ValidateCells(std::vector<std::string>& out) const;
  void ValidateSlots(std::vector<std::string>& out) const;
  void ValidateBytes(std::vector<std::string>& out) const;
};

/// 16-bit row <-> head block of kernels/attention.h.
void StoreKeyRow(uint8_t* block, uint32_t window, uint32_t head_dim, uint32_t t,
                 const uint16_t* row);
void LoadKeyRow(const uint8_t* block, uint32_t window, uint32_t head_dim, uint32_t t,
                uint16_t* row);
inline codecs::RowShape RowsOf(const LayerShape& s) {
  return {s.n_kv_heads, s.head_dim, s.head_dim_v, s.bits};
}
/// Layers of one shape share pools.
bool SameShape(const LayerShape& a, const LayerShape& b);
uint32_t Checksum(const uint8_t* data, size_t n);

}  // namespace qevict
