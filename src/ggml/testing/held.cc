#include "ggml/testing/held.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/half.h"
#include "codecs/codec.h"
#include "ggml/cache_group.h"
#include "kernels/attention.h"
#include "kernels/rope_table.h"

namespace qevict::plugin::testing {
namespace {

// Key channels are stored in sub-blocks of up to 8 tokens: [W/S][D][S].
void DecodeFull(const uint8_t* block, bool is_k, Elem elem, uint32_t window, uint32_t n,
                uint32_t dim, float* x) {
  const uint32_t s = std::min(window, 8u);
  for (uint32_t t = 0; t < n; ++t) {
    for (uint32_t c = 0; c < dim; ++c) {
      const size_t at = is_k ? (size_t{t / s} * dim + c) * s + t % s : size_t{t} * dim + c;
      uint16_t word;
      std::memcpy(&word, block + 2 * at, sizeof(word));
      x[size_t{t} * dim + c] = ToF32(word, elem);
    }
  }
}

void DecodeKeys(const uint8_t* block, const LayerShape& shape, const codecs::Codec& codec,
                uint32_t kv_head, const kernels::WindowRef& ref, const kernels::RopeTable* rope,
                uint32_t n, float* k) {
  codec.DecodeSides(kv_head, n, block, nullptr, k, nullptr);
  for (uint32_t t = 0; t < n; ++t) {
    codec.FinishKey(kv_head, {k + size_t{t} * shape.head_dim, shape.head_dim}, [&](float* key) {
      if (!rope) return;
      std::vector<float> cos_sin(rope->params().n_dims);
      RopeCosSin(rope->params(), ref.pos0 + static_cast<int32_t>(t) * ref.pos_stride,
                 cos_sin.data());
      RopeRotate(rope->params(), cos_sin.data(), key);
    });
  }
}

}  // namespace

HeldRows ReadHeld(Engine& engine, uint32_t layer, uint32_t stream, uint32_t part) {
  const KvCache& cache = *engine.cache();
  const uint32_t il = engine.group()->layers()[layer].first_cache_layer + part;
  const LayerShape& shape = cache.layer(il);
  const Config& config = cache.config();
  const uint32_t n_cells = engine.spec().n_cells, d = shape.head_dim, dv = shape.head_dim_v;
  HeldRows held;
  held.rows.k.resize(size_t{n_cells} * shape.n_kv_heads * d);
  held.rows.v.resize(size_t{n_cells} * shape.n_kv_heads * dv);
  held.window.assign(n_cells, kNone);
  kernels::RungCode rungs[kernels::kMaxRungs];
  cache.Rungs(il, rungs);
  std::vector<float> k(size_t{config.window} * d), v(size_t{config.window} * dv);
  for (const SeqId seq : cache.Sequences(stream)) {
    std::vector<kernels::WindowRef> refs;
    std::vector<WindowId> ids;
    cache.View(il, seq, refs, ids);
    for (size_t w = 0; w < refs.size(); ++w) {
      const WindowInfo info = cache.info(ids[w]);
      const kernels::WindowRef& ref = refs[w];
      ++(ref.rung_k == kFullRung ? held.n_full : held.n_packed);
      for (uint32_t h = 0; h < shape.n_kv_heads; ++h) {
        const uint8_t* keys = ref.k + h * rungs[ref.rung_k].k_head_bytes;
        const uint8_t* values = ref.v + h * rungs[ref.rung_v].v_head_bytes;
        if (ref.rung_k == kFullRung) {
          DecodeFull(keys, true, shape.elem_k, config.window, info.n_tokens, d, k.data());
        } else {
          DecodeKeys(keys, shape, cache.codec(il, ref.rung_k), h, ref, cache.rope_table(il),
                     info.n_tokens, k.data());
        }
        if (ref.rung_v == kFullRung) {
          DecodeFull(values, false, shape.elem_v, config.window, info.n_tokens, dv, v.data());
        } else {
          cache.codec(il, ref.rung_v)
              .DecodeSides(h, info.n_tokens, nullptr, values, nullptr, v.data());
        }
        for (uint32_t t = 0; t < info.n_tokens; ++t) {
          if ((info.live >> t & 1u) == 0) continue;
          const size_t row = size_t{info.cells[t]} * shape.n_kv_heads + h;
          held.window[info.cells[t]] = ids[w];
          std::copy_n(&k[size_t{t} * d], d, &held.rows.k[row * d]);
          std::copy_n(&v[size_t{t} * dv], dv, &held.rows.v[row * dv]);
        }
      }
    }
  }
  return held;
}

Scores ScoresOf(Engine& engine, uint32_t il) {
  std::vector<uint32_t> births(8192);
  std::vector<float> scores(8192);
  const int n = qevict_get_layer(engine.session(), 0, il, births.data(), nullptr, scores.data(),
                                 static_cast<uint32_t>(births.size()));
  Scores result;
  for (int i = 0; i < n; ++i) {
    result[births[static_cast<size_t>(i)]] = static_cast<double>(scores[static_cast<size_t>(i)]);
  }
  return result;
}

namespace {

// Columns [part] of rows of n_parts * width floats.
std::vector<float> Columns(const std::vector<float>& rows, size_t n_parts, size_t part,
                           size_t width) {
  std::vector<float> columns;
  for (size_t begin = part * width; begin < rows.size(); begin += n_parts * width) {
    columns.insert(columns.end(), rows.begin() + static_cast<ptrdiff_t>(begin),
                   rows.begin() + static_cast<ptrdiff_t>(begin + width));
  }
  return columns;
}

// Part `part` of a layer (all its heads, or one kv head under per_head) against what is held.
void CompareWithHeld(Twin& twin, const StepInput& in, const StepOutput& out, uint32_t il,
                     uint32_t n_parts, uint32_t part, HeldReport& report) {
  LayerSpec layer = twin.ours.spec().layers[il];
  layer.n_kv_heads /= n_parts;
  StepInput seen = in;  // with everything hidden that is not held
  std::vector<StreamRows> streams;
  std::vector<HeldRows> held;
  const size_t rows = in.n_tokens() / in.n_streams;
  std::vector<uint16_t>& mask = seen.masks[seen.mask_of[il]];
  for (uint32_t s = 0; s < in.n_streams; ++s) {
    held.push_back(ReadHeld(twin.ours, twin.ours.owner(il), in.first_stream + s, part));
    streams.push_back(held.back().rows);
    for (size_t i = s * rows * in.n_kv; i < (s + 1) * rows * in.n_kv; ++i) {
      if (held[s].window[i % in.n_kv] == kNone) mask[i] = 0xFC00;
    }
  }
  const size_t n_heads = layer.n_heads();
  const std::vector<float> q = Columns(out.q[il], n_parts, part, n_heads * layer.head_dim);
  const std::vector<float> sinks =
      layer.sinks ? Columns(twin.ours.sinks(il), n_parts, part, n_heads) : std::vector<float>{};
  std::vector<double> mass;
  const std::vector<double> want = ReferenceAttention(layer, seen, il, q, streams, sinks, &mass);
  report.layers.push_back(
      Compare(Columns(out.attention[il], n_parts, part, n_heads * layer.head_dim_v), want));
  report.masses.emplace_back();
  for (size_t i = 0; i < mass.size(); ++i) {
    const size_t token = i / (size_t{layer.n_kv_heads} * in.n_kv);
    const WindowId w = held[token / rows].window[i % in.n_kv];
    if (w == kNone) continue;
    report.masses.back()[twin.ours.cache()->info(w).birth] +=
        mass[i] / static_cast<double>(n_heads);
  }
}

}  // namespace

HeldReport RunHeld(Twin& twin, const std::vector<Token>& batch, bool compare) {
  const StepInput in = twin.Input(batch);
  const StepOutput out = twin.ours.Run(in);
  HeldReport report;
  report.status = out.status;
  if (out.status != GGML_STATUS_SUCCESS) return report;
  report.violations = twin.ours.cache()->Validate();
  const qevict_stats stats = twin.ours.stats();
  report.held_bytes = stats.full_bytes + stats.packed_bytes + stats.dormant_bytes +
                      stats.tables_bytes + stats.slack_bytes;
  report.budget_bytes = stats.budget_bytes;
  for (uint32_t il = 0; compare && il < in.mask_of.size(); ++il) {
    const uint32_t n_parts = twin.ours.group()->layers()[twin.ours.owner(il)].n_parts;
    for (uint32_t part = 0; part < n_parts; ++part) {
      CompareWithHeld(twin, in, out, il, n_parts, part, report);
    }
  }
  return report;
}

void ExpectHeld(const HeldReport& report, const std::string& what, double rms) {
  ASSERT_EQ(report.status, GGML_STATUS_SUCCESS) << what;
  EXPECT_THAT(report.violations, ::testing::IsEmpty()) << what;
  EXPECT_TRUE(report.budget_bytes == 0 || report.held_bytes <= report.budget_bytes)
      << what << ": " << report.held_bytes << " bytes of " << report.budget_bytes;
  static const bool print = std::getenv("QEVICT_TEST_PRINT") != nullptr;
  for (size_t il = 0; il < report.layers.size(); ++il) {
    if (print) std::printf("%-44s layer %zu: rms %.2e\n", what.c_str(), il, report.layers[il].rms);
    EXPECT_FALSE(report.layers[il].nan) << what << ", layer " << il;
    EXPECT_LE(report.layers[il].rms, rms) << what << ", layer " << il;
  }
}

}  // namespace qevict::plugin::testing
