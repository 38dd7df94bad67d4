// Random grid codes (grid_code.h) of a Problem.
#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "kernels/problems/problem.h"

namespace qevict::kernels {
namespace {

constexpr uint32_t kPadding = 16;  // floats that may be read past an array

}  // namespace

const float* Problem::GridArray(uint32_t n, float mean, float spread) {
  grid_arrays_.push_back(std::make_unique<std::vector<float>>(n + kPadding));
  for (float& x : *grid_arrays_.back()) x = mean + spread * Normal();
  return grid_arrays_.back()->data();
}

GridVector Problem::MakeGridVector(const GridParams& p, uint32_t dim) {
  GridVector g;
  g.bits = p.bits;
  g.axis = p.axis;
  g.has_zero = p.zero || p.bytes;
  g.bytes = p.bytes;
  g.before_rope = p.before_rope;
  g.group = p.group == 0 ? dim : p.group;
  g.n_exact = p.n_exact;
  g.n_exact_tokens = p.n_exact_tokens;
  if (p.levels) g.levels = GridArray(16, 0.0f, 1.0f);
  if (p.factor) g.factor = GridArray(dim, 1.0f, 0.3f);
  if (p.offset) g.offset = GridArray(dim, 0.0f, 1.0f);
  if (p.sign) {
    auto signs = std::make_unique<std::vector<float>>(dim + kPadding);
    const float size = 1.0f / std::sqrt(static_cast<float>(HadamardBlock(dim)));
    for (float& x : *signs) x = (rng_() & 1u) != 0 ? size : -size;
    grid_arrays_.push_back(std::move(signs));
    g.sign = grid_arrays_.back()->data();
  }
  return g;
}

void Problem::MakeGridCodes() {
  const ProblemParams& p = params_;
  for (uint32_t h = 0; h < p.n_kv_heads; ++h) {
    grids_.push_back(
        {MakeGridVector(p.grid_k, p.head_dim), MakeGridVector(p.grid_v, p.head_dim_v)});
  }
  shape_.rungs[4].grid = grids_.data();
}

void Problem::FillGrid(std::vector<uint8_t>& block, size_t window, uint32_t kv_head) {
  const ProblemParams& p = params_;
  const uint32_t seen = SeenBits(window);
  size_t at = kv_head * HeadBytes(4);
  for (const bool is_k : {true, false}) {
    const GridVector& g = is_k ? grids_[kv_head].k : grids_[kv_head].v;
    const uint32_t dim = is_k ? p.head_dim : p.head_dim_v, n = GridCount(g, p.window, dim);
    const GridLayout lay = LayoutGrid(g, p.window, dim);
    for (size_t i = 0; i < lay.units; ++i) block[at + i] = static_cast<uint8_t>(rng_());
    const float levels = g.levels != nullptr ? 1.0f : static_cast<float>((1u << g.bits) - 1);
    for (uint32_t i = 0; i < (lay.scale - lay.units) / 2; ++i)
      Write16(block, at + lay.units + 2 * i, F32ToF16((0.5f + std::abs(Normal())) / 128.0f));
    for (uint32_t i = 0; i < n; ++i) {
      if (g.axis == GridAxis::kToken && ((seen >> (i % p.window)) & 1u) == 0) continue;
      if (g.bytes) {
        block[at + lay.scale + i] = static_cast<uint8_t>(static_cast<float>(rng_() % 256) / levels);
        block[at + lay.zero + i] = static_cast<uint8_t>(rng_());
        continue;
      }
      Write16(block, at + lay.scale + 2 * i, F32ToF16((1.0f + std::abs(Normal())) / levels));
      if (g.has_zero) Write16(block, at + lay.zero + 2 * i, F32ToF16(Normal() - 1.0f));
    }
    for (uint32_t i = 0; i + 1 < g.n_exact; ++i) {  // the last one stays unused
      Write16(block, at + lay.exact + 4 * i, static_cast<uint16_t>(rng_() % (p.window * dim)));
      Write16(block, at + lay.exact + 4 * i + 2, F32ToF16(5.0f * Normal()));
    }
    for (uint32_t i = 0; i + 1 < g.n_exact_tokens; ++i) {
      const size_t entry = at + lay.exact_tokens + i * (2 + 2 * dim);
      Write16(block, entry, static_cast<uint16_t>(i * 3 % p.window));
      for (uint32_t c = 0; c < dim; ++c)
        Write16(block, entry + 2 + 2 * c, F32ToF16(2.0f * Normal()));
    }
    at += lay.end;
  }
}

}  // namespace qevict::kernels
