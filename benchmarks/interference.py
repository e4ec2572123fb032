"""Measures how much copies slow down a concurrent matrix product: ``python -m benchmarks interference``. Needs a GPU and torch.

The product represents a model that keeps the whole GPU busy. Its slowdown is a cost of a strategy that the bandwidth of the
copy does not show. The yardstick is the slowdown by one contiguous memcpy in the same direction.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click
import numpy as np

from kvbm import _core
from kvbm.bench.check import Check
from kvbm.bench.measure import Ids, Memory, is_out_of_memory, random_pool
from kvbm.cli.values import comma_list, numbers
from kvbm.copy.transfer import Strategy, Transfer
from kvbm.errors import BindError, KvbmError
from kvbm.layout import spec
from kvbm.layout.shapes import BlockShape, load_shape
from kvbm.planner.plan import plan, size_text
from kvbm.pool.pool import Pool

from .scale import split_pair
from .section import Note, Row, common_options, figures, note, require_gpu, stamp, write_rows

__all__ = ["COLUMNS", "PAIRS", "Model", "Seen", "interference", "measure", "memcpy"]

COLUMNS = (
    "direction", "pair", "backend", "max_sms", "num_blocks", "slowdown", "memcpy_slowdown", "copy_gbps", "ratio",
    "product_ms", "alone_ms", "copy_alone_gbps", "gpu", "driver", "commit",
)  # fmt: skip

#: Default pair per direction.
PAIRS = {"d2h": "nhd:universal", "h2d": "universal:nhd", "d2d": "nhd:universal"}

#: The strategy ``engine`` is left out above this number of copies: the driver needs half a microsecond per copy.
MOST_RUNS = 200_000

_FIRST = 2  # products that are not timed: the copies may not have begun
_COPIES = 8  # copies that are timed alone
_SLEEP = 4_000_000  # cycles of waiting until the products are in the queue
_PAUSE = 0.1  # seconds before a round


@dataclass(frozen=True)
class Seen:
    """Seconds of a product with concurrent copies, and alone; bytes per second of the copies with the product, and alone."""

    product: float
    alone: float
    rate: float
    rate_alone: float

    @property
    def slowdown(self) -> float:
        return self.product / self.alone


class Model:
    """Matrix products on their own stream, with or without concurrent copies."""

    def __init__(self, torch: Any, device: int, size: int, products: int, rounds: int) -> None:
        self.torch, self.device, self.products, self.rounds = torch, device, products, rounds
        self.compute, self.side = torch.cuda.Stream(device), torch.cuda.Stream(device)
        with torch.cuda.device(device):
            made = [torch.randn(size, size, device=f"cuda:{device}").to(torch.bfloat16) for _ in range(3)]
        self.a, self.b, self.c = made
        torch.cuda.synchronize(device)

    def warm(self) -> None:
        """Run products until the clocks and the choice of the kernel are stable."""
        with self.torch.cuda.stream(self.compute):
            for _ in range(max(2 * self.products, 20)):
                self.torch.matmul(self.a, self.b, out=self.c)
        self.torch.cuda.synchronize(self.device)

    def beside(self, copy: Callable[[Any], object], nbytes: int) -> Seen:
        """Medians over all rounds.  `copy` enqueues a copy of `nbytes` on the given stream.

        Each round times the product alone and then with copies, each after a pause.  Without the pauses the GPU would reduce
        its clocks under the long load, and the two measurements would not be comparable.
        """
        alone: list[float] = []
        seconds: list[float] = []
        rates: list[float] = []
        with self.torch.cuda.device(self.device):
            for _ in range(self.rounds):
                products, _none = self._round(None)
                alone += _seconds(products)
                products, copies = self._round(copy)
                seconds += _seconds(products)
                rates.append(_rate(products[_FIRST], products[-1], copies, nbytes))
            rate_alone = self._copies_alone(copy, nbytes)
        return Seen(statistics.median(seconds), statistics.median(alone), statistics.median(rates), rate_alone)

    def _copies_alone(self, copy: Callable[[Any], object], nbytes: int) -> float:
        """Bytes per second of consecutive copies without a concurrent product."""
        copy(self.side)
        begin = self._mark()
        for _ in range(_COPIES):
            copy(self.side)
        end = self._mark()
        self.torch.cuda.synchronize(self.device)
        return _COPIES * nbytes / float(begin.elapsed_time(end)) * 1e3

    def _round(self, copy: Callable[[Any], object] | None) -> tuple[list[Any], list[Any]]:
        """Events around the products and around every copy.  Copies are enqueued until the products are finished."""
        torch = self.torch
        torch.cuda.synchronize(self.device)
        time.sleep(_PAUSE)
        products = [torch.cuda.Event(enable_timing=True) for _ in range(_FIRST + self.products + 1)]
        with torch.cuda.stream(self.compute):
            torch.cuda._sleep(_SLEEP)
            for event in products[:-1]:
                event.record(self.compute)
                torch.matmul(self.a, self.b, out=self.c)
            products[-1].record(self.compute)
        copies: list[Any] = []
        if copy is not None:
            copies.append(self._mark())
            while not products[-1].query():
                copy(self.side)
                copies.append(self._mark())
                if len(copies) > 2:
                    copies[-2].synchronize()  # the copy before this one: while one runs, the next is enqueued
        torch.cuda.synchronize(self.device)
        return products, copies

    def _mark(self) -> Any:
        event = self.torch.cuda.Event(enable_timing=True)
        event.record(self.side)
        return event


def _seconds(products: Sequence[Any]) -> list[float]:
    return [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(products[_FIRST:])]


def _rate(begin: Any, end: Any, copies: Sequence[Any], nbytes: int) -> float:
    """Bytes per second of the copies that ended while the products ran; of all copies if these are fewer than three."""
    last = begin.elapsed_time(end)
    inside = [at for at in (begin.elapsed_time(copy) for copy in copies) if 0 <= at <= last]
    if len(inside) < 3:
        inside = [begin.elapsed_time(copy) for copy in copies]
    took = inside[-1] - inside[0]
    return (len(inside) - 1) * nbytes / took * 1e3 if took > 0 else math.nan


@contextlib.contextmanager
def _ends(
    pair: tuple[str, str], direction: str, shape: BlockShape, held: int, device: int
) -> Iterator[tuple[Pool, Pool]]:
    places = [f"pinned:{device}" if side == "h" else f"cuda:{device}" for side in (direction[0], direction[2])]
    with (
        random_pool(spec.load(pair[0]), shape, held, places[0]) as src,
        random_pool(spec.load(pair[1]), shape, held, places[1], seed=2) as dst,
    ):
        yield src, dst


@contextlib.contextmanager
def memcpy(direction: str, nbytes: int, device: int) -> Iterator[Callable[[Any], object]]:
    """The yardstick: one contiguous copy in the given direction."""
    with contextlib.ExitStack() as stack:
        sides = []
        for turn, side in enumerate((direction[0], direction[2])):
            memory = Memory(nbytes, f"pinned:{device}" if side == "h" else f"cuda:{device}")
            stack.callback(memory.close)
            memory.fill(turn)
            sides.append(np.array([memory.address], np.uint64))
        src, dst = sides
        yield lambda stream: _core.memcpy_batch(dst, src, nbytes, 1, device, _core.stream_handle(stream))


def _strategies(direction: str, sms: Sequence[int]) -> list[tuple[str, Mapping[str, Any]]]:
    """Backends and their options: staged, then the direct kernel with limited and with default multiprocessors, then engine."""
    budgets: list[tuple[str, Mapping[str, Any]]] = [("direct", {"max_sms": count}) for count in sms]
    found = [*budgets, ("direct", {}), ("engine", {})]
    return found if direction == "d2d" else [("staged", {}), ("staged", {"max_sms": 8}), *found]


def _runs(src: Pool, dst: Pool) -> int:
    """Largest number of copies per block with the strategy ``engine``."""
    made = plan(src.layout, dst.layout, src.shape, num_blocks=(src.num_blocks, dst.num_blocks))
    return sum(part.nbytes // part.run_bytes for part in made.parts)


def measure(
    place: str,
    shape: BlockShape,
    *,
    directions: Sequence[str] = tuple(PAIRS),
    pairs: Sequence[str] = (),
    size: int = 8192,
    blocks: int = 64,
    sms: Sequence[int] = (4, 8, 16, 32),
    products: int = 18,
    rounds: int = 3,
    note: Note = lambda _: None,
) -> Iterator[Row]:
    """Rows of the yardstick and of every strategy.

    Parameters
    ----------
    place : str
        ``"cuda:N"``.
    shape : BlockShape
    directions : sequence of str
        Any of ``d2h``, ``h2d``, ``d2d``.
    pairs : sequence of str
        ``SRC:DST``, for every direction.  Default: those of `PAIRS`.
    size : int
        The product multiplies two ``size x size`` matrices of bfloat16.
    blocks : int
        Blocks per copy.
    sms : sequence of int
        Further limits of multiprocessors to measure the direct kernel with.
    products, rounds : int
        Timed products per round, and number of rounds.
    note : callable
        Called with a line for each case that is left out.

    Raises
    ------
    CudaUnavailableError
        There is no GPU.
    KvbmError
        torch is not installed, or cannot use the GPU.
    WrongCopyError
        A copy to measure is wrong.
    """
    device = require_gpu(place, "interference")
    torch = _torch()
    end = stamp(place)
    nbytes = blocks * shape.nbytes
    model = Model(torch, device, size, products, rounds)
    for direction in directions:
        try:
            model.warm()
            with memcpy(direction, nbytes, device) as copy:
                yardstick = model.beside(copy, nbytes)
            common = {"direction": direction, "num_blocks": blocks, "memcpy": yardstick.slowdown}
            yield {**_row(common, "", "memcpy", {}, yardstick), **end}
            for pair in pairs or (PAIRS[direction],):
                with _ends(split_pair(pair), direction, shape, 2 * blocks, device) as (src, dst):
                    for row in _by_strategy(model, src, dst, pair, sms, common, note):
                        yield {**row, **end}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            note(
                f"interference: {direction}: {blocks} blocks of {size_text(shape.nbytes)}: left out: {type(error).__name__} {error}"
            )


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise KvbmError(
            "interference: the matrix product is torch's, which is not installed: pip install 'kvbm-layouts[bench]'"
        ) from None
    if not torch.cuda.is_available():
        raise KvbmError(
            f"interference: the matrix product is torch's, and torch {torch.__version__} cannot use the GPU; "
            "install a build of it for CUDA"
        )
    return torch


def _by_strategy(
    model: Model, src: Pool, dst: Pool, pair: str, sms: Sequence[int], common: Mapping[str, Any], note: Note
) -> Iterator[Row]:
    blocks, direction = common["num_blocks"], common["direction"]
    check = Check(src, dst)
    for backend, options in _strategies(direction, sms):
        what = f"interference: {direction} {pair}, {backend}"
        if backend == "engine" and _runs(src, dst) * blocks > MOST_RUNS:
            note(f"{what}: {_runs(src, dst) * blocks:,} copies a batch, left out")
            continue
        try:
            made = Transfer(src, dst, cast(Strategy, backend), **options)
        except BindError as error:
            note(f"{what}: left out: {error}")
            continue
        with made as move:

            def copy(src_ids: Any, dst_ids: Any, move: Transfer = move) -> None:
                move.copy(src_ids, dst_ids, stream=model.side).synchronize()

            check(copy, blocks, f"{pair}, {backend}")
            ids = Ids(src.num_blocks, dst.num_blocks, blocks)

            def again(stream: Any, move: Transfer = move, ids: Ids = ids) -> None:
                move.copy(*next(ids), stream=stream)

            seen = model.beside(again, blocks * src.shape.nbytes)
        yield _row(common, pair, backend, options, seen)


def _row(common: Mapping[str, Any], pair: str, backend: str, options: Mapping[str, int], seen: Seen) -> Row:
    return {
        "direction": common["direction"],
        "pair": pair,
        "backend": backend,
        "max_sms": options.get("max_sms", ""),
        "num_blocks": common["num_blocks"],
        "slowdown": figures(seen.slowdown),
        "memcpy_slowdown": figures(common["memcpy"]),
        "copy_gbps": figures(seen.rate / 1e9),
        "ratio": figures(seen.slowdown / common["memcpy"]),
        "product_ms": figures(seen.product * 1e3),
        "alone_ms": figures(seen.alone * 1e3),
        "copy_alone_gbps": figures(seen.rate_alone / 1e9),
    }


@click.command()
@common_options(iters=54)
@click.option("--direction", "directions", default=",".join(PAIRS), show_default=True, callback=comma_list(tuple(PAIRS)),
              metavar="LIST", help="d2h, h2d, d2d.")  # fmt: skip
@click.option(
    "--size",
    default=8192,
    show_default=True,
    type=click.IntRange(16),
    help="The product is of two SIZE x SIZE matrices.",
)
@click.option("--num-blocks", "blocks", default=64, show_default=True, type=click.IntRange(1), metavar="N", help="Blocks per copy.")
@click.option("--pair", "pairs", multiple=True, metavar="SRC:DST",
              help="Layouts, for every direction (may be repeated); nhd and universal if not given.")  # fmt: skip
@click.option("--sms", default="4,8,16,32", show_default=True, callback=numbers, metavar="N,...",
              help="Multiprocessors that the direct kernel is also given.")  # fmt: skip
@click.option("--shape", "shape_text", default="llama-3.1-70b", show_default=True, metavar="SHAPE", help="Shape of a block.")
def interference(
    place: str, iters: int, out: Path | None, directions: tuple[str, ...], size: int, blocks: int, pairs: tuple[str, ...],
    sms: tuple[int, ...], shape_text: str,
) -> None:  # fmt: skip
    """Measure how much copies slow down a concurrent matrix product, by strategy, compared with a memcpy.

    --iters are the timed products. Needs a GPU and torch.
    """
    shape = load_shape(shape_text)
    for pair in pairs:
        src, dst = split_pair(pair)
        plan(spec.load(src), spec.load(dst), shape)
    require_gpu(place, "interference")
    _torch()
    rounds = min(iters, 3)
    found = measure(
        place, shape, directions=directions, pairs=pairs, size=size, blocks=blocks, sms=sms,
        products=max(iters // rounds, 1), rounds=rounds, note=note,
    )  # fmt: skip
    write_rows(found, COLUMNS, place, shape, out, "interference")
