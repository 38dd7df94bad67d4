#include "cache/row_format.h"

#include <bit>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "codecs/codec.h"

namespace qevict {
namespace {

template <typename T>
void Put(uint8_t* bytes, size_t at, T value) {
  std::memcpy(bytes + at, &value, sizeof value);
}
template <typename T>
T Get(const uint8_t* bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes + at, sizeof value);
  return value;
}

Status Damaged(const std::string& what) { return DataLoss("a saved row is damaged: " + what); }

Status CheckPlace(const RowRecord& r, const Config& config) {
  const uint8_t tag = codecs::CodecTag(config);
  if (r.bits != tag || r.window != config.window) {
    return DataLoss("a saved row has windows of " + std::to_string(r.window) + " tokens (" +
                    codecs::CodecTagName(r.bits) + "); this cache has " +
                    std::to_string(config.window) + " (" + codecs::CodecTagName(tag) + ")");
  }
  if (r.gone()) return {};
  if (r.n_tokens > r.window || r.offset >= r.n_tokens) return Damaged("token outside its window");
  if ((r.flags & ~(RowRecord::kPositional | RowRecord::kSink)) != 0)
    return Damaged("unknown flags");
  if (r.pos0 < -kMaxPosition || r.pos0 >= kMaxPosition) {
    return Damaged("position " + std::to_string(r.pos0));
  }
  return {};
}

}  // namespace

bool IsRowRecord(const uint16_t* row, size_t n_words) {
  return n_words * 2 >= kRowHeaderBytes && row[0] == kRowMagic0 && row[1] == kRowMagic1;
}

bool IsZeroRow(const uint16_t* row, size_t n_words) {
  for (size_t i = 0; i < n_words; ++i) {
    if (row[i] != 0) return false;
  }
  return true;
}

void WriteRowHeader(const RowRecord& record, uint16_t* row) {
  uint8_t bytes[kRowHeaderBytes];
  Put(bytes, 0, kRowMagic0);
  Put(bytes, 2, kRowMagic1);
  Put(bytes, 4, kRowVersion);
  Put(bytes, 5, static_cast<uint8_t>(record.kind));
  const uint8_t log2_window = static_cast<uint8_t>(std::countr_zero(uint32_t{record.window}));
  Put(bytes, 6, static_cast<uint8_t>(record.bits | log2_window << 4));
  Put(bytes, 7, record.flags);
  Put(bytes, 8, record.offset);
  Put(bytes, 9, record.n_tokens);
  Put(bytes, 10, record.share);
  Put(bytes, 11, record.n_shares);
  Put(bytes, 12, record.birth);
  Put(bytes, 16, record.pos0);
  Put(bytes, 20, record.score);
  std::memcpy(row, bytes, sizeof bytes);
}

Result<RowRecord> ReadRowHeader(const uint16_t* row, size_t n_words, const Config& config,
                                bool is_k) {
  if (!IsRowRecord(row, n_words)) return Damaged("no record");
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(row);
  if (bytes[4] > kRowVersion) {
    return Unimplemented("a saved row has format version " + std::to_string(bytes[4]) +
                         "; this build reads up to " + std::to_string(kRowVersion));
  }
  RowRecord r;
  if (bytes[4] == 0 || bytes[5] < 1 || bytes[5] > 4) return Damaged("unknown version or kind");
  r.kind = static_cast<RowKind>(bytes[5]);
  if (r.is_k() != is_k) return Damaged("keys and values are exchanged");
  r.bits = bytes[6] & 15;
  r.window = static_cast<uint8_t>(1u << std::min(bytes[6] >> 4, 7));
  r.flags = bytes[7];
  r.offset = bytes[8];
  r.n_tokens = bytes[9];
  r.share = bytes[10];
  r.n_shares = bytes[11];
  r.birth = Get<uint32_t>(bytes, 12);
  r.pos0 = Get<int32_t>(bytes, 16);
  r.score = Get<float>(bytes, 20);
  QEVICT_RETURN_IF_ERROR(CheckPlace(r, config));
  if (r.packed() && (r.gone() || r.n_shares > r.n_tokens || r.share >= r.n_shares)) {
    return Damaged("share outside its window");
  }
  return r;
}

// --- Row memory ----------------------------------------------------------------------------------

namespace {

constexpr size_t kBuckets = size_t{1} << 16, kWays = 8;  // half a million rows

struct Entry {
  uint64_t hash;  // 0 = free
  uint32_t birth;
  int32_t pos0;
  float score;
  uint8_t flags, offset, n_tokens, window;
};

class RowMemory {
 public:
  static RowMemory& Get() {
    static RowMemory memory;
    return memory;
  }
  void Insert(uint64_t hash, const RowRecord& r) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.empty()) {
      entries_.resize(kBuckets * kWays);
      next_.resize(kBuckets);
    }
    const size_t bucket = hash % kBuckets;
    size_t way = kWays;
    for (size_t i = 0; i < kWays; ++i) {
      if (entries_[bucket * kWays + i].hash == hash) way = i;
    }
    if (way == kWays) way = next_[bucket]++ % kWays;
    entries_[bucket * kWays + way] = {hash,    r.birth,  r.pos0,     r.score,
                                      r.flags, r.offset, r.n_tokens, r.window};
  }
  bool Find(uint64_t hash, RowRecord& r) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.empty()) return false;
    const size_t bucket = hash % kBuckets;
    for (size_t i = 0; i < kWays; ++i) {
      const Entry& e = entries_[bucket * kWays + i];
      if (e.hash != hash) continue;
      r = {};
      r.kind = RowKind::kFull;
      r.window = e.window;
      r.flags = e.flags;
      r.offset = e.offset;
      r.n_tokens = e.n_tokens;
      r.birth = e.birth;
      r.pos0 = e.pos0;
      r.score = e.score;
      return true;
    }
    return false;
  }

 private:
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<uint8_t> next_;
};

}  // namespace

uint64_t RowChain::Next(uint32_t layer, uint32_t next_cell, const uint16_t* row, size_t n_words) {
  if (next_cell != cell) before = hash;
  cell = next_cell;
  hash = before ^ (0x9E3779B97F4A7C15u * (layer + 1) + n_words);
  for (size_t i = 0; i < n_words; ++i) {
    hash = (hash ^ row[i]) * 0xD6E8FEB86659FD93u;
    hash ^= hash >> 32;
  }
  if (hash == 0) hash = 1;
  return hash;
}

void RememberRow(uint64_t hash, const RowRecord& place) { RowMemory::Get().Insert(hash, place); }
bool RecallRow(uint64_t hash, RowRecord& place) { return RowMemory::Get().Find(hash, place); }

}  // namespace qevict
