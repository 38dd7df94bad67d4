// Attention of a block of query vectors over a chunk of windows. Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_fetch-inl.h"
#include "kernels/attention_mass-inl.h"
#include "kernels/attention_prompt-inl.h"
#include "kernels/attention_softmax-inl.h"
#include "kernels/attention_token_block-inl.h"

namespace qevict::kernels::internal {

template <class S>
class Block {
 public:
  explicit Block(const BlockArgs& args)
      : a_(args), h_(*args.head), s_(args.scratch), tokens_(args), masses_(args), fetches_(args) {
    uint32_t keys = 0, values = 0;  // bit r: on rung r
    for (uint32_t i = 0; i < a_.n_win; ++i) {
      keys |= 1u << Window(i).rung_k;
      values |= 1u << Window(i).rung_v;
    }
    for (uint32_t r = 0; r < h_.n_rungs; ++r) {
      if (((keys | values) >> r & 1u) == 0) continue;
      const WindowFormat format = h_.rungs[r].format;
      if (format != WindowFormat::kToken) {
        (format == WindowFormat::kFull   ? has_full_
         : format == WindowFormat::kGrid ? has_grid_
                                         : has_packed_) = true;
        continue;
      }
      if ((keys >> r & 1u) != 0) tokens_.HaveKeys(r), token_steps_[r] = fetches_.TokenStep(r);
      if ((values >> r & 1u) != 0) tokens_.HaveValues(r);
    }
  }

  void Run() {
    PrepareQueries();
    Clear();
    const uint32_t step = h_.tile_windows;
    for (uint32_t first = 0, tile = 0; first < a_.n_win; first += step, ++tile) {
      const uint32_t left = a_.n_win - first;
      RunTile(first, left < step ? left : step, tile);
    }
    for (uint32_t m = 0; m < a_.n_vec; ++m) a_.state.l[m] = S::Sum(S::Load(s_.sums + m * kPad));
    tokens_.Join(a_.state.o);
    if (masses_.any()) masses_.Rescale();
  }

 private:
  using V = typename S::V;

  uint32_t Row(uint32_t m) const { return s_.rows[m]; }
  uint32_t Head(uint32_t m) const {
    return h_.first_head + a_.vec_begin + m - s_.rows[m] * h_.n_gqa;
  }
  static bool IsPacked(WindowFormat format) {
    return format == WindowFormat::kPacked2 || format == WindowFormat::kPacked4;
  }
  const WindowRef& Window(uint32_t i) const { return h_.windows[a_.win_begin + i]; }
  /// Packed windows are scored from registers, else through a decoded tile.
  bool PackedInPlace() const {
    return h_.window == 8 && PackedInVectors<S>(h_, h_.rope.coarse != nullptr);
  }

  void PrepareQueries() {
    const uint32_t d = h_.head_dim;
    for (uint32_t m = 0; m < a_.n_vec; ++m) {
      s_.rows[m] = (a_.vec_begin + m) / h_.n_gqa;
      const float* src = h_.q + Row(m) * h_.q_row_stride + Head(m) * h_.q_head_stride;
      float* q = s_.q + static_cast<size_t>(m) * d;
      for (uint32_t c = 0; c < d; ++c) q[c] = src[c] * h_.scale;
      if (!a_.prompt && (has_full_ || has_grid_ || !PackedInPlace())) ExpandQuery(q, m);
    }
    tokens_.Prepare();
    if (a_.prompt || !has_packed_ || !PackedInPlace()) return;
    ForBlocks(0, a_.n_vec,
              [&](uint32_t m, auto block) { InterleaveQueries(m, decltype(block)::value); });
  }

  /// Each channel S times: lanes of full keys.
  void ExpandQuery(const float* q, uint32_t m) {
    const uint32_t d = h_.head_dim, sub = h_.window < 8 ? h_.window : 8;
    float* dst = s_.q_lanes + static_cast<size_t>(m) * (d * sub + kPad);
    for (uint32_t c = 0; c < d; ++c)
      S::Store(dst + c * sub, S::Set1(q[c]));  // the excess is overwritten by the next
    for (uint32_t t = 0; t < kPad; ++t) dst[d * sub + t] = 0.0f;
  }

