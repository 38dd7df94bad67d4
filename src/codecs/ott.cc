#include "codecs/ott.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "codecs/grid.h"
#include "codecs/kivi_grid.h"

namespace qevict::codecs {

std::vector<uint32_t> SmallestTokens(const float* x, uint32_t n_tokens, uint32_t dim, uint32_t n) {
  std::vector<double> size(n_tokens, 0.0);
  for (size_t i = 0; i < size_t{n_tokens} * dim; ++i)
    size[i / dim] += std::abs(double{Finite(x[i])});
  std::vector<uint32_t> order(n_tokens);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return size[a] < size[b]; });
  order.resize(std::min(n, n_tokens));
  return order;
}

GridHead Ott(uint32_t bits, const RowShape& shape) {
  GridHead head = KiviPost(bits, shape);
  head.k.grid.n_exact_tokens = head.v.grid.n_exact_tokens = 1;
  head.pick_tokens = [](const kernels::GridVector& g, const float* x, uint32_t n, uint32_t dim) {
    return SmallestTokens(x, n, dim, g.n_exact_tokens);
  };
  return head;
}

}  // namespace qevict::codecs
