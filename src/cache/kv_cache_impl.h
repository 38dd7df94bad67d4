// Insides of KvCache, shared by the files of src/cache. No other module includes this header.
//
//   streams[s].cells     cell -> window * 32 + offset | evicted mark + sequence | kNone
//   windows[w]           facts of a window, the same in all layers
//   sequences[q]         windows in order; per layer the units (accessible windows) in that order
//   stores[c]            per distinct layer shape: codecs and block sizes of its rungs
//   pools[p]             blocks of one size, whatever shape, rung and side they are of
//
// A unit is one window in one layer: a block of keys and a block of values, each on a rung. Codes of
// a side that is full precision now, but was packed before, are dormant: the layer's ledger names
// them. A window without a unit in a layer is evicted there, or not written yet (n_created tells).
//
// Bytes: everything that grows with the tokens is counted. Vectors grow in steps of 1/16
// (store/tight.h) and their capacity counts, not their size.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
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
#include "cache/units.h"
#include "codecs/codec.h"
#include "codecs/water_fill.h"
#include "kernels/attention.h"
#include "kernels/rope_table.h"
#include "qevict/cache.h"
#include "qevict/policy.h"
#include "store/block_pool.h"
#include "store/tight.h"

namespace qevict {

inline constexpr uint32_t kMaxWindow = 32;
inline constexpr uint32_t kMaxHeadDim = kernels::kMaxChannels;
/// Cell map: bit 31 set (and not kNone) = a token of sequence (value & ~mark) that is evicted in
/// every layer.
inline constexpr uint32_t kEvictedMark = 0x80000000u;
/// First chunk of a prompt after decoding has begun: more rows than any speculation brings.
inline constexpr uint32_t kMaxSpeculation = 64;
inline constexpr size_t kPageBytes = 4096;

/// When the system refuses memory. Short enough for a string to hold it without allocating.
inline Status OutOfMemory() { return ResourceExhausted("out of memory"); }
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

struct LayerState {
  uint32_t store = 0;
  RopeParams rope;
  uint32_t rope_table = kNone;
  uint64_t f16_token_bytes = 0;
  std::vector<std::shared_ptr<const codecs::Codec>> codecs;  // by rung; null for full precision
  std::vector<float> query_energy;  // [n_kv_heads][head_dim], for codecs that learn
  bool learned = false;             // the layer's rows have been looked at
  bool calibrated = false;          // the codec is made of given statistics
};

/// One layer of one sequence.
struct LayerSeq {
  std::vector<UnitRecord> units;
  std::vector<LedgerEntry> ledger;  // of units that are dormant(), in their order
  bool routed = false;              // since the sequence began
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

/// One sequence in the plan of one layer.
struct SeqPlan {
  SeqId id = kNone;
  uint32_t recents = 0;      // tokens that are protected
  bool protect_tail = true;  // the open window
  bool keep_reserve = true;  // bytes for the tokens promised to it
  bool protect_sinks = true;
  uint64_t mandatory = 0, reserve = 0;  // bytes; mandatory: reserve included
  std::vector<uint8_t> is_protected;    // by unit
  uint32_t n_free = 0;                  // units that are not
  uint64_t history = 0;                 // bytes for them, if the policy shares evenly
};

/// What a step appends to one sequence.
struct AppendCount {
  SeqId seq;
  size_t n_windows;  // new ones
  uint64_t n_tokens;
};

/// The plans of some layers, and the bytes of all of them.
struct LayerPlans {
  std::vector<std::vector<SeqPlan>> plans;  // [layer][sequence]
  uint64_t bytes = 0;
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

/// Where the record of a window born at `birth` stands, or belongs, in a list ordered by birth.
template <typename Record>
auto PlaceByBirth(std::vector<Record>& records, const std::vector<WindowRecord>& windows,
                  uint32_t birth) {
  return std::lower_bound(records.begin(), records.end(), birth,
                          [&](const Record& r, uint32_t b) { return windows[r.window].birth < b; });
}

struct KvCache::Impl {
  Impl();
  ~Impl();

  // --- fixed at creation ---
  Config config;
  std::vector<LayerState> layers;
  std::vector<ShapeStore> stores;
  std::vector<std::unique_ptr<BlockPool>> pools;
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
  uint64_t unit_table_bytes = 0;      // capacity of all unit vectors and ledgers
  CacheStats counters;                // events, promotions, ... and peaks
  uint64_t decode_rounds = 0;         // decode steps of the sequence that has made most of them
  std::vector<SeqId> step_sequences;  // that the step being prepared appends to
  bool limit_on = false;
  bool overdrawn = false;  // the step in progress may exceed the limit: see MakeRoom
  bool routing_all = false;
  uint64_t pressure = 0;  // bytes that the event in progress must stay below its shares

