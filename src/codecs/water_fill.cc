#include "codecs/water_fill.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "codecs/gaussian_levels.h"
#include "codecs/grid.h"
#include "codecs/token.h"

namespace qevict::codecs {
namespace {

using kernels::CenterOf;
using kernels::kKeyUnit;
using kernels::kValueUnit;
using kernels::VectorCode;

constexpr int kCenter = 63, kWideCenter = 127;  // the latter of 8 bits
constexpr kernels::TokenGrid kGrid = kernels::TokenGrid::kScaleByte;
/// Of a scale of 1: bytes reach from 2^-20 to 1.94, so gains from 2^-8 (in full precision) to 124.
constexpr float kScaleUnit = 64.0f;

/// Levels of 8 bits reach so far (Lloyd-Max levels of fewer bits: gaussian_levels.h).
constexpr double kLargest8 = 6.0;

size_t RoundUp(size_t n, size_t to) { return (n + to - 1) / to * to; }

double Largest(uint32_t bits) { return bits == 8 ? kLargest8 : GaussianLevels(bits).back(); }

double Distortion(uint32_t bits) {
  switch (bits) {
    case 0:
      return 1.0;
    case 1:
      return 0.3634;
    case 2:
      return 0.1175;
    case 3:
      return 0.03454;
    case 4:
      return 0.009497;
    default:
      return (kLargest8 / kWideCenter) * (kLargest8 / kWideCenter) / 12.0;
  }
}

void FillLevels(uint32_t bits, uint8_t* levels) {
  if (bits == 8) return;
  const std::span<const double> positive = GaussianLevels(bits);
  const size_t half = positive.size();
  for (size_t i = 0; i < half; ++i) {
    const int level = static_cast<int>(std::lround(positive[i] / positive.back() * kCenter));
    levels[half + i] = static_cast<uint8_t>(kCenter + level);
    levels[half - 1 - i] = static_cast<uint8_t>(kCenter - level);
  }
}

/// Bits of a unit that gets one step more; 8: there is none.
uint32_t NextBits(uint32_t bits) { return bits < 4 ? bits + 1 : 8; }

/// Bits of each unit, from their energies in falling order: the step that lowers the distortion
/// most per bit comes first (it is the best split, since the distortions are convex).
std::vector<uint32_t> SplitBits(std::span<const double> energy, uint32_t capacity) {
  std::vector<uint32_t> bits(energy.size(), 0);
  for (;;) {
    size_t best = energy.size();
    double best_gain = -1.0;
    for (size_t i = 0; i < energy.size(); ++i) {
      const uint32_t next = NextBits(bits[i]);
      if (bits[i] == 8 || next - bits[i] > capacity) continue;
      const double gain = energy[i] * (Distortion(bits[i]) - Distortion(next)) / (next - bits[i]);
      if (gain > best_gain) best_gain = gain, best = i;
    }
    if (best == energy.size()) return bits;
    capacity -= NextBits(bits[best]) - bits[best];
    bits[best] = NextBits(bits[best]);
  }
}

/// Channels in falling order of energy.
std::vector<uint16_t> ByEnergy(std::span<const double> energy) {
  std::vector<uint16_t> order(energy.size());
  std::iota(order.begin(), order.end(), uint16_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](uint16_t a, uint16_t b) { return energy[a] > energy[b]; });
  return order;
}

std::vector<double> UnitEnergies(std::span<const double> energy, std::span<const uint16_t> order,
                                 uint32_t unit) {
  std::vector<double> units((energy.size() + unit - 1) / unit, 0.0);
  for (size_t i = 0; i < energy.size(); ++i) units[i / unit] += energy[order[i]];
  return units;
}

uint32_t WordsOfBoth(uint32_t quarter_bits, const RowShape& shape) {
  if (shape.bits.k != 0) {
    return WordsOf(shape.bits.k, shape.head_dim) + WordsOf(shape.bits.v, shape.head_dim_v);
  }
  return WordsOf(quarter_bits, shape.head_dim + shape.head_dim_v);
}
uint32_t KeyWords(uint32_t quarter_bits, const RowShape& shape) {
  if (shape.bits.k != 0) return WordsOf(shape.bits.k, shape.head_dim);
  const uint32_t all = WordsOfBoth(quarter_bits, shape);
  return (all * shape.head_dim + shape.head_dim + shape.head_dim_v - 1) /
         (shape.head_dim + shape.head_dim_v);
}

/// Mean of n numbers per channel, from their sums.
std::vector<double> MeanOf(std::span<const double> sums, uint64_t n) {
  std::vector<double> mean(sums.begin(), sums.end());
  for (double& x : mean) x /= static_cast<double>(std::max<uint64_t>(n, 1));
  return mean;
}

/// Both channels of a RoPE pair get the pair's average.
void AveragePairs(const RopeParams& rope, std::vector<double>& x) {
  if (rope.pairing == RopePairing::kNone) return;
  const bool halves = rope.pairing == RopePairing::kHalves;
  for (uint32_t i = 0; i < rope.n_dims / 2; ++i) {
    double& a = x[rope.offset + (halves ? i : 2 * i)];
    double& b = x[rope.offset + (halves ? i + rope.n_dims / 2 : 2 * i + 1)];
    a = b = 0.5 * (a + b);
  }
}

float LevelOf(const VectorCode& code, uint32_t segment, uint32_t value) {
  const uint32_t bits = code.segments[segment].bits;
  const uint32_t level = bits == 8 ? value : code.levels[segment][value];
  return static_cast<float>(static_cast<int>(level) - CenterOf(code, bits));
}

/// The byte of a scale, in units of kScaleUnit; what it stands for.
uint8_t ScaleByte(float scale) {
  const uint32_t half = F32ToF16(std::clamp(scale, 0.0f, 1.0f * kMaxF16));
  return static_cast<uint8_t>(std::min((half + 32) >> 6, 255u));
}
float ScaleOf(uint8_t byte) { return F16ToF32(static_cast<uint16_t>(byte << 6)); }

/// Calls f(segment, place) for all places that hold a channel.
template <class F>
void ForPlaces(const VectorCode& code, uint32_t unit, F&& f) {
  uint32_t place = 0;
  for (uint32_t s = 0; s < code.n_segments; ++s) {
    const uint32_t n = code.segments[s].n_units * unit;
    for (uint32_t j = 0; j < n; ++j, ++place) {
      if (code.step[place] != 0.0f) f(s, place);
    }
  }
}

/// Codes of vectors of one kv head. Made once per window; loops are written for vectorisation.
class Encoder {
 public:
  Encoder(const VectorCode& code, bool is_k) : code_(code), writer_(code, is_k), n_(code.n_places) {
    const uint32_t unit = is_k ? kKeyUnit : kValueUnit;
    uint32_t place = 0;
    for (uint32_t s = 0; s < code_.n_segments; ++s) {
      const uint32_t bits = code_.segments[s].bits, end = place + code_.segments[s].n_units * unit;
      const double sigma = CenterOf(code_, bits) / (kScaleUnit * Largest(bits));
      for (; place < end; ++place) {
        const float step = code_.step[place];
        inverse_[place] = step == 0.0f ? 0.0f : 1.0f / step;
        inverse_sigma_[place] = step == 0.0f ? 0.0f : static_cast<float>(1.0 / (step * sigma));
      }
      ends_[s] = end;
      if (bits == 8) wide_ = end;
    }
    scaled_ = wide_ == n_ ? 0 : wide_;
    for (uint32_t j = scaled_; j < n_; ++j) n_scaled_ += code_.step[j] != 0.0f;
  }

