// Random operations on a KvCache and on a naive model that stores every row in plain vectors.
// After each operation the cache is sound, and each accessible token reads back as the model's row:
// exactly while it has never been packed, within the error of the code otherwise.
// QEVICT_MODEL_STEPS and QEVICT_MODEL_SEED make the run longer, or another one.
#include <gtest/gtest.h>

#include <cstdlib>

#include "cache/test_support.h"

namespace qevict {
namespace {

constexpr uint32_t kCells = 1024, kStreams = 2;

struct ModelToken {
  int32_t pos = 0;
  bool positional = true;
  std::vector<TokenRows> layers;
  bool coded = false;  // has been packed in some layer
  int depth = 0;       // times it may have been encoded anew
};

struct Variant {
  const char* name;
  Config config;
};

class ModelTest : public testing::TestWithParam<Variant> {
 protected:
  using Stream = std::map<uint32_t, ModelToken>;  // by cell

  void SetUp() override {
    std::vector<LayerShape> shapes = {Shape(2, 16, 16), Shape(2, 16, 16), Shape(1, 24, 16)};
    shapes[2].elem_v = Elem::kBF16;
    engine_ = std::make_unique<Engine>(GetParam().config, shapes, kStreams, kCells);
    ASSERT_TRUE(engine_->status.ok()) << engine_->status.message();
    engine_->UseRope(TestRope(8));
    if (GetParam().config.interval == 3) engine_->UsePool(2);
  }
  KvCache& cache() { return engine_->cache(); }
  uint32_t Random(uint32_t n) { return std::uniform_int_distribution<uint32_t>(0, n - 1)(random_); }

  SeqId SomeSequence() {
    const uint32_t stream = Random(kStreams);
    const std::vector<SeqId> live = cache().Sequences(stream);
    if (live.empty() || (live.size() < 3 && Random(40) == 0)) return engine_->NewSequence(stream);
    return live[Random(static_cast<uint32_t>(live.size()))];
  }

  ModelToken TokenFor(uint64_t id, const TokenSpec& t) {
    ModelToken m;
    m.pos = t.pos;
    m.positional = t.positional;
    for (uint32_t il = 0; il < engine_->n_layers(); ++il) {
      const LayerShape& s = engine_->shapes()[il];
      TokenRows rows;
      for (const float x : engine_->RowOf(id, il, true)) rows.k.push_back(FromF32(x, s.elem_k));
      for (const float x : engine_->RowOf(id, il, false)) rows.v.push_back(FromF32(x, s.elem_v));
      m.layers.push_back(std::move(rows));
    }
    return m;
  }

  void Step(SeqId seq, uint32_t n, bool decode, bool positional) {
    const uint32_t stream = cache().stream_of(seq);
    const uint64_t id = engine_->first_id_;
    const StepRows rows{seq, n, decode ? StepKind::kDecode : StepKind::kAuto};
    Status status = cache().PrepareStep({&rows, 1}, engine_->pool());
    ASSERT_TRUE(status.ok()) << status.message();
    const std::vector<TokenSpec> tokens = engine_->NextTokens(seq, n, positional);
    status = engine_->Store(tokens);
    ASSERT_TRUE(status.ok()) << status.message();
    for (uint32_t i = 0; i < n; ++i) model_[stream][tokens[i].cell] = TokenFor(id + i, tokens[i]);
  }

  void KillCell(uint32_t stream, uint32_t cell) {
    cache().Kill(stream, cell);
    model_[stream].erase(cell);
  }

  /// Takes the last tokens of a sequence back and writes others in their place.
  void Rollback(SeqId seq) {
    const uint32_t stream = cache().stream_of(seq);
    const uint32_t n =
        std::min<uint32_t>(Random(6) + 1, static_cast<uint32_t>(engine_->next_pos(seq)));
    const TokenRef tail = cache().tail(seq);
    if (n == 0 || tail.window == kNone) return;
    const uint32_t cell = cache().info(tail.window).cells[tail.offset];
    if (cache().tail_pos(seq) != engine_->next_pos(seq) - 1 || cell < n) return;
    if (cell + 1 != engine_->next_cell(stream)) return;
    engine_->next_pos(seq) -= static_cast<int32_t>(n);
    engine_->next_cell(stream) -= n;
    Step(seq, Random(n) + 1, true, true);
  }

