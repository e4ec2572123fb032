"""The table of what is fastest on this machine: measured once, kept in the user's cache folder, read by ``strategy="auto"``.

A row is one measurement, the best of some copies: a direction, a strategy, how many bytes stay together, how many bytes a batch
moved, seconds.  `limits` turns rows into answers: seconds over bytes are straight lines in logarithms, and where two of them
cross the strategy changes.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import logging
import math
import os
import re
import statistics
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from . import cache

__all__ = ["Row", "Table", "limits", "load", "machine", "measure", "path", "reload", "save"]

_log = logging.getLogger(__name__)

#: Of the file.  Another number is another meaning: files of other versions are left alone.
VERSION = 1

#: In the order of preference where they are equally fast: the fewer parts a copy has, the better.
STRATEGIES = ("direct", "staged", "engine")
DIRECTIONS = ("d2h", "h2d", "d2d", "p2p")

#: How much faster another strategy must be before it is preferred.  On one GPU the engine would have to be clearly so: a kernel
#: can be captured into a graph with ids on the device.
_TIE = {"d2d": 0.05}
_TIE_ELSEWHERE = 0.02

_MOST_ENTRIES = 8  # what a `_core.Route` holds
_MOST_PAIRS = 1 << 20

Progress = Callable[[int, int], object]


class Row(NamedTuple):
    """One measurement: the quickest of some copies, from the call to the end of the copy."""

    direction: str
    strategy: str
    run_bytes: int
    total_bytes: int
    seconds: float


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of GPU with one driver.

    Attributes
    ----------
    gpu, driver : str
        Name and driver version, as the driver says them.
    date : str
        Of the latest measurement, ISO 8601.
    kvbm : str
        Version that measured.
    rows : tuple of Row
    """

    gpu: str
    driver: str
    date: str
    kvbm: str
    rows: tuple[Row, ...]

    @property
    def directions(self) -> tuple[str, ...]:
        """Those that were measured."""
        there = {row.direction for row in self.rows}
        return tuple(direction for direction in DIRECTIONS if direction in there)

    @property
    def title(self) -> str:
        return f"{self.gpu}, driver {self.driver}, {self.date}"

    def seconds(self, direction: str, strategy: str, run_bytes: int, total_bytes: int) -> float | None:
        """Predicted time of a batch of `total_bytes` of which `run_bytes` stay together; None where nothing was measured."""
        line = self._line(direction, strategy, run_bytes)
        return None if line is None else math.exp(line(math.log(total_bytes)))

    def segments(
        self, direction: str, shortest: Mapping[str, int], block_bytes: int
    ) -> tuple[list[tuple[int, str]], str]:
        """What `limits` answers from this table; an empty list where it has no row for the direction."""
        lines = self._lines(direction, shortest)
        if not lines:
            return [], f"the table of {self.date} has no row for {direction}"
        found = _few(_segments(lines, block_bytes, _tie(direction)))
        why = f"measured on this machine ({self.title}): {_said(lines, found, block_bytes)}"
        if len(found) == 1:
            name = found[0][1]
            # A single entry is what an explicit strategy looks like; `auto` has two, and may then take the kernel for ids that
            # only the GPU can read.
            return ([(0, "direct"), (1, name)] if name != "direct" and "direct" in shortest else [(0, name)]), why
        return [*found[:-1], (found[-2][0] + 1, found[-1][1])], why

    def choices(self, direction: str, run_bytes: int) -> list[tuple[int, str]]:
        """Up to how many bytes which strategy is best where they all keep `run_bytes` together; the last one is for all more."""
        lines, step = self._lines(direction, dict.fromkeys(STRATEGIES, run_bytes)), TOTALS[0]
        return [(n * step, name) for n, name in _segments(lines, step, _tie(direction))] if lines else []

    def _lines(self, direction: str, shortest: Mapping[str, int]) -> dict[str, _Line]:
        found = {name: self._line(direction, name, shortest[name]) for name in STRATEGIES if name in shortest}
        return {name: line for name, line in found.items() if line is not None}

    def _line(self, direction: str, strategy: str, run_bytes: int) -> _Line | None:
        """Time over bytes at one run length: between the two nearest that were measured, else at the nearest."""
        found: dict[int, dict[int, float]] = {}
        for row in self.rows:
            if (row.direction, row.strategy) == (direction, strategy):
                found.setdefault(row.run_bytes, {})[row.total_bytes] = row.seconds
        if not found:
            return None
        floor = math.log(min(seconds for points in found.values() for seconds in points.values()))
        runs = sorted(found)
        above = bisect_right(runs, run_bytes)
        if above == 0:
            line = _Line.through(found[runs[0]], floor)
            # The copy engine takes as long for a small piece as for a smaller one, and there are so many more of them.
            return line if strategy == "direct" else line.slower(math.log(runs[0] / run_bytes))
        lower = _Line.through(found[runs[above - 1]], floor)
        if above == len(runs) or runs[above - 1] == run_bytes:
            return lower
        upper = _Line.through(found[runs[above]], floor)
        return lower.towards(upper, math.log(run_bytes / runs[above - 1]) / math.log(runs[above] / runs[above - 1]))