  /// One token of x [dim].
  void Encode(const float* x, uint32_t token, uint8_t* words, uint8_t* scales) {
    float sums[kBlock] = {};
    for (uint32_t j = 0; j < n_; ++j)
      x_[j] = code_.step[j] == 0.0f ? 0.0f : Finite(x[code_.channel[j]]);
    for (uint32_t j = scaled_; j < n_; ++j) {
      const float y = x_[j] * inverse_sigma_[j];
      sums[j % kBlock] += y * y;
    }
    float least = 0.0f;  // scale that reaches all places of 8 bits
    for (uint32_t j = 0; j < wide_; ++j)
      least = std::max(least, std::abs(x_[j]) * inverse_[j] / kWideCenter);
    float scale = n_scaled_ == 0 ? 0.0f : std::sqrt(Total(sums) / static_cast<float>(n_scaled_));
    scale = std::max(scale / kScaleUnit, least);
    for (int pass = 0; pass < 2 && scale > 0.0f && scale < kMaxF16; ++pass)
      scale = std::max(Quantize(scale), least);
    scales[token] = ScaleByte(scale);
    if (ScaleOf(scales[token]) < least && scales[token] < 255) ++scales[token];
    if (scales[token] == 0) return;
    Quantize(ScaleOf(scales[token]));
    writer_.Put(words, token, codes_);
  }

