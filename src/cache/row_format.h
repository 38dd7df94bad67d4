// State rows: how a packed or evicted token looks inside the f16 row that an engine saves for it.
// Byte-exact specification: docs/formats/state-row.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "qevict/config.h"
#include "qevict/status.h"

namespace qevict {

inline constexpr size_t kRowHeaderBytes = 24;
inline constexpr uint8_t kRowVersion = 1;
/// Both words are NaN as fp16 and as bf16; no model writes a row that starts with them.
inline constexpr uint16_t kRowMagic0 = 0x7FD1, kRowMagic1 = 0x7FD6;
/// Positions beyond this are refused: they would make RoPE tables of any size.
inline constexpr int32_t kMaxPosition = 1 << 24;

/// What a record says. Values are part of the format: never renumber.
enum class RowKind : uint8_t {
  kPackedK = 1,
  kPackedV = 2,
  kEvictedK = 3,
  kEvictedV = 4,
  kFull = 5,  ///< not in rows: an entry of the row memory
};

struct RowRecord {
  static constexpr uint8_t kPositional = 1, kSink = 2;

  RowKind kind = RowKind::kFull;
  uint8_t bits = 0, window = 0;  ///< of the cache that wrote it
  uint8_t flags = 0;
  uint8_t offset = 0, n_tokens = 0;  ///< place in the window
  uint8_t share = 0, n_shares = 0;   ///< which part of the window's codes follows
  uint32_t birth = 0;                ///< names the window inside one saved state
  int32_t pos0 = 0;
  float score = 0.0f;

  bool packed() const { return kind == RowKind::kPackedK || kind == RowKind::kPackedV; }
  bool is_k() const { return kind == RowKind::kPackedK || kind == RowKind::kEvictedK; }
  /// Evicted in every layer: no window stands behind it.
  bool gone() const { return n_tokens == 0; }
};

bool IsRowRecord(const uint16_t* row, size_t n_words);
bool IsZeroRow(const uint16_t* row, size_t n_words);
void WriteRowHeader(const RowRecord& record, uint16_t* row);
/// Errors: kDataLoss for a record that contradicts itself or comes from another configuration.
Result<RowRecord> ReadRowHeader(const uint16_t* row, size_t n_words, const Config& config,
                                bool is_k);

/// Hash of a layer's key row and of all rows that were saved (restored) before it: keys without
/// positions are equal wherever a token is repeated, but what leads up to them is not.
struct RowChain {
  uint64_t before = 0, hash = 0;
  uint32_t cell = UINT32_MAX;  ///< of the last row

  /// The hash with `row` as the next one; a cell that is read twice in a row counts once.
  uint64_t Next(uint32_t layer, uint32_t cell, const uint16_t* row, size_t n_words);
};

/// Process-wide memory of full rows: where a saved row stood, found again by its RowChain hash.
/// Bounded; the oldest of a bucket is forgotten. Thread-safe.
void RememberRow(uint64_t hash, const RowRecord& place);
bool RecallRow(uint64_t hash, RowRecord& place);

}  // namespace qevict
