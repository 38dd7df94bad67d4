// Attention of one layer over full-precision and packed windows in one pass with online softmax.
// Codes are read in place (dequantized in registers, or once per group of query rows into an
// L1/L2-sized tile of the workspace); the exact probability mass of every window comes back with
// the output.
//
// Storage that the kernels read (written by src/cache, per kv head; W = window length, S =
// min(W, 8), D, Dv); keys and values are blocks of their own:
//
//   full     K [W/S][D][S] 16-bit   tokens in lanes: channel-major inside sub-blocks of S tokens
//            V [W][Dv]     16-bit   channels in lanes
//   packed b K codes [D][W] b bits  tokens of one channel adjacent; code j of a part lies in byte
//                                   j*b/8 from bit (j*b mod 8) on, lowest bits first
//            K grid  scale f16 [D], zero f16 [D]
//            V codes [W][Dv] b bits channels of one token adjacent
//            V grid  scale f16 [W], zero f16 [W]
//            value = code * scale + zero; packed keys are stored before RoPE and rotated by the
//            kernel
//   token    every token by itself, keys after RoPE: see kernels/token_code.h (W >= 8)
//   grid     codes on grids along any axis: see kernels/grid_code.h (W >= 8)
//
// D and Dv are multiples of 8 up to 512; W is 1, 2, 4, 8, 16 or 32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/half.h"
#include "base/parallel.h"
#include "base/rope.h"
#include "kernels/grid_code.h"
#include "kernels/token_code.h"

