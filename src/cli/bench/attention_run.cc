// How attention is measured. All kernels of one shape and length exist side by side, each with
// several layers of storage of its own. A round runs each kernel once, beginning with another one
// each time; before a kernel runs, all threads read a buffer much larger than the processor's
// caches: attention then finds its keys and values where a model's weights leave them between two
// tokens, in memory, and the same read tells the bandwidth that there is.
#include <algorithm>
#include <cmath>
#include <memory>

#include "cli/bench/attention.h"
#include "cli/bench/stats.h"
#include "cli/bench/streaming_read.h"
#include "cli/progress.h"
#include "ggml/omp_pool.h"
#include "ggml/peer_attention.h"

namespace qevict::cli {
namespace {

using kernels::Problem;
using kernels::RelativeError;
using plugin::PeerAttention;
using plugin::PeerType;

// ggml rounds the query to f16 or int8 and sums f16 values; ours accumulates in f32, and rounds the
// query to int8 for token codes.
constexpr double kRoundedError = 0.1, kOurError = 1e-3;

/// One contender: layers with storage of their own.
class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual Status Run() = 0;
  /// Compares the first layer with the double-precision result over what it stores.
  virtual Status Check(AttentionRow& row) = 0;
  virtual size_t layer_bytes() const = 0;
};

class OurKernel final : public Kernel {
 public:
  OurKernel(const HeadShape& shape, kernels::Formats tier, uint32_t n_tokens, uint32_t n_layers,
            ParallelFor& pool)
      : shape_(shape), pool_(pool) {
    kernels::ProblemParams p = LayerParams(shape.layer(), tier, 1, n_tokens);
    p.scattered = true;
    for (uint32_t i = 0; i < n_layers; ++i, ++p.seed) {
      layers_.push_back(std::make_unique<Problem>(p));
    }
  }

  Status Run() override {
    for (const auto& layer : layers_) {
      if (!Attend({&layer->group(), 1}, pool_, workspace_)) {
        return ResourceExhausted("no memory for the kernels' workspace");
      }
    }
    return {};
  }

  Status Check(AttentionRow& row) override {
    const std::string wrong = CheckShort(layers_[0]->params());
    if (!wrong.empty()) return Internal(wrong);
    Problem& p = *layers_[0];
    p.Run(pool_, workspace_);
    const kernels::LayerRows rows = StoredRows(p);
    const kernels::PlainResult want =
        AttendPlain(shape_.layer(), QueryRow(p), rows, p.params().window);
    row.error = RelativeError(Outputs(), want.out);
    row.mass_error = RelativeError(Masses(), want.mass);
    return {};
  }

  size_t layer_bytes() const override { return layers_[0]->bytes(); }
  const Problem& first() const { return *layers_[0]; }

 private:
  std::vector<float> Outputs() const {
    std::vector<float> out;
    for (uint32_t h = 0; h < shape_.n_heads; ++h) {
      const float* row = layers_[0]->out().data() + h * layers_[0]->group().out_head_stride;
      out.insert(out.end(), row, row + shape_.head_dim);
    }
    return out;
  }

  std::vector<float> Masses() const {
    std::vector<float> masses;
    for (uint32_t h = 0; h < shape_.n_kv_heads; ++h) {
      const float* row = layers_[0]->mass().data() + h * layers_[0]->group().mass_head_stride;
      masses.insert(masses.end(), row, row + layers_[0]->group().windows.size());
    }
    return masses;
  }

  HeadShape shape_;
  ParallelFor& pool_;
  kernels::Workspace workspace_;
  std::vector<std::unique_ptr<Problem>> layers_;
};

class PeerKernel final : public Kernel {
 public:
  PeerKernel(const HeadShape& shape, std::unique_ptr<PeerAttention> peer, std::vector<float> query)
      : shape_(shape), peer_(std::move(peer)), query_(std::move(query)) {}

  Status Run() override { return peer_->Run(); }

  Status Check(AttentionRow& row) override {
    QEVICT_RETURN_IF_ERROR(peer_->Run());
    kernels::LayerRows rows;
    peer_->Stored(0, rows.keys, rows.values);
    const kernels::PlainResult want = AttendPlain(shape_.layer(), query_, rows, 8);
    row.error = RelativeError(peer_->Out(0), want.out);
    return {};
  }

  size_t layer_bytes() const override { return peer_->layer_bytes(); }

 private:
  HeadShape shape_;
  std::unique_ptr<PeerAttention> peer_;
  std::vector<float> query_;
};

class AttentionBench {
 public:
  explicit AttentionBench(const AttentionBenchPlan& plan)
      : plan_(plan), pool_(static_cast<unsigned>(plan.n_threads)), read_(pool_) {}

  Result<AttentionBenchResult> Run() {
    const uint64_t n_kernels = plan_.tiers.size() + 3;
    Progress progress(
        "",
        plan_.shapes.size() * plan_.tokens.size() * n_kernels * (plan_.n_repetitions + uint64_t{1}),
        "runs");
    progress_ = &progress;
    result_.read_bytes = read_.bytes();
    read_.Run();  // pages and threads
    for (const HeadShape& shape : plan_.shapes) {
      for (const uint32_t n_tokens : plan_.tokens) {
        progress.SetWhat(shape.Name() + ", " + std::to_string(n_tokens) + " tokens");
        QEVICT_RETURN_IF_ERROR(RunShape(shape, n_tokens));
      }
    }
    return std::move(result_);
  }

