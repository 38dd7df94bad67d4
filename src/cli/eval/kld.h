// How much one set of logits differs from another: Kullback-Leibler divergence, top token,
// perplexity.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace qevict::cli {

/// Index of the largest logit; the lowest index of equal ones.
size_t TopToken(std::span<const float> logits);
/// log(sum(exp(logits))). Needs at least one finite logit.
double LogSumExp(std::span<const float> logits);

/// Logits of the reference, with what every comparison needs of them. Borrows `row`.
struct ReferenceRow {
  explicit ReferenceRow(std::span<const float> row);
  std::span<const float> logits;
  size_t top;
  double sum;      ///< of exp(logits - logits[top])
  double log_sum;  ///< LogSumExp(logits)
};
/// KL(p || q) in nats of the distributions that two sets of logits stand for, p the reference, to
/// a few 1e-7: it can be that much below 0. Infinite if q excludes what p allows.
double KlDivergence(const ReferenceRow& p, std::span<const float> q, double q_log_sum);

/// Comparison of a run with the reference at one position.
struct Position {
  double kl;        ///< nats
  double nll_base;  ///< -log p(label) of the reference
  double nll;       ///< and of the run
  bool same_top;
};
Position ComparePosition(const ReferenceRow& base, std::span<const float> run, int32_t label);
/// -log p(label) of a run and of the reference alone; kl is 0 and the top the same.
Position ComparePerplexity(double nll_base, std::span<const float> run, int32_t label);

/// A mean and its standard error: the sample's deviation / sqrt(n), 0 for fewer than 2 values.
struct Estimate {
  double mean = 0, error = 0;
};
Estimate MeanOf(std::span<const double> values);

/// Positions of one or more runs put together, in llama-perplexity's terms.
struct Agreement {
  uint64_t n = 0;
  double kl_mean = 0, kl_stderr = 0, kl_median = 0, kl_p90 = 0, kl_p99 = 0, kl_p999 = 0, kl_max = 0;
  double same_top_percent = 0;
  /// Change of the label's probability, percentage points.
  double delta_p_mean = 0, delta_p_rms = 0;
  double perplexity_base = 0, perplexity_base_error = 0, perplexity = 0, perplexity_error = 0;
  double perplexity_ratio = 0;        ///< run / base
  double perplexity_ratio_error = 0;  ///< of the paired differences, to first order
};
Agreement Summarize(std::span<const Position> positions);

}  // namespace qevict::cli
