// What is fetched while something else is read. Windows are scattered, so that the hardware sees no
// stream. Included by attention_<isa>.cc.
#pragma once

#include <cstdint>

#include "kernels/attention_keys-inl.h"
#include "kernels/attention_token-inl.h"

namespace qevict::kernels::internal {

template <class S>
class Fetches {
 public:
  /// How the window one tile on is fetched, by the rung of its keys: bytes per fetch while a
  /// sub-block or a whole window of full keys, a packed window, or 8 tokens of a token code are
  /// read. Divisions are too dear for every window.
  struct Rate {
    uint32_t part;  ///< the share of a sub-block
    uint32_t sub_block, full, packed;
  };

  explicit Fetches(const BlockArgs& args) : a_(args), h_(*args.head) {
    const uint32_t sub = h_.window < 8 ? h_.window : 8, parts = h_.window / sub;
    for (uint32_t i = 0; i < h_.n_rungs; ++i) {
      const RungArgs& rung = h_.rungs[i];
      const uint32_t bytes = rung.k_bytes > rung.v_bytes ? rung.k_bytes : rung.v_bytes;
      Rate& r = rates_[i];
      r.part = bytes / parts;
      r.sub_block = Step(r.part, h_.head_dim * sub / (kKeyStep * S::kLanes));
      r.full = Step(bytes, h_.head_dim * h_.window / S::kLanes);
      r.packed = Step(bytes, h_.rope.n_pairs * h_.window / (8 * S::kChannels));
    }
  }

  /// Bytes per fetch when n fetches go from the first byte to the last.
  static uint32_t Step(uint32_t bytes, uint32_t n) {
    const uint32_t step = n < 2 ? 0 : (bytes + n - 3) / (n - 1);
    return step <= 64 || n == 0 ? step : (bytes + n - 1) / n;
  }

  /// Part of the window one tile after window i of the chunk, in steps of so many bytes.
  Ahead Next(uint32_t i, uint32_t part, uint32_t step) const {
    if (i + h_.tile_windows >= a_.n_win) return {Window(i).k, 0, 0};
    const WindowRef& w = Window(i + h_.tile_windows);
    const uint8_t* keys = KeysOf(h_, w) + part * rates_[w.rung_k].part;
    return {keys, ValuesOf(h_, w) - KeysOf(h_, w), step};
  }
  /// The whole one, at the rate at which window i is decoded.
  Ahead NextWindow(uint32_t i) const {
    if (i + h_.tile_windows >= a_.n_win) return {Window(i).k, 0, 0};
    const bool full = KeyRung(h_, Window(i)).format == WindowFormat::kFull;
    const Rate& r = rates_[Window(i + h_.tile_windows).rung_k];
    return Next(i, 0, full ? r.full : r.packed);
  }
  /// Full windows: their values while their keys are scored; the keys of the window one tile on, or
  /// null, while their values are added. So memory is asked all the time.
  Ahead Values(const WindowRef& w, uint32_t part) const {
    const Rate& r = rates_[w.rung_v];
    return {ValuesOf(h_, w) + part * r.part, 0, r.sub_block};
  }
  const uint8_t* NextKeys(uint32_t i) const {
    return i + h_.tile_windows < a_.n_win ? KeysOf(h_, Window(i + h_.tile_windows)) : nullptr;
  }
  /// Bytes per fetch while 8 tokens in a token code on rung i are scored.
  uint32_t TokenStep(uint32_t i) const {
    return Step(rates_[i].part, KeyFetches(h_.rungs[i].token->k));
  }

 private:
  const WindowRef& Window(uint32_t i) const { return h_.windows[a_.win_begin + i]; }

  const BlockArgs& a_;
  const HeadArgs& h_;
  Rate rates_[kMaxRungs];
};

}  // namespace qevict::kernels::internal
