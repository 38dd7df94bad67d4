// Windows in a token code (token_code.h). Decode form: integer dot products of the codes' levels
// with queries of 8 bits and weights of 16 bits, read in place; the same integers on every ISA.
// Prompt form: decoded to f32 tiles. Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_values-inl.h"

namespace qevict::kernels::internal {

/// Eight tokens of a window in a token code; addresses of the kv head's parts for them.
struct TokenBlock {
  const uint8_t* k_words;
  const uint16_t* k_scale;
  const uint16_t* k_zero;
  const uint8_t* v_words;
  const uint16_t* v_scale;
  const uint16_t* v_zero;
  uint32_t column;  ///< of the tile
  int32_t pos;      ///< token t has position pos + t * pos_stride
  uint32_t pos_stride;
  Ahead ahead;  ///< fetched while the block is scored, in as many steps as its keys have units
};

/// Tokens 8 * part ... of window w.
static inline TokenBlock LocateTokens(const HeadArgs& h, const WindowRef& w, uint32_t part,
                                      uint32_t column) {
  const TokenCode& code = *h.token;
  const uint32_t window = h.window;
  const uint8_t* p = w.data + h.head_offset[static_cast<int>(WindowFormat::kToken)];
  TokenBlock b;
  b.k_words = p + static_cast<size_t>(part) * code.k.n_words * 32;
  p += static_cast<size_t>(window) * code.k.n_words * 4;
  b.k_scale = reinterpret_cast<const uint16_t*>(p) + 8 * part;
  b.k_zero = b.k_scale + window;
  p += static_cast<size_t>(window) * (code.k.has_zero ? 4 : 2);
  b.v_words = p + static_cast<size_t>(part) * code.v.n_words * 32;
  p += static_cast<size_t>(window) * code.v.n_words * 4;
  b.v_scale = reinterpret_cast<const uint16_t*>(p) + 8 * part;
  b.v_zero = b.v_scale + window;
  b.column = column + 8 * part;
  b.pos_stride = w.pos_stride;
  b.pos = w.pos0 + static_cast<int32_t>(8 * part * w.pos_stride);
  return b;
}

/// A query as the integer kernel takes it: q[place] = unit * bytes[place], and what zeros and the
/// levels' center contribute.
struct TokenQuery {
  float unit;
  float sum;      ///< of the queries before rounding
  int32_t start;  ///< - center * sum of bytes
};

/// Scales a query by the code's steps and rounds it to 8 bits: bytes [places rounded up to 64].
template <class S>
TokenQuery QuantizeQuery(const VectorCode& code, const float* q, int8_t* bytes) {
  alignas(64) float scaled[kMaxPlaces];
  const uint32_t n = code.n_places, padded = PadLanes(n);
  float largest = 0.0f, sum = 0.0f;
  for (uint32_t j = 0; j < n; ++j) {
    const float x = code.step[j] == 0.0f ? 0.0f : q[code.channel[j]] * code.step[j];
    const float magnitude = x < 0.0f ? -x : x;
    scaled[j] = x;
    sum += x;
    largest = magnitude > largest || !(magnitude >= 0.0f) ? magnitude : largest;
  }
  for (uint32_t j = n; j < padded; ++j) scaled[j] = 0.0f;
  TokenQuery out{largest / 127.0f, sum, 0};
  if (!(largest < __builtin_inff())) out.unit = __builtin_nanf("");
  const bool plain = out.unit > 0.0f;  // neither 0 nor NaN
  int32_t total = 0;
  for (uint32_t j = 0; j < padded; j += S::kLanes) {
    const auto x = plain ? S::Div(S::Load(scaled + j), S::Set1(out.unit)) : S::Zero();
    S::StoreInt8(bytes + j, x);
    for (uint32_t i = 0; i < S::kLanes; ++i) total += bytes[j + i];
  }
  out.start = -total * code.center;
  return out;
}

/// Codes of step i (places 4 i ... of a unit) of keys, as bytes; words: the unit's.
template <class S, int kBits>
typename S::I KeyBytes(const typename S::I* words, uint32_t i) {
  if constexpr (kBits == 3) {
    const auto low = S::Fields(words[i / 4], 2 * (i % 4), 0x03030303u);
    return S::Join(low, S::Fields(words[2], i, 0x01010101u), 2);
  } else if constexpr (kBits == 8) {
    return words[i];
  } else {
    constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x01010101u;
    return S::Fields(words[0], kBits * i, kMask);
  }
}

/// acc[m] += dot products of a segment's keys with queries [m][q_stride] from the segment's first
/// place on. a, b: the segment's words of the 8 tokens of each half of the lanes.
template <class S, int kBits, int kM>
void DotSegment(const uint8_t* a, const uint8_t* b, uint32_t n_units, const uint8_t* table,
                const int8_t* q, size_t q_stride, Ahead& ahead_a, Ahead& ahead_b,
                typename S::I (&acc)[kM]) {
  constexpr uint32_t kWords = WordsOfUnit(kBits), kSteps = PlacesOfUnit(kBits) / 4;
  const typename S::Levels levels(table);
  for (uint32_t u = 0; u < n_units; ++u, a += 32 * kWords, b += 32 * kWords) {
    typename S::I words[kWords];
#pragma GCC unroll 3
    for (uint32_t w = 0; w < kWords; ++w) words[w] = S::LoadWords(a + 32 * w, b + 32 * w);
    ahead_a.Fetch();
    if constexpr (S::kLanes > 8) ahead_b.Fetch();
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kSteps; ++i, q += 4) {
      auto x = KeyBytes<S, kBits>(words, i);
      if constexpr (kBits == 8) {
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) acc[m] = S::Dot8Wide(acc[m], x, q + m * q_stride);
      } else {
        x = levels(x);
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) acc[m] = S::Dot8(acc[m], x, q + m * q_stride);
      }
    }
  }
}

