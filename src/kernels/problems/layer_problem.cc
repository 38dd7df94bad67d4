#include "kernels/problems/layer_problem.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace qevict::kernels {

const char* FormatsName(Formats formats) {
  constexpr const char* kNames[] = {"full", "packed2", "packed4", "token", "grid", "mixed"};
  return kNames[static_cast<int>(formats)];
}

ProblemParams LayerParams(const LayerShape& s, Formats formats, uint32_t rows, uint32_t n_tokens) {
  ProblemParams p;
  p.n_kv_heads = s.n_kv_heads;
  p.grid_k.before_rope = true;  // keys per channel, values per token
  p.grid_v.axis = GridAxis::kToken;
  p.n_gqa = s.n_gqa;
  p.head_dim = p.head_dim_v = p.rope.n_dims = s.head_dim;
  p.rope.pairing = s.pairing;
  p.n_rows = rows;
  p.n_windows = n_tokens / p.window;
  p.formats = formats;
  p.mask = Mask::kCausal;
  return p;
}

std::string CheckShort(ProblemParams p) {
  p.n_windows = std::min(p.n_windows, 40u);
  p.n_rows = std::min(p.n_rows, 40u);
  Problem problem(p);
  const auto pool = MakeSerial();
  Workspace workspace;
  problem.Run(*pool, workspace);
  return problem.Compare();
}

LayerRows StoredRows(const Problem& problem) {
  const AttentionGroup& g = problem.group();
  const AttentionShape& s = *g.shape;
  const size_t row = size_t{s.n_kv_heads} * s.head_dim, n_tokens = g.windows.size() * s.window;
  LayerRows rows{std::vector<float>(n_tokens * row), std::vector<float>(n_tokens * row)};
  std::vector<double> values(s.head_dim);
  const auto store = [&](std::vector<float>& to, size_t at) {
    std::transform(values.begin(), values.end(), to.begin() + static_cast<std::ptrdiff_t>(at),
                   [](double x) { return static_cast<float>(x); });
  };
  for (size_t i = 0; i < n_tokens; ++i) {
    const WindowRef& window = g.windows[i / s.window];
    const auto token = static_cast<uint32_t>(i % s.window);
    for (uint32_t h = 0; h < s.n_kv_heads; ++h) {
      ReferenceKey(s, window, h, token, values.data());
      store(rows.keys, i * row + size_t{h} * s.head_dim);
      ReferenceValue(s, window, h, token, values.data());
      store(rows.values, i * row + size_t{h} * s.head_dim);
    }
  }
  return rows;
}

std::vector<float> QueryRow(const Problem& problem) {
  const AttentionGroup& g = problem.group();
  const AttentionShape& s = *g.shape;
  std::vector<float> query;
  for (uint32_t h = 0; h < s.n_kv_heads * s.n_gqa; ++h) {
    const float* q = g.q + h * g.q_head_stride;
    query.insert(query.end(), q, q + s.head_dim);
  }
  return query;
}

namespace {

/// Probabilities of all tokens for one head.
std::vector<double> Probabilities(const LayerShape& s, const float* q, const float* keys,
                                  size_t n_tokens, size_t stride) {
  std::vector<double> p(n_tokens);
  for (size_t i = 0; i < n_tokens; ++i) {
    double dot = 0.0;
    for (uint32_t c = 0; c < s.head_dim; ++c) {
      dot += static_cast<double>(q[c]) * static_cast<double>(keys[i * stride + c]);
    }
    p[i] = dot / std::sqrt(static_cast<double>(s.head_dim));
  }
  const double top = *std::max_element(p.begin(), p.end());
  double sum = 0.0;
  for (double& x : p) sum += x = std::exp(x - top);
  for (double& x : p) x /= sum;
  return p;
}

}  // namespace

PlainResult AttendPlain(const LayerShape& s, std::span<const float> query, const LayerRows& rows,
                        uint32_t window) {
  const size_t stride = size_t{s.n_kv_heads} * s.head_dim, n_tokens = rows.keys.size() / stride;
  const size_t n_windows = (n_tokens + window - 1) / window, n_heads = s.n_kv_heads * s.n_gqa;
  PlainResult result{std::vector<double>(n_heads * s.head_dim),
                     std::vector<double>(s.n_kv_heads * n_windows)};
  for (size_t h = 0; h < n_heads; ++h) {
    const size_t kv_head = h / s.n_gqa, offset = kv_head * s.head_dim;
    const std::vector<double> p = Probabilities(s, query.data() + h * s.head_dim,
                                                rows.keys.data() + offset, n_tokens, stride);
    double* out = result.out.data() + h * s.head_dim;
    for (size_t i = 0; i < n_tokens; ++i) {
      const float* value = rows.values.data() + i * stride + offset;
      for (uint32_t c = 0; c < s.head_dim; ++c) out[c] += p[i] * static_cast<double>(value[c]);
      result.mass[kv_head * n_windows + i / window] += p[i];
    }
  }
  return result;
}

double RelativeError(std::span<const float> got, std::span<const double> want) {
  double error = 0.0, largest = std::numeric_limits<double>::min();
  for (size_t i = 0; i < want.size(); ++i) {
    if (!std::isfinite(got[i])) return std::numeric_limits<double>::infinity();
    error = std::max(error, std::abs(static_cast<double>(got[i]) - want[i]));
    largest = std::max(largest, std::abs(want[i]));
  }
  return error / largest;
}

}  // namespace qevict::kernels
