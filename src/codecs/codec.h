// Packed formats. Each file states one format as a specification: id, exact bytes, encode, decode.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qevict::codecs {

/// KIVI-axis uniform code (QEvict's): K per channel over the window before RoPE, V per token. See
/// kivi_axis.h.
///
/// Encodes one kv head of one window.
///   k [n][D] f32 row-major, before RoPE; v [n][Dv] f32; n in [1, W] tokens. Tokens n...W-1 of the
///   block get code 0 and do not take part in the grids. block: PackedHeadBytes(bits, W, D, Dv)
///   bytes, layout as in kernels/attention.h.
/// bits: 2 or 4. Grid: fp16 scale and minimum first, codes against the rounded grid (policies.md
/// C9). Non-finite inputs: encoded as if 0 (a NaN key would otherwise poison a whole channel);
/// grids that overflow fp16 clamp to the largest finite fp16.
void EncodeKiviAxis(uint32_t bits, uint32_t window, uint32_t head_dim, uint32_t head_dim_v,
                    uint32_t n, const float* k, const float* v, uint8_t* block);
/// Inverse: k [n][D], v [n][Dv] f32 (either may be null).
void DecodeKiviAxis(uint32_t bits, uint32_t window, uint32_t head_dim, uint32_t head_dim_v,
                    uint32_t n, const uint8_t* block, float* k, float* v);

}  // namespace qevict::codecs
