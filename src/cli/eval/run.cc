// Per chunk of raw text: the full cache reads the prompt and is fed the scored tokens; then each
// compressed cache does the same, and its logits are compared with the reference's, position by
// position. The prompt is compressed before the first scored token, as in generation; until then
// it is the same under every budget and most codecs, so it is read once and restored. A step of R
// tokens gives the same logits as single tokens as long as decisions are R tokens apart or more:
// tiers change only between steps.
#include <algorithm>
#include <cmath>

#include "base/parallel.h"
#include "cli/eval/eval.h"
#include "cli/progress.h"
#include "codecs/codec.h"

namespace qevict::cli {
namespace {

/// True if what is held of a prompt when it has been read depends neither on the budget nor on the
/// codec, and a saved state brings all of it (the queries' energy, which wf learns from, is none of
/// it).
bool SharesPrompt(const Contender& c) {
  return c.config && c.config->EffectivePrefill() == Prefill::kFull &&
         (!codecs::WantsQueryEnergy(*c.config) || !c.config->statistics.empty());
}

/// The configuration that a prompt is read with, as far as what is held of it depends on it.
std::string PromptKey(const Contender& c) {
  Config config = *c.config;
  const uint8_t tag = codecs::CodecTag(config);  // saved rows name it
  config.budget_fraction = 1.0;
  config.budget_bytes = 0;
  config.codec = Config{}.codec;
  config.bits = Config{}.bits;
  config.quarter_bits = 0;
  config.layer_bits.clear();
  config.statistics.clear();
  return std::to_string(tag) + " " + ToText(config);
}

void AddStats(qevict_stats& sum, const qevict_stats& s) {
  sum.full_bytes += s.full_bytes;
  sum.packed_bytes += s.packed_bytes;
  sum.dormant_bytes += s.dormant_bytes;
  sum.tables_bytes += s.tables_bytes;
  sum.slack_bytes += s.slack_bytes;
  sum.f16_bytes += s.f16_bytes;
  sum.full_tokens += s.full_tokens;
  sum.packed_tokens += s.packed_tokens;
  sum.evicted_tokens += s.evicted_tokens;
  sum.events += s.events;
  sum.promotions += s.promotions;
  sum.demotions += s.demotions;
  sum.evictions += s.evictions;
  sum.violations += s.violations;
  sum.n_layers = s.n_layers;
}

/// The reference's rows of one chunk. Logits are kept only where they are compared.
class Reference {
 public:
  Reference(size_t n_rows, size_t n_vocab, bool keep)
      : n_vocab_(n_vocab), logits_(keep ? n_rows * n_vocab : 0), nll_(n_rows), rows_(n_rows) {}

  void Set(size_t i, std::span<const float> row, llama_token label) {
    nll_[i] = LogSumExp(row) - static_cast<double>(row[static_cast<size_t>(label)]);
    if (logits_.empty()) return;
    const std::span<float> kept{logits_.data() + i * n_vocab_, n_vocab_};
    std::copy(row.begin(), row.end(), kept.begin());
    rows_[i].emplace(kept);
  }
  Position Compare(size_t i, std::span<const float> row, llama_token label) const {
    return rows_[i] ? ComparePosition(*rows_[i], row, label)
                    : ComparePerplexity(nll_[i], row, label);
  }

 private:
  size_t n_vocab_;
  std::vector<float> logits_;
  std::vector<double> nll_;
  std::vector<std::optional<ReferenceRow>> rows_;
};

class EvalRun {
 public:
  EvalRun(const EvalOptions& o, uint32_t n_step, std::vector<Contender>& contenders,
          const OnChunk& on_chunk)
      : o_(o),
        n_step_(n_step),
        contenders_(contenders),
        on_chunk_(on_chunk),
        pool_(MakeThreadPool(static_cast<unsigned>(o.n_threads))) {
    options_.n_ctx = ContextCells(o.chunk_tokens());
    options_.n_batch = options_.n_ubatch = static_cast<uint32_t>(o.n_batch);
    options_.n_outputs = n_step;
    options_.n_threads = static_cast<int>(o.n_threads);
  }