 private:
  static constexpr uint32_t kBlock = 8;  // partial sums, so that a sum is a vector

  static float Total(const float* sums) {
    float total = 0.0f;
    for (uint32_t i = 0; i < kBlock; ++i) total += sums[i];
    return total;
  }

  /// Codes at one scale; returns the least squares scale of the places that set it.
  float Quantize(float scale) {
    const float inverse_scale = 1.0f / scale;
    uint32_t place = 0;
    for (uint32_t s = 0; s < code_.n_segments; place = ends_[s++])
      QuantizeSegment(s, place, ends_[s], inverse_scale);
    float xy[kBlock] = {}, yy[kBlock] = {};
    for (uint32_t j = scaled_; j < n_; ++j) {
      const float y = code_.step[j] * level_[j];
      xy[j % kBlock] += x_[j] * y;
      yy[j % kBlock] += y * y;
    }
    const float energy = Total(yy);
    return energy > 0.0f ? Total(xy) / energy : 0.0f;
  }

  /// Codes and levels (- center) of the places of one segment: thresholds are half way between
  /// levels.
  void QuantizeSegment(uint32_t s, uint32_t begin, uint32_t end, float inverse_scale) {
    const uint32_t bits = code_.segments[s].bits;
    if (bits == 8) {
      constexpr float kFar = kWideCenter;
      for (uint32_t j = begin; j < end; ++j) {
        const float z = std::clamp(x_[j] * inverse_[j] * inverse_scale, -kFar, kFar);
        level_[j] = std::nearbyint(z);
        codes_[j] = static_cast<uint8_t>(static_cast<int>(level_[j]) + kWideCenter);
      }
      return;
    }
    const uint8_t* levels = code_.levels[s];
    for (uint32_t j = begin; j < end; ++j) {
      codes_[j] = 0;
      level_[j] = static_cast<float>(levels[0]) - kCenter;
    }
    for (uint32_t i = 1; i < 1u << bits; ++i) {
      const float threshold = 0.5f * static_cast<float>(levels[i - 1] + levels[i]) - kCenter;
      const auto step = static_cast<float>(levels[i] - levels[i - 1]);
      for (uint32_t j = begin; j < end; ++j) {
        const bool above = x_[j] * inverse_[j] * inverse_scale > threshold;
        codes_[j] = static_cast<uint8_t>(codes_[j] + (above ? 1 : 0));
        level_[j] += above ? step : 0.0f;
      }
    }
  }

  const VectorCode& code_;
  const TokenWriter writer_;
  const uint32_t n_;
  uint32_t wide_ = 0;    ///< places of 8 bits, which come first
  uint32_t scaled_ = 0;  ///< the first place that sets scales
  uint32_t n_scaled_ = 0, ends_[kernels::kMaxSegments] = {};
  uint8_t codes_[kernels::kMaxPlaces];
  float x_[kernels::kMaxPlaces], level_[kernels::kMaxPlaces], inverse_[kernels::kMaxPlaces];
  float inverse_sigma_[kernels::kMaxPlaces];
};

}  // namespace

void WaterFillStats::AddKey(const float* before_rope, uint32_t head_dim) {
  k_sum.resize(head_dim);
  k_square.resize(head_dim);
  for (uint32_t c = 0; c < head_dim; ++c) {
    const double x = Finite(before_rope[c]);
    k_sum[c] += x;
    k_square[c] += x * x;
  }
}

