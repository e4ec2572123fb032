"""The cost of digests: copies with digests against plain copies, digests against reading the same bytes.

Run it with ``python -m benchmarks digest``.

Ratios compare medians of alternating measurements, with pools larger than the caches and random ids.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from kvbm import _core
from kvbm.bench.check import WrongCopyError
from kvbm.bench.measure import (
    Ids,
    Memory,
    View,
    block_bytes,
    device_of,
    held_blocks,
    is_out_of_memory,
    make_clock,
    random_pool,
    read,
)
from kvbm.copy.transfer import Strategy, Transfer
from kvbm.errors import KvbmError
from kvbm.layout import spec
from kvbm.layout.layout import Layout
from kvbm.layout.shapes import BlockShape, load_shape
from kvbm.pool.pool import Pool
from kvbm.system.clock import CpuClock, GpuClock

from .messages import strategy_on
from .race import Asked, Run, Runner, race, race_options, row_of, runner, write_race
from .section import Row, note, stamp

__all__ = ["SECTIONS", "digest", "measure"]

SECTIONS = ("copies", "alone", "staged")

#: Source, destination, and True if elements are transposed in tiles or lie in planes.
PAIRS = (
    ("nhd", "universal", False),
    ("universal", "nhd", False),
    ("nhd", "hnd", False),
    ("nhd", "vllm/LBHNC", False),
    ("vllm/LBHNC", "nhd", False),
    ("vllm/paged_attn_v0", "nhd", True),
    ("vllm/fp8_ds_mla", "record/mla_fp8_planes", True),
)

_Clock = GpuClock | CpuClock


def _batches(run: Run) -> tuple[int, ...]:
    if run.on_gpu:
        return (4, 64) if run.quick else (1, 4, 16, 64, 256)
    return (16,) if run.quick else (1, 4, 16, 64)


def measure(run: Run, sections: tuple[str, ...]) -> Iterator[Row]:
    """Rows of the given `SECTIONS`.  Cases for which there is not enough memory or no GPU are left out with a note."""
    end = stamp(run.place)
    for name in sections:
        for row in _SECTIONS[name](run):
            yield {**row, **end}


@contextlib.contextmanager
def _left_out(run: Run, what: str) -> Iterator[None]:
    """Leave out a case with a note if there is not enough memory."""
    try:
        yield
    except (KvbmError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        run.note(f"{what}: left out: {error}")


class _Digests:
    """Memory for digests, on the device of the kernels."""

    def __init__(self, most: int, place: str, stack: contextlib.ExitStack) -> None:
        self.memory = Memory(8 * most, place)
        stack.callback(self.memory.close)

    def of(self, n: int) -> Any:
        """The first `n` digests as an array."""
        if self.memory.device >= 0:
            return View(self.memory.device, self.memory.address, (n,), (8,), "<u8")
        return self.memory.array[: 8 * n].view(np.uint64)

    def values(self, n: int) -> Any:
        """The values of the first `n` digests.  No copy may be running."""
        where = np.array([self.memory.address]), np.array([8 * n])
        return read(self.memory.device, *where).view(np.uint64)


# ---- beside copies -------------------------------------------------------------------------------------------------


def _copies(run: Run) -> Iterator[Row]:
    with make_clock(run.place) as clock:
        for number, (src, dst, is_mixed) in enumerate(PAIRS):
            if run.quick and number not in (0, 1, len(PAIRS) - 1):
                continue
            with _left_out(run, f"{src} → {dst}"):
                yield from _pair(
                    run, clock, (src, dst), (run.place, run.place), _batches(run), is_mixed, verifies=number < 2
                )


def _shape(run: Run, layout: Layout) -> BlockShape:
    """The model's shape; for layouts with planes that of DeepSeek-V3, for which they are made."""
    return replace(load_shape("deepseek-v3"), nl=min(run.model.nl, 61)) if layout.planes else run.model


