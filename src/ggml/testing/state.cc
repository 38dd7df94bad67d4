#include "ggml/testing/state.h"

#include <algorithm>

namespace qevict::plugin::testing {

SavedState Save(Engine& engine, uint32_t stream, uint32_t cell0, uint32_t n, size_t slice) {
  SavedState parts;
  for (const bool is_k : {true, false}) {
    for (uint32_t il = 0; il < engine.spec().layers.size(); ++il) {
      const size_t begin = cell0 * engine.row_bytes(il, is_k),
                   total = n * engine.row_bytes(il, is_k);
      parts.emplace_back();
      for (size_t at = 0; at < total;) {
        const size_t size = slice ? std::min(slice, total - at) : total;
        const std::vector<uint8_t> bytes = engine.ReadState(il, is_k, stream, begin + at, size);
        parts.back().insert(parts.back().end(), bytes.begin(), bytes.end());
        at += size;
      }
    }
  }
  return parts;
}

void Restore(Engine& engine, uint32_t stream, uint32_t cell0, const SavedState& parts,
             size_t slice) {
  size_t part = 0;
  for (const bool is_k : {true, false}) {
    for (uint32_t il = 0; il < engine.spec().layers.size(); ++il, ++part) {
      const size_t begin = cell0 * engine.row_bytes(il, is_k);
      const std::vector<uint8_t>& bytes = parts[part];
      for (size_t at = 0; at < bytes.size();) {
        const size_t n = slice ? std::min(slice, bytes.size() - at) : bytes.size();
        engine.WriteState(il, is_k, stream, begin + at, {bytes.data() + at, n});
        at += n;
      }
    }
  }
}

}  // namespace qevict::plugin::testing
