#include "kernels/problems/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "base/half.h"
#include "kernels/attention_internal.h"
#include "kernels/rope_table.h"

namespace qevict::kernels {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

double ReadElem(const uint8_t* base, size_t index, Elem elem) {
  uint16_t raw;
  std::memcpy(&raw, base + 2 * index, 2);
  return ToF32(raw, elem);
}

double ReadCode(const uint8_t* base, size_t index, uint32_t bits) {
  const size_t bit = index * bits;
  return (base[bit / 8] >> (bit % 8)) & ((1u << bits) - 1);
}

/// Blocks of one kv head.
const uint8_t* KeyBlock(const AttentionShape& s, const WindowRef& w, uint32_t kv_head) {
  return w.k + kv_head * s.rungs[w.rung_k].k_head_bytes;
}
const uint8_t* ValueBlock(const AttentionShape& s, const WindowRef& w, uint32_t kv_head) {
  return w.v + kv_head * s.rungs[w.rung_v].v_head_bytes;
}

void Rotate(const RopeTable& rope, int64_t pos, double* key) {
  const RopeParams& p = rope.params();
  const std::vector<double> omega = RopeFrequencies(p);
  const uint32_t n_pairs = p.n_dims / 2;
  for (uint32_t i = 0; i < n_pairs; ++i) {
    const bool halves = p.pairing == RopePairing::kHalves;
    double& a = key[p.offset + (halves ? i : 2 * i)];
    double& b = key[p.offset + (halves ? i + n_pairs : 2 * i + 1)];
    const double c = rope.magnitude() * std::cos(omega[i] * static_cast<double>(pos));
    const double s = rope.magnitude() * std::sin(omega[i] * static_cast<double>(pos));
    const double x = a * c - b * s, y = a * s + b * c;
    a = x;
    b = y;
  }
}

/// Where the fields of each width begin: index 0 for 8 bits, then 4, 2, 1. In bits of a byte (keys)
/// or of a half word (values).
struct Fields {
  uint32_t begin[4] = {};
  Fields(const VectorCode& code, bool is_k) {
    uint32_t bits[4] = {};
    for (uint32_t s = 0; s < code.n_segments; ++s) {
      const uint32_t b = code.segments[s].bits, n = code.segments[s].n_units * (is_k ? 1 : 4);
      if (b == 8) bits[0] += 8 * n;
      if (b == 4) bits[1] += 4 * n;
      if (b == 2 || b == 3) bits[2] += 2 * n;
      if (b == 1 || b == 3) bits[3] += n;
    }
    for (int i = 1; i < 4; ++i) begin[i] = begin[i - 1] + bits[i - 1];
  }
};

/// Field of `width` bits that begins at `bit`, of one token's place within a unit.
uint32_t ReadField(const uint8_t* words, uint32_t bit, uint32_t width, uint32_t place,
                   uint32_t token, bool is_k) {
  const uint32_t v = bit + width * (token / 2);  // values
  const uint32_t row = is_k ? bit / 8 : v / 16, lane = is_k ? token : place;
  const uint32_t shift = is_k ? 8 * place + bit % 8 : v % 16 + 16 * (token % 2);
  uint32_t word;
  std::memcpy(&word, words + size_t{row} * 32 + lane * 4, 4);
  return word >> shift & ((1u << width) - 1);
}

/// Calls f(place, level) for all places of one token of a window in a token code.
template <class F>
void ForLevels(const VectorCode& code, const uint8_t* words, uint32_t token, bool is_k, F&& f) {
  words += size_t{token / 8} * code.n_words * 32;
  const uint32_t unit = is_k ? kKeyUnit : kValueUnit, per_width = is_k ? 1 : 4;
  Fields fields(code, is_k);
  uint32_t first = 0;
  for (uint32_t s = 0; s < code.n_segments; ++s) {
    const uint32_t bits = code.segments[s].bits;
    const auto read = [&](int field, uint32_t width, uint32_t place) {
      return ReadField(words, fields.begin[field], width, place, token % 8, is_k);
    };
    for (uint32_t u = 0; u < code.segments[s].n_units; ++u, first += unit) {
      for (uint32_t j = 0; j < unit; ++j) {
        uint32_t c = 0;
        if (bits == 8) c = read(0, 8, j);
        if (bits == 4) c = read(1, 4, j);
        if (bits == 2 || bits == 3) c = read(2, 2, j);
        if (bits == 1 || bits == 3) c |= read(3, 1, j) << (bits == 3 ? 2 : 0);
        f(first + j, static_cast<double>(bits == 8 ? c : code.levels[s][c]) - CenterOf(code, bits));
      }
      if (bits == 8) fields.begin[0] += 8 * per_width;
      if (bits == 4) fields.begin[1] += 4 * per_width;
      if (bits == 2 || bits == 3) fields.begin[2] += 2 * per_width;
      if (bits == 1 || bits == 3) fields.begin[3] += per_width;
    }
  }
}

/// Scale and zero of a token.
std::pair<double, double> GridOf(const VectorCode& code, const uint8_t* words, uint32_t window,
                                 uint32_t token) {
  const uint8_t* grid = words + size_t{window} * code.n_words * 4;
  const double zero =
      code.grid == TokenGrid::kScaleZero ? double{ReadElem(grid, window + token, Elem::kF16)} : 0.0;
  if (code.grid != TokenGrid::kScaleByte) return {ReadElem(grid, token, Elem::kF16), zero};
  return {F16ToF32(static_cast<uint16_t>(grid[token] << 6)), zero};
}

void DecodeToken(const VectorCode& code, const uint8_t* words, uint32_t window, uint32_t dim,
                 uint32_t token, bool is_k, double* x) {
  std::fill_n(x, dim, 0.0);
  const auto [scale, zero] = GridOf(code, words, window, token);
  ForLevels(code, words, token, is_k, [&, scale = scale, zero = zero](uint32_t j, double level) {
    if (code.step[j] != 0.0f) x[code.channel[j]] = code.step[j] * (scale * level + zero);
  });
}

/// One token of a window in a grid code, RoPE excepted.
void DecodeGrid(const GridVector& g, const uint8_t* block, uint32_t window, uint32_t dim,
                uint32_t token, bool is_k, double* x) {
  const GridLayout at = LayoutGrid(g, window, dim);
  const auto half = [block](size_t offset, size_t i) {
    return ReadElem(block + offset, i, Elem::kF16);
  };
  const uint32_t n_units = ByteGridUnits(dim);
  for (uint32_t c = 0; c < dim; ++c) {
    const size_t index =
        is_k ? (size_t{token / 8} * dim + c) * 8 + token % 8 : size_t{token} * dim + c;
    uint32_t code = 0;
    for (uint32_t i = 0; i < g.bits; ++i) {
      const size_t bit = index * g.bits + i;
      code |= (block[bit / 8] >> (bit % 8) & 1u) << i;
    }
    double value = g.levels != nullptr ? double{g.levels[code]} : code;
    if (g.bytes) {
      const uint32_t unit = c / kByteGridShare;
      value = value * half(at.units, unit) * block[at.scale + c] +
              half(at.units, n_units + unit) * static_cast<int8_t>(block[at.zero + c]);
    } else if (g.axis != GridAxis::kStatic) {
      const size_t i = g.axis == GridAxis::kChannel ? c : size_t{c / g.group} * window + token;
      value = value * half(at.scale, i) + (g.has_zero ? half(at.zero, i) : 0.0);
    }
    if (g.factor != nullptr) value *= g.factor[c];
    if (g.offset != nullptr) value += g.offset[c];
    x[c] = value;
  }
  const auto index = [block](size_t offset) {
    uint16_t i;
    std::memcpy(&i, block + offset, 2);
    return uint32_t{i};
  };
  for (uint32_t i = 0; i < g.n_exact; ++i) {
    const uint32_t where = index(at.exact + 4 * i);
    if (where / dim == token) x[where % dim] = half(at.exact + 4 * i + 2, 0);
  }
  for (uint32_t i = 0; i < g.n_exact_tokens; ++i) {
    const size_t entry = at.exact_tokens + i * (2 + size_t{2} * dim);
    if (index(entry) != token) continue;
    for (uint32_t c = 0; c < dim; ++c) x[c] = half(entry + 2, c);
  }
  if (g.sign == nullptr) return;
  const uint32_t n = HadamardBlock(dim);
  std::vector<double> y(x, x + dim);
  for (uint32_t c = 0; c < dim; ++c) {
    double sum = 0.0;
    for (uint32_t i = 0; i < n; ++i)
      sum += y[c / n * n + i] * (std::popcount(i & (c % n)) % 2 == 0 ? 1.0 : -1.0);
    x[c] = g.sign[c] * sum;
  }
}

/// True if keys that are stored before RoPE are rotated.
bool Rotates(const AttentionShape& s, const WindowRef& w) {
  const bool rotates = s.rope != nullptr && s.rope->params().pairing != RopePairing::kNone;
  return rotates && (w.pos_stride != 0 || w.pos0 != 0);
}

/// The static mean of a token's key, rotated to its position.
void RotateMean(const AttentionShape& s, const WindowRef& w, uint32_t token, double* mean) {
  if (s.rope == nullptr || s.rope->params().pairing == RopePairing::kNone) return;
  Rotate(*s.rope, int64_t{w.pos0} + int64_t{token} * w.pos_stride, mean);
}

/// The query's channels, scaled by the steps, as the kernels round them: places of 8 bits to 16
/// bits with a unit of their own, the others to 8 bits.
std::vector<double> RoundedQuery(const VectorCode& code, const std::vector<float>& scaled) {
  const uint32_t n_wide = WidePlaces(code);
  float largest[2] = {};
  for (size_t j = 0; j < scaled.size(); ++j) {
    float& each = largest[j < n_wide ? 0 : 1];
    each = std::max(each, std::abs(scaled[j]));
  }
  std::vector<double> rounded(scaled.size());
  for (size_t j = 0; j < scaled.size(); ++j) {
    const float unit = largest[j < n_wide ? 0 : 1] / 127.0f;
    if (!(unit > 0.0f)) continue;
    const float x = scaled[j] / unit, hi = std::nearbyint(x);
    const double lo = j < n_wide ? std::nearbyint((x - hi) * 254.0f) / 254.0 : 0.0;
    rounded[j] = unit * (hi + lo);
  }
  return rounded;
}

/// q . key of a window in a token code as the kernels define it.
double TokenLogit(const AttentionShape& s, const WindowRef& w, uint32_t kv_head, uint32_t token,
                  const float* q, double& magnitude) {
  const VectorCode& code = s.rungs[w.rung_k].token[kv_head].k;
  const uint8_t* words = KeyBlock(s, w, kv_head);
  std::vector<float> scaled(code.n_places);
  double sum = 0.0;
  for (uint32_t j = 0; j < code.n_places; ++j) {
    if (code.step[j] != 0.0f)
      scaled[j] = q[code.channel[j]] * (s.scale * internal::kLog2E) * code.step[j];
    sum += scaled[j];
  }
  const std::vector<double> rounded = RoundedQuery(code, scaled);
  const auto [scale, zero] = GridOf(code, words, s.window, token);
  double wide = 0.0, others = 0.0;
  ForLevels(code, words, token, true, [&](uint32_t j, double level) {
    (j < WidePlaces(code) ? wide : others) += rounded[j] * level;
  });
  magnitude = std::abs(scale * wide) + std::abs(scale * others) + std::abs(zero * sum);
  for (const float x : scaled) magnitude += std::abs(zero * x);
  double mean_score = 0.0;
  if (code.mean != nullptr) {
    std::vector<double> mean(code.mean, code.mean + s.head_dim);
    RotateMean(s, w, token, mean.data());
    for (uint32_t c = 0; c < s.head_dim; ++c) {
      mean_score += q[c] * mean[c] * s.scale;
      magnitude += 4.0 * std::abs(q[c] * mean[c] * s.scale);  // two rotations more
    }
  }
  return (scale * (wide + others) + zero * sum) * std::numbers::ln2 + mean_score;
}

struct Logits {
  std::vector<double> values;  // [window * W + token], -inf where not seen
  double magnitude = 0.0;
};

Logits RowLogits(const AttentionGroup& g, uint32_t row, uint32_t head) {
  const AttentionShape& s = *g.shape;
  const float* q = g.q + row * g.q_row_stride + head * g.q_head_stride;
  Logits r;
  r.values.assign(g.windows.size() * s.window, kMinusInf);
  std::vector<double> key(s.head_dim);
  for (size_t i = 0; i < g.windows.size(); ++i) {
    for (uint32_t t = 0; t < s.window; ++t) {
      if (((g.visible[row * g.visible_stride + i] >> t) & 1u) == 0) continue;
      double dot = 0.0, magnitude = 0.0;
      if (s.rungs[g.windows[i].rung_k].format == WindowFormat::kToken) {
        dot = TokenLogit(s, g.windows[i], head / s.n_gqa, t, q, magnitude);
      } else {
        ReferenceKey(s, g.windows[i], head / s.n_gqa, t, key.data());
        for (uint32_t c = 0; c < s.head_dim; ++c) {
          dot += q[c] * key[c];
          magnitude += std::abs(q[c] * key[c]);
        }
        dot *= s.scale;
        magnitude *= std::abs(s.scale);
      }
      if (s.softcap > 0.0f) dot = s.softcap * std::tanh(dot / s.softcap);
      if (g.bias != nullptr) {
        const double slope = s.slopes != nullptr ? s.slopes[head] : 1.0;
        const double bias = slope * g.bias[row * g.bias_stride + i * s.window + t];
        dot += bias;
        if (std::isfinite(bias)) magnitude += std::abs(bias);
      }
      r.values[i * s.window + t] = dot;
      r.magnitude = std::max(r.magnitude, magnitude);
    }
  }
  return r;
}

}  // namespace