  Status Run(const std::string& text) {
    Result<Model> cpu = Model::Load(o_.model, Device::kCpu);
    if (!cpu.ok()) return cpu.status();
    Result<Model> ours = Model::Load(o_.model, Device::kQEvict);
    if (!ours.ok()) return ours.status();
    sliding_ = llama_model_n_swa(cpu->get()) > 0;
    Result<std::vector<llama_token>> tokens = cpu->Tokenize(text, true, false);
    if (!tokens.ok()) return tokens.status();
    QEVICT_RETURN_IF_ERROR(CheckLength(tokens->size()));
    QEVICT_RETURN_IF_ERROR(TryBudgets(*ours, (*tokens)[0]));
    progress_.emplace("", TotalTokens());
    Reference reference(static_cast<size_t>(o_.n_score), static_cast<size_t>(cpu->n_vocab()),
                        o_.divergence);
    for (size_t c = 0; c < static_cast<size_t>(o_.n_chunks); ++c) {
      const std::span<const llama_token> all(*tokens);
      QEVICT_RETURN_IF_ERROR(
          RunChunk(*cpu, *ours, c, all.subspan(c * ChunkStride(), ChunkStride() + 1), reference));
    }
    progress_->Finish();
    return {};
  }

 private:
  /// Tokens of the text that a chunk takes; generated ones are not in it.
  size_t ChunkStride() const {
    return o_.generate ? static_cast<size_t>(o_.n_prompt) : o_.chunk_tokens();
  }

  Status CheckLength(size_t n_tokens) const {
    const uint64_t needed = static_cast<uint64_t>(o_.n_chunks) * ChunkStride() + 1;
    if (n_tokens >= needed) return {};
    return InvalidArgument("file " + o_.file + " has " + std::to_string(n_tokens) +
                           " tokens, but " + std::to_string(o_.n_chunks) + " chunks of " +
                           std::to_string(ChunkStride()) + " tokens need " +
                           std::to_string(needed) + ": lower --chunks, --prompt or --score");
  }

  uint64_t TotalTokens() const {
    uint64_t per_chunk = o_.chunk_tokens() * (contenders_.size() + 1);
    for (size_t i = 1; i < contenders_.size(); ++i) {
      const Contender &before = contenders_[i - 1], &c = contenders_[i];
      if (!sliding_ && SharesPrompt(before) && SharesPrompt(c) &&
          PromptKey(before) == PromptKey(c)) {
        per_chunk -= static_cast<uint64_t>(o_.n_prompt);
      }
    }
    return static_cast<uint64_t>(o_.n_chunks) * per_chunk;
  }

  /// Whether every cache can be made, before hours have gone by.
  Status TryBudgets(const Model& model, llama_token token) const {
    for (const Contender& c : contenders_) {
      if (!c.config) continue;
      auto context =
          Context::Create(model, options_, *c.config, static_cast<uint32_t>(o_.chunk_tokens()));
      const Status status = context.ok() ? context->Decode({&token, 1}, 1) : context.status();
      if (!status.ok()) {
        return {status.code(),
                c.policy + (c.budget.empty() ? "" : " at " + c.budget) + ": " + status.message()};
      }
    }
    return {};
  }

  Status ReadChunkPrompt(Context& context, std::span<const llama_token> chunk) {
    return ReadPrompt(context, chunk.first(static_cast<size_t>(o_.n_prompt)), options_.n_batch,
                      [this](size_t n) { Advance(n); });
  }

  /// The same, from what the contender before has read if that is the same.
  Status ReadOrRestorePrompt(const Contender& c, Context& context,
                             std::span<const llama_token> chunk) {
    if (sliding_ || !SharesPrompt(c)) return ReadChunkPrompt(context, chunk);
    const std::string key = PromptKey(c);
    if (prompt_.key == key)
      return context.Restore(prompt_.state, static_cast<uint32_t>(o_.n_prompt));
    QEVICT_RETURN_IF_ERROR(ReadChunkPrompt(context, chunk));
    Result<std::vector<uint8_t>> state = context.Save();
    if (!state.ok()) return state.status();
    prompt_ = {key, std::move(*state)};
    return {};
  }

