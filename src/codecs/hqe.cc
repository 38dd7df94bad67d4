#include "codecs/hqe.h"

#include "codecs/kivi_grid.h"

namespace qevict::codecs {

void SetNormalCode(uint32_t bits, GridSpec& spec) {
  spec.fit = FitNormal;
  if (bits == 1) {
    spec.levels = {-0.6744898f, 0.6744898f};
    spec.borders = {0.0f};
  } else {
    spec.levels = {-1.1503494f, -0.3186394f, 0.3186394f, 1.1503494f};
    spec.borders = {-0.6744898f, 0.0f, 0.6744898f};
  }
}

GridHead Hqe(uint32_t bits, const RowShape& shape) {
  GridHead head = KiviPost(bits, shape);
  if (bits == 1) {
    SetNormalCode(1, head.k);
    SetNormalCode(1, head.v);
  }
  return head;
}

}  // namespace qevict::codecs
