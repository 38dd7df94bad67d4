// Masks: f16 attention masks of llama.cpp turned into bitmaps over cells, once per graph, for all
// layers.
#pragma once

#include <cstdint>
#include <vector>

#include "ggml.h"

namespace qevict::plugin {

/// Bits over cells for every query row of one stream. Rows of `words()` 64-bit words.
class MaskBits {
 public:
  /// Reads stream `s` of an f16 mask [n_kv, n_rows(+), 1, n_streams]; a null mask shows every cell.
  void Read(const ggml_tensor* mask, int64_t s, uint32_t n_rows, uint32_t n_kv);
  bool test(uint32_t row, uint32_t cell) const {
    return cell < n_kv_ && (bits_[size_t{row} * words_ + (cell >> 6)] >> (cell & 63) & 1u);
  }
  /// Bits of `n` (1...32) consecutive cells from `cell`, lowest first; cells beyond n_kv are 0.
  uint32_t range(uint32_t row, uint32_t cell, uint32_t n) const {
    if (cell >= n_kv_) return 0;
    const uint64_t* words = bits_.data() + size_t{row} * words_;
    const uint32_t word = cell >> 6, shift = cell & 63;
    uint64_t bits = words[word] >> shift;
    if (shift + n > 64 && word + 1 < words_) bits |= words[word + 1] << (64 - shift);
    return static_cast<uint32_t>(bits & ((uint64_t{1} << n) - 1));
  }
  /// True if some value is neither 0 nor -inf (ALiBi): then value() must be added to the logits.
  bool has_values() const { return has_values_; }
  float value(uint32_t row, uint32_t cell) const;
  uint32_t n_rows() const { return n_rows_; }
  uint32_t n_kv() const { return n_kv_; }
  size_t bytes() const { return bits_.capacity() * sizeof(uint64_t); }

 private:
  std::vector<uint64_t> bits_;
  uint32_t n_rows_ = 0, n_kv_ = 0, words_ = 0;
  bool has_values_ = false;
  const char* data_ = nullptr;
  size_t row_stride_ = 0;
};

}  // namespace qevict::plugin
