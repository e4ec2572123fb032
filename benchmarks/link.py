"""Links between two processes of one machine, compared with their transports: ``python -m benchmarks link``.

The time of a message is from the first call until the other side has confirmed that all of it has arrived.  Ratios compare
medians of alternating measurements.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from kvbm import _core, wire
from kvbm.bench.measure import Memory, Yardstick, device_of, make_clock, random_pool
from kvbm.cli.common import size_option
from kvbm.cli.values import device as device_option
from kvbm.layout import spec
from kvbm.layout.shapes import BlockShape, load_shape, round_up
from kvbm.link.chunk import MOST
from kvbm.link.chunks import ChunksDone
from kvbm.memory.array_info import Array
from kvbm.reshard import Cut, Endpoint, Packer, Placement, Span, plan
from kvbm.system.clock import Timed

from .interference import Model
from .race import ROUNDS, Runner, race, race_options, row_of, runner, write_race
from .ranks import SENDERS, sequences
from .section import TINY, Note, Row, figures, note, stamp
from .ways import DECODE, LIMIT, PREFILL, Pair, ways_of

__all__ = ["SECTIONS", "link", "measure"]

SECTIONS = ("messages", "cut", "beside", "chunks", "many", "ranks")

#: Bytes of the message of a long prompt, between GPUs.
_LONG = 2560 << 20

#: Number of links of a process, and bytes per message.
LINKS, EACH = 64, 4 << 20


class Run(NamedTuple):
    """The parameters of a run.

    Attributes
    ----------
    places : tuple of str
        Places of the memory of the sending and of the receiving process.
    options : mapping of str to int
        Options of `Endpoint`.
    """

    places: tuple[str, str]
    model: BlockShape
    iters: int
    quick: bool
    note: Note
    options: Mapping[str, int] = {}

    @property
    def place(self) -> str:
        return self.places[0]

    @property
    def token_bytes(self) -> int:
        return replace(self.model, nt=1).nbytes

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens per message: 8, 64 and 336 MB, in whole blocks of both sides."""
        return tuple(map(self.tokens, (8 << 20,) if self.quick else (8 << 20, 64 << 20, 320 << 20)))

    def tokens(self, nbytes: int) -> int:
        """The number of tokens in `nbytes`, in whole blocks of both sides."""
        return max(nbytes // self.token_bytes // DECODE[1], 1) * DECODE[1]


def measure(run: Run, sections: tuple[str, ...]) -> Iterator[Row]:
    """Rows of the given `SECTIONS`.  Transports that are not installed are left out with a note."""
    end = stamp(run.place)
    for name in sections:
        for row in _SECTIONS[name](run):
            yield {**row, **end}


# ---- messages ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(run: Run, tokens: int, names: Iterable[str], *, receives: bool = False) -> Iterator[Pair]:
    """Both processes with the given ways opened.  Ways that cannot be opened are left out with a note.

    `receives`: this process receives.
    """
    with (
        tempfile.TemporaryDirectory(prefix="kvbm-bench-") as folder,
        Pair(run.model, tokens, folder, run.places, run.options, receives=receives) as pair,
    ):
        known = ways_of(run.place)
        for name in names:
            if known[name].beside and known[name].beside not in pair.ways:
                continue
            if known[name].needs_two and run.places[0] == run.places[1]:
                run.note(f"{name}: left out: it needs two GPUs")
                continue
            try:
                pair.open(name)
            except Exception as error:  # also errors of the transport
                way = pair.ways.pop(name, None)
                run.note(f"{name}: left out: {error}")
                with contextlib.suppress(Exception):
                    if way is not None:
                        way.close()
        yield pair


def _messages(run: Run) -> Iterator[Row]:
    known = ways_of(run.place)
    long = run.tokens(_LONG)
    sizes = run.sizes if run.quick or device_of(run.place) < 0 else (*run.sizes, long)
    with _opened(run, max(sizes), known) as pair:
        for tokens in sizes:
            for name, way in pair.ways.items():
                if way.copies or tokens != long:  # a message in one piece is compared on the host, which takes long
                    pair.check(name, tokens)
            times = race({name: pair.runner(name, tokens) for name in pair.ways}, run.iters)
            nbytes = tokens * run.token_bytes
            for name, way in pair.ways.items():
                beside = known[name].beside or name
                asked = known[name].asked_of(nbytes)
                yield row_of("a message", name, way.pieces, nbytes, times[name], beside, times[beside], asked)


# ---- packing and unpacking -----------------------------------------------------------------------------------------


def _cut(run: Run) -> Iterator[Row]:
    """Pack and unpack the chunks of a message with digests, compared with a memcpy of the same bytes on the same device."""
    kinds = {"pack": PREFILL, "unpack": DECODE}
    places = {name: Placement("tp1", model=run.model, nt=nt, name=name) for name, (_, nt) in kinds.items()}
    made = plan(places["pack"], places["unpack"])
    most = max(run.sizes)
    reaches = run.places[0] != run.places[1] and _core.enable_peer(*map(device_of, run.places))
    with make_clock(run.place) as clock, contextlib.ExitStack() as stack:
        pools = {
            name: stack.enter_context(
                random_pool(spec.load(layout), places[name].shape(0), most // nt, run.place, seed=nt)
            )
            for name, (layout, nt) in kinds.items()
        }
        nbytes = 2 * most * run.token_bytes  # with room for the trailers of chunks of any size
        near = stack.enter_context(contextlib.closing(Memory(nbytes, run.place)))
        far = stack.enter_context(contextlib.closing(Memory(nbytes, run.places[1]))) if reaches else None
        stick = Yardstick(run.place, run.place, most * run.token_bytes, clock)
        stack.callback(stick.close)
        for tokens in run.sizes:
            cuts = {
                name: Cut(
                    Packer(made, 0, pools[name], side="src" if name == "pack" else "dst"),
                    Span(np.random.default_rng(nt).permutation(most // nt)[: tokens // nt], range(tokens)),
                    most=run.options.get("chunk_bytes", MOST),
                )
                for name, (_, nt) in kinds.items()
            }
            calls = {name: _call(cuts[name], name, near, run.place) for name in kinds}
            calls["pack"](clock.stream).synchronize()
            calls["unpack"](clock.stream).synchronize()  # this also verifies the digests
            if far is not None:
                calls["pack over the link"] = _call(cuts["pack"], "pack", far, run.place)
            size = tokens * run.token_bytes
            runners: dict[str, Runner] = {"memcpy": functools.partial(_copied, stick, size)}
            if far is not None:
                across = functools.partial(_memcpy, far.address, near.address, size, device_of(run.place))
                runners["memcpy over the link"] = runner(clock, [across])
            runners |= {name: runner(clock, [call]) for name, call in calls.items()}
            times = race(runners, run.iters)
            for name in calls:
                beside = "memcpy over the link" if name.endswith("the link") else "memcpy"
                asked = (0.9 if size >= 300_000_000 else 0.75) if name.endswith("the link") else 0.93
                wanted = None if clock.device < 0 else asked
                yield row_of("chunks", name, len(cuts["pack"].chunks[0]), size, times[name], beside, times[beside], wanted)


def _call(cut: Cut, name: str, memory: Memory, place: str) -> Callable[[Any], ChunksDone]:
    """A call that packs all chunks of a cut into memory, or unpacks them."""
    each = round_up(max(chunk.size for chunk in cut.chunks[0]), 256)
    slots = {
        (0, k): Array(memory.address + k * each, (chunk.size,), (1,), "uint8", place, owner=memory)
        for k, chunk in enumerate(cut.chunks[0])
    }
    return lambda stream: getattr(cut, name)(slots, key="bench", stream=stream)


def _copied(stick: Yardstick, nbytes: int, iters: int, warmup: int) -> Timed:
    return stick.time(nbytes, iters=iters, warmup=warmup)


def _memcpy(dst: int, src: int, nbytes: int, device: int, stream: Any) -> None:
    _core.memcpy_batch(np.array([dst], np.uint64), np.array([src], np.uint64), nbytes, 1, device, _core.stream_handle(stream))


# ---- beside a model ------------------------------------------------------------------------------------------------


def _beside(run: Run) -> Iterator[Row]:
    """A matrix product on either GPU during consecutive messages, compared with the same during memcpy.

    The product and the copies of its GPU are of one process, as in an engine: a GPU gives its time to one process after the other.
    """
    if device_of(run.place) < 0:
        run.note("beside: left out: a product beside links is measured on GPUs")
        return
    import torch

    tokens, names = max(run.sizes), ("memcpy", "NIXL", "link by NIXL", "link, mapped", "link, direct")
    for number, place in enumerate(dict.fromkeys(run.places)):
        with _opened(run, tokens, names, receives=number == 1) as pair:
            if "memcpy" not in pair.ways:
                return
            model = Model(torch, device_of(place), 2048 if run.quick else 8192, 18, 3)
            model.warm()
            found = {
                name: model.beside(functools.partial(_sent, pair, name, tokens), tokens * run.token_bytes) for name in pair.ways
            }
        for name, one in found.items():
            reached = round(found["memcpy"].slowdown / one.slowdown, 4)
            yield {
                "case": f"a product beside, on {place}", "by": name, "n": 1, "total_bytes": tokens * run.token_bytes,
                "median_ms": figures(one.product * 1e3), "gbps": figures(one.rate / 1e9), "beside": "memcpy",
                "beside_ms": figures(found["memcpy"].product * 1e3), "ratio": reached,
                "asked": ">= 0.97" if name.startswith("link") else "",
                "reached": ("yes" if reached >= 0.97 else "no") if name.startswith("link") else "",
            }  # fmt: skip


def _sent(pair: Pair, name: str, tokens: int, stream: Any) -> None:  # noqa: ARG001
    pair.seconds(name, tokens, 1)


# ---- fixed costs ---------------------------------------------------------------------------------------------------


class Ends:
    """Engines of one rank each in this process: one that sends, and several that receive."""

    def __init__(
        self, place: str, model: BlockShape, tokens: int, many: int, stack: contextlib.ExitStack, **options: Any
    ) -> None:
        hub = wire.Hub()
        self.tokens = tokens
        self.tables = [(np.random.default_rng(nt).permutation(tokens // nt), nt) for _, nt in (PREFILL, DECODE)]
        made: list[Endpoint] = []
        for name, (layout, nt) in [("prefill", PREFILL), *((f"decode-{k}", DECODE) for k in range(many))]:
            rank = Placement("tp1", model=model, nt=nt, name=name)
            pool = stack.enter_context(
                random_pool(spec.load(layout), rank.shape(0), tokens // nt, place, seed=len(made))
            )
            made.append(stack.enter_context(Endpoint(name, rank, 0, pool, wire=wire.memory(name, hub), **options)))
        self.near, *self.far = made
        self.to = [self.near.meet([end.card()]) for end in self.far]
        self.of = [end.meet([self.near.card()]) for end in self.far]
        self.number = 0

    def go(self, links: int, tokens: int, keys: int = 1) -> float:
        """Send `keys` sequences on each of `links` links concurrently; return the seconds until all have arrived."""
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
    """CPU time per chunk of each side's thread, with chunks so small that copying takes no time; and descriptors per chunk."""
    model, chunk = replace(TINY, nt=1), 16 * TINY.nbytes // TINY.nt
    chunks = 256 if run.quick else 1024
    with contextlib.ExitStack() as stack:
        ends = Ends(run.place, model, 16 * chunks, 1, stack, chunk_bytes=chunk, slots=16)
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
    """Concurrent sequences on one link each, compared with the same number on a single link."""
    tokens, links = run.tokens(EACH), 8 if run.quick else LINKS
    options = {"ring_bytes": 32 << 20, "chunk_bytes": run.token_bytes * tokens // 4}
    with contextlib.ExitStack() as stack:
        ends = Ends(run.place, run.model, tokens, links, stack, **options)
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


def _ranks(run: Run) -> Iterator[Row]:
    """A sequence from four ranks to two, compared with the bytes that come from the other GPU: as many as a message has."""
    on_gpus = device_of(run.place) >= 0
    if on_gpus and run.places[0] == run.places[1]:
        run.note("ranks: left out: it needs two GPUs")
        return
    sizes = [SENDERS * tokens for tokens in ((*run.sizes, run.tokens(_LONG)) if on_gpus and not run.quick else run.sizes)]
    yield from sequences(run.places, run.model, sizes, run.iters, run.options)


_SECTIONS: dict[str, Callable[[Run], Iterator[Row]]] = {
    "messages": _messages, "cut": _cut, "beside": _beside, "chunks": _chunks, "many": _many, "ranks": _ranks,
}  # fmt: skip


# ---- the command ---------------------------------------------------------------------------------------------------


@click.command()
@race_options(SECTIONS, 15, "llama-3.1-8b", "The smallest message, and fewer links.")
@click.option("--to", callback=device_option, metavar="cpu|cuda:N",
              help="Where the other process has its memory.  [default: another GPU, if there is one]")  # fmt: skip
@size_option("--chunk", "chunk_bytes", help="The largest chunk.  [default: that of an Endpoint]")
@size_option("--ring", "ring_bytes", help="Registered memory of each side.  [default: that of an Endpoint]")
def link(
    place: str,
    iters: int,
    out: Path | None,
    shape_text: str | None,
    sections: tuple[str, ...],
    quick: bool,
    to: str | None,
    chunk_bytes: int | None,
    ring_bytes: int | None,
) -> None:
    """Measure links between two processes of this machine, beside bare transports, wires, and what engines do.

    Between hosts that is NIXL and gloo, between GPUs memcpy, NIXL and NCCL. With --out a table goes to stdout. What comes is
    compared before it is timed; ratios are of medians taken in turns.
    """
    model = load_shape(shape_text or "llama-3.1-8b")
    given = {"chunk_bytes": chunk_bytes, "ring_bytes": ring_bytes}
    options = {name: size for name, size in given.items() if size is not None}
    run = Run((place, to or other_than(place)), model, iters, quick, note, options)
    write_race(measure(run, sections), place, model, out, "link")


def other_than(place: str) -> str:
    """Another GPU, if there is one; else the same place."""
    device = device_of(place)
    others = [] if device < 0 else [number for number in range(_core.device_count()) if number != device]
    return f"cuda:{others[0]}" if others else place
