#include "ggml/session.h"

#include <algorithm>
#include <cstdlib>

#include "codecs/allocate.h"
#include "kernels/attention.h"

namespace qevict::plugin {
namespace {
thread_local uint64_t last_session_of_thread = 0;
}

Status Session::ShareBudget() {
  std::vector<CacheDemand> demands;
  uint64_t f16_bytes = 0;
  for (const CacheGroup* group : groups) {
    demands.push_back(group->Demand());
    f16_bytes += demands.back().f16_bytes;
  }
  if (!config.ok() || f16_bytes == 0) return {};
  const std::vector<double> parts = qevict::ShareBudget(*config, demands);
  for (size_t i = 0; i < groups.size(); ++i) {
    QEVICT_RETURN_IF_ERROR(groups[i]->SetBudgetFraction(parts[i]));
  }
  return {};
}

size_t Session::ReportedBytes(const ggml_tensor* tensor) {
  const size_t full = ggml_nbytes(tensor);
  if (!config.ok() || config->preset == Preset::kFull || config->report == ReportedSize::kFull ||
      config->EffectivePrefill() != Prefill::kBounded) {
    return full;
  }
  if (config->budget_bytes == 0) {
    const double tokens = config->budget_tokens ? config->budget_tokens : tensor->ne[1];
    const double share = config->budget_fraction * tokens / static_cast<double>(tensor->ne[1]);
    return std::min(full, static_cast<size_t>(share * static_cast<double>(full)) + 1);
  }
  // The first tensors are reported in full until the budget is used up: their sum is what counts,
  // and nobody says how many will follow.
  const auto [known, is_new] = reported_bytes_.try_emplace(tensor, 0);
  if (is_new) {
    known->second =
        std::min<uint64_t>(full, std::max<uint64_t>(config->budget_bytes - reported_, 1));
    reported_ = std::min(config->budget_bytes, reported_ + known->second);
  }
  return known->second;
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
  sessions_.push_back(Make());
  last_session_of_thread = sessions_.back()->id;
  return sessions_.back();
}

std::shared_ptr<Session> Sessions::CreateUnlisted() {
  const std::lock_guard lock(mutex_);
  return Make();
}

/// With mutex_ held.
std::shared_ptr<Session> Sessions::Make() {
  Result<Config> config = configured_config_;
  if (!configured_) {
    const char* text = std::getenv("QEVICT_CONFIG");
    if (text && *text) config = LoadConfig(text);
  }
  if (const std::string_view isa = kernels::RefusedIsa(); config.ok() && !isa.empty()) {
    config =
        InvalidArgument("QEVICT_SIMD=" + std::string(isa) +
                        " names no instruction set of this machine and build (scalar, avx2, "
                        "avx512, avx512vnni, neon, neondot): leave it unset for the best there is");
  }
  std::shared_ptr<const codecs::CodecStatistics> statistics;
  if (config.ok() && !config->statistics.empty()) {
    Result<codecs::CodecStatistics> read = codecs::ReadStatistics(config->statistics);
    if (read.ok()) {
      config = codecs::WithAllocatedBits(*config, *read);
      statistics = std::make_shared<codecs::CodecStatistics>(std::move(*read));
    } else {
      config = read.status();
    }
  }
  return std::make_shared<Session>(next_id_++, std::move(config), std::move(statistics));
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
