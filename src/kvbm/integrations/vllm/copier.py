"""Copy blocks between an engine's pages and chunks of host memory, and verify them.  vLLM is not imported."""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ...copy.transfer import Strategy
from ...errors import BindError
from ...layout import spec as layouts
from ...layout.layout import Layout
from ...layout.shapes import BlockShape
from ...memory.array_info import array_on
from ...planner.cast import Cast
from ...pool.pool import Pool
from ..host_store import Copying, HostStore, Ids
from .host_layout import offsets, one_array, row_bytes, sizes_of
from .pages import Pages

__all__ = ["Copier", "Finished", "HostMemory", "shared_memory"]

_SHM = Path("/dev/shm")  # noqa: S108  (memory, not a temporary file)


def shared_memory(engine: str, nbytes: int, barrier: Callable[[], Any], folder: Path = _SHM) -> npt.NDArray[np.uint8]:
    """Zeroed memory that the ranks of an engine on this machine share.  It is freed with the last of them.

    `engine` is its name, the same in all ranks, and `barrier` waits until all of them have called it.  Raises `BindError` if
    `folder`, in memory that all users may write, has a file of this name of another user, or has no room.
    """
    path = folder / f"kvbm_offload_{hashlib.sha256(engine.encode(errors='surrogatepass')).hexdigest()[:32]}"
    try:
        path.unlink(missing_ok=True)  # of an engine that was killed when it started
        barrier()
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            found = os.fstat(file)
            if found.st_uid != os.geteuid() or found.st_mode & 0o077 or found.st_nlink != 1:
                raise BindError(
                    f"{path}: expected a file that only this user, {os.geteuid()}, can use, got one of user {found.st_uid}, mode "
                    f"{stat.S_IMODE(found.st_mode):03o}; set another engine_id"
                )
            os.truncate(file, nbytes)
            barrier()
            memory = mmap.mmap(file, nbytes)
        finally:
            os.close(file)
    except OSError as error:
        raise BindError(f"{path}: expected memory of {nbytes:,} bytes, which the ranks share: {error.strerror or error}") from None
    barrier()  # all have mapped it
    path.unlink(missing_ok=True)
    return np.frombuffer(memory, np.uint8)


class HostMemory:
    """Blocks in host memory, `units` of them.  Each can hold a block of any group of layers.

    `groups` are the pages of a block, per group; `device` is ``"cpu"``, or ``"pinned"`` or ``"pinned:N"``, as for
    `Pool.allocate`.  `shared` are bytes of memory that the ranks of this machine share, as many as `shared_bytes` says.
    `verify` and `cast` are as for `HostStore`, of which `stores` has one per group and kind of layers.  Groups may share one.
    """

    def __init__(
        self, layout: Layout, groups: Sequence[Sequence[Pages]], units: int, device: str,
        shared: npt.NDArray[np.uint8] | None = None, verify: bool = True, cast: Cast = None,
    ) -> None:  # fmt: skip
        places, row = _places(layout, groups)
        self.is_shared, self.verify = shared is not None, verify
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
            part = slice(index * units, (index + 1) * units)
            strategy: Strategy = "auto" if device == "cpu" else "aside"  # the model runs at the same time
            found[place] = HostStore(
                place[0].pool, host, verify=verify, strategy=strategy, digests=digests[part], known=known[part], cast=cast
            )
        self.stores = [[found[place] for place in _placed(layout, group)] for group in groups]

    @staticmethod
    def shared_bytes(layout: Layout, groups: Sequence[Sequence[Pages]], units: int) -> int:
        """Bytes that ranks share: blocks, their digests, and the flags of stored blocks."""
        places, row = _places(layout, groups)
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
        if device != "cpu":
            self._own(Pool(plain, shape, rows)).pin()
        return rows

    def close(self) -> None:
        """Free the memory.  Wait for the copies before."""
        for stores in self.stores:
            for store in stores:
                store.close()
        self.stores = []
        for pool in reversed(self._pools):
            pool.close()


Place = tuple[Pages, int]


def _shapes(group: Sequence[Pages]) -> list[BlockShape]:
    return [pages.pool.shape for pages in group]


def _placed(layout: Layout, group: Sequence[Pages]) -> list[Place]:
    """A group's pages, with their offsets in a block (bytes)."""
    return [*zip(group, offsets(sizes_of(layout, _shapes(group))), strict=True)]


def _places(layout: Layout, groups: Sequence[Sequence[Pages]]) -> tuple[list[Place], int]:
    """The pages of all groups, each once, with their offsets; and the bytes of a block."""
    places = dict.fromkeys(place for group in groups for place in _placed(layout, group))
    return list(places), row_bytes(layout, [*map(_shapes, groups)])


def _inside(layout: Layout, shape: BlockShape, rows: Sequence[npt.NDArray[np.uint8]], offset: int) -> Pool:
    """A pool whose blocks are in rows of bytes, starting at an offset in each row."""
    place = one_array(layout, shape).first
    return Pool(layout, shape, [array_on(row.data, place, offset) for row in rows])


