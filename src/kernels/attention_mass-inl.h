// Exponentials of a block of query vectors, per window and per token, as the masses need them: each
// tile's relative to the maximum at that time, at the end all relative to the last one. Included by
// attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_softmax-inl.h"

namespace qevict::kernels::internal {

template <class S>
class Masses {
 public:
  explicit Masses(const BlockArgs& args) : a_(args), h_(*args.head), s_(args.scratch) {}

  bool any() const { return a_.state.mass != nullptr || a_.state.token_mass != nullptr; }

  /// Query vector m gives nothing to the n_win windows of a tile, from `first` on.
  void Clear(uint32_t m, uint32_t first, uint32_t n_win, uint32_t tile) {
    if (a_.state.mass != nullptr) {
      float* mass = a_.state.mass + m * a_.state.mass_stride + first;
      for (uint32_t i = 0; i < n_win; ++i) mass[i] = 0.0f;
    }
    if (CountsTokens(m)) {
      float* tokens = TileTokens(m, first);
      for (uint32_t i = 0; i < kTile; i += S::kLanes) S::Store(tokens + i, S::Zero());
    }
    s_.tile_max[m * a_.tile_max_stride + tile] = a_.state.m[m];
  }

  /// It gives its exponentials p [kTile], 0 where it sees nothing.
  void Keep(uint32_t m, const float* p, uint32_t first, uint32_t n_win, uint32_t tile) {
    if (!Counts(m) && !CountsTokens(m)) return Clear(m, first, n_win, tile);
    if (Counts(m))
      WindowSums<S>(p, h_.window, n_win, a_.state.mass + m * a_.state.mass_stride + first);
    if (CountsTokens(m)) {
      float* tokens = TileTokens(m, first);
      for (uint32_t i = 0; i < kTile; i += S::kLanes) S::Store(tokens + i, S::Load(p + i));
    }
    s_.tile_max[m * a_.tile_max_stride + tile] = a_.state.m[m];
  }

  /// Brings all to the final maximum.
  void Rescale() {
    for (uint32_t m = 0; m < a_.n_vec; ++m) {
      const bool windows = Counts(m), tokens = CountsTokens(m);
      if ((!windows && !tokens) || a_.state.m[m] == kMinusInf) continue;
      const auto now = S::Set1(a_.state.m[m]);
      float* factors = s_.tile_max + m * a_.tile_max_stride;
      for (uint32_t i = 0; i * h_.tile_windows < a_.n_win; i += S::kLanes) {
        S::Store(factors + i, Exp2<S>(S::Sub(S::Load(factors + i), now)));
      }
      for (uint32_t i = 0, tile = 0; i < a_.n_win; i += h_.tile_windows, ++tile) {
        if (factors[tile] == 1.0f) continue;
        if (windows) ScaleWindows(m, i, factors[tile]);
        if (tokens) ScaleTokens(m, i, factors[tile]);
      }
    }
  }

 private:
  bool Counts(uint32_t m) const {
    return a_.state.mass != nullptr && s_.rows[m] >= h_.mass_first_row;
  }
  bool CountsTokens(uint32_t m) const {
    return a_.state.token_mass != nullptr && s_.rows[m] >= h_.token_mass_first_row;
  }
  /// Of the tile whose first window is `first`.
  float* TileTokens(uint32_t m, uint32_t first) const {
    return a_.state.token_mass + m * a_.state.token_stride + static_cast<size_t>(first) * h_.window;
  }

  void ScaleWindows(uint32_t m, uint32_t first, float factor) {
    float* mass = a_.state.mass + m * a_.state.mass_stride;
    const uint32_t left = a_.n_win - first,
                   end = left < h_.tile_windows ? a_.n_win : first + h_.tile_windows;
    for (uint32_t w = first; w < end; ++w) mass[w] *= factor;
  }

  void ScaleTokens(uint32_t m, uint32_t first, float factor) {
    float* tokens = TileTokens(m, first);
    const auto f = S::Set1(factor);
    for (uint32_t i = 0; i < kTile; i += S::kLanes)
      S::Store(tokens + i, S::Mul(S::Load(tokens + i), f));
  }

  const BlockArgs& a_;
  const HeadArgs& h_;
  const Scratch& s_;
};

}  // namespace qevict::kernels::internal
