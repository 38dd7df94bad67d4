#include "codecs/token.h"

#include <algorithm>

#include "codecs/grid.h"

namespace qevict::codecs {
namespace {

using kernels::kKeyUnit;
using kernels::kValueUnit;
using kernels::VectorCode;
using kernels::WordsOfUnits;

void PutBits(uint8_t* words, uint32_t row, uint32_t lane, uint32_t shift, uint32_t value) {
  uint32_t word;
  std::memcpy(&word, words + (size_t{row} * 8 + lane) * 4, 4);
  word |= value << shift;
  std::memcpy(words + (size_t{row} * 8 + lane) * 4, &word, 4);
}

uint32_t GetBits(const uint8_t* words, uint32_t row, uint32_t lane, uint32_t shift, uint32_t mask) {
  uint32_t word;
  std::memcpy(&word, words + (size_t{row} * 8 + lane) * 4, 4);
  return word >> shift & mask;
}

/// Where one field's part of a code lies among the rows of 8 words.
struct Spot {
  uint32_t row, lane, shift;
};

/// at: where the unit's field begins, in widths of a key's field.
Spot KeySpot(uint32_t at, uint32_t place, uint32_t token) {
  return {at / 8, token % 8, 8 * (place % kKeyUnit) + at % 8};
}
Spot ValueSpot(uint32_t at, uint32_t width, uint32_t place, uint32_t token) {
  const uint32_t bit = 4 * at + width * (token % 8 / 2);
  return {bit / 16, place % kValueUnit, bit % 16 + 16 * (token % 2)};
}

uint32_t UnitsOf(uint32_t dim, uint32_t unit) { return (dim + unit - 1) / unit; }

/// Calls f(cursor, width, lowest bit of the code) for each field that holds a part of codes of so
/// many bits.
template <class F>
void ForWidths(uint32_t bits, kernels::FieldCursors& at, F&& f) {
  if (bits == 8) f(at.at8, 8, 0);
  if (bits == 4) f(at.at4, 4, 0);
  if (bits == 3 || bits == 2) f(at.at2, 2, 0);
  if (bits == 3) f(at.at1, 1, 2);
  if (bits == 1) f(at.at1, 1, 0);
}

}  // namespace

void TokenWriter::Put(uint8_t* words, uint32_t token, const uint8_t* codes) const {
  const uint32_t unit = is_k_ ? kKeyUnit : kValueUnit;
  uint8_t* rows = words + size_t{token / 8} * code_.n_words * 32;
  kernels::FieldCursors cursors = first_;
  // A field of a unit: the codes' bits from low_bit on.
  const auto put = [&](uint32_t& at, uint32_t width, uint32_t low_bit) {
    const uint32_t mask = (1u << width) - 1;
    const Spot first = is_k_ ? KeySpot(at, 0, token) : ValueSpot(at, width, 0, token);
    if (is_k_) {
      uint32_t word = 0;
      for (uint32_t i = 0; i < unit; ++i) word |= (codes[i] >> low_bit & mask) << (8 * i);
      PutBits(rows, first.row, first.lane, first.shift, word);
    } else {
      for (uint32_t i = 0; i < unit; ++i)
        PutBits(rows, first.row, i, first.shift, codes[i] >> low_bit & mask);
    }
    at += width;
  };
  for (uint32_t s = 0; s < code_.n_segments; ++s) {
    for (uint32_t u = 0; u < code_.segments[s].n_units; ++u, codes += unit)
      ForWidths(code_.segments[s].bits, cursors, put);
  }
}

uint32_t TokenWriter::Get(const uint8_t* words, uint32_t token, uint32_t place) const {
  const uint32_t unit = is_k_ ? kKeyUnit : kValueUnit;
  kernels::FieldCursors cursors = first_;
  uint32_t value = 0;
  for (uint32_t s = 0; s < code_.n_segments; ++s) {
    const uint32_t n = code_.segments[s].n_units;
    const bool here = place < n * unit;
    const uint32_t skipped = here ? place / unit : n;
    ForWidths(code_.segments[s].bits, cursors, [&](uint32_t& at, uint32_t width, uint32_t low_bit) {
      at += width * skipped;
      if (!here) return;
      Spot spot = is_k_ ? KeySpot(at, place, token) : ValueSpot(at, width, place, token);
      spot.row += token / 8 * code_.n_words;
      value |= GetBits(words, spot.row, spot.lane, spot.shift, (1u << width) - 1) << low_bit;
    });
    if (here) break;
    place -= n * unit;
  }
  return value;
}

UniformVector::UniformVector(uint32_t bits, uint32_t dim, uint32_t unit) {
  const uint32_t n_units = UnitsOf(dim, unit);
  code.n_segments = 1;
  code.segments[0] = {static_cast<uint8_t>(bits), static_cast<uint16_t>(n_units)};
  for (uint32_t i = 0; bits < 8 && i < 1u << bits; ++i) {
    code.levels[0][i] = static_cast<uint8_t>(i);
  }
  code.grid = kernels::TokenGrid::kScaleZero;
  code.n_words = WordsOfUnits(n_units * bits, unit);
  code.n_places = n_units * unit;
  step.assign(code.n_places, 0.0f);
  channel.assign(code.n_places, 0xFFFF);
  for (uint32_t c = 0; c < dim; ++c) {
    step[c] = 1.0f;
    channel[c] = static_cast<uint16_t>(c);
  }
  code.step = step.data();
  code.channel = channel.data();
}

TokenCodec::TokenCodec(uint32_t bits, uint32_t window, const RowShape& shape)
    : bits_(bits),
      window_(window),
      shape_(shape),
      k_(bits, shape.head_dim, kKeyUnit),
      v_(bits, shape.head_dim_v, kValueUnit),
      codes_(shape.n_kv_heads, {k_.code, v_.code}) {}

BlockBytes TokenCodec::Bytes(uint32_t bits, uint32_t window, const RowShape& shape) {
  const auto bytes = [&](uint32_t dim, uint32_t unit) {
    return kernels::TokenCodeBytes(window, WordsOfUnits(UnitsOf(dim, unit) * bits, unit),
                                   kernels::TokenGrid::kScaleZero);
  };
  return {bytes(shape.head_dim, kKeyUnit), bytes(shape.head_dim_v, kValueUnit)};
}

void TokenCodec::EncodeSides(uint32_t, uint32_t n, const float* k, const float* v, uint8_t* k_block,
                             uint8_t* v_block) const {
  const float max_code = static_cast<float>((1u << bits_) - 1);
  const auto encode = [&](const VectorCode& code, bool is_k, const float* x, uint32_t dim,
                          uint8_t* words) {
    if (words == nullptr) return;
    std::memset(words, 0, is_k ? bytes().keys : bytes().values);
    const TokenWriter writer(code, is_k);
    uint8_t* grids = words + size_t{window_} * code.n_words * 4;
    uint8_t codes[kernels::kMaxPlaces] = {};
    for (uint32_t t = 0; t < n; ++t, x += dim) {
      float low = 0.0f, high = 0.0f;
      RowRange(x, dim, &low, &high);
      const Grid grid = MakeGrid(low, high, max_code);
      StoreF16(grids, t, grid.scale_f16);
      StoreF16(grids, window_ + t, grid.zero_f16);
      for (uint32_t c = 0; c < dim; ++c)
        codes[c] = static_cast<uint8_t>(GridCode(x[c], grid.zero, grid.divisor, max_code));
      writer.Put(words, t, codes);
    }
  };
  encode(k_.code, true, k, shape_.head_dim, k_block);
  encode(v_.code, false, v, shape_.head_dim_v, v_block);
}

void TokenCodec::DecodeSides(uint32_t, uint32_t n, const uint8_t* k_block, const uint8_t* v_block,
                             float* k, float* v) const {
  const auto decode = [&](const VectorCode& code, bool is_k, float* x, uint32_t dim,
                          const uint8_t* words) {
    if (x == nullptr) return;
    const TokenWriter writer(code, is_k);
    const uint8_t* grids = words + size_t{window_} * code.n_words * 4;
    for (uint32_t t = 0; t < n; ++t, x += dim) {
      const float scale = LoadF16(grids, t), zero = LoadF16(grids, window_ + t);
      for (uint32_t c = 0; c < dim; ++c) {
        x[c] = static_cast<float>(writer.Get(words, t, c)) * scale + zero;
      }
    }
  };
  decode(k_.code, true, k, shape_.head_dim, k_block);
  decode(v_.code, false, v, shape_.head_dim_v, v_block);
}

}  // namespace qevict::codecs
