#include "codecs/nqkv.h"

namespace qevict::codecs {

GridHead Nqkv(const RowShape& shape) {
  const auto spec = [](uint32_t dim) {
    GridSpec s;
    s.grid.bits = 4;
    s.grid.axis = kernels::GridAxis::kToken;
    s.grid.has_zero = false;
    s.grid.group = dim % 256 == 0 ? 256 : dim;
    s.fit = FitAbsMax;
    // NF4 of QLoRA (arXiv 2305.14314, appendix E).
    s.levels = {-1.0f,       -0.6961928f, -0.5250731f, -0.3949175f, -0.2844414f, -0.1847734f,
                -0.0910500f, 0.0f,        0.0795803f,  0.1609302f,  0.2461123f,  0.3379152f,
                0.4407098f,  0.5626170f,  0.7229568f,  1.0f};
    return s;
  };
  return {spec(shape.head_dim), spec(shape.head_dim_v)};
}

}  // namespace qevict::codecs
