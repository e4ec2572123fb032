"""Measure the time of a kernel, with events on a GPU or a monotonic clock on the CPU, and with inputs that are not cached."""

from __future__ import annotations

import csv
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, TextIO

import numpy as np

from .._arguments import listed, number, require_a, require_like
from ..system import machine
from . import limits
from .compare import find_nan
from .data import clone, device_index, nbytes, require_room

#: Size of all sets of inputs together, in units of the largest cache.
TIMES_CACHE = 2


@dataclass(frozen=True)
class BenchmarkRecord:
    """A measurement and its conditions.  The fields are the columns of a CSV file.

    Attributes
    ----------
    name : str
        Name of the kernel.
    avg_time_ms, median_time_ms, min_time_ms, max_time_ms : float or None
        Milliseconds per run; None if there was an error.
    num_warmup, num_runs : int
        Number of warm-up calls, and of measured calls.
    input_bytes, input_sets : int
        Bytes of one set of inputs, and number of sets that were used in turn.
    timing : {"events", "clock"}
        Two GPU events around each run, or the CPU's monotonic clock.
    device : str
        Name of the GPU, or of the processor.
    error : str or None
        The error as a sentence; None if there was none.
    """

    name: str
    avg_time_ms: float | None
    median_time_ms: float | None
    min_time_ms: float | None
    max_time_ms: float | None
    num_warmup: int
    num_runs: int
    input_bytes: int
    input_sets: int
    timing: str
    device: str
    error: str | None

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)


class _Pair(NamedTuple):
    avg_time_ms: float
    error: str | None


class Benchmark(_Pair):
    """The pair ``(avg_time_ms, error)``, with the whole `record`.

    Attributes
    ----------
    avg_time_ms : float
        Average milliseconds per run; NaN if there was an error.
    error : str or None
        The error as a sentence; None if there was none.
    record : BenchmarkRecord
        The measurement.
    """

    record: BenchmarkRecord

    @classmethod
    def of(cls, record: BenchmarkRecord) -> Benchmark:
        require_a(BenchmarkRecord, "record", record, "a BenchmarkRecord")
        made = cls(math.nan if record.avg_time_ms is None else record.avg_time_ms, record.error)
        made.record = record
        return made


def write_csv(records: Iterable[BenchmarkRecord], out: TextIO) -> None:
    """Write records as CSV with a header line.  None becomes an empty field."""
    require_like("out", out, ("write",), "a file that is open for text", methods=True)
    records = listed("records", records, "records")
    for record in records:
        require_a(BenchmarkRecord, "records", record, "a BenchmarkRecord each")
    writer = csv.DictWriter(out, [field.name for field in fields(BenchmarkRecord)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, records))


