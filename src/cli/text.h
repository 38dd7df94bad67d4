// Text of numbers for people, and tables as Markdown, CSV or JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace qevict::cli {

using Json = nlohmann::ordered_json;

enum class Format : unsigned char { kMarkdown, kCsv, kJson, kJsonLines };

/// One value: exact for programs, readable for people.
struct Cell {
  Json value;        ///< null prints as nothing
  std::string text;  ///< Markdown; made from `value` where empty
};

/// "12.34 MiB"; the exact number stays in the cell's value.
std::string BytesText(uint64_t bytes);
/// "8,192"
std::string CountText(uint64_t n);
/// Fixed decimals: FixedText(3.14159, 2) = "3.14"; "nan" and "inf" as such.
std::string FixedText(double x, int decimals);

Cell BytesCell(uint64_t bytes);
Cell CountCell(uint64_t n);
Cell FixedCell(double x, int decimals);
Cell PercentCell(double percent, int decimals = 1);
Cell TextCell(std::string text);

/// Rows of cells under named columns.
class Table {
 public:
  struct Column {
    std::string key;    ///< CSV header, JSON member
    std::string label;  ///< Markdown header
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// Missing cells at the end are empty.
  void Add(std::vector<Cell> row);
  size_t n_rows() const { return rows_.size(); }
  /// Aligned columns.
  std::string ToMarkdown() const;
  /// RFC 4180: header line, fields quoted where needed.
  std::string ToCsv() const;
  /// An array of objects, one per row.
  Json ToJson() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

/// One line of JSON; bytes that are not UTF-8 become U+FFFD.
std::string JsonLine(const Json& json);
/// The same over several lines.
std::string JsonText(const Json& json);

}  // namespace qevict::cli
