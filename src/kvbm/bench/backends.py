"""The measured copies: kvbm's strategies, raw copies of each run, and peers; each bound to two pools."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .. import _core, kernels
from ..copy import strategies
from ..copy.transfer import Strategy, Transfer
from ..errors import KvbmError
from ..planner.loopnest import Part
from ..planner.plan import Plan
from ..pool.pool import Pool
from . import measure, peers
from .peers import NotApplicable

STRATEGIES = ("auto", *strategies.STRATEGIES)
#: Raw copies of each run → how the driver is called (None: by a kernel), and the name of what runs.
RAW: dict[str, tuple[kernels.MemcpyBatchMode | None, str]] = {
    "vectorized": (None, "copy_pairs"),
    "batched": (kernels.MemcpyBatchMode.BATCH_WITHOUT_FALLBACK, "cuMemcpyBatchAsync"),
    "memcpy_async": (kernels.MemcpyBatchMode.FALLBACK_ONLY, "cuMemcpyAsync"),
}
BACKENDS = (*STRATEGIES, *RAW, "host")


# ---- runs and their addresses --------------------------------------------------------------------------------------


class Runs(NamedTuple):
    """Runs of equal size that are contiguous on both sides."""

    src: npt.NDArray[np.uint64]
    dst: npt.NDArray[np.uint64]
    size: int


def runs(src: Pool, dst: Pool, made: Plan, src_ids: Any, dst_ids: Any) -> list[Runs]:
    """Addresses of every run of a batch; one list per part of the plan (K and V if they differ)."""
    found = []
    for part in made.parts:
        ends = []
        for pool, ids, step, start, strides in (
            (src, src_ids, part.src_id, (part.src_table_offset, part.src_offset), _side(part, is_source=True)),
            (dst, dst_ids, part.dst_id, (part.dst_table_offset, part.dst_offset), _side(part, is_source=False)),
        ):
            blocks = np.asarray(ids, np.int64)[:, None]
            entry, offset = strides
            where = pool.addresses.astype(np.int64)[blocks * step[0] + start[0] + entry]
            ends.append((where + (blocks * step[1] + start[1] + offset)).reshape(-1).astype(np.uint64))
        found.append(Runs(ends[0], ends[1], part.run_bytes))
    return found


def _side(part: Part, *, is_source: bool) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Table index and offset of every run of a block, relative to its first run."""
    entry, offset = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for mode in reversed((*part.inner[1:], *part.outer)):
        table, stride = (mode.src_table, mode.src) if is_source else (mode.dst_table, mode.dst)
        steps = np.arange(mode.extent, dtype=np.int64)
        entry = (entry[:, None] + steps * table).reshape(-1)
        offset = (offset[:, None] + steps * stride).reshape(-1)
    return entry, offset


def num_runs(made: Plan) -> int:
    """Number of runs per block."""
    return sum(part.nbytes // part.run_bytes for part in made.parts)


# ---- backends ------------------------------------------------------------------------------------------------------


class Backend(Protocol):
    """Copies between two pools."""

    def bind(self, src_ids: Any, dst_ids: Any) -> Callable[[Any], object]:
        """The measured call for these ids.  All preparation is done here, before the call."""

    def kernel(self, batch: int) -> str:
        """Name of the kernel, driver call or strategy that runs."""


class ByTransfer:
    """A strategy of `Transfer`."""

    def __init__(self, src: Pool, dst: Pool, strategy: Strategy, max_sms: int | None, stack: contextlib.ExitStack) -> None:
        sms = None if strategy == "engine" or src.device == dst.device == "cpu" else max_sms
        self._move = stack.enter_context(Transfer(src, dst, strategy, sms))
        self._strategy = strategy

    def bind(self, src_ids: Any, dst_ids: Any) -> Callable[[Any], object]:
        return lambda stream: self._move.copy(src_ids, dst_ids, stream=stream)

    def kernel(self, batch: int) -> str:
        found = self._move._executor.route(None)
        taken = found.route.choose(batch)
        if taken != "direct":
            return taken
        names = " ".join(copy.kernel for copy in found.copies if copy.kernel)
        return names if self._strategy != "auto" or self._move._executor.on_host else f"direct {names}"


class ByRuns:
    """A separate copy for every run that is contiguous on both sides."""

    def __init__(self, src: Pool, dst: Pool, name: str, made: Plan, device: int) -> None:
        if device < 0:
            raise NotApplicable("it needs a GPU")
        if name == "batched" and not _core.has_memcpy_batch():
            raise NotApplicable("this driver has no batched copies (CUDA 12.8 has them)")
        self._runs = functools.partial(runs, src, dst, made)
        self._mode, self._kernel = RAW[name]
        self._device = device

    def bind(self, src_ids: Any, dst_ids: Any) -> Callable[[Any], object]:
        parts = self._runs(src_ids, dst_ids)

        def copy(stream: Any) -> None:
            for part in parts:
                if self._mode is None:
                    kernels.vectorized_copy(*part, stream=stream, device=self._device)
                else:
                    kernels.memcpy_batch(*part, mode=self._mode, stream=stream, device=self._device, merge=False)

        return copy

    def kernel(self, batch: int) -> str:  # noqa: ARG002
        return self._kernel


class ByPeer:
    """A function of another library or of a plug-in."""

    def __init__(self, src: Pool, dst: Pool, name: str, peer: peers.Peer) -> None:
        self._name = name
        self._copy = self._guarded(peer, src, dst)

    def bind(self, src_ids: Any, dst_ids: Any) -> Callable[[Any], object]:
        return lambda stream: self._guarded(self._copy, src_ids, dst_ids, stream)

    def kernel(self, batch: int) -> str:  # noqa: ARG002
        return ""

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call it, and turn its errors into errors that name the peer."""
        try:
            return call(*args)
        except KvbmError:
            raise
        except Exception as error:
            if measure.is_out_of_memory(error) or "out of memory" in str(error).lower():
                raise MemoryError(f"{self._name}: {error}") from error
            raise peers.PeerError(f"peer {self._name}: {type(error).__name__}: {error}") from error
