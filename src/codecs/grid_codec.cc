#include "codecs/grid_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

#include "codecs/grid.h"

namespace qevict::codecs {
namespace {

using kernels::GridAxis;
using kernels::GridLayout;
using kernels::GridVector;
using kernels::kByteGridShare;

constexpr size_t kReadable = 16;  // kernels read arrays of channels in whole vectors

void PadChannels(std::vector<float>& x) {
  if (!x.empty()) x.resize((x.size() + kReadable - 1) / kReadable * kReadable);
}

const float* DataOf(const std::vector<float>& x) { return x.empty() ? nullptr : x.data(); }

void SetPointers(GridSpec& s) {
  if (s.borders.empty()) s.borders = Midpoints(s.levels);
  if (!s.levels.empty()) s.levels.resize(16, s.levels.back());
  PadChannels(s.factor);
  PadChannels(s.offset);
  PadChannels(s.sign);
  s.grid.levels = DataOf(s.levels);
  s.grid.factor = DataOf(s.factor);
  s.grid.offset = DataOf(s.offset);
  s.grid.sign = DataOf(s.sign);
}

/// What is not finite counts as 0, and what f16 cannot hold is clamped.
std::vector<float> Storable(const float* x, size_t n) {
  std::vector<float> storable(x, x + n);
  for (float& each : storable) each = std::clamp(Finite(each), -kMaxF16, kMaxF16);
  return storable;
}

size_t BytesOf(const GridSpec& s) {
  return (s.levels.size() + s.factor.size() + s.offset.size() + s.sign.size()) * sizeof(float);
}

/// Keys or values of one kv head of one window, with grids in f32.
class Part {
 public:
  Part(const GridSpec& spec, uint32_t window, uint32_t dim, bool is_k)
      : spec_(spec),
        g_(spec.grid),
        window_(window),
        dim_(dim),
        is_k_(is_k),
        at_(kernels::LayoutGrid(g_, window, dim)),
        n_(kernels::GridCount(g_, window, dim)) {}

