#include "ggml/testing/twin.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace qevict::plugin::testing {
namespace {

// Where ggml works in f32 throughout (f16 caches, 64 and more rows), both errors are rounding noise
// of this size and either may be the larger one.
constexpr double kRmsOfF32 = 1e-6;
constexpr double kMaxOfF32 = 5e-6;

bool Contains(const std::vector<uint32_t>& list, uint32_t value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

}  // namespace

std::vector<Token> TokensOf(uint32_t seq, int32_t first, uint32_t n) {
  std::vector<Token> tokens(n);
  for (uint32_t i = 0; i < n; ++i) tokens[i] = {seq, first + static_cast<int32_t>(i)};
  return tokens;
}

std::vector<Token> Join(std::initializer_list<std::vector<Token>> parts) {
  std::vector<Token> all;
  for (const std::vector<Token>& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

Twin::Twin(const CacheSpec& spec, const std::string& config, const MaskKind& mask)
    : cells(spec.n_streams, spec.n_cells),
      swa_cells(spec.n_streams, spec.swa_cells),
      ours(spec, Where::kQevict, config),
      cpu(spec, Where::kCpu),
      masks(spec.layers.size(), mask) {}

std::vector<uint16_t> Twin::Mask(const std::vector<Token>& batch, const StepInput& in,
                                 uint32_t il) const {
  const Cells& own = ours.spec().layers[il].swa ? swa_cells : cells;
  const uint32_t n_kv = own.n_kv(in.first_stream, in.n_streams);
  std::vector<uint16_t> mask = own.Mask(batch, in.first_stream, in.n_streams, n_kv, masks[il]);
  for (size_t i = 0; i < mask.size(); ++i) {
    const auto row = static_cast<uint32_t>(i / n_kv), cell = static_cast<uint32_t>(i % n_kv);
    if (Contains(blind_rows, row) || Contains(holes, cell)) mask[i] = 0xFC00;
  }
  return mask;
}

StepInput Twin::Input(const std::vector<Token>& batch) {
  StepInput in;
  const CacheSpec& spec = ours.spec();
  in.cells = cells.Place(batch, spec.swa_cells ? 0 : swa);
  if (spec.swa_cells) in.swa_cells = swa_cells.Place(batch, swa);
  std::vector<uint32_t> streams;
  for (const Token& t : batch) streams.push_back(cells.stream_of(t.seq));
  in.first_stream = streams.front();
  in.n_streams = streams.back() - streams.front() + 1;
  in.n_kv = cells.n_kv(in.first_stream, in.n_streams);
  bool multi = false;
  for (const LayerSpec& layer : spec.layers) multi |= layer.rope.multi();
  for (const Token& t : batch) in.pos.push_back(t.pos);
  if (multi) {
    for (const Token& t : batch) in.pos.push_back(t.image() ? t.y : t.pos);
    for (const Token& t : batch) in.pos.push_back(t.image() ? t.x : t.pos);
    in.pos.resize(4 * batch.size(), 0);
  }
  for (uint32_t il = 0; il < masks.size(); ++il) {
    in.rows.push_back(RandomRows(spec.layers[il], in.n_tokens(), ++seed_));
    uint32_t same = 0;  // an earlier layer of the same cache that sees the same
    while (same < il && (masks[same] != masks[il] || spec.layers[same].swa != spec.layers[il].swa))
      ++same;
    in.mask_of.push_back(same < il ? in.mask_of[same] : static_cast<uint32_t>(in.masks.size()));
    if (same == il) in.masks.push_back(Mask(batch, in, il));
  }
  return in;
}

TwinReport Twin::RunInput(const StepInput& in, bool reuse, const GraphKind& kind) {
  last_ = in;
  TwinReport report;
  const StepOutput theirs = reuse ? cpu.Rerun(in) : cpu.Run(in, kind);
  last_ours_ = reuse ? ours.Rerun(in) : ours.Run(in, kind);
  report.status = last_ours_.status;
  if (last_ours_.status != GGML_STATUS_SUCCESS || theirs.status != GGML_STATUS_SUCCESS)
    return report;
  for (size_t i = 0; ours.cache(i); ++i) {
    for (std::string& violation : ours.cache(i)->Validate())
      report.violations.push_back(std::move(violation));
  }
  for (uint32_t il = 0; il < in.mask_of.size(); ++il) {
    const LayerSpec& layer = ours.spec().layers[il];
    std::vector<StreamRows> streams;
    for (uint32_t s = 0; s < in.n_streams; ++s) {
      const uint32_t owner = cpu.owner(il);
      streams.push_back({cpu.Rows(owner, true, in.first_stream + s),
                         cpu.Rows(owner, false, in.first_stream + s)});
    }
    const std::vector<double> want =
        ReferenceAttention(layer, in, il, theirs.q[il], streams, cpu.sinks(il));
    report.layers.push_back(
        {Compare(last_ours_.attention[il], want), Compare(theirs.attention[il], want)});
  }
  return report;
}

TwinReport Twin::Step(const std::vector<Token>& batch, const GraphKind& kind) {
  return RunInput(Input(batch), false, kind);
}

TwinReport Twin::Restep(const std::vector<Token>& batch) { return RunInput(Input(batch), true); }

std::set<SeqId> Twin::HoldersOf(uint32_t seq) {
  std::set<SeqId> holders;
  const uint32_t stream = cells.stream_of(seq);
  for (uint32_t c = 0; c < cells.n_cells(); ++c) {
    if (!cells.only(stream, c, seq)) continue;
    const TokenRef ref = ours.cache()->lookup(stream, c);
    holders.insert(ref.window == kNone ? kNone : ours.cache()->info(ref.window).seq);
  }
  return holders;
}

ggml_status Twin::Shift() {
  const std::vector<int32_t> shifts = cells.TakeShifts();
  const ggml_status status = ours.Shift(shifts);
  if (status != GGML_STATUS_SUCCESS || ours.spec().layers[0].type_k == GGML_TYPE_BF16)
    return status;
  return cpu.Shift(shifts);
}

void ExpectExact(const TwinReport& report, const char* what, double slack) {
  ASSERT_EQ(report.status, GGML_STATUS_SUCCESS) << what;
  EXPECT_THAT(report.violations, ::testing::IsEmpty()) << what;
  static const bool print = std::getenv("QEVICT_TEST_PRINT") != nullptr;
  for (size_t il = 0; il < report.layers.size(); ++il) {
    const Error &ours = report.layers[il].ours, &ggml = report.layers[il].ggml;
    if (print) {
      std::printf("%-44s layer %zu: rms ours %.2e ggml %.2e, max ours %.2e ggml %.2e\n", what, il,
                  ours.rms, ggml.rms, ours.max_abs, ggml.max_abs);
    }
    EXPECT_FALSE(ours.nan) << what << ", layer " << il;
    EXPECT_LE(ours.rms, std::max(ggml.rms, slack * kRmsOfF32)) << what << ", layer " << il;
    EXPECT_LE(ours.max_abs, std::max(ggml.max_abs, slack * kMaxOfF32)) << what << ", layer " << il;
  }
}

}  // namespace qevict::plugin::testing
