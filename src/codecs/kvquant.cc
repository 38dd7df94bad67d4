#include "codecs/kvquant.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace qevict::codecs {
namespace {

constexpr double kTail = 0.005;  // of the numbers on each side

uint32_t ExactNumbers(uint32_t window, uint32_t dim) {
  return 2 * static_cast<uint32_t>(std::ceil(kTail * window * dim));
}

/// Quantile with linear interpolation; x is sorted.
double Quantile(const std::vector<float>& x, double q) {
  const double at = q * static_cast<double>(x.size() - 1);
  const auto i = static_cast<size_t>(at);
  const double rest = at - static_cast<double>(i);
  return i + 1 < x.size() ? x[i] * (1.0 - rest) + x[i + 1] * rest : x[i];
}

/// The n largest by rank, ties: the earlier; of those above `least`.
std::vector<uint32_t> Farthest(const std::vector<float>& distance, uint32_t n, float least) {
  std::vector<uint32_t> order(distance.size());
  std::iota(order.begin(), order.end(), 0u);
  const auto middle =
      order.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(n, order.size()));
  std::partial_sort(order.begin(), middle, order.end(), [&](uint32_t a, uint32_t b) {
    return distance[a] > distance[b] || (distance[a] == distance[b] && a < b);
  });
  order.erase(middle, order.end());
  std::erase_if(order, [&](uint32_t i) { return !(distance[i] > least); });
  return order;
}

std::vector<uint32_t> PickKeys(const kernels::GridVector& g, const float* x, uint32_t n,
                               uint32_t dim) {
  std::vector<float> distance(size_t{n} * dim);
  for (size_t i = 0; i < distance.size(); ++i)
    distance[i] = std::abs(x[i] - g.offset[i % dim]) / g.factor[i % dim];
  return Farthest(distance, g.n_exact, 1.0f);
}

/// Distances from each token's mean in its standard deviations.
std::vector<float> TokenDistances(const float* x, uint32_t n, uint32_t dim) {
  std::vector<float> distance(size_t{n} * dim, 0.0f);
  for (uint32_t t = 0; t < n; ++t) {
    const float* row = x + size_t{t} * dim;
    const GridFit fit = FitNormal({}, row, dim);
    for (uint32_t c = 0; c < dim && fit.scale > 0.0f; ++c)
      distance[size_t{t} * dim + c] = std::abs(row[c] - fit.zero) / fit.scale;
  }
  return distance;
}

std::vector<uint32_t> PickValues(const kernels::GridVector& g, const float* x, uint32_t n,
                                 uint32_t dim) {
  return Farthest(TokenDistances(x, n, dim), g.n_exact, 0.0f);
}

void LearnKeys(const RowSample& sample, uint32_t dim, bool q_norm, GridSpec& k) {
  std::vector<float> channel(sample.n), normal;
  for (uint32_t c = 0; c < dim; ++c) {
    for (uint32_t t = 0; t < sample.n; ++t) channel[t] = sample.k_before_rope[size_t{t} * dim + c];
    std::sort(channel.begin(), channel.end());
    const double low = Quantile(channel, kTail), high = Quantile(channel, 1.0 - kTail);
    const auto half = static_cast<float>(0.5 * (high - low));
    k.offset[c] = static_cast<float>(0.5 * (high + low));
    k.factor[c] = half > 0.0f ? half : 1.0f;
    for (const float x : channel) {
      const float z = (x - k.offset[c]) / k.factor[c];
      if (std::abs(z) <= 1.0f) normal.push_back(z);
    }
  }
  SetCentroids(Centroids(normal, 1u << k.grid.bits), q_norm, normal, k);
}

