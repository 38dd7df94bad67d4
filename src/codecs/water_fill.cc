#include "codecs/water_fill.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "codecs/grid.h"
#include "codecs/token.h"

namespace qevict::codecs {
namespace {

using kernels::kKeyUnit;
using kernels::kValueUnit;
using kernels::VectorCode;

constexpr int kCenter = 63;
constexpr kernels::TokenGrid kGrid = kernels::TokenGrid::kScaleByte;
/// Of a scale of 1: bytes reach from 2^-20 to 1.94, so gains from 2^-8 (in full precision) to 124.
constexpr float kScaleUnit = 64.0f;
constexpr size_t kMaxPadding = kValueUnit - 1;  ///< places of a vector beyond its channels

/// Positive Lloyd-Max levels of a unit Gaussian (Max 1960, table I), and the distortions.
constexpr double kLevels1[] = {0.7979};
constexpr double kLevels2[] = {0.4528, 1.5104};
constexpr double kLevels3[] = {0.2451, 0.7560, 1.3439, 2.1520};
constexpr double kLevels4[] = {0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326};
constexpr double kLargest8 = 4.0;

std::span<const double> PositiveLevels(uint32_t bits) {
  if (bits == 1) return kLevels1;
  if (bits == 2) return kLevels2;
  return bits == 3 ? std::span<const double>(kLevels3) : std::span<const double>(kLevels4);
}

double Largest(uint32_t bits) { return bits == 8 ? kLargest8 : PositiveLevels(bits).back(); }

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
      return (kLargest8 / kCenter) * (kLargest8 / kCenter) / 12.0;
  }
}