float KeyBias(const WaterFillStats& s) {
  const auto n = static_cast<double>(s.n);
  double mean = 0.0, variance = 0.0;
  for (size_t c = 0; c < s.k_sum.size() && s.n > 0; ++c) {
    const double m = s.k_sum[c] / n;
    mean = std::max(mean, std::abs(m));
    variance += std::max(s.k_square[c] / n - m * m, 0.0) / static_cast<double>(s.k_sum.size());
  }
  return variance > 0.0 ? static_cast<float>(mean / std::sqrt(variance)) : 0.0f;
}

void WaterFillStats::AddValue(const float* value, uint32_t head_dim_v) {
  v_square.resize(head_dim_v);
  for (uint32_t c = 0; c < head_dim_v; ++c) {
    const double x = Finite(value[c]);
    v_square[c] += x * x;
  }
  ++n;
}

WaterFillVector FillWater(std::span<const double> energy, std::span<const double> sigma,
                          uint32_t n_words, uint32_t unit) {
  const size_t dim = energy.size();
  const std::vector<uint16_t> order = ByEnergy(energy);
  const std::vector<uint32_t> bits =
      SplitBits(UnitEnergies(energy, order, unit), n_words * 32 / unit);

  WaterFillVector out;
  VectorCode& code = out.code;
  code.center = kCenter;
  code.wide_center = kWideCenter;
  code.n_words = n_words;
  code.grid = kGrid;
  for (size_t u = 0; u < bits.size() && bits[u] != 0; ++u) {
    if (code.n_segments == 0 || code.segments[code.n_segments - 1].bits != bits[u]) {
      FillLevels(bits[u], code.levels[code.n_segments]);
      code.segments[code.n_segments++] = {static_cast<uint8_t>(bits[u]), 0};
    }
    ++code.segments[code.n_segments - 1].n_units;
    for (size_t i = u * unit; i < (u + 1) * unit; ++i) {
      const bool real = i < dim;
      out.channel.push_back(real ? order[i] : uint16_t{0xFFFF});
      const double step =
          real ? sigma[order[i]] * Largest(bits[u]) * kScaleUnit / CenterOf(code, bits[u]) : 0.0;
      out.step.push_back(static_cast<float>(step));
    }
  }
  code.n_places = static_cast<uint32_t>(out.step.size());
  code.step = out.step.data();
  code.channel = out.channel.data();
  return out;
}

WaterFillCodec::WaterFillCodec(uint32_t quarter_bits, uint32_t window, const RowShape& shape,
                               const RopeParams& rope, std::span<const WaterFillStats> stats)
    : quarter_bits_(quarter_bits), window_(window), shape_(shape) {
  const uint32_t k_words = KeyWords(quarter_bits, shape),
                 v_words = WordsOfBoth(quarter_bits, shape) - k_words;
  const auto root = [](std::vector<double> x) {
    for (double& each : x) each = std::sqrt(each);
    return x;
  };
  std::vector<WaterFillVector> k_vectors, v_vectors;
  std::vector<std::vector<double>> means;
  for (const WaterFillStats& s : stats) {
    means.push_back(MeanOf(s.k_sum, s.n));
    const std::vector<double>& mean = means.back();
    std::vector<double> k = MeanOf(s.k_square, s.n), v = MeanOf(s.v_square, s.n);
    for (size_t c = 0; c < k.size(); ++c) k[c] = std::max(k[c] - mean[c] * mean[c], 1e-12);
    for (double& x : v) x = std::max(x, 1e-12);
    AveragePairs(rope, k);
    std::vector<double> weight(shape.head_dim, 1.0);
    for (size_t c = 0; c < s.q_square.size(); ++c) weight[c] = std::max(s.q_square[c], 1e-12);
    AveragePairs(rope, weight);
    std::vector<double> energy(shape.head_dim);
    for (size_t c = 0; c < energy.size(); ++c) energy[c] = weight[c] * k[c];
    k_vectors.push_back(FillWater(energy, root(k), k_words, kKeyUnit));
    v_vectors.push_back(FillWater(v, root(v), v_words, kValueUnit));
  }
  Keep(k_vectors, v_vectors, means);
}

