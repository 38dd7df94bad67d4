#include "ggml/session.h"

#include <cstdlib>

namespace qevict::plugin {
namespace {
thread_local uint64_t last_session_of_thread = 0;
}

Sessions& Sessions::Get() {
  static Sessions* sessions =
      new Sessions;  // never destroyed: buffers may outlive static destructors
  return *sessions;
}

Status Sessions::Configure(const char* text_or_path) {
  Result<Config> config = LoadConfig(text_or_path ? text_or_path : "");
  if (!config.ok()) return config.status();
  const std::lock_guard lock(mutex_);
  configured_config_ = config;
  configured_ = true;
  return {};
}

std::shared_ptr<Session> Sessions::Create() {
  const std::lock_guard lock(mutex_);
  Result<Config> config = configured_config_;
  if (!configured_) {
    const char* text = std::getenv("QEVICT_CONFIG");
    if (text && *text) config = LoadConfig(text);
  }
  auto session = std::make_shared<Session>(next_id_++, std::move(config));
  sessions_.push_back(session);
  last_session_of_thread = session->id;
  return session;
}

void Sessions::Remove(uint64_t id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(sessions_, [id](const auto& s) { return s->id == id; });
}

std::shared_ptr<Session> Sessions::Find(uint64_t id) {
  const std::lock_guard lock(mutex_);
  const uint64_t wanted = id ? id : last_session_of_thread;
  for (const auto& s : sessions_) {
    if (s->id == wanted) return s;
  }
  return nullptr;
}

uint64_t Sessions::LastOfThread() { return last_session_of_thread; }

}  // namespace qevict::plugin
