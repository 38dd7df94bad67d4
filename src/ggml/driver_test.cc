// A driver of random hosts: caches of many configurations, batches of any shape, drafts that are
// rejected, prompts that are cancelled, states saved and restored, streams copied, positions
// shifted and divided. No step fails, the cache is sound after each, and what it holds is within
// the limit that is in force.
//
// A run is named by its seed. QEVICT_DRIVER_SEED is the first one, QEVICT_DRIVER_STEPS how many
// steps there are in all: with the seed that a failure names and kStepsPerRun steps it comes again.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>

#include "ggml/cache_group.h"
#include "ggml/testing/held.h"
#include "ggml/testing/state.h"

namespace qevict::plugin::testing {
namespace {

constexpr uint32_t kStepsPerRun = 100, kCells = 256;

/// What a run drives, drawn from its seed.
struct Host {
  explicit Host(uint32_t seed);

  std::mt19937 random;
  bool streams = false;
  uint32_t n_seqs = 1, n_ubatch = 16;
  CacheSpec spec;
  std::string config;

  uint32_t Pick(uint32_t n) { return static_cast<uint32_t>(random() % n); }
  std::string OneOf(std::initializer_list<const char*> names) {
    return names.begin()[Pick(static_cast<uint32_t>(names.size()))];
  }
};

Host::Host(uint32_t seed) : random(seed) {
  streams = Pick(2) == 0;
  n_seqs = 1 + Pick(Pick(2) ? 3 : 8);
  n_ubatch = 1u << Pick(8);
  spec.layers.resize(1 + Pick(2));
  for (LayerSpec& layer : spec.layers) {
    layer.n_kv_heads = 1 + Pick(2);
    layer.n_gqa = 1;
    layer.head_dim = layer.head_dim_v = 32;
  }
  spec.n_cells = kCells;
  spec.n_streams = streams ? n_seqs : 1;
  spec.n_threads = 1;
  config = "preset=qevict,check=1," +
           OneOf({"codec=kivi", "codec=kivi,bits=4", "codec=wf", "codec=wf,rungs=4/2.5/1.5",
                  "codec=zipcache", "codec=token,bits=8", "codec=kvquant"});
  config += OneOf({",budget=1%", ",budget=20%", ",budget=40%", ",budget=70%", ",budget=1KiB",
                   ",budget=96KiB", ",budget=256KiB"});
  config += OneOf({",window=8", ",window=16", ",window=32"});
  config += OneOf({"", ",prefill=full", ",prefill=bounded"});
  config += OneOf({"", ",promotion=none", ",promotion=pinned"});
  config += OneOf({"", ",recents=8", ",recents=25%"}) + OneOf({"", ",q=0.3", ",q=1"});
}

class Driver {
 public:
  explicit Driver(uint32_t seed) : host_(seed), twin_(host_.spec, host_.config) {}

  const Host& host() const { return host_; }
  bool ok() const { return twin_.ours.ok(); }
  void Run(uint32_t n_steps) {
    while (n_steps_ < n_steps && !::testing::Test::HasFailure()) Operation();
  }

 private:
  uint32_t Pick(uint32_t n) { return host_.Pick(n); }
  int32_t Next(uint32_t seq) const { return twin_.cells.last_pos(seq) + 1; }
  uint32_t Free(uint32_t seq) const {
    const uint32_t stream = twin_.cells.stream_of(seq);
    uint32_t n = 0;
    for (uint32_t c = 0; c < kCells; ++c) n += twin_.cells.in_use(stream, c) ? 0 : 1;
    return n;
  }

  void Operation() {
    switch (Pick(16)) {
      case 0:
        return Prompt();
      case 1:
      case 2:
        return Speculate();
      case 3:
        return ShiftContext();
      case 4:
        return Pick(4) ? void() : Divide();
      case 5:
        return Share();
      case 6:
        return Forget(Pick(host_.n_seqs));
      case 7:
        return SaveAndRestore();
      default:
        return DecodeSome();
    }
  }

  void Step(const std::vector<Token>& batch, const char* what) {
    ++n_steps_;
    const HeldReport report = RunHeld(twin_, batch, false);
    ExpectHeld(report, "step " + std::to_string(n_steps_) + ", " + what);
  }

