#include "codecs/kvtuner.h"

namespace qevict::codecs {

GridHead KvTuner(LayerBits bits, const RowShape& shape) {
  GridHead head;
  head.k.grid.bits = bits.k / 4;
  head.k.grid.axis = kernels::GridAxis::kChannel;
  head.v.grid.bits = bits.v / 4;
  head.v.grid.axis = kernels::GridAxis::kToken;
  head.v.grid.group = shape.head_dim_v;
  head.k.fit = head.v.fit = FitWholeZero;
  return head;
}

}  // namespace qevict::codecs