@dataclass
class Finished:
    """A job that is done: it copied `blocks` of the engine, in `seconds` since it began on its stream.

    For a load, `wrong_blocks` of the engine would have other contents than were stored: they are zero in all their layers.
    They were loaded from `wrong_chunks`.
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
    """A running job: its copies, and its begin and end as seconds or events."""

    id: int
    copies: list[tuple[HostStore, Copying]]
    blocks: int
    began: Any
    ended: Any

    def synchronize(self) -> None:
        for _, copying in self.copies:
            copying.synchronize()


class Copier:
    """Copies blocks between an engine's pages and chunks of host memory, which have `blocks_per_chunk` blocks.

    It owns the memory.  On a GPU each direction has a stream in `streams`.  Copies run after the work that is enqueued in
    torch's current stream when they are submitted, and the host does not wait.  On the CPU they are done when the call returns.

    A block that fails its check has zeros in all its layers when `finished` returns its job, and its chunk was not stored or
    has changed.  On the CPU it is compared before it is copied, so that its contents never reach the engine.
    """

    def __init__(self, memory: HostMemory, blocks_per_chunk: int) -> None:
        self.memory = memory
        self.blocks_per_chunk = blocks_per_chunk
        device = memory.stores[0][0].out.device
        self._device = torch.device("cuda", device) if device >= 0 else None
        self.streams = [torch.cuda.Stream(self._device) for _ in range(2)] if self._device else []
        self._clearing = torch.cuda.Stream(self._device) if self._device else None
        self._events: list[Any] = []
        self._running: tuple[deque[_Job], deque[_Job]] = (deque(), deque())

    def submit(
        self, job_id: int, ids: npt.NDArray[np.integer[Any]], chunks: npt.NDArray[np.integer[Any]],
        group_sizes: Sequence[int], block_indices: Sequence[int], *, is_load: bool,
    ) -> None:  # fmt: skip
        """Begin a job, which copies from the host to the engine if it is a load.

        Blocks of the engine and chunks of host memory are sorted by group; the number of chunks must be the one that the blocks
        need, else a `BindError` is raised.  For each group there are the number of blocks, and the index of its first block in
        the sequence, which may be in the middle of a chunk.
        """
        began: Any = time.perf_counter()
        pairs = self._pairs(ids, chunks, group_sizes, block_indices)
        stream = None
        if self._device is not None:
            stream = self.streams[is_load]
            stream.wait_stream(torch.cuda.current_stream(self._device))
            began = self._event()
            began.record(stream)
        copies = []
        for store, blocks, units, chunk_units in pairs:
            if is_load:
                [copying] = store.load(units, blocks, stream=stream)
            else:
                copying = store.store(blocks, units, stream)
                store.known[chunk_units] = False  # what the chunks held before is lost
            copies.append((store, copying))
        ended: Any = time.perf_counter()
        if stream is not None:
            ended = self._event()
            ended.record(stream)
        self._running[is_load].append(_Job(job_id, copies, len(ids), began, ended))

    def _pairs(
        self, ids: npt.NDArray[np.integer[Any]], chunks: npt.NDArray[np.integer[Any]], group_sizes: Sequence[int],
        block_indices: Sequence[int],
    ) -> list[tuple[HostStore, Ids, Ids, Ids]]:  # fmt: skip
        """Per store: the blocks of the engine, as many units of the host, and all units of the chunks."""
        each = self.blocks_per_chunk
        blocks: Ids = ids.astype(np.int64)
        chunk_ids: Ids = chunks.astype(np.int64)
        skips = [first % each for first in block_indices]
        taken = [-(-(skip + count) // each) if count else 0 for skip, count in zip(skips, group_sizes, strict=True)]
        if (sum(group_sizes), sum(taken)) != (len(blocks), len(chunk_ids)):
            raise BindError(
                f"offloading: groups of {list(group_sizes)} blocks from {list(block_indices)} on, {each} blocks a chunk: expected "
                f"{sum(group_sizes)} blocks and {sum(taken)} chunks, got {len(blocks)} and {len(chunk_ids)}"
            )
        found: dict[int, tuple[HostStore, list[tuple[Ids, Ids, Ids]]]] = {}
        at = chunk_at = 0
        for stores, count, skip, num_chunks in zip(self.memory.stores, group_sizes, skips, taken, strict=True):
            if not count:
                continue
            units = chunk_ids[chunk_at : chunk_at + num_chunks]
            if each > 1:
                units = (units[:, None] * each + np.arange(each)).ravel()
            for store in stores:
                found.setdefault(id(store), (store, []))[1].append(
                    (blocks[at : at + count], units[skip : skip + count], units)
                )
            at, chunk_at = at + count, chunk_at + num_chunks
        joined = []
        for store, parts in found.values():
            engine_ids, units, whole = map(np.concatenate, zip(*parts, strict=True))
            joined.append((store, engine_ids, units, whole))
        return joined

    def _event(self) -> Any:
        return self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)

    def finished(self) -> list[Finished]:
        """Jobs that were finished since the last call, per direction in the order of their submission.  It does not wait."""
        results: list[Finished] = []
        for is_load, running in enumerate(self._running):
            while running and (self._device is None or running[0].ended.query()):
                results.append(self._settled(running.popleft(), bool(is_load)))
        return results

    def _settled(self, job: _Job, is_load: bool) -> Finished:
        job.synchronize()  # returns at once, and raises errors of the GPU
        if self._device is None:
            seconds = job.ended - job.began
        else:
            seconds = job.began.elapsed_time(job.ended) * 1e-3
            self._events += [job.began, job.ended]
        nbytes = sum(len(copying.ids) * store.nbytes for store, copying in job.copies)
        result = Finished(job.id, is_load, job.blocks, nbytes, seconds)
        wrong_blocks: list[Ids] = []
        for store, copying in job.copies:
            if not is_load:
                store.stored(copying)
            elif (wrong := store.wrong(copying)).any():
                wrong_blocks.append(copying.ids[wrong])
                result.wrong_chunks |= set((copying.units[wrong] // self.blocks_per_chunk).tolist())
        if wrong_blocks:
            # Before the result is returned, and in all layers.  The copies are done: no stream has to wait for another.
            blocks = np.unique(np.concatenate(wrong_blocks))
            for store, copying in job.copies:
                store.zeros(copying.ids[np.isin(copying.ids, blocks)], self._clearing)
            result.wrong_blocks = blocks.tolist()
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
