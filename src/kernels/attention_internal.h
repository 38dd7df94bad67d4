// Contract between the planner (attention.cc, compiled for the lowest CPU) and the per-ISA kernels.
// Plain structs and pointers only: an ISA unit must not emit inline functions of shared headers, or
// the linker could pick its copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/attention.h"

namespace qevict::kernels::internal {

/// Tokens that one softmax step covers. A multiple of every window length.
inline constexpr uint32_t kTile = 64;
/// Query vectors up to which the decode form (keys read in place per register block) is used.
inline constexpr uint32_t kDecodeVectors = 24;
/// Query vectors of a block in the prompt form.
inline constexpr uint32_t kPromptVectors = 96;
/// Register block of the decode form.
inline constexpr uint32_t kMaxBlock = 8;
/// Row lengths in scratch are multiples of this, so that whole vectors of any ISA can be stored.
inline constexpr uint32_t kPad = 16;

/// Pairs that a row of rotation coefficients has room for: 256, and a vector more; not a power of
/// two, for the L1's sets.
inline constexpr uint32_t kCoefStride = 256 + kPad;

/// Logits are kept in units of ln 2.
inline constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.69314718055994531f;

constexpr uint32_t PadLanes(uint32_t n) { return (n + kPad - 1) / kPad * kPad; }

/// Bytes of a query for keys in a token code, at most: two for places of 8 bits, one for others.
static inline uint32_t QueryBytes(const VectorCode& k) { return 2 * PadLanes(k.n_places) + kPad; }

/// RopeTable without its class. Null `coarse`: keys are not rotated.
struct RopeView {
  const float* coarse;  ///< [block][2][stride], magnitude included
  const float* fine;    ///< [64][2][stride]
  const float*
      step;  ///< [n_pairs / channels per vector][2 (cos, sin)][lanes], for the kernel's lane order
  const float* step_zero;  ///< the same for a step of 0
  const float* basis;      ///< RopeTable::basis, middle
  const float* middle;
  uint32_t n_fast;
  uint32_t n_blocks;  ///< of 64 positions that `coarse` covers
  uint32_t stride;
  uint32_t n_pairs;
  uint32_t offset;
  bool halves;
};

/// RungCode for one kv head.
struct RungArgs {
  WindowFormat format;
  size_t k_offset, v_offset;  ///< of this kv head's block from WindowRef::k and v
  uint32_t k_bytes, v_bytes;  ///< of a block
  const TokenCode* token;     ///< of this kv head, or null
  const GridCode* grid;       ///< the same
  uint32_t mean;              ///< first rung whose keys have the same mean; kMaxRungs: no mean
};

/// Everything that is common to the query vectors of one kv head of one group. A query vector is
/// (row, query head of the kv head); vector v is row v / n_gqa, head first_head + v % n_gqa.
struct HeadArgs {
  uint32_t head_dim, head_dim_v;
  uint32_t dv_pad;        ///< head_dim_v rounded up to kPad: length of an output row in scratch
  uint32_t window;        ///< W
  uint32_t tile_windows;  ///< kTile / W
  Elem elem_k, elem_v;
  RungArgs rungs[kMaxRungs];
  uint32_t n_rungs;
  float scale;  ///< log2 e included
  float softcap;
  RopeView rope;
  uint32_t n_gqa, first_head;
  const float* q;
  size_t q_row_stride, q_head_stride;
  float* out;
  size_t out_row_stride, out_head_stride;
  const float* slopes;
  const float* sinks;
  const WindowRef* windows;
  const uint32_t* visible;
  size_t visible_stride;
  const float* bias;
  size_t bias_stride;
  bool want_mass;
  uint32_t mass_first_row, token_mass_first_row;
};

/// State of a block of query vectors over a chunk of windows. All arrays in scratch or workspace.
struct BlockState {
  float* m;     ///< [n_vec] running maximum, -inf if nothing was seen
  float* l;     ///< [n_vec] sum of exponentials
  float* o;     ///< [n_vec][dv_pad] unnormalised output
  float* mass;  ///< [n_vec][mass_stride] sum of exponentials per window relative to m, or null
  size_t mass_stride;
  /// [n_vec][token_stride] the same per token; rows that do not count are undefined. Or null.
  float* token_mass;
  size_t token_stride;  ///< a multiple of kTile
};

/// Memory of one thread. Sizes in LayoutScratch (attention.cc).
struct Scratch {
  float* q;  ///< [n_vec][head_dim] scaled queries
  float*
      q_lanes;  ///< decode: [n_vec][head_dim * S] each channel repeated S times, for full windows
  float* q_plain;  ///< decode, packed windows: [n_vec * head_dim], orders in attention_packed-inl.h
  float* q_pairs;  ///< the same for rotated channels
  float* scores;   ///< [n_vec][kTile]
  float* sums;     ///< [n_vec][kPad] sums of exponentials, lane by lane
  float*
      k_tile;  ///< prompt: [head_dim][kTile] f32 keys; decode: [head_dim][max(W, 8)] of one window
  float* v_tile;  ///< prompt: panels of [kTile][64] f32 values
  float* coef;    ///< packed keys: grids and rotation coefficients
  float*
      tile_max;  ///< [n_vec][tiles of the chunk] running maximum that a tile's masses were taken at
  uint64_t* bits;  ///< [n_vec] visible tokens of the tile
  uint32_t* rows;  ///< [n_vec] row of the group
  // Grid codes; null without.
  float* grid;    ///< grids of one window
  float* v_rows;  ///< [kTile][dv_pad] values of a tile
  // Token codes; null without.
  int16_t* weights;  ///< [n_vec][kTile]
  struct Token {
    int8_t* q_bytes;  ///< [n_vec][QueryBytes(K)]
    float* o;         ///< [n_vec][stride] output in places, then the zeros' sum
    uint32_t stride;
    float* mean_q;       ///< [n_vec][2][PadLanes(n_pairs)] products of query and key mean
    float* mean_terms;   ///< [n_vec][2 n_fast + 4], see RopeTable::basis
    float* mean_scores;  ///< [2][n_vec][64] of the last even and the last odd block
  } token[kMaxRungs];    ///< by rung
};

// Inlined for sure: units of several instruction sets include this.
[[gnu::always_inline]] static inline const RungArgs& KeyRung(const HeadArgs& h,
                                                             const WindowRef& w) {
  return h.rungs[w.rung_k];
}
[[gnu::always_inline]] static inline const RungArgs& ValueRung(const HeadArgs& h,
                                                               const WindowRef& w) {
  return h.rungs[w.rung_v];
}
/// This kv head's block.
[[gnu::always_inline]] static inline const uint8_t* KeysOf(const HeadArgs& h, const WindowRef& w) {
  return w.k + KeyRung(h, w).k_offset;
}
[[gnu::always_inline]] static inline const uint8_t* ValuesOf(const HeadArgs& h,
                                                             const WindowRef& w) {
  return w.v + ValueRung(h, w).v_offset;
}

struct BlockArgs {
  const HeadArgs* head;
  uint32_t vec_begin, n_vec;
  uint32_t win_begin, n_win;
  BlockState state;
  Scratch scratch;
  uint32_t tile_max_stride;
  bool prompt;  ///< prompt form, else decode form
};

/// Joins the chunks of one block, writes the normalised output and adds the masses.
struct MergeArgs {
  const HeadArgs* head;
  uint32_t vec_begin, n_vec;
  const BlockState* parts;  ///< [n_parts], part i covers windows [i * part_windows, ...)
  uint32_t n_parts, part_windows, n_windows;
  float* mass;         ///< [n_windows] of the first query head, updated, or null
  size_t mass_stride;  ///< to the next query head's; 0: one for all
  bool mass_max;       ///< the largest instead of the sum
  float* token_mass;   ///< [n_windows * W], updated, or null
  float* weights;      ///< [n_parts] scratch
};

struct KernelTable {
  void (*attend)(const BlockArgs&);
  void (*merge)(const MergeArgs&);
  double (*sum_exp)(const float* x, size_t n, float top);  ///< kernels/logits.h
  double (*sum_exp_difference)(const float* p, const float* q, size_t n, float top);
  uint32_t key_channels;  ///< per vector of the packed key order (SimdX::kChannels)
};

extern const KernelTable kScalarTable;
#ifdef QEVICT_HAVE_AVX2
extern const KernelTable kAvx2Table;
#endif
#ifdef QEVICT_HAVE_AVX512
extern const KernelTable kAvx512Table;
#endif
#ifdef QEVICT_HAVE_AVX512VNNI
extern const KernelTable kAvx512VnniTable;
#endif
#ifdef QEVICT_HAVE_NEON
extern const KernelTable kNeonTable;
#endif
#ifdef QEVICT_HAVE_NEONDOT
extern const KernelTable kNeonDotTable;
#endif

/// Kernels of the active ISA.
const KernelTable& ActiveTable();
uint32_t ActiveKeyChannels();

}  // namespace qevict::kernels::internal
