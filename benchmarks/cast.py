"""Copies that quantise and dequantise: within a memory, and between a GPU and pinned memory, compared with a memcpy.

Run it with ``python -m benchmarks cast``.

Within a memory a cast is compared with a memcpy that reads and writes as many bytes.  Between a GPU and pinned memory it is
compared with a memcpy of the blocks that are not quantised.  Casts with digests are compared with those without, and the loads of
vLLM's worker with ``host_values`` with its loads without.  Ratios compare medians of alternating measurements, with random ids.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
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
from kvbm.system.clock import Timed

from .race import Asked, Run, race, race_options, row_of, runner, write_race
from .section import Row, note, stamp

__all__ = ["SECTIONS", "cast", "measure"]

SECTIONS = ("within", "across", "digests", "reload")

#: Quantised layouts; the required ratio within a GPU, and across PCIe for many and for few blocks.
LAYOUTS: dict[str, tuple[float, float, float]] = {
    "record/per_token_head_fp8_planes": (0.9, 1.85, 1.6),
    "record/per_token_head_int8_planes": (0.9, 1.85, 1.6),
    "vllm/per_token_head_fp8": (0.9, 1.85, 1.6),
    "record/mxfp8_universal": (0.8, 1.85, 1.6),
    "record/nvfp4_universal": (0.8, 3.2, 2.4),
}
PLAIN = "nhd"

#: Required ratio of casts with digests to those without.
_ASKED_OF_DIGESTS = 0.97

#: Required ratio of loads of quantised blocks to those of blocks that are not: 25 % less time.
_ASKED_OF_RELOADS = {"fp8": 1.34}

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
        if section in ("across", "digests") and not run.on_gpu:
            run.note(f"{section}: left out: it needs a GPU")
            continue
        if section == "reload":
            for row in _reload(run):
                yield {**row, **end}
            continue
        for name in list(LAYOUTS)[: 1 if run.quick else None]:
            layout, place = spec.load(name), "pinned" if section == "across" else run.place
            for row in _digests(run, layout) if section == "digests" else _layout(run, layout, place):
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
        stream = _stream(clock)
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


def _digests(run: Run, quantised: Layout) -> Iterator[Row]:
    """Casts within a GPU with digests, and without."""
    n = max(_batches(run))
    held = [held_blocks(layout, run.model, n, run.place) for layout in (spec.load(PLAIN), quantised)]
    with (
        make_clock(run.place) as clock,
        random_pool(spec.load(PLAIN), run.model, held[0], run.place) as values,
        random_pool(quantised, run.model, held[1], run.place) as codes,
    ):
        _fill(values, quantised, _stream(clock))
        memory = Memory(8 * n, run.place)
        out = View(memory.device, memory.address, (n,), (8,), "<u8")
        sets = Ids(values.num_blocks, codes.num_blocks, n, Ids.for_cache(n * block_bytes(quantised, run.model), run.place)).sets
        for by, src, dst in (("quantise", values, codes), ("dequantise", codes, values)):
            with Transfer(src, dst, cast="amax") as move:
                pairs = sets if src is values else [(b, a) for a, b in sets]
                calls = {
                    by: [functools.partial(_copy, move, ids) for ids in pairs],
                    f"{by} with digests": [functools.partial(_copy_digested, move, ids, out) for ids in pairs],
                }
                times = race({name: runner(clock, some) for name, some in calls.items()}, run.iters)
                case = f"{src.layout.name} → {dst.layout.name}"
                nbytes = n * (block_bytes(values.layout, run.model) + block_bytes(quantised, run.model)) // 2
                yield row_of(case, f"{by} with digests", n, nbytes, times[f"{by} with digests"], by, times[by], _ASKED_OF_DIGESTS)
        memory.close()


def _reload(run: Run) -> Iterator[Row]:
    """Loads of vLLM's worker from host memory: quantised blocks of Llama 3.1 8B, beside those that are not."""
    from kvbm.integrations.host_values import FORMATS, HostValues
    from kvbm.integrations.vllm.copier import Copier, HostMemory
    from kvbm.integrations.vllm.pages import Pages

    model = load_shape("llama-3.1-8b")
    n, place = (256 if run.quick else 8192) // model.nt, "pinned" if run.on_gpu else "cpu"
    with contextlib.ExitStack() as stack:
        clock = stack.enter_context(make_clock(run.place))
        pool = stack.enter_context(random_pool(spec.load("vllm/LBNHC"), model, 2 * n, run.place))
        _fill(pool, spec.load("record/per_token_head_fp8_planes"), _stream(clock))
        copiers, turns, jobs = {}, {}, itertools.count()
        random = np.random.default_rng(5)
        for name in ("", *FORMATS):
            layout = HostValues(name).layout if name else spec.load("universal")
            copiers[name] = Copier(HostMemory(layout, [[Pages(pool)]], 2 * n, place, cast="amax" if name else None), 1)
            stack.callback(copiers[name].close)
            _job(copiers[name], next(jobs), (np.arange(2 * n), np.arange(2 * n)), is_load=False)
            turns[name] = itertools.cycle([(random.permutation(2 * n)[:n], random.permutation(2 * n)[:n]) for _ in range(4)])

        def timed(name: str, iters: int, warmup: int) -> Timed:
            seconds = [_job(copiers[name], next(jobs), next(turns[name]), is_load=True) for _ in range(warmup + iters)]
            return Timed.of(seconds[warmup:], "events" if run.on_gpu else "clock")

        times = race({name: functools.partial(timed, name) for name in copiers}, run.iters)
        for name in FORMATS:
            case, nbytes = f"reload of {n * model.nt} tokens, {name}", n * block_bytes(pool.layout, model)
            asked = _ASKED_OF_RELOADS.get(name) if run.on_gpu else None
            yield row_of(case, "load", n, nbytes, times[name], "without host_values", times[""], asked)


def _job(copier: Any, number: int, ids: tuple[Any, Any], *, is_load: bool) -> float:
    """Run a job of the worker, and return its seconds."""
    copier.submit(number, *ids, [len(ids[0])], [0], is_load=is_load)
    copier.wait()
    while not (done := copier.finished()):  # the event is recorded after the copies
        pass
    if done[0].wrong_blocks:
        raise WrongCopyError(f"{len(done[0].wrong_blocks)} of {done[0].blocks} blocks fail their check")
    return float(done[0].seconds)


def _asked(name: str, n: int, run: Run, across: bool) -> Asked:
    if not run.on_gpu:
        return 0.5
    within, many, few = LAYOUTS[name]
    if across:
        return many if n >= _MANY else few
    return within if n >= _MANY else None


def _stream(clock: Any) -> Any:
    """The stream of a clock; None on the CPU."""
    return getattr(clock, "stream", None)


def _copy(move: Transfer, ids: tuple[Any, Any], stream: Any) -> object:
    return move.copy(*ids, stream=stream)


def _copy_digested(move: Transfer, ids: tuple[Any, Any], out: View, stream: Any) -> object:
    return move.copy(*ids, stream=stream, digests=out)


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
