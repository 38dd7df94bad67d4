#include "cache/kv_cache_impl.h"

namespace qevict {

Status KvCache::Impl::ShiftPositions(std::span<const int32_t>) { return Unimplemented("shift"); }
void KvCache::Impl::RotateLayer(uint32_t, std::span<const int32_t>, ParallelFor&) {}

}  // namespace qevict
