"""Host time of a call by the number of ids and of tensors: ``python -m benchmarks overhead``.

On a GPU the blocks are so small, and the stream is synchronized so often, that no call waits for the GPU. On the CPU a call
ends when its copy is finished, so the time includes the copy.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvbm import kernels
from kvbm.bench.measure import device_of, make_clock, random_pool
from kvbm.cli.values import numbers
from kvbm.copy.transfer import Transfer, convert
from kvbm.layout import spec
from kvbm.system.clock import CpuClock, GpuClock

from .section import TINY, Note, Row, common_options, figures, note, stamp, write_rows

__all__ = ["COLUMNS", "host_seconds", "measure", "overhead"]

COLUMNS = ("call", "ids", "count", "median_us", "min_us", "ns_each", "gpu", "driver", "commit")

#: Layouts with one allocation per layer and with a single one, so that the time depends on the ids.
PAIR = ("vllm/LBHNC", "vllm/BLHNC")

#: Chunks per block in a list of tensors, as in a model with 80 layers.
CHUNKS = 160

_SETS = 4  # sets of ids that take turns
_LONGEST = 0.5  # seconds per figure; at least 5 calls are timed
_QUEUE = 32  # calls before the stream is synchronized; the driver's queue holds about a thousand launches


def host_seconds(
    call: Callable[[Any], object], arguments: Sequence[Any], settle: Callable[[], object], iters: int
) -> tuple[float, float]:
    """Median and least seconds of ``call(argument)`` until it returns.  The arguments take turns.

    Parameters
    ----------
    call : callable
    arguments : sequence
    settle : callable
        Waits for the enqueued work.  It is not timed.
    iters : int
        Number of timed calls; fewer if they are long.
    """
    turns = itertools.cycle(arguments)
    for _ in range(max(3, len(arguments))):
        call(next(turns))
        settle()
    times: list[int] = []
    begin = time.perf_counter()
    while len(times) < iters and (len(times) < 5 or time.perf_counter() - begin < _LONGEST):
        for _ in range(min(_QUEUE, iters - len(times))):
            argument = next(turns)
            start = time.perf_counter_ns()
            call(argument)
            times.append(time.perf_counter_ns() - start)
            if times[-1] > 1_000_000:
                break  # long calls enqueue much work: keep the queue short
        settle()
    return statistics.median(times) / 1e9, min(times) / 1e9


def measure(
    place: str, counts: Sequence[int], tensors: Sequence[int], iters: int, note: Note = lambda _: None
) -> Iterator[Row]:
    """Rows for all kinds of ids and all functions for lists of tensors.

    Parameters
    ----------
    place : str
        ``"cuda:N"`` or ``"cpu"``.
    counts, tensors : sequence of int
        Ids per call; tensors per call, rounded up to whole blocks of `CHUNKS`.
    iters : int
        Timed calls per figure.
    note : callable
        Called with a line for everything that is left out.
    """
    device = device_of(place)
    with make_clock(place) as clock:
        end = stamp(place)
        for row in _by_ids(place, counts, iters, clock, note):
            yield {**row, **end}
        if device < 0:
            note(
                "overhead: pools in host memory: the times include the copy; kvbm.kernels takes CUDA tensors only, left out"
            )
            return
        for row in _by_tensors(device, tensors, iters, clock, note):
            yield {**row, **end}


def _row(call: str, ids: str, count: int, seconds: tuple[float, float]) -> Row:
    median, least = seconds
    return {
        "call": call,
        "ids": ids,
        "count": count,
        "median_us": figures(median * 1e6),
        "min_us": figures(least * 1e6),
        "ns_each": figures(median * 1e9 / count),
    }


def _kinds(device: int, note: Note) -> dict[str, Callable[[Any], Any]]:
    """Kinds of ids: name → conversion from NumPy int32."""
    found: dict[str, Callable[[Any], Any]] = {
        "list": lambda ids: ids.tolist(),
        "numpy int32": lambda ids: ids,
        "numpy int64": lambda ids: ids.astype(np.int64),
    }
    try:
        import torch
    except ImportError:
        note("overhead: torch is not installed: ids in tensors and lists of tensors are left out (pip install torch)")
        return found
    found["torch CPU int64"] = lambda ids: torch.from_numpy(ids.astype(np.int64))
    if device >= 0 and torch.cuda.is_available():
        found["torch CUDA int64"] = lambda ids: torch.from_numpy(ids.astype(np.int64)).to(f"cuda:{device}")
    return found


def _by_ids(place: str, counts: Sequence[int], iters: int, clock: GpuClock | CpuClock, note: Note) -> Iterator[Row]:
    src_layout, dst_layout = (spec.load(name) for name in PAIR)
    kinds = _kinds(device_of(place), note)
    random = np.random.default_rng(1)
    blocks = max(counts)
    stream = {} if clock.stream is None else {"stream": clock.stream}
    with (
        random_pool(src_layout, TINY, blocks, place) as src,
        random_pool(dst_layout, TINY, blocks, place, seed=2) as dst,
        Transfer(src, dst, "direct" if clock.stream is not None else "auto") as move,
    ):
        for count in counts:
            sets = [
                [random.permutation(blocks)[:count].astype(np.int32) for _ in range(2)] for _ in range(_SETS)
            ]  # fmt: skip
            for name, made in kinds.items():
                mine = [tuple(made(ids) for ids in pair) for pair in sets]
                seconds = host_seconds(lambda ids: move.copy(*ids, **stream), mine, clock.synchronize, iters)
                yield _row("Transfer.copy", name, count, seconds)
            seconds = host_seconds(lambda ids: convert(src, dst, *ids, **stream), sets, clock.synchronize, iters)
            yield _row("kvbm.convert", "numpy int32", count, seconds)


def _by_tensors(
    device: int, tensors: Sequence[int], iters: int, clock: GpuClock | CpuClock, note: Note
) -> Iterator[Row]:
    with contextlib.suppress(ImportError):  # _by_ids has noted it
        import torch

        if not torch.cuda.is_available():
            note(f"overhead: torch {torch.__version__} cannot use the GPU: lists of tensors are left out")
            return
        for count in dict.fromkeys(-(-number // CHUNKS) for number in tensors):
            chunks, universal, operational = _lists(torch, f"cuda:{device}", count)
            torch.cuda.synchronize(device)
            to_universal, to_operational = (chunks, universal), (chunks, operational)
            for name, arguments in (
                ("block_to_universal", to_universal),
                ("universal_to_block", to_universal[::-1]),
                ("block_to_operational", to_operational),
                ("operational_to_block", to_operational[::-1]),
            ):
                function = _unpacking(functools.partial(getattr(kernels, name), stream=clock.stream))
                seconds = host_seconds(function, [arguments], clock.synchronize, iters)
                yield _row(f"kernels.{name}", "torch tensors", count * CHUNKS, seconds)


def _unpacking(function: Callable[..., object]) -> Callable[[Any], object]:
    return lambda arguments: function(*arguments)


def _lists(torch: Any, where: str, blocks: int) -> tuple[list[list[Any]], list[Any], list[Any]]:
    """Small chunks ``[nt, nh, hd]`` as separate tensors, and whole blocks in the layouts universal and operational."""
    nl, no, nh, nt, hd = CHUNKS // 2, 2, 2, 4, 16
    flat = list(torch.zeros(blocks * CHUNKS, nt, nh, hd, dtype=torch.bfloat16, device=where).unbind())
    chunks = [flat[i * CHUNKS : (i + 1) * CHUNKS] for i in range(blocks)]
    universal = torch.zeros(blocks, nh, nl, no, nt, hd, dtype=torch.bfloat16, device=where)
    operational = torch.zeros(blocks, nl, no, nt * nh * hd, dtype=torch.bfloat16, device=where)
    return chunks, list(universal.unbind()), list(operational.unbind())


@click.command()
@common_options(iters=500)
@click.option("--counts", default="1,4,16,64,256,1024,4096,16384,65536", show_default=True, callback=numbers, metavar="N,...",
              help="Ids per call.")  # fmt: skip
@click.option("--tensors", default="160,640,2560,10240,40960", show_default=True, callback=numbers, metavar="N,...",
              help="Tensors per call, for the functions that take lists of them (rounded up to blocks of 160).")  # fmt: skip
def overhead(place: str, iters: int, out: Path | None, counts: tuple[int, ...], tensors: tuple[int, ...]) -> None:
    """Measure the host time of a call, by number and kind of block ids, and by number of tensors.

    Kinds: lists, NumPy int32 and int64, and, with torch, tensors on the CPU and on the GPU. On the CPU the copy is included.
    """
    write_rows(measure(place, counts, tensors, iters, note), COLUMNS, place, TINY, out, "overhead")
