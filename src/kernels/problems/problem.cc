#include "kernels/problems/problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <sstream>

#include "base/half.h"
#include "kernels/attention_internal.h"

namespace qevict::kernels {
namespace {

constexpr double kEpsilon = 0x1p-24;

}  // namespace

void Problem::Write16(std::vector<uint8_t>& block, size_t offset, uint16_t value) {
  std::memcpy(&block[offset], &value, 2);
}

std::vector<Isa> AllIsas() {
  std::vector<Isa> isas;
  for (Isa isa : kAllIsas) {
    if (IsaSupported(isa)) isas.push_back(isa);
  }
  return isas;
}

std::vector<Isa> FloatIsas() {
  std::vector<Isa> isas = AllIsas();
  std::erase(isas, Isa::kAvx512Vnni);
  std::erase(isas, Isa::kNeonDot);
  return isas;
}

std::string ProblemParams::Name() const {
  std::ostringstream s;
  s << "heads " << n_kv_heads << "x" << n_gqa << " D " << head_dim << "/" << head_dim_v << " W "
    << window << " token " << token_k.size() << "/" << token_v.size() << " " << token_bits
    << token_zero << token_mean << " grid " << grid_k.bits << int(grid_k.axis) << grid_k.group
    << grid_k.bytes << grid_k.before_rope << grid_k.levels << grid_k.factor << grid_k.sign
    << grid_k.n_exact << grid_k.n_exact_tokens << " rows " << n_rows << " windows " << n_windows
    << " elem " << int(elem_k) << int(elem_v) << " formats " << int(formats) << " mask "
    << int(mask) << " rope " << use_rope << " pairing " << int(rope.pairing) << " dims "
    << rope.n_dims << "+" << rope.offset << " pos " << first_pos << " shared " << shared_positions
    << " softcap " << softcap << " bias " << bias << " slopes " << slopes << " sinks " << sinks
    << " blind " << blind_row << " first " << mass_first_row << " kind "
    << static_cast<int>(mass_kind) << mass_per_head << " tokens " << token_mass
    << token_mass_first_row << " gap " << head_gap << " seed " << seed;
  return s.str();
}

Problem::Problem(const ProblemParams& params) : params_(params), rng_(params.seed), group_() {
  const ProblemParams& p = params_;
  const uint32_t n_heads = p.n_kv_heads * p.n_gqa;
  rope_ = std::make_unique<RopeTable>(p.rope);
  if (p.token_mean) rope_->AddBasis();
  const int64_t last = int64_t{p.first_pos} + int64_t{p.n_windows} * p.window + 64;
  rope_->Grow(static_cast<int32_t>(std::max(std::abs(int64_t{p.first_pos}), std::abs(last))));
  shape_.n_kv_heads = p.n_kv_heads;
  shape_.n_gqa = p.n_gqa;
  shape_.head_dim = p.head_dim;
  shape_.head_dim_v = p.head_dim_v;
  shape_.window = p.window;
  shape_.elem_k = p.elem_k;
  shape_.elem_v = p.elem_v;
  MakeRungs();
  shape_.scale = 1.0f / std::sqrt(static_cast<float>(p.head_dim));
  shape_.softcap = p.softcap;
  for (uint32_t h = 0; h < n_heads; ++h) {
    slopes_.push_back(std::exp2(-0.5f * static_cast<float>(h % 16 + 1)));
    sinks_.push_back(Normal() * 2.0f);
  }
  if (p.slopes) shape_.slopes = slopes_.data();
  if (p.sinks) shape_.sinks = sinks_.data();
  if (p.use_rope) shape_.rope = rope_.get();

  MakeMask();
  MakeWindows();
  for (const auto& block : blocks_) bytes_ += block.size();
  if (p.scattered) Scatter();
  // Strides are wider than the data, and what lies between is NaN.
  group_.shape = &shape_;
  group_.n_rows = p.n_rows;
  group_.q_head_stride = p.head_dim + 3;
  group_.q_row_stride = n_heads * group_.q_head_stride + 5;
  q_.assign(p.n_rows * group_.q_row_stride, std::numeric_limits<float>::quiet_NaN());
  for (uint32_t r = 0; r < p.n_rows; ++r) {
    for (uint32_t h = 0; h < n_heads; ++h) {
      float* q = &q_[r * group_.q_row_stride + h * group_.q_head_stride];
      for (uint32_t c = 0; c < p.head_dim; ++c) q[c] = 1.5f * Normal();
    }
  }
  group_.q = q_.data();
  group_.out_head_stride = p.head_dim_v + 1;
  group_.out_row_stride = n_heads * group_.out_head_stride;
  group_.windows = windows_;
  group_.visible = visible_.data();
  group_.visible_stride = p.n_windows + 1;
  if (p.bias) {
    group_.bias_stride = size_t{p.n_windows} * p.window;
    bias_.resize(p.n_rows * group_.bias_stride);
    for (float& x : bias_) x = Normal();
    for (size_t i = 0; i < bias_.size(); i += 13)
      bias_[i] = -std::numeric_limits<float>::infinity();
    group_.bias = bias_.data();
  }
  group_.mass_head_stride = p.n_windows + 2;
  group_.mass_first_row = p.mass_first_row;
  group_.mass_kind = p.mass_kind;
  group_.mass_per_head = p.mass_per_head;
  group_.token_mass_head_stride = size_t{p.n_windows} * p.window + 5;
  group_.token_mass_first_row = p.token_mass_first_row;
  Clear();
}

void Problem::MakeMask() {
  const ProblemParams& p = params_;
  visible_.assign(size_t{p.n_rows} * (p.n_windows + 1), 0xFFFFFFFFu);
  const uint32_t all = p.window == 32 ? ~0u : (1u << p.window) - 1,
                 n_tokens = p.n_windows * p.window;
  for (uint32_t r = 0; r < p.n_rows; ++r) {
    for (uint32_t i = 0; i < p.n_windows; ++i) {
      uint32_t& bits = visible_[size_t{r} * (p.n_windows + 1) + i];
      bits = all;
      if (p.mask == Mask::kPartialLast && i + 1 == p.n_windows) bits &= all >> (p.window / 2);
      if (p.mask == Mask::kCausal) {
        const int64_t seen = int64_t{n_tokens} - (p.n_rows - 1) + r -
                             int64_t{i} * p.window;  // tokens of this window
        if (seen <= 0) bits = 0;
        if (seen > 0 && seen < p.window) bits &= (1u << seen) - 1;
      }
      if (p.mask == Mask::kHoles) {
        bits &= static_cast<uint32_t>(rng_());
        if (i % 3 == 1) bits = 0;
        if (i % 5 == 2) bits = all;
        if (i >= 8 && i < 20) bits = 0;  // whole tiles
      }
      if (p.blind_row && r == p.n_rows / 2) bits = 0;
      bits |=
          p.mask == Mask::kAll && p.window < 32 ? ~all : 0u;  // bits beyond the window mean nothing
    }
  }
}

uint32_t Problem::SeenBits(size_t window) const {
  uint32_t bits = 0;
  for (uint32_t r = 0; r < params_.n_rows; ++r)
    bits |= visible_[size_t{r} * (params_.n_windows + 1) + window];
  return bits;
}

void Problem::MakeWindows() {
  const ProblemParams& p = params_;
  for (uint32_t i = 0; i < p.n_windows; ++i) {
    WindowRef w{};
    w.pos0 = p.first_pos + static_cast<int32_t>(i * p.window);
    w.pos_stride = 1;
    if (p.shared_positions && i % 2 == 1) {
      w.pos_stride = 0;
      if (i % 4 == 1) w.pos0 = 0;
    }
    w.rung_k = PickRung();
    w.rung_v = p.apart ? PickRung() : w.rung_k;
    windows_.push_back(w);
    const uint8_t* keys = AddBlock(i, w.rung_k);
    const uint8_t* values = p.apart ? AddBlock(i, w.rung_v) : keys;
    windows_.back().k = keys;
    windows_.back().v = values + KeyBytes(w.rung_v);
  }
}

uint8_t Problem::PickRung() {
  const ProblemParams& p = params_;
  if (p.formats != Formats::kMixed) return static_cast<uint8_t>(p.formats);
  if (p.window % 8 != 0) return static_cast<uint8_t>(rng_() % 3);
  const uint32_t n = (p.mix_grids ? 5 : 4) + static_cast<uint32_t>(p.more_tokens.size());
  const uint32_t rung = static_cast<uint32_t>(rng_() % n);
  return static_cast<uint8_t>(!p.mix_grids && rung >= 4 ? rung + 1 : rung);
}

/// Keys and values of all kv heads on a rung.
uint8_t* Problem::AddBlock(size_t window, uint8_t rung) {
  const ProblemParams& p = params_;
  blocks_.emplace_back(HeadBytes(rung) * p.n_kv_heads - p.head_gap, uint8_t{0xFF});
  std::vector<uint8_t>& block = blocks_.back();
  for (uint32_t h = 0; h < p.n_kv_heads; ++h) {
    switch (shape_.rungs[rung].format) {
      case WindowFormat::kFull:
        FillFull(block, window, h);
        break;
      case WindowFormat::kToken:
        FillTokens(block, rung, window, h);
        break;
      case WindowFormat::kGrid:
        FillGrid(block, window, h);
        break;
      default:
        FillPacked(block, rung, window, h);
    }
  }
  return block.data();
}

size_t Problem::KeyBytes(uint8_t rung) const {
  const ProblemParams& p = params_;
  switch (shape_.rungs[rung].format) {
    case WindowFormat::kFull:
      return size_t{p.window} * p.head_dim * 2;
    case WindowFormat::kToken:
      return TokenCodeBytes(p.window, codes_[rung][0].k.n_words, codes_[rung][0].k.grid);
    case WindowFormat::kGrid:
      return LayoutGrid(grids_[0].k, p.window, p.head_dim).end;
    default:
      return size_t{p.head_dim} * p.window * (rung == 1 ? 2 : 4) / 8 + size_t{p.head_dim} * 4;
  }
}

/// The rungs are the formats in their order, then more token codes.
void Problem::MakeRungs() {
  const ProblemParams& p = params_;
  const auto set = [&](uint32_t rung, WindowFormat format, size_t head_bytes) {
    shape_.rungs[rung].format = format;
    shape_.rungs[rung].k_head_bytes = shape_.rungs[rung].v_head_bytes = head_bytes + p.head_gap;
  };
  set(0, WindowFormat::kFull, FullHeadBytes(p.window, p.head_dim, p.head_dim_v));
  set(1, WindowFormat::kPacked2, PackedHeadBytes(2, p.window, p.head_dim, p.head_dim_v));
  set(2, WindowFormat::kPacked4, PackedHeadBytes(4, p.window, p.head_dim, p.head_dim_v));
  shape_.n_rungs = 3;
  codes_.resize(kMaxRungs);
  if (p.window % 8 != 0) return;
  shape_.n_rungs = 5;
  MakeTokenCodes(3, p.token_k, p.token_v);
  set(3, WindowFormat::kToken, TokenHeadBytes(p.window, codes_[3][0]));
  if (p.formats == Formats::kGrid || p.mix_grids) {
    MakeGridCodes();
    set(4, WindowFormat::kGrid, GridHeadBytes(p.window, p.head_dim, p.head_dim_v, grids_[0]));
  }
  for (const ProblemParams::TokenRung& more : p.more_tokens) {
    const auto rung = static_cast<uint8_t>(shape_.n_rungs++);
    MakeTokenCodes(rung, more.k, more.v);
    set(rung, WindowFormat::kToken, TokenHeadBytes(p.window, codes_[rung][0]));
  }
}

void Problem::Scatter() {
  std::vector<size_t> order(blocks_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), rng_);
  uint8_t* at = scattered_.Reserve(bytes_);
  const size_t per_window = params_.apart ? 2 : 1;
  for (const size_t i : order) {
    std::memcpy(at, blocks_[i].data(), blocks_[i].size());
    WindowRef& w = windows_[i / per_window];
    if (i % per_window == 0) w.k = at;
    if (i % per_window == per_window - 1) w.v = at + KeyBytes(w.rung_v);
    at += blocks_[i].size();
  }
  blocks_.clear();
}

