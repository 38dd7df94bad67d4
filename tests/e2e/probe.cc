// Drives libllama with the plug-in where programs do not reach: logits to full precision, bytes at
// every step, states, sequences, several contexts. Prints one `key value` a line; a failure is one
// sentence and exit code 1.
//
//   probe logits   --model M --text F --tokens N --decode D --config C --ctx N [--type f16|bf16]
//                  [--override KEY=INT]
//   probe greedy   --model M --text F --generate N --ctx N --config C
//   probe budget   --model M --text F --prompt N --generate N --ctx N --chunk N [--config C]
//                  [--fraction-of N]
//   probe plans    --model M --text F --prompt N --generate N --ctx N --config C [--threads N]
//   probe state    --model M --text F --prompt N --generate N --ctx N --config C
//                  [--damage truncate|zero|flip|rows]
//   probe fork     --model M --text F --prompt N --ctx N --config C --unified 0|1
//   probe contexts --model M --second M2 --text F --prompt N --generate N --ctx N --config C
//                  --second-config C2
//   probe abort    --model M --text F --prompt N --ctx N --config C

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "probe_engine.h"

namespace probe {
namespace {

std::string ReadText(const Options& options) {
  std::ifstream file(options.text("text"), std::ios::binary);
  if (!file) Fail("the text " + options.text("text") + " is not readable");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

ContextSettings Settings(const Options& options) {
  ContextSettings settings;
  settings.config = options.text("config", "");
  settings.n_ctx = options.number("ctx");
  settings.n_batch = options.number("chunk", 512);
  settings.n_threads = options.number("threads", 2);
  if (options.text("type", "f16") == "bf16") settings.cache_type = GGML_TYPE_BF16;
  const std::string replaced = options.text("override", "=");
  settings.override_key = replaced.substr(0, replaced.find('='));
  settings.override_value = std::atoll(replaced.c_str() + replaced.find('=') + 1);
  return settings;
}

void Print(const char* key, uint64_t value) {
  std::printf("%s %llu\n", key, static_cast<unsigned long long>(value));
}

void PrintStats(const char* prefix, const qevict_stats& s) {
  const std::pair<const char*, uint64_t> values[] = {{"full", s.full_bytes},
                                                     {"packed", s.packed_bytes},
                                                     {"dormant", s.dormant_bytes},
                                                     {"tables", s.tables_bytes},
                                                     {"slack", s.slack_bytes},
                                                     {"counted", Counted(s)},
                                                     {"budget", s.budget_bytes},
                                                     {"f16", s.f16_bytes},
                                                     {"full_tokens", s.full_tokens},
                                                     {"packed_tokens", s.packed_tokens},
                                                     {"evicted_tokens", s.evicted_tokens},
                                                     {"events", s.events},
                                                     {"promotions", s.promotions},
                                                     {"demotions", s.demotions},
                                                     {"evictions", s.evictions},
                                                     {"workspace", s.workspace_bytes},
                                                     {"violations", s.violations}};
  for (const auto& [key, value] : values) Print((std::string(prefix) + key).c_str(), value);
}

// --- logits ------------------------------------------------------------------------------------

// All read the same tokens: a prompt in chunks, then one token at a time.
int Logits(const Options& options) {
  ContextSettings settings = Settings(options);
  Engine ours(options.text("model"), settings);
  settings.config.clear();
  Engine flash(options.text("model"), settings);
  settings.flash_attention = false;
  Engine reference(options.text("model"), settings);

  const uint32_t n = options.number("tokens"), n_decode = options.number("decode");
  const std::vector<llama_token> tokens = ours.Tokenize(ReadText(options), n);
  Divergence prompt, decode, prompt_flash, decode_flash;
  for (uint32_t i = 0; i < n;) {
    const bool in_prompt = i < n - n_decode;
    const uint32_t rows = in_prompt ? std::min(settings.n_batch, n - n_decode - i) : 1;
    for (Engine* engine : {&reference, &flash, &ours}) {
      if (engine->Decode(tokens.data() + i, rows, static_cast<llama_pos>(i), 0, true) != 0) {
        Fail("llama_decode failed");
      }
    }
    for (int32_t r = 0; r < static_cast<int32_t>(rows); ++r) {
      const float* expected = reference.logits(r);
      (in_prompt ? prompt : decode).Add(expected, ours.logits(r), ours.n_vocab());
      (in_prompt ? prompt_flash : decode_flash).Add(expected, flash.logits(r), ours.n_vocab());
    }
    i += rows;
  }
  prompt.Print("prompt_");
  decode.Print("decode_");
  prompt_flash.Print("prompt_flash_");
  decode_flash.Print("decode_flash_");
  return 0;
}

// Greedy tokens of both until they differ; how close the reference's decision was there.
int Greedy(const Options& options) {
  ContextSettings settings = Settings(options);
  Engine ours(options.text("model"), settings);
  settings.config.clear();
  settings.flash_attention = false;
  Engine reference(options.text("model"), settings);
  std::vector<llama_token> tokens = ours.Tokenize(ReadText(options), 0);
  for (Engine* engine : {&reference, &ours}) engine->Prompt(tokens, 0);
  uint32_t equal = 0;
  for (; equal < options.number("generate"); ++equal) {
    const llama_token a = reference.Greedy(-1), b = ours.Greedy(-1);
    if (a != b) {
      std::printf("margin %.3e\n", reference.logits(-1)[a] - reference.logits(-1)[b]);
      break;
    }
    tokens.push_back(a);
    for (Engine* engine : {&reference, &ours}) {
      if (engine->Decode(&a, 1, static_cast<llama_pos>(tokens.size() - 1), 0) != 0) {
        Fail("llama_decode failed");
      }
    }
  }
  Print("equal", equal);
  return 0;
}

// --- budget ------------------------------------------------------------------------------------

// Largest values seen at the end of any step.
struct Peaks {
  uint64_t counted = 0, over = 0, dormant = 0, workspace = 0, rss_anon = 0, steps_over = 0,
           steps_in_force = 0;
  double resident_error = 0;

  void Note(const qevict_stats& s) {
    const uint64_t now = Counted(s);
    rss_anon = std::max(rss_anon, StatusBytes("RssAnon"));
    workspace = std::max(workspace, s.workspace_bytes);
    // Tables are on the heap; all else is in the arena.
    const auto in_arena = static_cast<double>(now - s.tables_bytes);
    if (in_arena > 0) {
      const double resident = static_cast<double>(s.arena_resident_bytes);
      resident_error = std::max(resident_error, std::abs(resident - in_arena) / in_arena);
    }
    if (s.budget_bytes == 0) return;
    ++steps_in_force;
    counted = std::max(counted, now);
    dormant = std::max(dormant, s.dormant_bytes);
    if (now > s.budget_bytes) {
      ++steps_over;
      over = std::max(over, now - s.budget_bytes);
    }
  }
};

int Budget(const Options& options) {
  const ContextSettings settings = Settings(options);
  Engine engine(options.text("model"), settings);
  if (const uint32_t tokens = options.number("fraction-of", 0); tokens && engine.session()) {
    if (Plugin::Get().set_budget_tokens(engine.session(), tokens) != 0)
      Fail(Plugin::Get().last_error());
  }
  std::vector<llama_token> tokens = engine.Tokenize(ReadText(options), options.number("prompt"));
  Peaks peaks;
  for (size_t i = 0; i < tokens.size(); i += settings.n_batch) {
    const auto n = static_cast<uint32_t>(std::min<size_t>(settings.n_batch, tokens.size() - i));
    if (engine.Decode(tokens.data() + i, n, static_cast<llama_pos>(i), 0) != 0)
      Fail("llama_decode failed");
    peaks.Note(engine.stats());
  }
  const qevict_stats prompt = engine.stats();
  PrintStats("prompt_", prompt);
  for (uint32_t i = 0; i < options.number("generate"); ++i) {
    engine.Generate(tokens, 1, 0);
    peaks.Note(engine.stats());
  }
  const qevict_stats end = engine.stats();
  PrintStats("end_", end);
  Print("capacity_f16", end.capacity_f16_bytes);
  Print("arena_peak", end.arena_peak_bytes);
  Print("arena_resident", end.arena_resident_bytes);
  Print("peak_counted", peaks.counted);
  Print("peak_over", peaks.over);
  Print("peak_dormant", peaks.dormant);
  Print("steps_over", peaks.steps_over);
  Print("steps_in_force", peaks.steps_in_force);
  Print("peak_workspace", peaks.workspace);
  Print("peak_rss_anon", peaks.rss_anon);
  Print("rss_high_water", StatusBytes("VmHWM"));
  std::printf("resident_error %.4f\n", peaks.resident_error);
  for (const char* device : {"QEVICT", "CPU"}) {
    const std::string mark = std::string(device) + " compute buffer size =";
    const size_t at = Log().rfind(mark);
    const double mib = at == std::string::npos ? 0.0 : std::atof(Log().c_str() + at + mark.size());
    std::printf("compute_%s %.0f\n", device, mib * 1048576.0);
  }
  return 0;
}

// --- plans -------------------------------------------------------------------------------------

struct HeldWindow {
  float score;
  uint8_t tier;  // 0 full, 1 packed
};
using LayerWindows = std::map<uint32_t, HeldWindow>;  // by birth

std::vector<LayerWindows> Windows(const Engine& engine) {
  std::vector<LayerWindows> layers(engine.stats().n_layers);
  std::vector<uint32_t> births(engine.stats().cells_per_stream);
  std::vector<uint8_t> tiers(births.size());
  std::vector<float> scores(births.size());
  for (uint32_t il = 0; il < layers.size(); ++il) {
    const int n = Plugin::Get().get_layer(engine.session(), 0, il, births.data(), tiers.data(),
                                          scores.data(), static_cast<uint32_t>(births.size()));
    if (n < 0) Fail(Plugin::Get().last_error());
    for (size_t i = 0; i < static_cast<size_t>(n); ++i)
      layers[il][births[i]] = {scores[i], tiers[i]};
  }
  return layers;
}

// Every event's decisions on the text's own tokens: `window EVENT LAYER BIRTH SCORE TIER`, with the
// score that was decided by and the tier that came of it (2: evicted).
int Plans(const Options& options) {
  Engine engine(options.text("model"), Settings(options));
  const uint32_t n_prompt = options.number("prompt"), n_steps = options.number("generate");
  std::vector<llama_token> tokens = engine.Tokenize(ReadText(options), n_prompt + n_steps);
  engine.Prompt({tokens.begin(), tokens.begin() + n_prompt}, 0);
  uint64_t n_events = engine.stats().events;
  for (uint32_t i = 0; i < n_steps; ++i) {
    const std::vector<LayerWindows> before = Windows(engine);
    const uint32_t at = n_prompt + i;
    if (engine.Decode(&tokens[at], 1, static_cast<llama_pos>(at), 0) != 0) {
      Fail("llama_decode failed");
    }
    if (std::exchange(n_events, engine.stats().events) == n_events) continue;
    const std::vector<LayerWindows> after = Windows(engine);
    for (size_t il = 0; il < before.size(); ++il) {
      for (const auto& [birth, window] : before[il]) {
        const auto found = after[il].find(birth);
        std::printf("window %u %zu %u %.9g %d\n", i, il, birth, static_cast<double>(window.score),
                    found == after[il].end() ? 2 : found->second.tier);
      }
    }
  }
  return 0;
}

// --- state -------------------------------------------------------------------------------------

void Damage(const std::string& kind, std::vector<uint8_t>& state) {
  const size_t n = state.size();
  if (kind == "truncate") state.resize(n / 2);
  if (kind == "head") state.resize(24);
  if (kind == "zero") std::fill(state.begin(), state.end(), uint8_t{0});
  if (kind == "rows")
    std::fill(state.begin() + static_cast<ptrdiff_t>(n / 3), state.end(), uint8_t{0});
  if (kind == "flip") {
    for (size_t i = n / 4; i < n; i += 101) state[i] ^= 0x5A;
  }
}

// Greedy continuation, with the logits of each step.
struct Continuation {
  std::vector<llama_token> tokens;
  std::vector<std::vector<float>> logits;

  void Run(Engine& engine, std::vector<llama_token> history, llama_token next, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
      history.push_back(next);
      const auto pos = static_cast<llama_pos>(history.size() - 1);
      if (engine.Decode(&history.back(), 1, pos, 0) != 0) Fail("llama_decode failed");
      logits.emplace_back(engine.logits(-1), engine.logits(-1) + engine.n_vocab());
      next = engine.Greedy(-1);
      tokens.push_back(next);
    }
  }
};

// Prompt, some tokens; one engine goes on, the other is saved, emptied and restored before.
int State(const Options& options) {
  const uint32_t n_more = options.number("continue", 32);
  const std::string damage = options.text("damage", "");
  const std::string text = ReadText(options);
  const auto begin = [&](Engine& engine) {
    std::vector<llama_token> tokens = engine.Tokenize(text, options.number("prompt"));
    engine.Prompt(tokens, 0);
    engine.Generate(tokens, options.number("generate"), 0);
    return tokens;
  };
  Continuation stayed, returned;
  {
    Engine engine(options.text("model"), Settings(options));
    const std::vector<llama_token> tokens = begin(engine);
    stayed.Run(engine, tokens, engine.Greedy(-1), n_more);
    PrintStats("stayed_", engine.stats());
  }
  Engine engine(options.text("model"), Settings(options));
  std::vector<llama_token> tokens = begin(engine);
  const llama_token next = engine.Greedy(-1);
  PrintStats("saved_", engine.stats());
  std::vector<uint8_t> state(llama_state_seq_get_size(engine.context(), 0));
  state.resize(llama_state_seq_get_data(engine.context(), state.data(), state.size(), 0));
  Print("state", state.size());
  Damage(damage, state);
  if (!llama_memory_seq_rm(engine.memory(), 0, -1, -1)) Fail("the sequence cannot be removed");
  const size_t read = llama_state_seq_set_data(engine.context(), state.data(), state.size(), 0);
  Print("restored", read);
  if (read != 0) {
    PrintStats("restored_", engine.stats());
    returned.Run(engine, tokens, next, n_more);
    PrintStats("returned_", engine.stats());
    Divergence divergence;
    uint32_t equal = 0;
    for (; equal < n_more; ++equal) {
      if (damage.empty()) {
        divergence.Add(stayed.logits[equal].data(), returned.logits[equal].data(),
                       engine.n_vocab());
      }
      if (stayed.tokens[equal] != returned.tokens[equal]) break;
    }
    Print("equal", equal);
    divergence.Print("");
  }
  // Whatever happened, the context still works.
  llama_memory_clear(engine.memory(), true);
  tokens.resize(64);
  engine.Prompt(tokens, 0);
  engine.Generate(tokens, 8, 0);
  PrintStats("usable_", engine.stats());
  return 0;
}

// --- fork, contexts, abort -----------------------------------------------------------------------

// One prompt, copied to a second sequence; both go on differently, then the first one is removed.
int Fork(const Options& options) {
  ContextSettings settings = Settings(options);
  settings.n_seq_max = 2;
  settings.unified = options.number("unified") != 0;
  Engine ours(options.text("model"), settings);
  settings.config.clear();
  settings.flash_attention = false;
  Engine reference(options.text("model"), settings);
  const std::vector<llama_token> tokens =
      ours.Tokenize(ReadText(options), options.number("prompt") + 200);
  const std::vector<llama_token> prompt(tokens.begin(), tokens.end() - 200);
  for (Engine* engine : {&reference, &ours}) {
    engine->Prompt(prompt, 0);
    llama_memory_seq_cp(engine->memory(), 0, 1, -1, -1);
  }
  Divergence both, rest;
  const auto pos0 = static_cast<llama_pos>(prompt.size());
  for (llama_pos i = 0; i < 80; ++i) {
    const std::vector<llama_token> side = {tokens[prompt.size() + i],
                                           tokens[prompt.size() + 100 + i]};
    for (Engine* engine : {&reference, &ours}) {
      if (engine->DecodeSide(side, {pos0 + i, pos0 + i}) != 0) Fail("llama_decode failed");
    }
    for (int32_t s = 0; s < 2; ++s) both.Add(reference.logits(s), ours.logits(s), ours.n_vocab());
  }
  both.Print("both_");
  for (Engine* engine : {&reference, &ours}) llama_memory_seq_rm(engine->memory(), 0, -1, -1);
  for (llama_pos i = 80; i < 100; ++i) {
    for (Engine* engine : {&reference, &ours}) {
      if (engine->Decode(&tokens[prompt.size() + 100 + i], 1, pos0 + i, 1) != 0)
        Fail("llama_decode failed");
    }
    rest.Add(reference.logits(-1), ours.logits(-1), ours.n_vocab());
  }
  rest.Print("rest_");
  PrintStats("end_", ours.stats());
  return 0;
}

// Two models with caches of their own in one process, step by step, write what each writes alone.
int Contexts(const Options& options) {
  ContextSettings first = Settings(options), second = first;
  second.config = options.text("second-config");
  const std::string text = ReadText(options);
  const auto alone = [&](const std::string& path, const ContextSettings& settings) {
    Engine engine(path, settings);
    std::vector<llama_token> tokens = engine.Tokenize(text, options.number("prompt"));
    engine.Prompt(tokens, 0);
    engine.Generate(tokens, options.number("generate"), 0);
    return tokens;
  };
  const std::vector<llama_token> expected_a = alone(options.text("model"), first);
  const std::vector<llama_token> expected_b = alone(options.text("second"), second);
  Engine a(options.text("model"), first), b(options.text("second"), second);
  std::vector<llama_token> tokens_a = a.Tokenize(text, options.number("prompt"));
  std::vector<llama_token> tokens_b = b.Tokenize(text, options.number("prompt"));
  a.Prompt(tokens_a, 0);
  b.Prompt(tokens_b, 0);
  for (uint32_t i = 0; i < options.number("generate"); ++i) {
    a.Generate(tokens_a, 1, 0);
    b.Generate(tokens_b, 1, 0);
  }
  Print("same_a", tokens_a == expected_a);
  Print("same_b", tokens_b == expected_b);
  Print("sessions_differ", a.session() != b.session());
  PrintStats("a_", a.stats());
  PrintStats("b_", b.stats());
  return 0;
}

// A decode that the host aborts, and one after it.
int Abort(const Options& options) {
  Engine engine(options.text("model"), Settings(options));
  const std::vector<llama_token> tokens =
      engine.Tokenize(ReadText(options), options.number("prompt"));
  int calls_left = 3;
  llama_set_abort_callback(
      engine.context(), [](void* data) { return --*static_cast<int*>(data) < 0; }, &calls_left);
  Print("aborted", static_cast<uint64_t>(engine.Decode(tokens.data(), 64, 0, 0)));
  llama_set_abort_callback(engine.context(), nullptr, nullptr);
  llama_memory_clear(engine.memory(), true);
  engine.Prompt(tokens, 0);
  Print("decoded", 0);
  return 0;
}

int Main(int argc, char** argv) {
  const std::string command = argc > 1 ? argv[1] : "";
  const Options options(argc - 2, argv + 2);
  if (command == "logits") return Logits(options);
  if (command == "greedy") return Greedy(options);
  if (command == "budget") return Budget(options);
  if (command == "plans") return Plans(options);
  if (command == "state") return State(options);
  if (command == "fork") return Fork(options);
  if (command == "contexts") return Contexts(options);
  if (command == "abort") return Abort(options);
  Fail("no command `" + command + "`");
}

}  // namespace
}  // namespace probe

int main(int argc, char** argv) { return probe::Main(argc, argv); }
