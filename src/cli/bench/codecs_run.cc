// Layers of random rows as a model's cache has them: channels of unequal energy, a key bias, RoPE.
// Every format packs the same rows with its own codec, statistics included, and attends to them
// from memory; full precision attends to rows of its own. The formats take turns.
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>

#include "cli/bench/codecs.h"
#include "cli/bench/stats.h"
#include "cli/bench/streaming_read.h"
#include "cli/progress.h"
#include "codecs/codec.h"
#include "ggml/omp_pool.h"
#include "kernels/rope_table.h"

namespace qevict::cli {
namespace {

/// Queries are rounded to 8 bits for token codes: at 64 channels a few percent of the small outputs
/// that nearly even weights give, and the more the more channels are added up.
double MaxError(uint32_t head_dim) { return 0.1 * std::sqrt(std::max(head_dim, 64u) / 64.0); }
/// Tokens that statistics are taken from, and tokens of the comparison in double precision.
constexpr uint32_t kSampleTokens = 1024, kCheckTokens = 2048;

RopeParams Rope(uint32_t head_dim) {
  RopeParams rope;
  rope.pairing = RopePairing::kHalves;
  rope.n_dims = head_dim;
  rope.freq_base = 1e6f;
  return rope;
}

/// Keys before RoPE and values of one layer: [token][kv head][channel].
struct RandomRows {
  std::vector<float> keys, values;

  RandomRows(const HeadShape& shape, uint32_t n_tokens, uint64_t seed) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    const size_t row = size_t{shape.n_kv_heads} * shape.head_dim;
    std::vector<float> k_scale(row), v_scale(row), bias(row);
    for (size_t i = 0; i < row; ++i) {
      k_scale[i] = std::exp(0.7f * normal(rng));
      v_scale[i] = std::exp(0.4f * normal(rng));
      bias[i] = 2.0f * normal(rng);
    }
    for (size_t i = 0; i < n_tokens * row; ++i) {
      keys.push_back(bias[i % row] + k_scale[i % row] * normal(rng));
      values.push_back(v_scale[i % row] * normal(rng));
    }
  }
};

/// One layer in one format, its windows in random order in memory.
class PackedLayer {
 public:
  PackedLayer(const CodecBenchPlan& plan, const Config& config, const RandomRows& rows,
              const kernels::RopeTable& table, uint64_t seed)
      : shape_(plan.shape), config_(config), table_(table), n_tokens_(plan.n_tokens) {
    MakeCodec(rows);
    head_bytes_ = codec_->bytes().total();
    const uint32_t n_windows = n_tokens_ / config.window;
    const size_t window_bytes = head_bytes_ * shape_.n_kv_heads;
    data_ = block_.Reserve(n_windows * window_bytes);
    if (data_ == nullptr) return;
    std::vector<uint32_t> place(n_windows);
    std::iota(place.begin(), place.end(), 0u);
    std::shuffle(place.begin(), place.end(), std::mt19937_64(seed));
    double encode_ms = 0.0;
    for (uint32_t w = 0; w < n_windows; ++w) {
      uint8_t* window = data_ + place[w] * window_bytes;
      for (uint32_t h = 0; h < shape_.n_kv_heads; ++h)
        encode_ms += EncodeWindow(rows, w, h, window + h * head_bytes_);
      windows_.push_back({window, window + codec_->bytes().keys,
                          static_cast<int32_t>(w * config.window), 1, 1, 1});
    }
    encode_us_ = encode_ms * 1e3 / n_tokens_ / shape_.n_kv_heads;
    visible_.assign(n_windows, config.window == 32 ? ~0u : (1u << config.window) - 1);
    masses_.resize(size_t{n_windows} * shape_.n_kv_heads);
    out_.resize(size_t{shape_.n_heads} * shape_.head_dim);
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    for (uint32_t i = 0; i < shape_.n_heads * shape_.head_dim; ++i) q_.push_back(normal(rng));
    MakeGroup();
  }
  PackedLayer(const PackedLayer&) = delete;
  PackedLayer& operator=(const PackedLayer&) = delete;

