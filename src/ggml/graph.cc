// Runs the nodes of one split: everything that writes to, or attends over, a cache of ours.

#include "ggml-impl.h"
#include "ggml/buffer.h"
#include "ggml/device.h"
#include "ggml/guard.h"
#include "ggml/lineage.h"
#include "ggml/log.h"

namespace qevict::plugin {
namespace {

bool IsNoop(const ggml_tensor* node) {
  return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
         node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE || ggml_is_empty(node);
}

Status ComputeNode(const ggml_tensor* node, const ggml_cgraph* graph, OmpPool& pool) {
  if (node->op == GGML_OP_FLASH_ATTN_EXT) {
    if (CacheGroup* group = GroupOf(Root(node->src[1]))) return group->FlashAttention(node, pool);
  }
  CacheGroup* group = GroupOf(Root(node));
  if (group && node->op == GGML_OP_SET_ROWS) return group->SetRows(node, graph, pool);
  if (group && node->op == GGML_OP_ROPE) return group->ShiftRope(node, pool);
  return Unimplemented(std::string("operation ") + ggml_op_name(node->op) +
                       " over the KV cache is not supported by QEVICT");
}

}  // namespace

ggml_status ComputeGraph(ggml_backend_t backend, ggml_cgraph* graph) {
  Session& session = **static_cast<std::shared_ptr<Session>*>(backend->context);
  for (int i = 0; i < graph->n_nodes; ++i) {
    ggml_tensor* node = graph->nodes[i];
    if (IsNoop(node)) continue;
    if (session.abort_callback && session.abort_callback(session.abort_data))
      return GGML_STATUS_ABORTED;
    const Status status = Guarded([&] { return ComputeNode(node, graph, session.pool); });
    if (status.ok()) continue;
    LogError(status.message());
    return status.code() == StatusCode::kResourceExhausted ? GGML_STATUS_ALLOC_FAILED
                                                           : GGML_STATUS_FAILED;
  }
  return GGML_STATUS_SUCCESS;
}

}  // namespace qevict::plugin