# ---- from rows to answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    """Logarithm of seconds over logarithm of bytes: straight between knots, level before them, the last bandwidth behind."""

    xs: tuple[float, ...]
    ys: tuple[float, ...]

    @classmethod
    def through(cls, points: Mapping[int, float], floor: float) -> _Line:
        """Through measured points, and from the first one down at its bandwidth as far as any copy was ever fast."""
        knots = [(math.log(size), math.log(seconds)) for size, seconds in sorted(points.items())]
        x, y = knots[0]
        if y > floor:
            knots.insert(0, (x - (y - floor), floor))
        return cls(*zip(*knots, strict=True))

    def __call__(self, x: float) -> float:
        above = bisect_right(self.xs, x)
        if above == 0:
            return self.ys[0]
        x0, y0 = self.xs[above - 1], self.ys[above - 1]
        if above == len(self.xs):
            return y0 + (x - x0)
        return y0 + (self.ys[above] - y0) * (x - x0) / (self.xs[above] - x0)

    def slower(self, by: float) -> _Line:
        return _Line(self.xs, tuple(y + by for y in self.ys))

    def towards(self, other: _Line, share: float) -> _Line:
        xs = tuple(sorted({*self.xs, *other.xs}))
        return _Line(xs, tuple((1 - share) * self(x) + share * other(x) for x in xs))


def _tie(direction: str) -> float:
    return math.log1p(_TIE.get(direction, _TIE_ELSEWHERE))


def _best(lines: Mapping[str, _Line], x: float, tie: float) -> str:
    """The first strategy in the order of preference that is as fast as the fastest."""
    times = {name: lines[name](x) for name in STRATEGIES if name in lines}
    fastest = min(times.values())
    return next(name for name, y in times.items() if y <= fastest + tie)


def _segments(lines: Mapping[str, _Line], block_bytes: int, tie: float) -> list[tuple[int, str]]:
    """Up to how many pairs which strategy is best, for all batches from 1 to `_MOST_PAIRS`.

    Between two knots all lines are straight, so the choice changes only where one passes another (by the tie): these places
    are computed, and nothing is searched for.
    """
    start, end = math.log(block_bytes), math.log(block_bytes * _MOST_PAIRS)
    knots = sorted({start, end, *(x for line in lines.values() for x in line.xs if start < x < end)})
    places = set(knots)
    for x0, x1 in pairwise(knots):
        for one in lines.values():
            for other in lines.values():
                gap0, gap1 = one(x0) - other(x0) - tie, one(x1) - other(x1) - tie
                if (gap0 < 0) != (gap1 < 0):
                    places.add(x0 + (x1 - x0) * gap0 / (gap0 - gap1))
    counts = {1, _MOST_PAIRS}
    for x in places:
        near = math.floor(math.exp(x) / block_bytes)
        counts.update(n for n in (near - 1, near, near + 1) if 1 <= n <= _MOST_PAIRS)  # whichever way it was rounded
    found: list[tuple[int, str]] = []
    for n in sorted(counts):
        name = _best(lines, math.log(n * block_bytes), tie)
        if found and found[-1][1] == name:
            found.pop()
        found.append((n, name))
    return found


