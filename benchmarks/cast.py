"""Copies that quantise and dequantise: within a memory, and between a GPU and pinned memory, compared with a memcpy.

Run it with ``python -m benchmarks cast``.

Within a memory a cast is compared with a memcpy that reads and writes as many bytes.  Between a GPU and pinned memory it is
compared with a memcpy of the blocks that are not quantised.  Ratios compare medians of alternating measurements, with random ids.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from kvbm import _core
from kvbm.bench.check import WrongCopyError
from kvbm.bench.measure import (
    Ids,
    Memory,
    View,
    Yardstick,
    block_bytes,
    device_of,
    held_blocks,
    make_clock,
    random_pool,
    read,
)
from kvbm.copy.transfer import Transfer, convert
from kvbm.layout import spec
from kvbm.layout.layout import Layout
from kvbm.layout.shapes import load_shape
from kvbm.pool.pool import Pool

from .race import Asked, Run, race, race_options, row_of, runner, write_race
from .section import Row, note, stamp

__all__ = ["SECTIONS", "cast", "measure"]

SECTIONS = ("within", "across")

#: Quantised layouts; the required ratio within a GPU, and across PCIe for many and for few blocks.
LAYOUTS: dict[str, tuple[float, float, float]] = {
    "record/per_token_head_fp8_planes": (0.9, 1.85, 1.6),
    "record/per_token_head_int8_planes": (0.9, 1.85, 1.6),
    "vllm/per_token_head_fp8": (0.9, 1.85, 1.6),
    "record/mxfp8_universal": (0.8, 1.85, 1.6),
    "record/nvfp4_universal": (0.8, 3.2, 2.4),
}
PLAIN = "nhd"

#: Blocks with values of their own.
_KINDS = 4

Digests = npt.NDArray[np.uint64]

#: From this number of blocks on a batch is a large one.
_MANY = 64


def _batches(run: Run) -> tuple[int, ...]:
    return (8,) if run.quick or not run.on_gpu else (8, _MANY)


def measure(run: Run, sections: tuple[str, ...]) -> Iterator[Row]:
    """Rows of the given `SECTIONS`."""
    end = stamp(run.place)
    for section in sections:
        if section == "across" and not run.on_gpu:
            run.note("across: left out: it needs a GPU")
            continue
        for name in list(LAYOUTS)[: 1 if run.quick else None]:
            for row in _layout(run, spec.load(name), "pinned" if section == "across" else run.place):
                yield {**row, **end}


def _layout(run: Run, quantised: Layout, place: str) -> Iterator[Row]:
    """Casts from `PLAIN` at the run's place to a quantised layout at another place, and back."""
    plain, most, across = spec.load(PLAIN), max(_batches(run)), place != run.place
    each = block_bytes(plain, run.model), block_bytes(quantised, run.model)
    held = [held_blocks(layout, run.model, most, run.place) for layout in (plain, quantised)]
    with (
        make_clock(run.place) as clock,
        random_pool(plain, run.model, held[0], run.place) as values,
        random_pool(quantised, run.model, min(held[1], 4 * most) if across else held[1], place) as codes,
    ):
        stream = clock.stream if run.on_gpu else None
        expected = _fill(values, quantised, stream)
        sets = Ids(values.num_blocks, codes.num_blocks, most, Ids.for_cache(most * each[1], run.place)).sets
        for by, src, dst in (("quantise", values, codes), ("dequantise", codes, values)):
            ends = [run.place if pool is values else place for pool in (src, dst)]
            with Transfer(src, dst, cast="amax") as move, Yardstick(ends[0], ends[1], most * max(each), clock) as stick:
                for n in _batches(run):
                    pairs = [(a[:n], b[:n])[:: 1 if src is values else -1] for a, b in sets]
                    move.copy(*pairs[0], stream=stream).synchronize()
                    if src is values:
                        _check(codes, pairs[0], expected, stream)
                    nbytes = n * each[0] if across else n * sum(each) // 2
                    calls = [functools.partial(_copy, move, ids) for ids in pairs]
                    memcpy = functools.partial(_memcpy, stick, nbytes)
                    times = race({by: runner(clock, calls), "memcpy": memcpy}, run.iters)
                    case = f"{src.layout.name} → {dst.layout.name}{', pinned' if across else ''}"
                    asked = _asked(quantised.name, n, run, across)
                    yield row_of(case, by, n, nbytes, times[by], "memcpy", times["memcpy"], asked)


def _asked(name: str, n: int, run: Run, across: bool) -> Asked:
    if not run.on_gpu:
        return 0.5
    within, many, few = LAYOUTS[name]
    if across:
        return many if n >= _MANY else few
    return within if n >= _MANY else None


def _copy(move: Transfer, ids: tuple[Any, Any], stream: Any) -> object:
    return move.copy(*ids, stream=stream)


def _memcpy(stick: Yardstick, nbytes: int, iters: int, warmup: int) -> Any:
    return stick.time(nbytes, iters=iters, warmup=warmup)


def _fill(values: Pool, quantised: Layout, stream: Any) -> Digests:
    """Fill the blocks with finite values (of random bytes most groups would have NaN), the same in every `_KINDS`-th block.

    Returns
    -------
    array of uint64
        Digests of these kinds of blocks as a CPU quantises them.
    """
    some = Pool.allocate(values.layout, values.shape, _KINDS, "cpu" if stream is None else "pinned")
    codes = Pool.allocate(quantised, values.shape, _KINDS)
    with some, codes:
        random = np.random.default_rng(3)
        for array in some.arrays:
            array[...] = random.standard_normal(array.shape, np.float32).astype(array.dtype)
        kinds = np.arange(values.num_blocks) % _KINDS
        with Transfer(some, values) as move:
            move.copy(kinds, range(values.num_blocks), stream=stream).synchronize()
        convert(some, codes, cast="amax")
        return np.array(codes.digest())


def _check(codes: Pool, ids: tuple[Any, Any], expected: Digests, stream: Any) -> None:
    """Check that blocks were quantised as a CPU does.

    Raises
    ------
    WrongCopyError
        They were not.
    """
    found = np.zeros(len(ids[0]), np.uint64)
    if device_of(codes.device) < 0:
        found[:] = codes.digest(ids[1])
    else:
        memory = Memory(found.nbytes, codes.device)
        out = View(memory.device, memory.address, found.shape, (8,), "<u8")
        codes.digest(ids[1], out=out, stream=stream)
        _core.synchronize(memory.device, _core.stream_handle(stream))
        found[:] = read(memory.device, np.array([memory.address]), np.array([found.nbytes])).view(np.uint64)
        memory.close()
    wrong = np.flatnonzero(found != expected[np.asarray(ids[0]) % _KINDS])
    if wrong.size:
        raise WrongCopyError(f"{codes.layout.name}: {wrong.size} of {len(found)} blocks are not quantised as a CPU does")


@click.command()
@race_options(SECTIONS, 30, "llama-3.1-70b; llama-3.1-8b on the CPU", "One layout, and few blocks.")
def cast(
    place: str, iters: int, out: Path | None, shape_text: str | None, sections: tuple[str, ...], quick: bool
) -> None:
    """Measure copies that quantise and dequantise, within a memory and across PCIe, beside a memcpy.

    With --out a table goes to stdout.  Ratios are of medians taken in turns.
    """
    model = load_shape(shape_text or ("llama-3.1-8b" if place == "cpu" else "llama-3.1-70b"))
    write_race(measure(Run(place, model, iters, quick, note), sections), place, model, out, "cast")