  // Scratch, kept between calls: no step of a cache that does not grow asks for memory.
  std::vector<AppendCount> append_counts;
  mutable std::vector<BlockCount> growth_counts;
  std::vector<uint8_t*> write_blocks;   // scratch of Write
  std::vector<UnitRecord*> mass_units;  // scratch of AddMass
  std::vector<float> mass_scores, mass_others;

  std::unique_ptr<RestoreSession> restore;  // null between restores (restore.cc)
  struct {
    std::vector<RowChain> chains;  // per layer
    bool values = false;           // the last row read was one of V
  } reading;

  // storage.cc
  Status InitStores(std::vector<LayerShape> shapes);
  void DropUnusedRopeTable(uint32_t table);
  ShapeStore& StoreOf(uint32_t il) { return stores[layers[il].store]; }
  const ShapeStore& StoreOf(uint32_t il) const { return stores[layers[il].store]; }
  BlockPool& PoolOf(uint32_t il, Side s, Rung r) const { return StoreOf(il).rungs[r].pool(s); }
  Status AddPools(ShapeStore& store, uint64_t max_blocks);
  /// f(layer, unit, side, is_dormant) for every block that a unit or ledger refers to.
  template <typename F>
  void ForBlocks(const F& f) {
    for (const auto& s : sequences) {
      for (uint32_t il = 0; s && il < layers.size(); ++il) {
        for (const Side side : kBothSides) {
          for (UnitRecord& u : s->layers[il].units) {
            if (u.has(side)) f(il, u, side, false);
          }
          for (LedgerEntry& e : s->layers[il].ledger) {
            if (e.has(side)) f(il, e, side, true);
          }
        }
      }
    }
  }
  uint8_t* Block(uint32_t il, const UnitSides& u, Side s) const {
    return StoreOf(il).rungs[u.rung(s)].pool(s).data(u.block(s));
  }
  Status Write(uint32_t il, std::span<const TokenRef> refs, const float* rows, size_t row_stride,
               Side side, ParallelFor& pool);
  Status CreateUnits(uint32_t il, std::span<const TokenRef> refs);
  Status CheckRefs(uint32_t il, std::span<const TokenRef> refs, std::vector<WindowId>& fresh);
  Status OwnBlocks(uint32_t il, UnitSides& u, Side side);
  void DropBlock(uint32_t il, UnitSides& u, Side s);
  void DropLedger(uint32_t il, UnitRecord& u);
  void DropEmptyLedger(uint32_t il, UnitRecord& u);
  LedgerEntry* FindLedger(const LayerSeq& ls, WindowId w) const;
  void AddLedger(uint32_t il, UnitRecord& u, Side s, Rung r, BlockId id);
  void TrimStores();
  void CompactHandles(BlockPool& pool);
  void AddUnit(LayerSeq& ls, const UnitRecord& u);
  void GrowUnits(LayerSeq& ls, size_t n);
  void GrowLedger(LayerSeq& ls, size_t n);
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
  void GrowCells(uint32_t stream, uint32_t cell);
  void GrowWindows(size_t n_new);
  void GrowRopeTables(int32_t pos);
  static bool IsToken(uint32_t code) { return (code & kEvictedMark) == 0; }
  static uint32_t CellCode(TokenRef ref) { return ref.window * kMaxWindow + ref.offset; }
  Status CheckAppend(std::span<const TokenSpec> tokens);
  bool RunGoesOn(std::span<const TokenSpec> run) const;
  void ReserveAppend(std::span<const TokenSpec> tokens);
  Status Append(std::span<const TokenSpec> tokens, std::vector<TokenRef>& refs);
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
  uint32_t RoomBehindTail(const Sequence& s, uint64_t& appended) const;
  uint32_t CountFreshWindows(uint64_t appended, uint32_t n) const;
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
  bool LimitInForce() const { return limit_on && !routing_all && !restore; }
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
  uint64_t LayerShare(uint32_t il, std::span<const SeqId> domain) const;
  uint64_t StepGrowth(std::span<const StepRows> rows) const;
  bool FitsNext(std::span<const StepRows> rows) const;