void FillLevels(uint32_t bits, uint8_t* levels) {
  if (bits == 8) return;
  const std::span<const double> positive = PositiveLevels(bits);
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

uint32_t WordsOfBoth(uint32_t quarter_bits, const RowShape& shape) {
  return (quarter_bits * (shape.head_dim + shape.head_dim_v) + 127) / 128;
}
uint32_t KeyWords(uint32_t quarter_bits, const RowShape& shape) {
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

/// Nearest level of a code of b bits to x, in units of the largest level / 63.
uint32_t NearestCode(const VectorCode& code, uint32_t segment, float x) {
  const float level = x + static_cast<float>(kCenter);
  if (code.segments[segment].bits == 8) {
    return static_cast<uint32_t>(std::lround(std::clamp(level, 0.0f, 126.0f)));
  }
  const uint8_t* levels = code.levels[segment];
  uint32_t best = 0;
  for (uint32_t i = 1; i < 1u << code.segments[segment].bits; ++i) {
    best += level > 0.5f * static_cast<float>(levels[i - 1] + levels[i]) ? 1 : 0;
  }
  return best;
}

float LevelOf(const VectorCode& code, uint32_t segment, uint32_t value) {
  const uint32_t level = code.segments[segment].bits == 8 ? value : code.levels[segment][value];
  return static_cast<float>(static_cast<int>(level) - kCenter);
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

struct Encoder {
  const VectorCode& code;
  const uint32_t unit;
  const TokenWriter writer;
  std::vector<uint8_t> codes;

  Encoder(const VectorCode& c, bool is_k)
      : code(c), unit(is_k ? kKeyUnit : kValueUnit), writer(c, is_k), codes(c.n_places) {}

  /// Codes at one gain; returns the least squares scale.
  float Quantize(const float* x, float gain) {
    double xy = 0.0, yy = 0.0;
    ForPlaces(code, unit, [&](uint32_t s, uint32_t j) {
      const float value = Finite(x[code.channel[j]]);
      codes[j] = static_cast<uint8_t>(NearestCode(code, s, value / (code.step[j] * gain)));
      const double y = code.step[j] * LevelOf(code, s, codes[j]);
      xy += value * y;
      yy += y * y;
    });
    return yy > 0.0 ? static_cast<float>(xy / yy) : 0.0f;
  }

  /// One token of x [dim].
  void Encode(const float* x, const float* sigma, uint32_t token, uint8_t* words, uint8_t* scales) {
    double sum = 0.0;
    uint32_t n = 0;
    ForPlaces(code, unit, [&](uint32_t, uint32_t j) {
      const double y = Finite(x[code.channel[j]]) / sigma[j];
      sum += y * y;
      ++n;
    });
    float scale = n == 0 ? 0.0f : static_cast<float>(std::sqrt(sum / n)) / kScaleUnit;
    for (int pass = 0; pass < 2 && scale > 0.0f && scale < kMaxF16; ++pass) {
      scale = Quantize(x, scale);
    }
    scales[token] = ScaleByte(scale);
    if (scales[token] == 0) return;
    Quantize(x, ScaleOf(scales[token]));
    ForPlaces(code, unit, [&](uint32_t, uint32_t j) { writer.Put(words, token, j, codes[j]); });
  }
};

/// Sigma of every place, from its step.
std::vector<float> SigmaOf(const VectorCode& code, uint32_t unit) {
  std::vector<float> sigma(code.n_places, 1.0f);
  ForPlaces(code, unit, [&](uint32_t s, uint32_t j) {
    sigma[j] =
        code.step[j] * kCenter / (kScaleUnit * static_cast<float>(Largest(code.segments[s].bits)));
  });
  return sigma;
}

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
  std::vector<uint16_t> order(dim);
  std::iota(order.begin(), order.end(), uint16_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](uint16_t a, uint16_t b) { return energy[a] > energy[b]; });
  std::vector<double> unit_energy((dim + unit - 1) / unit, 0.0);
  for (size_t i = 0; i < dim; ++i) unit_energy[i / unit] += energy[order[i]];
  const std::vector<uint32_t> bits = SplitBits(unit_energy, n_words * 32 / unit);

  WaterFillVector out;
  VectorCode& code = out.code;
  code.center = kCenter;
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
      const double step = real ? sigma[order[i]] * Largest(bits[u]) * kScaleUnit / kCenter : 0.0;
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
  for (const WaterFillStats& s : stats) {
    const std::vector<double> mean = MeanOf(s.k_sum, s.n);
    std::vector<double> k = MeanOf(s.k_square, s.n), v = MeanOf(s.v_square, s.n);
    for (size_t c = 0; c < k.size(); ++c) k[c] = std::max(k[c] - mean[c] * mean[c], 1e-12);
    for (double& x : v) x = std::max(x, 1e-12);
    AveragePairs(rope, k);
    std::vector<double> weight(shape.head_dim, 1.0);
    for (size_t c = 0; c < s.q_square.size(); ++c) weight[c] = std::max(s.q_square[c], 1e-12);
    AveragePairs(rope, weight);
    std::vector<double> energy(shape.head_dim);
    for (size_t c = 0; c < energy.size(); ++c) energy[c] = weight[c] * k[c];
    k_.push_back(FillWater(energy, root(k), k_words, kKeyUnit));
    v_.push_back(FillWater(v, root(v), v_words, kValueUnit));
    k_.back().mean.assign(mean.begin(), mean.end());
  }
  for (size_t h = 0; h < k_.size(); ++h) {
    kernels::TokenCode code{k_[h].code, v_[h].code};
    code.k.mean = k_[h].mean.data();
    codes_.push_back(code);
  }
}

BlockBytes WaterFillCodec::Bytes(uint32_t quarter_bits, uint32_t window, const RowShape& shape) {
  const uint32_t k_words = KeyWords(quarter_bits, shape);
  return {kernels::TokenCodeBytes(window, k_words, kGrid),
          kernels::TokenCodeBytes(window, WordsOfBoth(quarter_bits, shape) - k_words, kGrid)};
}

size_t WaterFillCodec::LearnedBytes(const RowShape& shape) {
  const size_t dims = size_t{shape.head_dim} + shape.head_dim_v;
  const size_t head = (dims + 2 * kMaxPadding) * (sizeof(float) + sizeof(uint16_t)) +
                      dims * sizeof(float) + shape.head_dim * sizeof(double) +
                      2 * sizeof(WaterFillVector) + sizeof(kernels::TokenCode);
  return shape.n_kv_heads * head;
}

size_t WaterFillCodec::static_bytes() const {
  size_t bytes = 0;
  for (const auto* side : {&k_, &v_}) {
    for (const WaterFillVector& v : *side) {
      bytes += v.step.size() * sizeof(float) + v.channel.size() * sizeof(uint16_t) +
               v.mean.size() * sizeof(float) + sizeof(WaterFillVector);
    }
  }
  return bytes + codes_.size() * sizeof(kernels::TokenCode);
}

void WaterFillCodec::Encode(uint32_t kv_head, uint32_t n, const float* k, const float* v,
                            uint8_t* block) const {
  std::memset(block, 0, bytes().total());
  const auto encode = [&](const VectorCode& code, bool is_k, const float* x, uint32_t dim,
                          uint8_t* words) {
    Encoder encoder(code, is_k);
    const std::vector<float> sigma = SigmaOf(code, encoder.unit);
    for (uint32_t t = 0; t < n; ++t, x += dim) {
      encoder.Encode(x, sigma.data(), t, words, words + size_t{window_} * code.n_words * 4);
    }
  };
  encode(codes_[kv_head].k, true, k, shape_.head_dim, block);
  encode(codes_[kv_head].v, false, v, shape_.head_dim_v, block + bytes().keys);
}

void WaterFillCodec::Decode(uint32_t kv_head, uint32_t n, const uint8_t* block, float* k,
                            float* v) const {
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
  decode(codes_[kv_head].k, true, k, shape_.head_dim, block);
  decode(codes_[kv_head].v, false, v, shape_.head_dim_v, block + bytes().keys);
}

}  // namespace qevict::codecs
