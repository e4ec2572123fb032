"""Copies of the offload worker for vLLM, compared with a memcpy of the same bytes and with vLLM's own.

Run it with ``python -m benchmarks offload``.

The copies are those of `kvbm.integrations.vllm`, submitted in the same way as by vLLM.  vLLM need not be installed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from kvbm.bench.check import WrongCopyError
from kvbm.bench.measure import Ids, Memory, Yardstick, device_of, held_blocks, is_out_of_memory, make_clock, random_pool
from kvbm.copy.strategies import STRATEGIES
from kvbm.errors import KvbmError
from kvbm.layout import spec
from kvbm.layout.shapes import BlockShape, load_shape
from kvbm.planner.plan import size_text
from kvbm.pool.pool import Pool
from kvbm.system.clock import CpuClock, GpuClock, Timed
from kvbm.system.machine import host_beside

from .descriptors import Batch, Pages, Swap
from .interference import Model, memcpy
from .overhead import host_seconds
from .race import ROUNDS, Asked, Runner, race, race_options, row_of, runner, write_race
from .section import TINY, Note, Row, figures, note, stamp

__all__ = ["SECTIONS", "measure", "offload"]

SECTIONS = ("copies", "product", "host")

#: The layouts of vLLM's KV cache, each with the order of its dimensions as a tensor.
ORDERS = {"LBNHC": "lbthod", "LBHNC": "lbhtod", "BLHNC": "blhtod"}

#: The declared layout in host memory, and its order.  The alternative in host memory is the engine's pages.
HOST_LAYOUT, HOST_ORDER = "universal", "hlotd"

#: Copiers: name → (True if host memory has `HOST_LAYOUT`, True with digests).
OURS = {"kvbm": (False, True), "kvbm, no digests": (False, False), f"kvbm, {HOST_LAYOUT}": (True, True)}

MODELS = ("llama-3.1-8b", "llama-3.1-70b")

#: Required share of the speed of a memcpy, by number of blocks.
ASKED = {8: 0.93, 64: 0.97}

#: Required share of a model's speed during a memcpy.
ASKED_BESIDE = 0.99

#: Allowed seconds on the host for a step with nothing to move, and for a step that moves `STEP_BLOCKS`.
ASKED_IDLE, ASKED_STEP, STEP_BLOCKS = 20e-6, 100e-6, 64

#: From this page size in bytes, vLLM loads with the copy engine instead of a kernel.
SMALL = 28 << 10

#: Nanoseconds that the stream before a job is kept busy, so that the job is enqueued by then.
DELAY = 300_000

#: The matrix product: its size, the number of products per round, and the number of rounds.
PRODUCT, PRODUCTS, PRODUCT_ROUNDS = 8192, 18, 3

#: Loads are first, because a store without a digest deletes the existing digest.
WAYS = ("load", "store")

_Clock = GpuClock | CpuClock


class Case(NamedTuple):
    """A rank's cache.

    Attributes
    ----------
    model : str
    tp : int
    order : str
        One of `ORDERS`.
    shape : BlockShape
        Shape of this rank's blocks.
    """

    model: str
    tp: int
    order: str
    shape: BlockShape

    def __str__(self) -> str:
        return f"{self.model}, tp {self.tp}, {self.order}, {self.shape.nt} tokens"


class Run(NamedTuple):
    """The parameters of a run."""

    place: str
    models: dict[str, BlockShape]
    iters: int
    quick: bool
    note: Note

    @property
    def host(self) -> str:
        """The place of host memory."""
        return host_beside(self.place)

    @property
    def asks(self) -> bool:
        """True if there is a required ratio: between a GPU and pinned memory."""
        return self.host != "cpu"

    @property
    def cases(self) -> Iterator[Case]:
        for (model, shape), tp, order, nt in itertools.product(
            self.models.items(), (1, 4), ORDERS, (16,) if self.quick else (16, 32)
        ):
            yield Case(model, tp, order, replace(shape, nh=max(shape.nh // tp, 1), nt=nt))


def measure(run: Run, sections: Sequence[str]) -> Iterator[Row]:
    """Rows of the given `SECTIONS`.  Cases for which there is not enough memory or no GPU are left out with a note.

    Raises
    ------
    KvbmError
        torch is not installed.
    WrongCopyError
        A copy to measure is wrong.
    """
    end = stamp(run.place)
    _torch()
    for name in sections:
        for row in _SECTIONS[name](run):
            yield {**row, **end}


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise KvbmError("python -m benchmarks offload: the copier works with torch: pip install 'kvbm-layouts[bench]'") from None
    return torch


@contextlib.contextmanager
def _left_out(run: Run, what: object) -> Iterator[None]:
    """Leave out a case with a note if there is not enough memory."""
    try:
        yield
    except (KvbmError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        run.note(f"{what}: left out: {error}")


def _on(clock: _Clock) -> contextlib.AbstractContextManager[object]:
    """Context manager: the clock's stream is torch's current stream."""
    if isinstance(clock, CpuClock):
        return contextlib.nullcontext()
    from kvbm import _core

    torch = _torch()
    found: contextlib.AbstractContextManager[object] = torch.cuda.stream(
        torch.cuda.ExternalStream(_core.stream_handle(clock.stream), device=clock.device)
    )
    return found


# ---- a worker ------------------------------------------------------------------------------------------------------


class Worker:
    """A rank's cache of random bytes, host memory for its blocks, and copiers with and without digests.

    Parameters
    ----------
    case : Case
    place : str
    blocks : int
        Blocks per side.
    clock : GpuClock or CpuClock
        Copies wait for its stream.
    stack : ExitStack
        Releases everything at its end.

    Attributes
    ----------
    cache : torch.Tensor
        The engine's whole memory, in the dimensions of `ORDERS`.
    """

    def __init__(self, case: Case, place: str, blocks: int, clock: _Clock, stack: contextlib.ExitStack) -> None:
        from kvbm.integrations.vllm.copier import Copier, HostMemory
        from kvbm.integrations.vllm.pages import Pages as EnginePages
        from kvbm.integrations.vllm.pages import as_bytes

        torch = _torch()
        self.case, self.clock, self.blocks = case, clock, blocks
        on_gpu = device_of(place) >= 0
        self.pool: Pool = stack.enter_context(random_pool(spec.load(f"vllm/{case.order}"), case.shape, blocks, place))
        [array] = self.pool.arrays
        self.cache = torch.as_tensor(array, device=place) if on_gpu else torch.from_numpy(array)
        layers = [self.cache] if case.order.startswith("B") else list(self.cache)
        pages = [as_bytes([layer.view(torch.int8).reshape(blocks, -1) for layer in layers])]
        self.copiers = {}
        for by, (is_declared, verify) in OURS.items():
            groups = [[EnginePages(self.pool)]] if is_declared else pages
            memory = HostMemory(spec.load(HOST_LAYOUT), groups, blocks, host_beside(place), verify=verify)
            self.copiers[by] = Copier(memory, 1)
            stack.callback(self.copiers[by].close)
        self._jobs = itertools.count()

    def submit(self, by: str, ids: Any, chunks: Any, *, is_load: bool) -> None:
        """Submit a job in the same way as vLLM."""
        self.copiers[by].submit(next(self._jobs), ids, chunks, [len(ids)], [0], is_load=is_load)

    def finish(self, by: str) -> Any:
        """Wait for the only running job, and return its result.

        Raises
        ------
        WrongCopyError
            A load fails its check.
        """
        copier = self.copiers[by]
        copier.wait()
        while not (done := copier.finished()):  # the event is recorded after the copies
            pass
        [job] = done
        if job.wrong_blocks:
            raise WrongCopyError(f"{self.case}, {by}: {len(job.wrong_blocks)} of {job.blocks} blocks fail their check")
        return job

    def move(self, by: str, ids: Any, chunks: Any, *, is_load: bool) -> float:
        """Run a job, and return the seconds that it reports."""
        if isinstance(self.clock, GpuClock):
            self.clock.delay(DELAY)
        self.submit(by, ids, chunks, is_load=is_load)
        return float(self.finish(by).seconds)

    def runner(self, by: str, sets: Sequence[tuple[Any, Any]], *, is_load: bool) -> Runner:
        """A `Runner` for jobs, each with other ids."""
        turns = itertools.cycle(sets)

        def run(iters: int, warmup: int) -> Timed:
            seconds = [self.move(by, *next(turns), is_load=is_load) for _ in range(warmup + iters)]
            return Timed.of(seconds[warmup:], "clock" if isinstance(self.clock, CpuClock) else "events")

        return run

    def store(self, by: str) -> Any:
        """The only store of a copier."""
        [[store]] = self.copiers[by].memory.stores
        return store

    def strategies(self, by: str, way: str) -> Counter[str]:
        """Number of copies so far by strategy."""
        store = self.store(by)
        stats = (store.back if way == "load" else store.out).stats()
        return Counter({name: stats[name] for name in STRATEGIES})

    def blocks_of(self, by: str, ids: Any) -> Any:
        """Blocks of the engine in the order that a copier must store, computed from tensor dimensions without a plan."""
        order = ORDERS[self.case.order]
        picked = self.cache.index_select(order.index("b"), _torch().as_tensor(ids, device=self.cache.device).long())
        wanted = HOST_ORDER if OURS[by][0] else order.replace("b", "")
        return picked.permute([order.index(axis) for axis in f"b{wanted}"]).cpu()

    def check(self, what: str, store: Callable[[Any, Any], object], load: Callable[[Any, Any], object], n: int) -> None:
        """Store blocks, load them into other blocks, and check that nothing else is written.  The calls must wait for their copies.

        Raises
        ------
        WrongCopyError
            A byte is wrong.
        """
        torch, dim = _torch(), ORDERS[self.case.order].index("b")
        ids = np.random.default_rng(5).permutation(self.blocks)[: 2 * n].astype(np.int32)
        chunks, (near, far) = ids[::-1][:n].copy(), (torch.as_tensor(each).long() for each in (ids[:n], ids[n:]))
        store(ids[:n], chunks)
        wanted = self.cache.clone()
        near, far = near.to(wanted.device), far.to(wanted.device)
        wanted.index_copy_(dim, far, wanted.index_select(dim, near))
        load(ids[n:], chunks)
        if not torch.equal(self.cache, wanted):
            raise WrongCopyError(
                f"{self.case}, {what}: what was loaded is not what was stored, or other blocks were written"
            )

    def check_copier(self, by: str, n: int) -> None:
        """`check`, and a check of the contents of host memory."""

        def store(ids: Any, chunks: Any) -> None:
            self.move(by, ids, chunks, is_load=False)
            host, torch = self.store(by).host.arrays, _torch()
            for chunk, block in zip(chunks.tolist(), self.blocks_of(by, ids), strict=True):
                stored = torch.from_numpy(host[chunk].reshape(-1).view(np.uint8))
                if not torch.equal(stored, block.reshape(-1).view(torch.uint8)):
                    raise WrongCopyError(f"{self.case}, {by}: chunk {chunk} is not the block that was stored")

        self.check(by, store, functools.partial(self.move, by, is_load=True), n)

    def store_all(self) -> None:
        """Store all blocks, so that every chunk has a block and its digest."""
        for first in range(0, self.blocks, 64):
            ids = np.arange(first, min(first + 64, self.blocks), dtype=np.int32)
            for by in self.copiers:
                self.move(by, ids, ids, is_load=False)


# ---- vLLM's own copies ---------------------------------------------------------------------------------------------


class Stock:
    """Copies of the same blocks with vLLM's lists of descriptors.

    Parameters
    ----------
    worker : Worker
    pages : Pages
    rows : Memory
        Host memory for the same number of blocks.
    by : Batch or Swap
        The class that copies a list.
    """

    def __init__(self, worker: Worker, pages: Pages, rows: Memory, by: type[Batch] = Batch) -> None:
        self.worker, self.pages, self.rows, self._by = worker, pages, rows, by
        self._ends = int(worker.pool.addresses[0]), rows.address
        self._device = device_of(worker.pool.device)

    def batch(self, ids: Any, rows: Any, *, is_load: bool) -> Batch:
        engine, host = (start + side for start, side in zip(self._ends, self.pages.ranges(ids, rows), strict=True))
        ends = (engine, host) if is_load else (host, engine)
        return self._by(*ends, self.pages.nbytes, self._device, reads_host=is_load)

    def move(self, ids: Any, rows: Any, *, is_load: bool) -> None:
        """Copy, and wait."""
        self.batch(ids, rows, is_load=is_load)(self.worker.clock.stream)
        self.worker.clock.synchronize()

    def runner(self, sets: Sequence[tuple[Any, Any]], *, is_load: bool) -> Runner:
        """A `Runner` for these copies.  It makes a third of the requested calls, because they take long."""
        timed = runner(self.worker.clock, [self.batch(*ids, is_load=is_load) for ids in sets])
        return lambda iters, warmup: timed(max(iters // 3, 1), min(warmup, 1))


def _stock(worker: Worker, rows: Memory) -> dict[str, Stock]:
    """The copies by name: the unit of a descriptor and its bytes."""
    case, blocks = worker.case, worker.blocks
    pages = Pages.of(case.order, case.shape, blocks)
    whole = "a block" if len(pages.engine) == 1 else "a page and layer"
    found = {f"vLLM, {whole} ({size_text(pages.nbytes)})": pages}
    if canonical := Pages.canonical(case.order, case.shape, blocks, case.tp):
        found[f"vLLM, canonical ({size_text(canonical.nbytes)})"] = canonical
    return {name: Stock(worker, each, rows) for name, each in found.items()}


def _checked(stock: dict[str, Stock]) -> dict[str, Stock]:
    for by, one in stock.items():
        both = [functools.partial(one.move, is_load=is_load) for is_load in (False, True)]
        one.worker.check(by, both[0], both[1], 8)
    return stock


def _swaps(stock: dict[str, Stock]) -> dict[str, Stock]:
    """The same copies with vLLM's Triton kernel, for the small pages that vLLM loads with it."""
    case = next(iter(stock.values())).worker.case
    if case.shape.nbytes // case.shape.nl >= SMALL or case.order.startswith("B"):
        return {}
    return {f"{name}, Triton": Stock(one.worker, one.pages, one.rows, Swap) for name, one in stock.items()}


