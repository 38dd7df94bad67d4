// BlockPool: blocks of one size by handle, with reference counts.
//
//   handle   slots_[handle]   the block's place now; stays what it is while the block lives
//   slot     owners_[slot]    the handle of the block that lies there
//
//   handles   0  1  2  3  4            slots   0  1  2
//   slots_    2  -  0  -  1    <--->   owners_ 2  4  0      pages: 0 ... ceil(3 blocks), no holes
//
// Slots are dense: the last block moves into the place of one that is freed, and the pages behind
// the last slot go back to the system. Whoever holds handles does not notice. A block that several
// windows share (a copy of a stream) is there once; it goes when the last reference goes.
//
// Threads: not thread-safe; data() of different blocks may be read and written concurrently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "qevict/status.h"
#include "store/tight.h"

namespace qevict {

using BlockId = uint32_t;

class BlockPool {
 public:
  static constexpr BlockId kNoBlock = 0xFFFFFFFFu;
  static constexpr uint32_t kMaxRefs = 0xFFFFu;
  /// Bytes of tables that one block costs, growth steps aside.
  static constexpr uint64_t kRecordBytes = sizeof(uint32_t) + sizeof(BlockId) + sizeof(uint16_t);

  /// Address space for max_blocks blocks; commits nothing. checked: keeps checksums, see Seal.
  /// Errors: kResourceExhausted if the address space is refused.
  Status Init(Arena& arena, size_t block_bytes, size_t max_blocks, bool checked);

  size_t block_bytes() const { return block_bytes_; }
  size_t used() const { return owners_.size(); }
  /// One past the highest handle.
  size_t n_handles() const { return slots_.size(); }
  uint8_t* data(BlockId id) const { return region_->slot(slots_[id]); }
  uint32_t refs(BlockId id) const { return refs_[id]; }
  uint32_t slot(BlockId id) const { return slots_[id]; }

  /// Pages and tables for n more blocks, so that n calls of New or Clone cannot fail. Errors:
  /// kResourceExhausted if the system refuses memory; nothing has changed then.
  Status Reserve(size_t n);
  /// A block of zeros with one reference. Requires room (Reserve).
  BlockId New();
  /// A block with the same bytes. Requires room.
  BlockId Clone(BlockId id);
  /// One more reference; false, and nothing done, if there are kMaxRefs.
  bool Ref(BlockId id);
  void Unref(BlockId id);

  /// Gives back what is reserved and not used. Never fails.
  void Trim();
  /// Frees all blocks.
  void Clear();

  /// Handles that are not in use take table space until Compact. True if they are many.
  bool WantsCompaction() const { return slots_.size() > used() + used() / 4 + 64; }
  /// Renumbers handles 0 ... used() - 1. Returns new handles by old ones (kNoBlock: not in use);
  /// whoever holds handles must translate them. Throws std::bad_alloc, nothing has changed then.
  std::vector<BlockId> Compact();

  uint64_t table_bytes() const;
  /// Committed bytes of blocks, whole pages.
  uint64_t page_bytes() const { return region_ == nullptr ? 0 : region_->bytes(); }
  /// What page_bytes() is with n blocks and nothing reserved.
  uint64_t PagesOf(size_t n) const { return region_->BytesOf(n); }
  /// Growth of page_bytes() + table_bytes() by Reserve(n), exactly.
  uint64_t GrowthBytes(size_t n) const;

  /// The block is complete: what it holds must not change any more. For checked pools.
  void Seal(BlockId id);
  /// Slots of blocks that have changed since they were sealed, or whose tables contradict each
  /// other.
  std::vector<size_t> Damaged() const;

 private:
  ArenaRegion* region_ = nullptr;
  size_t block_bytes_ = 0;
  std::vector<uint32_t> slots_;   // [handle]; free handle: the next free one
  std::vector<uint16_t> refs_;    // [handle]; 0: free
  std::vector<BlockId> owners_;   // [slot]
  std::vector<uint32_t> checks_;  // [slot], checked pools; 0: not sealed
  BlockId free_ = kNoBlock;
  size_t n_free_ = 0;
  bool checked_ = false;
};

}  // namespace qevict
