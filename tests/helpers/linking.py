"""Two engines in one process with linked ranks, over wires with or without faults.  `reshard_oracle` gives every expected byte."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import reshard_oracle
from kvbm import BindError, KvbmError, Span, wire
from kvbm.layout.shapes import ITEMSIZE
from kvbm.link import link as links
from kvbm.link import loans
from kvbm.reshard import Endpoint
from memory import aligned, views

#: Seconds that anything may take; a sanitizer takes several times as long.
LIMIT = 120.0 if os.environ.get("KVBM_SANITIZE") else 20.0

Wires = Callable[[int, int], Any]
Memory = tuple[Callable[[np.ndarray], Any], Any]


def gpu_memory(device: str = "cuda:0") -> Memory:
    """Memory of a GPU as torch tensors."""
    import torch
    from test_planes import cuda_arrays

    def arrays(arena: Any, buffer: Any, dtype: str) -> list[Any]:
        if isinstance(arena, reshard_oracle.plane_oracle.Arena):
            return cuda_arrays(arena, buffer)
        return views(arena, buffer, "uint8" if dtype in reshard_oracle.oracle.PAIRED else dtype, "torch")

    return (lambda data: torch.from_numpy(data).to(device)), arrays


def digested_first(monkeypatch: Any) -> None:
    """No block is known to be complete before it is digested: a direct copy begins after that."""
    for module in (links, loans):
        monkeypatch.setattr(module, "are_complete", lambda *_: False)


class Linked:
    """A case of the oracle, with one endpoint per rank.

    Parameters
    ----------
    case : Case
    wires : callable, optional
        Called with a side and a rank; returns the rank's wire.  Default: wires of one hub.
    memory : two callables
        Functions that make memory of bytes, and arrays in it, as for `reshard_oracle.Run`.
    run : CastRun, optional
        The case with its pools, if values are cast.
    """

    def __init__(
        self,
        case: reshard_oracle.Case,
        wires: Wires | None = None,
        memory: Memory = (aligned, reshard_oracle.host_arrays),
        run: Any = None,
        **options: Any,
    ) -> None:
        case = replace(case, prefer=None, clear_tail=False)
        self.case, self.run = case, run or reshard_oracle.Run(case, *memory)
        if run is not None:
            options = {"cast": run.told, **options}
        self.hub = wire.Hub()
        make = wires or (lambda side, rank: wire.memory(f"{side}/{rank}", self.hub))
        self.wires = [[make(side, rank) for rank in range(len(self.run.pools[side]))] for side in (0, 1)]
        given = {"chunk_bytes": 1 << 16, "ring_bytes": 1 << 20, **options}
        self.ends: list[list[Endpoint]] = [[], []]
        with contextlib.ExitStack() as failing:
            failing.callback(self.__exit__)
            for side, ends in enumerate(self.ends):
                for rank, pool in enumerate(self.run.pools[side]):
                    name, place = ("prefill", "decode")[side], self.run.places[side]
                    ends.append(Endpoint(name, place, rank, pool, wire=self.wires[side][rank], **given))
            cards = [[end.card() for end in ends] for ends in self.ends]
            if case.gather:
                for end in self.ends[1]:
                    end.join(cards[1])
            self.links = [
                [end.meet(cards[1 - side], stripe=case.stripe, gather=case.gather) for end in self.ends[side]]
                for side in (0, 1)
            ]
            failing.pop_all()

    def __enter__(self) -> Linked:
        return self

    def __exit__(self, *_: object) -> None:
        close_all(self.all_ends)

    @property
    def all_ends(self) -> list[Endpoint]:
        return [*self.ends[0], *self.ends[1]]

    def spans(self, side: int) -> list[list[Span]]:
        """Spans of every sequence, per rank."""
        return [
            [Span(told[side].tables[rank], tokens, told[side].origins[rank]) for tokens, *told in self.case.sequences]
            for rank in range(len(self.run.pools[side]))
        ]

    def begin(self, rng: random.Random | None = None, *, timeout: float = LIMIT, name: str = "") -> list[Any]:
        """Begin all sendings and arrivals of the case, in any order, pushed or pulled, in windows of layers."""
        rng = rng or random.Random(0)
        calls: list[Callable[[], Any]] = []
        wanted = range(self.case.nl) if self.case.layers is None else self.case.layers
        cuts = sorted({wanted.start, wanted.stop, *rng.choices(wanted, k=rng.choice((0, 0, 2)))})
        windows = [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        pulls = rng.random() < 0.5
        for rank, spans in enumerate(self.spans(0)):
            link = self.links[0][rank]
            go = link.offer if pulls else link.send
            for i, span in enumerate(spans):
                calls += [partial(go, f"{name}{i}", span, layers=window, timeout=timeout) for window in windows]
        for rank, spans in enumerate(self.spans(1)):
            link, verify = self.links[1][rank], rng.choice(("after", "before"))
            for i, span in enumerate(spans):
                calls.append(partial(link.receive, f"{name}{i}", span, layers=wanted, verify=verify, timeout=timeout))
        rng.shuffle(calls)
        return [call() for call in calls]

    def check(self, read: Callable[[Any], np.ndarray] = np.asarray) -> None:
        self.run.check(read)

    def refill(self) -> None:
        """Restore the destination's original contents."""
        for buffer, memory in zip(self.run.buffers[1], self.run.scene.sides[1], strict=True):
            buffer[:] = memory.before

    def require_slots(self, limit: float = LIMIT) -> None:
        """Require that all slots are free, now or soon."""

        def held() -> list[tuple[Any, ...]]:
            found = []
            for one in self.all_ends:
                ring = one.ring
                counts = ring.sends - ring.free(sends=True), ring.takes - ring.free(sends=False), len(ring.quarantined)
                if any(counts):
                    found.append((one.engine, one.rank, *counts))
            return found

        until(lambda: not held(), lambda: f"all slots are free: {held()}", limit)


