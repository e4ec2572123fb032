"""The table of the fastest strategies on this machine: measurements, the cost of a batch, and the file that stores them.

A row is one measurement: direction, strategy, bytes of a run, sizes of a block and of the batch, seconds.  `Cost` is a model of one
strategy, fitted to its rows.  `Table.choose` chooses the strategy with the smallest predicted time.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import stat
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import escaping
from ..planner.plan import size_text
from ..system import cache
from .strategies import STRATEGIES

_log = escaping(logging.getLogger(__name__))

#: Version of the file.  Files of other versions are ignored.
VERSION = 2

DIRECTIONS = ("d2h", "h2d", "d2d", "p2p")

#: Bytes of a slot of the ring for staged copies; larger if a block is larger.
CHUNK_BYTES = 32 << 20

#: Shorter runs are copied by the copy engine only on request: each costs half a microsecond of CPU time, which a measurement on
#: an idle machine does not show.
ENGINE_RUN = 256 << 10

#: Bytes of a staged batch that are packed before, or unpacked after, the copy engine works (``kSmallGroupBytes`` of staging.cpp),
#: and the number of these up to which a batch that is packed first is one launch and one copy.
_SMALL_GROUP, _AT_ONCE = 2 << 20, 4

#: Required advantage of the engine over the kernel on one GPU: only a kernel can be captured into a graph with ids on the device.
_LEAD = {"d2d": 1.05}

_UNIT, _LONG_RUN = 1e-3, 256 << 10  # for a fit: scale of exposed bytes; runs with full weight

_MOST_ENTRIES = 8  # the limit of a `_core.Route`
_MOST_PAIRS = 1 << 20

#: Limits for a file: characters, bytes of a batch, and seconds of a measurement.
_MOST_TEXT, _MOST_TOTAL, _SECONDS = 1 << 20, 1 << 50, (1e-9, 1e6)


class Way(NamedTuple):
    """How a strategy copies each block: average bytes of a run, and number of launches."""

    run_bytes: int
    launches: int = 1


class Row(NamedTuple):
    """One measurement: the median time of several copies, on the stream."""

    direction: str
    strategy: str
    run_bytes: int
    block_bytes: int
    total_bytes: int
    seconds: float


# ---- the cost of a batch -------------------------------------------------------------------------------------------


def _groups(pairs: Any, block_bytes: int, chunk_bytes: int, *, gathers: bool) -> tuple[Any, Any]:
    """Number of groups of a staged batch, and the bytes that are packed or unpacked while the copy engine is idle.

    As `group_sizes` of staging.cpp: a small group at the end where the kernel works alone, the others as large as a slot.
    """
    import numpy as np

    pairs = np.asarray(pairs)
    most = max(chunk_bytes // block_bytes, 1)
    small = min(most, max(_SMALL_GROUP // block_bytes, 1))
    count = 1 + -(-np.maximum(pairs - small, 0) // most)
    if not gathers:
        return count, np.minimum(pairs, small) * block_bytes
    at_once = (pairs <= most) & (pairs * block_bytes <= _AT_ONCE * _SMALL_GROUP)
    return np.where(at_once, 0, count), np.where(at_once, pairs, np.minimum(pairs, small)) * block_bytes


def groups_of(pairs: int, block_bytes: int, *, gathers: bool) -> int:
    """Number of launches of a staged batch, one per group in the ring."""
    return int(_groups(pairs, block_bytes, CHUNK_BYTES, gathers=gathers)[0]) or 1


@dataclass(frozen=True)
class Cost:
    """Seconds of a batch: ``fixed * launches + group * groups + exposed * bytes_exposed + seconds_a_byte(run) * bytes``."""

    strategy: str
    #: True if staged blocks are packed first and then copied by the copy engine: all directions except ``h2d``.
    gathers: bool
    fixed: float  # seconds per launch
    #: For staged copies: seconds per group of blocks (none for a batch that is packed at once), and seconds per byte
    #: that a kernel copies while the copy engine is idle.
    group: float
    exposed: float
    #: Run length in bytes, and seconds per byte for it.  Runs ascend, and seconds never increase.
    slopes: tuple[tuple[int, float], ...]

    @classmethod
    def fit(cls, rows: Sequence[Row]) -> Cost:
        """Fit the cost of one strategy in one direction: least squares of relative errors, with no negative coefficient."""
        import numpy as np

        strategy, gathers = rows[0].strategy, rows[0].direction != "h2d"
        runs = sorted({row.run_bytes for row in rows})
        table = np.zeros((len(rows), 3 + len(runs)))
        for i, row in enumerate(rows):
            table[i, 0] = 1
            if strategy == "staged":
                pairs = row.total_bytes // row.block_bytes
                table[i, 1:3] = _groups(pairs, row.block_bytes, CHUNK_BYTES, gathers=gathers)
                table[i, 2] *= _UNIT
            table[i, 3 + runs.index(row.run_bytes)] = row.total_bytes
        # Short runs have separate slopes and less weight in the common coefficients: they win or lose by a large factor.
        weights = np.array([min(row.run_bytes / _LONG_RUN, 1.0) ** 0.5 for row in rows])
        table *= (weights / [row.seconds for row in rows])[:, None]
        found = np.zeros(table.shape[1])
        taken = np.nonzero(table.any(axis=0))[0]
        while taken.size:  # drop the most negative one until there is none
            # If rows cannot separate two columns, the larger one (all bytes) gets the cost.
            solved = np.linalg.lstsq(table[:, taken], weights, rcond=None)[0]
            if solved.min() >= 0:
                found[taken] = solved
                break
            taken = np.delete(taken, (solved * np.linalg.norm(table[:, taken], axis=0)).argmin())
        slopes = np.maximum.accumulate(found[:2:-1])[::-1]  # a shorter run is never faster
        fixed, group, exposed = found[:3].tolist()
        return cls(strategy, gathers, fixed, group, exposed * _UNIT, tuple(zip(runs, slopes.tolist(), strict=True)))

    def seconds_a_byte(self, run_bytes: int) -> float:
        """Seconds per byte: linear between two run lengths.  For the copy engine, all shorter runs cost the same per run."""
        runs, is_kernel = [run for run, _ in self.slopes], self.strategy == "direct"
        above = bisect_right(runs, run_bytes)
        if above == len(runs):
            return self.slopes[-1][1]
        if above == 0 and (is_kernel or len(runs) == 1):
            return self.slopes[0][1] * (1 if is_kernel else runs[0] / run_bytes)
        (run0, slope0), (run1, slope1) = self.slopes[max(above - 1, 0) :][:2]
        return slope1 + (slope0 - slope1) * (1 / run_bytes - 1 / run1) / (1 / run0 - 1 / run1)

    def seconds(self, pairs: Any, block_bytes: int, way: Way, chunk_bytes: int = CHUNK_BYTES) -> Any:
        """Predicted seconds of batches of `pairs` pairs (a number, or an array)."""
        found = self.fixed * way.launches + self.seconds_a_byte(way.run_bytes) * block_bytes * pairs
        if self.strategy == "staged":
            groups, exposed = _groups(pairs, block_bytes, chunk_bytes, gathers=self.gathers)
            found = found + self.group * groups + self.exposed * exposed
        return found


#: Default costs without a table: fitted on one NVIDIA H200 on PCIe 5.
BUILT_IN: dict[tuple[str, str], Cost] = {
    ("d2h", "direct"): Cost("direct", True, 6.9e-6, 0, 0, ((1, 1.901e-11),)),
    ("d2h", "staged"): Cost("staged", True, 9.7e-6, 4.2e-6, 1e-12, ((32 << 10, 2.43e-11), (4 << 20, 1.807e-11))),
    ("h2d", "direct"): Cost("direct", False, 9.1e-6, 0, 0, ((1, 1.946e-11),)),
    ("h2d", "staged"): Cost("staged", False, 11.7e-6, 1.6e-6, 1e-12, ((32 << 10, 2.43e-11), (4 << 20, 1.807e-11))),
}


class Choice(NamedTuple):
    """The strategy for each size of batch."""

    #: Largest number of pairs → strategy.  The last one (at most the eighth) is for all larger batches.
    limits: tuple[tuple[int, str], ...]
    why: str  # the same as a text, with predicted speeds

    @classmethod
    def of(
        cls, costs: Mapping[str, Cost], ways: Mapping[str, Way], block_bytes: int, direction: str, chunk_bytes: int
    ) -> Choice:
        """The strategy with the smallest predicted time, for batches of 1 to `_MOST_PAIRS` pairs."""
        import numpy as np

        names = [name for name in STRATEGIES if name in costs and name in ways]

        def times(pairs: Any) -> Any:
            return np.array([costs[n].seconds(pairs, block_bytes, ways[n], chunk_bytes) for n in names])

        def best(pairs: Any) -> Any:
            found = times(pairs)
            if names[0] == "direct":
                found[0] /= _LEAD.get(direction, 1.0)
            return found.argmin(axis=0)

        counts = _counts()
        taken = best(counts)
        limits = []
        for i in np.nonzero(np.diff(taken))[0]:
            low, high = int(counts[i]), int(counts[i + 1])  # the last one before the change lies in [low, high)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if best(np.array([middle]))[0] == taken[i] else (low, middle)
            limits.append((low, names[taken[i]]))
        limits = _few([*limits, (_MOST_PAIRS, names[taken[-1]])])
        texts: list[str] = []
        start = 1
        for end, name in limits:
            is_last = end == _MOST_PAIRS
            at = math.isqrt(start * (max((64 << 20) // block_bytes, 4 * start) if is_last else end)) or 1
            gbps = {
                n: at * block_bytes / float(t) / 1e9 for n, t in zip(names, times(np.array([at]))[:, 0], strict=True)
            }
            other = max((n for n in names if n != name), key=gbps.__getitem__, default=None)
            against = f" against {other} {gbps[other]:.3g}" if other else ""
            where = f"up to {size_text(end * block_bytes)}" if not is_last else "beyond that" if texts else "always"
            texts.append(f"{where} {name} ({size_text(at * block_bytes)} at {gbps[name]:.3g} GB/s{against})")
            start = end
        return cls((*limits[:-1], (limits[-2][0] + 1 if limits[1:] else 0, limits[-1][1])), ", ".join(texts))


@functools.cache
def _counts() -> Any:
    """Numbers of pairs at which the choice is evaluated: all small ones, then in steps of less than one percent."""
    import numpy as np

    return np.unique(np.geomspace(1, _MOST_PAIRS, 1500).astype(np.int64))


def _few(limits: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """At most `_MOST_ENTRIES` entries: the narrowest ones are merged into the one before (the first into the next)."""
    while len(limits) > _MOST_ENTRIES:
        starts = [1, *(end + 1 for end, _ in limits[:-1])]
        at = min(range(len(limits)), key=lambda i: (limits[i][0] + 1) / starts[i])
        if at:
            limits[at - 1] = (limits[at][0], limits[at - 1][1])
        del limits[at]
        limits = [entry for entry, behind in pairwise([*limits, (0, "")]) if entry[1] != behind[1]]
    return limits


# ---- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The measurements on one kind of GPU with one driver."""

    #: Name of the GPU and version of the driver, as the driver reports them.
    gpu: str
    driver: str
    date: str  # date of the latest measurement, ISO 8601
    kvbm: str  # version of kvbm that measured
    rows: tuple[Row, ...]

    @functools.cached_property
    def costs(self) -> dict[tuple[str, str], Cost]:
        """The fitted cost of every direction and strategy that was measured."""
        found: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault(row[:2], []).append(row)
        return {key: Cost.fit(rows) for key, rows in found.items()}

    @property
    def directions(self) -> tuple[str, ...]:
        """The measured directions."""
        there = {row.direction for row in self.rows}
        return tuple(direction for direction in DIRECTIONS if direction in there)

    @property
    def title(self) -> str:
        return f"{self.gpu}, driver {self.driver}, {self.date}"

    def choose(
        self, direction: str, ways: Mapping[str, Way], block_bytes: int, chunk_bytes: int = CHUNK_BYTES
    ) -> Choice | None:
        """The strategy for each batch; None if no strategy was measured in this direction."""
        return choose(self.costs, direction, ways, block_bytes, chunk_bytes)


