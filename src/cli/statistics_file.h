// The side file of `qevict calibrate codec` and the model that it belongs to.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "qevict/config.h"

namespace qevict::cli {

/// FNV-1a (64 bits) of a whole file, with progress on stderr; kept in FILE.qevict-hash, where that
/// can be written, and read from there while FILE keeps its size and time. Errors: kNotFound.
Result<uint64_t> HashFile(const std::string& path);

/// `config` with the bits per layer that Config::statistics, if there is one, gives (allocate.h).
/// Errors: kNotFound, kInvalidArgument naming both hashes if it was taken from another model, and
/// for `layer_bits` or statistics that name layers which the model does not have.
Result<Config> UseStatistics(const Config& config, const std::string& model);
/// The same for several, in place; the model's file is read once.
Status UseStatistics(std::span<Config* const> configs, const std::string& model);

}  // namespace qevict::cli