  /// Overwrites x [n][dim], storable numbers.
  void Encode(std::vector<float>& x, uint32_t n, std::span<const uint32_t> exact_tokens,
              uint8_t* block) {
    std::memset(block, 0, at_.end);
    std::memset(block + at_.exact, 0xFF, at_.end - at_.exact);
    if (g_.sign != nullptr) {
      for (uint32_t t = 0; t < n; ++t) HadamardForward(g_.sign, dim_, x.data() + size_t{t} * dim_);
    }
    TakeExact(x, n, exact_tokens, block);
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t c = 0; c < dim_; ++c) {
        float& each = x[size_t{t} * dim_ + c];
        if (g_.offset != nullptr) each -= g_.offset[c];
        if (g_.factor != nullptr) each = g_.factor[c] == 0.0f ? 0.0f : each / g_.factor[c];
      }
    }
    FitGrids(x, n);
    StoreGrids(block);
    std::vector<uint8_t> codes(size_t{window_} * dim_);
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t c = 0; c < dim_; ++c)
        codes[Index(t, c)] = CodeOf(x[size_t{t} * dim_ + c], GridOf(t, c));
    }
    for (size_t i = 0; i < codes.size(); i += 8) Put8(codes.data() + i, block + i / 8 * g_.bits);
  }

  void Decode(const uint8_t* block, uint32_t n, float* x) {
    LoadGrids(block);
    std::vector<uint8_t> codes(size_t{window_} * dim_);
    for (size_t i = 0; i < codes.size(); i += 8) Get8(block + i / 8 * g_.bits, codes.data() + i);
    for (uint32_t t = 0; t < n; ++t) {
      for (uint32_t c = 0; c < dim_; ++c) {
        const uint32_t code = codes[Index(t, c)];
        const float level = g_.levels != nullptr ? g_.levels[code] : static_cast<float>(code);
        const GridFit grid = GridOf(t, c);
        float value = level * grid.scale + grid.zero;
        if (g_.factor != nullptr) value *= g_.factor[c];
        if (g_.offset != nullptr) value += g_.offset[c];
        x[size_t{t} * dim_ + c] = value;
      }
    }
    PutExact(block, n, x);
    if (g_.sign == nullptr) return;
    for (uint32_t t = 0; t < n; ++t) HadamardInverse(x + size_t{t} * dim_);
  }

 private:
  /// Number of a code, in the order in which they are stored.
  size_t Index(uint32_t t, uint32_t c) const {
    return is_k_ ? (size_t{t / 8} * dim_ + c) * 8 + t % 8 : size_t{t} * dim_ + c;
  }
  /// 8 codes are `bits` adjacent bytes.
  void Put8(const uint8_t* codes, uint8_t* bytes) const {
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t bit = i * g_.bits, code = uint32_t{codes[i]} << (bit % 8);
      bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] | code);
      if (code > 0xFF) bytes[bit / 8 + 1] = static_cast<uint8_t>(bytes[bit / 8 + 1] | code >> 8);
    }
  }
  void Get8(const uint8_t* bytes, uint8_t* codes) const {
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t bit = i * g_.bits, next = bit % 8 + g_.bits > 8 ? bytes[bit / 8 + 1] : 0u;
      codes[i] =
          static_cast<uint8_t>((bytes[bit / 8] | next << 8) >> (bit % 8) & ((1u << g_.bits) - 1));
    }
  }

  GridFit GridOf(uint32_t t, uint32_t c) const {
    if (g_.axis == GridAxis::kStatic) return {1.0f, 0.0f};
    return grids_[g_.axis == GridAxis::kChannel ? c : c / g_.group * window_ + t];
  }

  uint8_t CodeOf(float x, GridFit grid) const {
    if (g_.levels == nullptr)
      return GridCode(x, grid.zero, grid.scale, static_cast<float>((1u << g_.bits) - 1));
    const float z = grid.scale == 0.0f ? 0.0f : (x - grid.zero) / grid.scale;
    const auto border = std::lower_bound(spec_.borders.begin(), spec_.borders.end(), z);
    return static_cast<uint8_t>(border - spec_.borders.begin());
  }

  void FitGrids(const std::vector<float>& x, uint32_t n) {
    grids_.assign(n_, {1.0f, 0.0f});
    std::vector<float> group;
    for (uint32_t i = 0; i < n_; ++i) {
      const bool channel = g_.axis == GridAxis::kChannel;
      const uint32_t t = channel ? 0 : i % window_;
      if (t >= n) {
        grids_[i] = {0.0f, 0.0f};
        continue;
      }
      group.clear();
      if (channel) {
        for (uint32_t each = 0; each < n; ++each) group.push_back(x[size_t{each} * dim_ + i]);
      } else {
        const float* first = x.data() + size_t{t} * dim_ + i / window_ * g_.group;
        group.assign(first, first + g_.group);
      }
      if (!group.empty())
        grids_[i] = spec_.fit(g_, group.data(), static_cast<uint32_t>(group.size()));
    }
  }

  /// Rounds grids to what is stored.
  void StoreGrids(uint8_t* block) {
    if (g_.bytes) return StoreByteGrids(block);
    for (uint32_t i = 0; i < n_; ++i) {
      uint16_t scale = F32ToF16(std::clamp(grids_[i].scale, 0.0f, kMaxF16));
      if (F16ToF32(scale) == 0.0f && g_.levels == nullptr && grids_[i].scale >= 0.0f)
        scale = F32ToF16(1.0f);
      StoreF16(block + at_.scale, i, scale);
      if (g_.has_zero)
        StoreF16(block + at_.zero, i, F32ToF16(std::clamp(grids_[i].zero, -kMaxF16, kMaxF16)));
    }
    LoadGrids(block);
  }

  /// byte_grid (kivi_grid.h): bytes times an f16 unit that 32 channels share.
  void StoreByteGrids(uint8_t* block) {
    const uint32_t n_units = kernels::ByteGridUnits(dim_);
    for (uint32_t u = 0; u < n_units; ++u) {
      const uint32_t begin = u * kByteGridShare, end = std::min(begin + kByteGridShare, dim_);
      float scale = 0.0f, zero = 0.0f;
      for (uint32_t c = begin; c < end; ++c) {
        scale = std::max(scale, grids_[c].scale);
        zero = std::max(zero, std::abs(grids_[c].zero));
      }
      // Rounded up, so that the largest byte suffices.
      const auto unit = [](float largest, float bytes) {
        uint16_t h = F32ToF16(std::min(largest / bytes, kMaxF16));
        if (F16ToF32(h) * bytes < largest && h < 0x7BFF) ++h;
        return h;
      };
      const uint16_t scale_unit = unit(scale, 255.0f), zero_unit = unit(zero, 127.0f);
      StoreF16(block + at_.units, u, scale_unit);
      StoreF16(block + at_.units, n_units + u, zero_unit);
      for (uint32_t c = begin; c < end; ++c) {
        block[at_.scale + c] = static_cast<uint8_t>(Ratio(grids_[c].scale, scale_unit, 255.0f));
        block[at_.zero + c] =
            static_cast<uint8_t>(static_cast<int8_t>(Ratio(grids_[c].zero, zero_unit, 127.0f)));
      }
    }
    LoadGrids(block);
  }
  static float Ratio(float x, uint16_t unit, float most) {
    const float u = F16ToF32(unit);
    return u == 0.0f ? 0.0f : std::clamp(std::nearbyint(x / u), -most, most);
  }

  void LoadGrids(const uint8_t* block) {
    grids_.resize(n_);
    const uint32_t n_units = kernels::ByteGridUnits(dim_);
    for (uint32_t i = 0; i < n_; ++i) {
      if (g_.bytes) {
        const uint32_t u = i / kByteGridShare;
        grids_[i] = {LoadF16(block + at_.units, u) * static_cast<float>(block[at_.scale + i]),
                     LoadF16(block + at_.units, n_units + u) *
                         static_cast<float>(static_cast<int8_t>(block[at_.zero + i]))};
      } else {
        grids_[i] = {LoadF16(block + at_.scale, i),
                     g_.has_zero ? LoadF16(block + at_.zero, i) : 0.0f};
      }
    }
  }

  /// Stores exact numbers and tokens, and puts the mean of what shares their channel in their
  /// place, so that they do not widen a grid.
  void TakeExact(std::vector<float>& x, uint32_t n, std::span<const uint32_t> tokens,
                 uint8_t* block) const {
    std::vector<bool> exact(x.size(), false);
    for (size_t i = 0; i < tokens.size(); ++i) {
      uint8_t* entry = block + at_.exact_tokens + i * (2 + size_t{2} * dim_);
      StoreF16(entry, 0, static_cast<uint16_t>(tokens[i]));
      for (uint32_t c = 0; c < dim_; ++c) {
        const size_t at = size_t{tokens[i]} * dim_ + c;
        StoreF16(entry, 1 + c, F32ToF16(std::clamp(x[at], -kMaxF16, kMaxF16)));
        exact[at] = true;
      }
    }
    if (spec_.pick_numbers && n != 0) {
      const std::vector<uint32_t> numbers = spec_.pick_numbers(g_, x.data(), n, dim_);
      for (size_t i = 0; i < numbers.size(); ++i) {
        StoreF16(block + at_.exact, 2 * i, static_cast<uint16_t>(numbers[i]));
        StoreF16(block + at_.exact, 2 * i + 1,
                 F32ToF16(std::clamp(x[numbers[i]], -kMaxF16, kMaxF16)));
        exact[numbers[i]] = true;
      }
    }
    FillExact(exact, n, x);
  }

  void FillExact(const std::vector<bool>& exact, uint32_t n, std::vector<float>& x) const {
    const bool by_token = g_.axis == GridAxis::kToken;
    const uint32_t outer = by_token ? n : dim_, inner = by_token ? dim_ : n;
    const auto at = [&](uint32_t o, uint32_t i) {
      return by_token ? size_t{o} * dim_ + i : size_t{i} * dim_ + o;
    };
    for (uint32_t o = 0; o < outer; ++o) {
      double sum = 0.0;
      uint32_t kept = 0;
      for (uint32_t i = 0; i < inner; ++i) {
        if (!exact[at(o, i)]) sum += x[at(o, i)], ++kept;
      }
      const float mean = kept == 0 ? 0.0f : static_cast<float>(sum / kept);
      for (uint32_t i = 0; i < inner; ++i) {
        if (exact[at(o, i)]) x[at(o, i)] = mean;
      }
    }
  }

  void PutExact(const uint8_t* block, uint32_t n, float* x) const {
    const auto index = [](const uint8_t* p) {
      uint16_t i;
      std::memcpy(&i, p, 2);
      return uint32_t{i};
    };
    for (uint32_t i = 0; i < g_.n_exact; ++i) {
      const uint8_t* entry = block + at_.exact + size_t{4} * i;
      if (index(entry) < n * dim_) x[index(entry)] = LoadF16(entry, 1);
    }
    for (uint32_t i = 0; i < g_.n_exact_tokens; ++i) {
      const uint8_t* entry = block + at_.exact_tokens + i * (2 + size_t{2} * dim_);
      if (index(entry) >= n) continue;
      for (uint32_t c = 0; c < dim_; ++c)
        x[size_t{index(entry)} * dim_ + c] = LoadF16(entry, 1 + c);
    }
  }

  void HadamardInverse(float* x) const {
    kernels::WalshHadamard(dim_, x);
    for (uint32_t c = 0; c < dim_; ++c) x[c] *= g_.sign[c];
  }

  const GridSpec& spec_;
  const GridVector& g_;
  const uint32_t window_, dim_;
  const bool is_k_;
  const GridLayout at_;
  const uint32_t n_;
  std::vector<GridFit> grids_;
};

}  // namespace

