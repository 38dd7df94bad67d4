#include "codecs/zipcache.h"

#include <algorithm>
#include <cmath>

namespace qevict::codecs {

GridHead ZipCache(uint32_t bits, const RowShape& shape, const RowSample* sample) {
  const uint32_t d = shape.head_dim, dv = shape.head_dim_v;
  GridHead head;
  head.k.grid.bits = head.v.grid.bits = bits;
  head.k.grid.axis = kernels::GridAxis::kStatic;
  head.v.grid.axis = kernels::GridAxis::kToken;
  head.v.grid.group = dv;
  std::vector<float> low(d, 0.0f), high(d, 0.0f), largest(dv, 0.0f);
  const uint32_t n = sample == nullptr ? 0 : sample->n;
  for (uint32_t t = 0; t < n; ++t) {
    for (uint32_t c = 0; c < d; ++c) {
      const float x = sample->k[size_t{t} * d + c];
      low[c] = t == 0 ? x : std::min(low[c], x);
      high[c] = t == 0 ? x : std::max(high[c], x);
    }
    for (uint32_t c = 0; c < dv; ++c)
      largest[c] = std::max(largest[c], std::abs(sample->v[size_t{t} * dv + c]));
  }
  const float last = static_cast<float>((1u << bits) - 1);
  for (uint32_t c = 0; c < d; ++c) {
    const float step = (high[c] - low[c]) / last;
    head.k.factor.push_back(step > 0.0f ? step : 1.0f);
    head.k.offset.push_back(low[c]);
  }
  for (const float x : largest) head.v.factor.push_back(x > 0.0f ? std::sqrt(x) : 1.0f);
  return head;
}

}  // namespace qevict::codecs