def written(found: Linked) -> list[Any]:
    """For each receiving rank, the bytes that a transfer of the case writes: those that it makes equal whatever they were."""
    after = []
    for number, fill in enumerate((0x55, 0xAA)):
        for buffer in found.run.buffers[1]:
            buffer[:] = fill
        assert not any(ended(found.begin(name=f"written {number}")))
        after.append([np.array(buffer) for buffer in found.run.buffers[1]])
    return [one == two for one, two in zip(*after, strict=True)]


def require_nothing_left(buffers: Iterable[Any], masks: list[Any], errors: list[Any]) -> int:
    """After failed receives into memory of 0x55: all their tokens are zero or none is, and no other byte has changed."""
    cleared = 0
    for buffer, mask, error in zip(buffers, masks, errors, strict=True):
        assert (buffer[~mask] == 0x55).all()
        if error is not None and not (buffer[mask] == 0x55).all():
            assert (buffer[mask] == 0).all(), error
            cleared += 1
    return cleared


class Deaf:
    """A wire that drops received notes until it listens."""

    def __init__(self, below: Any) -> None:
        self.below, self.listens = below, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def poll(self) -> list[tuple[str, bytes]]:
        listens = self.listens  # not what came before it did
        came: list[tuple[str, bytes]] = self.below.poll()
        return came if listens else []


def close_all(ends: Iterable[Any]) -> None:
    """Close all of them, and then raise the first error."""
    with contextlib.ExitStack() as stack:
        for end in ends:
            stack.callback(end.close)


@contextlib.contextmanager
def held(*ends: Endpoint) -> Iterator[None]:
    """Pause the endpoints' threads: requests made inside the block all begin before any thread runs."""
    go_on = threading.Event()
    try:
        for end in ends:
            end.submit(lambda: go_on.wait(LIMIT))
        yield
    finally:
        go_on.set()


