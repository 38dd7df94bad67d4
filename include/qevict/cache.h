// KvCache: keys and values of all layers under one byte budget, in windows that are full precision,
// packed or evicted.
//
//   tokens of a sequence   | sinks | w0 | w1 | ... history ... | recents (open window last) |
//   per layer and window    full    full | packed | evicted      full
//
// A window is up to `Config::window` tokens appended one after the other to one sequence, with
// consecutive positions (or, without usable positions, none: its keys are then packed as they are).
// The first `sinks` tokens of a sequence have windows of their own. The unit that moves is (layer,
// window); layers decide independently. Config::per_head: the engine hands every kv head over as a
// layer of its own, which then has its own ranking. The ledger is write-once: a window is encoded
// at its first demotion; promotions keep the codes, later demotions reuse them.
//
// Cells. Engines address tokens by (stream, cell), as llama.cpp does. The cache maps cells to
// tokens; a write to a cell in use kills the token that was there. A window whose tokens are all
// dead is freed.
//
// Threads: not thread-safe; Route and the row functions use the ParallelFor they are given.
// Errors: every fallible call returns a Status and leaves the cache as it was (plan, reserve, then
// commit).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "qevict/config.h"
#include "qevict/ladder.h"
#include "qevict/stats.h"
#include "qevict/status.h"

namespace qevict {

class DomainView;
class ParallelFor;
struct RopeParams;
enum class Elem : uint8_t;
namespace codecs {
class Codec;
struct WaterFillStats;
}  // namespace codecs
namespace kernels {
struct RungCode;
struct WindowRef;
class RopeTable;
}  // namespace kernels

using SeqId = uint32_t;
using WindowId = uint32_t;  ///< handle of a live window; handles are reused, birth numbers are not
inline constexpr uint32_t kNone = 0xFFFFFFFFu;

/// Shape of one layer's cache rows.
struct LayerShape {
  uint32_t n_kv_heads;
  uint32_t head_dim;    ///< D of K, multiple of 8
  uint32_t head_dim_v;  ///< D of V, multiple of 8
  Elem elem_k, elem_v;
  LayerBits bits = {};  ///< of packed windows, see BitsOfLayer
  /// Layers of this cache that are written before any of them attends: the kv heads of a layer of
  /// the model under Config::per_head.
  uint32_t n_together = 1;
};

/// What to append: one token. Tokens of one step share the same list for every layer.
struct TokenSpec {
  SeqId seq;
  uint32_t cell;    ///< in the sequence's stream
  int32_t pos;      ///< position the key was rotated at
  bool positional;  ///< false: pos says nothing about the rotation (image token with M-RoPE,
                    ///< unknown lineage)
};

/// What a step of a sequence is: its engine knows, or the cache tells it by its rows.
enum class StepKind : uint8_t { kAuto, kPrompt, kDecode };
/// Rows of one sequence that a step is about to append.
struct StepRows {
  SeqId seq;
  uint32_t n;
  StepKind kind = StepKind::kAuto;
  /// Rows that do not stand right behind the sequence's token before them: each may begin a window.
  uint32_t n_breaks = 0;
};

/// Where a token lives. window == kNone: evicted in all layers, or never written.
struct TokenRef {
  WindowId window = kNone;
  uint32_t offset = 0;
};

/// Read-only facts about a window (same in all layers).
struct WindowInfo {
  SeqId seq;
  uint32_t birth;  ///< rises with every window created; orders the windows of a sequence
  int32_t pos0;    ///< position of token 0; meaningless if !positional
  uint8_t n_tokens;
  uint8_t pos_stride;  ///< 1 positional, 0 otherwise
  bool sink;
  bool hidden;            ///< no row can see it any more, see KvCache::SetHidden
  uint32_t live;          ///< bit t: token t is not overwritten
  const uint32_t* cells;  ///< [n_tokens]; valid until the next non-const call
};

/// Tokens at a sequence's end that always stay: Config::recents, or its percentage of the tokens
/// that the budget would hold in full precision (the paper's setting), whole windows.
uint64_t RecentTokens(const Config& config, uint64_t f16_token_bytes, uint64_t budget_tokens);

/// Minimum bytes a budget must allow for one stream: sinks + recents + interval + one packed
/// window, tables included.
uint64_t MinimumBudgetBytes(const Config& config, std::span<const LayerShape> layers);

/// The configuration with a budget that holds a short sequence in every stream: where it is below
/// MinimumBudgetBytes and a tenth, the bytes, or the tokens that a fraction is taken of, are raised
/// to it.
Config WithLeastBudget(const Config& config, std::span<const LayerShape> layers, uint32_t n_streams,
                       uint32_t cells_per_stream);

/// A cache among several under one budget (a model with sliding windows has two).
struct CacheDemand {
  uint64_t f16_bytes;      ///< of the tokens that a fraction is taken of
  uint64_t minimum_bytes;  ///< see MinimumBudgetBytes
};
/// Shares the budget of `config` (its fraction of all caches' f16 bytes, or its bytes): each cache
/// gets the same fraction of its own, but none less than its minimum and a tenth, which the others
/// give up in proportion to what they have above theirs. Returns each cache's own fraction; the
/// same for all if there is not enough.
std::vector<double> ShareBudget(const Config& config, std::span<const CacheDemand> caches);

class KvCache {
 public:
  /// Errors: kInvalidArgument for shapes that cannot be stored or a budget below the minimum (the
  /// message names both), kResourceExhausted if address space is refused. Commits (almost) no
  /// memory.
  static Result<std::unique_ptr<KvCache>> Create(const Config& config,
                                                 std::vector<LayerShape> layers, uint32_t n_streams,
                                                 uint32_t cells_per_stream);
  ~KvCache();

