"""Copies of blocks between an engine's pages and chunks of host memory, and their checks; nothing of vLLM is imported."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ... import spec as layouts
from ...errors import BindError
from ...layout import Layout
from ...pool import Pool
from ...shapes import BlockShape, numpy_name, round_up
from ...transfer import Transfer
from .pages import Pages

__all__ = ["Copier", "Finished", "HostMemory"]

Ids = npt.NDArray[np.int64]


@dataclass
class Lane:
    """Copies of some layers' pages, both ways.

    Attributes
    ----------
    out, back : Transfer
        From the engine, and to it.
    host : Pool
    digests : numpy.ndarray of uint64
        Of each block of `host`, as it was stored.
    known : numpy.ndarray of bool
        Whether there is one.
    """

    out: Transfer
    back: Transfer
    host: Pool
    digests: npt.NDArray[np.uint64]
    known: npt.NDArray[np.bool_]

    @property
    def nbytes(self) -> int:
        """Bytes a block."""
        return self.host.shape.nbytes


class HostMemory:
    """Blocks in host memory, of which each holds what a block of any one group of layers does.

    Parameters
    ----------
    layout : Layout
        How the elements of a block lie there.
    groups : list of list of Pages
        What a block of each group consists of.
    units : int
        Blocks.
    device : {"cpu", "pinned"}
    shared : numpy.ndarray, optional
        Memory that the ranks of this machine share, as bytes: `shared_bytes` of it.

    Attributes
    ----------
    lanes : list of list of Lane
        By group; groups may have one in common.
    is_shared : bool
    """

    def __init__(
        self,
        layout: Layout,
        groups: Sequence[Sequence[Pages]],
        units: int,
        device: str,
        shared: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        places, row = _places(groups)
        self.is_shared = shared is not None
        self._pools: list[Pool] = []
        marks = units * len(places)
        if shared is None:
            digests, known = np.zeros(marks, np.uint64), np.zeros(marks, np.bool_)
        else:
            digests = shared[units * row :][: 8 * marks].view(np.uint64)
            known = shared[units * row + 8 * marks :][:marks].view(np.bool_)
        if len(places) == 1 and shared is None:
            [(pages, _)] = places
            hosts = [self._own(Pool.allocate(layout, pages.pool.shape, units, device))]
        else:
            rows = self._rows(units, row, device, shared)
            hosts = [self._own(_inside(layout, pages.pool.shape, rows, offset)) for pages, offset in places]
        found = {}
        for index, (place, host) in enumerate(zip(places, hosts, strict=True)):
            part, engine = slice(index * units, (index + 1) * units), place[0].pool
            found[place] = Lane(Transfer(engine, host), Transfer(host, engine), host, digests[part], known[part])
        self.lanes = [[found[place] for place in _placed(group)] for group in groups]

    @staticmethod
    def shared_bytes(groups: Sequence[Sequence[Pages]], units: int) -> int:
        """Bytes that ranks share: blocks, their digests, and whether there are any."""
        places, row = _places(groups)
        return units * (row + 9 * len(places))

    def _own(self, pool: Pool) -> Pool:
        self._pools.append(pool)
        return pool

    def _rows(
        self, units: int, row: int, device: str, shared: npt.NDArray[np.uint8] | None
    ) -> list[npt.NDArray[np.uint8]]:
        plain, shape = layouts.parse('order: "[b] d"', name="host blocks"), BlockShape(1, 1, 1, 1, row, "uint8")
        if shared is None:
            return list(self._own(Pool.allocate(plain, shape, units, device)).arrays)
        rows = list(shared[: units * row].reshape(units, row))
        if device == "pinned":
            self._own(Pool(plain, shape, rows)).pin()
        return rows

    def close(self) -> None:
        """Give the memory back; wait for the copies first."""
        for lanes in self.lanes:
            for lane in lanes:
                lane.out.close()
                lane.back.close()
        self.lanes = []
        for pool in reversed(self._pools):
            pool.close()


Place = tuple[Pages, int]


def _placed(group: Sequence[Pages]) -> list[Place]:
    """A group's pages, and at which byte of a block they begin."""
    found, offset = [], 0
    for pages in group:
        found.append((pages, offset))
        offset = round_up(offset + pages.pool.shape.nbytes, 256)
    return found


