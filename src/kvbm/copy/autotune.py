"""Measures the copy strategies once per machine for ``strategy="auto"``, and fills the tables of `kvbm.copy.tables`."""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from .._arguments import imported
from ..errors import escaping
from ..pool.pool import Pool, part_of
from ..system import machine
from . import cost_model, tables
from .cost_model import DIRECTIONS, Row, Table, reason
from .executor import Executor
from .strategies import STRATEGIES

_log = escaping(logging.getLogger(__name__))

Progress: TypeAlias = Callable[[int, int], object]

#: ``(src_ids, dst_ids, stream)`` → enqueues a copy.
Copying: TypeAlias = Callable[[Any, Any, Any], object]

def ensure(direction: str, device: int) -> None:
    """Measure a direction if this machine has no table with it: once per machine, about 2 s.

    It never raises an error.  It does nothing with ``KVBM_TUNE=0``, for copies on one GPU or on the host, while a stream capture is
    going on, and after a failure.  `tables.limits` says why.
    """
    if direction not in DIRECTIONS or direction == "d2d" or os.environ.get("KVBM_TUNE") == "0":
        return
    try:
        with tables.lock:
            found = tables.known(device)
            if not found.has(direction) and direction not in found.failed:
                _measure_into(found, direction, device)
    except Exception:  # `tables.limits` meets it again, and logs it
        return


def _measure_into(found: tables.Known, direction: str, device: int) -> None:
    if _is_capturing():
        found.waiting[direction] = "a stream capture was going on, during which nothing is measured; `kvbm tune` does it beforehand"
        return
    try:
        found.table = _measure_now(direction, device, found.table)
    except Exception as error:
        found.failed[direction] = f"measuring failed: {reason(error)}"
        _log.warning("kvbm: measuring copies on cuda:%d failed, the built-in rule is used: %s", device, reason(error))
        return
    if not found.has(direction):
        found.failed[direction] = f"{direction} could not be measured"


def _measure_now(direction: str, device: int, table: Table | None) -> Table:
    gpu, _ = machine.gpu_and_driver(device)
    _log.info("kvbm: measuring copies on cuda:%d (%s), once a machine, some 2 s; KVBM_TUNE=0 forbids it", device, gpu)
    # Measure only the requested direction, and only GPUs that this process uses: a context costs memory on each further GPU.
    wanted = ("p2p",) if direction == "p2p" else ("d2h", "h2d", "d2d")
    made = measure(device, directions=wanted, peers=_used_peers(device) if direction == "p2p" else ())
    if table is not None:
        made = replace(made, rows=(*(row for row in table.rows if row.direction not in wanted), *made.rows))
    try:
        _log.info("kvbm: wrote %s", cost_model.save(made))
    except (OSError, RuntimeError) as error:
        _log.warning(
            "kvbm: the table of copy speeds cannot be kept, and every process measures for itself: %s", reason(error)
        )
    return made


def _is_capturing() -> bool:
    """True if the current stream of this thread, in torch or CuPy, is being captured into a graph.

    The default stream is never captured.  A query of it would break the capture of another stream.
    """
    torch, cupy = imported("torch"), imported("cupy")
    captures = False
    if torch is not None and torch.cuda.is_initialized() and torch.cuda.current_stream().cuda_stream > 2:
        captures = torch.cuda.is_current_stream_capturing()
    if cupy is not None and not captures:
        stream = cupy.cuda.get_current_stream()
        captures = stream.ptr > 2 and stream.is_capturing()
    return bool(captures)


# ---- measuring -----------------------------------------------------------------------------------------------------

#: Sizes of contiguous runs in bytes.
RUNS = (4 << 10, 32 << 10, 256 << 10, 4 << 20)

_MIB = 1 << 20
_ROUNDS = 15  # rounds over all strategies, if the time suffices
_SECONDS = 0.6  # per direction, without the allocation of the pools
_WAKE_SECONDS = 0.03  # until clocks and links are at full speed
_TOO_LONG = 0.1  # copies that are expected to take longer are left out

