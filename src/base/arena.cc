// Arena on Linux virtual memory.
//
// One anonymous mapping per region, PROT_NONE and MAP_NORESERVE, with one guard page at each end:
//
//   |guard| committed: read/write, touched, resident | reserved: no access, no memory |guard|
//
// The guards keep a read/write range from ever merging with a neighbour of equal permission, so
// that the entries of /proc/self/smaps that lie inside our mappings are exactly ours. Huge pages
// are declined: they would make a page count wrong by up to 511 pages. New pages are touched at
// once, so that counted bytes are resident bytes, and a machine without memory fails here and not
// in the middle of a kernel.
#include "base/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>

namespace qevict {
namespace {

size_t PageBytes() {
  static const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return page_bytes;
}

/// Smallest multiple of a page that holds n bytes. Requires n <= SIZE_MAX - page.
size_t RoundToPages(size_t n) { return (n + PageBytes() - 1) / PageBytes() * PageBytes(); }

}  // namespace

size_t ArenaRegion::BytesOf(size_t n) const { return RoundToPages(n * slot_bytes_); }

Status ArenaRegion::Resize(size_t n_slots) {
  if (n_slots > max_slots_) {
    return ResourceExhausted("arena region cannot hold " + std::to_string(n_slots) +
                             " slots: " + std::to_string(max_slots_) + " are reserved");
  }
  const size_t target = RoundToPages(n_slots * slot_bytes_);
  if (n_slots > n_slots_) {
    if (arena_->fail_at_ != 0 && --arena_->fail_at_ == 0) {
      return ResourceExhausted("arena growth refused by the test hook");
    }
    const size_t added = target - committed_;
    if (added > 0) {
      if (arena_->bytes_ > arena_->limit_ || added > arena_->limit_ - arena_->bytes_) {
        return ResourceExhausted("arena holds " + std::to_string(arena_->bytes_) +
                                 " bytes and cannot add " + std::to_string(added) +
                                 ": the limit is " + std::to_string(arena_->limit_));
      }
      if (mprotect(base_ + committed_, added, PROT_READ | PROT_WRITE) != 0) {
        return ResourceExhausted("the system refused " + std::to_string(added) +
                                 " more bytes of memory");
      }
    }
    // The tail of the last committed page may hold slots that were given up; fresh pages are zero
    // by themselves.
    const size_t used = n_slots_ * slot_bytes_;
    std::memset(base_ + used, 0, std::min(committed_, n_slots * slot_bytes_) - used);
    for (size_t at = committed_; at < target; at += PageBytes()) {
      *static_cast<volatile uint8_t*>(base_ + at) = 0;
    }
  } else if (target < committed_) {
    // Memory goes back first, then access ends. Both succeed on a mapping of our own that nobody
    // locked into memory.
    madvise(base_ + target, committed_ - target, MADV_DONTNEED);
    mprotect(base_ + target, committed_ - target, PROT_NONE);
  }
  arena_->bytes_ = arena_->bytes_ - committed_ + target;
  arena_->peak_bytes_ = std::max(arena_->peak_bytes_, arena_->bytes_);
  committed_ = target;
  n_slots_ = n_slots;
  return {};
}

Arena::~Arena() {
  for (const Mapping& m : mappings_) munmap(m.base, m.bytes);
}

Result<ArenaRegion*> Arena::AddRegion(size_t slot_bytes, size_t max_slots) {
  if (slot_bytes == 0) return InvalidArgument("arena slots need at least one byte");
  const size_t page = PageBytes();
  if (max_slots > (SIZE_MAX / 2 - 4 * page) / slot_bytes) {
    return ResourceExhausted(std::to_string(max_slots) + " slots of " + std::to_string(slot_bytes) +
                             " bytes exceed the address space");
  }
  const size_t reserve = RoundToPages(max_slots * slot_bytes) + 2 * page;
  void* base =
      mmap(nullptr, reserve, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return ResourceExhausted("the system refused " + std::to_string(reserve) +
                             " bytes of address space");
  }
  madvise(base, reserve, MADV_NOHUGEPAGE);  // kernels without huge pages refuse it, rightly
  std::unique_ptr<ArenaRegion> region(new ArenaRegion);
  region->arena_ = this;
  region->base_ = static_cast<uint8_t*>(base) + page;
  region->slot_bytes_ = slot_bytes;
  region->max_slots_ = max_slots;
  mappings_.push_back({static_cast<uint8_t*>(base), reserve});
  regions_.push_back(std::move(region));
  return regions_.back().get();
}

size_t Arena::ResidentBytes() const {
  std::FILE* smaps = std::fopen("/proc/self/smaps", "re");
  if (smaps == nullptr) return 0;
  std::vector<Mapping> sorted = mappings_;
  std::sort(sorted.begin(), sorted.end(),
            [](const Mapping& a, const Mapping& b) { return a.base < b.base; });
  // Entries that reach beyond a mapping are no-access ranges merged with a neighbour's: nothing is
  // resident in them.
  const auto is_ours = [&](uintptr_t begin, uintptr_t end) {
    auto after = std::upper_bound(sorted.begin(), sorted.end(), begin,
                                  [](uintptr_t address, const Mapping& m) {
                                    return address < reinterpret_cast<uintptr_t>(m.base);
                                  });
    if (after == sorted.begin()) return false;
    const Mapping& m = *(after - 1);
    return end <= reinterpret_cast<uintptr_t>(m.base) + m.bytes;
  };
  size_t total = 0;
  bool ours = false;
  char line[512];
  while (std::fgets(line, sizeof line, smaps) != nullptr) {
    unsigned long long begin = 0, end = 0, kib = 0;
    char permissions[8] = {};
    if (std::sscanf(line, "%llx-%llx %7s", &begin, &end, permissions) == 3) {
      ours = is_ours(static_cast<uintptr_t>(begin), static_cast<uintptr_t>(end));
    } else if (ours && std::sscanf(line, "Rss: %llu kB", &kib) == 1) {
      total += static_cast<size_t>(kib) * 1024;
    }
  }
  std::fclose(smaps);
  return total;
}

}  // namespace qevict