def _pair(
    run: Run,
    clock: _Clock,
    names: tuple[str, str],
    places: tuple[str, str],
    batches: tuple[int, ...],
    is_mixed: bool,
    *,
    verifies: bool = False,
    strategy: Strategy | None = None,
) -> Iterator[Row]:
    """A pair of layouts: plain copies, copies with digests, and verified copies."""
    layouts = [spec.load(name) for name in names]
    shape, most = _shape(run, layouts[0]), max(batches)
    case = f"{names[0]} → {names[1]}" + (f", {strategy} to pinned memory" if strategy else "")
    how = strategy or strategy_on(run.place)
    with contextlib.ExitStack() as stack:
        src, dst = (
            stack.enter_context(
                random_pool(layout, shape, held_blocks(layout, shape, most, run.place), place, seed=seed)
            )
            for seed, (layout, place) in enumerate(zip(layouts, places, strict=True), 1)
        )
        out = _Digests(most, run.place, stack)
        move = stack.enter_context(Transfer(src, dst, how))
        verified = stack.enter_context(Transfer(src, dst, how, verify=True)) if verifies else None
        nbytes = block_bytes(layouts[0], shape)
        for n in batches:
            sets = Ids(src.num_blocks, dst.num_blocks, n, Ids.for_cache(n * nbytes, run.place)).sets
            _check(src, dst, move, sets[0], out, clock, case)
            calls = {
                "copy": functools.partial(_copy, move, None),
                "copy + digests": functools.partial(_copy, move, out.of(n)),
            }
            if verified is not None:
                calls["copy, verified"] = functools.partial(_copy, verified, None)
            runners = {by: runner(clock, [functools.partial(call, ids) for ids in sets]) for by, call in calls.items()}
            times = race(runners, run.iters)
            asked = _asked(run, n, is_mixed, is_staged=bool(strategy))
            for by in list(calls)[1:]:
                yield row_of(
                    case, by, n, n * nbytes, times[by], "copy", times["copy"], asked if by == "copy + digests" else None
                )


def _copy(move: Transfer, digests: Any, ids: tuple[Any, Any], stream: Any) -> object:
    return move.copy(*ids, stream=stream, digests=digests)


def _asked(run: Run, n: int, is_mixed: bool, *, is_staged: bool) -> Asked:
    """The required speed of a copy with digests, as a share of the plain copy's."""
    if not run.on_gpu:
        return 0.7
    if is_staged:
        return 0.99
    return 0.95 if is_mixed or n < 64 else 0.98


def _check(src: Pool, dst: Pool, move: Transfer, ids: tuple[Any, Any], out: _Digests, clock: _Clock, case: str) -> None:
    """Check that the digests of a copy equal those of the source and of the destination.

    Raises
    ------
    WrongCopyError
        They differ.
    """
    n = len(ids[0])
    move.copy(*ids, stream=clock.stream, digests=out.of(n)).synchronize()
    ends = [
        pool.digest(each, stream=clock.stream if device_of(pool.device) >= 0 else None)
        for pool, each in zip((src, dst), ids, strict=True)
    ]
    for what, held in zip(("source", "destination"), ends, strict=True):
        wrong = np.flatnonzero(out.values(n) != held)
        if wrong.size:
            raise WrongCopyError(f"{case}: {wrong.size} of {n} digests of a copy are not those of the {what}")


def _staged(run: Run) -> Iterator[Row]:
    """Copies from the GPU to pinned memory through the ring."""
    if not run.on_gpu:
        run.note("staged: left out: it needs a GPU")
        return
    with make_clock(run.place) as clock, _left_out(run, "staged"):
        batches = (16,) if run.quick else (16, 64)
        yield from _pair(run, clock, PAIRS[0][:2], (run.place, "pinned"), batches, False, strategy="staged")


# ---- alone ---------------------------------------------------------------------------------------------------------


def _alone(run: Run) -> Iterator[Row]:
    """Digests, compared with reading or hashing the same bytes in one piece."""
    batches = (64,) if run.quick else (1, 4, 16, 64)
    with make_clock(run.place) as clock:
        for name in ("nhd", "universal")[: 1 if run.quick else 2]:
            layout = spec.load(name)
            with _left_out(run, f"digest of {name}"), contextlib.ExitStack() as stack:
                held = held_blocks(layout, run.model, max(batches), run.place)
                pool = stack.enter_context(random_pool(layout, run.model, held, run.place))
                out = _Digests(max(batches), run.place, stack)
                memory = Memory(held * run.model.nbytes, run.place)
                stack.callback(memory.close)
                memory.fill(7)
                readers = list((_gpu_readers if run.on_gpu else _host_readers)(memory, run, stack))
                for n in batches:
                    yield from _beside_readers(run, clock, pool, n, out, memory, readers)


#: Name, and a function that reads bytes of a memory: ``(first, number, stream)``.
_Reader = tuple[str, Callable[[int, int, Any], object]]


def _beside_readers(
    run: Run, clock: _Clock, pool: Pool, n: int, out: _Digests, memory: Memory, readers: list[_Reader]
) -> Iterator[Row]:
    nbytes = n * run.model.nbytes
    sets = Ids(pool.num_blocks, pool.num_blocks, n, Ids.for_cache(nbytes, run.place)).sets
    where = range(0, memory.nbytes - nbytes + 1, nbytes)
    held = out.of(n)
    runners: dict[str, Runner] = {
        "digest": runner(clock, [functools.partial(_digest, pool, ids, held) for ids, _ in sets])
    }
    for by, call in readers:
        runners[by] = runner(clock, [functools.partial(call, at, nbytes) for at in where])
    times = race(runners, run.iters)
    others = list(runners)[1:]
    if run.on_gpu:  # compare only with the fastest reader
        others = sorted(others, key=lambda by: statistics.median(times[by]))[:1]
    for by in others:
        beside = f"read ({by})" if run.on_gpu else by
        asked = 0.85 if run.on_gpu and n == 64 else None
        yield row_of(f"digest of {pool.layout.name}", "digest", n, nbytes, times["digest"], beside, times[by], asked)
    if not others:
        yield row_of(
            f"digest of {pool.layout.name}", "digest", n, nbytes, times["digest"], "itself", times["digest"], None
        )


