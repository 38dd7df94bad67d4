// Config: every setting of a cache, and the text form users write it in.
// Text form (QEVICT_CONFIG, --set): comma-separated `key=value`, or a file with one `key = value`
// per line and `#` comments. Unknown keys, bad values and contradictions are refused with one
// sentence that names them. Sources of the defaults: QEvict (arXiv 2608.05326); what it leaves open
// is decided in docs/policies.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "qevict/status.h"

namespace qevict {

enum class Preset : uint8_t { kFull, kStreaming, kQEvict, kPack };
/// Format of packed windows; see src/codecs.
enum class CodecId : uint8_t {
  kKiviAxis,   ///< QEvict's: keys per channel over the window before RoPE, values per token
  kToken,      ///< keys (after RoPE) and values per token
  kWaterFill,  ///< static transform code: unequal bits, static mean, a scale per token
  // Formats of the field, to compare with; see the head of each file in src/codecs.
  kKiviClip,  ///< kivi with grids of least squared error
  kKiviPost,  ///< KIVI's own: keys after RoPE, values in groups of 32 channels
  kByteGrid,  ///< kivi with grids of one byte
  kKvQuant,   ///< non-uniform levels, 1% of the numbers exact
  kZipCache,  ///< static key grids, channel-separable values
  kOtt,       ///< kivi_post with an exact outlier token per window
  kNqkv,      ///< NormalFloat of 4 bits
  kHqe,       ///< HqeKV's: kivi_post, and a normal code of 1 bit
  kHadamard,  ///< rotated per token, Lloyd-Max levels, static mean
  kKvTuner,   ///< KVTuner's: bits per layer, keys and values apart
};
/// What a promotion does with a packed window that ranks as full precision.
enum class Promotion : uint8_t {
  kCodes,   ///< paper: dequantize the codes into full-precision rows; the codes stay as dormant
            ///< ledger entry
  kPinned,  ///< ranked as full, but stays packed: same values, fewer bytes (the saved bytes buy
            ///< packed windows)
  kNone,    ///< packed windows never return to full precision
};
/// When full precision may exceed the budget.
enum class Prefill : uint8_t {
  kAuto,     ///< kFull for a fraction, kBounded for absolute bytes
  kFull,     ///< paper: compress once, at the first routing event
  kBounded,  ///< compress after every prompt chunk: peak memory does not depend on the prompt
};
/// What the host program is told that the cache takes; programs fit layers and context to it.
enum class ReportedSize : uint8_t {
  kBudget,  ///< the most that can be resident: the budget with Prefill::kBounded, else f16
  kFull,    ///< always f16: for a ggml that was built with assertions, which refuse less
};
enum class ScoreKind : uint8_t { kCumulative, kEma, kPNorm, kKeyNorm };
enum class LocalMode : uint8_t {
  kAligned,  ///< a window ages when all its tokens are older than the last `recents`
  kWindows,  ///< the last recents/window windows, the partial one included
};

/// All settings of one cache. Plain values; thread-compatible.
struct Config {
  Preset preset = Preset::kQEvict;

  // Budget: exactly one of the two is in force. budget_bytes > 0 wins.
  double budget_fraction = 0.20;  ///< of the f16 cache, (0, 1]
  uint64_t budget_bytes = 0;      ///< absolute, over all layers and streams; 0 = use the fraction
  /// Tokens the fraction refers to (prompt + max_new). 0 = the cells of the stream (n_ctx).
  uint32_t budget_tokens = 0;

