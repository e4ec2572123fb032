"""Cut sequences into chunks, which one rank packs and another unpacks.  Implements wire format 1."""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import quoted, whole
from ..copy.executor import current_stream
from ..digest.run import pinned
from ..errors import BindError
from ..memory.array_info import Array
from ..reshard.messages import require_layers
from ..reshard.packer import NUM_CELLS, Lane, Packer
from ..reshard.sequence import Ids, Span
from ..system.locks import Lock
from .chunk import LEAST, MOST, TRAILER, Chunk, Trailer, cut, key_of, limit_of, mark_of, require_digest
from .sums import Sums


class Cut:
    """The chunks of some tokens and layers of a sequence that a rank sends to its peers, or receives from them.

    ``docs/reference/wire.md`` defines the chunks.

    Parameters
    ----------
    packer : Packer
        The packer of this rank.
    span : Span
        Tokens and blocks of this rank.  A rank that sends needs a block for every token.
    origin : int
        The origin of the peers' spans.
    layers : range, optional
        Layers of the model.  Default: all.
    most : int
        Bytes of the largest chunk without its trailer.  Slots need 64 bytes more.
    least : int
        A message of at most so many bytes is one chunk, unless `most` is smaller.

    Attributes
    ----------
    chunks : dict of int to tuple of Chunk
        Peer → its chunks, in order; empty if it has none of these tokens and layers.  Both sides compute the same chunks.

    Raises
    ------
    BindError
        The span does not fit, or a unit is larger than `most`.
    PlanError
        The layout has no digests.

    Examples
    --------
    >>> sent = Cut(packer, Span([5, 9, 2], range(40)))  # doctest: +SKIP
    >>> slots = {(1, k): ring[k][: chunk.size] for k, chunk in enumerate(sent.chunks[1])}  # doctest: +SKIP
    >>> sent.pack(slots, key="request-17").synchronize()  # doctest: +SKIP
    """

    def __init__(
        self, packer: Packer, span: Span, *, origin: int = 0, layers: range | None = None, most: int = MOST,
        least: int = LEAST,
    ) -> None:  # fmt: skip
        if not isinstance(packer, Packer):
            raise BindError(f"packer: expected a kvbm.reshard.Packer, got {quoted(packer)}")
        model, most, least = packer.made.src.model, limit_of(most), limit_of(least, "least")
        layers = require_layers(layers, model.nl)
        self._packer = packer
        self.chunks: dict[int, tuple[Chunk, ...]] = {}
        self._parts: dict[int, list[_Part | None]] = {}  # peer → its units, and its single tokens
        for message, listed in packer.listed(span, origin):
            peer, some = packer.peer(message), message.of_layers(layers)
            self.chunks[peer] = ()
            if some is not None:
                self._parts[peer] = parts = [
                    _Part.of(packer.lane(some, single=bool(single)), at, ids) if at.size else None
                    for single, (at, ids) in enumerate(zip(listed.at, listed.ids, strict=True))
                ]
                sizes = [part.lane.nbytes if part else 0 for part in parts]
                self.chunks[peer] = cut(some, listed.at, sizes, most, least)
        self._mark = mark_of(span.tokens, packer.in_order(span.origin, origin), layers, most, least)

    def trailer(self, peer: int, number: int, *, key: str | bytes, epoch: int = 0) -> Trailer:
        """The expected trailer of a chunk, with digest 0."""
        return self._trailer(self._chunk(peer, number), *_identity(key, epoch))

    def _trailer(self, chunk: Chunk, key: int, epoch: int) -> Trailer:
        return Trailer.of(chunk, plan=self._packer.fingerprint, key=key, epoch=epoch, mark=self._mark)

    def pack(
        self, slots: Mapping[tuple[int, int], Any], *, key: str | bytes, epoch: int = 0, stream: Any = None,
        wait: Any = None,
    ) -> ChunksDone:  # fmt: skip
        """Pack some of the chunks, each with its trailer.

        Parameters
        ----------
        slots : mapping
            (peer, number of the chunk) → contiguous array of at least `Chunk.size` bytes, aligned to 16 bytes, on the pool's GPU
            or in pinned memory.  Slots must not share memory with each other or with the pool.
        key : str or bytes
            Name of the sequence, the same on both sides.
        epoch : int
            Number of the attempt to send; below 2**64.
        stream, wait : optional
            As for `Transfer.copy`.

        Returns
        -------
        ChunksDone
            Trailers are written when it is done.  On a GPU, call its `query` or `synchronize` for that.

        Raises
        ------
        BindError
            A slot does not fit, or there is no such chunk.  Nothing was written.
        """
        jobs, trailers, stream = self._jobs(True, slots, key, epoch, stream, wait)
        return ChunksDone(self._packing(jobs, trailers, _Work(self, jobs), stream, wait))

    def unpack(
        self, slots: Mapping[tuple[int, int], Any], *, key: str | bytes, epoch: int = 0, verify: str = "after",
        stream: Any = None, wait: Any = None,
    ) -> ChunksDone:  # fmt: skip
        """Unpack some of the chunks, if their trailers are right.

        Parameters
        ----------
        slots : mapping
            (peer, number of the chunk) → array with the `Chunk.size` bytes that arrived.
        key, epoch
            The values that the chunks were packed with.
        verify : {"after", "before"}
            ``after``: bytes are digested while they are copied into the pool.  A wrong chunk has then already been written, into
            blocks that nobody may read yet.  ``before``: all chunks are digested first, and nothing is written unless all are
            right.  It costs one more read of the slots; the copy is digested as well, as a slot may have changed meanwhile.
        stream, wait : optional
            As for `Transfer.copy`.

        Returns
        -------
        ChunksDone
            Its `query` and `synchronize` raise `DigestError` if a chunk differs from what was sent.

        Raises
        ------
        BindError
            A slot does not fit, or it has the trailer of another chunk: the message names the field, the expected and the found
            value.  Nothing was written.
        DigestError
            On the CPU, where the call waits: a chunk differs from what was sent.
        """
        given: Any = verify
        if not isinstance(given, str) or given not in ("after", "before"):
            raise BindError(f"verify: expected 'after' or 'before', got {quoted(verify)}")
        jobs, trailers, stream = self._jobs(False, slots, key, epoch, stream, wait)
        sent = [trailer.digest for trailer in trailers]
        return ChunksDone(self._unpacking(jobs, sent, _Work(self, jobs), verify == "before", stream, wait))

    # ---- one call --------------------------------------------------------------------------------------------------

    def _chunk(self, peer: int, number: int) -> Chunk:
        held = self.chunks.get(-1 if (rank := whole(peer)) is None else rank, ())
        if (at := whole(number)) is None or not 0 <= at < len(held):
            raise BindError(
                f"chunk {quoted(number)} of rank {quoted(peer)}: expected one of {len(held)} of the ranks {sorted(self.chunks)}"
            )
        return held[at]

    def _jobs(
        self, sends: bool, slots: Any, key: str | bytes, epoch: int, stream: Any, wait: Any
    ) -> tuple[list[_Job], list[Trailer], Any]:
        """The chunks of a call with their slots, and their trailers: to pack the expected ones, to unpack those that were found."""
        packer = self._packer
        if packer.sends != sends:
            raise BindError(
                f"this rank {'sends' if packer.sends else 'gets'}: expected {'pack' if packer.sends else 'unpack'}"
            )
        packer.require_usable()
        packer.require_no_stream(stream, wait)
        if not isinstance(slots, Mapping) or not all(isinstance(at, tuple) and len(at) == 2 for at in slots):
            raise BindError(f"slots: expected a mapping from (peer, chunk) to array, got {quoted(slots)}")
        jobs, places, trailers, identity = [], [], [], _identity(key, epoch)
        for (peer, number), given in slots.items():
            chunk = self._chunk(peer, number)
            slot = packer.slot(given, chunk.size, chunk, exact=not sends)
            places.append((chunk, slot.address, chunk.size))
            trailers.append(self._trailer(chunk, *identity))
            jobs.append(_Job(peer, chunk, slot, given))
        packer.require_disjoint(places)
        if packer.device >= 0 and stream is None:
            stream = current_stream(packer.pool)
        if not sends:
            for at, (job, data) in enumerate(zip(jobs, _Trailers(packer.device, jobs).read(), strict=True)):
                found = Trailer.read(data, job.chunk)
                found.require(trailers[at], job.chunk)
                trailers[at] = found
        return jobs, trailers, stream

    def _packing(self, jobs: Sequence[_Job], trailers: Sequence[Trailer], work: _Work, stream: Any, wait: Any) -> _Steps:
        yield work.begin(stream, wait)
        found = work.digests()
        if trailers:
            sealed = [trailer._replace(digest=digest).write() for trailer, digest in zip(trailers, found, strict=True)]
            _Trailers(self._packer.device, jobs).write(sealed)
        return _by_chunk(jobs, found)

    def _unpacking(
        self, jobs: Sequence[_Job], sent: Sequence[int], work: _Work, before: bool, stream: Any, wait: Any
    ) -> _Steps:
        for one in (_Work(self, jobs, copies=False), work) if before else (work,):
            yield one.begin(stream, wait)
            for job, digest, found in zip(jobs, sent, one.digests(), strict=True):
                require_digest(digest, found, job.chunk, written=one is work)
        return _by_chunk(jobs, sent)