  /// The orders in which ScorePacked walks the queries of a register block of n vectors from m on.
  void InterleaveQueries(uint32_t m, uint32_t n) {
    constexpr uint32_t kC = S::kChannels;
    const uint32_t d = h_.head_dim;
    const RopeView& rope = h_.rope;
    for (uint32_t i = 0; i < n; ++i) {
      const float* q = s_.q + (m + i) * d;
      float* plain = s_.q_plain + m * d + i * kC;
      for (uint32_t c = 0; c < d; c += kC, plain += n * kC) {
        for (uint32_t k = 0; k < kC; ++k) plain[k] = q[c + k];
      }
      if (rope.coarse == nullptr) continue;
      const uint32_t step = rope.halves ? 1 : 2;
      const float *first = q + rope.offset, *second = first + (rope.halves ? rope.n_pairs : 1);
      float* pair = s_.q_pairs + m * d + 2 * i * kC;
      for (uint32_t j = 0; j + kC <= rope.n_pairs; j += kC, pair += 2 * n * kC) {
        for (uint32_t k = 0; k < kC; ++k) {
          pair[k] = first[(j + k) * step];
          pair[kC + k] = second[(j + k) * step];
        }
      }
    }
  }

  void Clear() {
    for (uint32_t m = 0; m < a_.n_vec; ++m) {
      a_.state.m[m] = kMinusInf;
      S::Store(s_.sums + m * kPad, S::Zero());
    }
    __builtin_memset(a_.state.o, 0, sizeof(float) * a_.n_vec * h_.dv_pad);
  }

  /// Visible tokens of each query vector; returns the union, and in `same` whether all are equal.
  uint64_t GatherBits(uint32_t first, uint32_t n_win, bool& same) {
    const uint32_t window_bits = h_.window >= 32 ? ~0u : (1u << h_.window) - 1;
    uint64_t all = 0, common = ~uint64_t{0};
    uint32_t last_row = ~0u;
    uint64_t bits = 0;
    for (uint32_t m = 0; m < a_.n_vec; ++m) {
      const uint32_t row = Row(m);
      if (row != last_row) {
        const uint32_t* visible = h_.visible + row * h_.visible_stride + a_.win_begin + first;
        bits = 0;
        for (uint32_t i = 0; i < n_win; ++i)
          bits |= static_cast<uint64_t>(visible[i] & window_bits) << (i * h_.window);
        all |= bits;
        common &= bits;
        last_row = row;
      }
      s_.bits[m] = bits;
    }
    same = all == common;
    return all;
  }

  uint32_t WindowBits(uint64_t bits, uint32_t i) const {
    const uint64_t shifted = bits >> (i * h_.window);
    return static_cast<uint32_t>(h_.window >= 32 ? shifted
                                                 : shifted & ((uint64_t{1} << h_.window) - 1));
  }

  void RunTile(uint32_t first, uint32_t n_win, uint32_t tile) {
    bool same = false;
    const uint64_t seen = GatherBits(first, n_win, same);
    if (seen == 0) {
      SkipMasses(first, n_win, tile);
      return;
    }
    uint64_t keys = seen, values = seen;  // in no token code
    if (tokens_.any()) ListTokenTile(first, n_win, seen, keys, values);
    if (!a_.prompt) {
      ScoreTile(first, n_win, seen);
    } else if (keys != 0) {
      ScoreDecodedTile(first, n_win, keys);
    }
    if (keys != seen) tokens_.Score(keys == 0);
    Softmax(first, n_win, tile);
    if (!a_.prompt) {
      AddRuns(first, n_win);
    } else if (values != 0) {
      AddTile(first, n_win, values, same);
    }
    if (values != seen) tokens_.Add(seen);
  }

  /// Prompt form: keys to an f32 tile, then a matrix product. Columns of other tokens are not
  /// meant.
  void ScoreDecodedTile(uint32_t first, uint32_t n_win, uint64_t seen) {
    for (uint32_t i = 0; i < n_win; ++i) {
      if (WindowBits(seen, i) == 0) continue;
      DecodeKeys<S>(h_, Window(first + i), fetches_.NextWindow(first + i), s_,
                    s_.k_tile + i * h_.window);
    }
    Gemm<S, false>(s_.q, h_.head_dim, s_.k_tile, kTile, s_.scores, kTile, a_.n_vec, kTile,
                   h_.head_dim);
  }

