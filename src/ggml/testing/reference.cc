#include "ggml/testing/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "base/half.h"

namespace qevict::plugin::testing {
namespace {

// ALiBi: slopes 2^(-max_bias/n * (h+1)) over the largest power of two of heads, odd steps of half
// of it for the others.
double Slope(double max_bias, uint32_t n_heads, uint32_t head) {
  if (max_bias <= 0.0) return 1.0;
  uint32_t n = 1;
  while (2 * n <= n_heads) n *= 2;
  if (head < n) return std::pow(2.0, -max_bias / n * (head + 1));
  return std::pow(2.0, -max_bias / 2.0 / n * (2 * (head - n) + 1));
}

}  // namespace

std::vector<double> ReferenceAttention(const LayerSpec& layer, const StepInput& in, uint32_t il,
                                       const std::vector<float>& q,
                                       const std::vector<StreamRows>& streams,
                                       const std::vector<float>& sinks, std::vector<double>* mass) {
  const uint32_t n_heads = layer.n_heads(), d = layer.head_dim, dv = layer.head_dim_v,
                 n = in.n_tokens();
  const uint32_t n_kv = in.n_kv_of(il);
  const double scale = 1.0 / std::sqrt(static_cast<double>(d));
  std::vector<double> out(size_t{n} * n_heads * dv, 0.0), logits(n_kv);
  if (mass) mass->assign(size_t{n} * layer.n_kv_heads * n_kv, 0.0);
  for (uint32_t i = 0; i < n; ++i) {
    const StreamRows& rows = streams[i / (n / in.n_streams)];
    const uint16_t* mask = in.mask(il).data() + size_t{i} * n_kv;
    for (uint32_t h = 0; h < n_heads; ++h) {
      const uint32_t kv_head = h / layer.n_gqa;
      const double slope = Slope(layer.max_bias, n_heads, h);
      double top = layer.sinks ? sinks[h] : -std::numeric_limits<double>::infinity();
      for (uint32_t c = 0; c < n_kv; ++c) {
        logits[c] = -std::numeric_limits<double>::infinity();
        const float value = F16ToF32(mask[c]);
        if (std::isinf(value)) continue;
        double dot = 0.0;
        for (uint32_t j = 0; j < d; ++j) {
          dot += static_cast<double>(q[(size_t{i} * n_heads + h) * d + j]) *
                 rows.k[(size_t{c} * layer.n_kv_heads + kv_head) * d + j];
        }
        dot *= scale;
        if (layer.softcap > 0.0f) dot = layer.softcap * std::tanh(dot / layer.softcap);
        logits[c] = dot + slope * value;
        top = std::max(top, logits[c]);
      }
      if (std::isinf(top)) continue;  // a row that sees nothing
      double sum = layer.sinks ? std::exp(sinks[h] - top) : 0.0;
      for (double& l : logits) sum += l = std::exp(l - top);
      double* o = out.data() + (size_t{i} * n_heads + h) * dv;
      for (uint32_t c = 0; c < n_kv; ++c) {
        const double p = logits[c] / sum;
        if (p == 0.0) continue;
        if (mass) (*mass)[(size_t{i} * layer.n_kv_heads + kv_head) * n_kv + c] += p;
        for (uint32_t j = 0; j < dv; ++j)
          o[j] += p * rows.v[(size_t{c} * layer.n_kv_heads + kv_head) * dv + j];
      }
    }
  }
  return out;
}

Error Compare(const std::vector<float>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) throw std::runtime_error("test: outputs of different sizes");
  Error e;
  double squares = 0.0, reference = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double difference = got[i] - want[i];
    e.nan |= !std::isfinite(got[i]);
    e.max_abs = std::max(e.max_abs, std::fabs(difference));
    squares += difference * difference;
    reference += want[i] * want[i];
  }
  e.rms = reference > 0.0 ? std::sqrt(squares / reference) : std::sqrt(squares);
  return e;
}

}  // namespace qevict::plugin::testing
