#include "store/block_pool.h"

#include <cstring>
#include <string>

namespace qevict {
namespace {

/// Never 0, which says "not sealed".
uint32_t Checksum(const uint8_t* data, size_t n) {
  uint32_t hash = 2166136261u;
  for (size_t i = 0; i < n; ++i) hash = (hash ^ data[i]) * 16777619u;
  return hash == 0 ? 1 : hash;
}

}  // namespace

Status BlockPool::Init(Arena& arena, size_t block_bytes, size_t max_blocks, bool checked) {
  Result<ArenaRegion*> region = arena.AddRegion(block_bytes, max_blocks);
  if (!region.ok()) return region.status();
  region_ = *region;
  block_bytes_ = block_bytes;
  checked_ = checked;
  return {};
}

Status BlockPool::Reserve(size_t n) {
  const size_t fresh = n > n_free_ ? n - n_free_ : 0;
  try {
    GrowTight(slots_, slots_.size() + fresh);
    GrowTight(refs_, refs_.size() + fresh);
    GrowTight(owners_, owners_.size() + n);
    if (checked_) GrowTight(checks_, checks_.size() + n);
  } catch (const std::bad_alloc&) {
    Trim();
    return ResourceExhausted("out of memory");
  }
  if (region_->n_slots() >= used() + n) return {};
  Status grown = region_->Resize(used() + n);
  if (!grown.ok()) Trim();
  return grown;
}

BlockId BlockPool::New() {
  BlockId id = free_;
  if (id == kNoBlock) {
    id = static_cast<BlockId>(slots_.size());
    slots_.push_back(0);
    refs_.push_back(0);
  } else {
    free_ = slots_[id];
    --n_free_;
  }
  slots_[id] = static_cast<uint32_t>(used());
  refs_[id] = 1;
  owners_.push_back(id);
  if (checked_) checks_.push_back(0);
  std::memset(data(id), 0, block_bytes_);  // the slot may have had another owner
  return id;
}

BlockId BlockPool::Clone(BlockId id) {
  const BlockId copy = New();
  std::memcpy(data(copy), data(id), block_bytes_);
  if (checked_) checks_[slots_[copy]] = checks_[slots_[id]];
  return copy;
}

bool BlockPool::Ref(BlockId id) {
  if (refs_[id] == kMaxRefs) return false;
  ++refs_[id];
  return true;
}

void BlockPool::Unref(BlockId id) {
  if (--refs_[id] > 0) return;
  const uint32_t slot = slots_[id];
  const auto last = static_cast<uint32_t>(used() - 1);
  if (slot != last) {
    std::memcpy(region_->slot(slot), region_->slot(last), block_bytes_);
    owners_[slot] = owners_[last];
    slots_[owners_[slot]] = slot;
    if (checked_) checks_[slot] = checks_[last];
  }
  owners_.pop_back();
  if (checked_) checks_.pop_back();
  slots_[id] = free_;
  free_ = id;
  ++n_free_;
}

void BlockPool::Trim() {
  if (region_->n_slots() > used()) (void)region_->Resize(used());  // shrinking cannot fail
  TrimTight(slots_);
  TrimTight(refs_);
  TrimTight(owners_);
  TrimTight(checks_);
  if (used() == 0) Clear();
}

void BlockPool::Clear() {
  std::vector<uint32_t>().swap(slots_);
  std::vector<uint16_t>().swap(refs_);
  std::vector<BlockId>().swap(owners_);
  std::vector<uint32_t>().swap(checks_);
  free_ = kNoBlock;
  n_free_ = 0;
  (void)region_->Resize(0);
}

std::vector<BlockId> BlockPool::Compact() {
  std::vector<BlockId> to(slots_.size(), kNoBlock);
  std::vector<uint32_t> slots;
  std::vector<uint16_t> refs;
  GrowTight(slots, used());
  GrowTight(refs, used());
  for (uint32_t slot = 0; slot < used(); ++slot) {
    to[owners_[slot]] = slot;
    refs.push_back(refs_[owners_[slot]]);
    slots.push_back(slot);
  }
  for (uint32_t slot = 0; slot < used(); ++slot) owners_[slot] = slot;
  slots_.swap(slots);
  refs_.swap(refs);
  free_ = kNoBlock;
  n_free_ = 0;
  return to;
}

uint64_t BlockPool::table_bytes() const {
  return CapacityBytes(slots_) + CapacityBytes(refs_) + CapacityBytes(owners_);
}

uint64_t BlockPool::GrowthBytes(size_t n) const {
  const size_t fresh = n > n_free_ ? n - n_free_ : 0;
  const uint64_t tables =
      GrownBytes(slots_, fresh) + GrownBytes(refs_, fresh) + GrownBytes(owners_, n);
  return tables - table_bytes() + std::max(region_->BytesOf(used() + n), region_->bytes()) -
         region_->bytes();
}

void BlockPool::Seal(BlockId id) {
  if (checked_) checks_[slots_[id]] = Checksum(data(id), block_bytes_);
}

std::vector<size_t> BlockPool::Damaged() const {
  std::vector<size_t> damaged;
  for (size_t slot = 0; slot < used(); ++slot) {
    const BlockId id = owners_[slot];
    bool sound = id < slots_.size() && slots_[id] == slot && refs_[id] > 0;
    if (checked_ && checks_[slot] != 0)
      sound = sound && checks_[slot] == Checksum(region_->slot(slot), block_bytes_);
    if (!sound) damaged.push_back(slot);
  }
  return damaged;
}

}  // namespace qevict