def _places(groups: Sequence[Sequence[Pages]]) -> tuple[list[Place], int]:
    """All of them, each once, and the bytes of a block."""
    placed = [_placed(group) for group in groups]
    ends = [offset + pages.pool.shape.nbytes for group in placed for pages, offset in group]
    return list(dict.fromkeys(place for group in placed for place in group)), round_up(max(ends), 256)


def _inside(layout: Layout, shape: BlockShape, rows: Sequence[npt.NDArray[np.uint8]], offset: int) -> Pool:
    """A pool whose blocks lie in rows of bytes, from an offset on."""
    found = layout.resolve(shape, 1)
    order = layout.orders[0]
    if layout.planes or not order.table or order.table[0].axes != ("b",) or found.table_size != 1:
        raise BindError(
            f"host_layout: {layout.name} ({layout.order_text}): blocks of several kinds, or several ranks, share the host memory: "
            "expected a layout with one array a block, such as universal"
        )
    kind, dtype = found.first, numpy_name(shape.dtype)
    arrays = [np.ndarray(kind.shape, dtype, row.data, offset, kind.strides) for row in rows]
    return Pool(layout, shape, arrays)


@dataclass
class Finished:
    """A job that is done.

    Attributes
    ----------
    job_id : int
    is_load : bool
    blocks, nbytes : int
        What was copied: blocks of the engine.
    seconds : float
        From when it was begun on its stream.
    wrong_blocks : list of int
        Blocks of the engine that are not what was stored, if it is a load.
    wrong_chunks : set of int
        The chunks that they came from.
    """

    job_id: int
    is_load: bool
    blocks: int
    nbytes: int
    seconds: float
    wrong_blocks: list[int] = field(default_factory=list)
    wrong_chunks: set[int] = field(default_factory=set)


@dataclass
class _Job:
    """One that was begun: its copies, each with the digests of what it copies; and when, as seconds or events."""

    id: int
    copies: list[tuple[Lane, Ids, Ids, Any]]
    blocks: int
    dones: list[Any]
    began: Any
    ended: Any

    def synchronize(self) -> None:
        for done in self.dones:
            done.synchronize()


