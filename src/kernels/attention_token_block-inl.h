// The part of a block of query vectors that looks at windows in a token code: queries in bytes,
// an output of its own in the order of places, and its join with the output proper. Included by
// attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_mean-inl.h"
#include "kernels/attention_token-inl.h"

namespace qevict::kernels::internal {

/// Blocks of 8 tokens of the tile's windows in a token code that somebody sees.
struct TokenTile {
  TokenBlock blocks[kTile / 8 + 1];
  uint32_t n = 0;
};

template <class S>
class TokenPart {
 public:
  explicit TokenPart(const BlockArgs& args)
      : a_(args), h_(*args.head), s_(args.scratch), mean_(args) {}

  void Prepare() {
    const size_t stride = QueryStride();
    k_fields_ = FieldCursors(h_.token->k);
    wide_ = WidePlaces(h_.token->k) != 0;
    for (uint32_t m = 0; m < a_.n_vec; ++m) {
      queries_[m] = QuantizeQuery<S>(h_.token->k, s_.q + static_cast<size_t>(m) * h_.head_dim,
                                     s_.q_bytes + m * stride);
    }
    if (mean_.active()) mean_.Prepare();
    __builtin_memset(s_.token_o, 0, sizeof(float) * a_.n_vec * s_.token_stride);
  }

  /// whole_tile: nobody sees any other token of the tile.
  void Score(const TokenTile& tile, bool whole_tile) {
    const size_t stride = QueryStride();
    for (uint32_t i = 0; i < tile.n; i += S::kLanes / 8) {
      TokenBlock x = tile.blocks[i];  // the last one may be its own partner
      TokenBlock y = i + 1 < tile.n ? tile.blocks[i + 1] : x;
      ForBlocks(0, a_.n_vec, [&](uint32_t m, auto block) {
        constexpr int kM = decltype(block)::value;
        const auto score = wide_ ? ScoreTokens<S, kM, true> : ScoreTokens<S, kM, false>;
        score(h_.token->k, k_fields_, x, y, s_.q_bytes + m * stride, stride, queries_ + m,
              s_.scores + m * kTile);
        x.ahead.step = y.ahead.step = 0;  // has been fetched
      });
    }
    if (!mean_.active()) return;
    if (whole_tile && Contiguous(tile)) return mean_.AddTile(tile.blocks[0].pos);
    for (uint32_t i = 0; i < tile.n; ++i) {
      const TokenBlock& x = tile.blocks[i];
      mean_.Add(x.pos, x.pos_stride, s_.scores + x.column);
    }
  }

  /// Adds probability * value of the tile's blocks to the part's output.
  void Add(const TokenTile& tile, uint64_t seen) {
    alignas(64) float scale[kTile] = {}, zero[kTile] = {};
    const VectorCode& code = h_.token->v;
    for (uint32_t i = 0; i < tile.n; ++i) {
      const TokenBlock& b = tile.blocks[i];
      float *s = scale + b.column, *z = zero + b.column;
      S::StoreBlocks(LoadScales<S>(code, b.v_scale, b.v_scale), s, s);
      if (HasZero(code)) S::StoreBlocks(S::LoadF16Blocks(b.v_zero, b.v_zero), z, z);
    }
    for (uint32_t i = 0; i < kTile; i += S::kLanes) {  // what nobody sees may hold anything
      const uint32_t bits = static_cast<uint32_t>(seen >> i);
      S::Store(scale + i, S::IfBits(bits, S::Load(scale + i), S::Zero()));
      S::Store(zero + i, S::IfBits(bits, S::Load(zero + i), S::Zero()));
    }
    ForBlocks(0, a_.n_vec, [&](uint32_t m, auto block) {
      AddBlock<decltype(block)::value>(tile, m, scale, zero);
    });
  }

  void Rescale(uint32_t m, float factor) {
    float* o = s_.token_o + static_cast<size_t>(m) * s_.token_stride;
    const auto f = S::Set1(factor);
    for (uint32_t j = 0; j < s_.token_stride; j += S::kLanes)
      S::Store(o + j, S::Mul(S::Load(o + j), f));
  }

  /// o [n_vec][dv_pad] += the part's output, in the order of channels.
  void Join(float* o) {
    const VectorCode& code = h_.token->v;
    for (uint32_t m = 0; m < a_.n_vec; ++m) {
      const float* places = s_.token_o + static_cast<size_t>(m) * s_.token_stride;
      float* out = o + static_cast<size_t>(m) * h_.dv_pad;
      const float zeros = places[ZerosAt()];
      for (uint32_t j = 0; j < code.n_places; ++j) {
        if (code.step[j] != 0.0f) out[code.channel[j]] += code.step[j] * (places[j] + zeros);
      }
    }
  }

 private:
  /// The tile's tokens follow each other, from its first column on.
  bool Contiguous(const TokenTile& tile) const {
    const int32_t first = tile.blocks[0].pos;
    for (uint32_t i = 0; i < tile.n; ++i) {
      const TokenBlock& x = tile.blocks[i];
      if (x.pos_stride != 1 || x.pos - first != static_cast<int32_t>(x.column)) return false;
    }
    return mean_.Tabled64(first);
  }
  size_t QueryStride() const { return QueryBytes(h_.token->k); }
  /// Behind the places of a query vector's output: sum of probability * zero.
  uint32_t ZerosAt() const { return s_.token_stride - kPad; }

  template <int kM>
  void AddBlock(const TokenTile& tile, uint32_t m, const float* scale, const float* zero) {
    const VectorCode& code = h_.token->v;
    float units[kM];
    int32_t sums[kM];  // of the weights, if centers need them
    for (uint32_t i = 0; i < kM; ++i) {
      const float* p = s_.scores + (m + i) * kTile;
      sums[i] = 0;
      units[i] = QuantizeWeights<S>(p, scale, s_.weights + (m + i) * kTile,
                                    code.center != 0 ? sums + i : nullptr);
      float* o = s_.token_o + static_cast<size_t>(m + i) * s_.token_stride;
      if (HasZero(code)) o[ZerosAt()] += DotTile<S>(p, zero);
    }
    float* o = s_.token_o + static_cast<size_t>(m) * s_.token_stride;
    AddTokens<S, kM>(code, tile.blocks, tile.n, s_.weights + m * kTile, sums, units, o,
                     s_.token_stride, code.n_places);
  }

  const BlockArgs& a_;
  const HeadArgs& h_;
  const Scratch& s_;
  TokenQuery queries_[kPromptVectors];
  FieldCursors k_fields_;
  bool wide_ = false;  ///< keys have places of 8 bits
  MeanPart<S> mean_;
};

}  // namespace qevict::kernels::internal
