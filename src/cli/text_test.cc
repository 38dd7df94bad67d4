#include "cli/text.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cli/report.h"

namespace qevict::cli {
namespace {

TEST(TextTest, Numbers) {
  EXPECT_EQ(BytesText(0), "0 B");
  EXPECT_EQ(BytesText(1023), "1023 B");
  EXPECT_EQ(BytesText(1536), "1.50 KiB");
  EXPECT_EQ(BytesText(uint64_t{5} << 30), "5.00 GiB");
  EXPECT_EQ(CountText(0), "0");
  EXPECT_EQ(CountText(999), "999");
  EXPECT_EQ(CountText(1000), "1,000");
  EXPECT_EQ(CountText(1234567), "1,234,567");
  EXPECT_EQ(FixedText(2.345, 1), "2.3");
}

TEST(TextTest, MarkdownAlignsNumbersRight) {
  Table table({{"name", ""}, {"bytes", "bytes"}});
  table.Add({TextCell("a"), BytesCell(2048)});
  table.Add({TextCell("bb"), CountCell(7)});
  EXPECT_EQ(table.ToMarkdown(),
            "|     |    bytes |\n"
            "| --- | --------:|\n"
            "| a   | 2.00 KiB |\n"
            "| bb  |        7 |\n");
}

TEST(TextTest, CsvHasExactNumbersAndQuotesWhatNeedsIt) {
  Table table({{"name", "Name"}, {"bytes", "Bytes"}, {"x", "X"}});
  table.Add({TextCell("a,\"b\""), BytesCell(2048), FixedCell(0.5, 1)});
  table.Add({TextCell("c")});
  EXPECT_EQ(table.ToCsv(), "name,bytes,x\n\"a,\"\"b\"\"\",2048,0.5\nc,,\n");
}

TEST(TextTest, JsonHasExactNumbersAndNoNan) {
  Table table({{"bytes", ""}, {"ratio", ""}});
  table.Add({BytesCell(2048), FixedCell(std::nan(""), 2)});
  EXPECT_EQ(JsonLine(table.ToJson()), R"([{"bytes":2048,"ratio":null}])");
}

TEST(TextTest, JsonReplacesBrokenUtf8) { EXPECT_EQ(JsonLine(Json("a\xC3")), "\"a\xEF\xBF\xBD\""); }

TEST(ReportTest, DotsNest) {
  const Metrics metrics = {{"a", "A", CountCell(1)}, {"kv.b", "B", CountCell(2)}};
  EXPECT_EQ(JsonLine(ToJson(metrics)), R"({"a":1,"kv":{"b":2}})");
}

TEST(ReportTest, ColumnsAreJoinedByKey) {
  const Metrics full = {{"a", "A", CountCell(1)}};
  const Metrics ours = {{"a", "A", CountCell(3)}, {"b", "B", CountCell(4)}};
  EXPECT_EQ(ToTable({{"full", full}, {"ours", ours}}).ToCsv(), "metric,full,ours\na,1,3\nb,,4\n");
}

TEST(ReportTest, TimesFollowTheirDefinitions) {
  Generation g;
  g.tokens = {1, 2, 3, 4};
  g.prompt_ms = 500.0;
  g.ttft_ms = 510.0;
  g.itl_ms = {10.0, 20.0, 60.0};
  const Json json = ToJson(TimeMetrics(1000, g));
  EXPECT_EQ(json["ttft_ms"], 510.0);
  EXPECT_EQ(json["tpot_ms"], 30.0);  // (end to end - TTFT) / (tokens - 1)
  EXPECT_EQ(json["itl_p50_ms"], 20.0);
  EXPECT_EQ(json["prompt_tokens_per_s"], 2000.0);
  EXPECT_NEAR(json["generation_tokens_per_s"].get<double>(), 1000.0 / 30.0, 1e-9);
}

TEST(ReportTest, ShareCountsEverythingThatTheBudgetLimits) {
  qevict_stats s{};
  s.full_bytes = 10;
  s.packed_bytes = 20;
  s.dormant_bytes = 3;
  s.tables_bytes = 4;
  s.slack_bytes = 3;
  s.f16_bytes = 400;
  EXPECT_EQ(TotalBytes(s), 40u);
  EXPECT_DOUBLE_EQ(SharePercent(s), 10.0);
  EXPECT_DOUBLE_EQ(SharePercent(qevict_stats{}), 0.0);
}

}  // namespace
}  // namespace qevict::cli
