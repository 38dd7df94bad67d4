// Small files as a whole.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace qevict {

/// The contents, of which at most `max_bytes` + 1 are read: more than `max_bytes` say that it is
/// too large. Nothing if it cannot be read (a folder, for instance).
std::optional<std::string> ReadFile(const std::string& path, size_t max_bytes);

}  // namespace qevict
