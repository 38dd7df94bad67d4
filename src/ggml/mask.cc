#include "ggml/mask.h"

#include <algorithm>

#include "base/half.h"

namespace qevict::plugin {
namespace {

constexpr uint16_t kMinusInf = 0xFC00;

// One word of 64 cells: bit = "not -inf". Written so that compilers vectorise it: 16 bits come from
// 16 lanes at a time.
uint64_t ReadWord(const uint16_t* m, uint32_t n, bool& has_values) {
  uint64_t word = 0;
  uint32_t other = 0;
  for (uint32_t i = 0; i < n; ++i) {
    word |= uint64_t{m[i] != kMinusInf} << i;
    other |= (m[i] != kMinusInf) & ((m[i] & 0x7FFFu) != 0);
  }
  has_values |= other != 0;
  return word;
}

}  // namespace

void MaskBits::Read(const ggml_tensor* mask, int64_t s, uint32_t n_rows, uint32_t n_kv) {
  n_rows_ = n_rows;
  n_kv_ = n_kv;
  words_ = (n_kv + 63) / 64;
  has_values_ = false;
  bits_.resize(size_t{n_rows} * words_);
  if (!mask) {
    data_ = nullptr;
    for (uint32_t r = 0; r < n_rows; ++r) {
      for (uint32_t w = 0; w < words_; ++w) {
        const uint32_t left = n_kv - w * 64;
        bits_[size_t{r} * words_ + w] = left >= 64 ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
      }
    }
    return;
  }
  data_ = static_cast<const char*>(mask->data) + static_cast<size_t>(s % mask->ne[3]) * mask->nb[3];
  row_stride_ = mask->nb[1];
  for (uint32_t r = 0; r < n_rows; ++r) {
    const uint16_t* m = reinterpret_cast<const uint16_t*>(data_ + r * row_stride_);
    uint64_t* out = bits_.data() + size_t{r} * words_;
    for (uint32_t w = 0; w < words_; ++w)
      out[w] = ReadWord(m + w * 64, std::min(64u, n_kv - w * 64), has_values_);
  }
}

float MaskBits::value(uint32_t row, uint32_t cell) const {
  return F16ToF32(reinterpret_cast<const uint16_t*>(data_ + row * row_stride_)[cell]);
}

}  // namespace qevict::plugin
