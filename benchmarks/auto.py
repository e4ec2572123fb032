"""Compares ``strategy="auto"`` with the best strategy, also for blocks that were not tuned: ``python -m benchmarks auto``."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from kvbm.bench import backends, copies
from kvbm.bench.table import Record
from kvbm.cli.values import numbers
from kvbm.copy.strategies import STRATEGIES
from kvbm.layout.shapes import BlockShape, load_shape

from .section import Note, Row, common_options, figures, note, require_gpu, stamp, write_rows

__all__ = ["COLUMNS", "auto", "measure", "points"]

COLUMNS = (
    "shape", "direction", "host", "num_blocks", "total_bytes", "memcpy_ms", *STRATEGIES, "auto", "chosen", "of_best",
    "gpu", "driver", "commit",
)  # fmt: skip

#: Blocks of several sizes and run lengths.  `GPU_LAYOUT` is measured against the usual host layouts.
SHAPES = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-70b/tp4", "deepseek-v3")
GPU_LAYOUT, HOST_LAYOUTS = "nhd", ("nhd", "universal", "vllm/LBHNC")

#: Required share of the best strategy's speed.
ASKED = 0.98


def sweeps(
    shapes: Sequence[BlockShape], hosts: Sequence[str], batches: Sequence[int], place: str, iters: int, note: Note
) -> Iterator[copies.Sweep]:
    """One sweep per shape and direction.  A sweep over all shapes would need the memory of the largest for each."""
    for shape, direction in itertools.product(shapes, ("d2h", "h2d")):
        pairs = [f"{GPU_LAYOUT}:{host}" if direction == "d2h" else f"{host}:{GPU_LAYOUT}" for host in hosts]
        yield copies.Sweep(
            shapes=[shape], batches=batches, directions=[direction], pairs=[copies.Pair.parse(pair) for pair in pairs],
            backends={direction: backends.STRATEGIES}, peers={}, built_in_peers=False, place=place, iters=iters, note=note,
        )  # fmt: skip


def points(records: Iterable[Record]) -> Iterator[Row]:
    """One row per shape, direction, host layout and batch: shares of a memcpy, and the choice compared with the best strategy.

    The chosen strategy is measured twice: by itself and as ``auto``.  `of_best` uses the better one, so that noise does not count.
    """
    ours = (record for record in records if record.backend != copies.MEMCPY)
    for _, held in itertools.groupby(ours, lambda each: (each.shape, each.direction, each.pattern, each.num_blocks)):
        by_name = {record.backend: record for record in held}
        if "auto" not in by_name or len(by_name) == 1:
            continue
        auto = by_name.pop("auto")
        chosen = auto.kernel.partition(" ")[0]
        taken = min(auto.median_ms, by_name[chosen].median_ms if chosen in by_name else auto.median_ms)
        src, dst = auto.pattern.split(":")
        yield {
            "shape": auto.shape,
            "direction": auto.direction,
            "host": dst if auto.direction == "d2h" else src,
            "num_blocks": auto.num_blocks,
            "total_bytes": auto.total_bytes,
            "memcpy_ms": auto.memcpy_ms,
            **{name: by_name[name].ratio if name in by_name else "" for name in STRATEGIES},
            "auto": auto.ratio,
            "chosen": chosen,
            "of_best": round(min(taken, *(record.median_ms for record in by_name.values())) / taken, 3),
        }


def measure(planned: Iterable[copies.Sweep], place: str) -> Iterator[Row]:
    """Rows of all sweeps.  Each row is yielded when it is measured."""
    end = stamp(place)
    for sweep in planned:
        with contextlib.closing(sweep.run()) as found:  # type: ignore[type-var]
            yield from ({**point, **end} for point in points(found))


@click.command()
@common_options(iters=12)
@click.option("--shape", "shape_texts", multiple=True, default=SHAPES, show_default=True, metavar="SHAPE",
              help="Shape of a block; may be repeated.")  # fmt: skip
@click.option("--host", "hosts", multiple=True, default=HOST_LAYOUTS, show_default=True, metavar="LAYOUT",
              help=f"Layout in host memory; may be repeated. On the GPU it is {GPU_LAYOUT}.")  # fmt: skip
@click.option("--num-blocks", "batches", default="1,2,4,8,16,64,256", show_default=True, callback=numbers, metavar="N,...",
              help="Blocks of a batch.")  # fmt: skip
def auto(
    place: str, iters: int, out: Path | None, shape_texts: Sequence[str], hosts: Sequence[str], batches: tuple[int, ...]
) -> None:
    """Compare the choice of strategy="auto" with the best strategy, between a GPU and pinned host memory.

    The columns direct, staged, engine and auto are shares of one contiguous pinned copy; of_best is the best strategy's time
    over that of what auto chose. Makes the machine's table first if there is none: see `kvbm tune`.
    """
    require_gpu(place, "auto")
    shapes = [load_shape(shape_text) for shape_text in shape_texts]
    planned = list(sweeps(shapes, hosts, batches, place, iters, note))
    for sweep in planned:
        sweep.plans()
    shares: list[tuple[float, str]] = []

    def told(rows: Iterator[Row]) -> Iterator[Row]:
        with contextlib.closing(rows):  # type: ignore[type-var]
            for row in rows:
                what = "{shape}, {direction}, {host}, {num_blocks} blocks, {chosen}".format_map(row)
                shares.append((row["of_best"], what))
                yield row

    write_rows(told(measure(planned, place)), COLUMNS, place, None, out, "auto")
    short = sorted(each for each in shares if each[0] < ASKED)
    for share, what in short:
        note(f"{share:.3f} of the best: {what}")
    note(
        f"auto: {len(shares) - len(short)} of {len(shares)} within {figures(100 * (1 - ASKED)):g} % of the best strategy"
    )
