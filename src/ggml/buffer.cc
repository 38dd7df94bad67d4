#include "ggml/buffer.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "ggml/device.h"
#include "ggml/guard.h"
#include "ggml/lineage.h"
#include "ggml/log.h"

namespace qevict::plugin {
namespace {

constexpr size_t kAlignment = 64;

BufferContext* Context(ggml_backend_buffer_t buffer) {
  return static_cast<BufferContext*>(buffer->context);
}

// Any tensor may be a view: offsets count from the owner of the memory.
size_t OffsetInRoot(const ggml_tensor* tensor) {
  return static_cast<size_t>(static_cast<const char*>(tensor->data) -
                             static_cast<const char*>(Root(tensor)->data));
}

bool IsVirtual(const ggml_tensor* tensor) {
  const CacheGroup* group = GroupOf(Root(tensor));
  return group && group->Owns(Root(tensor));
}

void FreeBuffer(ggml_backend_buffer_t buffer) {
  BufferContext* context = Context(buffer);
  LogFailure("the summary", [&] {
    if (context->group) context->group->LogSummary();
  });
  if (context->group && context->session)
    std::erase(context->session->groups, context->group.get());
  delete context;
}

void* GetBase(ggml_backend_buffer_t buffer) {
  BufferContext* context = Context(buffer);
  return context->base ? context->base
                       : reinterpret_cast<void*>(kAlignment);  // dummy buffers must not be null
}

/// Less than ggml_nbytes for a cache under a budget. The address range of such a buffer is shorter
/// than its tensors: they are told apart by name, and nothing is read or written through it.
size_t AllocSize(ggml_backend_buffer_type_t, const ggml_tensor* tensor) {
  const char kind = tensor->view_src ? '\0' : ParseCacheName(tensor->name).kind;
  if (kind != 'k' && kind != 'v') return ggml_nbytes(tensor);
  size_t bytes = ggml_nbytes(tensor);
  const Status status = Guarded([&] {
    if (const auto session = Sessions::Get().Find(0)) bytes = session->ReportedBytes(tensor);
  });
  if (!status.ok()) LogError(status.message());
  return bytes;
}

/// One more tensor of a cache.
Status AddCacheTensor(BufferContext* context, ggml_tensor* tensor) {
  const Result<Config>& config = context->session->config;
  if (!config.ok()) {
    return {config.status().code(), "bad configuration: " + config.status().message()};
  }
  if (!context->group) {
    context->group = std::make_unique<CacheGroup>(*const_cast<Result<Config>&>(config),
                                                  context->session->statistics);
    context->session->groups.push_back(context->group.get());
  }
  Status status = context->group->AddTensor(tensor);
  context->added += GGML_PAD(AllocSize(BufferType(), tensor), kAlignment);
  if (status.ok() && context->added >= context->size) status = context->session->ShareBudget();
  return status;
}

ggml_status InitTensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor) {
  if (tensor->view_src || ParseCacheName(tensor->name).kind == 0) return GGML_STATUS_SUCCESS;
  BufferContext* context = Context(buffer);
  if (context->size == 0) return GGML_STATUS_SUCCESS;  // size probes of the host program
  const Status status = Guarded([&] { return AddCacheTensor(context, tensor); });
  if (status.ok()) return GGML_STATUS_SUCCESS;
  LogRefusal(status.message());
  return GGML_STATUS_FAILED;
}

void MemsetTensor(ggml_backend_buffer_t, ggml_tensor* tensor, uint8_t value, size_t offset,
                  size_t size) {
  if (IsVirtual(tensor)) {
    LogFailure("clearing cells", [&] {
      GroupOf(Root(tensor))->ZeroBytes(Root(tensor), OffsetInRoot(tensor) + offset, size);
    });
    return;
  }
  std::memset(static_cast<char*>(tensor->data) + offset, value, size);
}

void SetTensor(ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, size_t offset,
               size_t size) {
  if (!IsVirtual(tensor)) {
    std::memcpy(static_cast<char*>(tensor->data) + offset, data, size);
    return;
  }
  LogFailure("restoring state", [&] {
    return GroupOf(Root(tensor))
        ->WriteBytes(Root(tensor), OffsetInRoot(tensor) + offset, size,
                     static_cast<const uint8_t*>(data));
  });
}

void GetTensor(ggml_backend_buffer_t, const ggml_tensor* tensor, void* data, size_t offset,
               size_t size) {
  if (!IsVirtual(tensor)) {
    std::memcpy(data, static_cast<const char*>(tensor->data) + offset, size);
    return;
  }
  const bool read = LogFailure("saving state", [&] {
    GroupOf(Root(tensor))
        ->ReadBytes(Root(tensor), OffsetInRoot(tensor) + offset, size, static_cast<uint8_t*>(data));
  });
  if (!read) std::memset(data, 0, size);  // not what the host had there for another tensor
}

bool CopyTensor(ggml_backend_buffer_t, const ggml_tensor* src, ggml_tensor* dst) {
  if (!IsVirtual(dst)) {
    if (IsOurs(Root(src)->buffer) && IsVirtual(src))
      return false;  // goes through GetTensor as state rows
    if (!ggml_backend_buffer_is_host(Root(src)->buffer) && !IsOurs(Root(src)->buffer)) return false;
    std::memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
  }
  if (!IsOurs(Root(src)->buffer) || !IsVirtual(src) || Root(src) != Root(dst)) return false;
  LogFailure("copying a sequence", [&] { return GroupOf(Root(dst))->CopyStream(src, dst); });
  return true;
}

void ClearBuffer(ggml_backend_buffer_t buffer, uint8_t value) {
  BufferContext* context = Context(buffer);
  if (context->group) {
    LogFailure("clearing the cache", [&] { context->group->Clear(); });
  } else if (context->base) {
    std::memset(context->base, value, context->size);
  }
}

const ggml_backend_buffer_i kBufferInterface = {
    /*free_buffer*/ FreeBuffer,
    /*get_base*/ GetBase,
    /*init_tensor*/ InitTensor,
    /*memset_tensor*/ MemsetTensor,
    /*set_tensor*/ SetTensor,
    /*get_tensor*/ GetTensor,
    /*set_tensor_2d*/ nullptr,
    /*get_tensor_2d*/ nullptr,
    /*cpy_tensor*/ CopyTensor,
    /*clear*/ ClearBuffer,
    /*reset*/ nullptr,
};

const char* BufferTypeName(ggml_backend_buffer_type_t) { return "QEVICT"; }

Result<std::unique_ptr<BufferContext>> MakeContext(size_t size) {
  auto context = std::make_unique<BufferContext>();
  context->session = Sessions::Get().Find(0);
  if (!context->session) context->session = Sessions::Get().CreateUnlisted();
  if (size == 0) return context;
  if (!context->session->refusal.empty()) return FailedPrecondition(context->session->refusal);
  // MAP_NORESERVE: the range of a cache may exceed the machine's memory, since it is never touched.
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return ResourceExhausted("the system refuses an address range of " + std::to_string(size) +
                             " bytes");
  }
  context->base = static_cast<uint8_t*>(base);
  context->size = size;
  return context;
}

