"""Stores and loads at the same time: ``python -m benchmarks duplex``.

An engine stores blocks to host memory while it loads others.  On a GPU each direction has a stream of its own, and its own pools;
the clock's stream starts both, and waits for both.  The yardstick is two contiguous memcpys in the same way.  On the CPU the two
directions are two threads.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import click
import numpy as np

from kvbm import _core
from kvbm.bench.check import Check
from kvbm.bench.measure import Ids, Memory, is_out_of_memory, make_clock, random_pool
from kvbm.cli.values import comma_list, numbers
from kvbm.copy.transfer import Strategy, Transfer
from kvbm.errors import KvbmError
from kvbm.layout import spec
from kvbm.layout.shapes import BlockShape, load_shape
from kvbm.planner.plan import plan
from kvbm.pool.pool import Pool
from kvbm.system.clock import CpuClock, GpuClock
from kvbm.system.machine import device_of, host_beside

from .race import COLUMNS, Runner, race, row_of, runner
from .scale import split_pair
from .section import Note, Row, common_options, note, stamp, write_rows

__all__ = ["WAYS", "Both", "duplex", "measure"]

#: Directions that are measured: each alone, and both at the same time.
WAYS = ("store", "load", "both")

#: Strategies of transfers between a GPU and host memory.
STRATEGIES = ("auto", "aside", "direct", "staged", "engine")

#: Enqueues work on a stream; on the CPU (None) it is done when the call returns.
Call = Callable[[Any], object]


class Both:
    """Runs two calls at the same time, each on a stream or thread of its own.

    Parameters
    ----------
    streams : sequence of stream
        A stream for each call, with cuda.core's ``wait``; empty on the CPU.
    """

    def __init__(self, streams: Sequence[Any]) -> None:
        self._streams = streams
        self._threads = ThreadPoolExecutor(2)

    def __call__(self, calls: Sequence[Call], stream: Any) -> None:
        """Start the calls after the work of `stream`; its later work comes after both."""
        if not self._streams:
            list(self._threads.map(lambda call: call(None), calls))
            return
        for side in self._streams:
            side.wait(stream)
        for side, call in zip(self._streams, calls, strict=True):
            call(side)
        for side in self._streams:
            stream.wait(side)

    def close(self) -> None:
        """Release threads and streams."""
        self._threads.shutdown()
        for side in self._streams:
            side.close()


def measure(
    place: str, shape: BlockShape, pair: tuple[str, str], batches: Sequence[int], strategies: Sequence[str], iters: int, note: Note
) -> Iterator[Row]:
    """Rows of the memcpys and of each strategy: stores alone, loads alone, and both.

    Parameters
    ----------
    place : str
        ``"cuda:N"`` or ``"cpu"``.
    shape : BlockShape
    pair : (str, str)
        Layouts of the engine and of host memory.
    batches : sequence of int
        Blocks of each direction.
    strategies : sequence of str
    iters : int
        Timed calls per figure.
    note : callable
        Called with a line for each number of blocks that is left out.

    Raises
    ------
    WrongCopyError
        A copy is wrong while another runs.
    """
    end = stamp(place)
    for blocks in batches:
        try:
            with contextlib.ExitStack() as stack:
                for row in _of_batch(place, shape, pair, blocks, strategies, iters, stack):
                    yield {**row, **end}
        except (KvbmError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            note(f"duplex: {blocks} blocks: left out: {error}")


def _of_batch(
    place: str, shape: BlockShape, pair: tuple[str, str], blocks: int, strategies: Sequence[str], iters: int,
    stack: contextlib.ExitStack,
) -> Iterator[Row]:  # fmt: skip
    clock = make_clock(place)
    stack.callback(clock.close)
    both = Both(_streams(clock))
    stack.callback(both.close)
    places = place, host_beside(place)
    ends: list[tuple[Pool, Pool]] = []
    for seed in (1, 3):
        engine, host = (
            stack.enter_context(random_pool(spec.load(name), shape, 2 * blocks, where, seed=seed + side))
            for side, (name, where) in enumerate(zip(pair, places, strict=True))
        )
        ends.append((engine, host) if not ends else (host, engine))
    nbytes = blocks * shape.nbytes
    calls = {"memcpy": [stack.enter_context(_memcpy(nbytes, *ends)) for ends in (places, places[::-1])]}
    for strategy in strategies:
        moves = [stack.enter_context(Transfer(src, dst, cast(Strategy, strategy))) for src, dst in ends]
        sets = [Ids(src.num_blocks, dst.num_blocks, blocks) for src, dst in ends]
        calls[strategy] = [partial(_next, move, ids) for move, ids in zip(moves, sets, strict=True)]
        stack.callback(_settle, clock)  # before the memory is released, also after an error
        for side in (0, 1):
            beside = calls[strategy][1 - side]

            def copy(src_ids: Any, dst_ids: Any, side: int = side, move: Transfer = moves[side], beside: Call = beside) -> None:
                pairs: list[Call] = [lambda stream: _copy(move, src_ids, dst_ids, stream), beside]
                both(pairs if side == 0 else pairs[::-1], clock.stream)
                clock.synchronize()

            Check(*ends[side])(copy, blocks, f"{WAYS[side]}, {strategy}, while the other direction runs")
    runners: dict[str, Runner] = {}
    for by, (store, load) in calls.items():
        runners |= {f"{way} {by}": runner(clock, [call]) for way, call in zip(WAYS, (store, load), strict=False)}
        runners[f"both {by}"] = runner(clock, [partial(both, (store, load))])
    found = race(runners, iters)
    for way in WAYS:
        total = nbytes * (2 if way == "both" else 1)
        for by in calls:
            yield row_of(way, by, blocks, total, found[f"{way} {by}"], "memcpy", found[f"{way} memcpy"], None)


def _streams(clock: GpuClock | CpuClock) -> tuple[Any, ...]:
    if isinstance(clock, CpuClock):
        return ()
    from cuda.core import Device

    gpu = Device(clock.device)
    return gpu.create_stream(), gpu.create_stream()


def _settle(clock: GpuClock | CpuClock) -> None:
    with contextlib.suppress(KvbmError):  # keep the first error
        clock.synchronize()


def _copy(move: Transfer, src_ids: Any, dst_ids: Any, stream: Any) -> None:
    move.copy(src_ids, dst_ids, **({} if stream is None else {"stream": stream}))


def _next(move: Transfer, ids: Ids, stream: Any) -> None:
    _copy(move, *next(ids), stream)


@contextlib.contextmanager
def _memcpy(nbytes: int, src: str, dst: str) -> Iterator[Call]:
    """One contiguous copy."""
    with contextlib.ExitStack() as stack:
        sides = []
        for seed, place in enumerate((src, dst)):
            memory = Memory(nbytes, place)
            stack.callback(memory.close)
            memory.fill(seed)
            sides.append(memory)
        device = max(side.device for side in sides)
        source, target = (np.array([side.address], np.uint64) for side in sides)
        if device < 0:
            yield lambda _: ctypes.memmove(sides[1].address, sides[0].address, nbytes)
        else:
            yield lambda stream: _core.memcpy_batch(target, source, nbytes, 1, device, _core.stream_handle(stream))


@click.command()
@common_options(iters=30)
@click.option("--num-blocks", "batches", default="16,64", show_default=True, callback=numbers, metavar="N,...",
              help="Blocks of each direction.")  # fmt: skip
@click.option("--pair", "pair_text", default="nhd:universal", show_default=True, metavar="ENGINE:HOST", help="The two layouts.")
@click.option("--strategy", "strategies", default="auto,aside", show_default=True, callback=comma_list(STRATEGIES), metavar="LIST",
              help="Strategies of the transfers; on the CPU there is auto.")  # fmt: skip
@click.option("--shape", "shape_text", metavar="SHAPE", help="Shape of a block.  [default: llama-3.1-70b; llama-3.1-8b on the CPU]")
def duplex(
    place: str, iters: int, out: Path | None, batches: tuple[int, ...], pair_text: str, strategies: tuple[str, ...],
    shape_text: str | None,
) -> None:  # fmt: skip
    """Measure stores and loads at the same time, and each alone, compared with memcpys in the same directions."""
    on_gpu = device_of(place) >= 0
    shape = load_shape(shape_text or ("llama-3.1-70b" if on_gpu else "llama-3.1-8b"))
    engine, host = split_pair(pair_text)
    for src, dst in ((engine, host), (host, engine)):
        plan(spec.load(src), spec.load(dst), shape)
    chosen = strategies if on_gpu else ("auto",)
    found = measure(place, shape, (engine, host), batches, chosen, iters, note)
    write_rows(found, COLUMNS, place, shape, out, "duplex")