  void Shift() {
    std::vector<int32_t> delta(kCells * kStreams);
    const int32_t from = static_cast<int32_t>(Random(60)), by = -static_cast<int32_t>(Random(20));
    const uint32_t stream = Random(kStreams);
    for (const auto& [cell, token] : model_[stream]) {
      if (token.pos >= from && token.pos + by >= 0) delta[stream * kCells + cell] = by;
    }
    const Status status = cache().ShiftPositions(delta);
    ASSERT_TRUE(status.ok()) << status.message();
    for (uint32_t il = 0; il < engine_->n_layers(); ++il) {
      ASSERT_TRUE(cache().RotateLayer(il, delta, engine_->pool()).ok());
    }
    for (auto& [cell, token] : model_[stream]) RotateToken(token, delta[stream * kCells + cell]);
    for (const SeqId seq : cache().Sequences(stream)) {
      engine_->next_pos(seq) = std::max(0, cache().tail_pos(seq) + 1);
    }
  }

  void RotateToken(ModelToken& token, int32_t by) {
    token.pos += by;
    if (by == 0) return;
    if (token.coded && GetParam().config.codec != CodecId::kKiviAxis) ++token.depth;
    std::vector<float> phases(engine_->rope().n_dims);
    RopeCosSin(engine_->rope(), by, phases.data());
    for (uint32_t il = 0; il < engine_->n_layers(); ++il) {
      const LayerShape& s = engine_->shapes()[il];
      for (uint32_t h = 0; h < s.n_kv_heads; ++h) {
        std::vector<float> key;
        for (uint32_t d = 0; d < s.head_dim; ++d) {
          key.push_back(ToF32(token.layers[il].k[h * s.head_dim + d], s.elem_k));
        }
        RopeRotate(engine_->rope(), phases.data(), key.data());
        for (uint32_t d = 0; d < s.head_dim; ++d) {
          token.layers[il].k[h * s.head_dim + d] = FromF32(key[d], s.elem_k);
        }
      }
    }
  }

  void Copy() {
    const uint32_t src = Random(kStreams), dst = 1 - src;
    const Status status = cache().CopyStream(src, dst);
    ASSERT_TRUE(status.ok()) << status.message();
    model_[dst] = model_[src];
    engine_->next_cell(dst) = engine_->next_cell(src);
    for (const SeqId seq : cache().Sequences(dst)) {
      engine_->next_pos(seq) = std::max(0, cache().tail_pos(seq) + 1);
    }
  }

  /// Saves a stream and restores it over itself or over the other one.
  void SaveAndRestore() {
    const uint32_t src = Random(kStreams), dst = Random(kStreams);
    const uint32_t n_layers = engine_->n_layers(), piece = Random(200) + 1;
    std::vector<std::vector<uint16_t>> k(n_layers), v(n_layers);
    const auto words = [&](uint32_t il, bool is_k) {
      const LayerShape& s = engine_->shapes()[il];
      return size_t{s.n_kv_heads} * (is_k ? s.head_dim : s.head_dim_v);
    };
    for (uint32_t il = 0; il < n_layers; ++il) {
      k[il].resize(kCells * words(il, true));
      v[il].resize(kCells * words(il, false));
      for (uint32_t c = 0; c < kCells; ++c) {
        cache().ReadRowK(il, src, c, k[il].data() + c * words(il, true));
      }
    }
    for (uint32_t il = 0; il < n_layers; ++il) {
      for (uint32_t c = 0; c < kCells; ++c) {
        cache().ReadRowV(il, src, c, v[il].data() + c * words(il, false));
      }
    }
    for (const bool is_k : {true, false}) {
      for (uint32_t il = 0; il < n_layers; ++il) {
        for (uint32_t c = 0; c < kCells; c += piece) {
          const uint32_t n = std::min(piece, kCells - c);
          const Status status =
              is_k ? cache().RestoreRowsK(il, dst, c, n, k[il].data() + c * words(il, true))
                   : cache().RestoreRowsV(il, dst, c, n, v[il].data() + c * words(il, false));
          ASSERT_TRUE(status.ok()) << status.message();
        }
      }
    }
    cache().FinishRestore();
    model_[dst] = model_[src];
    for (auto& [cell, token] : model_[dst]) token.depth += token.coded ? 1 : 0;
    engine_->next_cell(dst) = engine_->next_cell(src);
    for (const SeqId seq : cache().Sequences(dst)) {
      engine_->next_pos(seq) = std::max(0, cache().tail_pos(seq) + 1);
    }
  }

