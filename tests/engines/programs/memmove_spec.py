"""vLLM's offloading on the CPU: its spec, and a worker that copies page by page, as vLLM's own does on a GPU."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class MemmoveWorker(OffloadingWorker):  # type: ignore[misc]
    """Pages as they are: one group of layers, a block a chunk."""

    def __init__(self, caches: Any, chunks: int) -> None:
        self.pages = [(one.tensor.data_ptr(), one.tensor.stride(0)) for one in caches.tensors]
        self.nbytes = caches.tensors[0].page_size_bytes
        self.host = torch.zeros(len(self.pages), chunks, self.nbytes, dtype=torch.int8)
        self.done: list[TransferResult] = []

    def _move(self, job: int, ours: Any, theirs: Any, *, is_load: bool) -> bool:
        start = time.perf_counter()
        ids, rows = (np.asarray(given.block_ids, np.int64) for given in (ours, theirs))
        for (at, step), host in zip(self.pages, self.host, strict=True):
            sides = (at + ids * step).tolist(), (host.data_ptr() + rows * self.nbytes).tolist()
            for dst, src in zip(*(sides if is_load else sides[::-1]), strict=True):
                ctypes.memmove(dst, src, self.nbytes)
        nbytes = len(ids) * len(self.pages) * self.nbytes
        self.done.append(TransferResult(job, True, nbytes, time.perf_counter() - start))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, src_spec, dst_spec, is_load=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, dst_spec, src_spec, is_load=True)

    def get_finished(self) -> list[Any]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All is done when it is submitted."""


class MemmoveSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec with `MemmoveWorker`."""

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            assert self.blocks_per_chunk == len(kv_caches.group_data_refs) == 1
            self._worker = MemmoveWorker(kv_caches, self.num_chunks)
        return self._worker
