// A small engine for the tests of src/cache: drives a KvCache in the order in which the plug-in
// does, with rows that are a function of (token number, layer), and reads rows back through View.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "base/parallel.h"
#include "base/rope.h"
#include "codecs/codec.h"
#include "kernels/attention.h"
#include "qevict/cache.h"

namespace qevict {

/// Cheap hash of integers to a float in (-1, 1).
inline float Noise(uint64_t a, uint64_t b, uint64_t c) {
  uint64_t x =
      a * 0x9E3779B97F4A7C15u ^ (b + 1) * 0xC2B2AE3D27D4EB4Fu ^ (c + 7) * 0x165667B19E3779F9u;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 32;
  return static_cast<float>(static_cast<int32_t>(x & 0xFFFFFFu) - 0x800000) / 8388608.0f;
}

inline LayerShape Shape(uint32_t heads, uint32_t d, uint32_t dv) {
  return {heads, d, dv, Elem::kF16, Elem::kF16};
}

inline RopeParams TestRope(uint32_t n_dims) {
  RopeParams rope;
  rope.pairing = RopePairing::kHalves;
  rope.n_dims = n_dims;
  return rope;
}

/// Rows of one layer as the model holds them: [head][channel] after RoPE, 16-bit.
struct TokenRows {
  std::vector<uint16_t> k, v;
};

/// One cache with its layers, and the bookkeeping of an engine: next position and cell per
/// sequence.
class Engine {
 public:
  Engine(Config config, std::vector<LayerShape> shapes, uint32_t n_streams, uint32_t n_cells)
      : shapes_(shapes), n_cells_(n_cells), pool_(MakeSerial()) {
    Result<std::unique_ptr<KvCache>> cache =
        KvCache::Create(config, std::move(shapes), n_streams, n_cells);
    status = cache.status();
    if (cache.ok()) cache_ = std::move(cache.value());
    next_cell_.resize(n_streams);
  }

  KvCache& cache() { return *cache_; }
  ParallelFor& pool() { return *pool_; }
  void UsePool(unsigned n) { pool_ = MakeThreadPool(n); }
  const std::vector<LayerShape>& shapes() const { return shapes_; }
  uint32_t n_layers() const { return static_cast<uint32_t>(shapes_.size()); }
  uint32_t& next_cell(uint32_t stream) { return next_cell_[stream]; }
  int32_t& next_pos(SeqId seq) { return next_pos_[seq]; }

  void UseRope(const RopeParams& rope) {
    rope_ = rope;
    for (uint32_t il = 0; il < n_layers(); ++il) ASSERT_TRUE(cache_->SetRope(il, rope).ok());
  }
  const RopeParams& rope() const { return rope_; }

  SeqId NewSequence(uint32_t stream) {
    const SeqId seq = cache_->CreateSequence(stream);
    next_pos_[seq] = 0;
    return seq;
  }

  /// f32 rows of token number `id` in layer il.
  std::vector<float> RowOf(uint64_t id, uint32_t il, bool is_k) const {
    const LayerShape& s = shapes_[il];
    std::vector<float> row(s.n_kv_heads * (is_k ? s.head_dim : s.head_dim_v));
    for (size_t i = 0; i < row.size(); ++i) row[i] = Noise(id, il * 2 + (is_k ? 0 : 1), i);
    return row;
  }

  /// Next `n` tokens of a sequence: consecutive positions, cells in a ring.
  std::vector<TokenSpec> NextTokens(SeqId seq, uint32_t n, bool positional = true) {
    std::vector<TokenSpec> tokens;
    const uint32_t stream = cache_->stream_of(seq);
    for (uint32_t i = 0; i < n; ++i) {
      tokens.push_back({seq, next_cell_[stream], next_pos_[seq]++, positional});
      next_cell_[stream] = (next_cell_[stream] + 1) % n_cells_;
    }
    return tokens;
  }

  /// Appends and writes tokens without routing. token_id numbers the first one.
  Status Store(const std::vector<TokenSpec>& tokens) {
    std::vector<TokenRef> refs;
    QEVICT_RETURN_IF_ERROR(cache_->Append(tokens, refs));
    last_refs = refs;
    for (uint32_t il = 0; il < n_layers(); ++il) {
      QEVICT_RETURN_IF_ERROR(StoreLayer(il, refs));
      QEVICT_RETURN_IF_ERROR(AfterLayer(il, tokens, refs));
    }
    first_id_ += tokens.size();
    return {};
  }

  /// One step of one sequence, as the plug-in runs it.
  Status Step(SeqId seq, uint32_t n, bool decode) {
    const StepRows rows{seq, n, decode ? StepKind::kDecode : StepKind::kAuto};
    const uint64_t before = cache_->Stats().events;
    QEVICT_RETURN_IF_ERROR(cache_->PrepareStep({&rows, 1}, *pool_));
    n_due += cache_->Stats().events - before;
    return Store(NextTokens(seq, n));
  }
  Status Prompt(SeqId seq, uint32_t n, uint32_t chunk) {
    for (uint32_t at = 0; at < n; at += chunk) {
      QEVICT_RETURN_IF_ERROR(Step(seq, std::min(chunk, n - at), false));
    }
    return {};
  }
  Status Decode(SeqId seq, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) QEVICT_RETURN_IF_ERROR(Step(seq, 1, true));
    return {};
  }