  /// Chunks of one sequence; often it is cancelled half way.
  void Prompt() {
    const uint32_t seq = Pick(host_.n_seqs), n = 1 + Pick(120);
    for (uint32_t at = 0; at < n && !::testing::Test::HasFailure();) {
      const uint32_t rows = std::min({host_.n_ubatch, n - at, Free(seq)});
      if (rows == 0) return Forget(seq);
      Step(TokensOf(seq, Next(seq), rows), "a prompt");
      at += rows;
      if (Pick(16) == 0) return Forget(seq);
    }
  }
  /// One row of each of some neighbours, or of any sequences of a unified cache.
  void DecodeSome() {
    const uint32_t first = Pick(host_.n_seqs), last = first + Pick(host_.n_seqs - first);
    std::vector<Token> batch;
    for (uint32_t seq = first; seq <= last; ++seq) {
      if (Free(seq) < host_.n_seqs) return Forget(seq);
      batch = Join({batch, TokensOf(seq, Next(seq), 1)});
    }
    Step(batch, "decoding");
  }
  void Speculate() {
    const uint32_t seq = Pick(host_.n_seqs);
    const int32_t before = Next(seq);
    const uint32_t n = 1 + Pick(Pick(2) ? 8 : 64);
    if (before == 0 || Free(seq) <= n) return;
    Step(TokensOf(seq, before, n), "drafts");
    twin_.cells.Remove(seq, before + 1 + static_cast<int32_t>(Pick(n)));
    Step(TokensOf(seq, Next(seq), 1), "after drafts");
  }
  void ApplyShifts() { ASSERT_EQ(twin_.ours.Shift(twin_.cells.TakeShifts()), GGML_STATUS_SUCCESS); }
  /// llama.cpp does not shift cells of two sequences either.
  void ShiftContext() {
    const uint32_t seq = Pick(host_.n_seqs);
    if (Next(seq) < 40 || shared_) return;
    const auto from = static_cast<int32_t>(Pick(12)), n = static_cast<int32_t>(1 + Pick(25));
    twin_.cells.Remove(seq, from, from + n);
    twin_.cells.Shift(seq, from + n, -1, -n);
    ApplyShifts();
    if (Free(seq) > 0) Step(TokensOf(seq, Next(seq), 1), "after a shift");
  }
  void Divide() {
    const uint32_t seq = Pick(host_.n_seqs);
    const int32_t end = Next(seq);
    if (end < 8 || shared_) return;
    for (int32_t p = 1; p < end; ++p) twin_.cells.Shift(seq, p, p + 1, p / 2 - p);
    ApplyShifts();
    if (Free(seq) > 0) Step(TokensOf(seq, Next(seq), 1), "after dividing");
  }
  void Share() {
    const uint32_t from = Pick(host_.n_seqs), to = (from + 1) % host_.n_seqs;
    if (from == to || Next(from) == 0) return;
    if (host_.streams) {
      twin_.ours.CopyStream(from, to);
      twin_.cells.CopyStream(from, to);
    } else {
      twin_.cells.Remove(to, 0);
      twin_.cells.Copy(from, to);
      shared_ = true;
    }
    if (Free(to) > 0) Step(TokensOf(to, Next(to), 1), "after sharing");
  }
  void Forget(uint32_t seq) {
    if (Pick(4) == 0) {
      twin_.cells.Clear();
      twin_.ours.Clear();
      shared_ = false;
    } else {
      twin_.cells.Remove(seq, 0);
    }
  }
  /// All cells of a stream out and in again.
  void SaveAndRestore() {
    const uint32_t seq = Pick(host_.n_seqs), stream = twin_.cells.stream_of(seq);
    uint32_t end = 0;
    for (uint32_t c = 0; c < kCells; ++c) end = twin_.cells.in_use(stream, c) ? c + 1 : end;
    if (Next(seq) == 0 || Free(seq) == 0) return;
    const SavedState state = Save(twin_.ours, stream, 0, end);
    if (!host_.streams && Pick(2)) twin_.ours.Clear();
    Restore(twin_.ours, stream, 0, state, Pick(2) ? 1000 : 0);
    Step(TokensOf(seq, Next(seq), 1), "after a restore");
  }

  Host host_;
  Twin twin_;
  uint32_t n_steps_ = 0;
  bool shared_ = false;
};

uint32_t Setting(const char* name, uint32_t otherwise) {
  const char* text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): read only
  return text ? static_cast<uint32_t>(std::strtoul(text, nullptr, 10)) : otherwise;
}

TEST(DriverTest, NoStepFails) {
  const uint32_t first = Setting("QEVICT_DRIVER_SEED", 1);
  const uint32_t n_steps = Setting("QEVICT_DRIVER_STEPS", 20000);
  for (uint32_t done = 0; done < n_steps && !HasFailure(); done += kStepsPerRun) {
    const uint32_t seed = first + done / kStepsPerRun;
    Driver driver(seed);
    const Host& host = driver.host();
    SCOPED_TRACE("QEVICT_DRIVER_SEED=" + std::to_string(seed) + " QEVICT_DRIVER_STEPS=100: " +
                 std::to_string(host.n_seqs) + (host.streams ? " streams, " : " sequences, ") +
                 std::to_string(host.n_ubatch) + " rows, " + host.config);
    ASSERT_TRUE(driver.ok());
    driver.Run(std::min(kStepsPerRun, n_steps - done));
  }
}

}  // namespace
}  // namespace qevict::plugin::testing
