#include "cli/bench/streaming_read.h"

#include <unistd.h>

#include <algorithm>

#include "cli/progress.h"

namespace qevict::cli {
namespace {

constexpr size_t kReadBytes = size_t{256} << 20, kReadChunk = size_t{1} << 20;

}  // namespace

size_t StreamingRead::Bytes() {
  const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
  const size_t wanted = l3 > 0 ? 4 * static_cast<size_t>(l3) : 0;
  return (std::max(kReadBytes, wanted) + kReadChunk - 1) / kReadChunk * kReadChunk;
}

double StreamingRead::Run() {
  const size_t n_chunks = bytes() / kReadChunk, n_words = kReadChunk / 8;
  std::vector<uint64_t> sums(n_chunks);
  const Timer timer;
  pool_.For(n_chunks, [&](size_t chunk, unsigned) {
    const uint64_t* words = words_.data() + chunk * n_words;
    uint64_t sum = 0;
    for (size_t i = 0; i < n_words; ++i) sum += words[i];
    sums[chunk] = sum;
  });
  const double ms = timer.ms();
  for (const uint64_t sum : sums) check_ = check_ + sum;
  return static_cast<double>(bytes()) / ms / 1e6;
}

}  // namespace qevict::cli
