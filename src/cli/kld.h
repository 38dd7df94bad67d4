// How much one set of logits differs from another: Kullback-Leibler divergence, top token,
// perplexity.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace qevict::cli {

/// log(sum(exp(logits))) in double. Needs at least one finite logit.
double LogSumExp(std::span<const float> logits);
/// Index of the largest logit; the lowest index of equal ones.
size_t TopToken(std::span<const float> logits);
/// KL(p || q) in nats of the distributions that two sets of logits stand for, p the reference.
/// Never negative beyond rounding; infinite if q excludes what p allows.
double KlDivergence(std::span<const float> p, double p_log_sum, std::span<const float> q,
                    double q_log_sum);

/// Comparison of a run with the reference at one position.
struct Position {
  double kl;        ///< nats
  double nll_base;  ///< -log p(label) of the reference
  double nll;       ///< and of the run
  bool same_top;
};
Position ComparePosition(std::span<const float> base, std::span<const float> run, int32_t label);

/// Positions of one or more runs put together.
struct Agreement {
  uint64_t n = 0;
  double kl_mean = 0, kl_stderr = 0, kl_median = 0, kl_p90 = 0, kl_p99 = 0, kl_p999 = 0, kl_max = 0;
  double same_top_percent = 0;
  double perplexity_base = 0, perplexity = 0;
  double perplexity_ratio = 0;  ///< run / base
};
Agreement Summarize(std::span<const Position> positions);

/// Quantile of sorted values with linear interpolation, q in [0, 1]. 0 of an empty list.
double Quantile(std::span<const double> sorted, double q);

}  // namespace qevict::cli