/// Calls f(Int<bits>) for a segment's bits.
template <class F>
void WithBits(uint32_t bits, F&& f) {
  switch (bits) {
    case 1:
      return f(Int<1>{});
    case 2:
      return f(Int<2>{});
    case 3:
      return f(Int<3>{});
    case 4:
      return f(Int<4>{});
    default:
      return f(Int<8>{});
  }
}

/// Scores of kM queries against two blocks of 8 tokens (with 8 lanes the first alone).
template <class S, int kM>
void ScoreTokens(const VectorCode& code, const TokenBlock& x, const TokenBlock& y, const int8_t* q,
                 size_t q_stride, const TokenQuery* queries, float* scores) {
  typename S::I acc[kM];
  for (int m = 0; m < kM; ++m) acc[m] = S::SetInt(queries[m].start);
  const uint8_t *a = x.k_words, *b = y.k_words;
  Ahead ahead_a = x.ahead, ahead_b = y.ahead;
  for (uint32_t s = 0; s < code.n_segments; ++s) {
    const uint32_t bits = code.segments[s].bits, n_units = code.segments[s].n_units;
    WithBits(bits, [&](auto width) {
      DotSegment<S, decltype(width)::value, kM>(a, b, n_units, code.levels[s], q, q_stride, ahead_a,
                                                ahead_b, acc);
    });
    a += 32 * WordsOfUnit(bits) * n_units;
    b += 32 * WordsOfUnit(bits) * n_units;
    q += PlacesOfUnit(bits) * n_units;
  }
  const auto scale = S::LoadF16Blocks(x.k_scale, y.k_scale);
  const auto zero = code.has_zero ? S::LoadF16Blocks(x.k_zero, y.k_zero) : S::Zero();
  for (int m = 0; m < kM; ++m) {
    auto s = S::Mul(S::Mul(S::ToFloat(acc[m]), scale), S::Set1(queries[m].unit));
    if (code.has_zero) s = S::Fma(zero, S::Set1(queries[m].sum), s);
    S::StoreBlocks(s, scores + m * kTile + x.column, scores + m * kTile + y.column);
  }
}