  /// Row of one token as attention sees it: f32 [head][channel], keys after RoPE. Empty: not
  /// accessible.
  std::vector<float> Read(uint32_t il, TokenRef token, bool is_k, bool* packed = nullptr) const {
    std::vector<kernels::WindowRef> refs;
    std::vector<WindowId> ids;
    cache_->View(il, cache_->info(token.window).seq, refs, ids);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] != token.window) continue;
      if (packed) *packed = (is_k ? refs[i].rung_k : refs[i].rung_v) != kFullRung;
      return RowInWindow(il, refs[i], token.offset, is_k);
    }
    return {};
  }
  std::vector<float> RowInWindow(uint32_t il, const kernels::WindowRef& ref, uint32_t t,
                                 bool is_k) const {
    const LayerShape& s = shapes_[il];
    const uint32_t w = cache_->config().window, d = s.head_dim, dv = s.head_dim_v;
    const uint32_t width = is_k ? d : dv, sub = std::min(w, 8u);
    kernels::RungCode rungs[kernels::kMaxRungs];
    cache_->Rungs(il, rungs);
    const kernels::RungCode& rung = rungs[is_k ? ref.rung_k : ref.rung_v];
    std::vector<float> out;
    for (uint32_t h = 0; h < s.n_kv_heads; ++h) {
      const uint8_t* block =
          (is_k ? ref.k : ref.v) + h * (is_k ? rung.k_head_bytes : rung.v_head_bytes);
      if (rung.format == kernels::WindowFormat::kFull) {
        const uint16_t* words = reinterpret_cast<const uint16_t*>(block);
        for (uint32_t i = 0; i < width; ++i) {
          const size_t at =
              is_k ? size_t{t / sub} * d * sub + i * sub + t % sub : size_t{t} * dv + i;
          out.push_back(ToF32(words[at], is_k ? s.elem_k : s.elem_v));
        }
        continue;
      }
      const codecs::Codec& codec = cache_->codec(il, is_k ? ref.rung_k : ref.rung_v);
      std::vector<float> x(size_t{w} * width), phases(rope_.n_dims);
      codec.DecodeSides(h, w, is_k ? block : nullptr, is_k ? nullptr : block,
                        is_k ? x.data() : nullptr, is_k ? nullptr : x.data());
      std::vector<float> one(x.begin() + t * width, x.begin() + (t + 1) * width);
      const bool rotates = is_k && rope_.pairing != RopePairing::kNone;
      if (rotates) {
        RopeCosSin(rope_, ref.pos0 + static_cast<int32_t>(t) * ref.pos_stride, phases.data());
      }
      if (is_k) {
        codec.FinishKey(h, one, [&](float* key) {
          if (rotates) RopeRotate(rope_, phases.data(), key);
        });
      }
      out.insert(out.end(), one.begin(), one.end());
    }
    return out;
  }

  /// Fails the test if the cache is not sound.
  void ExpectSound(const std::string& where = "") {
    const std::vector<std::string> violations = cache_->Validate();
    EXPECT_TRUE(violations.empty()) << where << ": " << (violations.empty() ? "" : violations[0]);
  }

  Status status;
  std::vector<TokenRef> last_refs;
  uint64_t n_due = 0;
  bool masses = true;      ///< add random masses after each layer
  uint64_t first_id_ = 0;  ///< number of the next token

 private:
  Status StoreLayer(uint32_t il, const std::vector<TokenRef>& refs) {
    for (const bool is_k : {true, false}) {
      const LayerShape& s = shapes_[il];
      const size_t width = s.n_kv_heads * (is_k ? s.head_dim : s.head_dim_v);
      std::vector<float> rows;
      for (size_t i = 0; i < refs.size(); ++i) {
        const std::vector<float> row = RowOf(first_id_ + i, il, is_k);
        rows.insert(rows.end(), row.begin(), row.end());
      }
      Status written = is_k ? cache_->WriteK(il, refs, rows.data(), width, *pool_)
                            : cache_->WriteV(il, refs, rows.data(), width, *pool_);
      QEVICT_RETURN_IF_ERROR(written);
    }
    return {};
  }

  Status AfterLayer(uint32_t il, const std::vector<TokenSpec>& tokens,
                    const std::vector<TokenRef>&) {
    std::map<SeqId, uint32_t> rows;
    for (const TokenSpec& t : tokens) ++rows[t.seq];
    for (const auto& [seq, n] : rows) {
      if (masses) {
        std::vector<kernels::WindowRef> refs;
        std::vector<WindowId> ids;
        cache_->View(il, seq, refs, ids);
        const uint32_t heads = shapes_[il].n_kv_heads;
        std::vector<float> mass(heads * ids.size());
        for (size_t i = 0; i < mass.size(); ++i) {
          mass[i] = std::fabs(Noise(first_id_, il, i)) * static_cast<float>(n);
        }
        cache_->AddMass(il, ids, mass.data(), ids.size(), heads, n);
      }
      if (cache_->NeedsBoundedRoute(il, seq)) {
        QEVICT_RETURN_IF_ERROR(
            cache_->Route(il, seq, static_cast<uint32_t>(tokens.size()), *pool_));
      }
    }
    return {};
  }

  std::vector<LayerShape> shapes_;
  uint32_t n_cells_;
  RopeParams rope_;
  std::unique_ptr<ParallelFor> pool_;
  std::unique_ptr<KvCache> cache_;
  std::vector<uint32_t> next_cell_;
  std::map<SeqId, int32_t> next_pos_;
};

}  // namespace qevict