  const Config& config() const;
  uint32_t n_layers() const;
  const LayerShape& layer(uint32_t il) const;

  /// Constants of a layer's RoPE; call before its first write (default: no RoPE). Changing them
  /// later is refused unless the layer holds nothing packed.
  Status SetRope(uint32_t il, const RopeParams& rope);
  /// The kernel's table for that layer, or null without RoPE. Covers all positions appended so far.
  const kernels::RopeTable* rope_table(uint32_t il) const;

  // --- Sequences --------------------------------------------------------------------------------
  /// These two throw std::bad_alloc if memory is refused; nothing has changed then.
  SeqId CreateSequence(uint32_t stream);
  /// A sequence that goes on behind a token of `parent`: it shares the windows up to there (rows
  /// see them by their masks), has the parent's phase and counters, and gets no sinks of its own.
  SeqId BranchSequence(SeqId parent);
  /// Windows of one sequence, in order, become windows of another one of its stream.
  /// kResourceExhausted if memory is refused; nothing has changed then.
  Status MoveWindows(std::span<const WindowId> ids, SeqId to);
  /// All windows and evicted tokens of `from` become those of `into`, whose phase and counters
  /// stay; `from` is gone. Errors as above.
  Status MergeSequence(SeqId from, SeqId into);
  /// Says whether rows can still see a window: one that lies behind a sliding window, or whose
  /// tokens were taken back as far as can be told, ranks below all others, is no recent one, and
  /// takes no more tokens. Nothing is lost by it while bytes last.
  void SetHidden(WindowId window, bool hidden);
  /// The token that the next one of its sequence follows, where that is not the last one appended.
  void SetTail(TokenRef token);
  /// Live sequences of a stream, oldest first. A sequence disappears when its last token is dead.
  std::vector<SeqId> Sequences(uint32_t stream) const;
  /// The same into a list that keeps its memory.
  void Sequences(uint32_t stream, std::vector<SeqId>& ids) const;
  uint32_t stream_of(SeqId seq) const;
  /// False for what was restored into a stream that several sequences of the engine share.
  bool IsChain(SeqId seq) const;
  /// Windows of a sequence in order (births rise). Windows evicted in every layer are gone from the
  /// list.
  std::span<const WindowId> windows(SeqId seq) const;
  WindowInfo info(WindowId window) const;
  TokenRef lookup(uint32_t stream, uint32_t cell) const;
  /// True if the cell's token is known, also where it has been evicted.
  bool Holds(uint32_t stream, uint32_t cell) const;
  /// Sequence of a cell's token, evicted or not; kNone if the cell holds none.
  SeqId SequenceOf(uint32_t stream, uint32_t cell) const;
  /// Tokens appended to the sequence so far that are not dead, evicted ones included.
  uint64_t n_tokens(SeqId seq) const;
  /// Last token appended; {kNone} for an empty sequence or if it has been evicted everywhere.
  TokenRef tail(SeqId seq) const;
  int32_t tail_pos(SeqId seq) const;

  // --- One step ---------------------------------------------------------------------------------
  /// Kills what the cells held, creates windows. Refs come back in order. If rows of a token in the
  /// middle of a sequence's last window are rewritten (rollback of a tail), the window is reused.
  /// kResourceExhausted: nothing changed but the length of RoPE tables.
  Status Append(std::span<const TokenSpec> tokens, std::vector<TokenRef>& refs);
  /// Stores rows of layer `il`: rows[i] of n_kv_heads * head_dim f32 at rows + i * row_stride
  /// (floats). Full-precision rows are rounded to the layer's 16-bit type, to nearest even. Writing
  /// to a unit that is packed or evicted is kInternal. kResourceExhausted if the limit refuses the
  /// slots (nothing written).
  Status WriteK(uint32_t il, std::span<const TokenRef> refs, const float* rows, size_t row_stride,
                ParallelFor& pool);
  Status WriteV(uint32_t il, std::span<const TokenRef> refs, const float* rows, size_t row_stride,
                ParallelFor& pool);
  /// Marks the token of a cell dead (its row was cleared).
  void Kill(uint32_t stream, uint32_t cell);
  /// The same for many cells, in time linear in their number where they end a sequence.
  void Kill(uint32_t stream, std::span<const uint32_t> cells);