# ---- copies --------------------------------------------------------------------------------------------------------


def _blocks(run: Run, case: Case) -> int:
    return held_blocks(spec.load(f"vllm/{case.order}"), case.shape, max(ASKED), run.place)


def _copies(run: Run) -> Iterator[Row]:
    """Our copies and vLLM's, compared with one memcpy to or from pinned memory."""
    cases = list(run.cases)
    with make_clock(run.place) as clock, contextlib.ExitStack() as stack:
        stack.enter_context(_on(clock))
        largest = max(case.shape.nbytes for case in cases) * max(ASKED)
        ends = {"store": (run.place, run.host), "load": (run.host, run.place)}
        memcpys = {way: stack.enter_context(Yardstick(*ends[way], largest, clock)) for way in WAYS}
        rows = Memory(max(_blocks(run, case) * case.shape.nbytes * case.tp for case in cases), run.host)
        stack.callback(rows.close)
        for case in cases:
            with _left_out(run, case), contextlib.ExitStack() as inner:
                worker = Worker(case, run.place, _blocks(run, case), clock, inner)
                yield from _beside_memcpy(run, worker, rows, memcpys)


def _beside_memcpy(run: Run, worker: Worker, rows: Memory, memcpys: dict[str, Yardstick]) -> Iterator[Row]:
    case = worker.case
    stock: dict[str, Stock] = {}
    swaps: dict[str, Stock] = {}
    try:
        stock = _checked(_stock(worker, rows))
        if device_of(run.place) >= 0 and find_spec("triton"):
            swaps = _checked(_swaps(stock))
    except WrongCopyError:
        raise
    except Exception as error:  # errors of other code: a driver that is too old, Triton without a compiler
        run.note(f"{case}: {type(error).__name__}: {error}")
    for by in worker.copiers:
        worker.check_copier(by, 8)
    worker.store_all()
    for way, (n, asked) in itertools.product(WAYS, ASKED.items()):
        nbytes = n * case.shape.nbytes
        sets = Ids(worker.blocks, worker.blocks, n, Ids.for_cache(nbytes, run.place)).sets
        is_load = way == "load"
        runners: dict[str, Runner] = {"memcpy": functools.partial(_memcpy, memcpys[way], nbytes)}
        runners |= {by: worker.runner(by, sets, is_load=is_load) for by in worker.copiers}
        theirs = {**stock, **swaps} if is_load else stock
        runners |= {by: one.runner(sets[:6], is_load=is_load) for by, one in theirs.items()}
        before = {by: worker.strategies(by, way) for by in worker.copiers}
        times = race(runners, run.iters)
        used = {by: "+".join(worker.strategies(by, way) - before[by]) for by in worker.copiers}
        for by in list(runners)[1:]:
            wanted: Asked = asked if by in worker.copiers and run.asks else None
            name = f"{by} ({used[by]})" if by in worker.copiers else by
            yield row_of(f"{way}: {case}", name, n, nbytes, times[by], "memcpy", times["memcpy"], wanted)