  // routing.cc
  bool NoteStep(SeqId seq, uint32_t n, StepKind kind);
  void NoteRound(Sequence& s);
  Status PrepareStep(std::span<const StepRows> rows, ParallelFor& pool);
  Status MakeRoom(std::span<const StepRows> rows, ParallelFor& pool);
  Status RouteForRows(std::span<const StepRows> rows, ParallelFor& pool);
  Status RouteChunk(uint32_t il, SeqId seq, uint32_t reserve, ParallelFor& pool);
  Status RouteLayers(SeqId seq, uint32_t reserve, ParallelFor& pool);
  void FitNow(SeqId seq);
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
  Status RouteSome(std::span<const uint32_t> ils, SeqId seq, uint32_t reserve_tokens,
                   ParallelFor& pool);
  uint32_t FirstRecentBirth(const Sequence& s, uint32_t recents) const;
  void ScoreByKeyNorm(uint32_t il, UnitRecord& u) const;

  // plan.cc
  std::vector<std::vector<UnitMove>> PlanMoves(std::span<const uint32_t> ils, SeqId seq);
  void Protect(uint32_t il, SeqPlan& plan);
  template <typename F>
  SeqPlan* LongestIdle(std::vector<SeqPlan>& plans, const F& has) const;
  bool GiveWay(uint32_t il, std::vector<SeqPlan>& plans, SeqId self);
  std::vector<SeqPlan> ProtectDomain(uint32_t il, SeqId seq, std::span<const SeqId> domain,
                                     uint64_t share);
  std::optional<uint64_t> ShareAlone(uint32_t il, std::span<const SeqId> domain, uint64_t share,
                                     const SeqPlan& plan) const;
  bool ProtectAlone(std::span<const uint32_t> ils, SeqId seq, std::span<const SeqId> domain,
                    LayerPlans& out);
  void NoteAllowance(uint32_t il, const SeqPlan& plan, const std::vector<Placement>& placements);

  // commit.cc
  Status Commit(uint32_t il, std::vector<UnitMove>& moves, ParallelFor& pool);
  SortedMoves SortMoves(uint32_t il, const std::vector<UnitMove>& moves);
  Status ReserveForCommit(uint32_t il, const SortedMoves& sorted);
  bool WriteAll(uint32_t il, std::vector<UnitWrite>& writes, ParallelFor& pool);
  void WriteUnit(uint32_t il, const UnitWrite& w, float* k, float* v) const;
  void LoadRows(uint32_t il, const UnitRecord& u, const WindowPhases& phases, uint32_t head,
                float* k, float* v) const;
  void StoreRows(uint32_t il, const UnitWrite& w, const WindowPhases& phases, uint32_t head,
                 float* k, float* v) const;
  void SwitchSide(uint32_t il, const UnitWrite& w, Side s, std::vector<FreedBlock>& freed);
  void SwitchAll(uint32_t il, const SortedMoves& sorted, std::vector<FreedBlock>& freed);
  static void Free(std::vector<FreedBlock>& freed);
  void CountMoves(const SortedMoves& sorted);
  size_t ForgetEvicted(uint32_t il, const std::vector<UnitMove>& moves);

  // copy.cc, shift.cc, state_rows.cc, validate.cc
  void Clear();
  Status CopyStream(uint32_t src, uint32_t dst);
  void CopySequence(SeqId from, uint32_t stream);
  void DropStream(uint32_t stream);
  Status ReserveCopies(uint32_t src);
  void ShareUnit(uint32_t il, const UnitRecord& from, WindowId to);
  void ShareBlock(uint32_t il, UnitSides& u, Side s);
  Status CheckShift(std::span<const int32_t> delta) const;
  Status ReserveSplits(std::span<const int32_t> delta);
  Status ReserveShared(size_t n_splits);
  void MoveTokens(std::span<const int32_t> delta);
  void SplitWindow(WindowId id, uint32_t live, int32_t delta);
  bool Rotates(uint32_t il, const UnitRecord& u, const int32_t* delta) const;
  void RotateSides(uint32_t il, const UnitSides& u, WindowId id, const int32_t* delta,
                   std::span<const uint8_t> codes);
  void RotateFull(uint32_t il, const UnitSides& u, WindowId id, const int32_t* delta);
  std::vector<uint8_t> RotatedCodes(uint32_t il, const UnitSides& u, WindowId id,
                                    const int32_t* delta) const;
  void ScaleKeyGrid(uint32_t il, const UnitSides& u, float factor);
  Status OwnLedger(uint32_t il, UnitRecord& u);

