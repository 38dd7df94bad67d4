// Token codes: packed windows in which every token stands alone. A vector (key or value of one kv
// head) is
//
//   value[channel(j)] = step(j) * (scale[t] * (level(code j) - center) + zero[t])     for place j
//
// Places are the vector's channels in any order, in segments of 8, 4, 3, 2 or 1 bits each, most
// bits first (places of 8 bits have a center of their own); a channel without a place has value 0.
// Steps, order and segments are the same for all tokens of a kv head, scale (and zero) belong to a
// token.
//
// A segment has units of 4 places (keys) or 8 places (values). A unit's codes lie in a field of
// their bits' width; codes of 3 bits in a field of 2 (the low bits) and one of 1. Fields of one
// width follow each other in the order of places: first all of width 8, then 4, 2, 1; none is split
// between words. A field begins at bit u, which counts
//
//   keys     the bits of one byte of a token's words: place 4 i + j in byte j of word u / 8 from
//            bit u % 8 on; a field takes its width
//   values   the bits of one half of the words of a lane, for 8 tokens and 8 lanes: lane l has
//            place 8 i + l, token t = 2 p + odd at v = u + width * p: word v / 16, bit
//            v % 16 + 16 * odd; a field takes 4 times its width
//
// One kv head of a window of W tokens (W a multiple of 8), little-endian, n = words per token:
//
//   K words   u32 [W / 8][n_k][8 tokens]        V words   u32 [W / 8][n_v][8 lanes]
//   K scale   f16 or byte [W]                   V scale   f16 or byte [W]
//   K zero    f16 [W], if K has zeros           V zero    f16 [W], if V has zeros
//
// A scale of one byte b is the f16 number with the bits b << 6: four bits of exponent and of
// mantissa, 0 to 1.94 in steps of 3 to 6%, subnormal below 2^-14.
// Keys are coded as the query meets them, after RoPE. A static mean may be left out of their codes:
// a key is then R_p mean + what is coded, with the mean before RoPE.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qevict::kernels {

inline constexpr uint32_t kMaxSegments = 5;
inline constexpr uint32_t kKeyUnit = 4, kValueUnit = 8;   ///< places
inline constexpr uint32_t kMaxPlaces = 512 + kValueUnit;  ///< 512 channels, the last unit padded

/// What a token has beside its codes; the value is its size in bytes.
enum class TokenGrid : uint8_t { kScaleByte = 1, kScale = 2, kScaleZero = 4 };

struct TokenSegment {
  uint8_t bits;      ///< 8, 4, 3, 2 or 1
  uint16_t n_units;  ///< of kKeyUnit or kValueUnit places
};

/// Code of the keys or of the values of one kv head. Borrowed pointers.
struct VectorCode {
  uint32_t n_segments = 0;
  TokenSegment segments[kMaxSegments] = {};
  /// Levels of each segment's codes, not below 0, the first one 0, at most 126; 8 bits have none:
  /// their codes are the levels.
  uint8_t levels[kMaxSegments][16] = {};
  uint8_t center = 0;       ///< of the levels
  uint8_t wide_center = 0;  ///< of codes of 8 bits; 0 if center is
  TokenGrid grid = TokenGrid::kScale;
  uint32_t n_words = 0;               ///< per token
  uint32_t n_places = 0;              ///< padding included
  const float* step = nullptr;        ///< [n_places], 0 for padding
  const uint16_t* channel = nullptr;  ///< [n_places]
  const float* mean = nullptr;        ///< keys: [head_dim], or null
};

struct TokenCode {
  VectorCode k, v;
};

/// Where the next field of each width begins (u above), counted in widths of a key's field.
struct FieldCursors {
  uint32_t at8 = 0, at4 = 0, at2 = 0, at1 = 0;

  FieldCursors() = default;
  // Inlined for sure: units of several instruction sets include this.
  [[gnu::always_inline]] explicit FieldCursors(const VectorCode& code) {
    for (uint32_t s = 0; s < code.n_segments; ++s) {
      const uint32_t n = code.segments[s].n_units, bits = code.segments[s].bits;
      if (bits == 8) at4 += 8 * n;
      if (bits == 4) at2 += 4 * n;
      if (bits == 3 || bits == 2) at1 += 2 * n;
    }
    at2 += at4;
    at1 += at2;
  }
};

/// Places of 8 bits; they come first.
[[gnu::always_inline]] static inline uint32_t WidePlaces(const VectorCode& keys) {
  const bool any = keys.n_segments != 0 && keys.segments[0].bits == 8;
  return any ? kKeyUnit * keys.segments[0].n_units : 0;
}

/// The center of a segment's levels.
[[gnu::always_inline]] static inline int32_t CenterOf(const VectorCode& code, uint32_t bits) {
  return bits == 8 ? code.wide_center : code.center;
}

/// Words per token of `bits_of_units` bits, summed over units of so many places.
constexpr uint32_t WordsOfUnits(uint32_t bits_of_units, uint32_t unit) {
  return (bits_of_units * unit + 31) / 32;
}

/// Bytes of the keys (or the values) of one kv head's block.
constexpr size_t TokenCodeBytes(uint32_t window, uint32_t n_words, TokenGrid grid) {
  return size_t{window} * (4 * size_t{n_words} + static_cast<size_t>(grid));
}

}  // namespace qevict::kernels
