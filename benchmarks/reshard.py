"""Messages of a resharding, compared with a memcpy, PyTorch, and copies of whole blocks: ``python -m benchmarks reshard``.

Every ratio compares medians of alternating measurements, a few calls of each at a time.  So a slowdown of the machine affects
all of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from kvbm import _core
from kvbm.bench import peers
from kvbm.bench.measure import View, Yardstick, device_of, is_out_of_memory, make_clock, random_pool
from kvbm.copy.transfer import Transfer
from kvbm.errors import KvbmError
from kvbm.layout import spec
from kvbm.layout.shapes import BlockShape, load_shape
from kvbm.planner.loopnest import Id, Part
from kvbm.reshard import Local, Placement, Span, plan
from kvbm.system.clock import CpuClock, GpuClock, Timed

from .messages import HND, NHD, Bound, Case, End, cases, strategy_on
from .overhead import host_seconds
from .race import ROUNDS, Runner, race, race_options, row_of, runner, write_race
from .section import Note, Row, figures, note, stamp

__all__ = ["SECTIONS", "measure", "reshard"]

SECTIONS = ("messages", "equal", "peer", "host", "plan")


# ---- PyTorch -------------------------------------------------------------------------------------------------------


def by_torch(bound: Bound) -> Callable[[Any, Any, Any], object]:
    """The copy in PyTorch without kvbm: blocks viewed as units, indexed, permuted, and assigned by index.

    On the CPU it copies unit by unit, which is faster there.

    Raises
    ------
    NotApplicable
        torch is not installed or cannot use the GPU, or strides cannot describe a pool.
    """
    try:
        import torch
    except ImportError as error:
        raise peers.NotApplicable(f"torch does not import: {error}") from None
    device = device_of(bound.places[0])
    if device >= 0 and not torch.cuda.is_available():
        raise peers.NotApplicable("this torch cannot use the GPU")
    halves = [_tensors(torch, bound, part) for part in bound.plan.parts]
    steps = bound.plan.parts[0].src_id, bound.plan.parts[0].dst_id
    known: dict[tuple[int, int], Any] = {}

    def digits(src_ids: Any, dst_ids: Any) -> Any:
        """Ids split into digits, on the GPU.  This is done once and not in every call."""
        key = id(src_ids), id(dst_ids)
        if key not in known:
            made = [_digits(ids, step) for ids, step in zip((src_ids, dst_ids), steps, strict=True)]
            if device < 0:
                found = [list(zip(*(digit.tolist() for digit in each), strict=True)) for each in made]
            else:
                found = [[torch.from_numpy(digit).to(f"cuda:{device}") for digit in each] for each in made]
            known[key] = (*found, src_ids, dst_ids)
        return known[key][:2]

    def copy(src_ids: Any, dst_ids: Any, stream: Any) -> None:
        here, there = digits(src_ids, dst_ids)
        if device >= 0:
            with torch.cuda.stream(torch.cuda.ExternalStream(_core.stream_handle(stream), device=device)):
                for src, dst, order in halves:
                    dst.index_put_(tuple(there), src[tuple(here)].permute(0, *(1 + axis for axis in order)))
            return
        for src, dst, order in halves:
            lead = src.dim() - len(order)
            turned = src.permute(*range(lead), *(lead + axis for axis in order))
            for one, other in zip(here, there, strict=True):
                dst[other].copy_(turned[one])

    return copy


def _digits(ids: Any, step: Id) -> list[Any]:
    """An id as block and unit digits, slowest first."""
    rest, digits = ids.astype(np.int64), []
    for extent in step.extents:
        digits.append(rest % extent)
        rest = rest // extent
    return [rest, *reversed(digits)]


def _tensors(torch: Any, bound: Bound, part: Part) -> tuple[Any, Any, tuple[int, ...]]:
    """A part of the plan as two strided tensors with the digits of the id first, and the permutation of the other axes."""
    loops = [*part.inner[1:], *part.outer]
    sides = []
    for pool, section, (at, entry), step, strides in (
        (bound.pools[0], bound.sections[0], part.start[0], part.src_id, [(m.extent, m.src_table, m.src) for m in loops]),
        (bound.pools[1], bound.sections[1], part.start[1], part.dst_id, [(m.extent, m.dst_table, m.dst) for m in loops]),
    ):  # fmt: skip
        inner, block, address = peers.folded(pool, entry, at, step[:2], strides)
        blocks = section.num_ids // math.prod(step.extents)
        lead = [(blocks, block), *reversed(step.units)]
        sides.append((device_of(pool.device), address, lead, inner))
    steps = [nbytes for _, address, lead, inner in sides for nbytes in (address, *(n for _, n in lead), *inner)]
    item = next(size for size in (8, 4, 2, 1) if all(n % size == 0 for n in (*steps, part.run_bytes)))
    run = [(part.run_bytes // item, item)] if part.run_bytes > item else []
    made, orders = [], []
    for device, address, lead, inner in sides:
        rest = [*zip((m.extent for m in loops), inner, strict=True), *run]
        order = sorted(range(len(rest)), key=lambda axis: -rest[axis][1])
        axes = [*lead, *(rest[axis] for axis in order)]
        made.append(_as_tensor(torch, device, address, axes, item))
        orders.append(order)
    return made[0], made[1], tuple(orders[0].index(axis) for axis in orders[1])


def _as_tensor(torch: Any, device: int, address: int, axes: Sequence[tuple[int, int]], item: int) -> Any:
    """Bytes as a tensor of integers of `item` bytes, with these extents and strides.  The pool keeps the memory alive."""
    span = sum((extent - 1) * nbytes for extent, nbytes in axes) + item
    if device >= 0:
        view = View(device, address, (span // item,), (item,), f"<i{item}" if item > 1 else "|i1")
        flat = torch.as_tensor(view, device=f"cuda:{device}")
    else:
        flat = torch.from_numpy(peers.host_array(address, span, item))
    return torch.as_strided(flat, [extent for extent, _ in axes], [nbytes // item for _, nbytes in axes])


# ---- rows -----------------------------------------------------------------------------------------------------------


def _host_row(case: str, by: str, n: int, seconds: float, beside: str, other: float | None, most: float) -> Row:
    """A row for a host time: compared with another time, or with a limit of `most` milliseconds."""
    ratio = round(seconds / other, 3) if other else ""
    value = ratio if other else seconds * 1e3
    return {
        "case": case, "by": by, "n": n, "total_bytes": "", "median_ms": figures(seconds * 1e3), "gbps": "",
        "beside": beside, "beside_ms": figures(other * 1e3) if other else "", "ratio": ratio,
        "asked": f"<= {most:g}" + ("" if other else " ms"), "reached": "yes" if float(value) <= most else "no",
    }  # fmt: skip


# ---- sections ------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """The parameters of a run."""

    place: str
    model: BlockShape
    iters: int
    quick: bool
    torch: bool
    note: Note


def measure(run: Run, sections: Sequence[str]) -> Iterator[Row]:
    """Rows of the given `SECTIONS`.  Cases for which there is not enough memory or no second GPU are left out with a note."""
    end = stamp(run.place)
    for name in sections:
        for row in _SECTIONS[name](run):
            yield {**row, **end}


def _messages(run: Run) -> Iterator[Row]:
    with make_clock(run.place) as clock:
        for case in cases(run.model, is_cpu=run.place == "cpu", quick=run.quick):
            try:
                with contextlib.ExitStack() as stack:
                    yield from _message(run, case, clock, stack)
            except (KvbmError, MemoryError) as error:
                if not is_out_of_memory(error) and not isinstance(error, peers.NotApplicable):
                    raise
                run.note(f"{case.name}: left out: {error}")


def _message(run: Run, case: Case, clock: GpuClock | CpuClock, stack: contextlib.ExitStack) -> Iterator[Row]:
    largest = max(n for n, _ in case.asked)
    bound = Bound(case, (run.place, run.place), largest, stack)
    nbytes = bound.plan.nbytes
    stick = stack.enter_context(Yardstick(run.place, run.place, largest * nbytes, clock))
    stack.callback(peers.release)
    backends: dict[str, Callable[[Any, Any, Any], object]] = {
        "kvbm": lambda src_ids, dst_ids, stream: bound.move.copy(src_ids, dst_ids, stream=stream)
    }
    if run.torch:
        try:
            backends["torch"] = by_torch(bound)
        except peers.NotApplicable as reason:
            run.note(f"{case.name}: torch: left out: {reason}")
    for n, asked in case.asked:
        runners: dict[str, Runner] = {
            "memcpy": lambda iters, warmup, n=n: stick.time(n * nbytes, iters=iters, warmup=warmup)  # type: ignore[misc]
        }
        sets = bound.ids(n)
        for by, copy in backends.items():
            if by == "torch" and run.quick and n < largest:
                continue

            def once(src_ids: Any, dst_ids: Any, copy: Any = copy) -> None:
                copy(src_ids, dst_ids, clock.stream)
                clock.synchronize()

            bound.check(once, n, by)
            for ids in sets:
                once(*ids)
            runners[by] = runner(clock, [functools.partial(_bound_call, copy, ids) for ids in sets])
        times = race(runners, run.iters)
        for by in [name for name in backends if name in times]:
            yield row_of(
                case.name, by, n, n * nbytes, times[by], "memcpy", times["memcpy"], asked if by == "kvbm" else None
            )


def _bound_call(copy: Callable[[Any, Any, Any], object], ids: tuple[Any, Any], stream: Any) -> object:
    return copy(*ids, stream)


def _equal(run: Run) -> Iterator[Row]:
    """Equal shapes: copies of pools, and of units that are whole blocks."""
    shape = replace(run.model, nh=max(run.model.nh // 4, 1), nt=16)
    with make_clock(run.place) as clock, contextlib.ExitStack() as stack:
        case = Case("equal shapes, NHD → HND, nt 16", End(NHD, shape, 16), End(HND, shape, 16), ())
        bound = Bound(case, (run.place, run.place), 256, stack)
        pools = stack.enter_context(Transfer(bound.pools[0], bound.pools[1], strategy_on(run.place)))
        nbytes = bound.plan.nbytes
        stick = stack.enter_context(Yardstick(run.place, run.place, 256 * nbytes, clock))
        for n in (64, 256):
            sets = bound.ids(n)
            times = race(
                {
                    "memcpy": functools.partial(_stick, stick, n * nbytes),
                    **{
                        by: runner(clock, [functools.partial(_transfer_call, move, ids) for ids in sets])
                        for by, move in (("pools", pools), ("units", bound.move))
                    },
                },
                2 * run.iters,
            )
            yield row_of(case.name, "pools", n, n * nbytes, times["pools"], "memcpy", times["memcpy"], None)
            yield row_of(case.name, "units", n, n * nbytes, times["units"], "pools", times["pools"], 0.995)


def _stick(stick: Yardstick, nbytes: int, iters: int, warmup: int) -> Timed:
    return stick.time(nbytes, iters=iters, warmup=warmup)


def _transfer_call(move: Transfer, ids: tuple[Any, Any], stream: Any) -> object:
    return move.copy(*ids, stream=stream)


def _placements(model: BlockShape, src_nt: int = 16, dst_nt: int = 64, tp: tuple[int, int] = (4, 2)) -> Any:
    return tuple(
        Placement(f"tp{n}", shard={"h": "tp"}, model=model, nt=nt, name=name)
        for n, nt, name in zip(tp, (src_nt, dst_nt), ("prefill", "decode"), strict=True)
    )


def _peer(run: Run) -> Iterator[Row]:
    """From tp 2 to tp 1: one source rank on each of two GPUs, the destination on the first."""
    here = device_of(run.place)
    if here < 0 or _core.device_count() < 2:
        run.note("peer: left out: it needs two GPUs")
        return
    from cuda.core import Device

    there = (here + 1) % _core.device_count()
    far = f"cuda:{there}"
    if not _core.enable_peer(there, here):
        run.note(f"peer: left out: {far} does not reach {run.place}")
        return
    n = 256
    half = replace(run.model, nh=max(run.model.nh // 2, 1), nt=16)
    whole = replace(run.model, nh=2 * half.nh, nt=64)
    case = Case(
        "tp 2 → 1 over two GPUs", End(NHD, half, 16), End(HND, whole, 16, {"h": range(half.nh, 2 * half.nh)}), ()
    )
    with GpuClock(there) as clock, contextlib.ExitStack() as stack:
        bound = Bound(case, (far, run.place), n, stack)
        near = stack.enter_context(random_pool(spec.load(NHD), half, bound.pools[0].num_blocks, run.place, seed=3))
        made = plan(*_placements(replace(run.model, nh=whole.nh), tp=(2, 1)))
        local = Local(made, [near, bound.pools[0]], [bound.pools[1]], strategy="direct")
        stick = stack.enter_context(Yardstick(far, run.place, n * bound.plan.nbytes, clock))
        sets = bound.ids(n)
        spans = [
            tuple(
                Span(np.random.default_rng(seed).permutation(pool.num_blocks)[: n * 16 // pool.shape.nt], range(n * 16))
                for pool in (near, bound.pools[1])
            )
            for seed in range(4)
        ]  # fmt: skip
        near_stream = stack.enter_context(GpuClock(here)).stream
        Device(there).set_current()  # the clock's device: the line above made the other one current

        def all_of_it(pair: Sequence[Span], stream: Any) -> None:
            """Both messages concurrently.  The stream of the far GPU is timed; it waits for the other stream."""
            local(pair[0], pair[1], stream={there: stream, here: near_stream}, wait=stream).wait(stream)

        def once(src_ids: Any, dst_ids: Any) -> None:
            bound.move.copy(src_ids, dst_ids, stream=clock.stream)
            clock.synchronize()

        bound.check(once, n, "kvbm")
        times = race(
            {
                "peer memcpy": functools.partial(_stick, stick, n * bound.plan.nbytes),
                "kvbm, one message": runner(
                    clock, [functools.partial(_transfer_call, bound.move, ids) for ids in sets]
                ),
                "Local, both messages": runner(clock, [functools.partial(all_of_it, pair) for pair in spans]),
            },
            run.iters,
        )
        for by in ("kvbm, one message", "Local, both messages"):
            # The local half ends before the far one, so the limit is the time of a peer memcpy of the far half.
            yield row_of(case.name, by, n, n * bound.plan.nbytes, times[by], "peer memcpy", times["peer memcpy"], 0.94)


def _host(run: Run) -> Iterator[Row]:
    """Host time of calls with tiny blocks: 64 units compared with 64 blocks, and `Local` compared with its four copies."""
    model = BlockShape(nl=2, no=2, nh=8, nt=4, hd=16, dtype="bfloat16")
    src_place, dst_place = _placements(model, 4, 16)
    src_layout, dst_layout, random, units = spec.load(NHD), spec.load(HND), np.random.default_rng(1), 64
    strategy = strategy_on(run.place)
    with make_clock(run.place) as clock, contextlib.ExitStack() as stack:
        src = [stack.enter_context(random_pool(src_layout, src_place.shape(i), 256, run.place)) for i in range(4)]
        dst = [stack.enter_context(random_pool(dst_layout, dst_place.shape(i), 64, run.place)) for i in range(2)]
        plain = stack.enter_context(random_pool(dst_layout, src_place.shape(0), 256, run.place))
        stream = {} if clock.stream is None else {"stream": clock.stream}
        blocks = stack.enter_context(Transfer(src[0], plain, strategy))
        moves = [
            stack.enter_context(Transfer(src[i], dst[i // 2].units(4).section(h=range(2 * (i % 2), 2 * (i % 2) + 2)), strategy))
            for i in range(4)
        ]  # fmt: skip
        local = Local(plan(src_place, dst_place), src, dst, strategy=strategy)
        tables = [(random.permutation(256)[:units], random.permutation(64)[: units // 4]) for _ in range(4)]
        spans = [tuple(Span(table, range(4 * units)) for table in pair) for pair in tables]
        k = np.arange(units)
        ids = [(a.astype(np.int32), (b[k // 4] * 4 + k % 4).astype(np.int32)) for a, b in tables]
        calls: dict[str, tuple[Callable[[Any], object], Sequence[Any]]] = {
            "blocks": (lambda pair: blocks.copy(*pair, **stream), [(pair[0], pair[0]) for pair in ids]),
            "units": (lambda pair: moves[0].copy(*pair, **stream), ids),
            "copies": (lambda pair: [move.copy(*pair, **stream) for move in moves], ids),
            "Local": (lambda pair: local(*pair, **stream), spans),
            "Local and Span": (
                lambda pair: local(*(Span(table, range(4 * units)) for table in pair), **stream), tables,
            ),
        }  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _, (name, (call, given)) in itertools.product(range(ROUNDS), calls.items()):
            times[name].append(host_seconds(call, given, clock.synchronize, 100 if run.quick else 400)[0])
    found = {name: statistics.median(each) for name, each in times.items()}
    what = "host time of a call" + (", copies included" if run.place == "cpu" else "")
    yield _host_row(what, "Transfer.copy of units", units, found["units"], "of blocks", found["blocks"], 1.3)
    for by in ("Local", "Local and Span"):
        yield _host_row(what, f"{by}, tp 4 → 2", units, found[by], "4 Transfer.copy", found["copies"], 1.3)


def _plan(run: Run) -> Iterator[Row]:
    """Time of a plan and its proof."""
    model = load_shape("llama-3.1-70b")
    few = _placements(model)
    many = (
        Placement(
            "pp4 tp16", shard={"l": {"over": "pp", "bounds": [0, 18, 40, 61, 80]}, "h": "tp/2", "t": "tp%2 by 16"},
            model=model, nt=16, name="prefill",
        ),
        Placement(
            "pp2 tp8", shard={"l": {"over": "pp", "bounds": [0, 37, 80]}, "h": "tp/4", "t": "tp%4 by 1"},
            model=model, nt=64, name="decode",
        ),
    )  # fmt: skip
    for case, pair, most in (("tp 4 → 2", few, 5.0), ("64 → 16 ranks, uneven stages, DCP", many, 50.0)):
        seconds, _ = host_seconds(lambda ends: plan(*ends), [pair], lambda: None, 9 if run.quick else 30)
        yield _host_row("plan and proof", case, len(plan(*pair).messages), seconds, "", None, most)


_SECTIONS: dict[str, Callable[[Run], Iterator[Row]]] = {
    "messages": _messages,
    "equal": _equal,
    "peer": _peer,
    "host": _host,
    "plan": _plan,
}


# ---- the command ---------------------------------------------------------------------------------------------------


@click.command()
@race_options(SECTIONS, 30, "llama-3.1-70b; llama-3.1-8b on the CPU", "Fewer sizes, and PyTorch at the largest only.")
@click.option("--torch/--no-torch", "torch", default=True, help="Also measure the same in PyTorch.")
def reshard(
    place: str,
    iters: int,
    out: Path | None,
    shape_text: str | None,
    sections: tuple[str, ...],
    torch: bool,
    quick: bool,
) -> None:
    """Measure resharding: messages between ranks beside a memcpy and PyTorch, host time of calls, time of plan and proof.

    With --out a table goes to stdout. Copies are checked before they are timed; ratios are of medians taken in turns.
    """
    model = load_shape(shape_text or ("llama-3.1-8b" if place == "cpu" else "llama-3.1-70b"))
    write_race(measure(Run(place, model, iters, quick, torch, note), sections), place, model, out, "reshard")