def _memcpy(yardstick: Yardstick, nbytes: int, iters: int, warmup: int) -> Timed:
    return yardstick.time(nbytes, iters=iters, warmup=warmup)


# ---- with a concurrent matrix product ------------------------------------------------------------------------------


def _product(run: Run) -> Iterator[Row]:
    """A matrix product with our concurrent copies and with vLLM's, compared with a concurrent memcpy."""
    device = device_of(run.place)
    if device < 0:
        run.note("product: left out: it needs a GPU")
        return
    torch = _torch()
    name, shape = next(iter(run.models.items()))
    model = Model(torch, device, PRODUCT, PRODUCTS, PRODUCT_ROUNDS)
    model.warm()
    for order in list(ORDERS)[: 1 if run.quick else None]:
        case = Case(name, 1, order, replace(shape, nt=16))
        with _left_out(run, case), make_clock(run.place) as clock, contextlib.ExitStack() as stack:
            worker = Worker(case, run.place, _blocks(run, case), clock, stack)
            with _on(clock):
                worker.store_all()
            rows = Memory(worker.blocks * case.shape.nbytes, run.host)
            stack.callback(rows.close)
            for way in WAYS:
                yield from _beside_product(run, model, worker, rows, way)


def _beside_product(run: Run, model: Model, worker: Worker, rows: Memory, way: str) -> Iterator[Row]:
    is_load, n = way == "load", max(ASKED)
    nbytes = n * worker.case.shape.nbytes
    turns = itertools.cycle(Ids(worker.blocks, worker.blocks, n).sets)
    with memcpy("h2d" if is_load else "d2h", nbytes, device_of(run.place)) as one:
        seen = {"memcpy": model.beside(one, nbytes)}

    def ours(stream: Any, by: str = "kvbm") -> None:
        copier = worker.copiers[by]
        copier.finished()
        with model.torch.cuda.stream(stream):
            worker.submit(by, *next(turns), is_load=is_load)
        for copies in copier.streams[is_load : is_load + 1]:
            stream.wait_stream(copies)

    for by in worker.copiers:
        seen[by] = model.beside(functools.partial(ours, by=by), nbytes)
        worker.copiers[by].wait()
        worker.copiers[by].finished()
    for by, stock in _stock(worker, rows).items():
        batches = itertools.cycle([stock.batch(*next(turns), is_load=is_load) for _ in range(6)])
        seen[by] = model.beside(functools.partial(_next, batches), nbytes)
    slow = seen["memcpy"].slowdown
    for by, found in seen.items():
        if by == "memcpy":
            continue
        ratio = round(slow / found.slowdown, 4)
        asked = by in worker.copiers
        yield {
            "case": f"product beside a {way}: {worker.case}", "by": by, "n": n, "total_bytes": nbytes,
            "median_ms": figures(found.product * 1e3), "gbps": figures(found.rate / 1e9), "beside": "memcpy",
            "beside_ms": figures(seen["memcpy"].product * 1e3), "ratio": ratio, "asked": f">= {ASKED_BESIDE:g}" if asked else "",
            "reached": ("yes" if ratio >= ASKED_BESIDE else "no") if asked else "",
        }  # fmt: skip