void Problem::FillFull(std::vector<uint8_t>& block, size_t window, uint32_t kv_head) {
  const ProblemParams& p = params_;
  const size_t base = kv_head * HeadBytes(0), v_base = base + size_t{p.window} * p.head_dim * 2;
  const uint32_t sub = std::min(p.window, 8u), seen = SeenBits(window);
  for (uint32_t t = 0; t < p.window; ++t) {
    if (((seen >> t) & 1u) == 0) continue;
    for (uint32_t c = 0; c < p.head_dim; ++c) {
      const size_t index = (size_t{t / sub} * p.head_dim + c) * sub + t % sub;
      Write16(block, base + 2 * index, FromF32(Normal(), p.elem_k));
    }
    for (uint32_t c = 0; c < p.head_dim_v; ++c) {
      Write16(block, v_base + 2 * (size_t{t} * p.head_dim_v + c), FromF32(Normal(), p.elem_v));
    }
  }
}

void Problem::FillPacked(std::vector<uint8_t>& block, uint8_t rung, size_t window,
                         uint32_t kv_head) {
  const ProblemParams& p = params_;
  const uint32_t seen = SeenBits(window) & (p.window == 32 ? ~0u : (1u << p.window) - 1);
  if (seen == 0) return;
  const uint32_t bits = shape_.rungs[rung].format == WindowFormat::kPacked2 ? 2 : 4;
  const float levels = static_cast<float>((1u << bits) - 1);
  const size_t base = kv_head * HeadBytes(rung);
  const size_t k_bytes = size_t{p.head_dim} * p.window * bits / 8,
               v_bytes = size_t{p.head_dim_v} * p.window * bits / 8;
  const size_t k_grid = base + k_bytes, v_codes = k_grid + size_t{p.head_dim} * 4,
               v_grid = v_codes + v_bytes;
  for (size_t i = 0; i < k_bytes; ++i) block[base + i] = static_cast<uint8_t>(rng_());
  for (size_t i = 0; i < v_bytes; ++i) block[v_codes + i] = static_cast<uint8_t>(rng_());
  const auto grid = [&](size_t at, uint32_t n, uint32_t i) {
    Write16(block, at + 2 * i, F32ToF16((1.0f + std::abs(Normal())) / levels));
    Write16(block, at + 2 * (n + i), F32ToF16(Normal() - 1.0f));
  };
  for (uint32_t c = 0; c < p.head_dim; ++c) grid(k_grid, p.head_dim, c);
  for (uint32_t t = 0; t < p.window; ++t) {
    if ((seen >> t) & 1u) grid(v_grid, p.window, t);
  }
}