/// Copies what the codes point to into one piece of memory each.
void WaterFillCodec::Keep(std::span<const WaterFillVector> k, std::span<const WaterFillVector> v,
                          std::span<const std::vector<double>> means) {
  size_t n_places = 0;
  for (const auto side : {k, v}) {
    for (const WaterFillVector& x : side) n_places += x.step.size();
  }
  numbers_.reserve(n_places + k.size() * shape_.head_dim);  // pointers stay
  channels_.reserve(n_places);
  const auto keep = [this](const WaterFillVector& x) {
    VectorCode code = x.code;
    code.step = numbers_.data() + numbers_.size();
    code.channel = channels_.data() + channels_.size();
    numbers_.insert(numbers_.end(), x.step.begin(), x.step.end());
    channels_.insert(channels_.end(), x.channel.begin(), x.channel.end());
    return code;
  };
  codes_.reserve(k.size());
  for (size_t h = 0; h < k.size(); ++h) {
    kernels::TokenCode code{keep(k[h]), keep(v[h])};
    code.k.mean = numbers_.data() + numbers_.size();
    for (const double x : means[h]) numbers_.push_back(static_cast<float>(x));
    codes_.push_back(code);
  }
}

BlockBytes WaterFillCodec::Bytes(uint32_t quarter_bits, uint32_t window, const RowShape& shape) {
  const uint32_t k_words = KeyWords(quarter_bits, shape);
  return {kernels::TokenCodeBytes(window, k_words, kGrid),
          kernels::TokenCodeBytes(window, WordsOfBoth(quarter_bits, shape) - k_words, kGrid)};
}

size_t WaterFillCodec::LearnedBytes(const RowShape& shape) {
  const size_t places = RoundUp(shape.head_dim, kKeyUnit) + RoundUp(shape.head_dim_v, kValueUnit);
  const size_t means_and_energy = 2 * size_t{shape.head_dim} * sizeof(float);
  return shape.n_kv_heads * (places * (sizeof(float) + sizeof(uint16_t)) + means_and_energy +
                             sizeof(kernels::TokenCode));
}

size_t WaterFillCodec::static_bytes() const {
  return numbers_.capacity() * sizeof(float) + channels_.capacity() * sizeof(uint16_t) +
         codes_.capacity() * sizeof(kernels::TokenCode);
}

void WaterFillCodec::EncodeSides(uint32_t kv_head, uint32_t n, const float* k, const float* v,
                                 uint8_t* k_block, uint8_t* v_block) const {
  const auto encode = [&](const VectorCode& code, bool is_k, const float* x, uint32_t dim,
                          uint8_t* words) {
    if (words == nullptr) return;
    std::memset(words, 0, is_k ? bytes().keys : bytes().values);
    Encoder encoder(code, is_k);
    for (uint32_t t = 0; t < n; ++t, x += dim)
      encoder.Encode(x, t, words, words + size_t{window_} * code.n_words * 4);
  };
  encode(codes_[kv_head].k, true, k, shape_.head_dim, k_block);
  encode(codes_[kv_head].v, false, v, shape_.head_dim_v, v_block);
}

void WaterFillCodec::DecodeSides(uint32_t kv_head, uint32_t n, const uint8_t* k_block,
                                 const uint8_t* v_block, float* k, float* v) const {
  const auto decode = [&](const VectorCode& code, bool is_k, float* x, uint32_t dim,
                          const uint8_t* words) {
    if (x == nullptr) return;
    const TokenWriter writer(code, is_k);
    const uint8_t* scales = words + size_t{window_} * code.n_words * 4;
    for (uint32_t t = 0; t < n; ++t, x += dim) {
      const float scale = ScaleOf(scales[t]);
      std::fill_n(x, dim, 0.0f);
      ForPlaces(code, is_k ? kKeyUnit : kValueUnit, [&](uint32_t s, uint32_t j) {
        const float level = LevelOf(code, s, writer.Get(words, t, j));
        x[code.channel[j]] += code.step[j] * scale * level;
      });
    }
  };
  decode(codes_[kv_head].k, true, k, shape_.head_dim, k_block);
  decode(codes_[kv_head].v, false, v, shape_.head_dim_v, v_block);
}

}  // namespace qevict::codecs