def _next(calls: Iterator[Batch], stream: Any) -> None:
    next(calls)(stream)


# ---- time of the host ----------------------------------------------------------------------------------------------


def _host(run: Run) -> Iterator[Row]:
    """Host time of a step: the worker's calls.  On the CPU blocks are tiny, because the time includes the copy."""
    name, shape = next(iter(run.models.items()))
    on_gpu = device_of(run.place) >= 0
    case = Case(name, 1, "LBNHC", replace(shape, nt=16) if on_gpu else TINY)
    with make_clock(run.place) as clock, contextlib.ExitStack() as stack:
        stack.enter_context(_on(clock))
        worker = Worker(case, run.place, 2 * STEP_BLOCKS, clock, stack)
        worker.store_all()
        copier = worker.copiers["kvbm"]
        idle, _ = host_seconds(lambda _: copier.finished(), [None], lambda: None, 20 * run.iters)
        yield _step("a step with nothing to move", 0, 0, idle, ASKED_IDLE)
        sets = Ids(worker.blocks, worker.blocks, STEP_BLOCKS).sets
        nbytes = STEP_BLOCKS * case.shape.nbytes
        for way in WAYS:
            seconds = [_step_seconds(worker, sets[i % len(sets)], way == "load") for i in range(ROUNDS * run.iters)]
            yield _step(f"a step that moves blocks: {way}", STEP_BLOCKS, nbytes, statistics.median(seconds), ASKED_STEP)