void Problem::MakeTokenCodes(uint8_t rung, const std::vector<TokenSegment>& k,
                             const std::vector<TokenSegment>& v) {
  const ProblemParams& p = params_;
  const auto uniform = [&p](uint32_t dim, uint32_t unit) {
    return std::vector<TokenSegment>{
        {static_cast<uint8_t>(p.token_bits), static_cast<uint16_t>((dim + unit - 1) / unit)}};
  };
  for (uint32_t h = 0; h < p.n_kv_heads; ++h) {
    codes_[rung].push_back(
        {MakeVectorCode(p.head_dim, k.empty() ? uniform(p.head_dim, kKeyUnit) : k, true),
         MakeVectorCode(p.head_dim_v, v.empty() ? uniform(p.head_dim_v, kValueUnit) : v, false)});
    if (rung > 3 && p.token_mean && p.same_means) codes_[rung][h].k.mean = codes_[3][h].k.mean;
  }
  shape_.rungs[rung].token = codes_[rung].data();
}

VectorCode Problem::MakeVectorCode(uint32_t dim, const std::vector<TokenSegment>& segments,
                                   bool is_k) {
  const bool ordered = params_.token_k.empty() && params_.token_v.empty();
  VectorCode code;
  const uint32_t unit = is_k ? kKeyUnit : kValueUnit;
  uint32_t bits_of_units = 0;
  code.grid = params_.token_zero         ? TokenGrid::kScaleZero
              : params_.token_byte_scale ? TokenGrid::kScaleByte
                                         : TokenGrid::kScale;
  code.center = params_.token_zero ? 0 : 63;
  code.wide_center = params_.token_zero ? 0 : 127;
  for (const TokenSegment& s : segments) {
    uint8_t* levels = code.levels[code.n_segments];
    const uint32_t last = s.bits == 8 ? 0 : (1u << s.bits) - 1;
    for (uint32_t i = 0; i <= last; ++i)
      levels[i] = static_cast<uint8_t>(ordered ? i : i * 126 / std::max(last, 1u));
    code.segments[code.n_segments++] = s;
    bits_of_units += s.n_units * s.bits;
    code.n_places += s.n_units * unit;
  }
  code.n_words = WordsOfUnits(bits_of_units, unit);
  std::vector<uint16_t> channels(dim);
  std::iota(channels.begin(), channels.end(), uint16_t{0});
  if (!ordered) std::shuffle(channels.begin(), channels.end(), rng_);
  steps_.push_back(std::make_unique<std::vector<float>>(code.n_places, 0.0f));
  channels_.push_back(std::make_unique<std::vector<uint16_t>>(code.n_places, uint16_t{0xFFFF}));
  uint32_t place = 0, channel = 0;
  for (uint32_t i = 0; i < code.n_segments; ++i) {
    const TokenSegment& s = code.segments[i];
    // The first segments are filled; the last one ends with padding if there are places left.
    for (uint32_t j = 0; j < s.n_units * unit; ++j, ++place) {
      if (channel == dim) continue;
      const float largest = ordered ? 1.0f : static_cast<float>(s.bits == 8 ? 255 : 126) / 3.0f;
      (*steps_.back())[place] = (ordered ? 1.0f : 0.5f + std::abs(Normal())) / largest;
      (*channels_.back())[place] = channels[channel++];
    }
  }
  if (params_.token_mean && is_k) {
    means_.push_back(std::make_unique<std::vector<float>>(dim));
    for (float& x : *means_.back()) x = 2.0f * Normal();
    code.mean = means_.back()->data();
  }
  code.step = steps_.back()->data();
  code.channel = channels_.back()->data();
  return code;
}

