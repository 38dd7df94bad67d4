#!/usr/bin/env python3
"""Reads the #include lines of the project and fails on an edge that the module table does not have.

Also fails on a source file under src/ or include/ with more than MAX_LINES lines.
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
    "diagnostics": {"base"},
    "store": {"base"},
    "cache": {"base", "kernels", "codecs", "policy", "store"},
    "ggml": {"base", "kernels", "codecs", "cache"},
    "cli": {"base", "kernels", "codecs", "policy", "cache", "ggml", "diagnostics", "eval"},
    "eval": {"base", "kernels", "codecs", "cache", "ggml", "diagnostics"},
}
# Headers of llama.cpp, and the modules that may see them.
FOREIGN = [
    (re.compile(r"^(ggml|gguf)[\w.-]*\.h(pp)?$"), {"ggml"}),
    (re.compile(r"^llama[\w.-]*\.h$"), {"cli", "eval"}),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SUFFIXES = {".h", ".cc", ".inc"}


def module_of(path):
    """Module of a path relative to the root: src/<module>/..., eval/..., or `include`."""
    parts = path.parts
    if parts[0] == "src":
        return parts[1] if len(parts) > 2 else None
    return parts[0]


def check_include(module, quote, target):
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
        for folder in ("include", "src", "eval")
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
        if relative.parts[0] != "eval" and len(lines) > MAX_LINES:
            problems.append(f"{relative}: has {len(lines)} lines, the limit is {MAX_LINES}; split it")
        for number, line in enumerate(lines, start=1):
            match = INCLUDE.match(line)
            if match:
                problem = check_include(module, *match.groups())
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
