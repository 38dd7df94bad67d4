// Units and where their bytes are: records of one window in one layer, the rungs and pools of a layer
// shape, and what a commit does to them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "codecs/codec.h"
#include "qevict/cache.h"
#include "qevict/policy.h"
#include "store/block_pool.h"

namespace qevict {

/// Handles of a unit's two blocks, each with its rung and a flag.
class UnitSides {
 public:
  static constexpr BlockId kNoBlock = (1u << 27) - 1;

  bool has(Side s) const { return block(s) != kNoBlock; }
  BlockId block(Side s) const { return words_[static_cast<size_t>(s)] & kNoBlock; }
  Rung rung(Side s) const { return static_cast<Rung>(words_[static_cast<size_t>(s)] >> 27 & 7u); }
  void Set(Side s, Rung rung, BlockId id) {
    uint32_t& word = words_[static_cast<size_t>(s)];
    word = (word & kFlag) | static_cast<uint32_t>(rung) << 27 | id;
  }
  void Drop(Side s) { Set(s, kFullRung, kNoBlock); }

 protected:
  static constexpr uint32_t kFlag = 1u << 31;
  bool flag(Side s) const { return (words_[static_cast<size_t>(s)] & kFlag) != 0; }
  void set_flag(Side s, bool on) {
    uint32_t& word = words_[static_cast<size_t>(s)];
    word = on ? word | kFlag : word & ~kFlag;
  }

 private:
  uint32_t words_[kSides] = {kNoBlock, kNoBlock};
};

/// One window in one layer. Both sides have a block; neither has one only while a move is under way.
struct UnitRecord : UnitSides {
  WindowId window = kNone;
  float score = 0.0f;         // by generated rows
  float prompt_score = 0.0f;  // by the prompt that is being read, or was read last

  float total_score() const { return score + prompt_score; }

  bool full(Side s) const { return has(s) && rung(s) == kFullRung; }
  /// Both sides are full precision.
  bool full() const { return full(Side::kKeys) && full(Side::kValues); }
  bool empty() const { return !has(Side::kKeys) && !has(Side::kValues); }
  bool holds_codes() const { return rung(Side::kKeys) != 0 || rung(Side::kValues) != 0; }
  /// The layer's ledger names codes of sides that are full precision now.
  bool dormant() const { return flag(Side::kKeys); }
  void set_dormant(bool on) { set_flag(Side::kKeys, on); }
  /// Ranked as full precision, but stays packed.
  bool pinned() const { return flag(Side::kValues); }
  void set_pinned(bool on) { set_flag(Side::kValues, on); }
};
static_assert(sizeof(UnitRecord) == 20);

/// Codes that are kept beside full precision; a side without them has no block.
struct LedgerEntry : UnitSides {
  WindowId window = kNone;
};
static_assert(sizeof(LedgerEntry) == 12);

/// Bytes of records that a unit and each of its blocks cost, two growth steps (1/8) included.
inline constexpr uint64_t kUnitBytes = sizeof(UnitRecord) + sizeof(UnitRecord) / 8;
inline constexpr uint64_t kLedgerBytes = sizeof(LedgerEntry) + sizeof(LedgerEntry) / 8;
inline constexpr uint64_t kBlockBytes = BlockPool::kRecordBytes + BlockPool::kRecordBytes / 8 + 1;

/// One rung of layers of one shape.
struct RungStore {
  std::shared_ptr<const codecs::Codec> codec;  // of layers that have not learned another; null: 0
  std::array<size_t, kSides> head_bytes{};     // of one kv head's block
  std::array<BlockPool*, kSides> pools{};      // of Impl::pools

  BlockPool& pool(Side s) const { return *pools[static_cast<size_t>(s)]; }
  size_t bytes_of_head(Side s) const { return head_bytes[static_cast<size_t>(s)]; }
};

/// What layers of one shape have in common.
struct ShapeStore {
  LayerShape shape{};
  uint32_t n_layers = 0;
  size_t learned_bytes = 0;  // per layer
  std::vector<RungStore> rungs;
  uint64_t dormant_bytes = 0;  // of blocks that ledgers name

  /// What a block costs, its record included.
  uint64_t BlockCost(Side s, Rung r) const { return rungs[r].pool(s).block_bytes() + kBlockBytes; }
  uint64_t UnitCost(Rung k, Rung v) const {
    return kUnitBytes + BlockCost(Side::kKeys, k) + BlockCost(Side::kValues, v);
  }
};

/// What a commit does to one unit.
struct UnitMove {
  SeqId seq;
  uint32_t index;  // in units
  Rung k, v;       // kGone: both
  bool pinned = false;
};

/// A unit whose sides change their rungs.
struct UnitWrite {
  UnitRecord* unit;
  std::array<Rung, kSides> to;
  std::array<bool, kSides> moves;   // the side changes its rung
  std::array<bool, kSides> reuses;  // to codes that the ledger has
  std::array<BlockId, kSides> target{UnitSides::kNoBlock, UnitSides::kNoBlock};  // to be written

  /// The side gets a new block.
  bool writes(Side s) const {
    const size_t i = static_cast<size_t>(s);
    return moves[i] && !reuses[i];
  }
  /// The side moves to full precision.
  bool promotes(Side s) const {
    const size_t i = static_cast<size_t>(s);
    return moves[i] && to[i] == kFullRung;
  }
  /// The side moves to codes, new or from the ledger.
  bool demotes(Side s) const {
    const size_t i = static_cast<size_t>(s);
    return moves[i] && to[i] != kFullRung;
  }
  bool encodes(Side s) const { return demotes(s) && writes(s); }
  bool promotes() const { return promotes(Side::kKeys) || promotes(Side::kValues); }
  bool demotes() const { return demotes(Side::kKeys) || demotes(Side::kValues); }
  bool encodes() const { return encodes(Side::kKeys) || encodes(Side::kValues); }
};

/// Moves of a commit by kind.
struct SortedMoves {
  std::vector<UnitRecord*> evict;
  std::vector<UnitWrite> write;
  std::vector<std::pair<UnitRecord*, bool>> pin;
};

/// So many blocks of a pool.
struct BlockCount {
  BlockPool* pool;
  size_t n;
};
/// Adds to the count of a pool in a short list.
void CountBlock(std::vector<BlockCount>& counts, BlockPool& pool, size_t n = 1);

struct FreedBlock {
  BlockPool* pool;
  BlockId id;
};

}  // namespace qevict