  /// Accessible windows of a sequence in one layer, in order: fills refs (for the kernels) and ids.
  /// Appends to both. Pointers are valid until the next non-const call.
  void View(uint32_t il, SeqId seq, std::vector<kernels::WindowRef>& refs,
            std::vector<WindowId>& ids) const;
  /// What the kernels need of the layer's rungs; returns how many there are. rungs:
  /// [kernels::kMaxRungs]. Valid until the layer packs a window again after it had none.
  uint32_t Rungs(uint32_t il, kernels::RungCode* rungs) const;
  /// Format of windows on a packed rung. Valid as long.
  const codecs::Codec& codec(uint32_t il, Rung rung = 1) const;
  /// Adds attention masses to the scores of layer il: mass[h][i] (stride in floats) for ids[i],
  /// already summed over rows and query heads of kv head h; divided here by n_heads. n_queries:
  /// rows they come from.
  void AddMass(uint32_t il, std::span<const WindowId> ids, const float* mass, size_t head_stride,
               uint32_t n_heads, uint32_t n_queries);

  /// Energy of queries for codecs that learn from it: sums of squares [n_kv_heads][head_dim] over
  /// query rows and the query heads of each kv head. Ignored once the layer's codec is made.
  void AddQueryEnergy(uint32_t il, const float* squares);
  /// True while AddQueryEnergy is of use.
  bool WantsQueryEnergy(uint32_t il) const;

  /// Makes the codec of a layer (wf) of these statistics instead of the layer's own rows; after
  /// SetRope, and before the layer packs its first window. stats: [n_kv_heads]. Errors:
  /// kInvalidArgument if they are of another shape, kFailedPrecondition if it is too late.
  Status SetCodecStatistics(uint32_t il, std::span<const codecs::WaterFillStats> stats);
  /// The same statistics of what the layer holds in full precision (thinned to `max_tokens`) and of
  /// the queries seen; [n_kv_heads].
  std::vector<codecs::WaterFillStats> CodecStatistics(uint32_t il, size_t max_tokens) const;

  /// The largest static mean of a key channel before RoPE, over the standard deviation of its kv
  /// head's channels around their means: what a key bias adds to every key. Measured when a layer
  /// packs its first window in a codec that has no place for it (codecs::IgnoresKeyMean); else 0.
  float key_bias() const;

  /// Score of a window in one layer; 0 if the layer has evicted it.
  float score(uint32_t il, WindowId window) const;

  // --- Routing ----------------------------------------------------------------------------------
  /// Tells that `n` rows of a sequence are about to be appended. Updates step counters; returns
  /// true if a routing event is due before the append (call RouteAll then): at decode step
  /// Config::first_event and every interval (n rows after decoding has begun, up to 64, are n
  /// steps: speculation), when a prompt chunk ends and decoding goes on, and whenever the next n
  /// rows would not fit the limit. kAuto: a prompt's chunk until a step of kDecode, then whatever
  /// its rows say.
  bool NoteStep(SeqId seq, uint32_t n, StepKind kind);
  bool NoteStep(SeqId seq, uint32_t n, bool decode) {
    return NoteStep(seq, n, decode ? StepKind::kDecode : StepKind::kAuto);
  }
  /// The engine has killed or hidden what was taken back of the sequence's last step, before the
  /// next one is noted. Otherwise a draft's rows may be taken back by the rows that come, and as
  /// many more tokens count as recents.
  void ConfirmTail(SeqId seq);
  /// Rows of the sequence's last step; 0 before its first one.
  uint32_t last_rows(SeqId seq) const;
  /// True once the sequence has made a decode step.
  bool decoded(SeqId seq) const;
  /// NoteStep and the events that are due for all rows of a step, and room for all of them together
  /// (if they do not fit the limit, an event runs at once and evicts more). What engines call
  /// before Append. Where even that does not suffice the limit is out of force until the next
  /// event: no step fails because of the budget. Errors: kResourceExhausted only if the system
  /// refuses memory; the cache is sound then, and the step may be tried again.
  Status PrepareStep(std::span<const StepRows> rows, ParallelFor& pool);
  /// True while the step that was prepared last may exceed the limit.
  bool overdrawn() const;
  /// Plans and commits one layer for every sequence that shares the budget with `seq` (its stream
  /// if the budget is a fraction, all streams if absolute). reserve_tokens: tokens of `seq` that
  /// may be appended before the next Route; while a prompt is read under a limit: rows of a whole
  /// chunk (of all sequences), held free once for all layers, not per layer. Errors:
  /// kResourceExhausted, nothing changed: sinks, recents and reserve exceed the layer's share, or
  /// memory is refused.
  Status Route(uint32_t il, SeqId seq, uint32_t reserve_tokens, ParallelFor& pool);
  /// Route for all layers; counts one event. With prefill = full the limit comes into force once
  /// every sequence has had its first event. On an error the layers before the failing one are
  /// routed.
  Status RouteAll(SeqId seq, uint32_t reserve_tokens, ParallelFor& pool);
  /// True when the sequence's prompt must be routed after each chunk (prefill=bounded, or the first
  /// event has passed) and the layer's bytes are beyond its share.
  bool NeedsBoundedRoute(uint32_t il, SeqId seq) const;
  /// Another fraction, resolved against other token counts (prompt + max_new of our own commands).
  /// Before the first event only. Errors: kFailedPrecondition after it, kInvalidArgument below the
  /// minimum; nothing has changed then.
  Status SetBudget(uint32_t tokens, double fraction);

