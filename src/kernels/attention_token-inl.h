// Windows in a token code (token_code.h): integer dot products of the codes' levels with queries of
// 8 bits (16 for places of 8) and weights of 16 bits, read in place; the same integers on every
// ISA. Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_values-inl.h"

namespace qevict::kernels::internal {

/// Keys or values of eight tokens of a window in a token code, of one kv head.
struct TokenBlock {
  const uint8_t* words;
  const uint8_t* scale;
  const uint16_t* zero;
  uint32_t column;  ///< of the tile
  // Of keys:
  int32_t pos;  ///< token t has position pos + t * pos_stride
  uint32_t pos_stride;
  Ahead ahead;  ///< fetched while the block is scored, in as many steps as it has units
};

/// Bytes of a scale.
static inline uint32_t ScaleBytes(const VectorCode& code) {
  return code.grid == TokenGrid::kScaleByte ? 1 : 2;
}
static inline bool HasZero(const VectorCode& code) { return code.grid == TokenGrid::kScaleZero; }

/// Where the parts of a kv head's keys (or values) lie, and how far those of the next 8 tokens are.
struct TokenOffsets {
  size_t scale, zero;
  uint32_t words_step, scale_step;

  TokenOffsets() = default;
  TokenOffsets(const VectorCode& code, size_t window) {
    scale = window * code.n_words * 4;
    zero = scale + window * ScaleBytes(code);
    words_step = code.n_words * 32, scale_step = 8 * ScaleBytes(code);
  }

  /// Tokens 8 * part ... of the block at p of a window that begins at `column` of the tile.
  void Locate(const uint8_t* p, uint32_t part, uint32_t column, TokenBlock& b) const {
    b.words = p + size_t{part} * words_step;
    b.scale = p + scale + size_t{part} * scale_step;
    b.zero = reinterpret_cast<const uint16_t*>(p + zero) + 8 * part;
    b.column = column + 8 * part;
  }
};

/// Scales of two blocks of 8 tokens (with 8 lanes of the first alone).
template <class S>
typename S::V LoadScales(const VectorCode& code, const uint8_t* a, const uint8_t* b) {
  if (code.grid == TokenGrid::kScaleByte) return S::LoadScaleBytes(a, b);
  return S::LoadF16Blocks(reinterpret_cast<const uint16_t*>(a),
                          reinterpret_cast<const uint16_t*>(b));
}

/// A query as the integer kernels take it. Places of 8 bits are a group of their own: a channel
/// that gets so many is far above the others, which a common unit would be too coarse for. They
/// have two bytes each, hi and lo: q[place] = wide_unit * (hi + lo / kLoSteps); the others one,
/// q[place] = unit * byte.
struct TokenQuery {
  float wide_unit, unit;
  float sum;                          ///< of the queries before rounding
  int32_t start_hi, start_lo, start;  ///< - center * sum of the bytes
};
inline constexpr float kLoSteps = 254.0f;

/// Where the bytes of a query lie: hi and lo of the n_wide places of 8 bits, those of the others.
struct QueryLayout {
  uint32_t n_wide, lo, others;