  uint32_t sinks = 5;     ///< first tokens of a sequence, always full precision
  uint32_t recents = 32;  ///< last tokens of a sequence, always full precision
  uint32_t recents_percent =
      0;  ///< if > 0: recents = percent of the tokens that the budget holds, whole windows
  uint32_t window = 8;        ///< Omega, tokens: 1, 2, 4, 8, 16 or 32
  uint32_t interval = 0;      ///< R, generated tokens between routing events; 0 = window
  uint32_t q_permille = 700;  ///< share of the history bytes that goes to the packed tier, 0...1000
  CodecId codec = CodecId::kKiviAxis;
  uint32_t bits = 2;          ///< of packed codes: 1, 2, 3, 4 or 8 (wf, hadamard, kvquant: 1 to 4)
  uint32_t quarter_bits = 0;  ///< wf: quarters of a bit more, 0...3 (average of K and V)
  /// The policy that plans; empty: the preset's. See `qevict policies` and qevict/policy.h.
  std::string policy;
  /// Parameters of the policy, as `NAME:VALUE/NAME:VALUE`.
  std::string params;
  /// The packed rungs, best first, as `4/2.5/1.5` (bits of `codec`) or `token:8/wf:2`; empty: one
  /// rung of `codec` and `bits`. At most kMaxRungs - 1.
  std::string rungs;
  /// kvtuner and wf: bits of keys and values by the model's layers, such as `*:4/2;0:8/8;1-3:4/4`
  /// (later items win); layers that it does not name, and an empty text: `bits` for both.
  std::string layer_bits;
  /// wf: file of `qevict calibrate codec` whose statistics are used instead of the prompt's.
  std::string statistics;
  Promotion promotion = Promotion::kCodes;
  Prefill prefill = Prefill::kAuto;
  ReportedSize report = ReportedSize::kBudget;
  LocalMode local_mode = LocalMode::kAligned;
  bool charge_dormant = true;  ///< dormant codes reduce the packed capacity
  bool fill_slack =
      false;              ///< windows never quantized stay full precision while bytes are left over
  bool per_head = false;  ///< one ranking per kv head instead of one per layer
  bool event_scores = false;  ///< ablation: only the step of an event is scored (times interval)
  uint32_t init_rows = 64;    ///< prompt rows that initialise scores: the last m, 0 = all
  uint32_t first_event = 0;   ///< decode step of the first routing event
  ScoreKind score = ScoreKind::kCumulative;
  double ema_lambda = 0.99;  ///< decay per query of ScoreKind::kEma, (0, 1)
  double p_norm = 2.0;       ///< exponent of ScoreKind::kPNorm, >= 1
  int key_norm_sign = -1;    ///< ScoreKind::kKeyNorm: -1 = small norms are kept

  bool check = false;  ///< run the validator after every commit (also QEVICT_CHECK=1)

  bool operator==(const Config&) const = default;

  uint32_t EffectiveInterval() const { return interval ? interval : window; }
  Prefill EffectivePrefill() const {
    if (prefill != Prefill::kAuto) return prefill;
    return budget_bytes ? Prefill::kBounded : Prefill::kFull;
  }
};

/// Quarters of a bit per number of a layer's packed keys and values; 0: Config::bits.
struct LayerBits {
  uint8_t k = 0, v = 0;
  bool operator==(const LayerBits&) const = default;
};
/// One packed rung.
struct RungSpec {
  CodecId codec;
  uint32_t quarter_bits;  ///< quarters of a bit per number
  bool operator==(const RungSpec&) const = default;
};
/// The packed rungs of a valid configuration, best first.
std::vector<RungSpec> RungsOf(const Config& config);
/// What Config::layer_bits says of a layer of the model.
LayerBits BitsOfLayer(const Config& config, uint32_t model_layer);
/// The average over layers that Config::layer_bits asks for, 1 to 4; none if it is a list.
std::optional<double> AverageLayerBits(const Config& config);
/// The highest layer that Config::layer_bits names; none if it names none, or all by `*`.
std::optional<uint32_t> HighestLayerNamed(const Config& config);

/// Parses the text form on top of the defaults (or of `base`).
/// Keys: preset budget budget_tokens sinks recents window interval q policy params codec bits rungs
/// layer_bits statistics promotion prefill report local_mode charge_dormant fill_slack per_head
/// scores init_rows first_event score ema_lambda p_norm key_norm_sign check. `budget`: `20%`,
/// `0.2`, or bytes with unit (`512MiB`, `2GiB`, `1000000B`, `64KiB`). `recents`: tokens or `25%`.
/// `q`: 0...1. Errors: kInvalidArgument naming the key, the value and the legal range. Never
/// throws.
Result<Config> ParseConfig(std::string_view text, const Config& base = {});
/// ParseConfig, or, where `text` names a readable file (contains no '='), of the file's contents.
/// kNotFound if neither.
Result<Config> LoadConfig(std::string_view text_or_path, const Config& base = {});
/// Parses one budget value into `config`.
Status ParseBudget(std::string_view text, Config& config);
/// Range and consistency checks of a filled Config; ParseConfig ends with it.
Status ValidateConfig(const Config& config);
/// The canonical text form: ParseConfig(ToText(c)) == c.
std::string ToText(const Config& config);
const char* PresetName(Preset preset);
/// As in `codec=`.
const char* CodecName(CodecId codec);

}  // namespace qevict