def _digest(pool: Pool, ids: Any, out: Any, stream: Any) -> object:
    return pool.digest(ids, out=out, stream=stream)


def _gpu_readers(memory: Memory, run: Run, _: contextlib.ExitStack) -> Iterator[_Reader]:
    """Reductions of PyTorch and CuPy, with preallocated results."""
    device, count = memory.device, memory.nbytes // 8
    view = View(device, memory.address, (count,), (8,), "<i8")
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            whole = torch.as_tensor(view, device=f"cuda:{device}")
            yield from torch_readers(torch, whole, lambda stream: torch.cuda.stream(_external(torch, stream, device)))
        else:
            run.note("read by torch: left out: this torch cannot use the GPU")
    with contextlib.suppress(ImportError):
        import cupy

        with cupy.cuda.Device(device):
            array, total = cupy.asarray(view), cupy.empty((), np.int64)

            def by_cupy(at: int, nbytes: int, stream: Any) -> None:
                with cupy.cuda.Device(device), cupy.cuda.ExternalStream(_core.stream_handle(stream), device):
                    cupy.sum(array[at // 8 : (at + nbytes) // 8], out=total)

            yield "cupy.sum of int64", by_cupy


def _external(torch: Any, stream: Any, device: int) -> Any:
    return torch.cuda.ExternalStream(_core.stream_handle(stream), device=device)


def torch_readers(torch: Any, whole: Any, on: Callable[[Any], Any]) -> Iterator[_Reader]:
    """Sums of a tensor of int64.  `on` makes a stream current."""
    for name in ("int64", "float32"):
        held = whole.view(getattr(torch, name))
        total, size = torch.zeros((), dtype=held.dtype, device=held.device), held.element_size()

        def read_all(at: int, nbytes: int, stream: Any, held: Any = held, total: Any = total, size: int = size) -> None:
            with on(stream):
                torch.sum(held[at // size : (at + nbytes) // size], dim=0, out=total)

        yield f"torch.sum of {name}", read_all


#: Package, function, and name in the CSV.
_HASHES = (
    ("xxhash", "xxh3_64_intdigest", "xxh3_64"),
    ("crc32c", "crc32c", "crc32c"),
    ("google_crc32c", "value", "crc32c (google)"),
    ("zlib", "crc32", "zlib.crc32"),
)


def _host_readers(memory: Memory, run: Run, stack: contextlib.ExitStack) -> Iterator[_Reader]:
    """Checksums of maintained packages, and NumPy's sum: one call per block, one thread per core."""
    cores = len(os.sched_getaffinity(0))
    workers = stack.enter_context(ThreadPoolExecutor(cores))
    block = run.model.nbytes

    def by(call: Callable[[Any], object], at: int, nbytes: int, _: Any) -> None:
        pieces = [memory.array[first : first + block] for first in range(at, at + nbytes, block)]
        list(workers.map(call, pieces))

    yield "NumPy's sum", functools.partial(by, lambda piece: piece.view(np.int64).sum())
    for package, name, called in _HASHES:
        try:
            function = getattr(importlib.import_module(package), name)
            function(memory.array[:16])
        except (ImportError, TypeError) as error:
            run.note(f"{called}: left out: {error}")
        else:
            yield called, functools.partial(by, function)


_SECTIONS: dict[str, Callable[[Run], Iterator[Row]]] = {"copies": _copies, "alone": _alone, "staged": _staged}


# ---- the command ---------------------------------------------------------------------------------------------------


@click.command()
@race_options(SECTIONS, 30, "llama-3.1-70b; llama-3.1-8b on the CPU", "Fewer pairs and sizes.")
def digest(
    place: str, iters: int, out: Path | None, shape_text: str | None, sections: tuple[str, ...], quick: bool
) -> None:
    """Measure digests: copies with digests and verified copies beside plain ones, and a digest beside reading the same bytes.

    With --out a table goes to stdout. Digests are compared with those of both pools before they are timed; ratios are of
    medians taken in turns. On the CPU a digest stands beside xxh3, crc32c and crc32, where their packages are installed.
    """
    model = load_shape(shape_text or ("llama-3.1-8b" if place == "cpu" else "llama-3.1-70b"))
    write_race(measure(Run(place, model, iters, quick, note), sections), place, model, out, "digest")
