// The part of a block of query vectors that looks at keys and values of one rung in a token code:
// queries in bytes, an output of its own in the order of places, and its join with the output
// proper. Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_mean-inl.h"
#include "kernels/attention_token-inl.h"

namespace qevict::kernels::internal {

/// Blocks of 8 tokens of the tile's keys (or values) on one rung that somebody sees.
struct TokenTile {
  TokenBlock blocks[kTile / 8 + 1];
  uint32_t n;
};

template <class S>
class TokenPart {
 public:
  TokenTile keys, values;  ///< of the tile at hand

  /// has_keys, has_values: whether some window of the chunk has them on this rung.
  void Prepare(const BlockArgs& args, uint32_t rung, bool has_keys, bool has_values) {
    a_ = &args;
    h_ = args.head;
    s_ = &args.scratch;
    own_ = &args.scratch.token[rung];
    code_ = h_->rungs[rung].token;
    if (has_keys) {
      key_offsets_ = TokenOffsets(code_->k, h_->window);
      k_fields_ = FieldCursors(code_->k);
      wide_ = WidePlaces(code_->k) != 0;
      const size_t stride = QueryStride();
      for (uint32_t m = 0; m < a_->n_vec; ++m) {
        queries_[m] = QuantizeQuery<S>(code_->k, s_->q + static_cast<size_t>(m) * h_->head_dim,
                                       own_->q_bytes + m * stride);
      }
    }
    if (!has_values) return;
    value_offsets_ = TokenOffsets(code_->v, h_->window);
    __builtin_memset(own_->o, 0, sizeof(float) * a_->n_vec * own_->stride);
  }

  /// Adds 8 tokens of a window's keys, which begin at p, to `keys`.
  void ListKeys(const WindowRef& w, const uint8_t* p, uint32_t part, uint32_t column,
                const Ahead& ahead) {
    TokenBlock& block = keys.blocks[keys.n++];
    key_offsets_.Locate(p, part, column, block);
    block.pos_stride = w.pos_stride;
    block.pos = w.pos0 + static_cast<int32_t>(8 * part * w.pos_stride);
    block.ahead = ahead;
  }
  void ListValues(const uint8_t* p, uint32_t part, uint32_t column) {
    value_offsets_.Locate(p, part, column, values.blocks[values.n++]);
  }

  /// Scores of the listed keys, without their mean's part.
  void Score() {
    const size_t stride = QueryStride();
    for (uint32_t i = 0; i < keys.n; i += S::kLanes / 8) {
      TokenBlock x = keys.blocks[i];  // the last one may be its own partner
      TokenBlock y = i + 1 < keys.n ? keys.blocks[i + 1] : x;
      ForBlocks(0, a_->n_vec, [&](uint32_t m, auto block) {
        constexpr int kM = decltype(block)::value;
        const auto score = wide_ ? ScoreTokens<S, kM, true> : ScoreTokens<S, kM, false>;
        score(code_->k, k_fields_, x, y, own_->q_bytes + m * stride, stride, queries_ + m,
              s_->scores + m * kTile);
        x.ahead.step = y.ahead.step = 0;  // has been fetched
      });
    }
  }

  /// Adds probability * value of the listed values to the part's output.
  void Add(uint64_t seen) {
    alignas(64) float scale[kTile] = {}, zero[kTile] = {};
    const VectorCode& code = code_->v;
    for (uint32_t i = 0; i < values.n; ++i) {
      const TokenBlock& b = values.blocks[i];
      float *s = scale + b.column, *z = zero + b.column;
      S::StoreBlocks(LoadScales<S>(code, b.scale, b.scale), s, s);
      if (HasZero(code)) S::StoreBlocks(S::LoadF16Blocks(b.zero, b.zero), z, z);
    }
    for (uint32_t i = 0; i < kTile; i += S::kLanes) {  // what nobody sees may hold anything
      const uint32_t bits = static_cast<uint32_t>(seen >> i);
      S::Store(scale + i, S::IfBits(bits, S::Load(scale + i), S::Zero()));
      S::Store(zero + i, S::IfBits(bits, S::Load(zero + i), S::Zero()));
    }
    ForBlocks(0, a_->n_vec,
              [&](uint32_t m, auto block) { AddBlock<decltype(block)::value>(m, scale, zero); });
  }

  void Rescale(uint32_t m, float factor) {
    float* o = own_->o + static_cast<size_t>(m) * own_->stride;
    const auto f = S::Set1(factor);
    for (uint32_t j = 0; j < own_->stride; j += S::kLanes)
      S::Store(o + j, S::Mul(S::Load(o + j), f));
  }

  /// o [n_vec][dv_pad] += the part's output, in the order of channels.
  void Join(float* o) {
    const VectorCode& code = code_->v;
    for (uint32_t m = 0; m < a_->n_vec; ++m) {
      const float* places = own_->o + static_cast<size_t>(m) * own_->stride;
      float* out = o + static_cast<size_t>(m) * h_->dv_pad;
      const float zeros = places[ZerosAt()];
      for (uint32_t j = 0; j < code.n_places; ++j) {
        if (code.step[j] != 0.0f) out[code.channel[j]] += code.step[j] * (places[j] + zeros);
      }
    }
  }

 private:
  size_t QueryStride() const { return QueryBytes(code_->k); }
  /// Behind the places of a query vector's output: sum of probability * zero.
  uint32_t ZerosAt() const { return own_->stride - kPad; }

