"""Results of ``kvbm smoke`` per test, also as JSON, which is sent between processes and machines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Result:
    """One test: its name and sizes, such as ``"tiny_single"`` and ``"128×256×1"``, or a pair of layouts.

    `avg_time_ms` is None if it could not be measured, `timing` as in `BenchmarkRecord`, and `error` a sentence, None if there
    was none.
    """

    name: str
    dimensions: str
    correct: bool
    avg_time_ms: float | None
    timing: str
    error: str | None


@dataclass(frozen=True)
class Report:
    """All tests of a run on a device, ``"cuda:0"`` or ``"cpu"``, with its name, `machine`, and its driver, empty for a CPU.

    `seconds` is the duration of the whole run.  `host` is the machine that ran it; empty for this one.
    """

    kvbm: str
    device: str
    machine: str
    driver: str
    seconds: float
    tests: tuple[Result, ...]
    host: str = ""

    @property
    def correct(self) -> int:
        return sum(test.correct for test in self.tests)

    def to_json(self) -> str:
        """A JSON object with the tests and two totals, in ASCII so that any pipe can transfer it."""
        return json.dumps(asdict(self) | {"correct": self.correct, "total": len(self.tests)}, indent=1)

    @classmethod
    def from_json(cls, text: str, host: str = "") -> Report:
        fields = json.loads(text)
        tests = tuple(Result(**test) for test in fields["tests"])
        return cls(fields["kvbm"], fields["device"], fields["machine"], fields["driver"], fields["seconds"], tests, host)
