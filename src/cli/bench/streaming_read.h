// Reading through memory: what bandwidth there is, and empty processor caches afterwards.
#pragma once

#include <cstdint>
#include <vector>

#include "base/parallel.h"

namespace qevict::cli {

/// A buffer that does not fit into the processor's caches.
class StreamingRead {
 public:
  explicit StreamingRead(ParallelFor& pool) : pool_(pool), words_(Bytes() / 8, 1) {}

  size_t bytes() const { return words_.size() * 8; }
  /// Reads everything with all threads; GB/s.
  double Run();

 private:
  static size_t Bytes();

  ParallelFor& pool_;
  std::vector<uint64_t> words_;
  volatile uint64_t check_ = 0;  // keeps the reads
};

}  // namespace qevict::cli