  template <int kM>
  void AddBlock(uint32_t m, const float* scale, const float* zero) {
    const VectorCode& code = code_->v;
    float units[kM];
    int32_t sums[kM];  // of the weights, if centers need them
    for (uint32_t i = 0; i < kM; ++i) {
      const float* p = s_->scores + (m + i) * kTile;
      sums[i] = 0;
      units[i] = QuantizeWeights<S>(p, scale, s_->weights + (m + i) * kTile,
                                    code.center != 0 ? sums + i : nullptr);
      float* o = own_->o + static_cast<size_t>(m + i) * own_->stride;
      if (HasZero(code)) o[ZerosAt()] += DotTile<S>(p, zero);
    }
    float* o = own_->o + static_cast<size_t>(m) * own_->stride;
    AddTokens<S, kM>(code, values.blocks, values.n, s_->weights + m * kTile, sums, units, o,
                     own_->stride, code.n_places);
  }

  // Set by Prepare alone: most rungs of a call are in no token code, and blocks are many.
  const BlockArgs* a_;
  const HeadArgs* h_;
  const Scratch* s_;
  const Scratch::Token* own_;
  const TokenCode* code_;
  TokenOffsets key_offsets_, value_offsets_;
  TokenQuery queries_[kPromptVectors];
  FieldCursors k_fields_;
  bool wide_;  ///< keys have places of 8 bits
};

/// All rungs in token codes of a block of query vectors.
template <class S>
class TokenParts {
 public:
  explicit TokenParts(const BlockArgs& args) : a_(args), h_(*args.head) {}

  bool any() const { return (has_keys_ | has_values_) != 0; }
  /// Some window of the chunk has its keys (or values) on this rung.
  void HaveKeys(uint32_t rung) { has_keys_ |= 1u << rung; }
  void HaveValues(uint32_t rung) { has_values_ |= 1u << rung; }

  void Prepare() {
    uint32_t prepared = 0;
    ForRungs(has_keys_ | has_values_, [&](uint32_t r) {
      const bool keys = (has_keys_ >> r & 1u) != 0;
      parts_[r].Prepare(a_, r, keys, (has_values_ >> r & 1u) != 0);
      const uint32_t mean = h_.rungs[r].mean;
      if (!keys || mean == kMaxRungs || (prepared >> mean & 1u) != 0) return;
      means_[mean].Prepare(a_, mean);
      prepared |= 1u << mean;
    });
  }

  void Clear() {
    ForRungs(has_keys_ | has_values_,
             [&](uint32_t r) { parts_[r].keys.n = parts_[r].values.n = 0; });
  }
  TokenPart<S>& part(uint32_t rung) { return parts_[rung]; }

  /// whole_tile: nobody sees any key of the tile that is in no token code.
  void Score(bool whole_tile) {
    uint32_t means = 0;
    ForRungs(has_keys_, [&](uint32_t r) {
      if (parts_[r].keys.n == 0) return;
      parts_[r].Score();
      means |= 1u << (h_.rungs[r].mean % 32);
      whole_tile = whole_tile && h_.rungs[r].mean != kMaxRungs;
    });
    int32_t first = 0;
    if (whole_tile && (means & (means - 1)) == 0 && Contiguous(first)) {
      const uint32_t mean = static_cast<uint32_t>(__builtin_ctz(means));
      if (means_[mean].Tabled64(first)) return means_[mean].AddTile(first);
    }
    ForRungs(has_keys_, [&](uint32_t r) {
      const uint32_t mean = h_.rungs[r].mean;
      const TokenTile& tile = parts_[r].keys;
      for (uint32_t i = 0; mean != kMaxRungs && i < tile.n; ++i) {
        const TokenBlock& x = tile.blocks[i];
        means_[mean].Add(x.pos, x.pos_stride, a_.scratch.scores + x.column);
      }
    });
  }

  void Add(uint64_t seen) {
    ForRungs(has_values_, [&](uint32_t r) {
      if (parts_[r].values.n != 0) parts_[r].Add(seen);
    });
  }
  void Rescale(uint32_t m, float factor) {
    ForRungs(has_values_, [&](uint32_t r) { parts_[r].Rescale(m, factor); });
  }
  void Join(float* o) {
    ForRungs(has_values_, [&](uint32_t r) { parts_[r].Join(o); });
  }

 private:
  template <class F>
  static void ForRungs(uint32_t rungs, F&& f) {
    for (; rungs != 0; rungs &= rungs - 1) f(static_cast<uint32_t>(__builtin_ctz(rungs)));
  }

  /// All listed keys follow each other from the tile's first column on, which is at `first`.
  bool Contiguous(int32_t& first) const {
    bool known = false, contiguous = true;
    ForRungs(has_keys_, [&](uint32_t r) {
      const TokenTile& tile = parts_[r].keys;
      for (uint32_t i = 0; i < tile.n; ++i) {
        const TokenBlock& x = tile.blocks[i];
        const int32_t begin = x.pos - static_cast<int32_t>(x.column);
        if (!known) first = begin;
        known = true;
        contiguous = contiguous && x.pos_stride == 1 && begin == first;
      }
    });
    return known && contiguous;
  }

  const BlockArgs& a_;
  const HeadArgs& h_;
  uint32_t has_keys_ = 0, has_values_ = 0;  ///< bit r: rung r
  TokenPart<S> parts_[kMaxRungs];
  MeanPart<S> means_[kMaxRungs];  ///< by RungArgs::mean
};

}  // namespace qevict::kernels::internal
