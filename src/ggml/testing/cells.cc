#include "ggml/testing/cells.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "base/half.h"

namespace qevict::plugin::testing {
namespace {

constexpr uint16_t kMinusInf = 0xFC00;

bool InRange(int32_t pos, int32_t p0, int32_t p1) { return pos >= p0 && (p1 < 0 || pos < p1); }

}  // namespace

Cells::Cells(uint32_t n_streams, uint32_t n_cells)
    : n_streams_(n_streams),
      n_cells_(n_cells),
      cells_(size_t{n_streams} * n_cells),
      heads_(n_streams, 0) {}

void Cells::Remove(uint32_t seq, int32_t p0, int32_t p1) {
  const uint32_t stream = stream_of(seq);
  for (uint32_t c = 0; c < n_cells_; ++c) {
    Cell& cell = at(stream, c);
    if (!has(stream, c, seq) || !InRange(cell.pos, p0, p1)) continue;
    cell.seqs &= ~(uint64_t{1} << seq);
    if (cell.seqs == 0) {
      cell = {};
      heads_[stream] = std::min(heads_[stream], c);
    }
  }
}

void Cells::Copy(uint32_t from, uint32_t to, int32_t p0, int32_t p1) {
  for (uint32_t c = 0; c < n_cells_; ++c) {
    if (has(stream_of(from), c, from) && InRange(pos(stream_of(from), c), p0, p1)) {
      at(stream_of(from), c).seqs |= uint64_t{1} << to;
    }
  }
}

void Cells::Shift(uint32_t seq, int32_t p0, int32_t p1, int32_t delta) {
  const uint32_t stream = stream_of(seq);
  for (uint32_t c = 0; c < n_cells_; ++c) {
    Cell& cell = at(stream, c);
    if (!has(stream, c, seq) || !InRange(cell.pos, p0, p1)) continue;
    cell.pos += delta;
    cell.shift += delta;
    if (cell.pos < 0) cell = {};
  }
}

void Cells::CopyStream(uint32_t from, uint32_t to) {
  for (uint32_t c = 0; c < n_cells_; ++c) {
    at(to, c) = at(from, c);
    if (at(to, c).seqs) at(to, c).seqs = uint64_t{1} << to;
  }
  heads_[to] = heads_[from];
}

void Cells::Clear() {
  std::fill(cells_.begin(), cells_.end(), Cell{});
  std::fill(heads_.begin(), heads_.end(), 0u);
}

int32_t Cells::last_pos(uint32_t seq) const {
  int32_t last = -1;
  for (uint32_t c = 0; c < n_cells_; ++c) {
    if (has(stream_of(seq), c, seq)) last = std::max(last, pos(stream_of(seq), c));
  }
  return last;
}

bool Cells::Free(const Cell& cell, int32_t swa) const {
  if (cell.seqs == 0) return true;
  if (swa <= 0 || std::popcount(cell.seqs) != 1) return false;
  const auto seq = static_cast<uint32_t>(std::countr_zero(cell.seqs));
  return last_pos(seq) + 1 - cell.pos >= swa;
}

std::vector<int64_t> Cells::Place(const std::vector<Token>& batch, int32_t swa) {
  // The search sees the cells as they were before the batch; then the batch is applied.
  std::vector<int64_t> indices;
  std::vector<std::pair<uint32_t, uint32_t>> taken;
  for (uint32_t s = 0; s < n_streams_; ++s) {
    const auto n = std::count_if(batch.begin(), batch.end(),
                                 [&](const Token& t) { return stream_of(t.seq) == s; });
    uint32_t used = 0;
    for (uint32_t c = 0; c < n_cells_; ++c) used += in_use(s, c) ? 1 : 0;
    uint32_t head = heads_[s];
    if (head > used + 2 * static_cast<uint32_t>(n)) head = 0;
    uint32_t tested = 0;
    for (ptrdiff_t i = 0; i < n;) {
      if (tested++ > n_cells_) throw std::runtime_error("test: no free cell");
      if (head >= n_cells_) head = 0;
      if (Free(at(s, head), swa)) {
        taken.push_back({s, head});
        ++i;
      }
      ++head;
    }
    if (n) heads_[s] = head % n_cells_;
  }
  for (size_t i = 0; i < batch.size(); ++i) {
    const Token& t = batch[i];
    Cell& cell = at(taken[i].first, taken[i].second);
    cell = {t.pos, t.y, t.x, 0, uint64_t{1} << t.seq};
    indices.push_back(int64_t{taken[i].first} * n_cells_ + taken[i].second);
  }
  return indices;
}

uint32_t Cells::n_kv(uint32_t s0, uint32_t n) const {
  uint32_t result = 0;
  for (uint32_t s = s0; s < s0 + n; ++s) {
    uint32_t used = 0;
    for (uint32_t c = 0; c < n_cells_; ++c) {
      if (in_use(s, c)) used = c + 1;
    }
    result = std::max(result, std::min(n_cells_, std::max(256u, (used + 255) / 256 * 256)));
  }
  return result;
}

std::vector<uint16_t> Cells::Mask(const std::vector<Token>& batch, uint32_t s0, uint32_t n,
                                  uint32_t n_kv, const MaskKind& kind) const {
  const size_t rows = batch.size() / n;
  std::vector<uint16_t> mask(batch.size() * n_kv, kMinusInf);
  for (size_t i = 0; i < batch.size(); ++i) {
    const Token& t = batch[i];
    const uint32_t stream = s0 + static_cast<uint32_t>(i / rows);
    for (uint32_t c = 0; c < n_kv; ++c) {
      const Cell& cell = at(stream, c);
      if (!has(stream, c, t.seq) || cell.pos > t.pos) continue;
      // Tokens of an image share a position: later ones in reading order stay hidden.
      if (cell.pos == t.pos && t.image() && (cell.y > t.y || (cell.y == t.y && cell.x > t.x))) {
        continue;
      }
      if (kind.swa > 0 && t.pos - cell.pos >= kind.swa) continue;
      mask[i * n_kv + c] =
          kind.alibi ? F32ToF16(static_cast<float>(-std::abs(cell.pos - t.pos))) : 0;
    }
  }
  return mask;
}

std::vector<int32_t> Cells::TakeShifts() {
  std::vector<int32_t> shifts;
  for (Cell& cell : cells_) {
    shifts.push_back(cell.shift);
    cell.shift = 0;
  }
  return shifts;
}

}  // namespace qevict::plugin::testing