  /// All accessible tokens of one layer of a stream.
  void CheckLayer(uint32_t stream, uint32_t il) {
    std::vector<kernels::WindowRef> refs;
    std::vector<WindowId> ids;
    for (const SeqId seq : cache().Sequences(stream)) cache().View(il, seq, refs, ids);
    for (size_t i = 0; i < ids.size(); ++i) {
      const WindowInfo info = cache().info(ids[i]);
      for (uint32_t t = 0; t < info.n_tokens; ++t) {
        if (((info.live >> t) & 1u) == 0) continue;
        const uint32_t cell = info.cells[t];
        const TokenRef ref = cache().lookup(stream, cell);
        ASSERT_TRUE(ref.window == ids[i] && ref.offset == t);
        ASSERT_EQ(model_[stream].count(cell), 1u);
        ModelToken& token = model_[stream][cell];
        if (info.pos_stride == 1) {
          ASSERT_EQ(info.pos0 + static_cast<int32_t>(t), token.pos);
        }
        token.coded |= refs[i].rung_k != kFullRung;
        if (promoted_ && !token.coded) token.coded = Differs(il, token, refs[i], t);
        for (const bool is_k : {true, false}) {
          CompareRow(il, token, engine_->RowInWindow(il, refs[i], t, is_k), is_k,
                     "stream " + std::to_string(stream) + " cell " + std::to_string(cell));
        }
        if (HasFatalFailure()) return;
      }
    }
  }

  bool Differs(uint32_t il, const ModelToken& token, const kernels::WindowRef& ref, uint32_t t) {
    const LayerShape& s = engine_->shapes()[il];
    for (const bool is_k : {true, false}) {
      const std::vector<float> row = engine_->RowInWindow(il, ref, t, is_k);
      const std::vector<uint16_t>& want = is_k ? token.layers[il].k : token.layers[il].v;
      for (size_t i = 0; i < row.size(); ++i) {
        if (row[i] != ToF32(want[i], is_k ? s.elem_k : s.elem_v)) return true;
      }
    }
    return false;
  }

  void CompareRow(uint32_t il, const ModelToken& token, const std::vector<float>& row, bool is_k,
                  const std::string& where) {
    const LayerShape& s = engine_->shapes()[il];
    const std::vector<uint16_t>& want = is_k ? token.layers[il].k : token.layers[il].v;
    const Config& config = GetParam().config;
    float step = 2.83f / static_cast<float>((1 << config.bits) - 1);
    const bool uniform = config.codec == CodecId::kKiviAxis || config.codec == CodecId::kToken ||
                         config.codec == CodecId::kKiviPost || config.codec == CodecId::kOtt;
    if (!uniform) step *= 3.0f;  // Lloyd-Max steps grow outwards
    const float bound =
        token.coded ? (is_k ? 0.75f : 0.5f) * step * static_cast<float>(1 + token.depth) + 0.02f
                    : 0.0f;
    for (size_t i = 0; i < row.size(); ++i) {
      const float value = ToF32(want[i], is_k ? s.elem_k : s.elem_v);
      ASSERT_LE(std::fabs(row[i] - value), bound)
          << where << " layer " << il << (is_k ? " K " : " V ") << i << " coded " << token.coded;
    }
  }

  void CheckAll(const std::string& op) {
    const std::vector<std::string> violations = cache().Validate();
    ASSERT_TRUE(violations.empty()) << op << ": " << violations[0];
    for (uint32_t stream = 0; stream < kStreams; ++stream) {
      for (uint32_t cell = 0; cell < kCells; ++cell) {
        if (!model_[stream].count(cell)) {
          ASSERT_EQ(cache().lookup(stream, cell).window, kNone) << op << " cell " << cell;
        }
      }
      for (uint32_t il = 0; il < engine_->n_layers(); ++il) {
        CheckLayer(stream, il);
        if (HasFatalFailure()) {
          ADD_FAILURE() << "after " << op;
          return;
        }
      }
    }
  }