  bool ok() const { return data_ != nullptr; }
  kernels::AttentionGroup& group() { return group_; }
  size_t bytes() const { return windows_.size() * head_bytes_ * shape_.n_kv_heads; }
  size_t static_bytes() const { return codec_->static_bytes(); }
  double encode_us() const { return encode_us_; }

  /// Largest error over the decoded values of the first tokens.
  double Error(ParallelFor& pool, kernels::Workspace& workspace) {
    const uint32_t n = std::min(n_tokens_, kCheckTokens) / config_.window;
    kernels::AttentionGroup group = group_;
    group.windows = group.windows.first(n);
    std::fill(masses_.begin(), masses_.end(), 0.0f);
    if (!Attend({&group, 1}, pool, workspace)) return INFINITY;
    const kernels::PlainResult want =
        AttendPlain(shape_.layer(), q_, DecodedRows(n), config_.window);
    return kernels::RelativeError(out_, want.out);
  }

 private:
  void Rotate(int32_t position, float* key) const {
    std::vector<float> cos_sin(shape_.head_dim);
    RopeCosSin(table_.params(), position, cos_sin.data());
    RopeRotate(table_.params(), cos_sin.data(), key);
  }

  void MakeCodec(const RandomRows& rows) {
    const codecs::RowShape shape{shape_.n_kv_heads, shape_.head_dim, shape_.head_dim};
    const auto learner = codecs::MakeLearner(config_, shape, table_.params());
    if (!learner) {
      codec_ = codecs::MakeCodec(config_, shape);
      return;
    }
    const uint32_t d = shape_.head_dim;
    for (uint32_t t = 0; t < std::min(n_tokens_, kSampleTokens); ++t) {
      for (uint32_t h = 0; h < shape_.n_kv_heads; ++h) {
        const size_t at = (size_t{t} * shape_.n_kv_heads + h) * d;
        std::vector<float> key(rows.keys.begin() + static_cast<std::ptrdiff_t>(at),
                               rows.keys.begin() + static_cast<std::ptrdiff_t>(at + d));
        Rotate(static_cast<int32_t>(t), key.data());
        learner->Add(h, rows.keys.data() + at, key.data(), rows.values.data() + at);
      }
    }
    codec_ = learner->Make({});
  }

  /// Milliseconds that the codec takes.
  double EncodeWindow(const RandomRows& rows, uint32_t w, uint32_t h, uint8_t* block) const {
    const uint32_t d = shape_.head_dim;
    std::vector<float> k, v;
    const float* mean = codec_->key_mean(h);
    for (uint32_t t = 0; t < config_.window; ++t) {
      const uint32_t token = w * config_.window + t;
      const size_t at = (size_t{token} * shape_.n_kv_heads + h) * d;
      for (uint32_t c = 0; c < d; ++c) {
        k.push_back(rows.keys[at + c] - (mean ? mean[c] : 0.0f));
        v.push_back(rows.values[at + c]);
      }
      if (!codec_->before_rope()) Rotate(static_cast<int32_t>(token), k.data() + size_t{t} * d);
    }
    const Timer timer;
    codec_->Encode(h, config_.window, k.data(), v.data(), block);
    return timer.ms();
  }