void ReferenceKey(const AttentionShape& s, const WindowRef& w, uint32_t kv_head, uint32_t token,
                  double* key) {
  const RungCode& rung = s.rungs[w.rung_k];
  const uint8_t* block = KeyBlock(s, w, kv_head);
  const uint32_t d = s.head_dim, sub = std::min(s.window, 8u);
  if (rung.format == WindowFormat::kFull) {
    for (uint32_t c = 0; c < d; ++c) {
      key[c] = ReadElem(block, (size_t{token / sub} * d + c) * sub + token % sub, s.elem_k);
    }
    return;
  }
  if (rung.format == WindowFormat::kToken) {
    const VectorCode& code = rung.token[kv_head].k;
    DecodeToken(code, block, s.window, d, token, true, key);
    if (code.mean == nullptr) return;
    std::vector<double> mean(code.mean, code.mean + d);
    RotateMean(s, w, token, mean.data());
    for (uint32_t c = 0; c < d; ++c) key[c] += mean[c];
    return;
  }
  if (rung.format == WindowFormat::kGrid) {
    const GridVector& g = rung.grid[kv_head].k;
    DecodeGrid(g, block, s.window, d, token, true, key);
    if (g.before_rope && Rotates(s, w))
      Rotate(*s.rope, int64_t{w.pos0} + int64_t{token} * w.pos_stride, key);
    return;
  }
  const uint32_t bits = rung.format == WindowFormat::kPacked2 ? 2 : 4;
  const uint8_t* grid = block + size_t{d} * s.window * bits / 8;
  for (uint32_t c = 0; c < d; ++c) {
    key[c] = ReadCode(block, size_t{c} * s.window + token, bits) * ReadElem(grid, c, Elem::kF16) +
             ReadElem(grid, d + c, Elem::kF16);
  }
  if (Rotates(s, w)) Rotate(*s.rope, int64_t{w.pos0} + int64_t{token} * w.pos_stride, key);
}