class Copier:
    """Copies blocks between an engine's pages and chunks of host memory.

    Parameters
    ----------
    memory : HostMemory
        Which it owns.
    blocks_per_chunk : int
        Blocks of the engine in a chunk.
    verify : bool
        Keep the digest of each block that is stored, and compare that of what is loaded.

    Attributes
    ----------
    streams : list of torch.cuda.Stream
        Of stores and of loads; none on the CPU.

    Notes
    -----
    On a GPU copies run on a stream for each direction, behind what torch's current stream holds when they are submitted;
    nothing waits on the host.  On the CPU they are done when the call returns.
    """

    def __init__(self, memory: HostMemory, blocks_per_chunk: int, verify: bool = True) -> None:
        self.memory = memory
        self.blocks_per_chunk = blocks_per_chunk
        self.verify = verify
        device = memory.lanes[0][0].out.device
        self._device = torch.device("cuda", device) if device >= 0 else None
        self.streams = [torch.cuda.Stream(self._device) for _ in range(2)] if self._device else []
        self._events: list[Any] = []
        self._running: tuple[deque[_Job], deque[_Job]] = (deque(), deque())

    def submit(
        self,
        job_id: int,
        ids: npt.NDArray[np.integer[Any]],
        chunks: npt.NDArray[np.integer[Any]],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        *,
        is_load: bool,
    ) -> None:
        """Begin a job.

        Parameters
        ----------
        job_id : int
        ids : array of int
            Blocks of the engine, group by group.
        chunks : array of int
            Chunks of host memory, group by group: as many as the blocks take.
        group_sizes : sequence of int
            Blocks of each group.
        block_indices : sequence of int
            The place in its sequence of each group's first block, which may be in the middle of a chunk.
        is_load : bool
            From the host to the engine.

        Raises
        ------
        BindError
            Chunks that are not as many as the blocks take; blocks or chunks that there are not.
        """
        copies, options = [], {}
        began: Any = time.perf_counter()
        pairs = self._pairs(ids, chunks, group_sizes, block_indices, is_load)
        if self._device is not None:
            stream, current = self.streams[is_load], torch.cuda.current_stream(self._device)
            stream.wait_stream(current)
            options = {"stream": stream}
            began = self._event()
            began.record(stream)
        dones = []
        for lane, ours, theirs in pairs:
            out = None
            if self.verify:
                out = options["digests"] = torch.empty(
                    len(ours), dtype=torch.int64, pin_memory=self._device is not None
                )
            copy = lane.back.copy if is_load else lane.out.copy
            dones.append(copy(*((theirs, ours) if is_load else (ours, theirs)), **options))
            copies.append((lane, ours, theirs, out))
        ended: Any = time.perf_counter()
        if self._device is not None:
            ended = self._event()
            ended.record(stream)
        self._running[is_load].append(_Job(job_id, copies, len(ids), dones, began, ended))

    def _pairs(
        self,
        ids: npt.NDArray[np.integer[Any]],
        chunks: npt.NDArray[np.integer[Any]],
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        is_load: bool,
    ) -> list[tuple[Lane, Ids, Ids]]:
        """Blocks of the engine and of the host, lane by lane; what chunks held that are stored to is forgotten."""
        each = self.blocks_per_chunk
        blocks: Ids = ids.astype(np.int64)
        held: Ids = chunks.astype(np.int64)
        skips = [first % each for first in block_indices]
        taken = [-(-(skip + count) // each) if count else 0 for skip, count in zip(skips, group_sizes, strict=True)]
        if (sum(group_sizes), sum(taken)) != (len(blocks), len(held)):
            raise BindError(
                f"offloading: groups of {list(group_sizes)} blocks from {list(block_indices)} on, {each} blocks a chunk: expected "
                f"{sum(group_sizes)} blocks and {sum(taken)} chunks, got {len(blocks)} and {len(held)}"
            )
        found: dict[int, tuple[Lane, list[Ids], list[Ids]]] = {}
        at = chunk_at = 0
        for lanes, count, skip, num_chunks in zip(self.memory.lanes, group_sizes, skips, taken, strict=True):
            if not count:
                continue
            units = held[chunk_at : chunk_at + num_chunks]
            if each > 1:
                units = (units[:, None] * each + np.arange(each)).ravel()
            for lane in lanes:
                if not is_load:
                    lane.known[units] = False
                _, ours, theirs = found.setdefault(id(lane), (lane, [], []))
                ours.append(blocks[at : at + count])
                theirs.append(units[skip : skip + count])
            at, chunk_at = at + count, chunk_at + num_chunks
        return [(lane, np.concatenate(ours), np.concatenate(theirs)) for lane, ours, theirs in found.values()]

    def _event(self) -> Any:
        return self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)

    def finished(self) -> list[Finished]:
        """Jobs that are done since the last call, in each direction in the order of their begin; nothing is waited for."""
        results: list[Finished] = []
        for is_load, running in enumerate(self._running):
            while running and (self._device is None or running[0].ended.query()):
                results.append(self._settled(running.popleft(), bool(is_load)))
        return results

    def _settled(self, job: _Job, is_load: bool) -> Finished:
        job.synchronize()  # which waits for nothing any more, and says what went wrong on the GPU
        if self._device is None:
            seconds = job.ended - job.began
        else:
            seconds = job.began.elapsed_time(job.ended) * 1e-3
            self._events += [job.began, job.ended]
        nbytes = sum(len(ids) * lane.nbytes for lane, ids, _, _ in job.copies)
        result = Finished(job.id, is_load, job.blocks, nbytes, seconds)
        for lane, ids, units, out in job.copies:
            digests = None if out is None else out.numpy().view(np.uint64)
            if not is_load:
                if digests is not None:
                    lane.digests[units] = digests
                lane.known[units] = True
                continue
            wrong = ~lane.known[units]
            if digests is not None:
                wrong |= digests != lane.digests[units]
            if wrong.any():
                result.wrong_blocks += ids[wrong].tolist()
                result.wrong_chunks |= set((units[wrong] // self.blocks_per_chunk).tolist())
        return result

    def wait(self, job_ids: set[int] | None = None) -> None:
        """Wait for some jobs, or all."""
        for running in self._running:
            for job in running:
                if job_ids is None or job.id in job_ids:
                    job.synchronize()

    def close(self) -> None:
        """Wait for all copies, and free the host memory."""
        self.wait()
        for running in self._running:
            running.clear()
        self.memory.close()
