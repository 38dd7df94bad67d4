#include "cli/text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace qevict::cli {
namespace {

constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};

std::string CsvField(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

std::string CsvText(const Json& value) {
  if (value.is_null()) return "";
  if (value.is_string()) return value.get<std::string>();
  return value.dump();
}

std::string MarkdownText(const Cell& cell) {
  return cell.text.empty() ? CsvText(cell.value) : cell.text;
}

/// Columns a terminal shows: bytes that do not continue a UTF-8 character.
size_t Width(const std::string& text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string Padded(const std::string& text, size_t width, bool right) {
  const std::string space(width - std::min(width, Width(text)), ' ');
  return right ? space + text : text + space;
}

}  // namespace

std::string FixedText(double x, int decimals) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", decimals, x);
  return text;
}

std::string BytesText(uint64_t bytes) {
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < std::size(kUnits)) {
    value /= 1024.0;
    ++unit;
  }
  return FixedText(value, unit == 0 ? 0 : 2) + " " + kUnits[unit];
}

std::string CountText(uint64_t n) {
  std::string digits = std::to_string(n);
  for (size_t at = digits.size(); at > 3;) {
    at -= 3;
    digits.insert(at, ",");
  }
  return digits;
}

Cell BytesCell(uint64_t bytes) { return {bytes, BytesText(bytes)}; }
Cell CountCell(uint64_t n) { return {n, CountText(n)}; }
Cell FixedCell(double x, int decimals) {
  // JSON has no NaN and no infinity.
  return {std::isfinite(x) ? Json(x) : Json(nullptr), FixedText(x, decimals)};
}
Cell PercentCell(double percent, int decimals) {
  return {std::isfinite(percent) ? Json(percent) : Json(nullptr),
          FixedText(percent, decimals) + "%"};
}
Cell TextCell(std::string text) { return {text, text}; }

void Table::Add(std::vector<Cell> row) {
  row.resize(columns_.size());
  rows_.push_back(std::move(row));
}

std::string Table::ToMarkdown() const {
  std::vector<size_t> widths;
  std::vector<bool> right;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = std::max<size_t>(3, Width(columns_[c].label));
    bool numeric = c > 0;
    for (const auto& row : rows_) width = std::max(width, Width(MarkdownText(row[c])));
    for (const auto& row : rows_) numeric &= !row[c].value.is_string();
    widths.push_back(width);
    right.push_back(numeric);
  }
  std::string out = "|";
  for (size_t c = 0; c < columns_.size(); ++c) {
    out += " " + Padded(columns_[c].label, widths[c], right[c]) + " |";
  }
  out += "\n|";
  for (size_t c = 0; c < columns_.size(); ++c) {
    out += (right[c] ? " " + std::string(widths[c], '-') + ":|"
                     : " " + std::string(widths[c], '-') + " |");
  }
  for (const auto& row : rows_) {
    out += "\n|";
    for (size_t c = 0; c < columns_.size(); ++c) {
      out += " " + Padded(MarkdownText(row[c]), widths[c], right[c]) + " |";
    }
  }
  return out + "\n";
}

std::string Table::ToCsv() const {
  std::string out;
  for (size_t c = 0; c < columns_.size(); ++c) {
    out += (c ? "," : "") + CsvField(columns_[c].key);
  }
  out += "\n";
  for (const auto& row : rows_) {
    for (size_t c = 0; c < row.size(); ++c) out += (c ? "," : "") + CsvField(CsvText(row[c].value));
    out += "\n";
  }
  return out;
}

Json Table::ToJson() const {
  Json rows = Json::array();
  for (const auto& row : rows_) {
    Json object = Json::object();
    for (size_t c = 0; c < columns_.size(); ++c) object[columns_[c].key] = row[c].value;
    rows.push_back(std::move(object));
  }
  return rows;
}

std::string JsonLine(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}
std::string JsonText(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace);
}

}  // namespace qevict::cli
