"""Growth of time and memory with blocks, layers, ids, copies and the size of a pool: ``python -m benchmarks scale``."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvbm.bench.check import Check
from kvbm.bench.measure import (
    MOST_ARRAYS,
    Ids,
    Memory,
    device_of,
    free_bytes,
    held_blocks,
    is_out_of_memory,
    make_clock,
    random_pool,
)
from kvbm.cli.values import comma_list, numbers
from kvbm.copy.transfer import Strategy, Transfer
from kvbm.errors import BindError, SpecError
from kvbm.layout import spec
from kvbm.layout.layout import Layout
from kvbm.layout.shapes import BlockShape, load_shape
from kvbm.planner.plan import plan, size_text
from kvbm.pool.pool import Pool
from kvbm.system.clock import CpuClock, GpuClock
from kvbm.system.machine import cuda

from .overhead import PAIR, host_seconds
from .section import TINY, Note, Row, common_options, figures, note, stamp, write_rows

__all__ = ["COLUMNS", "SECTIONS", "scale"]

#: `n` is a number of `unit`.  `grown_mib` is only for the soak, which has no time per copy.
COLUMNS = (
    "what", "n", "unit", "total_bytes", "median_ms", "ns_each", "gbps", "grown_mib", "notes", "gpu", "driver", "commit",
)  # fmt: skip

LAYERS = (1, 2, 4, 8, 16, 32, 64, 80, 128)
IDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
POOLS_GIB = (1, 8, 32)

_SHARE_GPU, _SHARE_HOST, _MOST_HOST = 0.8, 0.25, 8 << 30  # of the free memory, for both pools; bytes
_SOAK_SAMPLES = 10
_SOAK_HELD = 1024  # blocks


@dataclass(frozen=True)
class _Run:
    """The parameters of a run."""

    place: str
    shape: BlockShape
    pair: tuple[str, str]
    batch: int
    memory: int
    copies: int
    seconds: float
    iters: int
    ids: tuple[int, ...]
    layers: tuple[int, ...]
    gib: tuple[int, ...]
    note: Note
    clock: GpuClock | CpuClock

    @property
    def device(self) -> int:
        return device_of(self.place)

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        return spec.load(self.pair[0]), spec.load(self.pair[1])

    @property
    def stream(self) -> dict[str, Any]:
        """The stream argument of a copy on a GPU; empty on the CPU."""
        return {} if self.clock.stream is None else {"stream": self.clock.stream}


def row(what: str, n: int, unit: str, nbytes: int, seconds: float, notes: str) -> Row:
    """One row of the CSV, for a time."""
    return {
        "what": what,
        "n": n,
        "unit": unit,
        "total_bytes": nbytes,
        "median_ms": figures(seconds * 1e3),
        "ns_each": figures(seconds * 1e9 / n),
        "gbps": figures(nbytes / seconds / 1e9),
        "grown_mib": "",
        "notes": notes,
    }


# ---- blocks and layers ---------------------------------------------------------------------------------------------


def _fitting(run: _Run, shape: BlockShape) -> int:
    """Number of blocks for source and destination, limited by the memory and the number of arrays."""
    tables = [layout.resolve(shape, 1).table_size for layout in run.layouts if layout.b_in_table]
    return max(min(run.memory // (2 * shape.nbytes), *(MOST_ARRAYS // table for table in tables), 1 << 30), 0)


@contextlib.contextmanager
def _transfer(run: _Run, layouts: tuple[Layout, Layout], shape: BlockShape, blocks: int) -> Iterator[Transfer]:
    """A direct transfer between two pools of random bytes on one device, checked bit by bit."""
    with (
        random_pool(layouts[0], shape, blocks, run.place) as src,
        random_pool(layouts[1], shape, blocks, run.place, seed=2) as dst,
        Transfer(src, dst, "auto" if run.device < 0 else "direct") as move,
    ):

        def copy(src_ids: Any, dst_ids: Any) -> None:
            move.copy(src_ids, dst_ids, **run.stream)
            run.clock.synchronize()

        Check(src, dst)(copy, min(blocks, 64), f"{layouts[0].name}:{layouts[1].name}")
        yield move


def _call(run: _Run, move: Transfer, ids: Iterator[tuple[Any, ...]]) -> Callable[[Any], object]:
    return lambda _: move.copy(*next(ids), **run.stream)


def blocks(run: _Run) -> Iterator[Row]:
    """Time of a copy of 1, 2, 4, … blocks, up to as many as fit."""
    most = _fitting(run, run.shape)
    if not most:
        run.note(f"scale: blocks: not one of {size_text(run.shape.nbytes)} fits into {size_text(run.memory)}, left out")
        return
    steps = [1 << e for e in range(most.bit_length())]
    if steps[-1] < most:
        steps.append(most)
    with _transfer(run, run.layouts, run.shape, most) as move:
        for count in steps:
            ids = Ids(most, most, count, least=min(Ids.for_cache(count * run.shape.nbytes, run.place), 4 * most))
            seconds = run.clock.time(_call(run, move, ids), iters=run.iters).median
            yield row("blocks", count, "blocks", count * run.shape.nbytes, seconds, ":".join(run.pair))


def layers(run: _Run) -> Iterator[Row]:
    """Time of a copy of blocks with 1, 2, 4, … layers."""
    for count in run.layers:
        shape = replace(run.shape, nl=count)
        most = _fitting(run, shape)
        if most < run.batch:
            run.note(f"scale: layers: {count}: {run.batch} blocks do not fit into {size_text(run.memory)}, left out")
            continue
        wanted = max(held_blocks(layout, shape, run.batch, run.place) for layout in run.layouts)
        held = min(wanted, most)
        with _transfer(run, run.layouts, shape, held) as move:
            ids = Ids(held, held, run.batch)
            seconds = run.clock.time(_call(run, move, ids), iters=run.iters).median
        notes = f"{':'.join(run.pair)}, {run.batch} blocks"
        yield row("layers", count, "layers", run.batch * shape.nbytes, seconds, notes)


# ---- ids -----------------------------------------------------------------------------------------------------------


def ids(run: _Run) -> Iterator[Row]:
    """Time of copies with 1 KiB per block, up to a million ids: on the host until the call returns, and on the GPU."""
    most = max(run.ids)
    if 2 * most * TINY.nbytes > run.memory:
        fits = [count for count in run.ids if 2 * count * TINY.nbytes <= run.memory]
        run.note(
            f"scale: ids: {most:,} blocks of {TINY.nbytes} bytes a pool do not fit into {size_text(run.memory)}, left out"
        )
        if not fits:
            return
        most = max(fits)
    layouts = spec.load(PAIR[0]), spec.load(PAIR[1])
    notes = f"blocks of {size_text(TINY.nbytes)}"
    with _transfer(run, layouts, TINY, most) as move:
        for count in (each for each in run.ids if each <= most):
            sets = Ids(most, most, count).sets
            host, _ = host_seconds(
                lambda pair: move.copy(*pair, **run.stream), sets, run.clock.synchronize, 10 * run.iters
            )
            nbytes = count * TINY.nbytes
            if isinstance(run.clock, CpuClock):
                yield row("ids_cpu", count, "ids", nbytes, host, notes)
                continue
            yield row("ids_host", count, "ids", nbytes, host, notes)
            turns = itertools.cycle(sets)
            on_gpu = _gpu_seconds(run.clock, _call(run, move, turns), host, run.iters)
            yield row("ids_gpu", count, "ids", nbytes, on_gpu, notes)


def _gpu_seconds(clock: GpuClock, call: Callable[[Any], object], host: float, iters: int) -> float:
    """Median seconds on the GPU, also for calls that take the host longer than the delay of `GpuClock.time`.

    The GPU is kept busy until the whole call is in its queue, so that host time is not included.
    """
    from cuda.bindings import driver

    from kvbm import _core

    handle = driver.CUstream(_core.stream_handle(clock.stream))
    busy = min(int(3e9 * host) + 50_000, 200_000_000)
    with contextlib.ExitStack() as stack:
        events = []
        for _ in range(2):
            event = cuda(driver.cuEventCreate(0), "making an event")  # 0: with timing
            stack.callback(driver.cuEventDestroy, event)
            events.append(event)
        times = []
        for _ in range(iters):
            clock.delay(busy)
            cuda(driver.cuEventRecord(events[0], handle), "recording an event")
            call(clock.stream)
            cuda(driver.cuEventRecord(events[1], handle), "recording an event")
            clock.synchronize()
            times.append(cuda(driver.cuEventElapsedTime(*events), "reading the clock") / 1e3)
    return float(np.median(times))


# ---- soak ----------------------------------------------------------------------------------------------------------


def soak(run: _Run) -> Iterator[Row]:
    """Memory in use after many copies of four tiny blocks.  All strategies and directions take turns."""
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(random_pool(spec.load(name), TINY, _SOAK_HELD, run.place, seed=turn))
            for turn, name in enumerate(PAIR)
        )
        if run.device >= 0:
            host = stack.enter_context(random_pool(spec.load(PAIR[1]), TINY, _SOAK_HELD, "pinned", seed=3))
            sides = ((first, second), (first, host), (host, first))
            moves = [
                stack.enter_context(made)
                for ends in sides
                for name in ("direct", "staged", "engine")
                if (made := _made(ends, name)) is not None
            ]
        else:
            moves = [stack.enter_context(Transfer(first, second))]
        yield from _soak(run, moves)


def _made(ends: tuple[Pool, Pool], strategy: Strategy) -> Transfer | None:
    """A transfer, or None if this direction does not support the strategy."""
    try:
        return Transfer(*ends, strategy)
    except BindError:
        return None


def _soak(run: _Run, moves: Sequence[Transfer]) -> Iterator[Row]:
    random = np.random.default_rng(5)
    sets = [tuple(random.permutation(_SOAK_HELD)[:4].tolist() for _ in range(2)) for _ in range(16)]
    turn = 0

    def copy(count: int, until: float) -> int:
        nonlocal turn
        for done in range(1, count + 1):
            moves[turn % len(moves)].copy(*sets[turn % 16], **run.stream)
            turn += 1
            if turn % 256 == 0:
                run.clock.synchronize()
                if time.monotonic() > until:
                    return done
        return count

    # Memory that the first calls allocate (rings, tables, arenas of the allocator) is not growth.
    copy(min(max(run.copies // 50, 4 * len(moves)), 20_000), time.monotonic() + run.seconds / 10)
    run.clock.synchronize()
    before, until, done = _held(run), time.monotonic() + run.seconds, 0
    for sample in range(_SOAK_SAMPLES + 1):
        wanted = run.copies * sample // _SOAK_SAMPLES - done
        made = copy(wanted, until) if wanted else 0
        run.clock.synchronize()
        done += made
        for what, now in _held(run).items():
            grown = figures((now - before[what]) / (1 << 20))
            empty = dict.fromkeys(("total_bytes", "median_ms", "ns_each", "gbps"), "")
            notes = "4 tiny blocks a copy, each strategy in turn" if len(moves) > 1 else "4 tiny blocks a copy"
            yield {"what": what, "n": done, "unit": "copies", **empty, "grown_mib": grown, "notes": notes}
        if made < wanted:
            run.note(
                f"scale: soak: stopped after {done:,} of {run.copies:,} copies: {run.seconds:g} s are over (--seconds)"
            )
            return


def _held(run: _Run) -> dict[str, int]:
    """Bytes in use: resident memory on the host, and on the GPU that of all processes (as negative free memory)."""
    gc.collect()
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    found = {"soak_host": next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))}
    if run.device >= 0:
        found["soak_gpu"] = -free_bytes(run.place)
    return found


# ---- pools ---------------------------------------------------------------------------------------------------------


def pools(run: _Run) -> Iterator[Row]:
    """Time to allocate pinned pools, including the first access to the pages and the registration."""
    if run.device < 0:
        run.note("scale: pools: pinned memory needs a GPU, left out")
        return
    Memory(1 << 20, "pinned").close()  # the first call starts the driver
    layout = spec.load(run.pair[1])
    for gib in run.gib:
        if gib << 30 > free_bytes("cpu") // 3:
            run.note(f"scale: pools: {gib} GiB is more than a third of the free memory, left out")
            continue
        count = max((gib << 30) // run.shape.nbytes, 1)
        start = time.perf_counter()
        made = Pool.allocate(layout, run.shape, count, "pinned")
        taken = time.perf_counter() - start
        nbytes = made.nbytes
        made.close()
        yield row("pools", gib, "GiB", nbytes, taken, f"pinned, {run.pair[1]}")


# ---- the command ---------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[[_Run], Iterator[Row]]] = {
    each.__name__: each for each in (blocks, layers, ids, soak, pools)
}


def measure(names: Sequence[str], run: _Run) -> Iterator[Row]:
    """Rows of the given sections.  A section for which there is not enough memory is left out with a note."""
    end = stamp(run.place)
    for name in names:
        found = SECTIONS[name](run)
        with contextlib.closing(found):  # type: ignore[type-var]
            try:
                for each in found:
                    yield {**each, **end}
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                run.note(f"scale: {name}: the rest is left out: {type(error).__name__} {error}")


def split_pair(text: str) -> tuple[str, str]:
    """``SRC:DST`` as two names of layouts; raises `SpecError` for another form."""
    src, colon, dst = text.partition(":")
    if not (src and colon and dst):
        raise SpecError(f"pair {text!r}: expected SRC:DST, two layouts with a colon between them")
    return src, dst


def _both(run_pair: tuple[str, str], shape: BlockShape) -> None:
    """Raise an error now if the pair cannot be copied."""
    plan(spec.load(run_pair[0]), spec.load(run_pair[1]), shape)


@click.command()
@common_options(iters=30)
@click.option("--what", "names", callback=comma_list(tuple(SECTIONS)), metavar="NAME,...",
              help=f"Which: {', '.join(SECTIONS)}. All, if not given.")  # fmt: skip
@click.option(
    "--shape", "shape_text", metavar="SHAPE", help="Shape of a block; llama-3.1-70b on a GPU, llama-3.1-8b on the CPU if not given."
)
@click.option("--pair", default="vllm/flash_attn_nhd:universal", show_default=True, metavar="SRC:DST", help="Layouts.")
@click.option("--num-blocks", "batch", default=64, show_default=True, type=click.IntRange(1), metavar="N",
              help="Blocks per copy, for layers.")  # fmt: skip
@click.option("--layers", "nl", default=",".join(map(str, LAYERS)), show_default=True, callback=numbers, metavar="N,...",
              help="Layers of a block.")  # fmt: skip
@click.option("--ids", "counts", default=",".join(map(str, IDS)), show_default=True, callback=numbers, metavar="N,...",
              help="Ids per copy, of tiny blocks.")  # fmt: skip
@click.option("--memory", type=click.FloatRange(min=0, min_open=True), metavar="GIB",
              help="For both pools; if not given, 0.8 of what is free on a GPU, a quarter and at most 8 on the CPU.")  # fmt: skip
@click.option("--copies", default=1_000_000, show_default=True, type=click.IntRange(_SOAK_SAMPLES), help="Of the soak.")
@click.option(
    "--seconds",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Of the soak, at most.",
)
@click.option("--pools", "gib", default=",".join(map(str, POOLS_GIB)), show_default=True, callback=numbers, metavar="GIB,...",
              help="Sizes of pinned pools.")  # fmt: skip
def scale(
    place: str, iters: int, out: Path | None, names: tuple[str, ...], shape_text: str | None, pair: str, batch: int,
    nl: tuple[int, ...], counts: tuple[int, ...], memory: float | None, copies: int, seconds: float, gib: tuple[int, ...],
) -> None:  # fmt: skip
    """Measure how the time of a copy grows with blocks, layers and ids, whether memory grows, and how long pools take.

    Works on a GPU and on the CPU, where the host's kernels copy.
    """
    shape = load_shape(shape_text or ("llama-3.1-8b" if place == "cpu" else "llama-3.1-70b"))
    both = split_pair(pair)
    _both(both, shape)
    with make_clock(place) as clock:
        free = free_bytes(place)
        share = free * _SHARE_GPU if device_of(place) >= 0 else min(free * _SHARE_HOST, _MOST_HOST)
        held = int(memory * (1 << 30)) if memory is not None else int(share)
        run = _Run(place, shape, both, batch, held, copies, seconds, iters, counts, nl, gib, note, clock)
        write_rows(measure(names or tuple(SECTIONS), run), COLUMNS, place, shape, out, "scale")