def _few(found: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """At most `_MOST_ENTRIES`: the narrowest ones go to what stands before (the first one to what stands behind)."""
    found = list(found)
    while len(found) > _MOST_ENTRIES:
        starts = [1, *(n + 1 for n, _ in found[:-1])]
        at = min(range(len(found)), key=lambda i: (found[i][0] + 1) / starts[i])
        if at:
            found[at - 1] = (found[at][0], found[at - 1][1])
        del found[at]
        found = [entry for entry, behind in pairwise([*found, (0, "")]) if entry[1] != behind[1]]
    return found


def _said(lines: Mapping[str, _Line], found: Sequence[tuple[int, str]], block_bytes: int) -> str:
    """The choice in words, each with its speed in the middle of where it is taken, and the next best one's."""
    from .planner import size_text

    said: list[str] = []
    start = block_bytes
    for i, (n, name) in enumerate(found):
        is_last = i == len(found) - 1
        end = max(64 << 20, 4 * start) if is_last else n * block_bytes
        x = (math.log(start) + math.log(end)) / 2
        others = sorted((lines[other](x), other) for other in lines if other != name)
        speeds = [f"{_gbps(x, lines[name](x))} GB/s", *(f"{other} {_gbps(x, y)}" for y, other in others[:1])]
        where = f"up to {size_text(end)}" if not is_last else "beyond that" if said else "always"
        said.append(f"{where} {name} ({size_text(round(math.exp(x)))} at {' against '.join(speeds)})")
        start = end
    return ", ".join(said)


def _gbps(x: float, y: float) -> str:
    return f"{math.exp(x - y) / 1e9:.3g}"


def _built_in(direction: str, shortest: Mapping[str, int], block_bytes: int) -> list[tuple[int, str]]:
    """The rule without a table; its numbers come from one NVIDIA H200 on PCIe 5."""
    if "staged" not in shortest:
        return [(0, "direct" if "direct" in shortest else "engine")]
    if "direct" not in shortest:
        return [(0, "staged")]
    if direction in ("d2d", "p2p"):
        return [(0, "direct")]
    few = max(1, (10 << 20) // block_bytes)
    return [(few, "direct"), (few + 1, "staged")]


def limits(
    direction: str, device: int, shortest: Mapping[str, int], block_bytes: int
) -> tuple[list[tuple[int, str]], str]:
    """Up to how many pairs which strategy is the fastest here.

    Parameters
    ----------
    direction : {"d2h", "h2d", "d2d", "p2p"}
    device : int
        CUDA device ordinal of the GPU that runs the kernels.
    shortest : mapping of str to int
        The strategies that are possible, and how many bytes stay together in each: ``direct``, on both sides; ``staged``, in
        the pieces that the copy engine moves; ``engine``, in the merged runs.
    block_bytes : int
        Bytes that one pair moves.

    Returns
    -------
    list of (int, str)
        Ascending; the last one, at most the eighth, is for all larger batches.
    str
        Why, for people.

    Notes
    -----
    It never raises because of the table.  Where there is none, this measures (once a machine, some 2 s), unless ``KVBM_TUNE=0``
    or the copy stays on one GPU; where that is not possible either, a built-in rule answers.

    Examples
    --------
    >>> limits("d2h", 0, {"direct": 4096, "staged": 1 << 20, "engine": 4096}, 1 << 20)  # doctest: +SKIP
    ([(8, 'direct'), (9, 'staged')], 'measured on this machine (…): up to 8 MiB direct …')
    """
    try:
        table, why = _find(direction, device)
        if table is not None:
            found, why = table.segments(direction, shortest, block_bytes)
            if found:
                return found, why
    except Exception as error:  # a server must not fall over a cache
        why = _reason(error)
        _log.warning("kvbm: the table of copy speeds cannot be used, the built-in rule is (%s)", why, exc_info=True)
    if direction == "d2d":
        why = "one kernel on one GPU is the fastest way there"
    elif "direct" not in shortest:
        why = f"the GPUs do not reach each other's memory; the built-in rule, because {why}"
    else:
        why = f"the built-in rule, because {why}"
    return _built_in(direction, shortest, block_bytes), why


# ---- tables that this process knows --------------------------------------------------------------------------------


@dataclass
class _Known:
    """What this process knows of a GPU: its table, if there is one, and why a direction is not in it."""

    table: Table | None
    failed: dict[str, str] = field(default_factory=dict)


_known: dict[int, _Known] = {}
_lock = threading.Lock()


def reload() -> None:
    """Forget the tables that this process has read, and what could not be measured: the next `limits` looks again."""
    with _lock:
        _known.clear()


def _find(direction: str, device: int) -> tuple[Table | None, str]:
    """The table with this direction in it, measured now if need be; or None, and why."""
    with _lock:
        known = _known.get(device)
        if known is None:
            known = _known[device] = _Known(load(*machine(device)))
        table = known.table
        if direction == "d2d" or (table is not None and direction in table.directions):
            return table, ""
        if os.environ.get("KVBM_TUNE") == "0":
            return None, f"{direction} was never measured here and KVBM_TUNE=0 forbids to; `kvbm tune` does it"
        if direction in known.failed:
            return None, known.failed[direction]
        if _is_capturing():
            return (
                None,
                "a stream capture was going on, during which nothing is measured; `kvbm tune` does it beforehand",
            )
        try:
            known.table = table = _measure_now(direction, device, table)
        except Exception as error:
            known.failed[direction] = reason = f"measuring failed: {_reason(error)}"
            _log.warning(
                "kvbm: measuring copies on cuda:%d failed, the built-in rule is used: %s", device, _reason(error)
            )
            return None, reason
        if direction not in table.directions:
            known.failed[direction] = f"{direction} could not be measured"
            return None, known.failed[direction]
        return table, ""


def _measure_now(direction: str, device: int, table: Table | None) -> Table:
    gpu, _ = machine(device)
    _log.info("kvbm: measuring copies on cuda:%d (%s), once a machine, some 2 s; KVBM_TUNE=0 forbids it", device, gpu)
    # Only what is asked for, and only GPUs that this process uses: others would each lose memory to a context.
    wanted = ("p2p",) if direction == "p2p" else ("d2h", "h2d", "d2d")
    made = measure(device, directions=wanted, peers=_used_peers(device) if direction == "p2p" else ())
    if table is not None:
        made = replace(made, rows=(*(row for row in table.rows if row.direction not in wanted), *made.rows))
    try:
        _log.info("kvbm: wrote %s", save(made))
    except (OSError, RuntimeError) as error:
        _log.warning(
            "kvbm: the table of copy speeds cannot be kept, and every process measures for itself: %s", _reason(error)
        )
    return made


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _is_capturing() -> bool:
    """Whether this thread's current stream, in torch or CuPy, is being captured into a graph.

    The default stream never is, and asking about it would break the capture of another one.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    captures = False
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.current_stream().cuda_stream > 2:
        captures = torch.cuda.is_current_stream_capturing()
    if cupy is not None and not captures:
        stream = cupy.cuda.get_current_stream()
        captures = stream.ptr > 2 and stream.is_capturing()
    return bool(captures)


# ---- the file ------------------------------------------------------------------------------------------------------


def machine(device: int) -> tuple[str, str]:
    """Name of a GPU and version of its driver: what a table is good for.

    Raises
    ------
    CudaUnavailableError
        No GPU.
    CudaError
        No such GPU.
    """
    from . import _core

    gpu = _core.device_info(device)["name"]
    try:
        return gpu, Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, ValueError):  # a container or WSL: the driver says only which CUDA it is for
        version = _core.driver_version()
        return gpu, f"for CUDA {version // 1000}.{version % 1000 // 10}"


def path(gpu: str, driver: str) -> Path:
    """Where the table of a machine is, in the user's cache folder."""
    name = "-".join(re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") for text in (gpu, driver))
    return cache.folder() / f"tuning-{name}-v{VERSION}.json"


def load(gpu: str, driver: str) -> Table | None:
    """The table of a machine; None where there is none.

    One that cannot be read, is not whole, or is another machine's or version's is left alone with a warning.
    """
    where = None
    try:
        where = path(gpu, driver)
        return _parsed(where.read_text(encoding="utf-8"), gpu, driver)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home; nested beyond all measure
        _log.warning("kvbm: %s is ignored; `kvbm tune` remakes it: %s", where or "the cache folder", _reason(error))
        return None


def _parsed(text: str, gpu: str, driver: str) -> Table:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, got {type(data).__name__}")
    for key, expected in (("version", VERSION), ("gpu", gpu), ("driver", driver)):
        if data.get(key) != expected:
            raise ValueError(f"{key}: expected {expected!r}, got {data.get(key)!r}")
    date, kvbm, rows = data.get("date"), data.get("kvbm"), data.get("rows")
    if not (isinstance(date, str) and isinstance(kvbm, str) and isinstance(rows, list) and rows):
        raise ValueError("expected a date, the version of kvbm and rows")
    return Table(gpu, driver, date, kvbm, tuple(_parsed_row(i, row) for i, row in enumerate(rows)))


def _parsed_row(index: int, given: Any) -> Row:
    match given:
        case [str(direction), str(strategy), int(run), int(total), float(seconds)]:
            known = direction in DIRECTIONS and strategy in STRATEGIES
            if known and run > 0 and total > 0 and 0 < seconds < math.inf:
                return Row(direction, strategy, run, total, seconds)
    raise ValueError(
        f"rows[{index}]: expected direction, strategy, run_bytes, total_bytes and seconds, got {given!r:.100}"
    )


def save(table: Table) -> Path:
    """Write a table where `load` finds it, whole or not at all: of two processes at once the last one's stays.

    Raises
    ------
    OSError, RuntimeError
        The folder cannot be made or written; there is no home.
    """
    where = path(table.gpu, table.driver)
    head = {
        "version": VERSION,
        "gpu": table.gpu,
        "driver": table.driver,
        "date": table.date,
        "kvbm": table.kvbm,
        "columns": list(Row._fields),
    }
    rows = ",\n".join(f"  {json.dumps(row)}" for row in table.rows)
    text = f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'
    with cache.replacing(where, mode=0o600) as part:
        part.write_text(text, encoding="utf-8")
    return where


# ---- measuring -----------------------------------------------------------------------------------------------------

#: Bytes that stay together, and that a batch moves.
RUNS = (4 << 10, 32 << 10, 256 << 10, 4 << 20)
TOTALS = (256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)

_ROUNDS = 9  # of every strategy in turn, as far as the time suffices
_SECONDS = 0.5  # for one direction, the pools not counted
_WAKE_SECONDS = 0.03  # until clocks and links are up
_TOO_LONG = 0.1  # a copy that is expected to take longer is left to extrapolation

#: Both keep runs whole; between them every run goes somewhere else, so a run is contiguous on both sides, in the pieces of
#: a staged copy, and in what is left to the engine alone.
_NEAR, _FAR = "b l t d", "l b t d"


def _grid() -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Run, block, totals: small batches of small blocks, large ones of blocks as large as a model's."""
    for run in RUNS:
        for block, totals in ((256 << 10, TOTALS[:2]), (1 << 20, TOTALS[2:])):
            if run <= totals[0]:
                yield run, max(run, block), totals


def _shapes(run: int, block: int) -> tuple[Any, Any, Any]:
    """Layouts near and far and a block's shape, such that runs have this length."""
    from . import spec
    from .shapes import BlockShape

    near, far = (spec.parse(f'order: "{order}"', "tuning", order.replace(" ", "")) for order in (_NEAR, _FAR))
    return near, far, BlockShape(nl=block // run, no=1, nh=1, nt=1, hd=run, dtype="uint8")


class _StoppedError(Exception):
    """The measuring thread was told to end."""


def measure(
    device: int,
    progress: Progress | None = None,
    *,
    directions: Sequence[str] = DIRECTIONS,
    peers: Iterable[int] | None = None,
) -> Table:
    """Measure the strategies on this machine.

    Parameters
    ----------
    device : int
        CUDA device ordinal.
    progress : callable, optional
        Called as ``progress(done, of)`` after every step, on another thread.
    directions : sequence of str
        Which of `DIRECTIONS`; all of them if not given.
    peers : iterable of int, optional
        GPUs to measure ``p2p`` with (the medians of all are kept); every other one if not given.

    Returns
    -------
    Table
        See `save`; nothing is written here.

    Raises
    ------
    CudaError, CudaUnavailableError
        No GPU; not enough memory: up to 256 MiB of the GPU, and 64 MiB that are pinned, are needed for a moment.

    Notes
    -----
    It takes about 2 s, and half a second for the other GPUs together.  It works on a thread and streams of its own: neither the
    caller's current device nor a capture that is going on elsewhere notices.
    """
    from . import __version__, _core

    gpu, driver = machine(device)
    others = [d for d in range(_core.device_count()) if d != device] if peers is None else list(peers)
    jobs = [(direction, -1) for direction in directions if direction != "p2p"]
    jobs += [("p2p", peer) for peer in others if "p2p" in directions]
    steps = len(jobs) * sum(len(totals) for _, _, totals in _grid())
    ended = 0
    stop = threading.Event()

    def step() -> None:
        nonlocal ended
        ended += 1
        if progress is not None:
            progress(ended, steps)
        if stop.is_set():
            raise _StoppedError

    def work() -> list[Row]:
        with _stream(device) as stream:
            return [
                row
                for direction, peer in jobs
                for row in _measured(
                    direction, device, peer, stream, _SECONDS / (len(others) if direction == "p2p" else 1), step
                )
            ]

    rows = _medians(_on_a_thread(work, stop))
    return Table(gpu, driver, dt.date.today().isoformat(), __version__, tuple(rows))


def _on_a_thread(work: Callable[[], list[Row]], stop: threading.Event) -> list[Row]:
    """A thread has a current context and a capture mode of its own; the caller's stay as they are."""
    rows: list[Row] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            rows.extend(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="kvbm-tune")
    try:
        thread.start()
        thread.join()
    except BaseException:  # Ctrl-C: the GPU's memory is given back first
        stop.set()
        if thread.is_alive():
            thread.join()
        raise
    if errors:
        raise errors[0]
    return rows


@contextlib.contextmanager
def _stream(device: int) -> Iterator[Any]:
    """A stream, and a thread that may allocate whatever is being captured elsewhere."""
    from cuda.bindings import driver
    from cuda.core import Device

    gpu = Device(device)
    gpu.set_current()
    driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    stream = gpu.create_stream()
    try:
        yield stream
    finally:
        stream.close()


def _used_peers(device: int) -> list[int]:
    """The other GPUs that this process has a context on."""
    from cuda.bindings import driver

    from . import _core

    used = []
    for peer in range(_core.device_count()):
        status, _, active = driver.cuDevicePrimaryCtxGetState(peer)
        if peer != device and int(status) == 0 and active:
            used.append(peer)
    return used


def _measured(
    direction: str, device: int, peer: int, stream: Any, seconds: float, step: Callable[[], None]
) -> Iterator[Row]:
    import numpy as np

    from . import _core
    from .pool import Pool
    from .transfer import Transfer

    names: tuple[str, ...] = ("direct", "engine") if direction == "d2d" else STRATEGIES
    if direction == "p2p" and not _core.enable_peer(device, peer):
        names = names[1:]
    place = {"d2d": f"cuda:{device}", "p2p": f"cuda:{peer}"}.get(direction, "pinned")
    grid = list(_grid())
    left = sum(len(totals) for _, _, totals in grid)
    random = np.random.default_rng(0)
    is_awake = False
    slowest = dict.fromkeys(names, 0.0)
    begin, elsewhere = time.perf_counter(), 0.0
    for run, block, totals in grid:
        near_layout, far_layout, shape = _shapes(run, block)
        with contextlib.ExitStack() as stack:
            setup = time.perf_counter()
            blocks = max(totals[-1] // block, 16)
            near = stack.enter_context(Pool.allocate(near_layout, shape, blocks, f"cuda:{device}"))
            far = stack.enter_context(Pool.allocate(far_layout, shape, blocks, place))
            ends = (far, near) if direction == "h2d" else (near, far)
            moves = {name: stack.enter_context(Transfer(*ends, strategy=name)) for name in names}
            elsewhere += time.perf_counter() - setup
            for total in totals:
                # Neighbours are never neighbours on the other side, or the engine would merge them.
                src = random.permutation(blocks)[: total // block]
                dst = blocks - 1 - src
                if not is_awake:
                    is_awake, until = True, time.perf_counter() + _WAKE_SECONDS
                    elsewhere += _WAKE_SECONDS
                    while time.perf_counter() < until:
                        _timed(moves[names[0]], src, dst, stream)
                spent = time.perf_counter() - begin - elsewhere
                # A strategy's seconds a byte at this run length, from the batch before.
                quick = {name: move for name, move in moves.items() if slowest[name] * total < _TOO_LONG}
                for name, took in _sampled(quick, src, dst, stream, max(seconds - spent, 0) / left).items():
                    slowest[name] = took / total
                    yield Row(direction, name, run, total, took)
                left -= 1
                step()
        slowest = dict.fromkeys(names, 0.0) if totals[-1] == TOTALS[-1] else slowest


def _sampled(moves: Mapping[str, Any], src: Any, dst: Any, stream: Any, seconds: float) -> dict[str, float]:
    """The least seconds of each; strategies take turns, so that what drifts drifts for all."""
    begin = time.perf_counter()
    for move in moves.values():
        _timed(move, src, dst, stream)
    samples: dict[str, list[float]] = {name: [] for name in moves}
    for _ in range(_ROUNDS):
        for name, move in moves.items():
            samples[name].append(_timed(move, src, dst, stream))
        if time.perf_counter() - begin > seconds:
            break
    # What else runs on the machine only ever makes a copy slower, and not every strategy alike.
    return {name: min(times) for name, times in samples.items()}


def _timed(move: Any, src: Any, dst: Any, stream: Any) -> float:
    """From the call to the end of the copy, on the host's clock: submitting many small pieces is part of the price."""
    start = time.perf_counter()
    move.copy(src, dst, stream=stream).synchronize()
    return time.perf_counter() - start


def _medians(rows: Iterable[Row]) -> list[Row]:
    """One row a key: `limits` is not told which peer."""
    found: dict[tuple[str, str, int, int], list[float]] = {}
    for row in rows:
        found.setdefault(row[:4], []).append(row.seconds)
    return [Row(*key, float(f"{statistics.median(times):.4g}")) for key, times in found.items()]
