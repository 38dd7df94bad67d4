// What a measurement ran on.
#pragma once

#include <cstdint>
#include <string>

#include "cli/text.h"

namespace qevict::cli {

/// Name of the CPU by the operating system; "unknown" if it does not say.
std::string CpuName();
/// Most memory that this process has had resident.
uint64_t PeakRssBytes();
/// Memory that programs can still have without swapping.
uint64_t AvailableBytes();
/// Version, CPU, its cores for us, kernels in use, llama.cpp and ggml.
Json MachineFacts();

}  // namespace qevict::cli
