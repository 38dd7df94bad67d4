// Statistics that wf is made of, from a text instead of a prompt: the side file that
// `qevict calibrate codec` writes and Config::statistics names.
//
// Lines of words separated by single spaces; numbers in the shortest form that reads back as the
// same f32:
//
//   qevict-codec-statistics 1
//   model HASH                          16 hexadecimal digits: FNV-1a of the model's file
//   layer L H D DV N                    layer of the model, kv heads, channels, tokens
//   loss K1 K2 V1 V2                    LayerStatistics::k_loss, v_loss; or the line is missing
//   k_mean X[D]                         per kv head: mean of the keys before RoPE,
//   k_square X[D]                       mean of their squares,
//   v_square X[DV]                      of the values' squares,
//   q_square X[D]                       of the queries' squares (scaled by any one number);
//                                       all 0: unknown
//   end
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "codecs/water_fill.h"
#include "qevict/status.h"

namespace qevict::codecs {

struct LayerStatistics {
  uint32_t model_layer = 0;
  RowShape shape{};
  std::vector<WaterFillStats> heads;  ///< [n_kv_heads]
  /// Mean KL, nats, that the layer's keys (values) add at 1 and at 2 bits when all else is packed
  /// at 4 bits; see allocate.h.
  bool has_loss = false;
  std::array<double, 2> k_loss{}, v_loss{};
};

struct CodecStatistics {
  uint64_t model_hash = 0;
  std::vector<LayerStatistics> layers;

  /// Null if the layer has none.
  const LayerStatistics* Find(uint32_t model_layer) const;
  /// The same; null, too, if they are of other heads or channels.
  const LayerStatistics* Find(uint32_t model_layer, const RowShape& shape) const;
};

/// A model's hash as files and messages show it: 16 hexadecimal digits.
std::string HashText(uint64_t hash);
std::string WriteStatistics(const CodecStatistics& statistics);
/// Errors: kInvalidArgument naming the line. Every number is finite, squares are not negative.
Result<CodecStatistics> ParseStatistics(std::string_view text);
/// Errors: kFailedPrecondition if the file cannot be written.
Status SaveStatistics(const std::string& path, const CodecStatistics& statistics);
/// ParseStatistics of a file. Errors: also kNotFound.
Result<CodecStatistics> ReadStatistics(const std::string& path);

}  // namespace qevict::codecs