void ReferenceValue(const AttentionShape& s, const WindowRef& w, uint32_t kv_head, uint32_t token,
                    double* value) {
  const RungCode& rung = s.rungs[w.rung_v];
  const uint8_t* block = ValueBlock(s, w, kv_head);
  const uint32_t dv = s.head_dim_v;
  if (rung.format == WindowFormat::kFull) {
    for (uint32_t c = 0; c < dv; ++c) value[c] = ReadElem(block, size_t{token} * dv + c, s.elem_v);
    return;
  }
  if (rung.format == WindowFormat::kToken) {
    DecodeToken(rung.token[kv_head].v, block, s.window, dv, token, false, value);
    return;
  }
  if (rung.format == WindowFormat::kGrid) {
    DecodeGrid(rung.grid[kv_head].v, block, s.window, dv, token, false, value);
    return;
  }
  const uint32_t bits = rung.format == WindowFormat::kPacked2 ? 2 : 4;
  const uint8_t* grid = block + size_t{dv} * s.window * bits / 8;
  const double scale = ReadElem(grid, token, Elem::kF16),
               zero = ReadElem(grid, s.window + token, Elem::kF16);
  for (uint32_t c = 0; c < dv; ++c)
    value[c] = ReadCode(block, size_t{token} * dv + c, bits) * scale + zero;
}