def choose(
    costs: Mapping[tuple[str, str], Cost], direction: str, ways: Mapping[str, Way], block_bytes: int,
    chunk_bytes: int = CHUNK_BYTES,
) -> Choice | None:  # fmt: skip
    """As `Table.choose`, by costs of (direction, strategy)."""
    known = {strategy: cost for (of, strategy), cost in costs.items() if of == direction and strategy in ways}
    return Choice.of(known, ways, block_bytes, direction, chunk_bytes) if known else None


# ---- the file ------------------------------------------------------------------------------------------------------


def path(gpu: str, driver: str) -> Path:
    """The file of a machine's table, in the user's cache folder."""
    name = "-".join(re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") for text in (gpu, driver))
    return cache.folder() / f"tuning-{name}-v{VERSION}.json"


def reason(error: Exception) -> str:
    """The message of an error, or its class if it has none."""
    return str(error) or type(error).__name__


def load(gpu: str, driver: str) -> Table | None:
    """The table of a machine; None if there is none.

    A table that is unreadable, incomplete, or of another machine or version is ignored with a warning.
    """
    where = None
    try:
        where = path(gpu, driver)
        with os.fdopen(_opened(where), encoding="utf-8") as file:
            text = file.read(_MOST_TEXT + 1)
        if len(text) > _MOST_TEXT:
            raise ValueError(f"expected at most {_MOST_TEXT:,} characters")
        return _parsed(text, gpu, driver)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home; nested beyond all measure
        _log.warning("kvbm: %s is ignored; `kvbm tune` remakes it: %s", where or "the cache folder", reason(error))
        return None


def _opened(path: Path) -> int:
    """A descriptor of a regular file; a FIFO would wait for its writer."""
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise ValueError("expected a regular file")
    return number


def _parsed(text: str, gpu: str, driver: str) -> Table:
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"expected an object, got {type(data).__name__}")
    for key, expected in (("version", VERSION), ("gpu", gpu), ("driver", driver)):
        if data.get(key) != expected:
            raise ValueError(f"{key}: expected {expected!r}, got {data.get(key)!r:.100}")
    date, kvbm, rows = data.get("date"), data.get("kvbm"), data.get("rows")
    texts = all(isinstance(one, str) and one.isprintable() and len(one) < 100 for one in (date, kvbm))
    if not (texts and isinstance(rows, list) and rows):
        raise ValueError("expected a date, the version of kvbm and rows")
    return Table(gpu, driver, str(date), str(kvbm), tuple(_parsed_row(i, row) for i, row in enumerate(rows)))


def _parsed_row(index: int, given: Any) -> Row:
    match given:
        case [str(direction), str(strategy), int(run), int(block), int(total), float(seconds)]:
            known = direction in DIRECTIONS and strategy in STRATEGIES
            if known and 0 < run <= block <= total < _MOST_TOTAL and _SECONDS[0] < seconds < _SECONDS[1]:
                return Row(direction, strategy, run, block, total, seconds)
    raise ValueError(f"rows[{index}]: expected {', '.join(Row._fields)}, got {given!r:.100}")


def save(table: Table) -> Path:
    """Write a table atomically to the file that `load` reads.  If two processes write it, the last one wins.

    Raises `OSError` or `RuntimeError` if the folder cannot be created or written, or there is no home folder.
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
    where.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # private, as the folder of compiled kernels below it
    with cache.replacing(where, mode=0o600) as part:
        part.write_text(text, encoding="utf-8")
    return where