def _step_seconds(worker: Worker, ids: tuple[Any, Any], is_load: bool) -> float:
    """Seconds to submit a job and to poll for its end, without the waiting time."""
    copier = worker.copiers["kvbm"]
    start = time.perf_counter()
    worker.submit("kvbm", *ids, is_load=is_load)
    spent = time.perf_counter() - start
    copier.wait()
    worker.clock.synchronize()
    while True:
        start = time.perf_counter()
        if copier.finished():
            return spent + time.perf_counter() - start


def _step(by: str, n: int, nbytes: int, seconds: float, asked: float) -> Row:
    return {
        "case": "host time", "by": by, "n": n, "total_bytes": nbytes, "median_ms": figures(seconds * 1e3), "gbps": "",
        "beside": "", "beside_ms": "", "ratio": "", "asked": f"<= {asked * 1e3:g} ms",
        "reached": "yes" if seconds <= asked else "no",
    }  # fmt: skip


_SECTIONS: dict[str, Callable[[Run], Iterator[Row]]] = {"copies": _copies, "product": _product, "host": _host}


# ---- the command ---------------------------------------------------------------------------------------------------


@click.command()
@race_options(
    SECTIONS,
    30,
    "llama-3.1-8b and llama-3.1-70b; 4 layers of the first on the CPU",
    "Blocks of 16 tokens of one model.",
)
def offload(
    place: str, iters: int, out: Path | None, shape_text: str | None, sections: tuple[str, ...], quick: bool
) -> None:
    """Measure the copies of vLLM's offload worker, with and without digests, beside a memcpy, vLLM's own and a matrix product.

    Caches are as vLLM has them, of all ranks at tp 1 and of one at tp 4; host memory is pinned. With --out a table goes to stdout.
    What is copied is compared before it is timed; ratios are of medians taken in turns, of the time from event to event on the
    stream that copies. On the CPU a memcpy is NumPy's or torch's, and what vLLM would list is copied range by range.
    """
    names = (shape_text,) if shape_text else MODELS[: 1 if quick or place == "cpu" else None]
    models = {name: load_shape(name) for name in names}
    if place == "cpu" and not shape_text:
        models = {name: replace(shape, nl=4) for name, shape in models.items()}
    first = next(iter(models.values()))
    write_race(measure(Run(place, models, iters, quick, note), sections), place, first, out, "offload")