std::vector<float> Midpoints(const std::vector<float>& levels) {
  std::vector<float> borders;
  for (size_t i = 0; i + 1 < levels.size(); ++i)
    borders.push_back(0.5f * (levels[i] + levels[i + 1]));
  return borders;
}

std::vector<float> HadamardSigns(uint32_t dim) {
  std::vector<float> sign(dim);
  uint32_t state = 0x9E3779B9u;
  const float size = 1.0f / std::sqrt(static_cast<float>(kernels::HadamardBlock(dim)));
  for (float& x : sign) {  // xorshift32 (Marsaglia 2003)
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    x = (state >> 16 & 1u) != 0 ? size : -size;
  }
  return sign;
}

void HadamardForward(const float* sign, uint32_t dim, float* x) {
  for (uint32_t c = 0; c < dim; ++c) x[c] *= sign[c];
  kernels::WalshHadamard(dim, x);
}

std::vector<GridHead> SameHeads(const RowShape& shape, const GridHead& head) {
  return std::vector<GridHead>(shape.n_kv_heads, head);
}

GridCodec::GridCodec(uint32_t window, const RowShape& shape, std::vector<GridHead> heads)
    : window_(window), shape_(shape), heads_(std::move(heads)) {
  for (GridHead& head : heads_) {
    SetPointers(head.k);
    SetPointers(head.v);
    codes_.push_back({head.k.grid, head.v.grid});
  }
}

