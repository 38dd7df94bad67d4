// The keys of a configuration's text form, one by one; config.cc reads texts with them.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

#include "qevict/config.h"

namespace qevict::internal {

/// One key. A reader returns false if the text cannot be of the value's type.
struct ConfigKey {
  std::string_view name;
  std::string_view legal;
  bool (*read)(std::string_view, Config&);
  std::string (*write)(const Config&);
  bool (*valid)(const Config&);
};

/// In the order of the canonical text (preset first: it sets other keys).
std::span<const ConfigKey> ConfigKeys();
/// Characters of Config::layer_bits, at most.
inline constexpr size_t kMaxLayerBitsText = 4096;
bool LayerBitsAreValid(const Config& config);
/// Whether the codec has these bits.
bool LayerBitsFit(const Config& config);
bool RungsAreValid(const Config& config);
/// Errors: kInvalidArgument for a rung whose codec has no such bits or windows.
Status CheckRungs(const Config& config);
/// Errors: kInvalidArgument for bits and windows that the codec does not have.
Status CheckCodec(const Config& config);
/// User text for a message: short, on one line, printable.
std::string Shown(std::string_view text);
/// Concatenation, so that a message reads as the list of its parts.
std::string Join(std::initializer_list<std::string_view> parts);

}  // namespace qevict::internal