  /// The scored tokens; on_row(position, logits) for each, on any of the threads.
  template <typename F>
  Status Score(Context& context, size_t n_vocab, std::span<const llama_token> chunk,
               const F& on_row) {
    QEVICT_RETURN_IF_ERROR(context.SetPhase(QEVICT_PHASE_DECODE));
    const auto n_prompt = static_cast<size_t>(o_.n_prompt), end = o_.chunk_tokens();
    for (size_t at = n_prompt; at < end;) {
      const size_t n = std::min<size_t>(n_step_, end - at);
      QEVICT_RETURN_IF_ERROR(context.Decode(chunk.subspan(at, n), static_cast<uint32_t>(n)));
      pool_->For(n, [&](size_t i, unsigned) {
        on_row(at + i - n_prompt,
               std::span<const float>(context.Logits(static_cast<uint32_t>(i)), n_vocab));
      });
      at += n;
      Advance(n);
    }
    return {};
  }

  /// The reference's own answer to the prompt that it has just read, and the token after it: the
  /// end of `chunk`.
  Status GenerateChunk(const Model& model, Context& context, std::vector<llama_token>& chunk,
                       Reference& reference) {
    QEVICT_RETURN_IF_ERROR(context.SetPhase(QEVICT_PHASE_DECODE));
    Sampling sampling = o_.sampling;
    sampling.ignore_eos = true;
    const Sampler sampler = MakeSampler(model, sampling);
    const auto n_prompt = static_cast<size_t>(o_.n_prompt);
    const auto n_vocab = static_cast<size_t>(model.n_vocab());
    chunk.resize(n_prompt);
    for (size_t i = 0;; ++i) {
      chunk.push_back(llama_sampler_sample(sampler.get(), context.get(), -1));
      if (i > 0) reference.Set(i - 1, {context.Logits(0), n_vocab}, chunk.back());
      if (i == static_cast<size_t>(o_.n_score)) return {};
      QEVICT_RETURN_IF_ERROR(context.Decode({&chunk.back(), 1}, 1));
      Advance(1);
    }
  }

  void Advance(size_t n) {
    n_done_ += n;
    progress_->Update(n_done_);
  }

  Status RunReference(const Model& cpu, std::vector<llama_token>& chunk, Reference& reference) {
    ContextOptions options = options_;
    options.flash_attention = o_.reference == "fa";
    auto context = Context::Create(cpu, options);
    if (!context.ok()) return context.status();
    QEVICT_RETURN_IF_ERROR(ReadChunkPrompt(*context, chunk));
    if (o_.generate) return GenerateChunk(cpu, *context, chunk, reference);
    const auto n_prompt = static_cast<size_t>(o_.n_prompt);
    return Score(*context, static_cast<size_t>(cpu.n_vocab()), chunk,
                 [&](size_t i, std::span<const float> row) {
                   reference.Set(i, row, chunk[n_prompt + i + 1]);
                 });
  }

  Status RunChunk(const Model& cpu, const Model& ours, size_t index,
                  std::span<const llama_token> text, Reference& reference) {
    std::vector<llama_token> chunk(text.begin(), text.end());
    if (cpu.adds_bos()) chunk[0] = llama_vocab_bos(cpu.vocab());
    const std::string where =
        "chunk " + std::to_string(index + 1) + " of " + std::to_string(o_.n_chunks);
    progress_->SetWhat(where + ", reference");
    QEVICT_RETURN_IF_ERROR(RunReference(cpu, chunk, reference));
    prompt_ = {};
    for (Contender& c : contenders_) {
      progress_->SetWhat(where + ", " + c.policy + (c.budget.empty() ? "" : " ") + c.budget);
      QEVICT_RETURN_IF_ERROR(RunContender(c, c.config ? ours : cpu, index, chunk, reference));
    }
    return {};
  }

