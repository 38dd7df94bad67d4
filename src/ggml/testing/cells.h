// Cells: what llama.cpp knows about the cells of its cache, and the masks it makes of them.
// A model of llama_kv_cells and of llama_kv_cache's slot search and mask input, for tests: the
// plug-in sees nothing but cell indices, positions and masks, so the tests need a host that
// produces them as llama.cpp does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace qevict::plugin::testing {

/// One token of a batch. M-RoPE positions are (pos, y, x); text tokens have y == x == pos.
struct Token {
  uint32_t seq = 0;
  int32_t pos = 0;
  int32_t y = -1, x = -1;  ///< < 0: a text token
  bool image() const { return y >= 0; }
};

/// Sliding window and ALiBi of a layer's mask.
struct MaskKind {
  int32_t swa = 0;     ///< > 0: a row sees the last `swa` positions
  bool alibi = false;  ///< values are -(distance) instead of 0
  bool operator==(const MaskKind&) const = default;
};

class Cells {
 public:
  Cells(uint32_t n_streams, uint32_t n_cells);

  /// llama_memory_seq_rm, _cp (inside a stream) and _add for positions in [p0, p1); p1 < 0: all.
  void Remove(uint32_t seq, int32_t p0, int32_t p1 = -1);
  void Copy(uint32_t from, uint32_t to, int32_t p0 = 0, int32_t p1 = -1);
  void Shift(uint32_t seq, int32_t p0, int32_t p1, int32_t delta);
  /// The cells of stream `to` become those of `from` (sequence ids too, as stream `to`).
  void CopyStream(uint32_t from, uint32_t to);
  void Clear();

  /// Takes cells for a batch whose tokens are grouped by stream. Returns global indices (stream *
  /// n_cells + cell). swa > 0: cells of tokens that have left the window may be taken, as
  /// llama.cpp's SWA caches do.
  std::vector<int64_t> Place(const std::vector<Token>& batch, int32_t swa = 0);
  /// Makes the next search of a stream begin at `cell`.
  void Seek(uint32_t stream, uint32_t cell) { heads_[stream] = cell; }

  /// Cells in use of the streams [s0, s0 + n), padded as llama.cpp pads (256 or the whole cache).
  uint32_t n_kv(uint32_t s0, uint32_t n) const;
  /// f16 mask [stream][row][n_kv] for tokens that have been placed.
  std::vector<uint16_t> Mask(const std::vector<Token>& batch, uint32_t s0, uint32_t n,
                             uint32_t n_kv, const MaskKind& kind) const;
  /// K-shift input: how far every cell has moved since the last call.
  std::vector<int32_t> TakeShifts();

  uint32_t stream_of(uint32_t seq) const { return n_streams_ == 1 ? 0 : seq; }
  uint32_t n_cells() const { return n_cells_; }
  uint32_t n_streams() const { return n_streams_; }
  bool in_use(uint32_t stream, uint32_t cell) const { return at(stream, cell).seqs != 0; }
  bool has(uint32_t stream, uint32_t cell, uint32_t seq) const {
    return (at(stream, cell).seqs >> seq & 1u) != 0;
  }
  bool only(uint32_t stream, uint32_t cell, uint32_t seq) const {
    return at(stream, cell).seqs == uint64_t{1} << seq;
  }
  int32_t pos(uint32_t stream, uint32_t cell) const { return at(stream, cell).pos; }
  int32_t last_pos(uint32_t seq) const;

 private:
  struct Cell {
    int32_t pos = 0, y = -1, x = -1, shift = 0;
    uint64_t seqs = 0;
  };
  Cell& at(uint32_t stream, uint32_t cell) { return cells_[size_t{stream} * n_cells_ + cell]; }
  const Cell& at(uint32_t stream, uint32_t cell) const {
    return cells_[size_t{stream} * n_cells_ + cell];
  }
  bool Free(const Cell& cell, int32_t swa) const;

  uint32_t n_streams_, n_cells_;
  std::vector<Cell> cells_;
  std::vector<uint32_t> heads_;
};

}  // namespace qevict::plugin::testing
