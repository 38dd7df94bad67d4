// Random attention problems with poisoned surroundings, and their comparison with the
// double-precision reference.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "kernels/attention.h"
#include "kernels/problems/reference.h"
#include "kernels/rope_table.h"

namespace qevict::kernels {

enum class Formats : uint8_t { kFull, kPacked2, kPacked4, kToken, kGrid, kMixed };
enum class Mask : uint8_t { kAll, kPartialLast, kCausal, kHoles };

/// A GridVector with random tables; group 0: all channels.
struct GridParams {
  uint32_t bits = 2;
  GridAxis axis = GridAxis::kChannel;
  uint32_t group = 0;
  bool zero = true, bytes = false, before_rope = false, levels = false, factor = false,
       offset = false, sign = false;
  uint32_t n_exact = 0, n_exact_tokens = 0;
};

struct ProblemParams {
  uint32_t n_kv_heads = 2, n_gqa = 7, head_dim = 64, head_dim_v = 64, window = 8, n_rows = 1,
           n_windows = 9;
  Elem elem_k = Elem::kF16, elem_v = Elem::kF16;
  Formats formats = Formats::kFull;
  /// Of token codes: units of 8, 4, 3, 2 and 1 bits for keys and values, each kv head with another
  /// order of channels; empty: `token_bits` for all channels, in order.
  std::vector<TokenSegment> token_k, token_v;
  uint32_t token_bits = 2;
  bool token_zero = true;
  bool token_byte_scale = false;  ///< without zeros
  bool token_mean = false;
  /// More rungs in token codes: kMixed takes them, too. Units as in token_k and token_v.
  struct TokenRung {
    std::vector<TokenSegment> k, v;
  };
  std::vector<TokenRung> more_tokens;
  bool same_means = true;  ///< of the keys of all token rungs
  bool apart = false;      ///< kMixed: keys and values on rungs of their own
  GridParams grid_k, grid_v;
  bool mix_grids = false;  ///< kMixed takes grid codes, too
  Mask mask = Mask::kAll;
  RopeParams rope = HalvesOf64();
  bool use_rope = true;
  int32_t first_pos = 0;
  bool shared_positions = false;  ///< some windows have pos_stride 0
  float softcap = 0.0f;
  bool bias = false, slopes = false, sinks = false, mass = true;
  bool blind_row = false;  ///< the middle row sees nothing
  uint32_t mass_first_row = 0;
  MassKind mass_kind = MassKind::kSum;
  bool mass_per_head = false;
  bool token_mass = false;
  uint32_t token_mass_first_row = 0;
  uint32_t head_gap = 0;  ///< poisoned bytes between the heads' blocks
  /// Blocks lie in one piece of memory in random order, as after a while of routing; else each is
  /// an allocation of its own, so that a sanitizer sees reads past it.
  bool scattered = false;
  uint64_t seed = 1;
  std::string Name() const;

  static RopeParams HalvesOf64() {
    RopeParams r;
    r.pairing = RopePairing::kHalves;
    r.n_dims = 64;
    return r;
  }
};

/// Storage, queries, masks and output of one group. Tokens that no row sees, and all gaps, hold NaN
/// bit patterns.
class Problem {
 public:
  explicit Problem(const ProblemParams& params);
  const AttentionGroup& group() const { return group_; }
  const ProblemParams& params() const { return params_; }
  /// Runs the kernels of the active ISA into fresh outputs.
  void Run(ParallelFor& pool, Workspace& workspace);
  void Clear();
  const std::vector<float>& out() const { return out_; }
  const std::vector<float>& mass() const { return mass_; }
  const std::vector<float>& token_mass() const { return token_mass_; }
  /// Empty if outputs and masses are within the rounding bound of the reference, else where and by
  /// how much not.
  std::string Compare() const;
  std::string CompareWith(const ReferenceResult& want) const;
  /// The same of the masses alone, each off by at most `relative`.
  std::string CompareMasses(const ReferenceResult& want, double relative) const;
  std::vector<uint32_t>& visible() { return visible_; }
  /// Of keys, then of values if they lie apart, window by window. Empty if scattered.
  std::vector<std::vector<uint8_t>>& blocks() { return blocks_; }
  /// K and V of all windows as stored.
  size_t bytes() const { return bytes_; }

 private:
  void MakeWindows();
  void Scatter();
  void MakeMask();
  void MakeRungs();
  uint8_t PickRung();
  /// Bytes of keys and values of one kv head's block that holds both, and from head to head.
  size_t KeyBytes(uint8_t rung) const;
  size_t HeadBytes(uint8_t rung) const { return shape_.rungs[rung].k_head_bytes; }
  uint8_t* AddBlock(size_t window, uint8_t rung);
  void FillFull(std::vector<uint8_t>& block, size_t window, uint32_t kv_head);
  void FillPacked(std::vector<uint8_t>& block, uint8_t rung, size_t window, uint32_t kv_head);
  void MakeTokenCodes(uint8_t rung, const std::vector<TokenSegment>& k,
                      const std::vector<TokenSegment>& v);
  VectorCode MakeVectorCode(uint32_t dim, const std::vector<TokenSegment>& segments, bool is_k);
  void FillTokens(std::vector<uint8_t>& block, uint8_t rung, size_t window, uint32_t kv_head);
  void MakeGridCodes();
  static void Write16(std::vector<uint8_t>& block, size_t offset, uint16_t value);
  GridVector MakeGridVector(const GridParams& p, uint32_t dim);
  const float* GridArray(uint32_t n, float mean, float spread);
  void FillGrid(std::vector<uint8_t>& block, size_t window, uint32_t kv_head);
  uint32_t SeenBits(size_t window) const;
  float Normal() { return normal_(rng_); }
  uint32_t MassRows() const {
    return params_.n_kv_heads * (params_.mass_per_head ? params_.n_gqa : 1);
  }

  ProblemParams params_;
  std::mt19937_64 rng_;
  std::normal_distribution<float> normal_;
  std::unique_ptr<RopeTable> rope_;
  AttentionShape shape_;
  AttentionGroup group_;
  std::vector<std::vector<TokenCode>> codes_;  // by rung
  std::vector<std::unique_ptr<std::vector<float>>> steps_, means_;
  std::vector<std::unique_ptr<std::vector<uint16_t>>> channels_;
  std::vector<GridCode> grids_;
  std::vector<std::unique_ptr<std::vector<float>>> grid_arrays_;
  std::vector<WindowRef> windows_;
  std::vector<std::vector<uint8_t>> blocks_;  // exact allocations
  Workspace scattered_;                       // or all of them
  size_t bytes_ = 0;
  std::vector<uint32_t> visible_;
  std::vector<float> q_, out_, bias_, slopes_, sinks_, mass_, token_mass_;
};

/// ISAs that this CPU can run.
std::vector<Isa> AllIsas();
/// Those of them that differ in more than the integers of token codes.
std::vector<Isa> FloatIsas();

}  // namespace qevict::kernels
