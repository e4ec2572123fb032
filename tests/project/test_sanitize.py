"""tools/sanitize.sh covers kvbm's code: each intentional mistake is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvbm
from kvbm import _core

HERE = Path(__file__).resolve().parents[1]
SANITIZERS = os.environ.get("KVBM_SANITIZE", "").split(",")
pytestmark = [
    pytest.mark.skipif(SANITIZERS == [""], reason="no sanitizer: see tools/sanitize.sh"),
    pytest.mark.sanitize,
    pytest.mark.threads,
]


#: What a sanitizer calls from the code that it looks at: each write, or a signed overflow, which then ends the process.
CALLS = {"address": b"__asan_report_store16", "undefined": b"__ubsan_handle_add_overflow_abort", "thread": b"__tsan_write8"}


def test_the_extension_is_built_with_them() -> None:
    built = json.loads((Path(kvbm.__file__).parent / "_build.json").read_text(encoding="utf-8"))
    code = Path(_core.__file__).read_bytes()
    assert built["sanitize"].split(",") == SANITIZERS
    assert all(CALLS[name] in code for name in SANITIZERS)


@pytest.mark.parametrize(
    ("sanitizer", "program", "report"),
    [
        ("address", "read_beyond", "AddressSanitizer: heap-buffer-overflow"),
        ("address", "write_beyond", "AddressSanitizer: heap-buffer-overflow"),
        ("thread", "race", "ThreadSanitizer: data race"),
    ],
)
def test_a_mistake_is_reported(sanitizer: str, program: str, report: str) -> None:
    if sanitizer not in SANITIZERS:
        pytest.skip(f"not with {sanitizer}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE / "helpers"), os.environ["PYTHONPATH"]))}
    for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):  # not a report of the run
        environment[name] = environment[name] + ":log_path=stderr"
    done = subprocess.run(
        [sys.executable, "-c", f"from programs import broken; broken.{program}()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and report in done.stderr, done.stderr
    assert "kvbm::Rows" in done.stderr, "not in a kernel"
