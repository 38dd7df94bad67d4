#include "codecs/hadamard.h"

#include "codecs/gaussian_levels.h"
#include "codecs/kivi_grid.h"

namespace qevict::codecs {

GridHead Hadamard(uint32_t bits, const RowShape& shape, const RowSample* sample) {
  const auto spec = [bits](uint32_t dim) {
    GridSpec s;
    s.grid.bits = bits;
    s.grid.axis = kernels::GridAxis::kToken;
    s.grid.has_zero = false;
    s.grid.group = dim;
    s.fit = FitGaussian;
    s.sign = HadamardSigns(dim);
    const std::span<const double> positive = GaussianLevels(bits);
    for (size_t i = positive.size(); i-- > 0;) s.levels.push_back(-static_cast<float>(positive[i]));
    for (const double x : positive) s.levels.push_back(static_cast<float>(x));
    return s;
  };
  GridHead head{spec(shape.head_dim), spec(shape.head_dim_v), nullptr};
  head.k.grid.before_rope = true;
  head.k.offset.assign(shape.head_dim, 0.0f);
  if (sample != nullptr) {
    head.k.offset = MeanRow(sample->k_before_rope, sample->n, shape.head_dim);
    HadamardForward(head.k.sign.data(), shape.head_dim, head.k.offset.data());
  }
  return head;
}

}  // namespace qevict::codecs