  std::string RandomOperation() {
    const uint32_t op = Random(100);
    if (op < 45) {
      const SeqId seq = SomeSequence();
      Step(seq, 1, true, true);
      return "decode";
    }
    if (op < 60) {
      const bool positional = Random(8) != 0;
      Step(SomeSequence(), Random(70) + 1, false, positional);
      return "prompt";
    }
    if (op < 75) {
      Rollback(SomeSequence());
      return "rollback";
    }
    if (op < 85) {
      const uint32_t stream = Random(kStreams), cell = Random(kCells);
      for (uint32_t i = 0; i < Random(20) + 1; ++i) KillCell(stream, (cell + i) % kCells);
      return "kill";
    }
    if (op < 90) {
      const Status status = cache().RouteAll(SomeSequence(), Random(16), engine_->pool());
      EXPECT_TRUE(status.ok()) << status.message();
      return "route";
    }
    if (op < 94) {
      Shift();
      return "shift";
    }
    if (op < 96) {
      Copy();
      return "copy";
    }
    if (op < 99) {
      SaveAndRestore();
      return "restore";
    }
    if (Random(20) != 0) return "nothing";
    cache().Clear();
    for (Stream& stream : model_) stream.clear();
    return "clear";
  }

  std::unique_ptr<Engine> engine_;
  Stream model_[kStreams];
  std::mt19937 random_{
      std::getenv("QEVICT_MODEL_SEED") ? std::atoi(std::getenv("QEVICT_MODEL_SEED")) : 12345u};
  bool promoted_ = false;  // the last operation promoted: a token may have been packed within it
};

Variant Make(const char* name, uint32_t bits, Promotion promotion, uint64_t bytes, uint32_t window,
             uint32_t interval, CodecId codec = CodecId::kKiviAxis) {
  Config config;
  config.codec = codec;
  config.bits = bits;
  config.promotion = promotion;
  config.budget_fraction = 0.5;
  config.budget_bytes = bytes;
  config.window = window;
  config.interval = interval;
  config.recents = 16;
  config.check = true;
  return {name, config};
}

TEST_P(ModelTest, RandomOperationsAgreeWithTheModel) {
  const char* steps = std::getenv("QEVICT_MODEL_STEPS");
  const int usual = GetParam().config.codec == CodecId::kKiviAxis ? 400 : 150;
  const int n = steps ? std::atoi(steps) : usual;
  for (int i = 0; i < n; ++i) {
    const uint64_t promotions = cache().Stats().promotions;
    const std::string op = RandomOperation();
    promoted_ = cache().Stats().promotions > promotions;
    CheckAll(op + " at operation " + std::to_string(i));
    if (HasFatalFailure()) return;
  }
  const CacheStats stats = cache().Stats();
  EXPECT_TRUE(n < 400 || stats.demotions > 0);
}

INSTANTIATE_TEST_SUITE_P(
    Variants, ModelTest,
    testing::Values(Make("Fraction4Bit", 4, Promotion::kCodes, 0, 8, 0),
                    Make("Fraction2BitPinned", 2, Promotion::kPinned, 0, 4, 3),
                    Make("Bounded4Bit", 4, Promotion::kCodes, 300000, 8, 3),
                    Make("BoundedWindow16", 4, Promotion::kNone, 300000, 16, 0),
                    Make("Window1", 4, Promotion::kCodes, 0, 1, 0),
                    Make("Token4Bit", 4, Promotion::kCodes, 0, 8, 3, CodecId::kToken),
                    Make("Token8BitBounded", 8, Promotion::kPinned, 300000, 16, 0, CodecId::kToken),
                    Make("WaterFill4Bit", 4, Promotion::kCodes, 0, 8, 0, CodecId::kWaterFill),
                    Make("WaterFillBounded", 4, Promotion::kNone, 300000, 8, 3,
                         CodecId::kWaterFill),
                    Make("KiviPost8Bit", 8, Promotion::kCodes, 0, 8, 3, CodecId::kKiviPost),
                    Make("KvQuantBounded", 4, Promotion::kPinned, 300000, 16, 0, CodecId::kKvQuant),
                    Make("Hadamard4Bit", 4, Promotion::kCodes, 0, 8, 0, CodecId::kHadamard),
                    Make("Ott4BitWindow32", 4, Promotion::kNone, 0, 32, 0, CodecId::kOtt)),
    [](const testing::TestParamInfo<Variant>& param) { return param.param.name; });

}  // namespace
}  // namespace qevict