  /// What the first windows hold, keys as the query meets them.
  kernels::LayerRows DecodedRows(uint32_t n_windows) const {
    const uint32_t d = shape_.head_dim, w = config_.window;
    kernels::LayerRows rows;
    rows.keys.resize(size_t{n_windows} * w * shape_.n_kv_heads * d);
    rows.values.resize(rows.keys.size());
    std::vector<float> k(size_t{w} * d), v(size_t{w} * d);
    for (uint32_t i = 0; i < n_windows; ++i) {
      for (uint32_t h = 0; h < shape_.n_kv_heads; ++h) {
        codec_->Decode(h, w, windows_[i].k + h * head_bytes_, k.data(), v.data());
        for (uint32_t t = 0; t < w; ++t) {
          float* key = k.data() + size_t{t} * d;
          const auto position = static_cast<int32_t>(i * w + t);
          codec_->FinishKey(h, {key, d}, [&](float* x) { Rotate(position, x); });
          const size_t at = ((size_t{i} * w + t) * shape_.n_kv_heads + h) * d;
          std::copy_n(key, d, rows.keys.data() + at);
          std::copy_n(v.data() + size_t{t} * d, d, rows.values.data() + at);
        }
      }
    }
    return rows;
  }

  void MakeGroup() {
    attention_.n_kv_heads = shape_.n_kv_heads;
    attention_.n_gqa = shape_.n_heads / shape_.n_kv_heads;
    attention_.head_dim = attention_.head_dim_v = shape_.head_dim;
    attention_.window = config_.window;
    attention_.n_rungs = 2;
    attention_.rungs[1] = {codec_->format(), head_bytes_, head_bytes_, codec_->token_codes(),
                           codec_->grid_codes()};
    attention_.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    attention_.rope = &table_;
    group_.shape = &attention_;
    group_.n_rows = 1;
    group_.q = q_.data();
    group_.q_row_stride = q_.size();
    group_.q_head_stride = shape_.head_dim;
    group_.out = out_.data();
    group_.out_row_stride = out_.size();
    group_.out_head_stride = shape_.head_dim;
    group_.windows = windows_;
    group_.visible = visible_.data();
    group_.visible_stride = visible_.size();
    group_.mass = masses_.data();
    group_.mass_head_stride = windows_.size();
  }

  const HeadShape shape_;
  const Config config_;
  const kernels::RopeTable& table_;
  const uint32_t n_tokens_;
  std::shared_ptr<const codecs::Codec> codec_;
  size_t head_bytes_ = 0;
  double encode_us_ = 0.0;
  kernels::Workspace block_;
  uint8_t* data_ = nullptr;
  std::vector<kernels::WindowRef> windows_;
  std::vector<uint32_t> visible_;
  std::vector<float> q_, out_, masses_;
  kernels::AttentionShape attention_;
  kernels::AttentionGroup group_{};
};

/// All layers of one format.
class Contender {
 public:
  virtual ~Contender() = default;
  virtual const kernels::AttentionGroup& group(uint32_t layer) = 0;
  kernels::Workspace workspace;
};

class FullContender final : public Contender {
 public:
  explicit FullContender(const CodecBenchPlan& plan) {
    kernels::ProblemParams p =
        kernels::LayerParams(plan.shape.layer(), kernels::Formats::kFull, 1, plan.n_tokens);
    p.scattered = true;
    for (uint32_t i = 0; i < plan.n_layers; ++i, ++p.seed)
      layers_.push_back(std::make_unique<kernels::Problem>(p));
  }
  const kernels::AttentionGroup& group(uint32_t layer) override { return layers_[layer]->group(); }
  size_t bytes() const { return layers_[0]->bytes(); }

 private:
  std::vector<std::unique_ptr<kernels::Problem>> layers_;
};

class PackedContender final : public Contender {
 public:
  const kernels::AttentionGroup& group(uint32_t layer) override { return layers[layer]->group(); }
  std::vector<std::unique_ptr<PackedLayer>> layers;
};

class CodecBench {
 public:
  explicit CodecBench(const CodecBenchPlan& plan)
      : plan_(plan), pool_(static_cast<unsigned>(plan.n_threads)), read_(pool_) {}

