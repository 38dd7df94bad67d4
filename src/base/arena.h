// Arena with a hard byte limit: address space is reserved up front, memory is committed page by
// page in dense regions. Why: "bytes of the cache" must be one number that the operating system
// agrees with. Each region keeps its slots dense ([0, n_slots) with no holes; the owner moves the
// last slot into a freed one), so committed pages = resident pages.
//
//   reservation  |region 0: slot slot slot ....|region 1: slot slot ....|
//   resident      ^^^^^^^^^^^^^^^^               ^^^^^^^^^^
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "qevict/status.h"

namespace qevict {

class Arena;

/// A dense array of equal slots inside an Arena. Address-stable for the slots that exist. Not
/// thread-safe.
class ArenaRegion {
 public:
  /// Grows or shrinks to n slots. New slots are zero. Freed pages go back to the system at once.
  /// Errors: kResourceExhausted if the arena's limit or the reservation does not allow it; then
  /// nothing has changed.
  Status Resize(size_t n_slots);
  uint8_t* slot(size_t i) const { return base_ + i * slot_bytes_; }
  size_t n_slots() const { return n_slots_; }
  size_t max_slots() const { return max_slots_; }
  size_t slot_bytes() const { return slot_bytes_; }
  /// Committed bytes (whole pages).
  size_t bytes() const { return committed_; }
  /// What bytes() would be with n slots.
  size_t BytesOf(size_t n) const;

 private:
  friend class Arena;
  ArenaRegion() = default;
  Arena* arena_ = nullptr;
  uint8_t* base_ = nullptr;
  size_t slot_bytes_ = 0, n_slots_ = 0, max_slots_ = 0, committed_ = 0;
};

/// Owns the reservation. Not thread-safe. Regions live as long as the Arena.
class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// Adds a region of up to max_slots slots of slot_bytes each (address space only).
  /// Errors: kResourceExhausted if the address space is refused.
  Result<ArenaRegion*> AddRegion(size_t slot_bytes, size_t max_slots);
  /// Sum of committed bytes over regions; equals the resident size of the mappings.
  size_t bytes() const { return bytes_; }
  size_t peak_bytes() const { return peak_bytes_; }
  void ResetPeak() { peak_bytes_ = bytes_; }
  /// Hard limit in bytes; SIZE_MAX = none. Lowering it below bytes() is allowed: only growth is
  /// refused.
  void SetLimit(size_t limit) { limit_ = limit; }
  size_t limit() const { return limit_; }
  /// Resident bytes of the mappings by /proc/self/smaps (0 where that cannot be read).
  size_t ResidentBytes() const;
  /// Test hook: the n-th growth from now fails with kResourceExhausted (0 = never).
  void FailGrowthAt(size_t n) { fail_at_ = n; }

 private:
  friend class ArenaRegion;
  struct Mapping {
    uint8_t* base;
    size_t bytes;
  };
  std::vector<std::unique_ptr<ArenaRegion>> regions_;
  std::vector<Mapping> mappings_;
  size_t bytes_ = 0, peak_bytes_ = 0, limit_ = SIZE_MAX, fail_at_ = 0;
};

}  // namespace qevict
