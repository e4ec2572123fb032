"""The sweep: every pair of layouts, direction and batch with every backend, compared with a memcpy of the same bytes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

from .. import _core
from ..copy.transfer import Strategy
from ..errors import CudaError, KvbmError
from ..layout import spec
from ..layout.layout import Layout
from ..layout.shapes import BlockShape
from ..planner.plan import Plan, plan, size_text
from ..pool.pool import Pool
from ..system.clock import CpuClock, GpuClock, Timed
from . import measure, peers
from .backends import BACKENDS as BACKENDS
from .backends import RAW, STRATEGIES, Backend, ByPeer, ByRuns, ByTransfer, num_runs
from .check import Check
from .peers import NotApplicable
from .table import Record

DIRECTIONS = ("d2d", "h2d", "d2h", "h2h", "p2p")
#: The backend of the rows of the yardstick.
MEMCPY = "memcpy"

#: Default backends per direction.
USUAL: dict[str, tuple[str, ...]] = {
    "d2d": ("direct",),
    "h2d": STRATEGIES,
    "d2h": STRATEGIES,
    "h2h": ("host",),
    "p2p": ("auto", "direct", "staged"),
}

#: Raw backends and the engine copy each run separately, at half a microsecond per copy.  They are left out above this number.
MOST_COPIES = 200_000

#: Short names of pairs.  fc: a block is contiguous.  lw: each layer's K and V of a block is an array.
PATTERNS = {
    "fc_to_fc": ("operational", "operational"),
    "lw_to_fc": ("nhd", "operational"),
    "fc_to_lw": ("operational", "nhd"),
    "lw_to_lw": ("nhd", "nhd"),
}

#: Default pairs.
PAIRS = (
    "nhd:universal", "universal:nhd", "hnd:universal", "universal:hnd", "nhd:hnd", "hnd:nhd", "nhd:operational",
    "operational:nhd", "vllm/LBHNC:universal", "universal:vllm/LBHNC", "nhd:vllm/paged_attn_v0",
    "vllm/paged_attn_v0:nhd",
)  # fmt: skip


class Pair(NamedTuple):
    """Source and destination layout, and the name of the pair in the CSV."""

    pattern: str
    src: Layout
    dst: Layout

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Read one of `PATTERNS`, or ``SRC:DST``; ValueError if the text is neither, `SpecError` if there is no such layout."""
        src, colon, dst = text.partition(":")
        if text in PATTERNS:
            src, dst = PATTERNS[text]
        elif not (src and colon and dst):
            raise ValueError(f"expected SRC:DST or one of {', '.join(PATTERNS)}, got {text!r}")
        return cls(text, spec.load(src), spec.load(dst))


