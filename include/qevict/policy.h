// Policy: a pure function from a read-only view of what a cache holds to a plan of where every
// window shall be. No storage, SIMD or ggml here.
//
// A *domain* is everything that shares one budget: all layers and all sequences of a stream (or of
// all streams, if the budget is absolute). A *group* is what has one ranking: all kv heads of a
// layer, or one kv head (Config::per_head). A *unit* is one window in one group; keys and values
// of a unit stand on a *rung* of the ladder each: 0 = 16 bit, 1 ... n-1 = packed formats, gone.
//
//   View   domain -> groups (one for each sequence, layer and head set) -> columns over windows
//   Plan   the same index space: rungs of K and V
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <span>
#include <string_view>
#include <vector>

#include "qevict/config.h"
#include "qevict/ladder.h"
#include "qevict/status.h"

namespace qevict {

/// One window of a group on one rung, one side.
struct RungCost {
  uint32_t bytes = 0;       ///< block of all the group's kv heads, and its record
  float distortion = 0.0f;  ///< expected squared error over the rows' energy; 0 full, 1 gone
};

/// What the rungs of a group cost.
struct Ladder {
  uint32_t n_rungs = 1;     ///< full precision included
  uint32_t unit_bytes = 0;  ///< record of a unit, whatever its rungs
  std::array<std::array<RungCost, kMaxRungs>, kSides> cost{};  ///< [Side][Rung]

  uint64_t UnitCost(Rung k, Rung v) const {
    if (k == kGone && v == kGone) return 0;
    const auto side = [this](Side s, Rung r) -> uint64_t {
      return r == kGone ? 0 : cost[static_cast<size_t>(s)][r].bytes;
    };
    return unit_bytes + side(Side::kKeys, k) + side(Side::kValues, v);
  }
};

/// Columns that a policy may ask for (Policy::needs). Collected only then.
enum class Stat : uint8_t {
  kScore,        ///< Config::score: prompt's and generation's sums together; see docs/policies.md
  kPromptMass,   ///< attention mass of the prompt's last Config::init_rows rows, mean over heads
  kDecodeMass,   ///< attention mass of generated rows, mean over heads
  kObservation,  ///< per token: mass of the last Config::init_rows rows; GroupView::tokens
  kCount
};
using StatSet = uint32_t;  ///< bit (1 << Stat)
constexpr StatSet Bit(Stat s) { return 1u << static_cast<unsigned>(s); }

/// What a column is and what collecting it takes, in the order of Stat.
struct StatInfo {
  std::string_view name, meaning;
  uint32_t window_bytes;  ///< of each window of a group, charged to the budget
  uint32_t token_bytes;   ///< of each token of a group, while an event lasts; not charged
};
inline constexpr StatInfo kStatInfo[] = {
    {"score", "attention of the prompt's last rows and of all generated ones", 8, 0},
    {"prompt_mass", "attention of the prompt's last rows", 4, 0},
    {"decode_mass", "attention of generated rows", 4, 0},
    {"observation", "attention of the prompt's last rows, token by token", 0, 4}};
static_assert(std::size(kStatInfo) == static_cast<size_t>(Stat::kCount));

/// One group: the windows of one sequence in one layer (or one kv head of it), oldest first.
/// Windows that are gone in this group are not listed.
struct GroupView {
  uint32_t sequence = 0;  ///< index of the sequence within the domain, oldest first
  uint32_t layer = 0;     ///< layer of the model
  uint32_t head = 0;      ///< first kv head
  uint32_t n_heads = 1;   ///< kv heads of the group
  const Ladder* ladder = nullptr;
  uint64_t token_bytes = 0;    ///< f16 bytes of one token: the group's weight when bytes are shared
  uint64_t reserve_bytes = 0;  ///< of windows that may arrive before the next event
  uint64_t n_rows_scored = 0;  ///< query rows that Stat::kScore of the oldest window comes from
  std::span<const uint64_t> identity;  ///< rises with every window created, never used again
  std::span<const int32_t> position;   ///< of token 0
  std::span<const uint8_t> n_tokens;
  std::span<const uint32_t> age;         ///< tokens of the sequence behind the window
  std::span<const Rung> rung_k, rung_v;  ///< where the window is now
  /// Bit r: codes of rung r exist, attended or dormant (moving there writes nothing). Bit 0 unused.
  std::span<const uint8_t> codes_k, codes_v;
  std::span<const uint64_t>
      bytes;  ///< what the unit costs now; dormant codes included if they count
  std::span<const uint8_t> is_protected;  ///< sinks, recents, windows a row may still be added to
  std::span<const uint8_t> visible;       ///< 0: no row can see it any more (ranks last, always)
  /// [window]; empty if nobody asked for it.
  std::array<std::span<const float>, static_cast<size_t>(Stat::kCount)> stats{};
  /// Stat::kObservation: [window * Config::window + token]; empty if nobody asked for it.
  std::span<const float> tokens;

  size_t size() const { return identity.size(); }
  std::span<const float> stat(Stat s) const { return stats[static_cast<size_t>(s)]; }
};

struct View {
  std::span<const GroupView> groups;  ///< in no fixed order
  uint32_t n_sequences = 0;
};

/// Where generation stands; policies state in `due` when they want to plan.
struct Phase {
  enum Kind : uint8_t { kPromptChunk, kPromptEnd, kDecode, kNewQuestion } kind = kDecode;
  uint64_t step = 0;    ///< decode steps since the sequence began
  uint64_t n_rows = 1;  ///< rows of this step
};

/// What all units of the view may cost together, protected ones and reserves included.
struct Budget {
  uint64_t bytes = 0;
};

struct Placement {
  Rung k = kGone, v = kGone;
  bool pinned = false;  ///< ranked as full precision, but stays packed (Promotion::kPinned)
  bool operator==(const Placement&) const = default;
};

/// placements[g][i] of groups[g], window i. Protected windows keep their rungs whatever it says.
struct Plan {
  std::vector<std::vector<Placement>> placements;
};

/// A parameter of a policy; set as `NAME=value` where the preset's policy has it.
struct PolicyParam {
  std::string_view name, meaning;
  double standard, lowest, highest;
};

struct Policy {
  std::string_view name;
  std::string_view source;   ///< paper and section
  std::string_view summary;  ///< one line
  std::string_view rule;     ///< how it decides, a few sentences
  StatSet needs;
  std::span<const PolicyParam> params;
  bool (*due)(const Phase&, const Config&);
  Plan (*plan)(const View&, const Budget&, const Config&);
};

/// All policies, in one list (src/policy/policies.h).
std::span<const Policy* const> Policies();
/// Null if there is none of that name.
const Policy* FindPolicy(std::string_view name);
/// What `config` asks for: Config::policy, or that of its preset. Requires CheckPolicy.
const Policy& PolicyOf(const Config& config);
/// Errors: kInvalidArgument for a policy that does not exist, and for parameters that it does not
/// have or that are out of range; the message names what is legal.
Status CheckPolicy(const Config& config);
/// A parameter's value: as Config::params says, or its standard value.
double ParamOf(const Config& config, const Policy& policy, std::string_view name);
/// Events come at decode step Config::first_event and every interval after it.
bool DueEveryInterval(const Phase& phase, const Config& config);

}  // namespace qevict