  explicit QueryLayout(const VectorCode& code)
      : n_wide(WidePlaces(code)), lo(PadLanes(n_wide)), others(2 * lo) {}
};

/// The largest magnitude of x [padded], and what is not finite: `check` becomes NaN.
template <class S>
typename S::V Largest(const float* x, uint32_t padded, typename S::V& sum, typename S::V& check) {
  auto largest = S::Zero();
  for (uint32_t j = 0; j < padded; j += S::kLanes) {
    const auto v = S::Load(x + j);
    sum = S::Add(sum, v);
    largest = S::Max(S::Abs(v), largest);
    check = S::Fma(v, S::Zero(), check);
  }
  return largest;
}

/// x [padded] becomes bytes, and x what they leave of it. Returns the sum of the bytes.
template <class S>
int32_t RoundToBytes(float* x, uint32_t padded, int8_t* bytes) {
  auto total = S::Zero();  // whole numbers: exact in any order
  for (uint32_t j = 0; j < padded; j += S::kLanes) {
    const auto v = S::Load(x + j), whole = S::Round(v);
    S::StoreInt8(bytes + j, v);
    S::Store(x + j, S::Sub(v, whole));
    total = S::Add(total, whole);
  }
  return static_cast<int32_t>(S::Sum(total));
}

/// x [padded] divided by a number; 0 where that is 0 or NaN.
template <class S>
void DivideAll(float* x, uint32_t padded, float by) {
  const bool plain = by > 0.0f;  // neither 0 nor NaN
  for (uint32_t j = 0; j < padded; j += S::kLanes)
    S::Store(x + j, plain ? S::Div(S::Load(x + j), S::Set1(by)) : S::Zero());
}
/// x [padded] times a number.
template <class S>
void MultiplyAll(float* x, uint32_t padded, float by) {
  for (uint32_t j = 0; j < padded; j += S::kLanes)
    S::Store(x + j, S::Mul(S::Load(x + j), S::Set1(by)));
}

/// Scales a query by the code's steps and rounds it: bytes as in QueryLayout, padded with zeros.
template <class S>
TokenQuery QuantizeQuery(const VectorCode& code, const float* q, int8_t* bytes) {
  const QueryLayout at(code);
  alignas(64) float wide[kMaxPlaces + kPad], others[kMaxPlaces + kPad];
  const uint32_t n_others = code.n_places - at.n_wide, padded = PadLanes(n_others);
  const auto scaled = [&](uint32_t j) {
    return code.step[j] == 0.0f ? 0.0f : q[code.channel[j]] * code.step[j];
  };
  for (uint32_t j = 0; j < at.lo; ++j) wide[j] = j < at.n_wide ? scaled(j) : 0.0f;
  for (uint32_t j = 0; j < padded; ++j) others[j] = j < n_others ? scaled(at.n_wide + j) : 0.0f;
  auto sum = S::Zero(), check = S::Zero();
  const auto top_wide = Largest<S>(wide, at.lo, sum, check);
  const auto top = Largest<S>(others, padded, sum, check);
  const bool finite = S::Sum(check) == 0.0f;
  const auto unit = [finite](float largest) {
    return finite ? largest / 127.0f : __builtin_nanf("");
  };
  TokenQuery out{unit(S::MaxOf(top_wide)), unit(S::MaxOf(top)), S::Sum(sum), 0, 0, 0};
  DivideAll<S>(others, padded, out.unit);
  out.start = -CenterOf(code, 0) * RoundToBytes<S>(others, padded, bytes + at.others);
  DivideAll<S>(wide, at.lo, out.wide_unit);
  out.start_hi = -CenterOf(code, 8) * RoundToBytes<S>(wide, at.lo, bytes);
  MultiplyAll<S>(wide, at.lo, kLoSteps);
  out.start_lo = -CenterOf(code, 8) * RoundToBytes<S>(wide, at.lo, bytes + at.lo);
  return out;
}

/// Words of keys of two blocks of 8 tokens (with 8 lanes of the first alone).
template <class S>
struct KeyWordRows {
  const uint8_t *a, *b;
  typename S::I operator()(uint32_t word) const {
    return S::LoadWords(a + 32 * word, b + 32 * word);
  }
};

/// acc[m] += dot product of a unit's levels with the queries' bytes q [m][q_stride].
template <class S, int kBits, int kM>
inline void DotUnit(typename S::I levels, const int8_t* q, size_t q_stride,
                    typename S::I (&acc)[kM]) {
#pragma GCC unroll 8
  for (int m = 0; m < kM; ++m) {
    if constexpr (kBits == 8) {
      acc[m] = S::Dot8Wide(acc[m], levels, q + m * q_stride);
    } else {
      acc[m] = S::Dot8(acc[m], levels, q + m * q_stride);
    }
  }
}

/// Units of 3 bits: fields of 2 bits from `low` on, of 1 bit from `high` on.
template <class S, int kM>
void DotSplitSegment(const KeyWordRows<S>& words, uint32_t low, uint32_t high, uint32_t n_units,
                     const uint8_t* table, const int8_t* q, size_t q_stride, Ahead& ahead_a,
                     Ahead& ahead_b, typename S::I (&acc)[kM]) {
  const typename S::Levels levels(table);
  for (uint32_t u = 0; u < n_units; ++u, q += kKeyUnit, low += 2, ++high) {
    if (u % 4 == 0) {
      ahead_a.Fetch();
      if constexpr (S::kLanes > 8) ahead_b.Fetch();
    }
    const auto two = S::Fields(words(low / 8), low % 8, 0x03030303u);
    const auto one = S::Fields(words(high / 8), high % 8, 0x01010101u);
    DotUnit<S, 3, kM>(levels(S::Join(two, one, 2)), q, q_stride, acc);
  }
}

/// Units of 1, 2, 4 or 8 bits, in fields from bit `at` on: whole words in one go.
template <class S, int kBits, int kM>
void DotSegment(const KeyWordRows<S>& words, uint32_t at, uint32_t n_units, const uint8_t* table,
                const int8_t* q, size_t q_stride, Ahead& ahead_a, Ahead& ahead_b,
                typename S::I (&acc)[kM]) {
  constexpr uint32_t kPerWord = 8 / kBits, kMask = ((1u << kBits) - 1) * 0x01010101u;
  const typename S::Levels levels(table);
  const auto dot = [&](typename S::I word, uint32_t bit) {
    auto x = word;
    if constexpr (kBits != 8) x = levels(S::Fields(word, bit, kMask));
    DotUnit<S, kBits, kM>(x, q, q_stride, acc);
    q += kKeyUnit;
  };
  while (n_units != 0) {
    const auto word = words(at / 8);
    ahead_a.Fetch();
    if constexpr (S::kLanes > 8) ahead_b.Fetch();
    if (at % 8 == 0 && n_units >= kPerWord) {
#pragma GCC unroll 8
      for (uint32_t i = 0; i < kPerWord; ++i) dot(word, kBits * i);
      at += 8;
      n_units -= kPerWord;
      continue;
    }
    do {
      dot(word, at % 8);
      at += kBits;
      --n_units;
    } while (n_units != 0 && at % 8 != 0);
  }
}

/// Fetches that scoring a block makes.
static inline uint32_t KeyFetches(const VectorCode& code) {
  uint32_t n = 0;
  for (uint32_t s = 0; s < code.n_segments; ++s) {
    const uint32_t bits = code.segments[s].bits, per_word = bits == 3 ? 4 : 8 / bits;
    n += (code.segments[s].n_units + per_word - 1) / per_word;
  }
  return n == 0 ? 1 : n;
}

/// What places of 8 bits add to the scores, without the tokens' scales: to out [kM] of two blocks.
template <class S, int kM>
void ScoreWide(const VectorCode& code, const QueryLayout& layout, uint32_t cursor,
               const KeyWordRows<S>& words, const int8_t* q, size_t q_stride,
               const TokenQuery* queries, Ahead& ahead_a, Ahead& ahead_b,
               typename S::V (&out)[kM]) {
  const uint32_t n = code.segments[0].n_units;
  typename S::I acc[kM];
  for (int m = 0; m < kM; ++m) acc[m] = S::SetInt(queries[m].start_lo);
  Ahead none_a = ahead_a, none_b = ahead_b;
  none_a.step = none_b.step = 0;
  DotSegment<S, 8, kM>(words, cursor, n, code.levels[0], q + layout.lo, q_stride, none_a, none_b,
                       acc);
  for (int m = 0; m < kM; ++m) {
    out[m] = S::Mul(S::ToFloat(acc[m]), S::Set1(1.0f / kLoSteps));
    acc[m] = S::SetInt(queries[m].start_hi);
  }
  DotSegment<S, 8, kM>(words, cursor, n, code.levels[0], q, q_stride, ahead_a, ahead_b, acc);
  for (int m = 0; m < kM; ++m)
    out[m] = S::Mul(S::Add(S::ToFloat(acc[m]), out[m]), S::Set1(queries[m].wide_unit));
}

/// Scores of kM queries against two blocks of 8 tokens (with 8 lanes the first alone). at: where
/// the code's fields begin. kWide: it has places of 8 bits.
template <class S, int kM, bool kWide>
void ScoreTokens(const VectorCode& code, FieldCursors at, const TokenBlock& x, const TokenBlock& y,
                 const int8_t* q, size_t q_stride, const TokenQuery* queries, float* scores) {
  const KeyWordRows<S> words{x.words, y.words};
  Ahead ahead_a = x.ahead, ahead_b = y.ahead;
  if constexpr (kWide) {
    const QueryLayout layout(code);
    const auto scale = LoadScales<S>(code, x.scale, y.scale);
    typename S::V part[kM];
    ScoreWide<S, kM>(code, layout, at.at8, words, q, q_stride, queries, ahead_a, ahead_b, part);
    q += layout.others;
    for (int m = 0; m < kM; ++m)
      S::StoreBlocks(S::Mul(part[m], scale), scores + m * kTile + x.column,
                     scores + m * kTile + y.column);
  }
  typename S::I acc[kM];
  for (int m = 0; m < kM; ++m) acc[m] = S::SetInt(queries[m].start);
  for (uint32_t s = kWide ? 1 : 0; s < code.n_segments; ++s) {
    const uint32_t bits = code.segments[s].bits, n = code.segments[s].n_units;
    const auto dot = [&](auto width, uint32_t& cursor) {
      constexpr int kBits = decltype(width)::value;
      DotSegment<S, kBits, kM>(words, cursor, n, code.levels[s], q, q_stride, ahead_a, ahead_b,
                               acc);
      cursor += kBits * n;
    };
    if (bits == 4) {
      dot(Int<4>{}, at.at4);
    } else if (bits == 3) {
      DotSplitSegment<S, kM>(words, at.at2, at.at1, n, code.levels[s], q, q_stride, ahead_a,
                             ahead_b, acc);
      at.at2 += 2 * n;
      at.at1 += n;
    } else if (bits == 2) {
      dot(Int<2>{}, at.at2);
    } else {
      dot(Int<1>{}, at.at1);
    }
    q += kKeyUnit * n;
  }
  const auto scale = LoadScales<S>(code, x.scale, y.scale);
  const auto zero = HasZero(code) ? S::LoadF16Blocks(x.zero, y.zero) : S::Zero();
  for (int m = 0; m < kM; ++m) {
    auto s = S::Mul(S::Mul(S::ToFloat(acc[m]), scale), S::Set1(queries[m].unit));
    if (HasZero(code)) s = S::Fma(zero, S::Set1(queries[m].sum), s);
    if constexpr (kWide) {
      s = S::Add(s, S::LoadBlocks(scores + m * kTile + x.column, scores + m * kTile + y.column));
    }
    S::StoreBlocks(s, scores + m * kTile + x.column, scores + m * kTile + y.column);
  }
}

/// The fields of two units of values (with 8 lanes of the first alone): rows from TokenBlock's
/// words on, and the first bit of each.
template <class S>
struct ValueFields {
  size_t row, next_row;
  typename S::I shift;