def _identity(key: str | bytes, epoch: int) -> tuple[int, int]:
    """The fields of trailers that identify a sequence and an attempt."""
    if (found := whole(epoch)) is None or not 0 <= found < 1 << 64:
        raise BindError(f"epoch: expected a number from 0 to below 2**64, got {quoted(epoch)}")
    if not isinstance(key, str | bytes):
        raise BindError(f"key: expected text or bytes, got {quoted(key)}")
    return key_of(key), found


#: The steps that a call waits for; the result is each chunk's digest.
_Steps = Generator[Sequence[_core.Done], None, dict[tuple[int, int], int]]


class _Job(NamedTuple):
    """A chunk, its slot, and the owner of the slot."""

    peer: int
    chunk: Chunk
    slot: Array
    keep: Any = None


def _by_chunk(jobs: Sequence[_Job], digests: Sequence[int]) -> dict[tuple[int, int], int]:
    return {(job.peer, job.chunk.number): digest for job, digest in zip(jobs, digests, strict=True)}


class ChunksDone:
    """The completion of all chunks of one call of `Cut`.

    On a GPU, a step after another one (such as the trailers after the kernels) begins in `query` or `synchronize`.

    Attributes
    ----------
    digests : dict of (int, int) to int
        (Peer, number of the chunk) → its digest, after the call is done.
    """

    def __init__(self, steps: _Steps) -> None:
        self._steps, self._lock = steps, Lock()
        self._error: Exception | None = None
        self.digests: dict[tuple[int, int], int] = {}
        self._waits = tuple(next(steps))
        self._is_done = False
        if all(done.query() for done in self._waits):  # on the CPU
            self.query()

    def query(self) -> bool:
        """True if all is done.  Raises the error of a wrong chunk."""
        while not self._is_done:
            waits = self._waits
            if not all(done.query() for done in waits):
                break
            self._go_on(waits)
        return self._outcome()

    def synchronize(self) -> None:
        """Wait on the host until all is done.  Raises the error of a wrong chunk."""
        while not self._is_done:
            for done in (waits := self._waits):
                done.synchronize()
            self._go_on(waits)
        self._outcome()

    def _go_on(self, waited: tuple[_core.Done, ...]) -> None:
        """Begin the next step, unless another thread has begun it."""
        with self._lock:
            if self._is_done or self._waits is not waited:
                return
            try:
                self._waits = tuple(next(self._steps))
            except StopIteration as end:
                self.digests, self._is_done = end.value, True
            except Exception as error:
                self._error, self._is_done = error, True

    def _outcome(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._is_done

    def __repr__(self) -> str:
        return f"<kvbm ChunksDone of {len(self._waits)} copies>"


class Bare:
    """Chunks without trailers, whose copy is prepared.  The caller sends their digests itself.

    `slots`: (peer, number of the chunk) → its slot, of `Chunk.nbytes` bytes, which is not checked.
    """

    def __init__(
        self, cut: Cut, slots: Mapping[tuple[int, int], Array], *, verify: str = "after", stream: Any = None,
        wait: Any = None,
    ) -> None:  # fmt: skip
        self._cut, self._is_checked_before, self._order = cut, verify == "before", (stream, wait)
        self._jobs = [_Job(peer, cut._chunk(peer, number), slot) for (peer, number), slot in slots.items()]
        self._work = _Work(cut, self._jobs)

    def pack(self) -> ChunksDone:
        """Pack the chunks.  `ChunksDone.digests` has what the receiver needs."""
        self._cut._packer.require_usable()
        return ChunksDone(self._cut._packing(self._jobs, (), self._work, *self._order))

    def unpack(self, sent: Mapping[tuple[int, int], int]) -> ChunksDone:
        """Unpack the chunks; `sent`: (peer, number of the chunk) → the digest that its sender has computed."""
        self._cut._packer.require_usable()
        digests = [sent[job.peer, job.chunk.number] for job in self._jobs]
        return ChunksDone(self._cut._unpacking(self._jobs, digests, self._work, self._is_checked_before, *self._order))


class _Part(NamedTuple):
    """Units or single tokens of all chunks of a peer: positions of their first tokens, the rank's ids, whether some are -1."""

    lane: Lane
    positions: Ids
    ids: Ids
    has_holes: bool

    @classmethod
    def of(cls, lane: Lane, at: Ids, ids: Ids) -> _Part:
        return cls(lane, at + lane.first, ids, bool((ids < 0).any()))


class _Launch(NamedTuple):
    """Units or single tokens of chunks, in the order of chunks, that one launch copies or only digests."""

    lane: Lane
    base: int  # the address at which `cells` begin to count
    copies: bool
    jobs: list[tuple[int, int]]  # a chunk, and how many of its units or tokens
    positions: list[Ids]
    cells: list[Ids]
    ids: list[Ids]  # the rank's ids of those that are copied

    @property
    def cell_count(self) -> int:
        """Number of units or tokens."""
        return sum(size for _, size in self.jobs)


class _Ready(NamedTuple):
    """A launch, and what it is enqueued with."""

    launch: _Launch
    route: _core.Route
    pairs: _core.Pairs
    positions: _core.Positions


class _Work:
    """Copies of chunks with digests, or only digests of slots, prepared: one launch for all chunks of a kind."""

    def __init__(self, of: Cut, jobs: Sequence[_Job], *, copies: bool = True) -> None:
        self._packer, self._jobs = of._packer, jobs
        packer = of._packer
        launches: dict[tuple[int, int, bool], _Launch] = {}

        def add(lane: Lane, base: int, number: int, positions: Ids, cells: Ids, ids: Ids | None) -> None:
            at = id(lane), base, ids is not None
            launch = launches.get(at)
            if launch is None:
                launch = launches[at] = _Launch(lane, base, ids is not None, [], [], [], [])
            launch.jobs.append((number, positions.size))
            launch.positions.append(positions)
            launch.cells.append(cells)
            if ids is not None:
                launch.ids.append(ids)

        for number, job in enumerate(jobs):
            at = job.slot.address
            for single, some in enumerate((job.chunk.units, job.chunk.tokens)):
                if some:
                    part = of._parts[job.peer][single]
                    assert part is not None
                    lane, positions, ids = part.lane, part.positions[some.start : some.stop], part.ids[some.start : some.stop]
                    base, cells = packer.cells(at, lane.nbytes, len(some))
                    add(lane, base, number, positions, cells, ids if copies else None)
                    # Tokens without a block are not copied, but the digest includes them.
                    if copies and part.has_holes and (holes := np.flatnonzero(ids < 0)).size:
                        add(lane, base, number, positions[holes], cells[holes], None)
                    at += len(some) * lane.nbytes
        self._ready = [self._prepared(launch) for launch in launches.values()]
        self._found = Sums(sum(ready.launch.cell_count for ready in self._ready), packer.device >= 0)
        self._found.is_enqueued = True  # nothing writes to it before `begin`

    def _prepared(self, launch: _Launch) -> _Ready:
        packer, device = self._packer, self._packer.device
        cells, at = _joined(launch.cells), _joined(launch.positions)
        positions = _core.Positions(at, at.size, device)
        route = packer.route(launch.lane, launch.base, copies=launch.copies)
        if launch.copies:
            ids, sizes = packer.in_order(_joined(launch.ids), cells), packer.in_order(launch.lane.num_ids, NUM_CELLS)
            pairs = _core.Pairs(*ids, *sizes, False, device)
        else:
            pairs = _core.Pairs(cells, None, NUM_CELLS, NUM_CELLS, False, device)
        return _Ready(launch, route, pairs, positions)

    def begin(self, stream: Any, wait: Any) -> list[_core.Done]:
        """Enqueue the launches; return their ends."""
        on_gpu, dones = self._packer.device >= 0, list[_core.Done]()
        if on_gpu:
            pinned.release(8 + len(self._ready))  # release more old ones than new ones are created
        self._found.is_enqueued = False
        out = self._found.address
        for ready in self._ready:
            try:
                done = self._enqueue(ready, out, stream, wait)
            except BaseException:
                for begun in dones:  # after the error the caller may reuse the slots
                    with suppress(Exception):
                        begun.synchronize()
                raise
            dones.append(done)
            if on_gpu:
                pinned.watch(done)  # keeps it until it is done, even if the caller drops it
            out += 8 * ready.launch.cell_count
        self._found.is_enqueued = True
        return dones

    def _enqueue(self, ready: _Ready, out: int, stream: Any, wait: Any) -> _core.Done:
        launch, route, pairs, positions = ready
        on_gpu, keep = self._packer.device >= 0, (self._packer, self._jobs, self._found)
        if launch.copies:
            return route.copy_digested(pairs, positions, out, on_gpu, (0, 0), stream, wait, keep)
        return route.digest(pairs, positions, out, on_gpu, stream, wait, keep)

    def digests(self) -> list[int]:
        """The digest of each chunk, after all is done."""
        found, at = [0] * len(self._jobs), 0
        for ready in self._ready:
            for number, size in ready.launch.jobs:
                found[number] += int(self._found.memory[at : at + size].sum(dtype=np.uint64))
                at += size
        return [digest % (1 << 64) for digest in found]


def _joined(some: list[Ids]) -> Ids:
    return some[0] if len(some) == 1 else np.concatenate(some)


_Bytes = ctypes.c_char * TRAILER


class _Trailers:
    """The trailers of chunks in their slots.  The host reads and writes them, independent of streams."""

    def __init__(self, device: int, jobs: Sequence[_Job]) -> None:
        self._places = [job.slot.address + job.chunk.nbytes for job in jobs]
        self._device = device if any(job.slot.device != "cpu" for job in jobs) else -1

    def read(self) -> list[bytes]:
        if self._device < 0:
            return [ctypes.string_at(at, TRAILER) for at in self._places]
        with self._staged() as (memory, addresses):
            self._move(addresses, self._places)
            data = memory.tobytes()
        return [data[at : at + TRAILER] for at in range(0, TRAILER * len(self._places), TRAILER)]

    def write(self, trailers: Sequence[bytes]) -> None:
        if self._device < 0:
            for at, data in zip(self._places, trailers, strict=True):
                _Bytes.from_address(at).raw = data  # memmove would release Python's lock for it
            return
        with self._staged() as (memory, addresses):
            memory[: 8 * len(trailers)] = np.frombuffer(b"".join(trailers), np.uint64)
            self._move(self._places, addresses)

    @contextmanager
    def _staged(self) -> Iterator[tuple[npt.NDArray[np.uint64], list[int]]]:
        memory = pinned.take(8 * len(self._places))
        start = int(memory.ctypes.data)
        yield memory, [start + TRAILER * i for i in range(len(self._places))]
        pinned.give(memory)  # not after an error: something may still write it

    def _move(self, dst: Sequence[int], src: Sequence[int]) -> None:
        if dst:
            _core.copy_now(np.array(dst, np.uint64), np.array(src, np.uint64), TRAILER, self._device)