ggml_backend_buffer_t AllocBuffer(ggml_backend_buffer_type_t buft, size_t size) {
  ggml_backend_buffer_t buffer = nullptr;
  const Status status = Guarded([&]() -> Status {
    Result<std::unique_ptr<BufferContext>> context = MakeContext(size);
    if (!context.ok()) return context.status();
    buffer = ggml_backend_buffer_init(buft, kBufferInterface, context->get(), size);
    (void)context->release();
    return {};
  });
  if (!status.ok()) LogRefusal(status.message());
  return buffer;
}

size_t Alignment(ggml_backend_buffer_type_t) { return kAlignment; }
bool IsHost(ggml_backend_buffer_type_t) { return false; }

}  // namespace

BufferContext::~BufferContext() {
  if (base) munmap(base, size);
}

ggml_backend_buffer_type_t BufferType() {
  static ggml_backend_buffer_type type = {
      {BufferTypeName, AllocBuffer, Alignment, /*get_max_size*/ nullptr, AllocSize, IsHost},
      Device(),
      nullptr,
  };
  return &type;
}

bool IsCacheTensor(const ggml_tensor* root) {
  return IsOurs(root->buffer) && ParseCacheName(root->name).kind != 0;
}

BufferContext* ContextOf(const ggml_tensor* root) {
  return IsOurs(root->buffer) ? static_cast<BufferContext*>(root->buffer->context) : nullptr;
}

CacheGroup* GroupOf(const ggml_tensor* root) {
  BufferContext* context = ContextOf(root);
  return context ? context->group.get() : nullptr;
}

}  // namespace qevict::plugin
