// Feeds arbitrary bytes to the restore of state rows and asks the validator after each piece.
// Input, by bit 1 of the first byte:
//   0  pieces of [layer and kind, cell, count] and rows; a nibble decides when a restore ends
//   1  patches [row byte, value] to a valid saved state, which is then restored
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/half.h"
#include "base/parallel.h"
#include "base/rope.h"
#include "qevict/cache.h"

namespace {

constexpr uint32_t kCells = 256;
constexpr size_t kRowWords = 32;
constexpr uint32_t kTokens = 250;

std::unique_ptr<qevict::KvCache> MakeCache(bool bounded) {
  using qevict::Elem;
  qevict::Config config;
  config.check = true;
  config.sinks = 2;
  config.recents = 8;
  if (bounded) {
    config.budget_bytes = 46000;
  } else {
    config.budget_fraction = 1.0;
    config.budget_tokens = 160;
  }
  const qevict::LayerShape shape{2, 16, 16, Elem::kF16, Elem::kF16};
  auto cache = qevict::KvCache::Create(config, {shape, shape}, 2, kCells);
  if (!cache.ok()) std::abort();
  qevict::RopeParams rope;
  rope.pairing = qevict::RopePairing::kHalves;
  rope.n_dims = 8;
  for (uint32_t il = 0; il < 2; ++il) {
    if (!cache.value()->SetRope(il, rope).ok()) std::abort();
  }
  return std::move(cache.value());
}

void Check(const qevict::KvCache& cache) {
  const std::vector<std::string> violations = cache.Validate();
  if (violations.empty()) return;
  std::fprintf(stderr, "%s\n", violations.front().c_str());
  std::abort();
}

/// A sequence of 250 tokens in stream 0, routed once.
void Fill(qevict::KvCache& cache, qevict::ParallelFor& pool) {
  const qevict::SeqId seq = cache.CreateSequence(0);
  std::vector<qevict::TokenSpec> tokens;
  for (uint32_t i = 0; i < kTokens; ++i) tokens.push_back({seq, i, static_cast<int32_t>(i), true});
  std::vector<qevict::TokenRef> refs;
  (void)cache.NoteStep(seq, kTokens, false);
  if (!cache.Append(tokens, refs).ok()) return;
  std::vector<float> rows(kTokens * kRowWords);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 97) - 48.0f;
  for (uint32_t il = 0; il < 2; ++il) {
    if (!cache.WriteK(il, refs, rows.data(), kRowWords, pool).ok()) return;
    if (!cache.WriteV(il, refs, rows.data(), kRowWords, pool).ok()) return;
  }
  if (cache.NoteStep(seq, 1, true)) (void)cache.RouteAll(seq, 8, pool);
}

void RestorePatched(qevict::KvCache& cache, qevict::ParallelFor& pool, const uint8_t* data,
                    size_t size) {
  Fill(cache, pool);
  constexpr size_t kPart = kCells * kRowWords;  // [K, V][layer][cell][word]
  std::vector<uint16_t> rows(4 * kPart);
  for (uint32_t il = 0; il < 2; ++il) {
    for (uint32_t cell = 0; cell < kCells; ++cell) {
      cache.ReadRowK(il, 0, cell, rows.data() + il * kPart + cell * kRowWords);
      cache.ReadRowV(il, 0, cell, rows.data() + (2 + il) * kPart + cell * kRowWords);
    }
  }
  uint8_t* bytes = reinterpret_cast<uint8_t*>(rows.data());
  for (size_t at = 0; at + 3 <= size; at += 3) {
    bytes[(data[at] * 256u + data[at + 1]) % (rows.size() * 2)] = data[at + 2];
  }
  for (uint32_t part = 0; part < 4; ++part) {
    for (uint32_t cell = 0; cell < kCells; cell += 64) {
      const uint16_t* from = rows.data() + part * kPart + cell * kRowWords;
      (void)(part < 2 ? cache.RestoreRowsK(part, 1, cell, 64, from)
                      : cache.RestoreRowsV(part - 2, 1, cell, 64, from));
      Check(cache);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  const auto cache = MakeCache((data[0] & 1) != 0);
  const auto pool = qevict::MakeSerial();
  if ((data[0] & 2) != 0) RestorePatched(*cache, *pool, data + 1, size - 1);
  size_t at = (data[0] & 2) != 0 ? size : 1;
  while (at + 3 <= size) {
    const uint8_t op = data[at], cell = data[at + 1] % kCells;
    const uint32_t n = data[at + 2] % (kCells - cell + 1);
    at += 3;
    std::vector<uint16_t> rows(n * kRowWords);
    const size_t bytes = std::min(rows.size() * 2, size - at);
    if (bytes > 0) std::memcpy(rows.data(), data + at, bytes);
    at += bytes;
    const uint32_t il = op & 1, stream = (op >> 1) & 1;
    if (op & 4) {
      (void)cache->RestoreRowsV(il, stream, cell, n, rows.data());
    } else {
      (void)cache->RestoreRowsK(il, stream, cell, n, rows.data());
    }
    Check(*cache);
    if ((op >> 4) == 1) cache->FinishRestore();
    if ((op >> 4) == 2) {
      for (const qevict::SeqId seq : cache->Sequences(stream)) {
        (void)cache->RouteAll(seq, n, *pool);
        Check(*cache);
      }
    }
  }
  cache->FinishRestore();
  Check(*cache);
  return 0;
}
