#!/usr/bin/env python3
"""Counts the instructions of fixed kernel cases with callgrind and compares them with the recorded counts.

  check.py PROGRAM COMPILER            fails if a case needs over 3% more instructions than recorded
  check.py PROGRAM COMPILER --record   writes the counts to bench/instructions.json

Times vary with the machine; instructions of one build do not. The count of one call is the difference between runs of
three calls and of one, so that making the problem does not count. The kernels are forced to AVX2, the widest
instruction set that valgrind knows. Counts are kept per compiler and major version: another one is skipped (77).
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

SKIP = 77
TOLERANCE = 0.03
RECORD = pathlib.Path(__file__).resolve().parents[2] / "bench" / "instructions.json"
ISA = "avx2"


def instructions(program, case, calls):
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, case, str(calls)]
    done = subprocess.run(command, env=os.environ | {"QEVICT_SIMD": ISA}, capture_output=True, text=True, check=False)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or not found:
        sys.exit(f"{' '.join(command)} failed: {done.stderr[-500:]}")
    return int(found.group(1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("compiler", help="name and version, as in GNU-12.2.0")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    compiler = options.compiler.split(".")[0]
    records = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if not shutil.which("valgrind"):
        print("skipped: valgrind is not installed")
        return SKIP
    if compiler not in records and not options.record:
        print(f"skipped: no counts are recorded for {compiler}, only for {', '.join(records) or 'nothing'}")
        return SKIP
    recorded = records.setdefault(compiler, {})
    names = subprocess.run([options.program], capture_output=True, text=True, check=True).stdout.split()
    slower = []
    print(f"{'instructions of one call, ' + ISA:32}{'recorded':>12}{'now':>12}{'change':>9}")
    for name in names:
        now = (instructions(options.program, name, 3) - instructions(options.program, name, 1)) // 2
        before = recorded.get(name)
        change = now / before - 1 if before else 0.0
        print(f"{name:32}{before or '-':>12}{now:>12}{change:>+9.1%}")
        if before and change > TOLERANCE:
            slower.append(name)
        if options.record:
            recorded[name] = now
    if options.record:
        RECORD.write_text(json.dumps(records, indent=2, sort_keys=True) + "\n")
        return 0
    if missing := [n for n in names if n not in recorded]:
        print(f"not recorded: {', '.join(missing)}")
    if slower:
        print(f"over {TOLERANCE:.0%} more instructions than recorded: {', '.join(slower)}; if that is meant, --record")
    return 1 if slower or missing else 0


if __name__ == "__main__":
    sys.exit(main())
