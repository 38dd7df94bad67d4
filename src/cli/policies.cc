// qevict policies: what policies there are, from their own descriptions (qevict/policy.h).
#include <algorithm>
#include <cstdio>

#include "cache/units.h"
#include "cli/commands.h"
#include "cli/run.h"
#include "qevict/policy.h"

namespace qevict::cli {
namespace {

struct PoliciesOptions {
  std::string explained;
  Format format = Format::kMarkdown;
};

Cell Text(std::string_view text) { return TextCell(std::string(text)); }

/// A number as people write it: "5", "0.2".
Cell NumberCell(double x) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", x);
  return {x, text};
}

Table ListTable() {
  Table table({{"name", "policy"}, {"summary", "what it does"}, {"source", "source"}});
  for (const Policy* p : Policies()) table.Add({Text(p->name), Text(p->summary), Text(p->source)});
  return table;
}

Table ParamTable(const Policy& policy) {
  Table table({{"name", "parameter"},
               {"default", "default"},
               {"lowest", "lowest"},
               {"highest", "highest"},
               {"meaning", "meaning"}});
  for (const PolicyParam& p : policy.params) {
    table.Add({Text(p.name), NumberCell(p.standard), NumberCell(p.lowest), NumberCell(p.highest),
               Text(p.meaning)});
  }
  return table;
}

Table ColumnTable(const Policy& policy) {
  Table table({{"name", "reads"},
               {"window_bytes", "bytes per window"},
               {"token_bytes", "bytes per token"},
               {"meaning", "meaning"}});
  for (size_t i = 0; i < std::size(kStatInfo); ++i) {
    if ((policy.needs & Bit(static_cast<Stat>(i))) == 0) continue;
    const StatInfo& info = kStatInfo[i];
    table.Add({Text(info.name), CountCell(info.window_bytes), CountCell(info.token_bytes),
               Text(info.meaning)});
  }
  return table;
}

/// Records of a window in one layer, whatever the policy.
constexpr uint64_t kRecordBytes = kUnitBytes + kSides * kBlockBytes;

/// Lines of at most 100 characters.
std::string Wrapped(std::string_view text) {
  constexpr size_t kColumns = 100;
  std::string out, line;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    if (!line.empty() && line.size() + 1 + word.size() > kColumns) {
      out += line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + std::string(word);
  }
  return out + line + "\n";
}

std::string Explanation(const Policy& policy) {
  std::string out = std::string(policy.name) + ": " + std::string(policy.summary) + "\n\n";
  out += Wrapped(policy.rule);
  if (!policy.source.empty()) out += "\nSource: " + std::string(policy.source) + "\n";
  if (policy.params.empty()) {
    out += "\nIt has no parameters of its own.\n";
  } else {
    out += "\nParameters, set as --set params=NAME:VALUE/NAME:VALUE:\n\n" +
           ParamTable(policy).ToMarkdown();
  }
  out += "\nBytes: records of " + std::to_string(kRecordBytes) +
         " bytes for every window in every layer, charged to the budget, whatever the policy.\n";
  if (policy.needs == 0) return out + "It reads no statistics.\n";
  return out +
         "What it reads per window is part of them; what it reads per token is scratch while it "
         "plans.\n\n" +
         ColumnTable(policy).ToMarkdown();
}

/// One table: the policy's facts, its parameters and what it reads.
std::string ExplanationCsv(const Policy& policy) {
  Table table({{"kind", ""},
               {"name", ""},
               {"value", ""},
               {"lowest", ""},
               {"highest", ""},
               {"meaning", ""}});
  table.Add({TextCell("policy"), Text(policy.name), {}, {}, {}, Text(policy.summary)});
  table.Add({TextCell("rule"), Text(policy.name), {}, {}, {}, Text(policy.rule)});
  table.Add({TextCell("source"), Text(policy.name), {}, {}, {}, Text(policy.source)});
  for (const PolicyParam& p : policy.params) {
    table.Add({TextCell("parameter"), Text(p.name), NumberCell(p.standard), NumberCell(p.lowest),
               NumberCell(p.highest), Text(p.meaning)});
  }
  table.Add({TextCell("record_bytes"),
             TextCell("window"),
             CountCell(kRecordBytes),
             {},
             {},
             TextCell("of every window in every layer, whatever the policy")});
  for (const Json& column : ColumnTable(policy).ToJson()) {
    for (const char* unit : {"window_bytes", "token_bytes"}) {
      const uint64_t bytes = column[unit];
      if (bytes == 0) continue;
      table.Add({TextCell(unit),
                 Text(column["name"].get<std::string>()),
                 CountCell(bytes),
                 {},
                 {},
                 Text(column["meaning"].get<std::string>())});
    }
  }
  return table.ToCsv();
}

Json ExplanationJson(const Policy& policy) {
  return {{"name", policy.name},
          {"summary", policy.summary},
          {"source", policy.source},
          {"rule", policy.rule},
          {"parameters", ParamTable(policy).ToJson()},
          {"record_bytes", kRecordBytes},
          {"reads", ColumnTable(policy).ToJson()}};
}

int PrintList(Format format) {
  if (format == Format::kJson) {
    Json list = Json::array();
    for (const Policy* policy : Policies()) list.push_back(ExplanationJson(*policy));
    PrintText(JsonText({{"policies", list}}) + "\n");
    return kOk;
  }
  PrintText(format == Format::kCsv ? ListTable().ToCsv() : ListTable().ToMarkdown());
  return kOk;
}

int Run(const PoliciesOptions& o) {
  if (o.explained.empty()) return PrintList(o.format);
  Config config;
  config.policy = o.explained;
  if (const Status known = CheckPolicy(config); !known.ok()) return Fail(known);
  const Policy& policy = PolicyOf(config);
  if (o.format == Format::kJson) {
    PrintText(JsonText(ExplanationJson(policy)) + "\n");
    return kOk;
  }
  PrintText(o.format == Format::kCsv ? ExplanationCsv(policy) : Explanation(policy));
  return kOk;
}

}  // namespace

Command AddPolicies(CLI::App& root) {
  auto o = std::make_shared<PoliciesOptions>();
  CLI::App* app = root.add_subcommand("policies", "what decides where windows go, and how");
  SetHelp(*app, "Lists the policies, or explains one: its rule, its parameters, what it costs.",
          "qevict policies [--explain NAME] [-o md|csv|json]",
          "  qevict policies\n"
          "  qevict policies --explain snapkv\n");
  AddText(*app, "--explain", o->explained, "NAME", "rule, parameters and bytes of one policy")
      ->group("General");
  AddFormat(*app, o->format, "form of the output")->group("Output");
  return {app, [o] { return Run(*o); }};
}

}  // namespace qevict::cli
