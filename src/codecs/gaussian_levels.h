// Positive Lloyd-Max levels of a unit Gaussian (Max 1960, table I).
#pragma once

#include <cstdint>
#include <span>

namespace qevict::codecs {

inline constexpr double kGaussian1[] = {0.7979};
inline constexpr double kGaussian2[] = {0.4528, 1.5104};
inline constexpr double kGaussian3[] = {0.2451, 0.7560, 1.3439, 2.1520};
inline constexpr double kGaussian4[] = {0.1284, 0.3881, 0.6568, 0.9424,
                                        1.2562, 1.6181, 2.0690, 2.7326};

/// bits: 1 to 4.
inline std::span<const double> GaussianLevels(uint32_t bits) {
  if (bits == 1) return kGaussian1;
  if (bits == 2) return kGaussian2;
  return bits == 3 ? std::span<const double>(kGaussian3) : std::span<const double>(kGaussian4);
}

}  // namespace qevict::codecs