void Problem::FillTokens(std::vector<uint8_t>& block, uint8_t rung, size_t window,
                         uint32_t kv_head) {
  const ProblemParams& p = params_;
  const uint32_t seen = SeenBits(window);
  size_t at = kv_head * HeadBytes(rung);
  for (const VectorCode* code : {&codes_[rung][kv_head].k, &codes_[rung][kv_head].v}) {
    const size_t words = size_t{p.window} * code->n_words * 4;
    for (size_t i = 0; i < words; ++i) block[at + i] = static_cast<uint8_t>(rng_());
    at += words;
    const bool ordered = p.token_k.empty() && p.token_v.empty();
    const float levels = ordered ? static_cast<float>((1u << p.token_bits) - 1) : 1.0f;
    for (uint32_t t = 0; t < p.window; ++t) {
      if (((seen >> t) & 1u) == 0) continue;
      const uint16_t scale = F32ToF16((1.0f + std::abs(Normal())) / levels);
      if (code->grid == TokenGrid::kScaleByte) {
        block[at + t] = static_cast<uint8_t>(std::min(scale >> 6, 255));
        continue;
      }
      Write16(block, at + 2 * t, scale);
      if (code->grid == TokenGrid::kScaleZero)
        Write16(block, at + 2 * (p.window + t), F32ToF16(Normal() - 1.0f));
    }
    at += size_t{p.window} * static_cast<size_t>(code->grid);
  }
}

