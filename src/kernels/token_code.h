// Token codes: packed windows in which every token stands alone. A vector (key or value of one kv
// head) is
//
//   value[channel(j)] = step(j) * (scale[t] * (level(code j) - center) + zero[t])     for place j
//
// Places are the vector's channels in any order, in segments of 8, 4, 3, 2 or 1 bits each; a
// channel without a place has value 0. Steps, order and segments are the same for all tokens of a
// kv head, scale (and zero) belong to a token.
//
// Words of 32 bits. A segment of b bits has units of U(b) places in b * U(b) / 32 words, for every
// token (keys) and for every 8 tokens and lane (values): U = 32 / b, but 8 for 8 bits and 32 for 3.
//
//   keys     word w of token t holds codes of one token:
//              place 4 i + j of the word in byte j from bit b * i on
//   values   row r of 8 tokens has 8 lanes; lane l holds 8 tokens of the places 8 g + l:
//              token t = 2 p + odd in bits b * (p + 4 g) + 16 * odd
//            8 bits: row 0 of the unit has tokens 0 ... 3, row 1 tokens 4 ... 7 (8 * p + 16 * odd)
//   3 bits   the low 2 bits of 32 places as two words of 2 bits, their high bit as a third of 1 bit
//
// One kv head of a window of W tokens (W a multiple of 8), little-endian, n = words per token:
//
//   K words   u32 [W / 8][n_k][8 tokens]        V words   u32 [W / 8][n_v][8 lanes]
//   K scale   f16 [W]                           V scale   f16 [W]
//   K zero    f16 [W], if K has zeros           V zero    f16 [W], if V has zeros
//
// Keys are coded as the query meets them, after RoPE. A static mean may be left out of their codes:
// a key is then R_p mean + what is coded, with the mean before RoPE.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qevict::kernels {

inline constexpr uint32_t kMaxSegments = 5;
inline constexpr uint32_t kMaxPlaces = 512 + 128;  ///< 512 channels, each segment padded

struct TokenSegment {
  uint8_t bits;      ///< 8, 4, 3, 2 or 1
  uint16_t n_units;  ///< of U(bits) places
};

/// Code of the keys or of the values of one kv head. Borrowed pointers.
struct VectorCode {
  uint32_t n_segments = 0;
  TokenSegment segments[kMaxSegments] = {};
  /// Levels of each segment's codes, not below 0, the first one 0, at most 126; 8 bits have none:
  /// their codes are the levels.
  uint8_t levels[kMaxSegments][16] = {};
  uint8_t center = 0;
  bool has_zero = false;
  uint32_t n_words = 0;               ///< per token
  uint32_t n_places = 0;              ///< padding included
  const float* step = nullptr;        ///< [n_places], 0 for padding
  const uint16_t* channel = nullptr;  ///< [n_places]
  const float* mean = nullptr;        ///< keys: [head_dim], or null
};

struct TokenCode {
  VectorCode k, v;
};

constexpr uint32_t PlacesOfUnit(uint32_t bits) {
  return bits == 8 ? 8 : bits == 3 ? 32 : 32 / bits;
}
constexpr uint32_t WordsOfUnit(uint32_t bits) { return PlacesOfUnit(bits) * bits / 32; }

/// Bytes of the keys (or the values) of one kv head's block.
constexpr size_t TokenCodeBytes(uint32_t window, uint32_t n_words, bool has_zero) {
  return size_t{window} * (4 * size_t{n_words} + (has_zero ? 4 : 2));
}

}  // namespace qevict::kernels
