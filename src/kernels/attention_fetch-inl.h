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
  /// How the window one tile on is fetched, by its format: bytes per fetch while a sub-block or a
  /// whole window of full keys, a packed window, or 8 tokens of a token code are read. Divisions
  /// are too dear for every window.
  struct Rate {
    uint32_t half, part;  ///< half of the head's bytes; the share of a sub-block
    uint32_t sub_block, full, packed, token;
  };

  Fetches(const BlockArgs& args, bool has_tokens) : a_(args), h_(*args.head) {
    const auto per = [](uint32_t bytes, uint32_t n) {  // from the first byte to the last
      const uint32_t step = n < 2 ? 0 : (bytes + n - 3) / (n - 1);
      return step <= 64 ? step : (bytes + n - 1) / n;
    };
    const uint32_t sub = h_.window < 8 ? h_.window : 8, parts = h_.window / sub;
    const uint32_t key_fetches = has_tokens ? KeyFetches(h_.token->k) : 0;
    for (uint32_t i = 0; i < kWindowFormats; ++i) {
      Rate& r = rates_[i];
      r.half = h_.head_bytes[i] / 2;
      r.part = r.half / parts;
      r.sub_block = per(r.part, h_.head_dim * sub / (kKeyStep * S::kLanes));
      r.full = per(r.half, h_.head_dim * h_.window / S::kLanes);
      r.packed = per(h_.head_bytes[i], h_.rope.n_pairs * h_.window / (8 * S::kChannels));
      r.token = per(r.part, key_fetches);
    }
  }

  /// Part of the window one tile after window i of the chunk.
  Ahead Next(uint32_t i, uint32_t part, uint32_t Rate::*rate) const {
    if (i + h_.tile_windows >= a_.n_win) return {Window(i).data, 0, 0};
    const WindowRef& w = Window(i + h_.tile_windows);
    const Rate& r = rates_[static_cast<int>(w.format)];
    return {w.data + h_.head_offset[static_cast<int>(w.format)] + part * r.part, r.half, r.*rate};
  }
  /// The whole one, at the rate at which window i is decoded.
  Ahead NextWindow(uint32_t i) const {
    const bool full = Window(i).format == WindowFormat::kFull;
    return Next(i, 0, full ? &Rate::full : &Rate::packed);
  }
  /// Full windows: their values (second half) while their keys are scored; the first half of the
  /// window one tile on, or null, while their values are added. So memory is asked all the time.
  Ahead Values(const WindowRef& w, uint32_t part) const {
    const Rate& r = rates_[static_cast<int>(WindowFormat::kFull)];
    return {w.data + h_.head_offset[0] + r.half + part * r.part, 0, r.sub_block};
  }
  const uint8_t* NextKeys(uint32_t i) const {
    return i + h_.tile_windows < a_.n_win ? Next(i, 0, &Rate::full).data : nullptr;
  }

 private:
  const WindowRef& Window(uint32_t i) const { return h_.windows[a_.win_begin + i]; }

  const BlockArgs& a_;
  const HeadArgs& h_;
  Rate rates_[kWindowFormats];
};

}  // namespace qevict::kernels::internal