/// Probabilities times token scales as 16-bit weights of one query vector: p * scale = unit *
/// weight, each below 2^15. Columns without tokens of this kind have scale 0. Returns the unit.
template <class S>
float QuantizeWeights(const float* p, const float* scale, int16_t* weights, int32_t& sum) {
  using V = typename S::V;
  alignas(64) float x[kTile];
  V max = S::Zero();
  for (uint32_t i = 0; i < kTile; i += S::kLanes) {
    const V w = S::Mul(S::Load(p + i), S::Load(scale + i));
    max = S::Max(w, max);
    S::Store(x + i, w);
  }
  const float unit = S::MaxOf(max) / 32767.0f;
  const bool plain = unit >= 0x1p-126f && unit < __builtin_inff();
  const V inverse = S::Set1(plain ? 1.0f / unit : 0.0f);
  sum = 0;
  for (uint32_t i = 0; i < kTile; i += S::kLanes) {
    S::StoreInt16(weights + i, plain ? S::Mul(S::Load(x + i), inverse) : S::Zero());
  }
  for (uint32_t i = 0; i < kTile; ++i) sum += weights[i];
  return plain || unit != unit ? unit : 0.0f;
}

/// Codes of tokens 2 p and 2 p + 1 of lane group g, as numbers of 16 bits. at, next: the rows of
/// two units (with 8 lanes the first alone).
template <class S, int kBits>
typename S::I ValuePairs(const uint8_t* at, const uint8_t* next, uint32_t g, uint32_t p) {
  if constexpr (kBits == 3) {
    const uint32_t row = 32 * (g / 2);
    const auto low =
        S::Fields(S::LoadWords(at + row, next + row), 2 * (p + 4 * (g % 2)), 0x00030003u);
    return S::Join(low, S::Fields(S::LoadWords(at + 64, next + 64), p + 4 * g, 0x00010001u), 2);
  } else if constexpr (kBits == 8) {
    const uint32_t row = 32 * (p / 2);
    return S::Fields(S::LoadWords(at + row, next + row), 8 * (p % 2), 0x00FF00FFu);
  } else {
    constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x00010001u;
    return S::Fields(S::LoadWords(at, next), kBits * (p + 4 * g), kMask);
  }
}

/// Weighted sums of the blocks' values of two units (with 8 lanes one), all lane groups.
/// offset, next: of the units' rows from TokenBlock::v_words. o, o_next: their first places.
template <class S, int kBits, int kM>
void AddUnits(const TokenBlock* blocks, uint32_t n_blocks, size_t offset, size_t next,
              const uint8_t* table, const int16_t* weights, const int32_t* start,
              const float* units, float* o, float* o_next, size_t o_stride) {
  constexpr uint32_t kGroups = PlacesOfUnit(kBits) / 8;
  const typename S::Levels levels(table);
  for (uint32_t g = 0; g < kGroups; ++g) {
    typename S::I acc[kM];
    for (int m = 0; m < kM; ++m) acc[m] = S::SetInt(start[m]);
    for (uint32_t i = 0; i < n_blocks; ++i) {
      const uint8_t* rows = blocks[i].v_words;
      const int16_t* w = weights + blocks[i].column;
#pragma GCC unroll 4
      for (uint32_t p = 0; p < 4; ++p) {
        auto x = ValuePairs<S, kBits>(rows + offset, rows + next, g, p);
        if constexpr (kBits != 8) x = levels(x);
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) acc[m] = S::Dot16(acc[m], x, w + m * kTile + 2 * p);
      }
    }
    for (int m = 0; m < kM; ++m) {
      float *first = o + m * o_stride + 8 * g, *second = o_next + m * o_stride + 8 * g;
      const auto sum = S::Fma(S::ToFloat(acc[m]), S::Set1(units[m]), S::LoadBlocks(first, second));
      S::StoreBlocks(sum, first, second);
    }
  }
}

/// o [kM][o_stride] in places += weights * values of the blocks; o has room for 32 places more than
/// the code's at `spare`.
template <class S, int kM>
void AddTokens(const VectorCode& code, const TokenBlock* blocks, uint32_t n_blocks,
               const int16_t* weights, const int32_t* start, const float* units, float* o,
               size_t o_stride, uint32_t spare) {
  size_t row = 0;
  uint32_t place = 0;
  for (uint32_t s = 0; s < code.n_segments; ++s) {
    const uint32_t bits = code.segments[s].bits, n_units = code.segments[s].n_units;
    const uint32_t places = PlacesOfUnit(bits), bytes = 32 * WordsOfUnit(bits);
    for (uint32_t u = 0; u < n_units; u += S::kLanes / 8) {
      const bool two = S::kLanes > 8 && u + 1 < n_units;
      WithBits(bits, [&](auto width) {
        AddUnits<S, decltype(width)::value, kM>(blocks, n_blocks, row, two ? row + bytes : row,
                                                code.levels[s], weights, start, units, o + place,
                                                two ? o + place + places : o + spare, o_stride);
      });
      row += (two ? 2 : 1) * bytes;
      place += (two ? 2 : 1) * places;
    }
  }
}

