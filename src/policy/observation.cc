#include "policy/observation.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "policy/parts.h"

namespace qevict::parts {
namespace {

/// Where masses are read from: by token, or sums of windows.
struct Masses {
  std::span<const float> tokens, sums;
};

/// The last prompt's rows, by token if that is known. If they have looked at nothing yet (a prompt
/// has just begun), all that was earned before.
Masses ChooseMasses(const GroupView& g) {
  const auto known = [](std::span<const float> x) {
    return std::any_of(x.begin(), x.end(), [](float mass) { return mass > 0.0f; });
  };
  if (known(g.tokens)) return {g.tokens, {}};
  const std::span<const float> prompt = g.stat(Stat::kPromptMass);
  return {{}, known(prompt) ? prompt : g.stat(Stat::kScore)};
}

/// Mass of the tokens of windows [begin, end), one after the other.
std::vector<float> TokenMasses(const GroupView& g, const Masses& masses, uint32_t window,
                               size_t begin, size_t end) {
  std::vector<float> mass;
  for (size_t i = begin; i < end; ++i) {
    for (size_t t = 0; t < g.n_tokens[i]; ++t) {
      if (!masses.tokens.empty()) {
        mass.push_back(masses.tokens[i * window + t]);
      } else {
        mass.push_back(masses.sums.empty() ? 0.0f
                                           : masses.sums[i] / static_cast<float>(g.n_tokens[i]));
      }
    }
  }
  return mass;
}

float Reduce(std::span<const float> tokens, bool maximum) {
  if (tokens.empty()) return 0.0f;
  double sum = 0.0;
  for (const float x : tokens) sum += static_cast<double>(x);
  return maximum ? *std::max_element(tokens.begin(), tokens.end())
                 : static_cast<float>(sum / static_cast<double>(tokens.size()));
}

/// One past the last window that is not protected.
size_t EndOfHistory(const GroupView& g) {
  size_t end = g.size();
  while (end > 0 && g.is_protected[end - 1]) --end;
  return end;
}

/// One past the last window that has mass.
size_t EndOfObserved(const GroupView& g, const Masses& masses, uint32_t window) {
  for (size_t i = g.size(); i > 0; --i) {
    const std::vector<float> mass = TokenMasses(g, masses, window, i - 1, i);
    if (std::any_of(mass.begin(), mass.end(), [](float x) { return x > 0.0f; })) return i;
  }
  return 0;
}

/// Pooled score of every window before the protected ones at the end.
std::vector<float> Scores(const GroupView& g, const Masses& masses, uint32_t window,
                          const Pooling& pooling) {
  std::vector<float> scores;
  const size_t n = EndOfHistory(g);
  for (size_t begin = 0; begin < n;) {
    size_t end = begin + 1;
    while (end < n && g.position[end] == g.position[end - 1] + g.n_tokens[end - 1]) ++end;
    const std::vector<float> pooled =
        Pool(TokenMasses(g, masses, window, begin, end), pooling.kernel | 1, pooling.maximum);
    std::span<const float> rest(pooled);
    for (; begin < end; ++begin) {
      scores.push_back(Reduce(rest.first(g.n_tokens[begin]), pooling.window_max));
      rest = rest.subspan(g.n_tokens[begin]);
    }
  }
  return scores;
}

}  // namespace

bool RanksBefore(const Ranked& a, const Ranked& b) {
  if (a.kind != b.kind) return a.kind < b.kind;
  if (a.kind != Ranked::kObserved) return a.position > b.position;
  const bool a_nan = std::isnan(a.score), b_nan = std::isnan(b.score);
  if (a_nan != b_nan) return b_nan;
  if (!a_nan && a.score != b.score) return a.score > b.score;
  return a.position < b.position;
}

std::vector<Ranked> RankObserved(const GroupView& g, uint32_t window, const Pooling& pooling) {
  const Masses masses = ChooseMasses(g);
  const std::vector<float> scores = Scores(g, masses, window, pooling);
  const size_t observed = EndOfObserved(g, masses, window);
  std::vector<Ranked> ranking;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (g.is_protected[i]) continue;
    const Ranked::Class kind = !g.visible[i]  ? Ranked::kInvisible
                               : i < observed ? Ranked::kObserved
                                              : Ranked::kGenerated;
    ranking.push_back({kind, scores[i], g.position[i], i});
  }
  std::sort(ranking.begin(), ranking.end(), RanksBefore);
  return ranking;
}

void KeepFirst(const GroupView& g, const std::vector<Ranked>& ranking, size_t n, uint64_t& bytes,
               std::vector<Placement>& placements) {
  for (size_t r = 0; r < ranking.size(); ++r) {
    const size_t i = ranking[r].window;
    if (r < n && g.bytes[i] <= bytes) {
      bytes -= g.bytes[i];
    } else {
      placements[i] = {};
      n = 0;
    }
  }
}

}  // namespace qevict::parts