 private:
  using Kernels = std::vector<std::unique_ptr<Kernel>>;

  void Advance() { progress_->Update(++n_done_); }

  /// Checks a kernel and adds it as a row.
  Status Add(const HeadShape& shape, uint32_t n_tokens, const std::string& name, double limit,
             std::unique_ptr<Kernel> kernel, Kernels& all) {
    AttentionRow row;
    row.shape = shape;
    row.n_tokens = n_tokens;
    row.kernel = name;
    row.layer_bytes = kernel->layer_bytes();
    const std::string where =
        name + ", " + shape.Name() + ", " + std::to_string(n_tokens) + " tokens: ";
    const Status checked = kernel->Check(row);
    if (!checked.ok()) return {checked.code(), where + checked.message()};
    const double worst = std::max(row.error, row.mass_error);
    if (!(worst <= limit)) {
      return Internal(where + "the result is off by " + std::to_string(worst) +
                      " of its largest value, at most " + std::to_string(limit) +
                      " is rounding: nothing was timed");
    }
    all.push_back(std::move(kernel));
    result_.rows.push_back(std::move(row));
    Advance();
    return {};
  }

  Status AddPeer(const HeadShape& shape, uint32_t n_tokens, PeerType type, const Problem& problem,
                 const kernels::LayerRows& rows, Kernels& all) {
    const plugin::PeerShape s = {shape.n_heads, shape.n_kv_heads, shape.head_dim, n_tokens};
    auto peer = PeerAttention::Create(s, type, plan_.n_layers, plan_.n_threads);
    if (!peer.ok()) return peer.status();
    std::vector<float> query = QueryRow(problem);
    for (uint32_t i = 0; i < plan_.n_layers; ++i) (*peer)->Fill(i, query, rows.keys, rows.values);
    return Add(shape, n_tokens, std::string("ggml ") + PeerTypeName(type), kRoundedError,
               std::make_unique<PeerKernel>(shape, std::move(*peer), std::move(query)), all);
  }

  Status MakeKernels(const HeadShape& shape, uint32_t n_tokens, Kernels& all) {
    {
      kernels::ProblemParams p =
          kernels::LayerParams(shape.layer(), kernels::Formats::kFull, 1, n_tokens);
      const Problem problem(p);
      const kernels::LayerRows rows = StoredRows(problem);
      for (const PeerType type : {PeerType::kF16, PeerType::kQ8_0, PeerType::kQ4_0}) {
        QEVICT_RETURN_IF_ERROR(AddPeer(shape, n_tokens, type, problem, rows, all));
      }
    }
    for (const kernels::Formats tier : plan_.tiers) {
      const bool rounds = tier == kernels::Formats::kToken || tier == kernels::Formats::kMixed;
      QEVICT_RETURN_IF_ERROR(
          Add(shape, n_tokens, std::string("qevict ") + FormatsName(tier),
              rounds ? kRoundedError : kOurError,
              std::make_unique<OurKernel>(shape, tier, n_tokens, plan_.n_layers, pool_), all));
    }
    return {};
  }

  Status Measure(Kernel& kernel, AttentionRow& row) {
    if (!plan_.warm) result_.read_gbps.push_back(read_.Run());
    const Timer timer;
    QEVICT_RETURN_IF_ERROR(kernel.Run());
    row.layer_ms.push_back(timer.ms() / plan_.n_layers);
    Advance();
    return {};
  }

  Status RunShape(const HeadShape& shape, uint32_t n_tokens) {
    const size_t first = result_.rows.size();
    Kernels all;
    QEVICT_RETURN_IF_ERROR(MakeKernels(shape, n_tokens, all));
    for (const auto& kernel : all) QEVICT_RETURN_IF_ERROR(kernel->Run());  // warm-up
    for (size_t round = 0; round < plan_.n_repetitions; ++round) {
      if (plan_.warm) result_.read_gbps.push_back(read_.Run());
      for (size_t i = 0; i < all.size(); ++i) {
        const size_t k = (round + i) % all.size();
        QEVICT_RETURN_IF_ERROR(Measure(*all[k], result_.rows[first + k]));
      }
    }
    for (size_t k = 0; k < all.size(); ++k) {
      AttentionRow& row = result_.rows[first + k];
      row.ratios = Ratios(result_.rows[first].layer_ms, row.layer_ms);
    }
    return {};
  }

  const AttentionBenchPlan& plan_;
  plugin::OmpPool pool_;  // the threads that ggml's CPU backend uses, too
  StreamingRead read_;
  AttentionBenchResult result_;
  Progress* progress_ = nullptr;
  uint64_t n_done_ = 0;
};

}  // namespace

Result<AttentionBenchResult> RunAttentionBench(const AttentionBenchPlan& plan) {
  return AttentionBench(plan).Run();
}

}  // namespace qevict::cli