  // --- Whole-cache operations -------------------------------------------------------------------
  /// Forgets everything: tokens, scores, counters, step phases. Memory goes back to the system, but
  /// for RoPE tables, which keep their length.
  void Clear();
  /// Makes `dst` stream a copy of `src` (tiers, codes, scores, counters); dst's old tokens are
  /// dropped. Blocks are shared until they change: time and memory grow with the number of windows.
  /// Errors: kResourceExhausted if the system refuses memory: dst is empty then.
  Status CopyStream(uint32_t src, uint32_t dst);
  /// K-shift: adds delta[cell] to positions of every live token of all streams (index stream *
  /// cells_per_stream + cell). Windows whose tokens move differently are split. Full keys of a
  /// layer are rotated by RotateLayer. Errors, nothing changed: kInvalidArgument for a position
  /// beyond 2^24; kUnimplemented if packed keys cannot take RoPE's magnitude once more (below);
  /// kResourceExhausted if the system refuses memory.
  Status ShiftPositions(std::span<const int32_t> delta);
  /// Rotates layer il's full-precision keys by the same deltas (call once per layer after
  /// ShiftPositions). Like llama.cpp's K-shift it multiplies all keys by RoPE's magnitude once more
  /// (YaRN; grids of packed keys are scaled alike). kResourceExhausted if the system refuses memory;
  /// nothing has been rotated then.
  Status RotateLayer(uint32_t il, std::span<const int32_t> delta, ParallelFor& pool);

  /// Rows as 16-bit words for engines that save state: n_kv_heads*head_dim(_v) words. Full rows
  /// come out as they are; packed and evicted ones as self-describing records (see
  /// docs/formats/state-row.md); cells never written as zeros. Where full rows stood, and their
  /// scores, are remembered in this process for a restore of the same rows in the same
  /// order: K of every layer, then V of every layer.
  void ReadRowK(uint32_t il, uint32_t stream, uint32_t cell, uint16_t* row);
  void ReadRowV(uint32_t il, uint32_t stream, uint32_t cell, uint16_t* row);
  /// Restores rows of consecutive cells (K of every layer before any V). Rows that are neither
  /// records nor known full rows become tokens without positions. Errors: kDataLoss for a record
  /// that contradicts itself (its row is then dropped and the rest restored), kUnimplemented for a
  /// record of a newer version, kFailedPrecondition for rows whose first layer's keys have not
  /// come, kResourceExhausted if the limit has no room though other sequences gave way.
  Status RestoreRowsK(uint32_t il, uint32_t stream, uint32_t cell0, uint32_t n,
                      const uint16_t* rows);
  Status RestoreRowsV(uint32_t il, uint32_t stream, uint32_t cell0, uint32_t n,
                      const uint16_t* rows);
  /// The rows have all arrived: restored sequences get their order and their tail. Every call that
  /// changes the cache does this first; call it before asking for sequences, windows or tails after
  /// a restore.
  void FinishRestore();

  CacheStats Stats() const;
  /// Resident bytes of the arena by the operating system.
  uint64_t ResidentBytes() const;
  /// All violated invariants, one sentence each; empty = sound. Checks: every live token in exactly
  /// one state per layer, bytes = sum of parts <= budget, slots dense with matching owners, ledger
  /// entries unchanged since written (checksum kept only under Config::check), order deterministic.
  std::vector<std::string> Validate() const;
  /// Makes the n-th memory growth from now fail (tests).
  void FailGrowthAt(size_t n);

 private:
  friend class DomainView;
  KvCache();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace qevict
