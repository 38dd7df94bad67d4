#!/usr/bin/env python3
"""Tests check_layers.py on small trees with and without a violation."""

import pathlib
import tempfile
import unittest

import check_layers


class CheckLayersTest(unittest.TestCase):
    def problems(self, files):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text, encoding="utf-8")
            return check_layers.check(root)[1]

    def test_allowed_edges_pass(self):
        self.assertEqual([], self.problems({
            "include/qevict/cache.h": '#include "qevict/status.h"\n#include <span>\n',
            "src/base/arena.cc": '#include "base/arena.h"\n#include "qevict/status.h"\n',
            "src/cache/cache.cc": '#include "policy/planner.h"\n#include "kernels/attention.h"\n',
            "src/ggml/device.cc": '#include "ggml-backend-impl.h"\n#include "cache/cache.h"\n',
            "src/cli/main.cc": "#include <CLI/CLI.hpp>\n#include <llama.h>\n",
        }))

    def test_upward_edge_fails(self):
        problems = self.problems({"src/base/arena.cc": '#include <vector>\n#include "cache/cache.h"\n'})
        self.assertEqual(1, len(problems))
        self.assertIn("src/base/arena.cc:2", problems[0])

    def test_policy_sees_base_only(self):
        self.assertEqual(1, len(self.problems({"src/policy/a.cc": '#include "codecs/int2.h"\n'})))

    def test_ggml_only_in_its_folder(self):
        self.assertEqual(1, len(self.problems({"src/cache/a.cc": '#include "ggml.h"\n'})))
        self.assertEqual(1, len(self.problems({"src/cli/a.cc": '#include "ggml-backend.h"\n'})))
        self.assertEqual(1, len(self.problems({"src/ggml/a.cc": '#include "llama.h"\n'})))

    def test_installed_header_sees_no_module(self):
        self.assertEqual(1, len(self.problems({"include/qevict/a.h": '#include "base/arena.h"\n'})))

    def test_relative_include_fails(self):
        self.assertEqual(1, len(self.problems({"src/cache/a.cc": '#include "../base/arena.h"\n'})))

    def test_unknown_module_fails(self):
        self.assertEqual(1, len(self.problems({"src/misc/a.cc": "\n"})))

    def test_product_code_sees_no_test_helper(self):
        for header in ("kernels/testing/isa_test.h", "cache/test_support.h", "policy/testing.h"):
            for source, expected in (("a.cc", 1), ("a_test.cc", 0), ("a_bench.cc", 0), ("testing/a.cc", 0)):
                problems = self.problems({f"src/cache/{source}": f'#include "{header}"\n'})
                self.assertEqual(expected, len(problems), f"{source} {header} {problems}")

    def test_folders_inside_a_module(self):
        for source, header, expected in (
            ("cli/run.cc", "cli/bench/stats.h", 1),
            ("cli/run.cc", "cli/eval/kld.h", 1),
            ("cli/eval/kld.cc", "cli/bench/stats.h", 1),
            ("cli/bench/model.cc", "cli/eval/kld.h", 0),
            ("cli/bench/attention.cc", "kernels/problems/problem.h", 0),
            ("cli/eval/kld.cc", "kernels/problems/problem.h", 1),
            ("kernels/attention.cc", "kernels/problems/reference.h", 1),
            ("kernels/problems/problem.cc", "kernels/attention.h", 0),
            ("codecs/token_test.cc", "kernels/problems/reference.h", 0),
        ):
            problems = self.problems({f"src/{source}": f'#include "{header}"\n'})
            self.assertEqual(expected, len(problems), f"{source} {header} {problems}")

    def test_long_file_fails(self):
        limit = check_layers.MAX_LINES
        self.assertEqual([], self.problems({"src/base/a.cc": "\n" * limit}))
        self.assertEqual(1, len(self.problems({"src/base/a.cc": "\n" * (limit + 1)})))


if __name__ == "__main__":
    unittest.main()
