"""Links between two processes of one machine beside what carries their bytes: ``kvbm bench link``.

Each figure is the time from the first call until the other side has said that all of it is there.  Ratios are of medians that were
taken in turns.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from .. import spec, wire
from ..errors import KvbmError
from ..reshard import Endpoint, Placement, Span
from ..shapes import BlockShape, load_shape
from .clock import Timed
from .measure import random_pool
from .race import ROUNDS, Runner, race, race_options, row_of, write_race
from .section import TINY, Note, Row, figures, note, stamp
from .ways import ASKED, DECODE, LIMIT, PREFILL, WAYS, Pair

__all__ = ["SECTIONS", "link", "measure"]

SECTIONS = ("messages", "chunks", "many")

#: Links of a process, and the bytes of a message of one.
LINKS, EACH = 64, 4 << 20


class Run(NamedTuple):
    """What all of it must know."""

    place: str
    model: BlockShape
    iters: int
    quick: bool
    note: Note

    @property
    def token_bytes(self) -> int:
        return replace(self.model, nt=1).nbytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of a message: 8, 64 and 336 MB, whole blocks of both sides."""
        return tuple(map(self.tokens, (8 << 20,) if self.quick else (8 << 20, 64 << 20, 320 << 20)))

    def tokens(self, nbytes: int) -> int:
        """As many as take so many bytes, in whole blocks of both sides."""
        return max(nbytes // self.token_bytes // DECODE[1], 1) * DECODE[1]


def measure(run: Run, sections: tuple[str, ...]) -> Iterator[Row]:
    """Rows of these `SECTIONS`; transports that are not here are left out with a note."""
    end = stamp(run.place)
    for name in sections:
        for row in _SECTIONS[name](run):
            yield {**row, **end}


# ---- messages ------------------------------------------------------------------------------------------------------


def _messages(run: Run) -> Iterator[Row]:
    with (
        tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder,
        Pair(run.model, max(run.sizes), folder) as pair,
    ):
        for name, (_, beside) in WAYS.items():
            if beside and beside not in pair.ways:
                continue
            try:
                pair.open(name)
            except (KvbmError, ImportError) as error:
                pair.ways.pop(name, None)
                run.note(f"{name}: left out: {error}")
        for tokens in run.sizes:
            for name in pair.ways:
                pair.check(name, tokens)
            times = race({name: pair.runner(name, tokens) for name in pair.ways}, run.iters)
            nbytes = tokens * run.token_bytes
            for name, way in pair.ways.items():
                beside = WAYS[name][1] or name
                yield row_of("a message", name, way.pieces, nbytes, times[name], beside, times[beside], ASKED.get(name))


# ---- what is fixed -------------------------------------------------------------------------------------------------


class Ends:
    """Engines of one rank each within this process: one that sends, and others."""

    def __init__(self, model: BlockShape, tokens: int, many: int, stack: contextlib.ExitStack, **options: Any) -> None:
        hub = wire.Hub()
        self.tokens = tokens
        self.tables = [(np.random.default_rng(nt).permutation(tokens // nt), nt) for _, nt in (PREFILL, DECODE)]
        made: list[Endpoint] = []
        for name, (layout, nt) in [("prefill", PREFILL), *((f"decode-{k}", DECODE) for k in range(many))]:
            place = Placement("tp1", model=model, nt=nt, name=name)
            pool = stack.enter_context(
                random_pool(spec.load(layout), place.shape(0), tokens // nt, "cpu", seed=len(made))
            )
            made.append(stack.enter_context(Endpoint(name, place, 0, pool, wire=wire.memory(name, hub), **options)))
        self.near, *self.far = made
        self.to = [self.near.meet([end.card()]) for end in self.far]
        self.of = [end.meet([self.near.card()]) for end in self.far]
        self.number = 0

    def go(self, links: int, tokens: int, keys: int = 1) -> float:
        """So many sequences on each of so many links, all at once; seconds until all of it is there."""
        self.number += 1
        src, dst = (Span(table[: tokens // nt], range(tokens)) for table, nt in self.tables)
        start = time.perf_counter()
        handles = []
        for key in (f"{self.number}/{k}" for k in range(keys)):
            handles += [link.receive(key, dst, timeout=LIMIT) for link in self.of[:links]]
            handles += [link.send(key, src, timeout=LIMIT) for link in self.to[:links]]
        for handle in handles:
            handle.synchronize()
        return time.perf_counter() - start


def _chunks(run: Run) -> Iterator[Row]:
    """Time of the thread of each side a chunk, of chunks so small that their bytes cost nothing; and descriptors a chunk."""
    model, chunk = replace(TINY, nt=1), 16 * TINY.nbytes // TINY.nt
    chunks = 256 if run.quick else 1024
    with contextlib.ExitStack() as stack:
        ends = Ends(model, 16 * chunks, 1, stack, chunk_bytes=chunk, slots=16)
        puts, put = itertools.count(), ends.near.wire.put

        def counted(*given: Any) -> Any:
            next(puts)
            return put(*given)

        ends.near.wire.put = counted
        for end in (ends.near, *ends.far):
            times = []
            for turn in range(ROUNDS):
                before = end.call(time.thread_time)
                ends.go(1, ends.tokens)
                if turn:
                    times.append((end.call(time.thread_time) - before) / chunks)
            seconds = statistics.median(times)
            yield {
                "case": "host time a chunk", "by": f"the side of {end.engine}", "n": chunks, "total_bytes": chunk,
                "median_ms": figures(seconds * 1e3), "gbps": "", "beside": "", "beside_ms": "", "ratio": "", "asked": "<= 0.05 ms",
                "reached": "yes" if seconds <= 50e-6 else "no",
            }  # fmt: skip
        each = next(puts) / (2 * ROUNDS * chunks)
        yield {
            "case": "descriptors", "by": "a chunk and peer", "n": chunks, "total_bytes": "", "median_ms": "", "gbps": "",
            "beside": "", "beside_ms": "", "ratio": round(each, 4), "asked": "<= 1", "reached": "yes" if each <= 1 else "no",
        }  # fmt: skip


def _many(run: Run) -> Iterator[Row]:
    """Sequences, each on a link of its own, beside as many on one link."""
    tokens, links = run.tokens(EACH), 8 if run.quick else LINKS
    options = {"ring_bytes": 32 << 20, "chunk_bytes": run.token_bytes * tokens // 4}
    with contextlib.ExitStack() as stack:
        ends = Ends(run.model, tokens, links, stack, **options)
        runners: dict[str, Runner] = {
            "1 link": functools.partial(_timed, functools.partial(ends.go, 1, tokens, links)),
            f"{links} links": functools.partial(_timed, functools.partial(ends.go, links, tokens)),
        }
        times = race(runners, run.iters)
    first, last = runners
    yield row_of(
        "sequences at once", last, links, links * tokens * run.token_bytes, times[last], first, times[first], 0.8
    )


def _timed(call: Callable[[], float], iters: int, warmup: int) -> Timed:
    return Timed.of([call() for _ in range(warmup + iters)][warmup:], "clock")


_SECTIONS: dict[str, Callable[[Run], Iterator[Row]]] = {"messages": _messages, "chunks": _chunks, "many": _many}


# ---- the command ---------------------------------------------------------------------------------------------------


@click.command()
@race_options(SECTIONS, 15, "llama-3.1-8b", "The smallest message, and fewer links.")
def link(place: str, iters: int, out: Path | None, profile: str | None, sections: tuple[str, ...], quick: bool) -> None:
    """Links between two processes of this machine: NIXL and gloo themselves, wires on them, links, and what engines do.

    With --out a table goes to stdout. What comes is compared before it is timed; ratios are of medians taken in turns. All of it
    is memory of the host.
    """
    if place != "cpu":
        note(f"{place}: links are measured between processes on the CPU")
        place = "cpu"
    model = load_shape(profile or "llama-3.1-8b")
    write_race(measure(Run(place, model, iters, quick, note), sections), place, model, out, "link")
