// Packed formats. Each file states one format as a specification: id, exact bytes, encode, decode.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/rope.h"
#include "kernels/attention.h"
#include "qevict/config.h"
#include "qevict/ladder.h"

namespace qevict::codecs {

/// Bytes of one kv head of one window; keys come first.
struct BlockBytes {
  size_t keys = 0, values = 0;
  size_t total() const { return keys + values; }
};

/// The packed format of one layer. Immutable, therefore thread-safe.
class Codec {
 public:
  virtual ~Codec() = default;
  virtual BlockBytes bytes() const = 0;
  /// How the kernels read a window.
  virtual kernels::WindowFormat format() const = 0;
  /// True: keys are coded as before RoPE; false: as the query meets them.
  virtual bool before_rope() const = 0;
  /// [head_dim] part of the keys before RoPE that codes leave out, or null: Encode wants, and
  /// Decode gives, what is left when it is taken off (rotated, unless before_rope()).
  virtual const float* key_mean(uint32_t) const { return nullptr; }
  /// What the codec holds beside the windows' blocks.
  virtual size_t static_bytes() const { return 0; }
  /// [n_kv_heads] codes that the kernels need beside a window, or null.
  virtual const kernels::TokenCode* token_codes() const { return nullptr; }
  virtual const kernels::GridCode* grid_codes() const { return nullptr; }

  /// Encodes one kv head of one window.
  ///   k [n][D], v [n][Dv] f32 row-major; n in [1, W] tokens. Tokens n...W-1 of a block get code 0
  ///   and take no part in any statistic.
  ///   k_block: bytes().keys bytes, v_block: bytes().values bytes; null: that side is not wanted.
  /// Both rows are given whatever side is wanted, since a format may treat values by their keys.
  /// Non-finite inputs count as 0, and what a grid cannot hold is clamped: one bad number never
  /// spoils its neighbours.
  virtual void EncodeSides(uint32_t kv_head, uint32_t n, const float* k, const float* v,
                           uint8_t* k_block, uint8_t* v_block) const = 0;
  /// Inverse: k [n][D], v [n][Dv] f32; a null one is not wanted, and its block not read.
  virtual void DecodeSides(uint32_t kv_head, uint32_t n, const uint8_t* k_block,
                           const uint8_t* v_block, float* k, float* v) const = 0;

  /// The same with both sides in one block, keys first.
  void Encode(uint32_t kv_head, uint32_t n, const float* k, const float* v, uint8_t* block) const {
    EncodeSides(kv_head, n, k, v, block, block + bytes().keys);
  }
  void Decode(uint32_t kv_head, uint32_t n, const uint8_t* block, float* k, float* v) const {
    DecodeSides(kv_head, n, block, block + bytes().keys, k, v);
  }

  /// Makes the key that attention uses of what Decode gives for one token: the mean added, and
  /// turned by its position. rotate(float* key) turns one; at most kernels::kMaxChannels channels.
  template <typename F>
  void FinishKey(uint32_t kv_head, std::span<float> key, const F& rotate) const {
    const float* mean = key_mean(kv_head);
    if (mean != nullptr) {
      float part[kernels::kMaxChannels];
      std::copy_n(mean, key.size(), part);
      if (!before_rope()) rotate(part);
      for (size_t c = 0; c < key.size(); ++c) key[c] += part[c];
    }
    if (before_rope()) rotate(key.data());
  }
};

struct WaterFillStats;

/// Shape of the rows that a codec packs.
struct RowShape {
  uint32_t n_kv_heads, head_dim, head_dim_v;
  LayerBits bits = {};  ///< 0: Config::bits
};

/// The packed rungs of a cache, 1 ...: `config` with the codec and bits of each (Config::rungs, or
/// codec and bits alone).
std::vector<Config> RungConfigs(const Config& config);
/// The codec that `config` names (Config::codec, bits, window), for layers of one shape. One that
/// learns from the rows (wf) knows nothing yet, and serves for its bytes alone.
std::shared_ptr<const Codec> MakeCodec(const Config& config, const RowShape& shape);
/// The wf codec of a layer with these statistics, [n_kv_heads].
std::shared_ptr<const Codec> MakeWaterFill(const Config& config, const RowShape& shape,
                                           const RopeParams& rope,
                                           std::span<const WaterFillStats> stats);
/// Makes a layer's codec of its rows, when the layer packs its first window.
class CodecLearner {
 public:
  virtual ~CodecLearner() = default;
  /// One token of one kv head: the key before and after RoPE, the value; f32.
  virtual void Add(uint32_t kv_head, const float* k_before_rope, const float* k,
                   const float* v) = 0;
  /// query_energy: [n_kv_heads][head_dim] sums of squares, or empty.
  virtual std::shared_ptr<const Codec> Make(std::span<const float> query_energy) = 0;
};
/// Null if the codec needs no rows.
std::unique_ptr<CodecLearner> MakeLearner(const Config& config, const RowShape& shape,
                                          const RopeParams& rope);
/// True if a layer's codec is made of its rows when the first window is packed.
bool Learns(const Config& config);
/// True if that codec also wants the queries' energy, and its kernels the basis of RopeTable.
inline bool WantsQueryEnergy(const Config& config) { return config.codec == CodecId::kWaterFill; }
/// True if keys are coded per token, or on grids for all tokens, and a mean that they share (a key
/// bias) is not taken off before: it then widens every grid.
bool IgnoresKeyMean(const Config& config);
/// True if codes can be saved and read by another cache of the same configuration.
bool SavesCodes(const Config& config);
/// What such a layer's codec takes beside the windows, at most; else 0.
size_t LearnedBytes(const Config& config, const RowShape& shape);
/// Bytes of that codec's blocks, without making it.
BlockBytes CodecBytes(const Config& config, const RowShape& shape);
/// Squared error of a side's rows over their energy that is expected of a packed rung: that of the
/// best scalar levels for a normal distribution at its bits per number (Lloyd-Max; Max, 1960),
/// between them by the logarithm. For ranking rungs, not for stating errors.
double ExpectedDistortion(const Config& rung, const RowShape& shape, Side side);
/// Names the codec and its bits in saved rows, 1 to 15: never renumber. Codecs whose codes are
/// never saved share one.
uint8_t CodecTag(const Config& config);
/// Such as `kivi, 2 bits`; for errors.
std::string CodecTagName(uint8_t tag);

}  // namespace qevict::codecs
