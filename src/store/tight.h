// Vectors that grow in small steps, so that capacity can be charged to a budget: what counts is
// capacity, not size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace qevict {

/// What a vector of n elements grows to: a sixteenth more, at least four.
inline size_t TightCapacity(size_t n) { return n + std::max<size_t>(4, n / 16); }

/// Grows capacity to at least n. Throws std::bad_alloc, and nothing has changed then.
template <typename T>
void GrowTight(std::vector<T>& v, size_t n) {
  if (v.capacity() < n) v.reserve(TightCapacity(n));
}

/// Gives capacity beyond two growth steps back, if the system has room for a copy meanwhile.
template <typename T>
void TrimTight(std::vector<T>& v) noexcept {
  const size_t n = v.size();
  if (v.capacity() <= (n == 0 ? 0 : n + 2 * std::max<size_t>(4, n / 16))) return;
  try {
    std::vector<T> fresh;
    if (n > 0) fresh.reserve(TightCapacity(n));
    fresh.assign(v.begin(), v.end());
    v.swap(fresh);
  } catch (const std::bad_alloc&) {  // it stays as large as it is
  }
}

template <typename T>
uint64_t CapacityBytes(const std::vector<T>& v) {
  return v.capacity() * sizeof(T);
}

/// Capacity in bytes after GrowTight to size + added.
template <typename T>
uint64_t GrownBytes(const std::vector<T>& v, size_t added) {
  const size_t n = v.size() + added;
  return (v.capacity() >= n ? v.capacity() : TightCapacity(n)) * sizeof(T);
}

}  // namespace qevict