namespace qevict::kernels {

enum class WindowFormat : uint8_t { kFull, kPacked2, kPacked4, kToken, kGrid };
/// Most channels of a key or a value.
inline constexpr uint32_t kMaxChannels = 512;

/// Formats of one cache that a call can mix.
inline constexpr uint32_t kMaxRungs = 8;

/// One rung: how its blocks are read.
struct RungCode {
  WindowFormat format = WindowFormat::kFull;
  size_t k_head_bytes = 0, v_head_bytes = 0;  ///< from one kv head's block to the next one's
  const TokenCode* token = nullptr;           ///< [n_kv_heads] codes, if the format is kToken
  const GridCode* grid = nullptr;             ///< [n_kv_heads] codes, if the format is kGrid
};

/// One window of a layer: keys and values stand on rungs of their own. k and v point at the first
/// kv head's block; kv head h is at k + h * k_head_bytes of the rung. Lifetime: borrowed for the
/// call.
struct WindowRef {
  const uint8_t* k;
  const uint8_t* v;
  int32_t pos0;  ///< position of token 0 (packed windows: where their keys are rotated to)
  uint8_t rung_k, rung_v;
  uint8_t pos_stride;  ///< token t has position pos0 + t * pos_stride; 0 or 1
};

/// RoPE as the kernels need it: phases of a pair at any position come from two small tables, no
/// per-token memory.
class RopeTable;  // see kernels/rope_table.h

/// Shape and constants shared by all rows of a call.
struct AttentionShape {
  uint32_t n_kv_heads = 0;
  uint32_t n_gqa = 1;       ///< query heads per kv head
  uint32_t head_dim = 0;    ///< D, of q and K
  uint32_t head_dim_v = 0;  ///< Dv
  uint32_t window = 8;      ///< W
  Elem elem_k = Elem::kF16;
  Elem elem_v = Elem::kF16;
  RungCode rungs[kMaxRungs];
  uint32_t n_rungs = 1;
  float scale = 1.0f;               ///< multiplies q.k
  float softcap = 0.0f;             ///< > 0: s = softcap * tanh(s / softcap), after the scale
  const float* slopes = nullptr;    ///< [n_heads] factor of `bias` (ALiBi), or null = 1
  const float* sinks = nullptr;     ///< [n_heads] attention-sink logits: one more exp(sink) in each
                                    ///< denominator, or null
  const RopeTable* rope = nullptr;  ///< null: packed keys are not rotated
};

/// What is made of the attention probabilities that fall on a window, one per row and query head.
enum class MassKind : uint8_t { kSum, kMax };

/// Query rows that look at the same list of windows (rows of one sequence). Query head index =
/// kv_head * n_gqa + g.
struct AttentionGroup {
  const AttentionShape* shape;
  uint32_t n_rows;
  const float* q;  ///< element (row r, head h, channel d) at q + r*q_row_stride + h*q_head_stride +
                   ///< d, in floats
  size_t q_row_stride, q_head_stride;
  float* out;  ///< [row][head][Dv] with the strides below, in floats
  size_t out_row_stride, out_head_stride;
  std::span<const WindowRef> windows;
  /// Bit t of visible[r * visible_stride + i] says that row r sees token t of window i. Rows may
  /// see nothing (output 0).
  const uint32_t* visible;
  size_t visible_stride;
  /// Additive logits (times slope), [row][window * W + token], or null.
  const float* bias = nullptr;
  size_t bias_stride = 0;
  /// If not null: mass[h * mass_head_stride + i] += sum over rows >= mass_first_row and over the
  /// n_gqa query heads of kv head h of the attention probability that falls on window i. fp32;
  /// order of summation fixed (thread-count independent). kMax: becomes the largest of these
  /// probabilities, if it was smaller. mass_per_head: h is a query head instead, with its own only.
  float* mass = nullptr;
  size_t mass_head_stride = 0;
  uint32_t mass_first_row = 0;
  MassKind mass_kind = MassKind::kSum;
  bool mass_per_head = false;
  /// If not null: token_mass[h * token_mass_head_stride + i * W + t] += sum over rows >=
  /// token_mass_first_row and over the n_gqa query heads of kv head h of the attention probability
  /// that falls on token t of window i. fp32; order of summation fixed as for `mass`.
  float* token_mass = nullptr;
  size_t token_mass_head_stride = 0;
  uint32_t token_mass_first_row = 0;
};

/// Bytes of one kv head's keys and values together.
size_t FullHeadBytes(uint32_t window, uint32_t head_dim, uint32_t head_dim_v);
size_t PackedHeadBytes(uint32_t bits, uint32_t window, uint32_t head_dim, uint32_t head_dim_v);
size_t TokenHeadBytes(uint32_t window, const TokenCode& code);
size_t GridHeadBytes(uint32_t window, uint32_t head_dim, uint32_t head_dim_v, const GridCode& code);

/// Scratch of the kernels, grown on demand and kept; one per caller, not thread-safe.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  /// 64-byte aligned memory of at least n bytes; contents undefined. Null if the system has no
  /// memory.
  uint8_t* Reserve(size_t n);
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

/// Attends all groups (several streams or sequences of one layer) as one task list: split over
/// (group, kv head, block of query rows) and, when that is too few, over chunks of windows whose
/// partial states merge in fixed order. Returns false only if the workspace cannot grow (then out
/// is undefined). Never aborts, never produces NaN from masks.
bool Attend(std::span<const AttentionGroup> groups, ParallelFor& pool, Workspace& workspace);

/// ISA levels, in rising order; the active one is the best the CPU has, or what QEVICT_SIMD names.
enum class Isa : uint8_t { kScalar, kAvx2, kAvx512, kAvx512Vnni, kNeon, kNeonDot };
Isa ActiveIsa();
const char* IsaName(Isa isa);
bool IsaSupported(Isa isa);
/// The value of QEVICT_SIMD if it names no ISA that this build and CPU have; else empty.
std::string_view RefusedIsa();
/// Forces an ISA for tests and `QEVICT_SIMD`; false if the CPU lacks it (nothing changes).
bool ForceIsa(Isa isa);
inline constexpr Isa kAllIsas[] = {Isa::kScalar,     Isa::kAvx2, Isa::kAvx512,
                                   Isa::kAvx512Vnni, Isa::kNeon, Isa::kNeonDot};

}  // namespace qevict::kernels
