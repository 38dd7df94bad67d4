#!/usr/bin/env python3
"""Reads the #include lines of the project and fails on an edge that the tables below do not have.

Modules include what ALLOWED says; folders inside a module have rules of their own in PARTS; helpers of tests are
included by tests and microbenchmarks alone, so that no product code depends on them. Also fails on a source file under
src/ or include/ with more than MAX_LINES lines.
"""

import argparse
import pathlib
import re
import sys

MAX_LINES = 500

# A module may include itself, the installed headers (qevict/...), and the modules named here.
ALLOWED = {
    "base": set(),
    "kernels": {"base"},
    "codecs": {"base", "kernels"},
    "policy": {"base"},
    "store": {"base"},
    "cache": {"base", "kernels", "codecs", "policy", "store"},
    "ggml": {"base", "kernels", "codecs", "cache"},
    "cli": {"base", "kernels", "codecs", "policy", "cache", "ggml"},
}
# Folders inside a module, and who may include their headers beside themselves and tests. They may include the rest of
# their module, which must not include them.
PARTS = {
    "kernels/problems": {"cli/bench"},
    "cli/eval": {"cli/bench"},
    "cli/bench": set(),
}
# Helpers of tests: these folders and headers, wherever they stand.
TEST_FOLDERS = {"testing"}
TEST_HEADERS = {"testing.h", "test_support.h"}
TEST_SOURCES = ("_test.cc", "_bench.cc")
# Headers of llama.cpp, and the modules that may see them.
FOREIGN = [
    (re.compile(r"^(ggml|gguf)[\w.-]*\.h(pp)?$"), {"ggml"}),
    (re.compile(r"^llama[\w.-]*\.h$"), {"cli"}),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]')
SUFFIXES = {".h", ".cc", ".inc"}


def module_of(path):
    """Module of a path relative to the root: src/<module>/... or `include`."""
    parts = path.parts
    if parts[0] == "src":
        return parts[1] if len(parts) > 2 else None
    return parts[0]


def part_of(path):
    """The folder of PARTS in which a path below src/ lies, or None."""
    return next((part for part in PARTS if path.is_relative_to(part)), None)


def is_test_helper(path):
    return path.name in TEST_HEADERS or bool(TEST_FOLDERS & set(path.parts[:-1]))


def check_part(path, target):
    """One sentence if the file `path` may not include the header `target` (both below src/) for its folder, else None."""
    if is_test_helper(path) or path.name.endswith(TEST_SOURCES):
        return None
    if is_test_helper(target):
        return f"includes {target}, a helper of tests; only tests and microbenchmarks may"
    part = part_of(target)
    if part and part_of(path) not in PARTS[part] | {part}:
        allowed = ", ".join(sorted(PARTS[part] | {part}))
        return f"includes {target}; only {allowed} and tests may"
    return None


def check_include(module, target):
    """One sentence if `module` may not include `target`, else None."""
    if ".." in pathlib.PurePosixPath(target).parts:
        return f"includes {target} by a relative path; write the path from src/ or include/"
    for pattern, modules in FOREIGN:
        if pattern.match(target):
            return None if module in modules else f"includes {target}; only {', '.join(sorted(modules))} may"
    head, _, rest = target.partition("/")
    if head == "qevict" or not rest:
        return None
    if head not in ALLOWED:
        return None  # a system or third-party folder such as nlohmann/
    if module == "include":
        return f"includes {target}; installed headers include only qevict/ and the standard library"
    if head != module and head not in ALLOWED[module]:
        allowed = ", ".join(sorted(ALLOWED[module])) or "no other module"
        return f"includes {target}; {module} may include {allowed}"
    return None


def check(root):
    problems = []
    files = sorted(
        path
        for folder in ("include", "src")
        for path in (root / folder).rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    )
    for path in files:
        relative = path.relative_to(root)
        module = module_of(relative)
        if module != "include" and module not in ALLOWED:
            problems.append(f"{relative}: lies in no known module; add it to {pathlib.Path(__file__).name}")
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > MAX_LINES:
            problems.append(f"{relative}: has {len(lines)} lines, the limit is {MAX_LINES}; split it")
        for number, line in enumerate(lines, start=1):
            match = INCLUDE.match(line)
            if match:
                target = match.group(1)
                problem = check_include(module, target)
                if not problem and relative.parts[0] == "src":
                    problem = check_part(relative.relative_to("src"), pathlib.PurePosixPath(target))
                if problem:
                    problems.append(f"{relative}:{number}: {problem}")
    return files, problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
    files, problems = check(parser.parse_args().root)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(files)} files read, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
