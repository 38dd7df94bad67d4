// The C entry points: argument checks and translation only. No exception leaves this file.

#include <algorithm>
#include <exception>

#include "ggml/device.h"
#include "ggml/log.h"
#include "ggml/session.h"
#include "qevict/backend.h"
#include "qevict/version.h"

using qevict::KvCache;
using qevict::Status;
using qevict::plugin::CacheGroup;
using qevict::plugin::LogError;
using qevict::plugin::Session;
using qevict::plugin::Sessions;
using qevict::plugin::SetLastError;

namespace {

int Report(const Status& status) {
  if (status.ok()) return 0;
  SetLastError(status.message());
  return -static_cast<int>(status.code());
}

// Runs f(Session&) -> int; turns a missing session and stray exceptions (out of memory) into error
// codes.
template <typename F>
int WithSession(uint64_t id, F&& f) {
  try {
    const std::shared_ptr<Session> session = Sessions::Get().Find(id);
    if (!session)
      return Report(
          qevict::NotFound("there is no session " + std::to_string(id) + " on the QEVICT device"));
    return f(*session);
  } catch (const std::exception& e) {
    SetLastError(e.what());
    return -static_cast<int>(qevict::StatusCode::kInternal);
  }
}

void AddStats(CacheGroup& group, qevict_stats* out) {
  out->n_layers += group.cache() ? group.cache()->n_layers() : group.layers().size();
  out->n_streams = group.n_streams();
  out->cells_per_stream = std::max<uint64_t>(out->cells_per_stream, group.n_cells());
  out->capacity_f16_bytes += group.f16_bytes();
  out->workspace_bytes += group.workspace_bytes();
  out->route_ns += group.timers().route_ns;
  out->attention_ns += group.timers().attention_ns;
  out->write_ns += group.timers().write_ns;
  out->mask_ns += group.timers().mask_ns;
  out->score_ns += group.timers().score_ns;
  const KvCache* cache = group.cache();
  if (!cache) return;
  const qevict::CacheStats s = cache->Stats();
  out->full_bytes += s.bytes.full;
  out->packed_bytes += s.bytes.packed;
  out->dormant_bytes += s.bytes.dormant;
  out->tables_bytes += s.bytes.tables;
  out->slack_bytes += s.bytes.slack;
  out->f16_bytes += s.f16_bytes;
  out->budget_bytes += s.budget_bytes;
  out->arena_bytes += s.arena_bytes;
  out->arena_peak_bytes += s.arena_peak_bytes;
  out->arena_resident_bytes += cache->ResidentBytes();
  out->peak_bytes += s.peak_bytes;
  out->full_tokens += s.tokens.full;
  out->packed_tokens += s.tokens.packed;
  out->evicted_tokens += s.tokens.evicted;
  out->events += s.events;
  out->promotions += s.promotions;
  out->demotions += s.demotions;
  out->first_encodings += s.first_encodings;
  out->evictions += s.evictions;
}

}  // namespace

extern "C" {

ggml_backend_reg* qevict_backend_reg(void) {
  try {
    return qevict::plugin::Registration();
  } catch (const std::exception& e) {
    SetLastError(e.what());
    return nullptr;
  }
}

int qevict_configure(const char* text_or_path) {
  try {
    return Report(Sessions::Get().Configure(text_or_path));
  } catch (const std::exception& e) {
    SetLastError(e.what());
    return -static_cast<int>(qevict::StatusCode::kInternal);
  }
}

uint64_t qevict_last_session(void) { return Sessions::LastOfThread(); }

int qevict_set_budget_tokens(uint64_t session, uint32_t tokens) {
  return WithSession(session, [tokens](Session& s) {
    for (CacheGroup* group : s.groups) group->set_budget_tokens(tokens);
    return Report(s.ShareBudget());
  });
}

int qevict_set_phase(uint64_t session, qevict_phase phase) {
  if (phase < QEVICT_PHASE_AUTO || phase > QEVICT_PHASE_DECODE) {
    return Report(qevict::InvalidArgument("phase " + std::to_string(static_cast<int>(phase)) +
                                          " is not 0, 1 or 2"));
  }
  return WithSession(session, [phase](Session& s) {
    for (CacheGroup* group : s.groups) group->set_phase(phase);
    return 0;
  });
}

int qevict_get_stats(uint64_t session, qevict_stats* stats) {
  if (!stats) return Report(qevict::InvalidArgument("stats is null"));
  *stats = {};
  return WithSession(session, [stats](Session& s) {
    for (CacheGroup* group : s.groups) AddStats(*group, stats);
    return 0;
  });
}

int qevict_get_layer(uint64_t session, uint32_t cache, uint32_t layer, uint32_t* births,
                     uint8_t* tiers, float* scores, uint32_t capacity) {
  return WithSession(session, [=](Session& s) {
    if (cache >= s.groups.size() || !s.groups[cache]->cache() ||
        layer >= s.groups[cache]->cache()->n_layers()) {
      return Report(qevict::OutOfRange("cache " + std::to_string(cache) + ", layer " +
                                       std::to_string(layer) + " does not exist"));
    }
    return s.groups[cache]->DumpLayer(layer, births, tiers, scores, capacity);
  });
}

int qevict_save_statistics(uint64_t session, const char* path, uint64_t model_hash,
                           uint32_t max_tokens) {
  if (!path) return Report(qevict::InvalidArgument("path is null"));
  return WithSession(session, [=](Session& s) {
    qevict::codecs::CodecStatistics statistics;
    statistics.model_hash = model_hash;
    for (const CacheGroup* group : s.groups) {
      if (const Status status = group->CollectStatistics(max_tokens, statistics); !status.ok())
        return Report(status);
    }
    std::sort(statistics.layers.begin(), statistics.layers.end(),
              [](const auto& a, const auto& b) { return a.model_layer < b.model_layer; });
    return Report(qevict::codecs::SaveStatistics(path, statistics));
  });
}

const char* qevict_version(void) { return QEVICT_VERSION_STRING; }
const char* qevict_last_error(void) { return qevict::plugin::LastError(); }

/* What ggml's loader looks for in a shared library. */
QEVICT_API ggml_backend_reg* ggml_backend_init(void) { return qevict_backend_reg(); }

}  // extern "C"