  // learn.cc
  void AddQueryEnergy(uint32_t il, const float* squares);
  void LearnCodec(uint32_t il);
  /// True if some window of the layer has codes.
  bool HoldsCodes(uint32_t il) const;
  void Relearn();
  void Teach(uint32_t il, size_t max_tokens, codecs::CodecLearner& learner) const;
  float key_bias = 0.0f;  // KvCache::key_bias
  Status ShiftPositions(std::span<const int32_t> delta);
  Status RotateLayer(uint32_t il, std::span<const int32_t> delta, ParallelFor& pool);
  uint32_t HeadDim(uint32_t il, Side s) const {
    const LayerShape& shape = StoreOf(il).shape;
    return s == Side::kKeys ? shape.head_dim : shape.head_dim_v;
  }
  size_t RowWords(uint32_t il, Side s) const {
    return size_t{StoreOf(il).shape.n_kv_heads} * HeadDim(il, s);
  }
  void ReadRow(uint32_t il, uint32_t stream, uint32_t cell, Side side, uint16_t* row);
  bool FillRow(uint32_t il, uint32_t stream, uint32_t cell, Side side, uint16_t* row,
               RowRecord& record) const;
  void ReadFullRow(uint32_t il, const UnitRecord& u, uint32_t t, Side side, uint16_t* row) const;
  void WriteFullRow(uint32_t il, const UnitRecord& u, uint32_t t, Side side, const uint16_t* row);
  void CopyShare(uint32_t il, uint8_t* block, Side side, const RowRecord& record, uint8_t* bytes,
                 bool to_block) const;
  void ReadDecodedRow(uint32_t il, const UnitRecord& u, uint32_t t, Side side, uint16_t* row) const;
  bool SharesFit(uint32_t il, uint32_t n) const;
  bool SavesCodes(uint32_t il, const UnitRecord& u) const;
  Status RestoreRows(uint32_t il, uint32_t stream, uint32_t cell0, uint32_t n, Side side,
                     const uint16_t* rows);
  void BeginRestore(uint32_t il, uint32_t stream, Side side);
  void FinishRestore();
  void ForgetRestore(SeqId seq);
  void ForgetRestoredWindow(WindowId id);
  Status RestoreRow(uint32_t il, uint32_t stream, uint32_t cell, Side side, const uint16_t* row);
  Status RestoreToken(uint32_t cell, const RowRecord* record, uint64_t hash, TokenRef& ref);
  bool RoomForPosition(int32_t pos0);
  WindowId RestoredWindow(const RowRecord& record);
  Status RestoreUnit(uint32_t il, TokenRef ref, Side side, const RowRecord* record, uint64_t hash,
                     const uint16_t* row);
  Status RestoreShare(uint32_t il, TokenRef ref, Side side, const RowRecord& record,
                      const uint16_t* row);
  Status CreatePackedUnit(uint32_t il, WindowId w, float score);
  void SortRestored(SeqId seq);
  CacheStats Stats() const;
  void CountBlocks(ByteCounts& bytes) const;
  std::vector<std::string> Validate() const;
  void ValidateWindows(std::vector<std::string>& out) const;
  void ValidateUnits(std::vector<std::string>& out) const;
  void ValidateCells(std::vector<std::string>& out) const;
  void ValidateBlocks(std::vector<std::string>& out) const;
  void ValidateBytes(std::vector<std::string>& out) const;
};

/// 16-bit row <-> head block of kernels/attention.h.
void StoreKeyRow(uint8_t* block, uint32_t window, uint32_t head_dim, uint32_t t,
                 const uint16_t* row);
void LoadKeyRow(const uint8_t* block, uint32_t window, uint32_t head_dim, uint32_t t,
                uint16_t* row);
/// The same for either side.
void StoreRow(Side side, uint8_t* block, uint32_t window, uint32_t dim, uint32_t t,
              const uint16_t* row);
void LoadRow(Side side, const uint8_t* block, uint32_t window, uint32_t dim, uint32_t t,
             uint16_t* row);
inline codecs::RowShape RowsOf(const LayerShape& s) {
  return {s.n_kv_heads, s.head_dim, s.head_dim_v, s.bits};
}
/// Layers of one shape share a store.
bool SameShape(const LayerShape& a, const LayerShape& b);

}  // namespace qevict
