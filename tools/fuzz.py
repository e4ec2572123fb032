#!/usr/bin/env python3
"""Gives kvbm inputs that are almost right, a million or as many as wanted; see tests/helpers/fuzzing.py.

    tools/fuzz.py [--cases N] [--kind KIND] [--state FILE]    goes on where the state says that it was
    tools/fuzz.py --kind KIND --number N                      one case again: its input, and what becomes of it
    tools/fuzz.py --kind call [--cases N] [--only PART]       only calls of public functions (tests/helpers/calling.py)
    tools/fuzz.py --kind KIND --coverage [libFuzzer options]  inputs that reach new lines, with atheris, without an end

A case is a kind and a number: those that fail are in the state, and fail again.  The exit status is 1 where one did.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "helpers"), *sorted({str(path.parent) for path in TESTS.glob("*/test_*.py")})]

#: Of a hundred cases, how many are of a kind.
PARTS = {"layout": 45, "shape": 10, "shape file": 2, "placement": 18, "preset": 10, "file": 5, "arrays": 5, "ids": 5}

#: One call of a public function for so many other cases.
CALLS = 20

#: Cases between two lines, seconds that a case may take, and bytes beyond those at the start that all may.
CHUNK, SECONDS, ROOM = 10_000, 20, 2 << 30


def main() -> int:
    """Run what the words of the command line say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=[*PARTS, "call"])
    parser.add_argument("--only", default="")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "fuzz.json")
    parser.add_argument("--number", type=int)
    parser.add_argument("--coverage", action="store_true")
    given, rest = parser.parse_known_args()
    if given.coverage:
        return by_coverage(given.kind or "layout", rest)
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    if given.kind == "call":
        return calls(given.cases, given.state.with_name("fuzz_calls.json"), given.only, given.number)
    if given.number is not None:
        return again(given.kind or "layout", given.number)
    failed = run(given.cases, given.state, {given.kind: 100} if given.kind else PARTS)
    if given.kind:
        return failed
    return calls(given.cases // CALLS, given.state.with_name("fuzz_calls.json"), given.only, None) or failed


def calls(cases: int, path: Path, only: str, number: int | None) -> int:
    """Calls of each public function with hostile arguments, until so many of each kind are in the state."""
    import calling

    names = [name for name in calling.found() if only in name]
    if number is not None:
        for name in names:
            print(name, calling.call(name, number))
        return 0
    state: dict[str, Any] = {"next": 0, "done": {}, "failed": []}
    if path.exists() and not only:
        state = json.loads(path.read_text(encoding="utf-8"))
    most = max(1, cases // len(names))
    while state["next"] < most:
        count = min(50, most - state["next"])
        done, wrong = calling.tried(names, state["next"], count, told=lambda *what: print(*what, sep="\t", flush=True))
        state["next"] += count
        state["done"] = dict(collections.Counter(state["done"]) + done)
        state["failed"] += wrong
        if not only:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(state, indent=1), encoding="utf-8")
        print(f"{state['next'] * len(names):,} calls, {len(state['failed'])} failed", flush=True)
    return 1 if state["failed"] else 0


def run(cases: int, path: Path, parts: dict[str, int]) -> int:
    """Cases of all kinds in turns, until there are so many in the state."""
    import fuzzing

    state: dict[str, Any] = {"seconds": 0, "next": {}, "done": {}, "failed": []}
    if path.exists():
        state = json.loads(path.read_text(encoding="utf-8"))
    done = collections.Counter(state["done"])
    fuzzing.DONE = done
    limit_memory()
    signal.signal(signal.SIGALRM, too_long)
    while (total := sum(state["next"].values())) < cases:
        start = time.monotonic()
        for kind, part in parts.items():
            first = state["next"].get(kind, 0)
            count = -(-min(CHUNK, cases - total) * part // 100)
            for number in range(first, first + count):
                try:
                    signal.alarm(SECONDS)
                    done[f"{kind}: {'taken' if fuzzing.try_case(kind, number) else 'refused'}"] += 1
                except Exception as error:
                    done[f"{kind}: failed"] += 1
                    state["failed"].append([kind, number, f"{type(error).__name__}: {error!s:.300}"])
                    print(*state["failed"][-1], sep="\t", flush=True)
                finally:
                    signal.alarm(0)
            state["next"][kind] = first + count
        state["seconds"] = round(state["seconds"] + time.monotonic() - start)
        state["done"] = dict(sorted(done.items()))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_text(json.dumps(state, indent=1), encoding="utf-8")
        path.with_suffix(".part").replace(path)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        cases_so_far = sum(state["next"].values())
        print(f"{cases_so_far:,} cases in {state['seconds']} s, {len(state['failed'])} failed, {peak} MiB", flush=True)
    print(json.dumps(state["done"], indent=1))
    return 1 if state["failed"] else 0


def again(kind: str, number: int) -> int:
    """One case, with its traceback."""
    import fuzzing

    given = fuzzing.KINDS[kind][0](random.Random(f"{kind} {number}"))
    print(given if isinstance(given, str) else repr(given))
    try:
        print("taken" if fuzzing.try_case(kind, number) else "refused")
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def by_coverage(kind: str, options: list[str]) -> int:
    """Texts that atheris makes of the shipped ones."""
    import atheris

    with atheris.instrument_imports(include=["kvbm"]):
        import fuzzing
    _, check = fuzzing.KINDS[kind]

    def one(data: bytes) -> None:
        fuzzing.try_input(check, random.Random(len(data)), data.decode("utf-8", "replace"))

    folder = Path(tempfile.mkdtemp(prefix="kvbm-corpus-"))
    for number in range(300):
        text = fuzzing.KINDS[kind][0](random.Random(number))
        (folder / str(number)).write_text(text, encoding="utf-8", errors="replace")
    atheris.Setup([sys.argv[0], *options, str(folder)], one)
    atheris.Fuzz()
    return 0


def too_long(*_: object) -> None:
    """End a case that does not end."""
    raise TimeoutError(f"a case took {SECONDS} s")


def limit_memory() -> None:
    """More memory than `ROOM` is a MemoryError."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        held = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, resource.RLIM_INFINITY))


if __name__ == "__main__":
    sys.exit(main())
