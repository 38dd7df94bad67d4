#include "ggml/device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "ggml/buffer.h"
#include "ggml/guard.h"
#include "ggml/lineage.h"
#include "ggml/log.h"
#include "ggml/session.h"
#include "ggml_built_version.h"

namespace qevict::plugin {
namespace {

Session* SessionOf(ggml_backend_t backend) {
  return static_cast<std::shared_ptr<Session>*>(backend->context)->get();
}

// --- Backend
// ---------------------------------------------------------------------------------------------------------

const char* Name(ggml_backend_t) { return "QEVICT"; }

void FreeBackend(ggml_backend_t backend) {
  auto* session = static_cast<std::shared_ptr<Session>*>(backend->context);
  Sessions::Get().Remove((*session)->id);
  delete session;
  delete backend;
}

const ggml_backend_i kBackendInterface = {
    /*get_name*/ Name,
    /*free*/ FreeBackend,
    /*set_tensor_async*/ nullptr,
    /*get_tensor_async*/ nullptr,
    /*set_tensor_2d_async*/ nullptr,
    /*get_tensor_2d_async*/ nullptr,
    /*cpy_tensor_async*/ nullptr,
    /*synchronize*/ nullptr,
    /*graph_plan_create*/ nullptr,
    /*graph_plan_free*/ nullptr,
    /*graph_plan_update*/ nullptr,
    /*graph_plan_compute*/ nullptr,
    /*graph_compute*/ ComputeGraph,
    /*event_record*/ nullptr,
    /*event_wait*/ nullptr,
    /*graph_optimize*/ nullptr,
};

ggml_guid_t Guid() {
  static ggml_guid guid = {0x71, 0x65, 0x76, 0x69, 0x63, 0x74, 0x2d, 0x6b,
                           0x76, 0x2d, 0x63, 0x61, 0x63, 0x68, 0x65, 0x01};
  return &guid;
}

// --- Device
// ----------------------------------------------------------------------------------------------------------

const char* DeviceName(ggml_backend_dev_t) { return "QEVICT"; }
const char* DeviceDescription(ggml_backend_dev_t) { return "KV cache under a byte budget"; }
enum ggml_backend_dev_type DeviceType(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_IGPU; }

void DeviceMemory(ggml_backend_dev_t, size_t* free, size_t* total) {
  *free = *total = 0;
  const long page = sysconf(_SC_PAGESIZE);
  const long pages = sysconf(_SC_PHYS_PAGES);
  if (page > 0 && pages > 0) *total = static_cast<size_t>(page) * static_cast<size_t>(pages);
  *free = *total;
  if (std::FILE* file = std::fopen("/proc/meminfo", "r")) {
    char line[128];
    unsigned long long kib = 0;
    while (std::fgets(line, sizeof(line), file)) {
      if (std::sscanf(line, "MemAvailable: %llu kB", &kib) == 1)
        *free = static_cast<size_t>(kib) * 1024;
    }
    std::fclose(file);
  }
}

void DeviceProps(ggml_backend_dev_t dev, ggml_backend_dev_props* props) {
  std::memset(props, 0, sizeof(*props));
  props->name = DeviceName(dev);
  props->description = DeviceDescription(dev);
  props->type = DeviceType(dev);
  DeviceMemory(dev, &props->memory_free, &props->memory_total);
  props->caps.mmap_support = true;
}

ggml_backend_t InitBackend(ggml_backend_dev_t dev, const char*) {
  ggml_backend_t backend = nullptr;
  const Status status = Guarded([&] {
    auto session = std::make_unique<std::shared_ptr<Session>>(Sessions::Get().Create());
    backend = new ggml_backend{Guid(), kBackendInterface, dev, session.get()};
    (void)session.release();
  });
  if (!status.ok()) LogRefusal(status.message());
  return backend;
}

ggml_backend_buffer_type_t DeviceBufferType(ggml_backend_dev_t) { return BufferType(); }

// An operation over our cache that we do not know, or that means flash attention is off: it is
// claimed, since answering "no" for a tensor that only we can read makes ggml abort or silently
// copy; the compute buffer is then refused.
void Refuse(const ggml_tensor* cache, const ggml_tensor* op) {
  BufferContext* context = ContextOf(cache);
  if (!context || !context->session || !context->session->refusal.empty()) return;
  context->session->refusal =
      op->op == GGML_OP_MUL_MAT
          ? std::string("flash attention is off, but QEVICT needs it: use `-fa on` (or auto)")
          : std::string("operation ") + ggml_op_name(op->op) +
                " over the KV cache is not supported by QEVICT";
}

const ggml_tensor* CacheSource(const ggml_tensor* op) {
  for (const ggml_tensor* src : op->src) {
    if (src && IsCacheTensor(Root(src))) return Root(src);
  }
  return nullptr;
}

bool IsViewOp(ggml_op op) {
  return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE ||
         op == GGML_OP_PERMUTE || op == GGML_OP_TRANSPOSE;
}

// Positions are read where the rows behind a ROPE are written, which can be after the last ROPE of
// the graph: this is asked before memory is planned, and an output's memory is not given to another
// tensor.
void KeepPositions(const ggml_tensor* set_rows) {
  if (const ggml_tensor* rope = FindRope(set_rows->src[0])) ggml_set_output(rope->src[1]);
}

bool Supports(const ggml_tensor* op) {
  const ggml_tensor* root = Root(op);
  const bool ours = IsOurs(root->buffer);
  if (IsViewOp(op->op)) return ours;
  if (op->op == GGML_OP_FLASH_ATTN_EXT) {
    if (!IsCacheTensor(Root(op->src[1]))) return false;
    if (CacheGroup* group = GroupOf(Root(op->src[1]))) group->Observe(op);
    return true;
  }
  if (CacheGroup* group = GroupOf(root); group && op->op == GGML_OP_SET_ROWS)
    group->ObserveRows(op);
  if (const ggml_tensor* cache = CacheSource(op); cache && !IsCacheTensor(root)) {
    Refuse(cache, op);
    return true;
  }
  if (!ours || !IsCacheTensor(root)) return false;
  if (op->op == GGML_OP_SET_ROWS) KeepPositions(op);
  return true;
}

/// An operation that the system refuses memory for is claimed, like those that are refused.
bool SupportsOp(ggml_backend_dev_t, const ggml_tensor* op) {
  bool supported = true;
  LogFailure("asking for an operation", [&] { supported = Supports(op); });
  return supported;
}

bool SupportsBuft(ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
  return buft == BufferType() || ggml_backend_buft_is_host(buft);
}

const ggml_backend_device_i kDeviceInterface = {
    /*get_name*/ DeviceName,
    /*get_description*/ DeviceDescription,
    /*get_memory*/ DeviceMemory,
    /*get_type*/ DeviceType,
    /*get_props*/ DeviceProps,
    /*init_backend*/ InitBackend,
    /*get_buffer_type*/ DeviceBufferType,
    /*get_host_buffer_type*/ nullptr,
    /*buffer_from_host_ptr*/ nullptr,
    /*supports_op*/ SupportsOp,
    /*supports_buft*/ SupportsBuft,
    /*offload_op*/ nullptr,
    /*event_new*/ nullptr,
    /*event_free*/ nullptr,
    /*event_synchronize*/ nullptr,
};

// --- Registration
// ----------------------------------------------------------------------------------------------------

const char* RegName(ggml_backend_reg_t) { return "QEVICT"; }
size_t DeviceCount(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t GetDevice(ggml_backend_reg_t, size_t) { return Device(); }

// Host options can leave layers outside the device without a word (-nkvo, -ngl below the number of
// layers).
void WarnUncompressed(Session& session) {
  if (session.coverage_checked) return;
  session.coverage_checked = true;
  int first = -1;
  for (const CacheGroup* group : session.groups) {
    for (const LayerBinding& layer : group->layers())
      first = first < 0 ? layer.model_layer : std::min(first, layer.model_layer);
  }
  if (first < 0) {
    LogWarn(
        "the KV cache of this context is not on QEVICT and stays uncompressed: remove -nkvo and "
        "-ngl 0");
  } else if (first > 0) {
    LogWarn(
        "layers 0..." + std::to_string(first - 1) +
        " are not on QEVICT and stay uncompressed: use -ngl 99, or, where llama.cpp's --fit took "
        "them off for lack of memory, prefill=bounded");
  }
}

void SetThreads(ggml_backend_t backend, int n_threads) {
  LogFailure("setting threads", [&]() -> Status {
    Session* session = SessionOf(backend);
    // Attention has been seen by now: the budget is shared anew, by the heads' real shapes.
    if (!session->coverage_checked) QEVICT_RETURN_IF_ERROR(session->ShareBudget());
    WarnUncompressed(*session);
    session->pool.set_n_threads(n_threads > 0 ? static_cast<unsigned>(n_threads) : 1u);
    for (CacheGroup* group : session->groups) group->NoteGraph();
    return {};
  });
}

void SetAbortCallback(ggml_backend_t backend, ggml_abort_callback callback, void* data) {
  Session* session = SessionOf(backend);
  session->abort_callback = callback;
  session->abort_data = data;
}

void* ProcAddress(ggml_backend_reg_t, const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0)
    return reinterpret_cast<void*>(SetThreads);
  if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0)
    return reinterpret_cast<void*>(SetAbortCallback);
  return nullptr;
}

ggml_backend_reg* RegInstance() {
  static ggml_backend_reg reg = {
      GGML_BACKEND_API_VERSION, {RegName, DeviceCount, GetDevice, ProcAddress}, nullptr};
  return &reg;
}

}  // namespace

ggml_backend_dev_t Device() {
  static ggml_backend_device device = {kDeviceInterface, RegInstance(), nullptr};
  return &device;
}

ggml_backend_reg_t Registration() {
  if (std::strcmp(ggml_version(), kBuiltGgmlVersion) != 0) {
    LogRefusal(std::string("this process runs ggml ") + ggml_version() +
               ", but the plug-in was built for ggml " + kBuiltGgmlVersion +
               "; rebuild it against the same llama.cpp");
    return nullptr;
  }
  return RegInstance();
}

}  // namespace qevict::plugin
