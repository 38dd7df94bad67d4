// Rankers: from the attention mass that falls on a window to one "higher is better" score.
// Source: QEvict (arXiv 2608.05326) for the cumulative score; the others as defined here.
//
//   c_t(w) = (1/H_q) * sum over query heads h, tokens i of w of the attention probability a_t^h(i)
//
//   cumulative   S += c_t                     paper: never decays
//   ema          S <- l*S + (1-l)*c_t         l = ema_lambda, per query row, prompt rows included
//   p_norm       S += (1/H) * sum over heads of (sum over i of a_t^h(i))^p
//                                             ranks like its p-th root
//   key_norm     S = sign * mean over kv heads and tokens of |k_i|
//                                             once, when the window is complete
//
// The attention kernel returns masses summed over the query rows of a call and over the query heads
// of a kv head. cumulative needs no more. ema is exact for one row (every decode step); a call of n
// rows counts as n rows with a n-th of the mass each, which weights them evenly instead of by age.
// p_norm takes the norm over *kv* heads: the mean over a kv head's query heads (and rows of a
// prompt chunk) stands for each of them. It is exact for one row without GQA, and otherwise a lower
// bound (power mean), since a spike of a single query head is averaged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "qevict/config.h"

namespace qevict {

/// Masses of some windows from one attention call, as kernels/attention.h returns them. Borrowed.
struct WindowMasses {
  const float* mass;  ///< [n_kv_heads][n_windows]: kv head h, window i at mass[h * head_stride + i]
  size_t head_stride;
  uint32_t n_kv_heads;  ///< heads that share a ranking: all of a layer, or 1 for Config::per_head
  uint32_t n_gqa;       ///< query heads summed in each mass
  uint32_t n_rows;      ///< query rows summed in each mass; 0 leaves all scores as they are
  /// Counts the call as so many equal ones (Config::event_scores: the interval).
  uint32_t repeat = 1;
};

/// Brings one score up to date. `index` is the window's column in `masses`. Pure; fp32 result of
/// double arithmetic.
float UpdateScore(const Config& config, float score, const WindowMasses& masses, size_t index);
/// UpdateScore for windows 0 ... scores.size()-1.
void UpdateScores(const Config& config, const WindowMasses& masses, std::span<float> scores);

/// Sum of the Euclidean norms of n rows of head_dim floats: what KeyNormScore adds up over kv
/// heads.
double KeyNormSum(const float* k, size_t n, size_t head_dim);
/// ScoreKind::kKeyNorm for one window. `norm_sum`: over n_kv_heads heads and n_tokens tokens.
/// Frozen at birth.
float KeyNormScore(const Config& config, double norm_sum, uint32_t n_kv_heads, uint32_t n_tokens);

}  // namespace qevict
