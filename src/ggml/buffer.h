// Buffer type of the QEVICT device. Buffers that hold cache_* tensors are virtual: their address
// range is reserved and never touched; the contents live in the KvCache of the buffer's CacheGroup.
// Other buffers (compute buffers share the type) are ordinary memory, committed as it is used.
#pragma once

#include <cstdint>
#include <memory>

#include "ggml-backend-impl.h"
#include "ggml/session.h"

namespace qevict::plugin {

struct BufferContext {
  BufferContext() = default;
  BufferContext(const BufferContext&) = delete;
  BufferContext& operator=(const BufferContext&) = delete;
  ~BufferContext();

  uint8_t* base = nullptr;
  size_t size = 0;
  size_t added =
      0;  ///< bytes of the cache_* tensors so far; all are there when they fill the buffer
  std::shared_ptr<Session> session;
  std::unique_ptr<CacheGroup> group;  ///< null until the first cache_* tensor
};

ggml_backend_buffer_type_t BufferType();
inline bool IsOurs(const ggml_backend_buffer* buffer) {
  return buffer && buffer->buft == BufferType();
}
/// True for cache_* tensors in a buffer (dummy or real) of ours: the ones whose contents are
/// virtual.
bool IsCacheTensor(const ggml_tensor* root);
/// The group that holds a cache tensor; null for dummy buffers.
CacheGroup* GroupOf(const ggml_tensor* root);
BufferContext* ContextOf(const ggml_tensor* root);

}  // namespace qevict::plugin
