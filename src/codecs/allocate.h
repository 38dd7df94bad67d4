// Bits per layer for codec=wf, from what packing each layer costs (`qevict calibrate codec`).
#pragma once

#include <string>

#include "codecs/statistics.h"

namespace qevict::codecs {

/// Config::layer_bits for an average of `bits` per number over all layers: words go, one by one, to
/// the keys or the values of the layer where they lower the sum of the losses most. A loss is the
/// mean KL that a layer's keys (values) add when they are packed at 1 and at 2 bits, drawn to what
/// is usual as far as it may be noise; in between it is taken as exponential, above it falls like a
/// Gaussian's distortion. Losses of independent layers add up as long as they are small. Empty if
/// the statistics have no losses.
std::string AllocateBits(const CodecStatistics& statistics, double bits);

/// `config` with the bits per layer that its statistics give, for Config::bits or the average that
/// Config::layer_bits asks for; unchanged if it has a list, or if there are no losses. Errors:
/// kInvalidArgument for an average without losses.
Result<Config> WithAllocatedBits(const Config& config, const CodecStatistics& statistics);

}  // namespace qevict::codecs
