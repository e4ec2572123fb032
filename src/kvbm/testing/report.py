"""Results of ``kvbm smoke`` per test, also as JSON, which is sent between processes and machines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Result:
    """One test.

    Attributes
    ----------
    name, dimensions : str
        ``"tiny_single"`` and ``"128×256×1"``, or a pair of layouts and its sizes.
    correct : bool
        True if the result is correct.
    avg_time_ms : float or None
        Average milliseconds per run; None if it could not be measured.
    timing : {"events", "clock"}
        How it was measured, as in `BenchmarkRecord`.
    error : str or None
        The error as a sentence; None if there was none.
    """

    name: str
    dimensions: str
    correct: bool
    avg_time_ms: float | None
    timing: str
    error: str | None


@dataclass(frozen=True)
class Report:
    """All tests of a run.

    Attributes
    ----------
    kvbm, device, machine, driver : str
        Version of kvbm; ``"cuda:0"`` or ``"cpu"``; name of the device; version of the driver, empty for a CPU.
    seconds : float
        Duration of the whole run.
    tests : tuple of Result
        The results.
    host : str
        The machine that ran it; empty for this one.
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