/// Keys of two blocks (with 8 lanes the first alone) to f32 columns: channel c, token t of the
/// block at dst[c * stride + column + t].
template <class S>
void DecodeTokenKeys(const VectorCode& code, const TokenBlock& x, const TokenBlock& y,
                     uint32_t head_dim, float* dst, size_t stride) {
  const auto scale = S::LoadF16Blocks(x.k_scale, y.k_scale);
  auto zero = S::Mul(scale, S::Set1(-static_cast<float>(code.center)));
  if (code.has_zero) zero = S::Add(zero, S::LoadF16Blocks(x.k_zero, y.k_zero));
  for (uint32_t c = 0; c < head_dim; ++c) {  // channels without a place
    S::StoreBlocks(S::Zero(), dst + c * stride + x.column, dst + c * stride + y.column);
  }
  const uint8_t *a = x.k_words, *b = y.k_words;
  uint32_t place = 0;
  for (uint32_t s = 0; s < code.n_segments; ++s) {
    const typename S::Levels levels(code.levels[s]);
    WithBits(code.segments[s].bits, [&](auto width) {
      constexpr int kBits = decltype(width)::value;
      constexpr uint32_t kWords = WordsOfUnit(kBits);
      for (uint32_t u = 0; u < code.segments[s].n_units; ++u, a += 32 * kWords, b += 32 * kWords) {
        typename S::I words[kWords];
        for (uint32_t w = 0; w < kWords; ++w) words[w] = S::LoadWords(a + 32 * w, b + 32 * w);
        for (uint32_t j = 0; j < PlacesOfUnit(kBits); ++j, ++place) {
          const float step = code.step[place];
          if (step == 0.0f) continue;
          auto byte = KeyBytes<S, kBits>(words, j / 4);
          if constexpr (kBits != 8) byte = levels(byte);
          const auto level = S::ToFloat(S::Fields(byte, 8 * (j % 4), 0xFFu));
          float* row = dst + code.channel[place] * stride;
          S::StoreBlocks(S::Mul(S::Fma(level, scale, zero), S::Set1(step)), row + x.column,
                         row + y.column);
        }
      }
    });
  }
}

/// Values of one token of a block to f32: dst [places] in the order of places.
template <class S>
void DecodeTokenValue(const VectorCode& code, const TokenBlock& block, uint32_t token, float scale,
                      float zero, float* dst) {
  const uint8_t* rows = block.v_words;
  const auto factor = S::Set1(scale), offset = S::Set1(zero - scale * code.center);
  uint32_t place = 0;
  for (uint32_t s = 0; s < code.n_segments; ++s) {
    const typename S::Levels levels(code.levels[s]);
    WithBits(code.segments[s].bits, [&](auto width) {
      constexpr int kBits = decltype(width)::value;
      constexpr uint32_t kPlaces = PlacesOfUnit(kBits), kBytes = 32 * WordsOfUnit(kBits);
      for (uint32_t u = 0; u < code.segments[s].n_units; ++u, rows += kBytes) {
        for (uint32_t g = 0; g < kPlaces / 8; ++g, place += 8) {
          auto x = ValuePairs<S, kBits>(rows, rows, g, token / 2);
          if constexpr (kBits != 8) x = levels(x);
          const auto level = S::ToFloat(S::Fields(x, 16 * (token % 2), 0xFFFFu));
          alignas(64) float y[S::kLanes];
          S::Store(y, S::Fma(level, factor, offset));
          for (uint32_t l = 0; l < 8; ++l) dst[place + l] = y[l] * code.step[place + l];
        }
      }
    });
  }
}

}  // namespace qevict::kernels::internal
