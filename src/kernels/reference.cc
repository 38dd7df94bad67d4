#include "kernels/reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/half.h"
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

/// Block of one kv head.
const uint8_t* HeadBlock(const AttentionShape& s, const WindowRef& w, uint32_t kv_head) {
  return w.data + kv_head * s.head_bytes[static_cast<int>(w.format)];
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
      ReferenceKey(s, g.windows[i], head / s.n_gqa, t, key.data());
      double dot = 0.0, magnitude = 0.0;
      for (uint32_t c = 0; c < s.head_dim; ++c) {
        dot += q[c] * key[c];
        magnitude += std::abs(q[c] * key[c]);
      }
      dot *= s.scale;
      magnitude *= std::abs(s.scale);
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
  const uint8_t* block = HeadBlock(s, w, kv_head);
  const uint32_t d = s.head_dim, sub = std::min(s.window, 8u);
  if (w.format == WindowFormat::kFull) {
    for (uint32_t c = 0; c < d; ++c) {
      key[c] = ReadElem(block, (size_t{token / sub} * d + c) * sub + token % sub, s.elem_k);
    }
    return;
  }
  const uint32_t bits = w.format == WindowFormat::kPacked2 ? 2 : 4;
  const uint8_t* grid = block + size_t{d} * s.window * bits / 8;
  for (uint32_t c = 0; c < d; ++c) {
    key[c] = ReadCode(block, size_t{c} * s.window + token, bits) * ReadElem(grid, c, Elem::kF16) +
             ReadElem(grid, d + c, Elem::kF16);
  }
  const bool rotates = s.rope != nullptr && s.rope->params().pairing != RopePairing::kNone;
  if (rotates && (w.pos_stride != 0 || w.pos0 != 0)) {
    Rotate(*s.rope, int64_t{w.pos0} + int64_t{token} * w.pos_stride, key);
  }
}

void ReferenceValue(const AttentionShape& s, const WindowRef& w, uint32_t kv_head, uint32_t token,
                    double* value) {
  const uint8_t* block = HeadBlock(s, w, kv_head);
  const uint32_t dv = s.head_dim_v;
  if (w.format == WindowFormat::kFull) {
    const uint8_t* rows = block + size_t{s.window} * s.head_dim * 2;
    for (uint32_t c = 0; c < dv; ++c) value[c] = ReadElem(rows, size_t{token} * dv + c, s.elem_v);
    return;
  }
  const uint32_t bits = w.format == WindowFormat::kPacked2 ? 2 : 4;
  const uint8_t* codes = block + size_t{s.head_dim} * s.window * bits / 8 + size_t{s.head_dim} * 4;
  const uint8_t* grid = codes + size_t{dv} * s.window * bits / 8;
  const double scale = ReadElem(grid, token, Elem::kF16),
               zero = ReadElem(grid, s.window + token, Elem::kF16);
  for (uint32_t c = 0; c < dv; ++c)
    value[c] = ReadCode(codes, size_t{token} * dv + c, bits) * scale + zero;
}

ReferenceResult AttendReference(const AttentionGroup& g) {
  const AttentionShape& s = *g.shape;
  const uint32_t n_heads = s.n_kv_heads * s.n_gqa, dv = s.head_dim_v;
  const size_t n_windows = g.windows.size();
  ReferenceResult r;
  r.out.assign(size_t{g.n_rows} * n_heads * dv, 0.0);
  r.mass.assign(size_t{s.n_kv_heads} * n_windows, 0.0);
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
      for (size_t k = 0; k < logits.values.size(); ++k) {
        const double p = std::exp(logits.values[k] - max) / sum;
        if (p == 0.0) continue;
        const uint32_t window = static_cast<uint32_t>(k / s.window),
                       token = static_cast<uint32_t>(k % s.window);
        ReferenceValue(s, g.windows[window], head / s.n_gqa, token, value.data());
        for (uint32_t c = 0; c < dv; ++c) r.out[index * dv + c] += p * value[c];
        if (row >= g.mass_first_row) r.mass[head / s.n_gqa * n_windows + window] += p;
      }
    }
  }
  return r;
}

}  // namespace qevict::kernels