def in_bursts(found: Linked, verify: str = "after", meanwhile: Callable[[], object] = int) -> list[Any]:
    """Send a sequence from each rank to receivers that poll seldom, so that each poll finds several chunks."""
    with held(*found.all_ends):
        handles: list[Any] = [link.send("one", span) for link, (span,) in zip(found.links[0], found.spans(0), strict=True)]
        handles += [
            link.receive("one", span, verify=verify) for link, (span,) in zip(found.links[1], found.spans(1), strict=True)
        ]
    while any(link.endpoint.call(lambda link=link: link.handles) for links in found.links for link in links):
        with held(*found.ends[1]):
            time.sleep(0.02)
        meanwhile()
    return handles


def memory_files(what: str = "") -> set[int]:
    """Numbers of kvbm's memory files (``ring``, ``loans``) that this process has open or mapped.  A new file has a new number."""
    found, name = set(), f"/memfd:kvbm {what}"
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if str(file.readlink()).startswith(name):
                found.add(file.stat().st_ino)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if name in line:
            found.add(int(line.split()[4]))
    return found


def until(happens: Callable[[], Any], what: str | Callable[[], str] = "it happens", limit: float = LIMIT) -> Any:
    """Call a function until its result is true."""
    end = time.monotonic() + limit
    while True:
        is_late = time.monotonic() > end
        if found := happens():
            return found
        assert not is_late, f"not in {limit} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.0002)


def ended(handles: Iterable[Any], limit: float = LIMIT) -> list[KvbmError | None]:
    """The outcomes of transfers; AssertionError if one hangs."""
    found: list[KvbmError | None] = []
    end = time.monotonic() + limit
    for handle in handles:
        try:
            handle.synchronize(max(end - time.monotonic(), 0.01))
            found.append(None)
        except KvbmError as error:
            assert handle.has_ended, f"{handle} hangs: {error}"
            found.append(error)
    return found


def plain_case(seed: int = 94) -> reshard_oracle.Case:
    """One sequence of one plane, from several ranks to several; rows of whole cells, so that chunks have no padding.

    The first case from `seed` on that is one: so is 94, and none from 3 on before it.
    """
    while True:
        case = reshard_oracle.random_case(seed, planar=0)
        seed += 1
        spans = [told for _, *told in case.sequences]
        if (
            len(case.sequences) == 1
            and not case.gather
            and case.layers is None
            and case.hd * ITEMSIZE[case.dtype] % 16 == 0
            and case.src.world >= 2 <= case.dst.world
            and len(case.sequences[0][0]) > 20
            and all((np.asarray(table) >= 0).all() for sides in spans for one in sides for table in one.tables)
        ):
            return case


def right_cases(
    seeds: Iterable[int],
    wires: Callable[[int], Wires | None] = lambda _: None,
    read: Callable[[Any], np.ndarray] = np.asarray,
    **options: Any,
) -> Iterator[Linked]:
    """Send random cases and yield them before they are closed: no error, every byte is the oracle's, no slot is lost.

    Cases that cannot be sent are omitted: the oracle or the endpoints refuse them, or the source has no block for a token.
    """
    for seed in seeds:
        try:
            found = Linked(reshard_oracle.random_case(seed), wires(seed), **options)
        except (reshard_oracle.RefusedError, BindError):
            continue
        with found:
            try:
                errors = ended(found.begin(random.Random(seed)))
            except BindError as error:
                errors = [error]
            if any("without a block" in str(error) for error in errors):
                continue
            assert not any(errors), (seed, errors)
            found.check(read)
            found.require_slots()
            yield found


def sender_of(case: reshard_oracle.Case) -> int:
    """A rank that sends something."""
    with Linked(case) as found:
        assert not any(ended(found.begin()))
        return next(rank for rank, link in enumerate(found.links[0]) if link.stats()["chunks_sent"])