void LearnValues(const RowSample& sample, uint32_t dim, bool q_norm, GridSpec& v) {
  const std::vector<float> distance = TokenDistances(sample.v.data(), sample.n, dim);
  std::vector<float> sorted = distance, normal, kept;
  std::sort(sorted.begin(), sorted.end());
  const double limit = Quantile(sorted, 1.0 - 2.0 * kTail);
  for (uint32_t t = 0; t < sample.n; ++t) {
    kept.clear();
    for (size_t i = size_t{t} * dim; i < size_t{t + 1} * dim; ++i) {
      if (distance[i] <= limit) kept.push_back(sample.v[i]);
    }
    if (kept.empty()) continue;
    const GridFit fit = FitMiddle({}, kept.data(), static_cast<uint32_t>(kept.size()));
    for (const float x : kept)
      normal.push_back(fit.scale > 0.0f ? (x - fit.zero) / fit.scale : 0.0f);
  }
  SetCentroids(Centroids(normal, 1u << v.grid.bits), q_norm, normal, v);
}

}  // namespace

std::vector<float> Centroids(std::vector<float> x, uint32_t n) {
  std::vector<float> centroids(n);
  if (x.empty()) x.push_back(0.0f);
  std::sort(x.begin(), x.end());
  for (uint32_t i = 0; i < n; ++i) centroids[i] = static_cast<float>(Quantile(x, (i + 0.5) / n));
  for (int iteration = 0; iteration < 50; ++iteration) {
    bool moved = false;
    auto begin = x.begin();
    for (uint32_t i = 0; i < n; ++i) {
      const float border = i + 1 < n ? 0.5f * (centroids[i] + centroids[i + 1]) : INFINITY;
      const auto end = std::upper_bound(begin, x.end(), border);
      if (begin != end) {
        const double sum = std::accumulate(begin, end, 0.0);
        const auto mean = static_cast<float>(sum / static_cast<double>(end - begin));
        moved |= mean != centroids[i];
        centroids[i] = mean;
      }
      begin = end;
    }
    if (!moved) break;
  }
  std::sort(centroids.begin(), centroids.end());
  return centroids;
}

void SetCentroids(const std::vector<float>& centroids, bool q_norm, const std::vector<float>& x,
                  GridSpec& spec) {
  spec.levels = centroids;
  spec.borders = Midpoints(centroids);
  if (!q_norm || x.empty()) return;
  double m1 = 0.0, s1 = 0.0, m2 = 0.0, s2 = 0.0;  // moments: originals, quantized
  for (const float each : x) {
    const auto code =
        std::lower_bound(spec.borders.begin(), spec.borders.end(), each) - spec.borders.begin();
    const double y = centroids[static_cast<size_t>(code)];
    m1 += each, s1 += double{each} * each;
    m2 += y, s2 += y * y;
  }
  const auto n = static_cast<double>(x.size());
  m1 /= n, m2 /= n;
  const double d1 = std::sqrt(std::max(s1 / n - m1 * m1, 0.0)),
               d2 = std::sqrt(std::max(s2 / n - m2 * m2, 0.0));
  if (d2 == 0.0) return;
  const double scale = d1 / d2, offset = m1 - m2 * scale;
  for (float& level : spec.levels) level = static_cast<float>(level * scale + offset);
}

GridHead KvQuant(uint32_t bits, uint32_t window, const RowShape& shape, const RowSample* sample) {
  GridHead head;
  head.k.grid.bits = head.v.grid.bits = bits;
  head.k.grid.axis = kernels::GridAxis::kStatic;
  head.k.grid.before_rope = true;
  head.k.grid.n_exact = ExactNumbers(window, shape.head_dim);
  head.k.factor.assign(shape.head_dim, 1.0f);
  head.k.offset.assign(shape.head_dim, 0.0f);
  head.k.levels.assign(size_t{1} << bits, 0.0f);
  head.k.pick_numbers = PickKeys;
  head.v.grid.axis = kernels::GridAxis::kToken;
  head.v.grid.group = shape.head_dim_v;
  head.v.grid.n_exact = ExactNumbers(window, shape.head_dim_v);
  head.v.fit = FitMiddle;
  head.v.levels.assign(size_t{1} << bits, 0.0f);
  head.v.pick_numbers = PickValues;
  if (sample == nullptr || sample->n == 0) return head;
  LearnKeys(*sample, shape.head_dim, bits == 2, head.k);
  LearnValues(*sample, shape.head_dim_v, bits == 2, head.v);
  return head;
}

}  // namespace qevict::codecs
