#include "kernels/rope_table.h"

#include <algorithm>
#include <cmath>

#include "kernels/attention_internal.h"

namespace qevict::kernels {
namespace {

/// cos and sin of every pair at `pos`, times `magnitude`, to row [2][stride].
void FillRow(const std::vector<double>& omega, int64_t pos, double magnitude, uint32_t stride,
             float* row) {
  for (size_t i = 0; i < omega.size(); ++i) {
    const double angle = omega[i] * static_cast<double>(pos);
    row[i] = static_cast<float>(magnitude * std::cos(angle));
    row[stride + i] = static_cast<float>(magnitude * std::sin(angle));
  }
}

/// See RopeTable::steps. scale 0 gives the table of tokens at one position.
std::vector<float> MakeSteps(const std::vector<double>& omega, uint32_t channels, double scale) {
  const size_t groups = (omega.size() + channels - 1) / channels;
  std::vector<float> table(groups * 16 * channels);
  for (size_t i = 0; i < omega.size(); ++i) {
    float* group = table.data() + i / channels * 16 * channels;
    for (size_t t = 0; t < 8; ++t) {
      const double angle = omega[i] * scale * static_cast<double>(t);
      group[t * channels + i % channels] = static_cast<float>(std::cos(angle));
      group[(8 + t) * channels + i % channels] = static_cast<float>(std::sin(angle));
    }
  }
  return table;
}

}  // namespace

RopeTable::RopeTable(const RopeParams& params)
    : params_(params),
      magnitude_(RopeMagnitude(params)),
      stride_(internal::PadLanes(params.n_dims / 2)) {
  omega_ = RopeFrequencies(params);
  omega_.resize(n_pairs());
  fine_.assign(size_t{64} * 2 * stride_, 0.0f);
  for (uint32_t p = 0; p < 64; ++p)
    FillRow(omega_, p, 1.0, stride_, fine_.data() + size_t{p} * 2 * stride_);
  for (uint32_t channels : {1u, 2u}) {
    steps_[channels - 1] = MakeSteps(omega_, channels, 1.0);
    zero_steps_[channels - 1] = MakeSteps(omega_, channels, 0.0);
  }
  Grow(0);
}

void RopeTable::AddBasis() {
  if (!basis_.empty()) return;
  constexpr double kSlow = 0.15;
  for (uint32_t i = 0; i < n_pairs(); ++i) {
    if (std::abs(32.0 * omega_[i]) > kSlow) n_fast_ = i + 1;
  }
  basis_.resize((size_t{2} * n_fast_ + 4) * 64);
  for (uint32_t t = 0; t < 64; ++t) {
    for (uint32_t i = 0; i < n_fast_; ++i) {
      basis_[size_t{i} * 64 + t] = static_cast<float>(std::cos(omega_[i] * t));
      basis_[size_t{n_fast_ + i} * 64 + t] = static_cast<float>(std::sin(omega_[i] * t));
    }
    const double y = (t - 31.5) / 32.0;
    double power = 1.0;
    for (size_t k = 0; k < 4; ++k, power *= y) {
      basis_[(size_t{2} * n_fast_ + k) * 64 + t] = static_cast<float>(power);
    }
  }
  middle_.assign(size_t{3} * stride_, 0.0f);
  for (uint32_t i = n_fast_; i < n_pairs(); ++i) {
    middle_[i] = static_cast<float>(std::cos(31.5 * omega_[i]));
    middle_[stride_ + i] = static_cast<float>(std::sin(31.5 * omega_[i]));
    middle_[2 * stride_ + i] = static_cast<float>(32.0 * omega_[i]);
  }
}

void RopeTable::Grow(int32_t max_pos) {
  if (max_pos <= max_pos_) return;
  const size_t row = size_t{2} * stride_, old_blocks = row == 0 ? 0 : coarse_.size() / row;
  const size_t blocks = static_cast<size_t>(max_pos >> 6) + 1;
  if (blocks > old_blocks) coarse_.resize(blocks * row);  // throws: nothing has changed then
  max_pos_ = max_pos;
  for (size_t b = old_blocks; b < blocks; ++b) {
    FillRow(omega_, static_cast<int64_t>(b) * 64, magnitude_, stride_, coarse_.data() + b * row);
  }
}

size_t RopeTable::GrowthBytes(int32_t max_pos) const {
  const size_t row = size_t{2} * stride_,
               blocks = (static_cast<size_t>(std::max(max_pos, 0)) >> 6) + 1;
  return blocks * row > coarse_.size() ? (blocks * row - coarse_.size()) * sizeof(float) : 0;
}

void RopeTable::Phases(int32_t pos, float* cos, float* sin) const {
  const uint32_t p = pos < 0 ? 0u - static_cast<uint32_t>(pos) : static_cast<uint32_t>(pos);
  const float* coarse = coarse_.data() + size_t{p >> 6} * 2 * stride_;
  const float* fine = fine_.data() + size_t{p & 63} * 2 * stride_;
  for (uint32_t i = 0; i < n_pairs(); ++i) {
    const float cc = coarse[i], cs = coarse[stride_ + i], fc = fine[i], fs = fine[stride_ + i];
    cos[i] = cc * fc - cs * fs;
    sin[i] = pos < 0 ? -(cs * fc + cc * fs) : cs * fc + cc * fs;
  }
}

size_t RopeTable::bytes() const {
  size_t floats = coarse_.size() + fine_.size() + basis_.size() + middle_.size();
  for (int i = 0; i < 2; ++i) floats += steps_[i].size() + zero_steps_[i].size();
  return floats * sizeof(float) + omega_.size() * sizeof(double);
}

size_t RopeTable::MaxBytes(uint32_t n_dims, uint64_t n_positions, bool with_basis) {
  const size_t n_pairs = n_dims / 2, stride = internal::PadLanes(n_dims / 2);
  const size_t blocks = n_positions / 64 + 2;
  size_t floats = (blocks + 64) * 2 * stride + size_t{64} * (n_pairs + 1);
  if (with_basis) floats += (2 * n_pairs + 4) * 64 + 3 * stride;
  return floats * sizeof(float) + n_pairs * sizeof(double);
}

}  // namespace qevict::kernels