#: Both layouts keep runs whole and order them differently.  So the contiguous piece is one run, on both sides, in the pieces of a
#: staged copy, and for the copy engine alone.
_NEAR, _FAR = "b l t d", "l b t d"


def grid() -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (bytes per run, bytes per block, total bytes).  Blocks have the size of a model's; the small one is a single run."""
    yield 256 << 10, 256 << 10, (256 << 10, 1 * _MIB)
    for run in RUNS:
        block = max(run, _MIB)
        yield run, block, tuple(total for total in (1 * _MIB, 4 * _MIB, 16 * _MIB, 64 * _MIB) if total >= block)


def _shapes(run: int, block: int) -> tuple[Any, Any, Any]:
    """The near and the far layout, and a block shape that gives runs of this length."""
    from ..layout import spec
    from ..layout.shapes import BlockShape

    near, far = (spec.parse(f'order: "{order}"', "tuning", order.replace(" ", "")) for order in (_NEAR, _FAR))
    return near, far, BlockShape(nl=block // run, no=1, nh=1, nt=1, hd=run, dtype="uint8")


class _StoppedError(Exception):
    """The measuring thread was asked to stop."""


def measure(
    device: int, progress: Progress | None = None, *, directions: Sequence[str] = DIRECTIONS,
    peers: Iterable[int] | None = None,
) -> Table:  # fmt: skip
    """Measure the strategies on this machine.  The table is not written to a file: see `cost_model.save`.

    It takes about 2 s, and half a second for all `peers` together: the GPUs to measure ``p2p`` with (default: all
    others), of which the medians are kept.  `progress` is called as ``progress(done, total)`` after every step, on
    another thread.  That thread has its own streams, so your current device does not change, and a running stream
    capture is not disturbed.

    Raises `CudaError` or `CudaUnavailableError` if there is no GPU, or not enough memory: up to 256 MiB of the GPU and
    64 MiB of pinned memory are needed for a short time.
    """
    from .. import _core
    from .._version import __version__

    gpu, driver = machine.gpu_and_driver(device)
    others = [d for d in range(_core.device_count()) if d != device] if peers is None else list(peers)
    jobs = [(direction, -1) for direction in directions if direction != "p2p"]
    jobs += [("p2p", peer) for peer in others if "p2p" in directions]
    steps = len(jobs) * sum(len(totals) for _, _, totals in grid())
    ended = 0
    stop = threading.Event()

    def step() -> None:
        nonlocal ended
        ended += 1
        if progress is not None:
            progress(ended, steps)
        if stop.is_set():
            raise _StoppedError

    def work() -> list[Row]:
        with _clock(device) as clock:
            return [
                row
                for direction, peer in jobs
                for row in _measured(
                    direction, device, peer, clock, _SECONDS / (len(others) if direction == "p2p" else 1), step
                )
            ]

    rows = _medians(_on_a_thread(work, stop))
    return Table(gpu, driver, dt.date.today().isoformat(), __version__, tuple(rows))


def _on_a_thread(work: Callable[[], list[Row]], stop: threading.Event) -> list[Row]:
    """Run on a new thread.  It has its own current context and capture mode, so those of the caller do not change."""
    rows: list[Row] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            rows.extend(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="kvbm-tune")
    try:
        thread.start()
        thread.join()
    except BaseException:  # Ctrl-C: release the GPU's memory first
        stop.set()
        if thread.is_alive():
            thread.join()
        raise
    if errors:
        raise errors[0]
    return rows


@contextlib.contextmanager
def _clock(device: int) -> Iterator[Any]:
    """A clock with its own stream.  The thread may allocate memory while another thread captures a stream."""
    from cuda.bindings import driver
    from cuda.core import Device

    from ..system.clock import GpuClock

    Device(device).set_current()
    driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    with GpuClock(device) as clock:
        yield clock


def _used_peers(device: int) -> list[int]:
    """The other GPUs on which this process has a context."""
    from cuda.bindings import driver

    from .. import _core

    used = []
    for peer in range(_core.device_count()):
        status, _, active = driver.cuDevicePrimaryCtxGetState(peer)
        if peer != device and int(status) == 0 and active:
            used.append(peer)
    return used


def _measured(
    direction: str, device: int, peer: int, clock: Any, seconds: float, step: Callable[[], None]
) -> Iterator[Row]:
    import numpy as np

    from .. import _core

    names: tuple[str, ...] = ("direct", "engine") if direction == "d2d" else STRATEGIES
    if direction == "p2p" and not _core.enable_peer(device, peer):
        names = names[1:]
    place = {"d2d": f"cuda:{device}", "p2p": f"cuda:{peer}"}.get(direction, f"pinned:{device}")
    left = sum(len(totals) for _, _, totals in grid())
    random = np.random.default_rng(0)
    is_awake = False
    for run, block, totals in grid():
        near_layout, far_layout, shape = _shapes(run, block)
        a_byte = dict.fromkeys(names, 0.0)  # seconds at this run length, from the batch before
        with contextlib.ExitStack() as stack:
            blocks = max(totals[-1] // block, 16)
            near = stack.enter_context(Pool.allocate(near_layout, shape, blocks, f"cuda:{device}"))
            far = stack.enter_context(Pool.allocate(far_layout, shape, blocks, place))
            ends = (far, near) if direction == "h2d" else (near, far)
            moves = {name: stack.enter_context(_copying(*ends, name)) for name in names}
            for total in totals:
                # Adjacent blocks are never adjacent on the other side: the engine would merge them.
                src = random.permutation(blocks)[: total // block]
                ids = src, blocks - 1 - src
                if not is_awake:
                    is_awake, until = True, time.perf_counter() + _WAKE_SECONDS
                    while time.perf_counter() < until:
                        _seconds(moves[names[0]], ids, clock)
                begin = time.perf_counter()
                quick = {name: move for name, move in moves.items() if a_byte[name] * total < _TOO_LONG}
                for name, took in _sampled(quick, ids, clock, seconds / left).items():
                    a_byte[name] = took / total
                    yield Row(direction, name, run, block, total, took)
                seconds, left = max(seconds - (time.perf_counter() - begin), 0.0), left - 1
                step()


@contextlib.contextmanager
def _copying(src: Pool, dst: Pool, strategy: str) -> Iterator[Copying]:
    """A function that copies blocks between two own pools by one strategy."""
    executor = Executor(part_of(src, "source"), part_of(dst, "destination"), strategy, None, None, keeps=True)
    executor.begin()
    route = executor.found(None)
    try:
        yield lambda src_ids, dst_ids, stream: route.copy(src_ids, dst_ids, stream)
    finally:
        executor.close()


def _sampled(moves: Mapping[str, Copying], ids: Any, clock: Any, seconds: float) -> dict[str, float]:
    """The median seconds of each strategy.  The strategies take turns, so a drift affects all of them."""
    begin = time.perf_counter()
    samples: dict[str, list[float]] = {name: [] for name in moves}
    for turn in range(_ROUNDS + 1):
        for name, move in moves.items():
            took = _seconds(move, ids, clock)
            if turn:  # the first turn creates tables and rings and is not counted
                samples[name].append(took)
        if turn > 2 and time.perf_counter() - begin > seconds:
            break
    return {name: statistics.median(times) for name, times in samples.items()}


def _seconds(move: Copying, ids: Any, clock: Any) -> float:
    """Time on the stream, after a short delay.  The time to submit the copy is hidden, as it is beside a running model."""
    src, dst = ids
    found: float = clock.time(lambda stream: move(src, dst, stream), iters=1, warmup=0).median
    return found


def _medians(rows: Iterable[Row]) -> list[Row]:
    """One row per key: the peers are not distinguished."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        found.setdefault(row[:5], []).append(row.seconds)
    return [Row._make((*key, float(f"{statistics.median(times):.4g}"))) for key, times in found.items()]
