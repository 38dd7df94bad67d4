// The static mean of keys in a token code: q . R_p mean for every position, exact and without any
// key byte. Per query and block of 64 positions it is a sum over pairs of a cos(w t) + b sin(w t),
// which one small matrix product over all queries evaluates (RopeTable::basis). Included by
// attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_prompt-inl.h"

namespace qevict::kernels::internal {

template <class S>
class MeanPart {
 public:
  /// Products of queries and mean, per pair: q . R mean = cos * first + sin * second.
  /// rung: of a token code whose keys have a mean.
  void Prepare(const BlockArgs& args, uint32_t rung) {
    a_ = &args;
    h_ = args.head;
    s_ = &args.scratch.token[rung];
    const float* mean = h_->rungs[rung].token->k.mean;
    const RopeView& rope = h_->rope;
    const uint32_t n = Pairs(), padded = PadLanes(rope.n_pairs);
    for (uint32_t m = 0; m < a_->n_vec; ++m) {
      const float* q = a_->scratch.q + static_cast<size_t>(m) * h_->head_dim;
      float* first = s_->mean_q + static_cast<size_t>(m) * 2 * padded;
      float* second = first + padded;
      const uint32_t rotated = n == 0 ? h_->head_dim : rope.offset;
      float all = 0.0f;
      for (uint32_t c = 0; c < rotated; ++c) all += q[c] * mean[c];
      for (uint32_t c = rotated + 2 * n; c < h_->head_dim; ++c) all += q[c] * mean[c];
      constant_[m] = all;
      for (uint32_t i = 0; i < n; ++i) {
        const uint32_t x = rope.offset + (rope.halves ? i : 2 * i), y = x + (rope.halves ? n : 1);
        first[i] = q[x] * mean[x] + q[y] * mean[y];
        second[i] = q[y] * mean[x] - q[x] * mean[y];
      }
      for (uint32_t i = n; i < (n == 0 ? 0 : padded); ++i) first[i] = second[i] = 0.0f;
    }
    tag_[0] = tag_[1] = -1;
  }

  /// True if AddTile may be asked for 64 tokens from pos on.
  bool Tabled64(int32_t pos) const { return Tabled(pos) && Tabled(pos + 63); }

  /// Adds the means' part to the scores of a tile of 64 tokens that follow each other from pos on.
  void AddTile(int32_t pos) {
    alignas(64) float cos[kCoefStride], sin[kCoefStride];
    PhasesAt<S>(h_->rope, pos, cos, sin);
    Evaluate<true>(cos, sin, a_->scratch.scores);
  }

  /// Adds the means' part to the scores of 8 tokens of all query vectors, scores [n_vec][kTile]
  /// from the tokens' column on; token t is at pos + t * stride.
  void Add(int32_t pos, uint32_t stride, float* scores) {
    const uint32_t at = static_cast<uint32_t>(pos) & 63u;
    if (stride == 1 && at + 8 <= 64 && Tabled(pos)) {  // nearly always
      const float* block = Block(pos >> 6) + at;
      for (uint32_t m = 0; m < a_->n_vec; ++m, scores += kTile, block += kTile) {
        const auto sum = S::Add(S::LoadBlocks(scores, scores), S::LoadBlocks(block, block));
        S::StoreBlocks(sum, scores, scores);
      }
      return;
    }
    for (uint32_t t = 0; t < 8; ++t) AddToken(pos + static_cast<int32_t>(t * stride), scores + t);
  }

 private:
  uint32_t Pairs() const { return h_->rope.coarse == nullptr ? 0 : h_->rope.n_pairs; }

  /// Positions below 0 are rare, those beyond the table belong to tokens that are not there.
  bool Tabled(int32_t pos) const {
    return Pairs() != 0 && pos >= 0 && static_cast<uint32_t>(pos) >> 6 < h_->rope.n_blocks;
  }

  void AddToken(int32_t pos, float* scores) {
    const float* block = Tabled(pos) ? Block(pos >> 6) + (pos & 63) : nullptr;
    for (uint32_t m = 0; m < a_->n_vec; ++m) {
      scores[m * kTile] += block != nullptr           ? block[m * kTile]
                           : Pairs() == 0 || pos >= 0 ? constant_[m]
                                                      : One(m, pos);
    }
  }

  /// Scores of all query vectors at the 64 positions of a block: [n_vec][64].
  const float* Block(int32_t block) {
    const uint32_t slot = static_cast<uint32_t>(block) & 1u;
    float* scores = s_->mean_scores + static_cast<size_t>(slot) * a_->n_vec * kTile;
    if (tag_[slot] == block) return scores;
    tag_[slot] = block;
    const float* coarse = h_->rope.coarse + static_cast<size_t>(block) * 2 * h_->rope.stride;
    Evaluate<false>(coarse, coarse + h_->rope.stride, scores);
    return scores;
  }

