// Windows ranked by what the last rows of a prompt looked at: the score of SnapKV and its kin.
//
//   token     mass that the last Config::init_rows prompt rows gave it, mean over the group's heads
//   pooled    over the neighbours of each token, in its run of adjacent positions; the protected
//             windows at the end (the rows that observe) are no neighbours
//   window    mean or maximum over its tokens
//
// Where only the window's sum is known, each of its tokens counts as having an equal part of it.
// While the last prompt's rows have looked at nothing yet, Stat::kScore stands for them: what earlier
// prompts and generation gave.
//
// Order: windows that came after the observed ones (generation; the methods never evict it), newest
// first; observed windows by score, then the older one; windows that no row can see any more,
// newest first. A window of zero mass is an observed one if a later window has mass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "qevict/policy.h"

namespace qevict::parts {

struct Pooling {
  size_t kernel = 5;        ///< tokens, odd; even ones count as the next odd
  bool maximum = false;     ///< of the neighbours, instead of their mean
  bool window_max = false;  ///< a window is its best token, instead of their mean
};

/// One window that may be evicted.
struct Ranked {
  enum Class : uint8_t { kGenerated, kObserved, kInvisible } kind;
  float score;
  int32_t position;
  size_t window;  ///< index in its group
};
/// Strict order, also between groups. NaN ranks last among the observed.
bool RanksBefore(const Ranked& a, const Ranked& b);
/// The windows of a group that are not protected, best first. `window` is Config::window.
std::vector<Ranked> RankObserved(const GroupView& group, uint32_t window, const Pooling& pooling);

/// Evicts what follows the first `n` of the ranking, and earlier whatever `bytes` do not pay; takes
/// the bytes of those that stay, where they are, off `bytes`.
void KeepFirst(const GroupView& group, const std::vector<Ranked>& ranking, size_t n,
               uint64_t& bytes, std::vector<Placement>& placements);

}  // namespace qevict::parts
