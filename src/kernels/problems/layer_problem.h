// Layers of models as benches use them, and a plain double-precision result for any storage.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels/problems/problem.h"

namespace qevict::kernels {

struct LayerShape {
  uint32_t n_kv_heads, n_gqa, head_dim;
  RopePairing pairing = RopePairing::kHalves;
};
inline constexpr Formats kAllFormats[] = {Formats::kFull,  Formats::kPacked2, Formats::kPacked4,
                                          Formats::kToken, Formats::kGrid,    Formats::kMixed};
/// "full", "packed2", "packed4", "token" and "grid" (of 2 bits), "mixed".
const char* FormatsName(Formats formats);

/// `rows` query rows at the end of `n_tokens` tokens (whole windows), causal, masses on.
ProblemParams LayerParams(const LayerShape& shape, Formats formats, uint32_t rows,
                          uint32_t n_tokens);
/// Runs the same layer with few windows and compares outputs and masses with the reference within
/// the bound of rounding: empty if right, else where it is not.
std::string CheckShort(ProblemParams params);

/// Keys (rotated, as they meet the query) and values of a layer: [token][kv head][channel].
struct LayerRows {
  std::vector<float> keys, values;
};
LayerRows StoredRows(const Problem& problem);
/// First query row without gaps: [head][channel].
std::vector<float> QueryRow(const Problem& problem);

/// One query row that sees all tokens, in double: output [head][channel] and mass [kv head][window]
/// as the kernels return them.
struct PlainResult {
  std::vector<double> out, mass;
};
PlainResult AttendPlain(const LayerShape& shape, std::span<const float> query,
                        const LayerRows& rows, uint32_t window);
/// Largest difference, relative to the largest wanted value; infinite if a value is not finite.
double RelativeError(std::span<const float> got, std::span<const double> want);

}  // namespace qevict::kernels