  ValueFields(uint32_t at, uint32_t next)
      : row(at / 16 * 32), next_row(next / 16 * 32), shift(S::BlockCounts(at % 16, next % 16)) {}
  typename S::I Load(const uint8_t* words) const {
    return S::ShiftRight(S::LoadWords(words + row, words + next_row), shift);
  }
};

/// Weighted sums of the blocks' values of two units (with 8 lanes one). low: their fields, or those
/// of the low 2 of 3 bits; high: of the third bit. o, o_next: their first places.
template <class S, int kBits, int kM>
void AddUnits(const TokenBlock* blocks, uint32_t n_blocks, const ValueFields<S>& low,
              const ValueFields<S>& high, const uint8_t* table, const int16_t* weights,
              const int32_t* start, const float* units, float* o, float* o_next, size_t o_stride) {
  using I = typename S::I;
  constexpr uint32_t kMask = ((1u << (kBits == 3 ? 2 : kBits)) - 1) * 0x00010001u;
  const typename S::Levels levels(table);
  I acc[kM];
  for (int m = 0; m < kM; ++m) acc[m] = S::SetInt(start[m]);
  for (uint32_t i = 0; i < n_blocks; ++i) {
    const I first = low.Load(blocks[i].words);
    I second = first;  // 8 bits: of the second half of the tokens; 3 bits: the third bits
    if constexpr (kBits == 8) second = low.Load(blocks[i].words + 32);
    if constexpr (kBits == 3) second = high.Load(blocks[i].words);
    const int16_t* w = weights + blocks[i].column;
#pragma GCC unroll 4
    for (uint32_t p = 0; p < 4; ++p) {
      I x;
      if constexpr (kBits == 8) {
        x = S::Fields(p < 2 ? first : second, 8 * (p % 2), kMask);
      } else if constexpr (kBits == 3) {
        x = S::Join(S::Fields(first, 2 * p, kMask), S::Fields(second, p, 0x00010001u), 2);
        x = levels(x);
      } else {
        x = levels(S::Fields(first, kBits * p, kMask));
      }
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) acc[m] = S::Dot16(acc[m], x, w + m * kTile + 2 * p);
    }
  }
  for (int m = 0; m < kM; ++m) {
    const size_t at = m * o_stride;
    const auto old = S::LoadBlocks(o + at, o_next + at);
    S::StoreBlocks(S::Fma(S::ToFloat(acc[m]), S::Set1(units[m]), old), o + at, o_next + at);
  }
}

