#include "codecs/statistics.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <optional>

#include "base/file.h"

namespace qevict::codecs {
namespace {

constexpr std::string_view kMagic = "qevict-codec-statistics 1";
constexpr size_t kMaxFileBytes = size_t{64} << 20;
constexpr float kMaxNumber = 65504.0f;  ///< of f16: no key or value is larger
constexpr uint32_t kMaxLayers = 1024, kMaxHeads = 1024, kMaxDim = 512;

// ---- Out ----

void PutNumbers(std::string& out, std::string_view name, std::span<const double> x,
                double divisor) {
  out += name;
  for (const double each : x) {
    char buffer[32];
    const auto value = static_cast<float>(each / divisor);
    out += ' ';
    out.append(buffer, std::to_chars(buffer, buffer + sizeof(buffer), value).ptr);
  }
  out += '\n';
}

// ---- In ----

/// Takes the text apart, line by line and word by word.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  /// The next line; false at the end.
  bool NextLine() {
    if (text_.empty()) return false;
    const size_t end = text_.find('\n');
    line_ = text_.substr(0, end);
    text_ = end == std::string_view::npos ? std::string_view{} : text_.substr(end + 1);
    ++n_;
    return true;
  }
  std::string_view line() const { return line_; }

  std::string_view Word() {
    const size_t end = line_.find(' ');
    const std::string_view word = line_.substr(0, end);
    line_ = end == std::string_view::npos ? std::string_view{} : line_.substr(end + 1);
    return word;
  }
  template <typename T>
  bool Number(T& value, int base = 10) {
    const std::string_view word = Word();
    const char* end = word.data() + word.size();
    std::from_chars_result result{};
    if constexpr (std::is_integral_v<T>) {
      result = std::from_chars(word.data(), end, value, base);
    } else {
      result = std::from_chars(word.data(), end, value);
    }
    return result.ec == std::errc() && result.ptr == end && !word.empty();
  }
  /// True if the next line begins with this word.
  bool NextIs(std::string_view name) const {
    return text_.starts_with(name) && text_.substr(name.size()).starts_with(" ");
  }
  /// A line `name` and n finite numbers, times `factor`.
  bool Numbers(std::string_view name, size_t n, double factor, bool squares,
               std::vector<double>& out) {
    if (!NextLine() || Word() != name) return false;
    out.resize(n);
    for (double& x : out) {
      float value = 0.0f;
      if (!Number(value)) return false;
      if (!(std::fabs(value) <= (squares ? kMaxNumber * kMaxNumber : kMaxNumber))) return false;
      if (squares && value < 0.0f) return false;
      x = double{value} * factor;
    }
    return line_.empty();
  }
  Status Bad(std::string_view expected) const {
    return InvalidArgument("line " + std::to_string(std::max<size_t>(n_, 1)) +
                           " of the codec statistics is damaged: " + std::string(expected) +
                           " is expected");
  }

 private:
  std::string_view text_, line_;
  size_t n_ = 0;
};

bool ReadShape(Reader& in, LayerStatistics& layer, uint64_t& n_tokens) {
  RowShape& s = layer.shape;
  const auto is_dim = [](uint32_t d) { return d >= 1 && d <= kMaxDim; };
  return in.Number(layer.model_layer) && in.Number(s.n_kv_heads) && in.Number(s.head_dim) &&
         in.Number(s.head_dim_v) && in.Number(n_tokens) && in.line().empty() &&
         layer.model_layer < kMaxLayers && s.n_kv_heads >= 1 && s.n_kv_heads <= kMaxHeads &&
         is_dim(s.head_dim) && is_dim(s.head_dim_v) && n_tokens >= 1 && n_tokens < UINT32_MAX;
}

Status ReadHeads(Reader& in, LayerStatistics& layer, uint64_t n_tokens) {
  const auto n = static_cast<double>(n_tokens);
  layer.has_loss = in.NextIs("loss");
  if (layer.has_loss) {
    std::vector<double> loss;
    if (!in.Numbers("loss", 4, 1.0, false, loss)) return in.Bad("loss and four numbers");
    layer.k_loss = {loss[0], loss[1]};
    layer.v_loss = {loss[2], loss[3]};
  }
  layer.heads.resize(layer.shape.n_kv_heads);
  for (WaterFillStats& h : layer.heads) {
    h.n = n_tokens;
    if (!in.Numbers("k_mean", layer.shape.head_dim, n, false, h.k_sum)) return in.Bad("k_mean");
    if (!in.Numbers("k_square", layer.shape.head_dim, n, true, h.k_square))
      return in.Bad("k_square");
    for (size_t c = 0; c < h.k_sum.size(); ++c) {
      const double mean = h.k_sum[c] / n;
      if (mean * mean > 1.001 * h.k_square[c] / n + 1e-6)
        return in.Bad("k_square of no less than the mean's square");
    }
    if (!in.Numbers("v_square", layer.shape.head_dim_v, n, true, h.v_square))
      return in.Bad("v_square");
    if (!in.Numbers("q_square", layer.shape.head_dim, n, true, h.q_square))
      return in.Bad("q_square");
    const auto is_zero = [](double x) { return x == 0.0; };
    if (std::all_of(h.q_square.begin(), h.q_square.end(), is_zero)) h.q_square.clear();
  }
  return {};
}

}  // namespace

