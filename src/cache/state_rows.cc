#include "cache/kv_cache_impl.h"

namespace qevict {

void KvCache::Impl::ReadRow(uint32_t, uint32_t, uint32_t, bool, uint16_t*) const {}
Status KvCache::Impl::RestoreRows(uint32_t, uint32_t, uint32_t, uint32_t, bool, const uint16_t*) {
  return Unimplemented("restore");
}

}  // namespace qevict