# ---- the sweep -----------------------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """The plan of a sweep, and the record of what was measured."""

    shapes: Sequence[BlockShape]  # they differ in the tokens per block
    batches: Sequence[int]
    directions: Sequence[str]
    pairs: Sequence[Pair]
    backends: dict[str, Sequence[str]]  # direction → backends
    peers: dict[str, peers.Peer]  # name in the CSV → plug-in
    built_in_peers: bool  # also measure PyTorch, CuPy and NumPy, if they are installed
    place: str  # ``"cuda:N"``; with ``"cpu"`` only ``h2h`` is measured
    warmup: int = 3
    iters: int = 30
    max_sms: int | None = None
    replay: bool = False  # time replays of captured graphs instead of calls
    note: Callable[[str], object] = print  # called with the reason if something is left out, once per reason
    step: Callable[[str], object] = lambda _: None  # ``step(title)`` after every measurement
    measured: set[str] = field(default_factory=set)  # directions and backends with at least one row
    _noted: set[str] = field(default_factory=set)

    @property
    def steps(self) -> int:
        """Maximum number of calls of `step`."""
        return len(self.shapes) * len(self.directions) * len(self.pairs) * len(self.batches)

    def plans(self) -> None:
        """Raise `LayoutError` or `PlanError` now for pairs that cannot be planned."""
        for shape, pair in itertools.product(self.shapes, self.pairs):
            plan(pair.src, pair.dst, shape, num_blocks=max(self.batches))

    def run(self) -> Iterator[Record]:
        """Measure.  Yields each row as soon as it is known.

        Raises `WrongCopyError`, which ends the sweep, if a copy is wrong, and `PeerError` if a plug-in failed.
        """
        for direction, shape in itertools.product(self.directions, self.shapes):
            try:
                ends = self._ends(direction)
            except NotApplicable as reason:
                self._leave_out(direction, reason)
                continue
            with measure.make_clock(self.place if direction != "h2h" else "cpu") as clock:
                yield from self._of_direction(direction, shape, ends, clock)

    # ---- places and memory

    def _ends(self, direction: str) -> tuple[str, str]:
        """Places of source and destination."""
        if direction == "h2h":
            return "cpu", "cpu"
        device = measure.device_of(self.place)
        if device < 0:
            raise NotApplicable("it needs a GPU that kvbm can use; see `kvbm doctor`")
        other = f"cuda:{(device + 1) % max(_core.device_count(), 1)}"
        if direction == "p2p" and other == self.place:
            raise NotApplicable("there is one GPU")
        return {
            "d2d": (self.place, self.place),
            "d2h": (self.place, f"pinned:{device}"),
            "h2d": (f"pinned:{device}", self.place),
            "p2p": (self.place, other),
        }[direction]

    def _of_direction(
        self, direction: str, shape: BlockShape, ends: tuple[str, str], clock: GpuClock | CpuClock
    ) -> Iterator[Record]:
        batches = self._that_fit(direction, shape, ends)
        self._skip_steps(direction, len(self.pairs) * (len(self.batches) - len(batches)))
        if not batches:
            return
        if direction == "p2p":
            _core.enable_peer(*(measure.device_of(place) for place in ends))
        try:
            yardstick = measure.Yardstick(*ends, max(batches) * self._block_bytes(shape), clock)
        except (CudaError, MemoryError) as error:
            if not measure.is_out_of_memory(error):
                raise
            self._leave_out(direction, error)
            return
        yielded: set[int] = set()  # sizes for which the row of the yardstick was yielded
        with yardstick:
            for pair in self.pairs:
                try:
                    yield from self._of_pair(direction, shape, ends, clock, yardstick, pair, batches, yielded)
                except (CudaError, MemoryError) as error:
                    if not measure.is_out_of_memory(error):
                        raise
                    self._leave_out(f"{direction} {pair.pattern}", error)

    def _that_fit(self, direction: str, shape: BlockShape, ends: tuple[str, str]) -> list[int]:
        """The batches that fit into memory.  The others are left out with a note."""
        fit = []
        for batch in self.batches:
            need: dict[str, int] = {}
            for place, layouts in zip(ends, ([p.src for p in self.pairs], [p.dst for p in self.pairs]), strict=True):
                where = place if place.startswith("cuda") else "host"
                held = [one.resolve(shape, measure.held_blocks(one, shape, batch, place)) for one in layouts]
                pool = max(one.nbytes for one in held)
                caches = (each for each in ends if measure.device_of(each) >= 0 or ends[0] == "cpu")
                cache = max(map(measure.cache_bytes, caches))
                stick = measure.Yardstick.needs(batch * self._block_bytes(shape), cache)
                need[where] = need.get(where, 0) + pool + stick
            # The additional memory of a staged ring, or of a peer's own copies.
            if direction != "h2h":
                need[min(need)] += max(2 * batch * self._block_bytes(shape), 96 << 20)  # min: "cuda:N" before "host"
            short = [
                f"{size_text(nbytes)} of {where}, {size_text(free)} are free"
                for where, nbytes in need.items()
                if nbytes > 0.9 * (free := measure.free_bytes("cpu" if where == "host" else where))
            ]
            if short:
                what = f"{direction}, {batch} blocks of {size_text(self._block_bytes(shape))}"
                self._leave_out(what, f"needs {' and '.join(short)}")
            else:
                fit.append(batch)
        return fit

    # ---- one pair

    def _of_pair(
        self, direction: str, shape: BlockShape, ends: tuple[str, str], clock: GpuClock | CpuClock,
        yardstick: measure.Yardstick, pair: Pair, batches: Sequence[int], yielded: set[int],
    ) -> Iterator[Record]:  # fmt: skip
        with contextlib.ExitStack() as stack:
            pools = []
            for seed, (layout, place) in enumerate(zip((pair.src, pair.dst), ends, strict=True), 1):
                count = measure.held_blocks(layout, shape, max(batches), place)
                pools.append(stack.enter_context(measure.random_pool(layout, shape, count, place, seed=seed)))
            src, dst = pools
            stack.callback(peers.release)
            stack.callback(_settle, clock)  # before the memory is released, also after an error
            made = plan(pair.src, pair.dst, shape, num_blocks=(src.num_blocks, dst.num_blocks))
            title = f"{direction} {pair.pattern}"
            backends = dict(self._backends(direction, src, dst, made, stack))
            check = Check(src, dst)
            for batch in batches:
                nbytes = batch * made.nbytes
                options = {"iters": self.iters, "warmup": self.warmup}
                before = yardstick.time(nbytes, replay=self.replay, **options)
                sets = measure.Ids.for_cache(nbytes, self.place if clock.stream is not None else "cpu")
                ids = measure.Ids(src.num_blocks, dst.num_blocks, batch, sets).sets
                found: list[tuple[str, Timed, str]] = []
                for name, backend in backends.items():
                    try:
                        found.append((name, *self._of_backend(name, backend, clock, check, batch, ids, made, title)))
                    except NotApplicable as reason:
                        self._leave_out(f"{title} {name}", reason)
                    except (CudaError, MemoryError) as error:
                        if not measure.is_out_of_memory(error):
                            raise
                        self._leave_out(f"{title} {name}, {batch} blocks", error)
                stick = min(before, yardstick.time(nbytes, replay=self.replay, **options))
                base = self._record(direction, shape, batch, nbytes, stick)
                if nbytes not in yielded:
                    yielded.add(nbytes)
                    yield base
                for name, timed, kernel in found:
                    self.measured |= {direction, name}
                    yield replace(
                        base, pattern=pair.pattern, backend=name, kernel=kernel, timing=timed.how,
                        copy_size=min(part.run_bytes for part in made.parts), num_copies=batch * num_runs(made),
                        **_times(nbytes, timed, stick),
                    )  # fmt: skip
                self.step(f"{title} {batch}")

    def _backends(
        self, direction: str, src: Pool, dst: Pool, made: Plan, stack: contextlib.ExitStack
    ) -> Iterator[tuple[str, Backend]]:
        device = measure.device_of(self.place) if direction != "h2h" else -1
        for name in self.backends[direction]:
            try:
                if name in RAW:
                    yield name, ByRuns(src, dst, name, made, device)
                elif name == "host":
                    if direction != "h2h":
                        raise NotApplicable("it copies from host memory to host memory")
                    yield name, ByTransfer(src, dst, "auto", None, stack)
                else:
                    yield name, ByTransfer(src, dst, cast(Strategy, name), self.max_sms, stack)
            except (KvbmError, MemoryError) as reason:
                self._leave_out(f"{direction} {name}", reason)
        built_in = peers.installed(direction) if self.built_in_peers else ()
        for name, peer in (*built_in, *self.peers.items()):
            try:
                if self.replay and name not in self.peers:
                    raise NotApplicable("its own allocations cannot be captured into a graph here")
                yield name, ByPeer(src, dst, name, peer)
            except NotApplicable as reason:
                self._leave_out(f"{direction} {name}", reason)

    def _of_backend(
        self, name: str, backend: Backend, clock: GpuClock | CpuClock, check: Check, batch: int, sets: Sequence[Any],
        made: Plan, title: str,
    ) -> tuple[Timed, str]:  # fmt: skip
        copies = batch * num_runs(made)
        if copies > MOST_COPIES and name in (*RAW, "engine"):
            runs = size_text(min(part.run_bytes for part in made.parts))
            raise NotApplicable(f"more than {MOST_COPIES:,} copies a batch (runs of {runs})")

        def once(src_ids: Any, dst_ids: Any) -> None:
            backend.bind(src_ids, dst_ids)(clock.stream)
            clock.synchronize()

        check(once, batch, f"{title} by {name}, {batch} blocks")
        calls = [backend.bind(*ids) for ids in sets]
        for call in calls:  # work that is done once per set of ids is not part of the copy
            call(clock.stream)
            clock.synchronize()
        if self.replay and isinstance(clock, GpuClock):
            try:
                return clock.replay(calls, iters=self.iters, warmup=self.warmup), backend.kernel(batch)
            except KvbmError as error:
                if measure.is_out_of_memory(error):
                    raise
                raise NotApplicable(f"it cannot be captured into a graph: {error}") from error
        turns = itertools.cycle(calls)
        timed = clock.time(lambda stream: next(turns)(stream), iters=self.iters, warmup=self.warmup)
        return timed, backend.kernel(batch)

    # ---- rows and reasons

    def _block_bytes(self, shape: BlockShape) -> int:
        """Bytes of the largest block of all pairs: layouts with planes have their own sizes."""
        return max(measure.block_bytes(pair.src, shape) for pair in self.pairs)

    def _record(self, direction: str, shape: BlockShape, batch: int, nbytes: int, stick: Timed) -> Record:
        """The row of the yardstick."""
        gpu, driver, commit = self._names(direction)
        return Record(
            tokens_per_block=shape.nt, num_blocks=batch, pattern="contiguous", direction=direction, backend=MEMCPY,
            total_bytes=nbytes, inner_bytes=shape.nt * shape.nh * shape.hd * shape.itemsize, copy_size=nbytes, num_copies=1,
            timing=stick.how, kernel="", shape=str(shape).replace(",", " "), gpu=gpu, driver=driver, commit=commit,
            **_times(nbytes, stick, stick),
        )  # fmt: skip

    def _names(self, direction: str) -> tuple[str, str, str]:
        return _names(self.place if direction != "h2h" else "cpu")

    def _leave_out(self, what: str, reason: object) -> None:
        """Note the reason once per reason and pair, not once per size."""
        line = f"{what}: left out: {reason}"
        if line not in self._noted:
            self._noted.add(line)
            self.note(line)

    def _skip_steps(self, title: str, count: int) -> None:
        for _ in range(count):
            self.step(title)


@functools.cache
def _names(place: str) -> tuple[str, str, str]:
    return (*measure.machine(place), measure.commit())


def _times(nbytes: int, timed: Timed, stick: Timed) -> dict[str, Any]:
    return {
        "median_ms": _rounded(timed.median * 1e3),
        "bandwidth_gbps": _rounded(nbytes / timed.median / 1e9),
        "min_ms": _rounded(timed.least * 1e3),
        "max_ms": _rounded(timed.most * 1e3),
        "memcpy_ms": _rounded(stick.median * 1e3),
        "ratio": round(stick.median / timed.median, 3),
    }


def _rounded(value: float) -> float:
    """Round to five significant digits."""
    return round(value, 4 - math.floor(math.log10(value))) if value > 0 else 0.0


def _settle(clock: GpuClock | CpuClock) -> None:
    with contextlib.suppress(CudaError):  # keep the first error
        clock.synchronize()
