#include "ggml/sequences.h"

#include <algorithm>
#include <bit>

namespace qevict::plugin {
namespace {

/// A sequence that a row sees but for so many tokens at its end was the beginning of the row's own
/// sequence, if it has been idle for some steps: its end was taken back, or another branch's.
constexpr uint32_t kMaxTakenBack = 64;
constexpr uint64_t kIdleSteps = 4;

bool Live(const WindowInfo& info, uint32_t t) { return (info.live >> t & 1u) != 0; }

int32_t PosOf(const WindowInfo& info, uint32_t t) {
  return info.pos0 + static_cast<int32_t>(t) * info.pos_stride;
}

}  // namespace

void SequenceReader::Read(KvCache& cache, bool one_stream_each, const StepTokens& step) {
  cache_ = &cache;
  step_ = step;
  one_stream_each_ = one_stream_each;
  rows_.clear();
  branches_.clear();
  ++n_steps_;
  DropOverwritten();
  for (size_t row = 0; row < step_.tokens.size(); ++row) {
    step_.tokens[row].seq = kNone;
    const SeqId seq = SequenceOfRow(row);
    step_.tokens[row].seq = seq;
    AddRow(seq, row);
  }
  if (!step_.masks->empty()) {
    NoteVisibility();
    MergeAncestors();
  }
  for (const SeqRows& r : rows_) {
    if (r.seq >= last_step_.size()) last_step_.resize(r.seq + 1);
    last_step_[r.seq] = n_steps_;
    if (!step_.masks->empty()) cache_->ConfirmTail(r.seq);
  }
}

/// Rows of a prompt, as far as can be told: more than speculation brings, or several of a sequence
/// that has not answered yet.
bool SequenceReader::IsChunk(const SeqRows& r) const {
  if (r.rows > kMaxTakenBack) return true;
  return r.rows > 1 && !cache_->decoded(r.seq) && !r.taken_back;
}

/// A sequence decodes when its tail goes on by one row (not the lone rest of its prompt beside
/// chunks of others, which comes once), or by a draft after an earlier one lost its end.
bool SequenceReader::IsDecode(const SeqRows& r) const {
  if (!r.follows) return false;
  const uint32_t before = cache_->last_rows(r.seq);
  if (r.rows > 1) {
    return r.taken_back && r.rows <= kMaxTakenBack && before > 0 && before <= kMaxTakenBack;
  }
  const auto beside = [&](const SeqRows& o) { return o.seq != r.seq && IsChunk(o); };
  return before == 1 || std::none_of(rows_.begin(), rows_.end(), beside);
}

void SequenceReader::NotePhases(int phase) {
  for (SeqRows& r : rows_) {
    r.kind = phase == 1 ? StepKind::kPrompt : StepKind::kAuto;
    if (phase == 2 || (phase == 0 && IsDecode(r))) r.kind = StepKind::kDecode;
  }
}

/// What the step overwrites has been removed by the host, or lies behind a sliding window.
void SequenceReader::DropOverwritten() {
  tails_lost_.clear();
  for (size_t begin = 0, end = 0; begin < step_.tokens.size(); begin = end) {
    const uint32_t stream = step_.streams[begin];
    cells_.clear();
    for (; end < step_.tokens.size() && step_.streams[end] == stream; ++end) {
      const uint32_t cell = step_.tokens[end].cell;
      const SeqId seq = cache_->SequenceOf(stream, cell);
      if (seq == kNone) continue;
      cells_.push_back(cell);
      const TokenRef held = cache_->lookup(stream, cell), tail = cache_->tail(seq);
      if (held.window != kNone && held.window == tail.window && held.offset == tail.offset) {
        tails_lost_.push_back(seq);
      }
    }
    cache_->Kill(stream, cells_);
  }
}

SeqRows* SequenceReader::RowsOf(SeqId seq) {
  const auto it =
      std::find_if(rows_.begin(), rows_.end(), [seq](const SeqRows& r) { return r.seq == seq; });
  return it == rows_.end() ? nullptr : &*it;
}

void SequenceReader::AddRow(SeqId seq, size_t row) {
  SeqRows* rows = RowsOf(seq);
  if (!rows) {
    rows = &rows_.emplace_back();
    rows->seq = seq;
    const auto in = [seq](const std::vector<SeqId>& list) {
      return std::find(list.begin(), list.end(), seq) != list.end();
    };
    rows->follows = cache_->n_tokens(seq) > 0 || in(branches_);
    rows->taken_back = in(tails_lost_);
  }
  rows->n_breaks += GoesOn(*rows, row) ? 0 : 1;
  ++rows->rows;
  rows->last = static_cast<uint32_t>(row);
}

/// True if a row of a sequence stands right behind its token before it, in this step or in the cache.
bool SequenceReader::GoesOn(const SeqRows& rows, size_t row) const {
  const TokenSpec& token = step_.tokens[row];
  if (rows.rows > 0) {
    const TokenSpec& before = step_.tokens[rows.last];
    return before.positional == token.positional &&
           (!token.positional || before.pos + 1 == token.pos);
  }
  const TokenRef tail = cache_->tail(rows.seq);
  if (tail.window == kNone) return true;  // a window begins anyway
  const bool positional = cache_->info(tail.window).pos_stride != 0;
  return positional == token.positional &&
         (!positional || cache_->tail_pos(rows.seq) + 1 == token.pos);
}

/// A token follows the newest token that its row sees, in this step or in the cache. One that sees
/// nothing begins a sequence, unless its position says that there is more of it (attention in
/// chunks).
SeqId SequenceReader::SequenceOfRow(size_t row) {
  const SeqId earlier = BehindEarlierRow(row);
  if (earlier != kNone) return earlier;
  const uint32_t stream = step_.streams[row];
  if (step_.masks->empty()) {
    cache_->Sequences(stream, sequences_);
    if (one_stream_each_) return sequences_.empty() ? NewSequence(stream) : sequences_.back();
    const SeqId seq = ByPosition(row);
    return seq == kNone ? NewSequence(stream) : seq;
  }
  Seen seen = NewestSeen(row);
  if (seen.seq == kNone) seen = EvictedSeen(row);
  if (seen.seq != kNone) return BehindCached(row, seen);
  if (one_stream_each_) DropBehind(row, seen);
  const SeqId seq = ByPosition(row);
  return seq == kNone ? NewSequence(stream) : seq;
}

/// Rows of a step that follow the same one are branches.
SeqId SequenceReader::BehindEarlierRow(size_t row) {
  const TokenSpec& token = step_.tokens[row];
  for (size_t r = row; r-- > step_.begin_of(row);) {
    const TokenSpec& earlier = step_.tokens[r];
    if (step_.streams[r] != step_.streams[row]) continue;
    if (one_stream_each_) return earlier.seq;
    const bool follows =
        step_.masks->empty() ? earlier.pos + 1 == token.pos : step_.sees(row, earlier.cell);
    if (!follows) continue;
    return RowsOf(earlier.seq)->last == r ? earlier.seq : Branch(earlier.seq);
  }
  return kNone;
}

SeqId SequenceReader::ByPosition(size_t row) {
  const TokenSpec& token = step_.tokens[row];
  if (!token.positional || token.pos == 0) return kNone;
  for (const SeqRows& r : rows_) {
    const TokenSpec& last = step_.tokens[r.last];
    if (step_.streams[r.last] == step_.streams[row] && last.pos + 1 == token.pos) return r.seq;
  }
  cache_->Sequences(step_.streams[row], sequences_);
  for (const SeqId seq : sequences_) {
    if (cache_->n_tokens(seq) > 0 && cache_->tail_pos(seq) + 1 == token.pos && !RowsOf(seq)) {
      return seq;
    }
  }
  return kNone;
}

/// A sequence without tokens: one that a refused step has left, or a new one.
SeqId SequenceReader::NewSequence(uint32_t stream) {
  cache_->Sequences(stream, sequences_);
  for (const SeqId seq : sequences_) {
    if (cache_->n_tokens(seq) == 0 && !RowsOf(seq)) return seq;
  }
  return cache_->CreateSequence(stream);
}

// --- What a row sees
// ---------------------------------------------------------------------------------------------------

bool SequenceReader::SeesWindow(size_t row, const WindowInfo& info) const {
  for (uint32_t t = 0; t < info.n_tokens; ++t) {
    if (Live(info, t) && step_.sees(row, info.cells[t])) return true;
  }
  return false;
}

/// The newest token of a sequence that is seen is near its end, except after a rollback.
SequenceReader::Seen SequenceReader::NewestSeenOf(SeqId seq, size_t row) {
  const std::span<const WindowId> windows = cache_->windows(seq);
  for (size_t w = windows.size(); w-- > 0;) {
    const WindowInfo info = cache_->info(windows[w]);
    for (uint32_t t = info.n_tokens; t-- > 0;) {
      if (!Live(info, t) || !step_.sees(row, info.cells[t])) continue;
      return {seq, {windows[w], t}, PosOf(info, t), info.pos_stride != 0, info.birth};
    }
  }
  return {};
}

SequenceReader::Seen SequenceReader::NewestSeen(size_t row) {
  const TokenSpec& token = step_.tokens[row];
  cache_->Sequences(step_.streams[row], sequences_);
  for (const SeqId seq : sequences_) {  // the usual case: some sequence goes on at its tail
    const TokenRef tail = cache_->tail(seq);
    if (tail.window == kNone || !token.positional || cache_->tail_pos(seq) + 1 != token.pos) {
      continue;
    }
    const WindowInfo info = cache_->info(tail.window);
    if (info.pos_stride == 0 || !step_.sees(row, info.cells[tail.offset])) continue;
    return {seq, tail, cache_->tail_pos(seq), true, info.birth};
  }
  Seen newest;
  for (const SeqId seq : sequences_) {
    const Seen seen = NewestSeenOf(seq, row);
    if (seen.seq == kNone) continue;
    const bool by_position = token.positional && seen.positional && newest.positional;
    const bool newer = by_position ? seen.pos > newest.pos : seen.birth > newest.birth;
    if (newest.seq == kNone || newer) newest = seen;
  }
  return newest;
}

SequenceReader::Seen SequenceReader::EvictedSeen(size_t row) {
  for (uint32_t cell = step_.mask_of(row)->n_kv(); cell-- > 0;) {
    if (!step_.sees(row, cell)) continue;
    const SeqId seq = cache_->SequenceOf(step_.streams[row], cell);
    if (seq != kNone) return {seq, {}, 0, false, 0};
  }
  return {};
}

// --- Tails and branches
// ------------------------------------------------------------------------------------------------

SeqId SequenceReader::BehindCached(size_t row, const Seen& seen) {
  const SeqId seq = seen.seq;
  if (one_stream_each_) {
    DropBehind(row, seen);
    return seq;
  }
  if (RowsOf(seq)) return ResumeBranch(row, seen);
  if (seen.token.window == kNone || !HasTokensBehind(seen)) return seq;
  if (!cache_->IsChain(seq)) return Branch(seq);
  if (cache_->info(seen.token.window).hidden) {
    for (const WindowId w : cache_->windows(seq)) {
      const WindowInfo info = cache_->info(w);
      if (info.birth > seen.birth && !info.hidden) return ResumeBranch(row, seen);
    }
  }
  HideBehind(seen);
  tails_lost_.push_back(seq);
  return seq;
}

bool SequenceReader::HasTokensBehind(const Seen& seen) const {
  const WindowInfo info = cache_->info(seen.token.window);
  return cache_->windows(seen.seq).back() != seen.token.window ||
         (info.live >> seen.token.offset) != 1u;
}

SeqId SequenceReader::Branch(SeqId parent) {
  branches_.push_back(cache_->BranchSequence(parent));
  return branches_.back();
}

/// The stream's only sequence has been taken back to what the row sees: what lies behind it is
/// gone, and so is what has the row's position or a later one.
void SequenceReader::DropBehind(size_t row, const Seen& seen) {
  const TokenSpec& token = step_.tokens[row];
  const uint32_t stream = step_.streams[row];
  cells_.clear();
  cache_->Sequences(stream, all_sequences_);
  for (const SeqId seq : all_sequences_) {
    const bool last = seq == seen.seq && cache_->tail(seq).window == seen.token.window &&
                      cache_->tail(seq).offset == seen.token.offset;
    if (last && seen.token.window != kNone) continue;
    const size_t n_before = cells_.size();
    for (const WindowId w : cache_->windows(seq)) {
      const WindowInfo info = cache_->info(w);
      const bool positions = token.positional && info.pos_stride != 0;
      for (uint32_t t = 0; t < info.n_tokens; ++t) {
        if (!Live(info, t) || step_.sees(row, info.cells[t])) continue;
        const bool behind =
            seen.token.window != kNone && seq == seen.seq &&
            (info.birth > seen.birth || (w == seen.token.window && t > seen.token.offset));
        const bool later = positions ? PosOf(info, t) >= token.pos : seen.seq == kNone;
        if (behind || later) cells_.push_back(info.cells[t]);
      }
    }
    if (cells_.size() > n_before) tails_lost_.push_back(seq);
  }
  cache_->Kill(stream, cells_);
}

void SequenceReader::HideBehind(const Seen& seen) {
  for (const WindowId w : cache_->windows(seen.seq)) {
    if (cache_->info(w).birth > seen.birth) cache_->SetHidden(w, true);
  }
  cache_->SetTail(seen.token);
}

/// The row goes on behind tokens that another branch does not see: what they share stays.
SeqId SequenceReader::ResumeBranch(size_t row, const Seen& seen) {
  windows_.clear();
  for (const WindowId w : cache_->windows(seen.seq)) {
    const WindowInfo info = cache_->info(w);
    if (info.hidden && SeesWindow(row, info)) windows_.push_back(w);
  }
  const SeqId branch = Branch(seen.seq);
  if (!windows_.empty() && cache_->MoveWindows(windows_, branch).ok()) {
    for (const WindowId w : windows_) cache_->SetHidden(w, false);
    if (cache_->info(seen.token.window).seq == branch) cache_->SetTail(seen.token);
  }
  return branch;
}

// --- Visibility
// --------------------------------------------------------------------------------------------------------

bool SequenceReader::SeenByOthers(SeqId seq, const WindowInfo& info) const {
  const uint32_t stream = cache_->stream_of(seq);
  return std::any_of(rows_.begin(), rows_.end(), [&](const SeqRows& r) {
    return r.seq != seq && step_.streams[r.last] == stream && SeesWindow(r.last, info);
  });
}

void SequenceReader::NoteVisibility(SeqId seq) {
  const SeqRows* own = RowsOf(seq);
  const bool sees = own && NewestSeenOf(seq, own->last).seq != kNone;
  for (const WindowId w : cache_->windows(seq)) {
    const WindowInfo info = cache_->info(w);
    if (!sees && !info.hidden) continue;
    const bool seen = (sees && SeesWindow(own->last, info)) || SeenByOthers(seq, info);
    if (seen == info.hidden && (seen || step_.one_mask)) cache_->SetHidden(w, !seen);
  }
}

/// By the newest rows of the sequences: what these do not see, no later one sees.
void SequenceReader::NoteVisibility() {
  for (size_t s = 0; s < step_.masks->size(); ++s) {
    cache_->Sequences(step_.first_stream + static_cast<uint32_t>(s), all_sequences_);
    for (const SeqId seq : all_sequences_) NoteVisibility(seq);
  }
}

bool SequenceReader::IsAncestor(SeqId seq, size_t row) {
  const Seen seen = NewestSeenOf(seq, row);
  if (seen.seq == kNone) return false;
  uint32_t behind = 0;
  for (const WindowId w : cache_->windows(seq)) {
    const WindowInfo info = cache_->info(w);
    if (info.birth < seen.birth) continue;
    const uint32_t live = w == seen.token.window ? info.live >> seen.token.offset >> 1 : info.live;
    behind += static_cast<uint32_t>(std::popcount(live));
  }
  const bool idle = seq >= last_step_.size() || last_step_[seq] + kIdleSteps <= n_steps_;
  return behind == 0 || (idle && behind <= kMaxTakenBack);
}

/// Idle sequences that turn out to be the beginning of another one become part of it.
void SequenceReader::MergeAncestors() {
  if (one_stream_each_) return;
  for (const SeqRows& r : rows_) {
    cache_->Sequences(step_.streams[r.last], all_sequences_);
    if (all_sequences_.size() == rows_.size()) return;
    for (const SeqId seq : all_sequences_) {
      if (RowsOf(seq) || !cache_->IsChain(seq) || !IsAncestor(seq, r.last)) continue;
      (void)cache_->MergeSequence(seq, r.seq);
    }
  }
}

}  // namespace qevict::plugin