BlockBytes GridCodec::bytes() const {
  return {kernels::LayoutGrid(codes_[0].k, window_, shape_.head_dim).end,
          kernels::LayoutGrid(codes_[0].v, window_, shape_.head_dim_v).end};
}

size_t GridCodec::static_bytes() const {
  size_t bytes = 0;
  for (const GridHead& head : heads_) bytes += BytesOf(head.k) + BytesOf(head.v);
  return bytes;
}

void GridCodec::EncodeSides(uint32_t kv_head, uint32_t n, const float* k, const float* v,
                            uint8_t* k_block, uint8_t* v_block) const {
  const GridHead& head = heads_[kv_head];
  std::vector<float> keys = Storable(k, size_t{n} * shape_.head_dim),
                     values = Storable(v, size_t{n} * shape_.head_dim_v);
  std::vector<uint32_t> exact;
  if (head.pick_tokens && n != 0)
    exact = head.pick_tokens(head.k.grid, keys.data(), n, shape_.head_dim);
  if (k_block != nullptr)
    Part(head.k, window_, shape_.head_dim, true).Encode(keys, n, exact, k_block);
  if (v_block != nullptr)
    Part(head.v, window_, shape_.head_dim_v, false).Encode(values, n, exact, v_block);
}

void GridCodec::DecodeSides(uint32_t kv_head, uint32_t n, const uint8_t* k_block,
                            const uint8_t* v_block, float* k, float* v) const {
  const GridHead& head = heads_[kv_head];
  if (k != nullptr) Part(head.k, window_, shape_.head_dim, true).Decode(k_block, n, k);
  if (v != nullptr) Part(head.v, window_, shape_.head_dim_v, false).Decode(v_block, n, v);
}

}  // namespace qevict::codecs
