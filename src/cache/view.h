// DomainView: the columns that a policy sees, made of the units of some layers and sequences.
#pragma once

#include <memory>
#include <vector>

#include "cache/kv_cache_impl.h"
#include "qevict/policy.h"

namespace qevict {

/// Owns the columns of its view; valid as long as the cache does not change.
class DomainView {
 public:
  explicit DomainView(const KvCache::Impl& cache) : cache_(cache) {}

  /// One sequence in one layer, with what is protected of it.
  void Add(uint32_t il, const SeqPlan& plan);
  const View& view();

 private:
  struct Columns {
    std::vector<uint64_t> identity, bytes;
    std::vector<int32_t> position;
    std::vector<uint8_t> n_tokens, codes_k, codes_v, visible;
    std::vector<uint32_t> age;
    std::vector<Rung> rung_k, rung_v;
    std::vector<float> score, prompt, decode;
  };

  const Ladder& LadderOf(uint32_t il);
  void Fill(uint32_t il, const Sequence& s, Columns& c) const;

  const KvCache::Impl& cache_;
  std::vector<std::unique_ptr<Ladder>> ladders_;  // by store
  std::vector<std::unique_ptr<Columns>> columns_;
  std::vector<GroupView> groups_;
  std::vector<SeqId> sequences_;
  View view_;
};

}  // namespace qevict
