#include "cli/kld.h"

#include <algorithm>
#include <cmath>

namespace qevict::cli {

size_t TopToken(std::span<const float> logits) {
  return static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double LogSumExp(std::span<const float> logits) {
  const double top = static_cast<double>(logits[TopToken(logits)]);
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - top);
  return top + std::log(sum);
}

double KlDivergence(std::span<const float> p, double p_log_sum, std::span<const float> q,
                    double q_log_sum) {
  double kl = 0.0;
  for (size_t i = 0; i < p.size(); ++i) {
    const double log_p = static_cast<double>(p[i]) - p_log_sum;
    const double prob = std::exp(log_p);
    if (prob == 0.0) continue;  // 0 log 0 = 0
    kl += prob * (log_p - (static_cast<double>(q[i]) - q_log_sum));
  }
  return kl;
}

Position ComparePosition(std::span<const float> base, std::span<const float> run, int32_t label) {
  const double base_sum = LogSumExp(base), run_sum = LogSumExp(run);
  const auto at = static_cast<size_t>(label);
  return {KlDivergence(base, base_sum, run, run_sum), base_sum - static_cast<double>(base[at]),
          run_sum - static_cast<double>(run[at]), TopToken(base) == TopToken(run)};
}

double Quantile(std::span<const double> sorted, double q) {
  if (sorted.empty()) return 0.0;
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto low = static_cast<size_t>(at);
  if (low + 1 >= sorted.size()) return sorted.back();
  const double rest = at - static_cast<double>(low);
  if (rest == 0.0) return sorted[low];
  return sorted[low] + rest * (sorted[low + 1] - sorted[low]);
}

Agreement Summarize(std::span<const Position> positions) {
  Agreement a;
  a.n = positions.size();
  if (a.n == 0) return a;
  const auto n = static_cast<double>(a.n);
  std::vector<double> kl;
  double nll_base = 0.0, nll = 0.0, n_same = 0.0, sum = 0.0;
  for (const Position& p : positions) {
    kl.push_back(p.kl);
    sum += p.kl;
    nll_base += p.nll_base;
    nll += p.nll;
    n_same += p.same_top ? 1.0 : 0.0;
  }
  a.kl_mean = sum / n;
  double squares = 0.0;
  for (const double x : kl) squares += (x - a.kl_mean) * (x - a.kl_mean);
  a.kl_stderr = a.n > 1 ? std::sqrt(squares / (n - 1.0) / n) : 0.0;
  std::sort(kl.begin(), kl.end());
  a.kl_median = Quantile(kl, 0.5);
  a.kl_p90 = Quantile(kl, 0.9);
  a.kl_p99 = Quantile(kl, 0.99);
  a.kl_p999 = Quantile(kl, 0.999);
  a.kl_max = kl.back();
  a.same_top_percent = 100.0 * n_same / n;
  a.perplexity_base = std::exp(nll_base / n);
  a.perplexity = std::exp(nll / n);
  a.perplexity_ratio = std::exp((nll - nll_base) / n);
  return a;
}

}  // namespace qevict::cli
