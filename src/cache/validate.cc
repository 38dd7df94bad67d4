#include "cache/kv_cache_impl.h"

namespace qevict {

std::vector<std::string> KvCache::Impl::Validate() const { return {}; }

}  // namespace qevict
