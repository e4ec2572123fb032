"""What ``kvbm smoke`` has seen, test by test; as JSON, too, in which it travels between processes and machines."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["Report", "Result"]


@dataclass(frozen=True)
class Result:
    """One test.

    Attributes
    ----------
    name, dimensions : str
        ``"tiny_single"`` and ``"128×256×1"``; a pair of layouts and its sizes.
    correct : bool
    avg_time_ms : float or None
        Of a run; None where it could not be measured.
    timing : {"events", "clock"}
    error : str or None
        What is wrong.
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
        Version; ``"cuda:0"`` or ``"cpu"``; its name; the driver's version, empty for a CPU.
    seconds : float
        Of the whole run.
    tests : tuple of Result
    host : str
        Where it ran; empty for here.
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
        """One object, with the tests and the two totals; in ASCII, so that it passes any pipe."""
        return json.dumps(asdict(self) | {"correct": self.correct, "total": len(self.tests)}, indent=1)

    @classmethod
    def from_json(cls, text: str, host: str = "") -> Report:
        said = json.loads(text)
        tests = tuple(Result(**test) for test in said["tests"])
        return cls(said["kvbm"], said["device"], said["machine"], said["driver"], said["seconds"], tests, host)
