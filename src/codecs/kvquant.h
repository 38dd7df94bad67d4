// Format kvquant (KVQuant, arXiv 2401.18079): non-uniform levels that all channels of a kv head
// share, and 1% of the numbers exact.
//
//   keys     before RoPE, per channel, static: thresholds are the 0.5% and 99.5% quantiles of the
//            channel over the rows that the layer held when it packed its first window;
//            offset = (hi + lo) / 2, factor = (hi - lo) / 2
//   values   per token and kv head: zero and scale = middle and half of the range of what is not
//            exact, in f16
//   code     nearest level of (x - offset) / factor; 2^b levels in [-1, 1] by k-means over the
//            normalised rows of the sample
//   2 bits   (Q-Norm) levels are mapped so that decoded rows have the mean and the standard
//            deviation of the originals
//   exact    the 2 ceil(0.005 W D) numbers of a window farthest out: keys by their distance from
//            the thresholds' middle in half ranges, if over 1; values by their distance from the
//            token's mean in the token's standard deviations
//
// Differences from the authors' code: k-means weighs all numbers alike (they have the gradients of
// a calibration run), and exact numbers are counted per window of a kv head and chosen by rank.
// Bytes per token: (D + Dv) b / 8, 4 for values, and 4 ceil(0.005 W D) 2 / W for each of keys and
// values.
#pragma once

#include "codecs/grid_codec.h"
#include "codecs/row_sample.h"

namespace qevict::codecs {

/// b = 1 to 4. Without a sample: for its bytes.
GridHead KvQuant(uint32_t bits, uint32_t window, const RowShape& shape, const RowSample* sample);

/// Centroids of x by k-means from quantiles, rising; at most 50 iterations.
std::vector<float> Centroids(std::vector<float> x, uint32_t n);
/// Levels and borders of nearest centroids; q_norm: see above, over x.
void SetCentroids(const std::vector<float>& centroids, bool q_norm, const std::vector<float>& x,
                  GridSpec& spec);

}  // namespace qevict::codecs