  /// Lists the tile's keys and values in token codes that somebody sees, and takes their bits off.
  void ListTokenTile(uint32_t first, uint32_t n_win, uint64_t seen, uint64_t& keys,
                     uint64_t& values) {
    tokens_.Clear();
    for (uint32_t i = 0; i < n_win; ++i) {
      const WindowRef& w = Window(first + i);
      const uint32_t bits = WindowBits(seen, i), column = i * h_.window;
      const bool k = KeyRung(h_, w).format == WindowFormat::kToken;
      const bool v = ValueRung(h_, w).format == WindowFormat::kToken;
      const uint64_t mask = static_cast<uint64_t>(bits) << column;
      if (k) keys &= ~mask;
      if (v) values &= ~mask;
      for (uint32_t part = 0; 8 * part < h_.window; ++part) {
        if ((bits >> (8 * part) & 0xFFu) == 0) continue;
        if (k) {
          const Ahead ahead = fetches_.Next(first + i, part, token_steps_[w.rung_k]);
          tokens_.part(w.rung_k).ListKeys(w, part, column, ahead);
        }
        if (v) tokens_.part(w.rung_v).ListValues(w, part, column);
      }
    }
  }

  void SkipMasses(uint32_t first, uint32_t n_win, uint32_t tile) {
    if (!masses_.any()) return;
    for (uint32_t m = 0; m < a_.n_vec; ++m) masses_.Clear(m, first, n_win, tile);
  }

  // Decode form.

  void ScoreTile(uint32_t first, uint32_t n_win, uint64_t seen) {
    if (has_full_) {
      if (h_.elem_k == Elem::kF16) {
        ScoreFull<F16<S>>(first, n_win, seen);
      } else {
        ScoreFull<BF16<S>>(first, n_win, seen);
      }
    }
    if (has_packed_) ScorePackedWindows(first, n_win, seen);
    if (has_grid_) ScoreGridWindows(first, n_win, seen);
  }

  template <class E>
  void ScoreBlocks(const KeyBlock<typename E::T>* blocks, uint32_t n) {
    const uint32_t sub = h_.window < 8 ? h_.window : 8;
    const size_t stride = static_cast<size_t>(h_.head_dim) * sub + kPad;
    ForBlocks(0, a_.n_vec, [&](uint32_t m, auto block) {
      ScoreFullBlocks<S, E, decltype(block)::value>(blocks, n, s_.q_lanes + m * stride, stride,
                                                    h_.head_dim, sub, s_.scores + m * kTile);
    });
  }

  template <class E>
  void ScoreFull(uint32_t first, uint32_t n_win, uint64_t seen) {
    KeyBlock<uint16_t> blocks[kTile];
    uint32_t n = 0;
    const uint32_t sub = h_.window < 8 ? h_.window : 8;
    for (uint32_t i = 0; i < n_win; ++i) {
      const WindowRef& w = Window(first + i);
      if (KeyRung(h_, w).format != WindowFormat::kFull || WindowBits(seen, i) == 0) continue;
      const uint16_t* keys = reinterpret_cast<const uint16_t*>(KeysOf(h_, w));
      for (uint32_t part = 0; part * sub < h_.window; ++part) {
        blocks[n++] = {keys + part * sub * h_.head_dim, i * h_.window + part * sub,
                       fetches_.Values(w, part)};
      }
    }
    if (n != 0) ScoreBlocks<E>(blocks, n);
  }

  /// Windows of one format and rotation go in twos.
  void ScorePackedWindows(uint32_t first, uint32_t n_win, uint64_t seen) {
    PackedKeys keys[2];
    WindowFormat format = WindowFormat::kFull;
    bool rotate = false;
    uint32_t n = 0, stride = 0;
    for (uint32_t i = 0; i < n_win; ++i) {
      const WindowRef& w = Window(first + i);
      const WindowFormat own = KeyRung(h_, w).format;
      if (!IsPacked(own) || WindowBits(seen, i) == 0) continue;
      if (!PackedInPlace()) {
        ScoreDecodedWindow(w, i * h_.window, fetches_.NextWindow(first + i));
        continue;
      }
      const bool rotates = Rotates(h_, w);
      const bool alike = own == format && rotates == rotate && w.pos_stride == stride;
      if (n != 0 && !alike) {
        ScorePackedKeys(keys, n, format, rotate);
        n = 0;
      }
      format = own, rotate = rotates, stride = w.pos_stride;
      keys[n] = LoadSubBlock<S>(h_, w, 0, rotate, s_.coef + n * PackedCoefs(h_.head_dim),
                                fetches_.NextWindow(first + i));
      keys[n].column = i * h_.window;
      if (++n < 2) continue;
      ScorePackedKeys(keys, 2, format, rotate);
      n = 0;
    }
    if (n != 0) ScorePackedKeys(keys, n, format, rotate);
  }

