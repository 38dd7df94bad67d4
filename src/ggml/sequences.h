// Sequences of a step: which tokens belong together, told from cells, positions and masks alone.
//
//   proven   a token whose cell is written again is gone; with a stream for each sequence, so are
//            the tokens behind the newest one that a row of the stream sees
//   guessed  in a unified cache, tokens behind the newest one that a row sees were taken back, or
//            the row begins a branch. Nothing is lost either way: they are hidden (which only
//            ranks them last), and if a row comes that goes on behind them, they become a sequence
//            of their own
//
// What is guessed decides which windows are sinks and recents and whose phase counts, never what
// rows attend to: that is the masks' alone.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ggml/mask.h"
#include "ggml/reused.h"
#include "qevict/cache.h"

namespace qevict::plugin {

/// Rows of one sequence in a step.
struct SeqRows {
  SeqId seq = kNone;
  uint32_t rows = 0;
  uint32_t last = 0;        ///< index of the newest one among the step's tokens
  uint32_t n_breaks = 0;    ///< see StepRows
  bool follows = false;     ///< the sequence had tokens before the step
  bool taken_back = false;  ///< tokens of its last step were taken back
  StepKind kind = StepKind::kAuto;
};

/// A step as the host's graph shows it. Without masks (graphs of single nodes) positions tell.
struct StepTokens {
  std::span<TokenSpec> tokens;  ///< their sequences are filled in
  std::span<const uint32_t> streams;
  const Reused<MaskBits>* masks;  ///< of stream first_stream + i; or empty
  uint32_t first_stream, rows_per_stream;
  bool one_mask;  ///< all layers of the cache have the same mask

  size_t begin_of(size_t row) const { return masks->empty() ? 0 : row - row % rows_per_stream; }
  const MaskBits* mask_of(size_t row) const {
    return masks->empty() ? nullptr : &(*masks)[row / rows_per_stream];
  }
  bool sees(size_t row, uint32_t cell) const {
    return mask_of(row)->test(static_cast<uint32_t>(row - begin_of(row)), cell);
  }
};

class SequenceReader {
 public:
  /// Fills in the sequences of a step's tokens; tokens that are gone are dropped from the cache,
  /// and windows that no row sees any more are hidden.
  void Read(KvCache& cache, bool one_stream_each, const StepTokens& step);
  /// Tells prompts from decode steps; phase: of the C API, which overrides what rows say.
  void NotePhases(int phase);
  /// Rows by sequence, in order of their first ones.
  std::vector<SeqRows>& rows() { return rows_; }
  void Clear() { rows_.clear(); }

 private:
  /// The newest token that a row sees: seq == kNone if there is none; window == kNone if it is
  /// evicted.
  struct Seen {
    SeqId seq = kNone;
    TokenRef token;
    int32_t pos = 0;
    bool positional = false;
    uint32_t birth = 0;
  };

  bool IsChunk(const SeqRows& r) const;
  bool IsDecode(const SeqRows& r) const;
  void DropOverwritten();
  SeqId SequenceOfRow(size_t row);
  SeqId BehindEarlierRow(size_t row);
  SeqId BehindCached(size_t row, const Seen& seen);
  SeqId ByPosition(size_t row);
  SeqId NewSequence(uint32_t stream);
  SeqRows* RowsOf(SeqId seq);
  void AddRow(SeqId seq, size_t row);
  bool GoesOn(const SeqRows& rows, size_t row) const;
  Seen NewestSeen(size_t row);
  Seen NewestSeenOf(SeqId seq, size_t row);
  Seen EvictedSeen(size_t row);
  bool SeesWindow(size_t row, const WindowInfo& info) const;
  bool HasTokensBehind(const Seen& seen) const;
  SeqId Branch(SeqId parent);
  void DropBehind(size_t row, const Seen& seen);
  void HideBehind(const Seen& seen);
  SeqId ResumeBranch(size_t row, const Seen& seen);
  void NoteVisibility();
  void NoteVisibility(SeqId seq);
  bool SeenByOthers(SeqId seq, const WindowInfo& info) const;
  void MergeAncestors();
  bool IsAncestor(SeqId seq, size_t row);

  KvCache* cache_ = nullptr;  // of the step in progress, as the next ones
  StepTokens step_{};
  bool one_stream_each_ = false;
  std::vector<SeqRows> rows_;
  std::vector<SeqId> tails_lost_, branches_, sequences_;  // of the step; scratch
  std::vector<SeqId> all_sequences_;  // scratch of loops that call nothing which uses it
  std::vector<WindowId> windows_;
  std::vector<uint32_t> cells_;
  std::vector<uint64_t> last_step_;  // by sequence
  uint64_t n_steps_ = 0;
};

}  // namespace qevict::plugin
