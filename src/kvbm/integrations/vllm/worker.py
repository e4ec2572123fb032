"""What copies blocks between vLLM's pages and host memory: an `OffloadingWorker`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from ... import spec as layouts
from ...errors import BindError, DigestError
from ...layout import Layout
from ...pool import Pool
from ...shapes import BlockShape, numpy_name, round_up
from ...transfer import Transfer
from .pages import Pages

__all__ = ["Failures", "HostMemory", "KvbmOffloadingWorker", "Metric"]


class Metric:
    """Names of counters."""

    STORED_BLOCKS = "vllm:kvbm_offload_stored_blocks"
    STORED_BYTES = "vllm:kvbm_offload_stored_bytes"
    LOADED_BLOCKS = "vllm:kvbm_offload_loaded_blocks"
    LOADED_BYTES = "vllm:kvbm_offload_loaded_bytes"
    FAILED_BLOCKS = "vllm:kvbm_offload_failed_blocks"


@dataclass
class Failures:
    """Loads that gave other bytes than were stored.

    Attributes
    ----------
    jobs : set of int
    blocks : set of int
        The engine's blocks, which hold wrong bytes now.
    chunks : set of int
        The chunks of host memory that they came from.
    """

    jobs: set[int] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)
    chunks: set[int] = field(default_factory=set)


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
            f"host_layout: {layout.name} ({layout.order_text}): blocks of several kinds, or of several ranks, share the host memory: "
            "expected a layout with one array a block, such as universal"
        )
    kind, dtype = found.first, numpy_name(shape.dtype)
    arrays = [np.ndarray(kind.shape, dtype, row.data, offset, kind.strides) for row in rows]
    return Pool(layout, shape, arrays)


@dataclass
class _Job:
    """A copy that was begun.

    Attributes
    ----------
    id : int
    nbytes, blocks : int
    parts : list of (Lane, ids, units, digests)
        Blocks of the engine and of the host, and where the digests of what was copied are.
    began, ended : float or torch.Event
        When.
    dones : list of Done
    """

    id: int
    is_load: bool
    parts: list[tuple[Lane, npt.NDArray[np.int64], npt.NDArray[np.int64], Any]]
    nbytes: int
    blocks: int
    dones: list[Any]
    began: Any
    ended: Any

    def query(self) -> bool:
        return isinstance(self.ended, float) or bool(self.ended.query())

    def synchronize(self) -> None:
        for done in self.dones:
            done.synchronize()

    @property
    def seconds(self) -> float:
        if isinstance(self.ended, float):
            return self.ended - float(self.began)
        return float(self.began.elapsed_time(self.ended)) * 1e-3


class KvbmOffloadingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not typed
    """Copies blocks between vLLM's pages and host memory.

    Parameters
    ----------
    memory : HostMemory
        Which it owns.
    blocks_per_chunk : int
        Blocks of the engine in a chunk, which is what vLLM's manager counts.
    verify : bool
        Keep the digest of each block that is stored, and compare that of what is loaded.
    reports : bool
        Somebody asks for `take_failures`; else a load that fails its check raises `DigestError`.

    Notes
    -----
    On a GPU copies run on a stream for each direction, behind what the engine's current stream holds when they are
    submitted; nothing waits on the host.  On the CPU they are done when the call returns.
    """

    def __init__(self, memory: HostMemory, blocks_per_chunk: int, verify: bool = True, reports: bool = False) -> None:
        self._memory = memory
        self._blocks_per_chunk = blocks_per_chunk
        self._verify = verify
        self._reports = reports
        device = memory.lanes[0][0].out.device
        self._device = torch.device("cuda", device) if device >= 0 else None
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)] if self._device else []
        self._events: list[Any] = []
        self._running: tuple[deque[_Job], deque[_Job]] = (deque(), deque())
        self._failures = Failures()
        self.stats = OffloadingConnectorStats()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy blocks of the engine to chunks of the host."""
        self._submit(job_id, src_spec, dst_spec, is_load=False)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Begin to copy chunks of the host to blocks of the engine."""
        self._submit(job_id, dst_spec, src_spec, is_load=True)
        return True

    def _submit(self, job_id: int, gpu: Any, cpu: Any, is_load: bool) -> None:
        pairs = self._pairs(gpu, cpu, is_load)
        parts: list[Any] = []
        dones: list[Any] = []
        began: Any
        ended: Any
        options: dict[str, Any] = {}
        if self._device is None:
            began = time.perf_counter()
        else:
            stream = self._streams[is_load]
            began, ended = self._event(), self._event()
            options = {"stream": stream, "wait": torch.cuda.current_stream(self._device)}
            stream.wait_stream(options["wait"])
            began.record(stream)
        for lane, ids, units in pairs:
            out = None
            if self._verify:
                out = torch.empty(len(ids), dtype=torch.int64, pin_memory=self._device is not None)
                options["digests"] = out
            dones.append(lane.back.copy(units, ids, **options) if is_load else lane.out.copy(ids, units, **options))
            parts.append((lane, ids, units, out))
        if self._device is None:
            ended = time.perf_counter()
        else:
            ended.record(stream)
        nbytes = sum(len(ids) * lane.nbytes for lane, ids, _ in pairs)
        blocks = len(gpu.block_ids)
        self._running[is_load].append(_Job(job_id, is_load, parts, nbytes, blocks, dones, began, ended))

    def _pairs(
        self, gpu: Any, cpu: Any, is_load: bool
    ) -> list[tuple[Lane, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Blocks of the engine and of the host, lane by lane.

        The first chunk of a group may be used from its middle on: `block_indices` says at which block of the request it
        begins.
        """
        each = self._blocks_per_chunk
        all_ids, chunks = gpu.block_ids.astype(np.int64), cpu.block_ids.astype(np.int64)
        found: dict[int, tuple[Lane, list[Any], list[Any]]] = {}
        id_at = chunk_at = 0
        for lanes, count, first in zip(self._memory.lanes, gpu.group_sizes, gpu.block_indices, strict=True):
            if not count:
                continue
            skip = first % each
            taken = -(-(skip + count) // each)
            ids, held = all_ids[id_at : id_at + count], chunks[chunk_at : chunk_at + taken]
            id_at, chunk_at = id_at + count, chunk_at + taken
            units = held if each == 1 else (held[:, None] * each + np.arange(each)).ravel()
            for lane in lanes:
                if not is_load:
                    lane.known[units] = False
                of = found.setdefault(id(lane), (lane, [], []))
                of[1].append(ids)
                of[2].append(units[skip : skip + count])
        if (id_at, chunk_at) != (len(all_ids), len(chunks)):
            raise BindError(
                f"vLLM's offloading job: {len(all_ids)} blocks and {len(chunks)} chunks of {each} blocks: expected {id_at} and "
                f"{chunk_at}, as its groups say"
            )
        return [(lane, np.concatenate(ids), np.concatenate(units)) for lane, ids, units in found.values()]

    def _event(self) -> Any:
        return self._events.pop() if self._events else torch.cuda.Event(enable_timing=True)

    def get_finished(self) -> list[Any]:
        """Jobs that are done, and what they took; loads that failed their check are in `take_failures`."""
        results: list[Any] = []
        for running in self._running:
            while running and running[0].query():
                job = running.popleft()
                job.synchronize()  # which waits for nothing, and says what went wrong on the GPU
                self._settle(job)
                results.append(TransferResult(job.id, True, job.nbytes, job.seconds))
                if self._device is not None:
                    self._events += [job.began, job.ended]
        return results

    def _settle(self, job: _Job) -> None:
        blocks, nbytes = (
            (Metric.LOADED_BLOCKS, Metric.LOADED_BYTES) if job.is_load else (Metric.STORED_BLOCKS, Metric.STORED_BYTES)
        )
        self.stats.increase_counter(blocks, job.blocks)
        self.stats.increase_counter(nbytes, job.nbytes)
        if not self._verify:
            return
        for lane, ids, units, out in job.parts:
            digests = out.numpy().view(np.uint64)
            if not job.is_load:
                lane.digests[units], lane.known[units] = digests, True
                continue
            wrong = (digests != lane.digests[units]) | ~lane.known[units]
            if wrong.any():
                self._fail(job.id, ids[wrong], units[wrong])

    def _fail(self, job_id: int, ids: npt.NDArray[np.int64], units: npt.NDArray[np.int64]) -> None:
        self.stats.increase_counter(Metric.FAILED_BLOCKS, len(ids))
        if not self._reports:
            raise DigestError(
                f"vLLM offloading: blocks {units.tolist()} of host memory are not what was stored there; expected equal digests: the "
                "memory was written by others, or is broken.  vLLM's OffloadingConnector cannot compute them anew: with "
                'kv_connector "KvbmOffloadingConnector" (kv_connector_module_path "kvbm.integrations.vllm") this is a miss'
            )
        self._failures.jobs.add(job_id)
        self._failures.blocks.update(ids.tolist())
        self._failures.chunks.update((units // self._blocks_per_chunk).tolist())

    def take_failures(self) -> Failures:
        """What failed since the last call."""
        failures, self._failures = self._failures, Failures()
        return failures

    def take_stats(self) -> Any:
        """Counters since the last call; None if nothing was copied."""
        if self.stats.is_empty():
            return None
        stats, self.stats = self.stats, OffloadingConnectorStats()
        return stats

    def wait(self, job_ids: set[int]) -> None:
        """Wait for jobs."""
        for running in self._running:
            for job in running:
                if job.id in job_ids:
                    job.synchronize()

    def shutdown(self) -> None:
        """Wait for all copies, and free the host memory."""
        for running in self._running:
            for job in running:
                job.synchronize()
            running.clear()
        self._memory.close()
