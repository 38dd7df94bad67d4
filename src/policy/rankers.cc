#include "policy/rankers.h"

#include <cmath>

namespace qevict {
namespace {

/// What all windows of one call share, computed once.
class ScoreStep {
 public:
  ScoreStep(const Config& config, const WindowMasses& masses)
      : kind_(config.score),
        p_(config.p_norm),
        masses_(masses),
        nothing_(masses.n_rows == 0 || masses.n_kv_heads == 0 || masses.n_gqa == 0),
        n_query_heads_(static_cast<double>(masses.n_kv_heads) * masses.n_gqa),
        n_steps_(static_cast<double>(masses.n_rows) * masses.repeat) {
    if (kind_ == ScoreKind::kEma) kept_ = std::pow(config.ema_lambda, n_steps_);
  }

  float Apply(float score, size_t index) const {
    if (nothing_) return score;
    const double before = static_cast<double>(score);
    double after = before;
    switch (kind_) {
      case ScoreKind::kCumulative:
        after = before + TotalMass(index) / n_query_heads_ * masses_.repeat;
        break;
      case ScoreKind::kEma:  // n equal steps of mass c: S <- l^n * S + (1 - l^n) * c
        after =
            kept_ * before + (1.0 - kept_) * TotalMass(index) / (n_query_heads_ * masses_.n_rows);
        break;
      case ScoreKind::kPNorm:
        after = before + n_steps_ * MeanPower(index);
        break;
      case ScoreKind::kKeyNorm:
        break;
    }
    return static_cast<float>(after);
  }

 private:
  double MassOf(uint32_t head, size_t index) const {
    return static_cast<double>(masses_.mass[head * masses_.head_stride + index]);
  }
  /// Over all query heads and rows.
  double TotalMass(size_t index) const {
    double total = 0.0;
    for (uint32_t h = 0; h < masses_.n_kv_heads; ++h) total += MassOf(h, index);
    return total;
  }
  /// Mean over kv heads of (mean mass of a query head and row)^p.
  double MeanPower(size_t index) const {
    const double per_head = static_cast<double>(masses_.n_gqa) * masses_.n_rows;
    double total = 0.0;
    for (uint32_t h = 0; h < masses_.n_kv_heads; ++h) {
      const double mass = MassOf(h, index) / per_head;
      total += p_ == 2.0 ? mass * mass : std::pow(mass, p_);
    }
    return total / masses_.n_kv_heads;
  }

  ScoreKind kind_;
  double p_;
  const WindowMasses& masses_;
  bool nothing_;
  double n_query_heads_, n_steps_;
  double kept_ = 1.0;
};

}  // namespace

float UpdateScore(const Config& config, float score, const WindowMasses& masses, size_t index) {
  return ScoreStep(config, masses).Apply(score, index);
}

void UpdateScores(const Config& config, const WindowMasses& masses, std::span<float> scores) {
  const ScoreStep step(config, masses);
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = step.Apply(scores[i], i);
}

double KeyNormSum(const float* k, size_t n, size_t head_dim) {
  double total = 0.0;
  for (size_t i = 0; i < n; ++i) {
    double squares = 0.0;
    for (size_t d = 0; d < head_dim; ++d) {
      const double x = static_cast<double>(k[i * head_dim + d]);
      squares += x * x;
    }
    total += std::sqrt(squares);
  }
  return total;
}

float KeyNormScore(const Config& config, double norm_sum, uint32_t n_kv_heads, uint32_t n_tokens) {
  if (n_kv_heads == 0 || n_tokens == 0) return 0.0f;
  return static_cast<float>(config.key_norm_sign * norm_sum /
                            (static_cast<double>(n_kv_heads) * n_tokens));
}

}  // namespace qevict
