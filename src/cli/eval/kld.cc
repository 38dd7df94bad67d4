#include "cli/eval/kld.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cli/quantile.h"
#include "kernels/logits.h"

namespace qevict::cli {

size_t TopToken(std::span<const float> logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double LogSumExp(std::span<const float> logits) {
  const float top = logits[TopToken(logits)];
  return static_cast<double>(top) + std::log(kernels::SumExp(logits, top));
}

ReferenceRow::ReferenceRow(std::span<const float> row)
    : logits(row),
      top(TopToken(row)),
      sum(kernels::SumExp(row, row[top])),
      log_sum(static_cast<double>(row[top]) + std::log(sum)) {}

double KlDivergence(const ReferenceRow& p, std::span<const float> q, double q_log_sum) {
  const double mean = kernels::SumExpDifference(p.logits, q, p.logits[p.top]) / p.sum;
  return mean - p.log_sum + q_log_sum;
}

Position ComparePosition(const ReferenceRow& base, std::span<const float> run, int32_t label) {
  const double run_sum = LogSumExp(run);
  const auto at = static_cast<size_t>(label);
  return {KlDivergence(base, run, run_sum), base.log_sum - static_cast<double>(base.logits[at]),
          run_sum - static_cast<double>(run[at]), base.top == TopToken(run)};
}

Position ComparePerplexity(double nll_base, std::span<const float> run, int32_t label) {
  return {0.0, nll_base, LogSumExp(run) - static_cast<double>(run[static_cast<size_t>(label)]),
          true};
}

Estimate MeanOf(std::span<const double> values) {
  if (values.empty()) return {};
  const auto n = static_cast<double>(values.size());
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
  double squares = 0.0;
  for (const double x : values) squares += (x - mean) * (x - mean);
  return {mean, n > 1.0 ? std::sqrt(squares / (n - 1.0) / n) : 0.0};
}

Agreement Summarize(std::span<const Position> positions) {
  Agreement a;
  a.n = positions.size();
  if (a.n == 0) return a;
  const auto column = [&](auto&& value) {
    std::vector<double> x;
    x.reserve(positions.size());
    for (const Position& p : positions) x.push_back(value(p));
    return x;
  };
  std::vector<double> kl = column([](const Position& p) { return p.kl; });
  const Estimate divergence = MeanOf(kl);
  a.kl_mean = divergence.mean;
  a.kl_stderr = divergence.error;
  std::sort(kl.begin(), kl.end());
  a.kl_median = Quantile(kl, 0.5);
  a.kl_p90 = Quantile(kl, 0.9);
  a.kl_p99 = Quantile(kl, 0.99);
  a.kl_p999 = Quantile(kl, 0.999);
  a.kl_max = kl.back();
  a.same_top_percent =
      100.0 * MeanOf(column([](const Position& p) { return p.same_top ? 1.0 : 0.0; })).mean;
  const auto change = [](const Position& p) {
    return 100.0 * (std::exp(-p.nll) - std::exp(-p.nll_base));
  };
  a.delta_p_mean = MeanOf(column(change)).mean;
  a.delta_p_rms =
      std::sqrt(MeanOf(column([&](const Position& p) { return change(p) * change(p); })).mean);
  const Estimate base = MeanOf(column([](const Position& p) { return p.nll_base; }));
  const Estimate run = MeanOf(column([](const Position& p) { return p.nll; }));
  const Estimate difference = MeanOf(column([](const Position& p) { return p.nll - p.nll_base; }));
  a.perplexity_base = std::exp(base.mean);
  a.perplexity_base_error = a.perplexity_base * base.error;
  a.perplexity = std::exp(run.mean);
  a.perplexity_error = a.perplexity * run.error;
  a.perplexity_ratio = std::exp(difference.mean);
  a.perplexity_ratio_error = a.perplexity_ratio * difference.error;
  return a;
}

}  // namespace qevict::cli
