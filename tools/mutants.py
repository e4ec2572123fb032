#!/usr/bin/env python
"""Break one line of kvbm at a time, in a copy, and require that the named tests fail.

    tools/mutants.py [NUMBER ...]      all if none is named

The resharding's seventeen mutants are tests themselves: `MUTANTS` in tests/reshard/test_local.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutant(NamedTuple):
    """A line of a file of src/kvbm, what takes its place, and the tests of which one must fail."""

    file: str
    before: str
    after: str
    tests: str


MUTANTS = (
    Mutant("layout/loops.py", "if strides == ends:", "if ends and strides[-1] == ends[-1]:", "planner"),
    Mutant("digest/cells.py", "return not any(first % count for first in firsts) and", "return", "digest/test_digest.py"),
    Mutant("wire/protocol.py", 'if held.get("sha256") != _sum(held):', "if False:", "wire/test_wire.py"),
    Mutant("link/secret.py", " and number >= self._number:", ":", "link/test_secret.py"),
    Mutant(
        "link/secret.py",
        "if not hmac.compare_digest(secret.sign(card[begin:])[:begin], card[:begin]):",
        "if False:",
        "link/test_secret.py",
    ),
    Mutant("link/chunk.py", "if found != sent:", "if False:", "link/test_chunk.py link/test_chunks.py"),
    Mutant("link/ring.py", "len(free) <= max(without, 1)", "len(free) <= 0", "link/test_link.py"),
    Mutant("layout/overlap.py", "first = max(-behind, ", "first = max(0, ", "layout/test_overlap.py"),
    Mutant("memory/array_checks.py", "if kind.whole or _steps_alike(at):", "if True:", "memory pool"),
    Mutant("store/digests.py", "if any(is_wrong) or torn[row]:", "if torn[row]:", "store/test_store.py"),
    Mutant("matching/match.py", "addresses = allocations[entry] + nbytes", "addresses = allocations[entry]", "matching"),
)


def run(source: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests with the package in `source` until one fails."""
    paths = [str(ROOT / "tests" / test) for test in tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "sample and not gpu", "-p", "no:cacheprovider", *paths]
    # The tests must not import the package of the tree.
    folders = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": folders}, capture_output=True, text=True)


def main() -> int:
    """Return 0 if every chosen mutant is caught, 1 if one is not, 2 if the table or the tests are wrong without it."""
    chosen = [int(text) for text in sys.argv[1:]] or range(len(MUTANTS))
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for name in ("layouts", "cuda"):
            (Path(folder) / name).symlink_to(ROOT / name)
        for tests in sorted({MUTANTS[number].tests for number in chosen}):
            if (done := run(source, tests)).returncode:
                print(f"{tests}: expected no failure without a mutant:\n{done.stdout[-2000:]}")
                return 2
        for number in chosen:
            mutant = MUTANTS[number]
            file = source / "kvbm" / mutant.file
            text = file.read_text(encoding="utf-8")
            if text.count(mutant.before) != 1:
                print(f"{number}: {mutant.file}: expected {mutant.before!r} once, found {text.count(mutant.before)}")
                return 2
            file.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
            done = run(source, mutant.tests)
            file.write_text(text, encoding="utf-8")
            failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
            if not failed:
                missed.append(number)
            print(f"{number}: {mutant.file}: {failed[0] if failed else f'NOT CAUGHT, exit status {done.returncode}'}", flush=True)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