  Status RunContender(Contender& c, const Model& model, size_t index,
                      std::span<const llama_token> chunk, const Reference& reference) {
    ContextOptions options = options_;
    if (!c.config) options.flash_attention = o_.reference != "fa";
    auto context = Context::Create(model, options, c.config.value_or(Config{}),
                                   static_cast<uint32_t>(o_.chunk_tokens()));
    if (!context.ok()) return context.status();
    std::vector<Position> positions(static_cast<size_t>(o_.n_score));
    const auto n_prompt = static_cast<size_t>(o_.n_prompt);
    QEVICT_RETURN_IF_ERROR(ReadOrRestorePrompt(c, *context, chunk));
    QEVICT_RETURN_IF_ERROR(Score(*context, static_cast<size_t>(model.n_vocab()), chunk,
                                 [&](size_t i, std::span<const float> row) {
                                   positions[i] =
                                       reference.Compare(i, row, chunk[n_prompt + i + 1]);
                                 }));
    for (size_t i = 0; i < positions.size(); ++i) {
      if (!std::isnan(positions[i].kl) && !std::isnan(positions[i].nll - positions[i].nll_base))
        continue;
      return FailedPrecondition(c.policy + ": the logits of scored token " + std::to_string(i) +
                                " are no numbers, or those of the reference");
    }
    qevict_stats stats{};
    if (c.config) {
      const auto got = context->Stats();
      if (!got.ok()) return got.status();
      stats = *got;
    }
    if (on_chunk_) on_chunk_(c, index, positions, stats);
    c.positions.insert(c.positions.end(), positions.begin(), positions.end());
    AddStats(c.sum, stats);
    return {};
  }

  const EvalOptions& o_;
  uint32_t n_step_;
  std::vector<Contender>& contenders_;
  const OnChunk on_chunk_;
  std::unique_ptr<ParallelFor> pool_;
  ContextOptions options_;
  std::optional<Progress> progress_;
  uint64_t n_done_ = 0;
  bool sliding_ = false;  // saved states of sliding windows lack what the window has left behind
  struct {
    std::string key;
    std::vector<uint8_t> state;
  } prompt_;  // of the current chunk, as the contender before left it
};

}  // namespace

Result<std::vector<Contender>> MakeContenders(const EvalOptions& o) {
  std::vector<Contender> contenders;
  if (o.floor) contenders.push_back({"floor", "", std::nullopt, {}, {}});
  const Result<std::vector<CacheChoice>> choices = o.caches.Build();
  if (!choices.ok()) return choices.status();
  for (const CacheChoice& c : *choices) {
    contenders.push_back({c.policy, c.budget, c.config, {}, {}});
  }
  return contenders;
}

Result<uint32_t> StepTokens(const EvalOptions& o, std::span<const Contender> contenders) {
  uint32_t shortest = UINT32_MAX;
  for (const Contender& c : contenders) {
    if (c.config) shortest = std::min(shortest, c.config->EffectiveInterval());
  }
  const auto step =
      static_cast<uint32_t>(o.n_step ? o.n_step : std::min<int64_t>(shortest, o.n_batch));
  for (const Contender& c : contenders) {
    const uint32_t interval = c.config ? c.config->EffectiveInterval() : step;
    if (interval % step == 0) continue;
    return InvalidArgument("--step " + std::to_string(step) + " does not divide the interval of " +
                           std::to_string(interval) + " tokens: decisions would come late");
  }
  if (step > o.n_batch) {
    return InvalidArgument("--step " + std::to_string(step) + " is larger than the batch of " +
                           std::to_string(o.n_batch) + " tokens");
  }
  return step;
}

Status RunEval(const EvalOptions& options, uint32_t n_step, const std::string& text,
               std::vector<Contender>& contenders, const OnChunk& on_chunk) {
  return EvalRun(options, n_step, contenders, on_chunk).Run(text);
}

}  // namespace qevict::cli