ReferenceResult AttendReference(const AttentionGroup& g) {
  const AttentionShape& s = *g.shape;
  const uint32_t n_heads = s.n_kv_heads * s.n_gqa, dv = s.head_dim_v;
  const size_t n_windows = g.windows.size();
  ReferenceResult r;
  r.out.assign(size_t{g.n_rows} * n_heads * dv, 0.0);
  r.mass.assign(size_t{g.mass_per_head ? n_heads : s.n_kv_heads} * n_windows, 0.0);
  r.token_mass.assign(s.n_kv_heads * n_windows * s.window, 0.0);
  r.sink.assign(size_t{g.n_rows} * n_heads, 0.0);
  r.magnitude.assign(size_t{g.n_rows} * n_heads, 0.0);
  std::vector<double> value(dv);
  for (uint32_t row = 0; row < g.n_rows; ++row) {
    for (uint32_t head = 0; head < n_heads; ++head) {
      const Logits logits = RowLogits(g, row, head);
      const size_t index = size_t{row} * n_heads + head;
      double max = s.sinks != nullptr ? double{s.sinks[head]} : kMinusInf;
      for (double x : logits.values) max = std::max(max, x);
      r.magnitude[index] = logits.magnitude;
      if (max == kMinusInf) continue;
      double sum = s.sinks != nullptr ? std::exp(s.sinks[head] - max) : 0.0;
      for (double x : logits.values) sum += std::exp(x - max);
      if (s.sinks != nullptr) r.sink[index] = std::exp(s.sinks[head] - max) / sum;
      std::vector<double> masses(n_windows, 0.0);
      for (size_t k = 0; k < logits.values.size(); ++k) {
        const double p = std::exp(logits.values[k] - max) / sum;
        if (p == 0.0) continue;
        const uint32_t window = static_cast<uint32_t>(k / s.window),
                       token = static_cast<uint32_t>(k % s.window);
        ReferenceValue(s, g.windows[window], head / s.n_gqa, token, value.data());
        for (uint32_t c = 0; c < dv; ++c) r.out[index * dv + c] += p * value[c];
        masses[window] += p;
        if (row >= g.token_mass_first_row)
          r.token_mass[head / s.n_gqa * logits.values.size() + k] += p;
      }
      if (row < g.mass_first_row) continue;
      double* mass = r.mass.data() + (g.mass_per_head ? head : head / s.n_gqa) * n_windows;
      for (size_t w = 0; w < n_windows; ++w) {
        mass[w] =
            g.mass_kind == MassKind::kMax ? std::max(mass[w], masses[w]) : mass[w] + masses[w];
      }
    }
  }
  return r;
}

}  // namespace qevict::kernels
