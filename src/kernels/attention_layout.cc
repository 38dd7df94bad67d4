// Sizes follow from the call alone, never from the number of threads.
#include "kernels/attention_layout.h"

#include <algorithm>

#include "kernels/rope_table.h"

namespace qevict::kernels::internal {
namespace {

constexpr uint32_t kMinTasks = 32;  // below: split over windows
constexpr uint32_t kMinChunkTokens = 512;
constexpr uint32_t kMaxStrips = 16;  // separately summed window masses per kv head
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

void LayoutTokenScratch(const AttentionShape& s, const GroupPlan& p, Carver& carver, Scratch& r) {
  uint32_t query_bytes = 0, v_places = 0;
  for (uint32_t h = 0; h < s.n_kv_heads; ++h) {
    query_bytes = std::max(query_bytes, QueryBytes(s.token[h].k));
    v_places = std::max(v_places, s.token[h].v.n_places);
  }
  const size_t n = p.block_vec;
  constexpr uint32_t kSpare = 32;  // a unit without a partner writes one more
  r.token_stride = PadLanes(v_places + kSpare) + kPad;
  r.q_bytes = carver.Take<int8_t>(n * size_t{query_bytes});
  r.token_o = carver.Take<float>(n * r.token_stride);
  r.weights = carver.Take<int16_t>(n * kTile);
  if (s.token->k.mean == nullptr) return;
  const RopeView rope = ViewRope(s.rope);
  r.mean_q = carver.Take<float>(n * 2 * PadLanes(rope.n_pairs));
  r.mean_terms = carver.Take<float>(n * (2 * size_t{rope.n_fast} + 4) + kPad);
  r.mean_scores = carver.Take<float>(2 * n * kTile);
}

void LayoutGridScratch(const AttentionShape& s, Carver& carver, Scratch& r) {
  uint32_t grids = 0;
  for (uint32_t h = 0; h < s.n_kv_heads; ++h) {
    grids = std::max({grids, GridCount(s.grid[h].k, s.window, s.head_dim),
                      GridCount(s.grid[h].v, s.window, s.head_dim_v)});
  }
  r.grid = carver.Take<float>(2 * size_t{PadLanes(grids) + kPad});
  r.v_rows = carver.Take<float>(size_t{kTile} * PadLanes(s.head_dim_v));
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
  p.want_mass = g.mass != nullptr;
  p.mass_rows = g.mass_per_head ? g.shape->n_gqa : 1;
  p.prompt = p.n_vec > kDecodeVectors;
  uint32_t limit = p.prompt ? kPromptVectors : kDecodeVectors;
  if (p.want_mass && p.prompt) {
    const size_t fit = kBlockMassBytes / (sizeof(float) * std::max<size_t>(p.n_windows, 1));
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
  const size_t mass_bytes = size_t{p.n_vec} * p.n_heads * p.n_windows * sizeof(float);
  if (p.want_mass && mass_bytes > kChunkMassBytes) return;
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
  if (p.want_mass) r.tile_max = carver.Take<float>(n * tiles);
  if (s.token != nullptr) LayoutTokenScratch(s, p, carver, r);
  if (s.grid != nullptr) LayoutGridScratch(s, carver, r);
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
  return s;
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
  for (uint32_t i = 0; i < kWindowFormats; ++i) {
    h.head_offset[i] = kv_head * s.head_bytes[i];
    h.head_bytes[i] = static_cast<uint32_t>(s.head_bytes[i]);
  }
  h.scale = s.scale * kLog2E;
  h.softcap = s.softcap;
  h.rope = ViewRope(s.rope);
  h.token = s.token != nullptr ? s.token + kv_head : nullptr;
  h.grid = s.grid != nullptr ? s.grid + kv_head : nullptr;
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
  return h;
}

}  // namespace qevict::kernels::internal