  /// scores [n_vec][64] (+)= means' part at the 64 positions from the one with the phases cos, sin
  /// [n_pairs].
  template <bool kAdd>
  void Evaluate(const float* cos, const float* sin, float* scores) {
    const uint32_t n_terms = 2 * h_->rope.n_fast + 4;
    for (uint32_t m = 0; m < a_->n_vec; ++m)
      Terms(m, cos, sin, s_->mean_terms + static_cast<size_t>(m) * n_terms);
    Gemm<S, kAdd>(s_->mean_terms, n_terms, h_->rope.basis, kTile, scores, kTile, a_->n_vec, kTile,
                  n_terms);
  }

  void Terms(uint32_t m, const float* cos, const float* sin, float* terms) {
    using V = typename S::V;
    const RopeView& rope = h_->rope;
    const uint32_t padded = PadLanes(rope.n_pairs), stride = rope.stride;
    const float* first = s_->mean_q + static_cast<size_t>(m) * 2 * padded;
    alignas(64) float fast_sin[kCoefStride];
    V c0 = S::Zero(), c1 = S::Zero(), c2 = S::Zero(), c3 = S::Zero();
    for (uint32_t i = 0; i < rope.n_pairs; i += S::kLanes) {
      const V x = S::Load(first + i), y = S::Load(first + padded + i);
      const V c = S::Load(cos + i), s = S::Load(sin + i);
      const V a = S::Fma(y, s, S::Mul(x, c)), b = S::Fnma(x, s, S::Mul(y, c));
      if (i < rope.n_fast) {
        S::Store(terms + i, a);  // the excess is overwritten by what follows
        S::Store(fast_sin + i, b);
      }
      if (i + S::kLanes <= rope.n_fast) continue;
      const V mc = S::Load(rope.middle + i), ms = S::Load(rope.middle + stride + i);
      const V w = S::Load(rope.middle + 2 * stride + i);  // 0 for fast pairs, as are mc and ms
      const V am = S::Fma(b, ms, S::Mul(a, mc)), bm = S::Fnma(a, ms, S::Mul(b, mc));
      const V w2 = S::Mul(w, w);
      c0 = S::Add(c0, am);
      c1 = S::Fma(bm, w, c1);
      c2 = S::Fma(am, w2, c2);
      c3 = S::Fma(S::Mul(bm, w), w2, c3);
    }
    for (uint32_t i = 0; i < rope.n_fast; i += S::kLanes)
      S::Store(terms + rope.n_fast + i, S::Load(fast_sin + i));
    float* powers = terms + 2 * rope.n_fast;
    float sums[4];
    FourSums(c0, c1, c2, c3, sums);
    powers[0] = sums[0] + constant_[m];
    powers[1] = sums[1];
    powers[2] = sums[2] * (-1.0f / 2.0f);
    powers[3] = sums[3] * (-1.0f / 6.0f);
  }

  static void FourSums(typename S::V a, typename S::V b, typename S::V c, typename S::V d,
                       float* sums) {
    alignas(64) float lanes[64] = {};
    float eights[8];
    S::Store(lanes, a);
    S::Store(lanes + S::kLanes, b);
    S::Store(lanes + 2 * S::kLanes, c);
    S::Store(lanes + 3 * S::kLanes, d);
    S::SegmentSums(lanes, eights);
    for (uint32_t i = 0; i < 4; ++i)
      sums[i] = S::kLanes == 8 ? eights[i] : eights[2 * i] + eights[2 * i + 1];
  }

  /// Any position, one pair after the other.
  float One(uint32_t m, int32_t pos) const {
    const RopeView& rope = h_->rope;
    const uint32_t p = pos < 0 ? 0u - static_cast<uint32_t>(pos) : static_cast<uint32_t>(pos);
    const float sign = pos < 0 ? -1.0f : 1.0f;
    const float* coarse = rope.coarse + static_cast<size_t>(p >> 6) * 2 * rope.stride;
    const float* fine = rope.fine + static_cast<size_t>(p & 63) * 2 * rope.stride;
    const uint32_t padded = PadLanes(rope.n_pairs);
    const float* first = s_->mean_q + static_cast<size_t>(m) * 2 * padded;
    float sum = constant_[m];
    for (uint32_t i = 0; i < rope.n_pairs; ++i) {
      const float cc = coarse[i], cs = coarse[rope.stride + i];
      const float fc = fine[i], fs = fine[rope.stride + i];
      sum += first[i] * (cc * fc - cs * fs) + first[padded + i] * sign * (cs * fc + cc * fs);
    }
    return sum;
  }

  // Set by Prepare alone.
  const BlockArgs* a_;
  const HeadArgs* h_;
  const Scratch::Token* s_;
  float constant_[kPromptVectors];
  int32_t tag_[2];
};

}  // namespace qevict::kernels::internal