def benchmark_kernel(
    kernel_fn: Callable[[Any], Any],
    test_input: Any,
    num_warmup: int = 10,
    num_runs: int = 100,
    *,
    limit_s: float = 60.0,
    name: str | None = None,
) -> Benchmark:
    """Measure the time of a kernel.

    Parameters
    ----------
    kernel_fn : callable
        Called as ``kernel_fn(test_input)``.  It enqueues its work on the framework's current stream, and may return before the
        GPU is done.
    test_input : object
        Arrays of torch, NumPy or CuPy, in tuples, lists and dicts.  Other objects in them are passed on unchanged.  The kernel
        gets copies with the same strides.
    num_warmup, num_runs : int
        Number of calls before the measurement, and of measured calls.
    limit_s : float
        Seconds for all calls together, after which a kernel that no longer computes hangs.  On the CPU one that computes has ten
        times as long, and is then too slow (see `kvbm.testing.limits`).
    name : str, optional
        Name for the record.  Default: the name of the function.

    Returns
    -------
    Benchmark
        ``(avg_time_ms, error)`` with a `record`.  `error` is None, or a sentence on the exception, the time limit, or the place of
        a NaN.

    Raises
    ------
    ValueError
        `num_warmup` is below 0, `num_runs` is below 1, or `limit_s` is not positive.

    Notes
    -----
    On a GPU each run has an event before and after it.  The host does not wait between runs, so the time in which the GPU waits for
    a launch counts, as in a simple loop.

    Each run has other inputs than the one before.  The number of copies is such that all together are twice as large as the L2
    cache (on a CPU: the last-level cache), but at most the number of runs.  The caches are overwritten before the first run.

    Examples
    --------
    >>> import numpy as np
    >>> avg_time_ms, error = benchmark_kernel(np.sort, np.arange(1000), num_runs=5)
    >>> avg_time_ms > 0, error
    (True, None)
    >>> benchmark_kernel(lambda x: x / 0, 1)[1]
    'the kernel raised ZeroDivisionError: division by zero (line 1 of <doctest kvbm.testing.timing.benchmark_kernel[3]>)'
    """
    limits.require_limit(limit_s)
    num_warmup, num_runs = number("num_warmup", num_warmup, 0), number("num_runs", num_runs, 1)
    device = device_index(test_input)
    place = f"cuda:{device}" if device >= 0 else "cpu"
    size, cache = nbytes(test_input), machine.cache_bytes(place)
    count = min(num_runs, max(2, -(-TIMES_CACHE * cache // size))) if size else 1
    name_of_device = machine.machine(place)[0]  # before the runs: a GPU that fails may no longer answer
    runs: list[float] = []
    error = None
    try:
        require_room(test_input, count)
        sets = [clone(test_input) for _ in range(count)]
        measure = _on_gpu if device >= 0 else _on_cpu
        loop = _Loop(kernel_fn, sets, num_warmup, num_runs, TIMES_CACHE * cache, device)
        runs, result = limits.run(lambda deadline: measure(loop, deadline), limit_s, on_gpu=device >= 0)
        with limits.Blamed("looking at what the kernel returned raised"):
            nan = find_nan(result)
        error = f"the kernel returned {nan}" if nan is not None else None
    except limits.KernelFailure as failure:
        error = str(failure)
    good = runs if error is None else []
    return Benchmark.of(
        BenchmarkRecord(
            name=name if name is not None else getattr(kernel_fn, "__qualname__", type(kernel_fn).__name__),
            avg_time_ms=statistics.fmean(good) if good else None,
            median_time_ms=statistics.median(good) if good else None,
            min_time_ms=min(good, default=None),
            max_time_ms=max(good, default=None),
            num_warmup=num_warmup,
            num_runs=num_runs,
            input_bytes=size,
            input_sets=count,
            timing="events" if device >= 0 else "clock",
            device=name_of_device,
            error=error,
        )
    )


class _Loop(NamedTuple):
    kernel: Callable[[Any], Any]
    sets: list[Any]
    num_warmup: int
    num_runs: int
    cache_bytes: int
    device: int

    def warm_up(self, deadline: limits.Deadline) -> None:
        with limits.Blamed():
            for turn in range(self.num_warmup):
                self.reach(deadline, turn)
                self.kernel(self.sets[turn % len(self.sets)])

    def reach(self, deadline: limits.Deadline, done: int) -> None:
        """Record the number of calls that are done.  Ends this thread if the caller no longer waits, and ends forked processes."""
        limits.end_if_forked(deadline.pid)
        deadline.progress = (done, self.num_warmup + self.num_runs)
        if deadline.left <= 0:
            raise deadline.missed("its calls were not done", returns=True)


def _on_cpu(loop: _Loop, deadline: limits.Deadline) -> tuple[list[float], Any]:
    loop.warm_up(deadline)
    np.ones(loop.cache_bytes, np.uint8)
    kernel, clock, result = loop.kernel, time.perf_counter_ns, None
    times = []
    with limits.Blamed():
        for turn in range(loop.num_runs):
            loop.reach(deadline, loop.num_warmup + turn)
            data = loop.sets[turn % len(loop.sets)]
            start = clock()
            result = kernel(data)
            times.append(clock() - start)
    return [nanoseconds / 1e6 for nanoseconds in times], result


def _on_gpu(loop: _Loop, deadline: limits.Deadline) -> tuple[list[float], Any]:
    kernel, result = loop.kernel, None
    with limits.Gpu(loop.device) as gpu:
        pairs = [(gpu.events.make(), gpu.events.make()) for _ in range(loop.num_runs)]
        loop.warm_up(deadline)
        gpu.finish(deadline)
        gpu.overwrite(loop.cache_bytes)
        with limits.Blamed():
            for turn, (begin, end) in enumerate(pairs):
                loop.reach(deadline, loop.num_warmup + turn)
                data = loop.sets[turn % len(loop.sets)]
                gpu.events.record(begin)
                result = kernel(data)
                gpu.events.record(end)
        gpu.finish(deadline)
        return [1e3 * gpu.events.seconds(begin, end) for begin, end in pairs], result
