// Pieces that several policies share.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "policy/history.h"
#include "qevict/policy.h"

namespace qevict::parts {

/// A plan that leaves every window of the view where it is.
Plan KeepAll(const View& view);

/// Bytes for the history of each group: windows that are neither protected nor reserved for.
///   layer     budget * f16 bytes of the layer's tokens / those of all layers of the view
///   history   layer - protected windows and reserves of all its groups, split over the groups in
///             proportion to their windows that are not protected
std::vector<uint64_t> HistoryShares(const View& view, const Budget& budget);

/// The history of one group as a ranking sees it, oldest first.
struct History {
  std::vector<Candidate> candidates;
  std::vector<size_t> index;  ///< window of each candidate
  uint64_t bytes = 0;         ///< what they may cost together
};
/// Windows that no row can see are gone, unless bytes are left when everything else is in full
/// precision; then the newest of them stay where they are. The others are candidates.
History TakeHistory(const GroupView& group, uint64_t bytes, std::vector<Placement>& placements);

/// Plans every group's history by a ranking with one packed rung (rung 1).
Plan PlanHistories(const View& view, const Budget& budget,
                   const std::function<HistoryPlan(const HistoryInput&)>& rank);

/// Indices of the k largest, ties to the lower index; NaN ranks last.
std::vector<size_t> TopK(std::span<const float> x, size_t k);

/// Shares of `total` in proportion to the weights, rounded by the largest remainder so that they
/// add up to it exactly; ties go to the lower index. Weights that add up to 0 count as equal.
std::vector<uint64_t> Apportion(uint64_t total, std::span<const double> weights);

/// 1-D pooling of odd width k: the maximum, or the mean with zeros beyond the ends (policies that
/// pool scores divide by k there, too).
std::vector<float> Pool(std::span<const float> x, size_t k, bool maximum);

}  // namespace qevict::parts
