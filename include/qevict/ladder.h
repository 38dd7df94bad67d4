// Names of what a window can be in: sides and rungs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace qevict {

enum class Side : uint8_t { kKeys, kValues };
inline constexpr size_t kSides = 2;
inline constexpr Side kBothSides[kSides] = {Side::kKeys, Side::kValues};

/// 0 = full precision, 1 ... = packed formats of falling precision.
using Rung = uint8_t;
inline constexpr Rung kFullRung = 0;
inline constexpr Rung kGone = 0xFF;
inline constexpr size_t kMaxRungs = 8;  ///< full precision included

}  // namespace qevict