/// o [kM][o_stride] in places += weights * values of the blocks; o has room for kValueUnit places
/// more than the code's at `spare`. sums: of the weights.
template <class S, int kM>
void AddTokens(const VectorCode& code, const TokenBlock* blocks, uint32_t n_blocks,
               const int16_t* weights, const int32_t* sums, const float* units, float* o,
               size_t o_stride, uint32_t spare) {
  constexpr uint32_t kStep = S::kLanes / 8;
  FieldCursors at(code);
  uint32_t place = 0;
  for (uint32_t s = 0; s < code.n_segments; ++s) {
    const uint32_t bits = code.segments[s].bits, n_units = code.segments[s].n_units;
    int32_t start[kM];
    for (int m = 0; m < kM; ++m) start[m] = -CenterOf(code, bits) * sums[m];
    const auto add = [&](auto width, uint32_t& low, uint32_t& high) {
      constexpr int kBits = decltype(width)::value;
      constexpr uint32_t kLow = kBits == 3 ? 2 : kBits;
      for (uint32_t u = 0; u < n_units; u += kStep, place += kStep * kValueUnit) {
        const uint32_t last = u + 1 < n_units ? 1 : 0;  // the second of two units, if there is one
        AddUnits<S, kBits, kM>(
            blocks, n_blocks, ValueFields<S>(4 * (low + kLow * u), 4 * (low + kLow * (u + last))),
            ValueFields<S>(4 * (high + u), 4 * (high + u + last)), code.levels[s], weights, start,
            units, o + place, last != 0 ? o + place + kValueUnit : o + spare, o_stride);
      }
      place = place - (n_units % kStep) * kValueUnit;
      low += kLow * n_units;
      if (kBits == 3) high += n_units;
    };
    if (bits == 8) {
      add(Int<8>{}, at.at8, at.at8);
    } else if (bits == 4) {
      add(Int<4>{}, at.at4, at.at4);
    } else if (bits == 3) {
      add(Int<3>{}, at.at2, at.at1);
    } else if (bits == 2) {
      add(Int<2>{}, at.at2, at.at2);
    } else {
      add(Int<1>{}, at.at1, at.at1);
    }
  }
}

}  // namespace qevict::kernels::internal
