// Session: one llama_context on the QEVICT device (one ggml_backend_t), with its configuration and
// caches.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "ggml-backend.h"
#include "ggml/cache_group.h"
#include "ggml/omp_pool.h"
#include "qevict/config.h"

namespace qevict::plugin {

/// Lives as long as its ggml_backend_t or one of its buffers. Groups are owned by their buffers.
class Session {
 public:
  Session(uint64_t session_id, Result<Config> session_config,
          std::shared_ptr<const codecs::CodecStatistics> given)
      : id(session_id), config(std::move(session_config)), statistics(std::move(given)) {}

  /// One budget for all caches of the context (a model with sliding windows has two); for when the
  /// tensors of one more have been added, and when what a fraction is taken of has changed.
  Status ShareBudget();
  /// What the host is told that a cache tensor takes. The host asks before it allocates and when it
  /// places the tensor, and gets the same answer.
  size_t ReportedBytes(const ggml_tensor* tensor);

  const uint64_t id;
  const Result<Config> config;  ///< not OK: every init_tensor fails with this sentence
  const std::shared_ptr<const codecs::CodecStatistics> statistics;  ///< Config::statistics, or null
  OmpPool pool{1};
  std::vector<CacheGroup*> groups;  ///< registered by their buffers
  ggml_abort_callback abort_callback = nullptr;
  void* abort_data = nullptr;
  bool coverage_checked = false;  ///< the host's options have been checked for uncompressed layers
  std::string refusal;            ///< not empty: compute buffers are refused with this sentence

 private:
  uint64_t reported_ = 0;  ///< of an absolute budget
  std::unordered_map<const ggml_tensor*, size_t> reported_bytes_;
};

/// Process-wide list of sessions; thread-safe.
class Sessions {
 public:
  static Sessions& Get();
  /// Configuration of sessions created from now on.
  Status Configure(const char* text_or_path);
  std::shared_ptr<Session> Create();
  /// A session for memory that a thread without one asks for: nothing finds it by its id.
  std::shared_ptr<Session> CreateUnlisted();
  void Remove(uint64_t id);
  /// id 0 = the newest of the calling thread. Null if there is none.
  std::shared_ptr<Session> Find(uint64_t id);
  static uint64_t LastOfThread();

 private:
  std::shared_ptr<Session> Make();

  std::mutex mutex_;
  std::vector<std::shared_ptr<Session>> sessions_;
  uint64_t next_id_ = 1;
  bool configured_ = false;
  Result<Config> configured_config_{Config{}};
};

}  // namespace qevict::plugin