  void ScorePackedKeys(const PackedKeys* keys, uint32_t n, WindowFormat format, bool rotate) {
    ForBlocks(0, a_.n_vec, [&](uint32_t m, auto block) {
      constexpr int kM = decltype(block)::value, kN = PackedBatch<S, kM>();
      const float *plain = s_.q_plain + m * h_.head_dim, *pairs = s_.q_pairs + m * h_.head_dim;
      float* scores = s_.scores + m * kTile;
      const auto score = [&](const PackedKeys* k, auto count) {
        constexpr int kCount = decltype(count)::value;
        if (format == WindowFormat::kPacked2) {
          ScorePacked<S, 2, kM, kCount>(k, h_, rotate, plain, pairs, scores);
        } else {
          ScorePacked<S, 4, kM, kCount>(k, h_, rotate, plain, pairs, scores);
        }
      };
      if (n == kN) return score(keys, Int<kN>{});
      for (uint32_t i = 0; i < n; ++i) score(keys + i, Int<1>{});
    });
  }

  void ScoreGridWindows(uint32_t first, uint32_t n_win, uint64_t seen) {
    for (uint32_t i = 0; i < n_win; ++i) {
      const WindowRef& w = Window(first + i);
      if (KeyRung(h_, w).format == WindowFormat::kGrid && WindowBits(seen, i) != 0)
        ScoreDecodedWindow(w, i * h_.window, {});
    }
  }

  /// Grid codes, window lengths other than 8 and odd pairings: decoded to f32, then scored like a
  /// full window.
  void ScoreDecodedWindow(const WindowRef& w, uint32_t column, const Ahead& ahead) {
    const uint32_t sub = h_.window < 8 ? h_.window : 8;
    const size_t block_floats = static_cast<size_t>(h_.head_dim) * sub;
    if (KeyRung(h_, w).format == WindowFormat::kGrid) {
      DecodeGridKeys<S>(h_, w, s_.grid, s_.k_tile, sub, block_floats);
    } else {
      DecodePackedKeys<S>(h_, w, ahead, s_.coef, s_.k_tile, sub, block_floats);
    }
    KeyBlock<float> blocks[4];
    for (uint32_t i = 0; i < h_.window / sub; ++i)
      blocks[i] = {s_.k_tile + i * block_floats, column + i * sub, {w.k, 0, 0}};
    ScoreBlocks<F32<S>>(blocks, h_.window / sub);
  }

  /// Runs of query vectors that see the same tokens share their value loads; nobody multiplies a
  /// token it does not see.
  void AddRuns(uint32_t first, uint32_t n_win) {
    for (uint32_t begin = 0; begin < a_.n_vec;) {
      uint32_t end = begin + 1;
      while (end < a_.n_vec && s_.bits[end] == s_.bits[begin]) ++end;
      if (s_.bits[begin] != 0) {
        ForFormats(first, n_win, s_.bits[begin], [&](WindowFormat format, const TokenList& list) {
          const auto add = [&](uint32_t m, auto block) {
            AddListed<S, decltype(block)::value>(h_, format, list, s_.scores + m * kTile,
                                                 a_.state.o + static_cast<size_t>(m) * h_.dv_pad);
          };
          if (format == WindowFormat::kFull) {
            ForBlocks<kFullValueBlock<S>>(begin, end, add);
          } else {
            ForBlocks(begin, end, add);
          }
        });
      }
      begin = end;
    }
  }

