// Sizes follow from the call alone, never from the number of threads.
#include "kernels/attention_layout.h"

#include <algorithm>

#include "kernels/rope_table.h"

namespace qevict::kernels::internal {
namespace {

constexpr uint32_t kMinTasks = 32;  // below: split over windows
constexpr uint32_t kMinChunkTokens = 512;
constexpr uint32_t kMaxStrips = 16;  // separately summed masses per kv head
constexpr size_t kBlockMassBytes = size_t{1} << 20;
constexpr size_t kChunkMassBytes = size_t{16} << 20;

RopeView ViewRope(const RopeTable* table) {
  RopeView v{};
  if (table == nullptr || table->params().pairing == RopePairing::kNone || table->n_pairs() == 0)
    return v;
  const uint32_t channels = ActiveKeyChannels();
  v.coarse = table->coarse();
  v.fine = table->fine();
  v.step = table->steps(channels);
  v.step_zero = table->zero_steps(channels);
  v.basis = table->basis();
  v.middle = table->middle();
  v.n_fast = table->n_fast();
  v.n_blocks = table->n_blocks();
  v.stride = table->stride();
  v.n_pairs = table->n_pairs();
  v.offset = table->params().offset;
  v.halves = table->params().pairing == RopePairing::kHalves;
  return v;
}

/// Scratch of one rung in a token code.
void LayoutTokenRung(const AttentionShape& s, const TokenCode* codes, const GroupPlan& p,
                     Carver& carver, Scratch::Token& r) {
  uint32_t query_bytes = 0, v_places = 0;
  for (uint32_t h = 0; h < s.n_kv_heads; ++h) {
    query_bytes = std::max(query_bytes, QueryBytes(codes[h].k));
    v_places = std::max(v_places, codes[h].v.n_places);
  }
  const size_t n = p.block_vec;
  constexpr uint32_t kSpare = 32;  // a unit without a partner writes one more
  r.stride = PadLanes(v_places + kSpare) + kPad;
  r.q_bytes = carver.Take<int8_t>(n * size_t{query_bytes});
  r.o = carver.Take<float>(n * r.stride);
  if (codes->k.mean == nullptr) return;
  const RopeView rope = ViewRope(s.rope);
  r.mean_q = carver.Take<float>(n * 2 * PadLanes(rope.n_pairs));
  r.mean_terms = carver.Take<float>(n * (2 * size_t{rope.n_fast} + 4) + kPad);
  r.mean_scores = carver.Take<float>(2 * n * kTile);
}

void LayoutTokenScratch(const AttentionShape& s, const GroupPlan& p, Carver& carver, Scratch& r) {
  for (uint32_t i = 0; i < s.n_rungs; ++i) {
    if (s.rungs[i].token == nullptr) continue;
    if (r.weights == nullptr) r.weights = carver.Take<int16_t>(size_t{p.block_vec} * kTile);
    LayoutTokenRung(s, s.rungs[i].token, p, carver, r.token[i]);
  }
}

void LayoutGridScratch(const AttentionShape& s, Carver& carver, Scratch& r) {
  uint32_t grids = 0;
  bool any = false;
  for (uint32_t i = 0; i < s.n_rungs; ++i) {
    const GridCode* codes = s.rungs[i].grid;
    any |= codes != nullptr;
    for (uint32_t h = 0; codes != nullptr && h < s.n_kv_heads; ++h) {
      grids = std::max({grids, GridCount(codes[h].k, s.window, s.head_dim),
                        GridCount(codes[h].v, s.window, s.head_dim_v)});
    }
  }
  if (!any) return;
  r.grid = carver.Take<float>(2 * size_t{PadLanes(grids) + kPad});
  r.v_rows = carver.Take<float>(size_t{kTile} * PadLanes(s.head_dim_v));
}

/// Bytes that the masses of one query vector take.
size_t MassBytes(const GroupPlan& p) {
  return sizeof(float) * ((p.want_mass ? p.n_windows : 0) + (p.want_token_mass ? p.n_tokens : 0));
}

}  // namespace

uint32_t StripBegin(const GroupPlan& p, uint32_t strip) {
  return static_cast<uint32_t>(uint64_t{p.n_blocks} * strip / p.n_strips);
}
uint32_t BlockSize(const GroupPlan& p, uint32_t block) {
  return std::min(p.block_vec, p.n_vec - block * p.block_vec);
}
uint32_t ChunkSize(const GroupPlan& p, uint32_t chunk) {
  return std::min(p.chunk_windows, p.n_windows - chunk * p.chunk_windows);
}

GroupPlan PlanBlocks(const AttentionGroup& g) {
  GroupPlan p{};
  p.n_vec = g.n_rows * g.shape->n_gqa;
  p.n_windows = static_cast<uint32_t>(g.windows.size());
  p.n_heads = g.shape->n_kv_heads;
  p.n_tokens = size_t{p.n_windows} * g.shape->window;
  p.want_mass = g.mass != nullptr;
  p.want_token_mass = g.token_mass != nullptr;
  p.mass_rows = g.mass_per_head ? g.shape->n_gqa : 1;
  p.prompt = p.n_vec > kDecodeVectors;
  uint32_t limit = p.prompt ? kPromptVectors : kDecodeVectors;
  if (p.prompt && MassBytes(p) != 0) {
    const size_t fit = kBlockMassBytes / MassBytes(p);
    limit = static_cast<uint32_t>(std::clamp<size_t>(fit, kDecodeVectors, limit));
  }
  p.n_blocks = CeilDiv(p.n_vec, limit);
  p.block_vec = p.n_blocks == 0 ? 0 : CeilDiv(p.n_vec, p.n_blocks);
  p.n_blocks = p.n_vec == 0 ? 0 : CeilDiv(p.n_vec, p.block_vec);
  p.n_strips = std::min(p.n_blocks, kMaxStrips);
  p.chunk_windows = p.n_windows;
  p.n_chunks = 1;
  return p;
}

void PlanChunks(const AttentionGroup& g, size_t call_tasks, GroupPlan& p) {
  if (call_tasks == 0 || call_tasks >= kMinTasks || p.n_blocks > kMaxStrips) return;
  if (size_t{p.n_vec} * p.n_heads * MassBytes(p) > kChunkMassBytes) return;
  const uint32_t tile_windows = kTile / g.shape->window;
  const uint32_t wanted =
      CeilDiv(p.n_windows, CeilDiv(kMinTasks, static_cast<uint32_t>(call_tasks)));
  const uint32_t least = kMinChunkTokens / g.shape->window;
  p.chunk_windows = CeilDiv(std::max(wanted, least), tile_windows) * tile_windows;
  p.n_chunks = std::max(1u, CeilDiv(p.n_windows, p.chunk_windows));
}

Scratch LayoutScratch(const AttentionGroup& g, const GroupPlan& p, Carver& carver) {
  const AttentionShape& s = *g.shape;
  const size_t n = p.block_vec, d = s.head_dim, sub = std::min(s.window, 8u),
               d_pad = PadLanes(s.head_dim) + 2 * kPad;
  const size_t tiles = PadLanes(CeilDiv(p.chunk_windows, kTile / s.window));
  Scratch r{};
  r.q = carver.Take<float>(n * d + kPad);
  r.scores = carver.Take<float>(n * kTile);
  r.sums = carver.Take<float>(n * kPad);
  r.bits = carver.Take<uint64_t>(n);
  r.rows = carver.Take<uint32_t>(n);
  r.coef = carver.Take<float>(2 * (2 * d_pad + 6 * kCoefStride));  // of two windows
  if (p.prompt) {
    r.k_tile = carver.Take<float>(d * kTile);
    r.v_tile = carver.Take<float>((size_t{s.head_dim_v} + 63) / 64 * 64 * kTile);
  } else {
    r.q_lanes = carver.Take<float>(n * (d * sub + kPad));
    r.q_plain = carver.Take<float>(n * d);
    r.q_pairs = carver.Take<float>(n * d);
    r.k_tile = carver.Take<float>(d * std::max(s.window, 8u) + kPad);
  }
  if (p.want_mass || p.want_token_mass) r.tile_max = carver.Take<float>(n * tiles);
  LayoutTokenScratch(s, p, carver, r);
  LayoutGridScratch(s, carver, r);
  return r;
}

BlockState LayoutState(const AttentionGroup& g, const GroupPlan& p, uint32_t n_vec, uint32_t n_win,
                       Carver& carver) {
  BlockState s{};
  s.m = carver.Take<float>(n_vec);
  s.l = carver.Take<float>(n_vec);
  s.o = carver.Take<float>(size_t{n_vec} * PadLanes(g.shape->head_dim_v));
  s.mass_stride = PadLanes(n_win);
  if (p.want_mass) s.mass = carver.Take<float>(n_vec * s.mass_stride);
  s.token_stride = (size_t{n_win} * g.shape->window + kTile - 1) / kTile * kTile;
  if (p.want_token_mass) s.token_mass = carver.Take<float>(n_vec * s.token_stride);
  return s;
}

/// The first rung whose keys of this kv head have the same mean: its part of the scores is then
/// computed once.
static uint32_t SameMean(const AttentionShape& s, uint32_t rung, uint32_t kv_head) {
  const float* mean = s.rungs[rung].token ? s.rungs[rung].token[kv_head].k.mean : nullptr;
  if (mean == nullptr) return kMaxRungs;
  for (uint32_t i = 0; i < rung; ++i) {
    const float* other = s.rungs[i].token ? s.rungs[i].token[kv_head].k.mean : nullptr;
    if (other != nullptr && std::equal(mean, mean + s.head_dim, other)) return i;
  }
  return rung;
}

static RungArgs MakeRung(const AttentionShape& s, uint32_t i, uint32_t kv_head) {
  const RungCode& code = s.rungs[i];
  RungArgs r{};
  r.format = code.format;
  r.k_offset = kv_head * code.k_head_bytes;
  r.v_offset = kv_head * code.v_head_bytes;
  r.k_bytes = static_cast<uint32_t>(code.k_head_bytes);
  r.v_bytes = static_cast<uint32_t>(code.v_head_bytes);
  r.token = code.token != nullptr ? code.token + kv_head : nullptr;
  r.grid = code.grid != nullptr ? code.grid + kv_head : nullptr;
  r.mean = SameMean(s, i, kv_head);
  return r;
}

HeadArgs MakeHead(const AttentionGroup& g, uint32_t kv_head) {
  const AttentionShape& s = *g.shape;
  HeadArgs h{};
  h.head_dim = s.head_dim;
  h.head_dim_v = s.head_dim_v;
  h.dv_pad = PadLanes(s.head_dim_v);
  h.window = s.window;
  h.tile_windows = kTile / s.window;
  h.elem_k = s.elem_k;
  h.elem_v = s.elem_v;
  h.n_rungs = s.n_rungs;
  for (uint32_t i = 0; i < s.n_rungs; ++i) h.rungs[i] = MakeRung(s, i, kv_head);
  h.scale = s.scale * kLog2E;
  h.softcap = s.softcap;
  h.rope = ViewRope(s.rope);
  h.n_gqa = s.n_gqa;
  h.first_head = kv_head * s.n_gqa;
  h.q = g.q;
  h.q_row_stride = g.q_row_stride;
  h.q_head_stride = g.q_head_stride;
  h.out = g.out;
  h.out_row_stride = g.out_row_stride;
  h.out_head_stride = g.out_head_stride;
  h.slopes = s.slopes;
  h.sinks = s.sinks;
  h.windows = g.windows.data();
  h.visible = g.visible;
  h.visible_stride = g.visible_stride;
  h.bias = g.bias;
  h.bias_stride = g.bias_stride;
  h.mass_first_row = g.mass_first_row;
  h.token_mass_first_row = g.token_mass_first_row;
  return h;
}

}  // namespace qevict::kernels::internal