void Problem::Clear() {
  out_.assign(params_.n_rows * group_.out_row_stride, -777.0f);
  group_.out = out_.data();
  if (params_.mass) {
    mass_.assign(MassRows() * group_.mass_head_stride, 0.0f);
    group_.mass = mass_.data();
  }
  if (params_.token_mass) {
    token_mass_.assign(params_.n_kv_heads * group_.token_mass_head_stride, 0.0f);
    group_.token_mass = token_mass_.data();
  }
}

void Problem::Run(ParallelFor& pool, Workspace& workspace) {
  Clear();
  Attend({&group_, 1}, pool, workspace);
}

std::string Problem::Compare() const { return CompareWith(AttendReference(group_)); }

std::string Problem::CompareWith(const ReferenceResult& want) const {
  const ProblemParams& p = params_;
  const uint32_t n_heads = p.n_kv_heads * p.n_gqa;
  double v_max = 0.0, magnitude = 0.0;
  for (double x : want.out) v_max = std::max(v_max, std::abs(x));
  v_max = std::max(v_max, p.formats == Formats::kGrid || p.mix_grids ? 24.0 : 6.0);
  // Weights of packed values have 15 bits below the largest of a tile.
  const bool decode = p.n_rows * p.n_gqa <= internal::kDecodeVectors;
  const bool integers = p.formats != Formats::kGrid &&
                        (p.formats == Formats::kToken ||
                         (decode ? p.formats != Formats::kFull : shape_.rungs[3].token != nullptr));
  const double weight_bound = integers ? 3e-4 : 0.0;
  // Rounding errors of a sum of D terms are a random walk: about sqrt(D) / 2 eps times the sum of
  // magnitudes is out of its reach, as the terms are far smaller than their sum. A weight is off by
  // twice its logit's error, relatively; sums over n tokens add sqrt(n) / 2, and the few roundings
  // of exponential, grid and rotation the constants.
  const double n_tokens = static_cast<double>(p.n_windows) * p.window;
  const double logit_eps = std::sqrt(p.head_dim) / 2.0 + 4.0,
               sum_eps = std::sqrt(n_tokens) / 2.0 + 8.0;
  std::ostringstream error;
  for (uint32_t r = 0; r < p.n_rows; ++r) {
    for (uint32_t h = 0; h < n_heads; ++h) {
      const size_t index = size_t{r} * n_heads + h;
      magnitude = std::max(magnitude, want.magnitude[index]);
      const double bound =
          (kEpsilon * (logit_eps * want.magnitude[index] + sum_eps) + weight_bound) * v_max;
      for (uint32_t c = 0; c < p.head_dim_v; ++c) {
        const double got = out_[r * group_.out_row_stride + h * group_.out_head_stride + c];
        const double ref = want.out[index * p.head_dim_v + c];
        if (std::abs(got - ref) <= bound) continue;
        error << "out row " << r << " head " << h << " channel " << c << ": " << got
              << " instead of " << ref << ", bound " << bound;
        return error.str();
      }
      if (out_[r * group_.out_row_stride + h * group_.out_head_stride + p.head_dim_v] != -777.0f)
        return "wrote past a row";
    }
  }
  return CompareMasses(want, kEpsilon * (logit_eps * magnitude + sum_eps));
}

std::string Problem::CompareMasses(const ReferenceResult& want, double relative) const {
  const ProblemParams& p = params_;
  const auto compare = [relative](const std::vector<float>& all, const std::vector<double>& wanted,
                                  size_t n, size_t stride, const char* what) -> std::string {
    for (size_t i = 0; i < all.size(); ++i) {
      const double got = all[i], ref = i % stride < n ? wanted[i / stride * n + i % stride] : 0.0;
      if (std::abs(got - ref) <= relative * ref + 1e-30) continue;
      std::ostringstream error;
      error << what << " mass row " << i / stride << " at " << i % stride << ": " << got
            << " instead of " << ref << ", relative bound " << relative;
      return error.str();
    }
    return "";
  };
  if (p.mass) {
    const std::string error =
        compare(mass_, want.mass, p.n_windows, group_.mass_head_stride, "window");
    if (!error.empty()) return error;
  }
  if (!p.token_mass) return "";
  return compare(token_mass_, want.token_mass, size_t{p.n_windows} * p.window,
                 group_.token_mass_head_stride, "token");
}

}  // namespace qevict::kernels