  Result<std::vector<CodecRow>> Run() {
    kernels::RopeTable table(Rope(plan_.shape.head_dim));
    table.AddBasis();
    table.Grow(static_cast<int32_t>(plan_.n_tokens));
    Progress progress("packing and checking", plan_.caches.size(), "formats");
    AddFull();
    for (size_t i = 0; i < plan_.caches.size(); ++i) {
      QEVICT_RETURN_IF_ERROR(AddPacked(plan_.caches[i], table));
      progress.Update(i + 1);
    }
    progress.Finish();
    QEVICT_RETURN_IF_ERROR(Time());
    return std::move(rows_);
  }

 private:
  void AddFull() {
    auto full = std::make_unique<FullContender>(plan_);
    CodecRow row;
    row.name = "full";
    row.layer_bytes = full->bytes();
    rows_.push_back(std::move(row));
    all_.push_back(std::move(full));
  }

  Status AddPacked(const CacheChoice& cache, const kernels::RopeTable& table) {
    if (plan_.n_tokens % cache.config.window != 0) {
      return InvalidArgument("--tokens " + std::to_string(plan_.n_tokens) +
                             " is not legal: expected windows of " +
                             std::to_string(cache.config.window) + " tokens");
    }
    auto packed = std::make_unique<PackedContender>();
    CodecRow row;
    row.name = cache.policy;
    for (uint32_t i = 0; i < plan_.n_layers; ++i) {
      const RandomRows rows(plan_.shape, plan_.n_tokens, 100 + i);
      packed->layers.push_back(
          std::make_unique<PackedLayer>(plan_, cache.config, rows, table, 200 + i));
      if (!packed->layers.back()->ok()) return ResourceExhausted("no memory for " + cache.policy);
      row.encode_us.push_back(packed->layers.back()->encode_us());
    }
    row.layer_bytes = packed->layers[0]->bytes();
    row.static_bytes = packed->layers[0]->static_bytes();
    row.error = packed->layers[0]->Error(pool_, packed->workspace);
    const double most = MaxError(plan_.shape.head_dim);
    if (!(row.error <= most)) {
      return Internal(cache.policy + ": the result is off by " + std::to_string(row.error) +
                      " of its largest value, at most " + std::to_string(most) +
                      " is rounding: nothing was timed");
    }
    rows_.push_back(std::move(row));
    all_.push_back(std::move(packed));
    return {};
  }

  Status Attend(Contender& c) {
    for (uint32_t i = 0; i < plan_.n_layers; ++i) {
      if (!kernels::Attend({&c.group(i), 1}, pool_, c.workspace))
        return ResourceExhausted("no memory for the kernels' workspace");
    }
    return {};
  }

  Status Time() {
    Progress progress("timing", uint64_t{plan_.n_repetitions} * all_.size(), "runs");
    for (const auto& c : all_) QEVICT_RETURN_IF_ERROR(Attend(*c));  // warm-up
    for (size_t round = 0; round < plan_.n_repetitions; ++round) {
      for (size_t i = 0; i < all_.size(); ++i) {
        const size_t k = (round + i) % all_.size();
        read_.Run();
        const Timer timer;
        QEVICT_RETURN_IF_ERROR(Attend(*all_[k]));
        rows_[k].layer_ms.push_back(timer.ms() / plan_.n_layers);
        progress.Update(round * all_.size() + i + 1);
      }
    }
    for (size_t k = 0; k < all_.size(); ++k) {
      rows_[k].ratios = Ratios(rows_[0].layer_ms, rows_[k].layer_ms);
      rows_[k].workspace_bytes = all_[k]->workspace.bytes();
    }
    return {};
  }

  const CodecBenchPlan& plan_;
  plugin::OmpPool pool_;
  StreamingRead read_;
  std::vector<std::unique_ptr<Contender>> all_;
  std::vector<CodecRow> rows_;
};

}  // namespace

Result<std::vector<CodecRow>> RunCodecBench(const CodecBenchPlan& plan) {
  return CodecBench(plan).Run();
}

}  // namespace qevict::cli