  /// Calls f(format, list of the format's tokens in `bits`) for each format but token codes.
  template <class F>
  void ForFormats(uint32_t first, uint32_t n_win, uint64_t bits, F&& f) {
    TokenList list;
    for (const WindowFormat format : {WindowFormat::kFull, WindowFormat::kPacked2,
                                      WindowFormat::kPacked4, WindowFormat::kGrid}) {
      const bool packed = IsPacked(format);
      if (!(packed ? has_packed_ : format == WindowFormat::kFull ? has_full_ : has_grid_)) continue;
      list.Clear(packed);
      for (uint32_t i = 0; i < n_win; ++i) {
        const WindowRef& w = Window(first + i);
        const uint32_t window_bits = WindowBits(bits, i);
        if (ValueRung(h_, w).format == format && window_bits != 0)
          ListTokens<S>(h_, s_, w, fetches_.NextKeys(first + i), i * h_.window, window_bits, list);
      }
      if (list.n != 0) f(format, list);
    }
  }

  // Both forms.

  void Softmax(uint32_t first, uint32_t n_win, uint32_t tile) {
    float tail[kTile];
    for (uint32_t m = 0; m < a_.n_vec; ++m) {
      float* scores = s_.scores + m * kTile;
      if (s_.bits[m] == 0) {
        for (uint32_t i = 0; i < kTile; i += S::kLanes) S::Store(scores + i, S::Zero());
        if (masses_.any()) masses_.Clear(m, first, n_win, tile);
        continue;
      }
      const LogitArgs logit{h_.softcap, TileBias(m, first, n_win, tail),
                            h_.slopes != nullptr ? h_.slopes[Head(m)] : 1.0f};
      const float factor =
          SoftmaxTile<S>(scores, s_.bits[m], logit, a_.state.m[m], s_.sums + m * kPad);
      if (factor != 1.0f) {
        Rescale(a_.state.o + static_cast<size_t>(m) * h_.dv_pad, factor);
        tokens_.Rescale(m, factor);
      }
      if (masses_.any()) masses_.Keep(m, scores, first, n_win, tile);
    }
  }

  /// Bias of the tile's tokens; the last tile is copied, since the array ends with its last window.
  const float* TileBias(uint32_t m, uint32_t first, uint32_t n_win, float* tail) const {
    if (h_.bias == nullptr) return nullptr;
    const float* bias =
        h_.bias + Row(m) * h_.bias_stride + static_cast<size_t>(a_.win_begin + first) * h_.window;
    if (n_win == h_.tile_windows) return bias;
    for (uint32_t i = 0; i < kTile; ++i) tail[i] = i < n_win * h_.window ? bias[i] : 0.0f;
    return tail;
  }

  void Rescale(float* o, float factor) {
    const V f = S::Set1(factor);
    for (uint32_t j = 0; j < h_.dv_pad; j += S::kLanes) S::Store(o + j, S::Mul(S::Load(o + j), f));
  }

  void AddTile(uint32_t first, uint32_t n_win, uint64_t seen, bool same) {
    const uint32_t dv_pad = h_.dv_pad;
    ForFormats(first, n_win, seen, [&](WindowFormat format, const TokenList& list) {
      WidenListed<S>(h_, format, list, s_.v_tile);
    });
    ClearUnseenValues<S>(seen, dv_pad, s_.v_tile);
    if (!same && !AllFinite<S>(s_.v_tile, dv_pad)) {
      AddVisibleOnly<S>(s_.scores, s_.bits, a_.n_vec, dv_pad, s_.v_tile, a_.state.o);
      return;
    }
    for (uint32_t j = 0; j < dv_pad; j += kPanel) {
      const uint32_t width = dv_pad - j < kPanel ? dv_pad - j : kPanel;
      Gemm<S, true>(s_.scores, kTile, ValueCell(s_.v_tile, 0, j), kPanel, a_.state.o + j, dv_pad,
                    a_.n_vec, width, kTile);
    }
  }

  const BlockArgs& a_;
  const HeadArgs& h_;
  const Scratch& s_;
  TokenParts<S> tokens_;
  Masses<S> masses_;
  bool has_full_ = false, has_packed_ = false, has_grid_ = false;  ///< keys or values of a window
  Fetches<S> fetches_;
  uint32_t token_steps_[kMaxRungs];  ///< Fetches::TokenStep of rungs with keys in token codes
};

template <class S>
void AttendBlock(const BlockArgs& args) {
  Block<S>(args).Run();
}

}  // namespace qevict::kernels::internal