const LayerStatistics* CodecStatistics::Find(uint32_t model_layer) const {
  for (const LayerStatistics& layer : layers) {
    if (layer.model_layer == model_layer) return &layer;
  }
  return nullptr;
}

const LayerStatistics* CodecStatistics::Find(uint32_t model_layer, const RowShape& shape) const {
  const LayerStatistics* layer = Find(model_layer);
  const bool fits = layer != nullptr && layer->shape.n_kv_heads == shape.n_kv_heads &&
                    layer->shape.head_dim == shape.head_dim &&
                    layer->shape.head_dim_v == shape.head_dim_v;
  return fits ? layer : nullptr;
}

std::string HashText(uint64_t hash) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

std::string WriteStatistics(const CodecStatistics& statistics) {
  std::string out(kMagic);
  out += "\nmodel " + HashText(statistics.model_hash) + "\n";
  for (const LayerStatistics& layer : statistics.layers) {
    const RowShape& s = layer.shape;
    const uint64_t n_tokens = layer.heads.empty() ? 0 : layer.heads[0].n;
    out += "layer " + std::to_string(layer.model_layer) + " " + std::to_string(s.n_kv_heads) + " " +
           std::to_string(s.head_dim) + " " + std::to_string(s.head_dim_v) + " " +
           std::to_string(n_tokens) + "\n";
    if (layer.has_loss) {
      const double loss[] = {layer.k_loss[0], layer.k_loss[1], layer.v_loss[0], layer.v_loss[1]};
      PutNumbers(out, "loss", loss, 1.0);
    }
    const auto n = static_cast<double>(n_tokens);
    for (const WaterFillStats& h : layer.heads) {
      PutNumbers(out, "k_mean", h.k_sum, n);
      PutNumbers(out, "k_square", h.k_square, n);
      PutNumbers(out, "v_square", h.v_square, n);
      const std::vector<double> unknown(s.head_dim, 0.0);
      PutNumbers(out, "q_square", h.q_square.empty() ? unknown : h.q_square, n);
    }
  }
  return out + "end\n";
}

Result<CodecStatistics> ParseStatistics(std::string_view text) {
  Reader in(text);
  CodecStatistics statistics;
  if (!in.NextLine() || in.line() != kMagic) return in.Bad(kMagic);
  if (!in.NextLine() || in.Word() != "model" || in.line().size() != 16 ||
      !in.Number(statistics.model_hash, 16) || !in.line().empty()) {
    return in.Bad("model and 16 hexadecimal digits");
  }
  while (in.NextLine()) {
    const std::string_view word = in.Word();
    if (word == "end" && in.line().empty()) {
      if (in.NextLine()) return in.Bad("nothing behind the end");
      return statistics;
    }
    LayerStatistics layer;
    uint64_t n_tokens = 0;
    if (word != "layer" || !ReadShape(in, layer, n_tokens)) return in.Bad("a layer's shape");
    if (statistics.Find(layer.model_layer) != nullptr) return in.Bad("another layer");
    QEVICT_RETURN_IF_ERROR(ReadHeads(in, layer, n_tokens));
    statistics.layers.push_back(std::move(layer));
  }
  return in.Bad("end");
}

Status SaveStatistics(const std::string& path, const CodecStatistics& statistics) {
  const std::string text = WriteStatistics(statistics);
  std::FILE* file = std::fopen(path.c_str(), "wbe");
  const bool written =
      file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = file != nullptr && std::fclose(file) == 0;
  if (written && closed) return {};
  return FailedPrecondition("statistics file " + path + " cannot be written");
}

Result<CodecStatistics> ReadStatistics(const std::string& path) {
  const std::optional<std::string> text = ReadFile(path, kMaxFileBytes);
  if (!text) return NotFound("statistics file " + path + " cannot be read");
  if (text->size() > kMaxFileBytes) {
    return InvalidArgument("statistics file " + path + " is larger than 64 MiB");
  }
  Result<CodecStatistics> statistics = ParseStatistics(*text);
  if (statistics.ok()) return statistics;
  return Status(statistics.status().code(), "in " + path + ": " + statistics.status().message());
}

}  // namespace qevict::codecs
