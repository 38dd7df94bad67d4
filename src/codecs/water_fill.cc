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

using kernels::PlacesOfUnit;
using kernels::TokenSegment;
using kernels::VectorCode;
using kernels::WordsOfUnit;

constexpr int kCenter = 63;
constexpr size_t kMaxPadding = 31;  ///< places of a vector beyond its channels
constexpr uint32_t kSegmentBits[] = {8, 4, 3, 2, 1};

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

/// Units of each of kSegmentBits.
struct Split {
  uint32_t units[5] = {};
  double cost = std::numeric_limits<double>::infinity();
};

/// prefix[i]: energy of the i strongest channels.
double CostOf(const uint32_t* units, std::span<const double> prefix) {
  const size_t n = prefix.size() - 1;
  size_t at = 0;
  double cost = 0.0;
  for (size_t s = 0; s < 5; ++s) {
    const size_t end = std::min(n, at + size_t{units[s]} * PlacesOfUnit(kSegmentBits[s]));
    cost += Distortion(kSegmentBits[s]) * (prefix[end] - prefix[at]);
    at = end;
  }
  return cost + prefix[n] - prefix[at];
}

Split BestSplit(std::span<const double> prefix, uint32_t n_words) {
  Split best;
  for (uint32_t n8 = 0; n8 <= 2 && 2 * n8 <= n_words; ++n8) {
    for (uint32_t n4 = 0; 2 * n8 + n4 <= n_words; ++n4) {
      const uint32_t left = n_words - 2 * n8 - n4;
      for (uint32_t n3 = 0; 3 * n3 <= left; ++n3) {
        for (uint32_t n1 = 0; 3 * n3 + n1 <= left; ++n1) {
          Split split{{n8, n4, n3, left - 3 * n3 - n1, n1}};
          uint32_t n_places = 0;
          for (size_t s = 0; s < 5; ++s) n_places += split.units[s] * PlacesOfUnit(kSegmentBits[s]);
          if (n_places > prefix.size() - 1 + kMaxPadding) continue;
          split.cost = CostOf(split.units, prefix);
          if (split.cost < best.cost) best = split;
        }
      }
    }
  }
  return best;
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

/// Calls f(segment, place) for all places that hold a channel.
template <class F>
void ForPlaces(const VectorCode& code, F&& f) {
  uint32_t place = 0;
  for (uint32_t s = 0; s < code.n_segments; ++s) {
    const uint32_t n = code.segments[s].n_units * PlacesOfUnit(code.segments[s].bits);
    for (uint32_t j = 0; j < n; ++j, ++place) {
      if (code.step[place] != 0.0f) f(s, place);
    }
  }
}

struct Encoder {
  const VectorCode& code;
  const TokenWriter writer;
  std::vector<uint8_t> codes;

  Encoder(const VectorCode& c, bool is_k) : code(c), writer(c, is_k), codes(c.n_places) {}

  /// Codes at one gain; returns the least squares scale.
  float Quantize(const float* x, float gain) {
    double xy = 0.0, yy = 0.0;
    ForPlaces(code, [&](uint32_t s, uint32_t j) {
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
    ForPlaces(code, [&](uint32_t, uint32_t j) {
      const double y = Finite(x[code.channel[j]]) / sigma[j];
      sum += y * y;
      ++n;
    });
    float scale = n == 0 ? 0.0f : static_cast<float>(std::sqrt(sum / n));
    for (int pass = 0; pass < 2 && scale > 0.0f && scale < kMaxF16; ++pass) {
      scale = Quantize(x, scale);
    }
    const uint16_t stored = F32ToF16(std::clamp(scale, 0.0f, kMaxF16));
    StoreF16(scales, token, stored);
    if (stored == 0) return;
    Quantize(x, F16ToF32(stored));
    ForPlaces(code, [&](uint32_t, uint32_t j) { writer.Put(words, token, j, codes[j]); });
  }
};

/// Sigma of every place, from its step.
std::vector<float> SigmaOf(const VectorCode& code) {
  std::vector<float> sigma(code.n_places, 1.0f);
  ForPlaces(code, [&](uint32_t s, uint32_t j) {
    sigma[j] = code.step[j] * kCenter / static_cast<float>(Largest(code.segments[s].bits));
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
                          uint32_t n_words) {
  const size_t dim = energy.size();
  std::vector<uint16_t> order(dim);
  std::iota(order.begin(), order.end(), uint16_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](uint16_t a, uint16_t b) { return energy[a] > energy[b]; });
  std::vector<double> prefix{0.0};
  for (const uint16_t c : order) prefix.push_back(prefix.back() + energy[c]);
  const Split split = BestSplit(prefix, n_words);

  WaterFillVector out;
  out.code.center = kCenter;
  out.code.n_words = n_words;
  size_t channel = 0;
  for (size_t s = 0; s < 5; ++s) {
    if (split.units[s] == 0) continue;
    const uint32_t bits = kSegmentBits[s];
    FillLevels(bits, out.code.levels[out.code.n_segments]);
    out.code.segments[out.code.n_segments++] = {static_cast<uint8_t>(bits),
                                                static_cast<uint16_t>(split.units[s])};
    for (uint32_t j = 0; j < split.units[s] * PlacesOfUnit(bits); ++j, ++channel) {
      const bool real = channel < dim;
      out.channel.push_back(real ? order[channel] : uint16_t{0xFFFF});
      out.step.push_back(real ? static_cast<float>(sigma[order[channel]] * Largest(bits) / kCenter)
                              : 0.0f);
    }
  }
  out.code.n_places = static_cast<uint32_t>(out.step.size());
  out.code.step = out.step.data();
  out.code.channel = out.channel.data();
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
    k_.push_back(FillWater(energy, root(k), k_words));
    v_.push_back(FillWater(v, root(v), v_words));
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
  return {kernels::TokenCodeBytes(window, k_words, false),
          kernels::TokenCodeBytes(window, WordsOfBoth(quarter_bits, shape) - k_words, false)};
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
    const std::vector<float> sigma = SigmaOf(code);
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
      const float scale = LoadF16(scales, t);
      std::fill_n(x, dim, 0.0f);
      ForPlaces(code, [&](uint32_t s, uint32_t j) {
        const float level = LevelOf(code, s, writer.Get(words, t, j));
        x[code.channel[j]] += code.step[j] * scale * level;
      });
    }
  };
  decode(codes_[kv_head].k, true, k, shape_.head_dim, block);
  decode(codes_[kv_head].v, false, v, shape_.head_dim_v, block + bytes().keys);
}

}  // namespace qevict::codecs
