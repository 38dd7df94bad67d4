#include "cache/kv_cache_impl.h"

namespace qevict {

Status KvCache::Impl::CopyStream(uint32_t, uint32_t) { return Unimplemented("copy"); }

}  // namespace qevict
