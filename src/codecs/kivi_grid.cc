#include "codecs/kivi_grid.h"

namespace qevict::codecs {

using kernels::GridAxis;

uint32_t GroupOf32(uint32_t dim) { return dim % 32 == 0 ? 32 : dim; }

std::vector<float> MeanRow(const std::vector<float>& rows, uint32_t n, uint32_t dim) {
  std::vector<double> sum(dim, 0.0);
  for (size_t i = 0; i < size_t{n} * dim; ++i) sum[i % dim] += rows[i];
  std::vector<float> mean(dim, 0.0f);
  for (uint32_t c = 0; c < dim && n != 0; ++c) mean[c] = static_cast<float>(sum[c] / n);
  return mean;
}

GridHead KiviGrid(uint32_t bits, const RowShape& shape) {
  GridHead head;
  head.k.grid.bits = head.v.grid.bits = bits;
  head.k.grid.axis = GridAxis::kChannel;
  head.k.grid.before_rope = true;
  head.v.grid.axis = GridAxis::kToken;
  head.v.grid.group = shape.head_dim_v;
  return head;
}

GridHead KiviClip(uint32_t bits, const RowShape& shape) {
  GridHead head = KiviGrid(bits, shape);
  head.k.fit = head.v.fit = FitClipped;
  return head;
}

GridHead KiviPost(uint32_t bits, const RowShape& shape) {
  GridHead head = KiviGrid(bits, shape);
  head.k.grid.before_rope = false;
  head.v.grid.group = GroupOf32(shape.head_dim_v);
  return head;
}

GridHead ByteGrid(uint32_t bits, const RowShape& shape, const RowSample* sample) {
  GridHead head = KiviGrid(bits, shape);
  head.k.grid.bytes = true;
  head.k.offset = sample == nullptr ? std::vector<float>(shape.head_dim)
                                    : MeanRow(sample->k_before_rope, sample->n, shape.head_dim);
  return head;
}

}  // namespace qevict::codecs
