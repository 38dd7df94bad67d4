// Device QEVICT: the registration that llama.cpp finds, and which operations it takes.
#pragma once

#include "ggml-backend-impl.h"

namespace qevict::plugin {

/// The registration (one device). Null, with the reason as last error, if the process runs another
/// ggml version.
ggml_backend_reg_t Registration();
ggml_backend_dev_t Device();
/// Runs the nodes of one split of a graph.
ggml_status ComputeGraph(ggml_backend_t backend, ggml_cgraph* graph);

}  // namespace qevict::plugin
