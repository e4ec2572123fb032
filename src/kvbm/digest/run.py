"""Digests of copies: the kernels that compute them, and the comparison of both sides."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ..compile.prepare import digest_copies
from ..errors import CudaError, DigestError, MissingKernelError
from ..layout.shapes import round_up
from ..memory.allocation import Slab
from ..planner.lowering import CellParams, Launch, Steps
from ..system.locks import Lock


def fused_copies(
    made: list[tuple[Launch, list[CellParams]]] | str, lanes: int, src_steps: Steps, dst_steps: Steps, *, sm_limited: bool = False
) -> list[_core.Copy] | str:
    """The launches that copy and digest at once, or the reason why there are none."""
    try:
        return made if isinstance(made, str) else digest_copies(made, lanes, src_steps, dst_steps, sm_limited=sm_limited)
    except MissingKernelError as error:
        return str(error)


@dataclass
class CopyDigests:
    """The launches that digest a copy.

    Kernels that copy and digest (or the reason why there are none) are `direct` and `permute`.  Those that only digest are
    `both`, for each side, and `slots`, for those of a staged copy, if its kernels do not digest.
    """

    direct: list[_core.Copy] | str
    permute: list[_core.Copy] | str
    both: tuple[list[_core.Copy], list[_core.Copy]]
    slots: Sequence[_core.Copy] = ()

    @property
    def copies(self) -> list[_core.Copy]:
        fused = [copy for made in (self.direct, self.permute) if not isinstance(made, str) for copy in made]
        return [*fused, *self.both[0], *self.both[1], *self.slots]

    def options(self, of_dst: bool) -> dict[str, Any]:
        """Arguments for a `Route`.  `of_dst`: digests that are not fused are those of the destination."""
        direct, permute = ([] if isinstance(made, str) else made for made in (self.direct, self.permute))
        options = {"sum_direct": direct, "sum_permute": permute, "slot_digests": self.slots}
        return options | {"digests": self.both, "digests_dst": of_dst}

    def explain(self, strategies: Iterable[str], of_dst: bool) -> list[str]:
        """One sentence per strategy on how its copies are digested."""
        side = "destination when the copy is done" if of_dst else "source before the copy"
        ways = {"direct": self.direct, "staged": self.permute, "engine": "the copy engine computes nothing"}
        sentences = []
        for name in strategies:
            made = ways[name]
            but = ", but for batches in which pairs are skipped" if name == "staged" else ""
            if not isinstance(made, str):
                sentences.append(f"Digests are fused into {name} copies ({_kernels(made)}){but}.")
            elif name == "staged" and self.slots:
                sentences.append(f"Digests of staged copies are taken in their slots ({_kernels(self.slots)}){but}: {made}.")
            else:
                sentences.append(
                    f"Digests of {name} copies are taken by a pass of their own ({_kernels(self.both[of_dst])}) over the {side}: "
                    f"{made}."
                )
        return sentences

    def explain_verify(self, nbytes: str, places: Sequence[str]) -> str:
        """What verification of a copy costs.  `nbytes` is per block; `places` are the sides that are not local to the kernels."""
        across = f"; the {' and the '.join(places)} {'is' if len(places) == 1 else 'are'} read across the link" if places else ""
        kernels = " and ".join(dict.fromkeys(map(_kernels, self.both)))
        return (
            f"verify digests the source before the copy and the destination after it, each by a pass of its own ({kernels}): "
            f"{nbytes} per block are read once more on either side{across}."
        )


def _kernels(copies: Sequence[_core.Copy]) -> str:
    many = f"{len(copies)} launches" if len(copies) > 1 else "one launch"
    return f"{many} of {' and '.join(dict.fromkeys(copy.kernel or 'the copy engine' for copy in copies))}"


class Proof:
    """The digests of both sides of a copy that verifies, and their comparison, which `Done.synchronize` calls.

    Only the copy's `Done` keeps it and its memory alive.  If the `Done` is dropped without `synchronize`, its error goes to
    `unreported`, and the next copy raises it.  `where` returns a text on where given pairs differ.  On the host `device` is -1.
    """

    _memory: npt.NDArray[np.uint64] | None = None
    _is_asked = True  # also True before there is a copy

    def __init__(
        self, title: str, count: int, device: int, unreported: list[DigestError], pairs: _core.Pairs,
        where: Callable[[Sequence[int]], str],
    ) -> None:  # fmt: skip
        self.title, self.count = title, count
        self._pairs, self._where, self._unreported = pairs, where, unreported
        self._pinned = pinned if device >= 0 else None
        self._memory = self._pinned.take(2 * count) if self._pinned else np.zeros(2 * count, np.uint64)

    @staticmethod
    def settle(unreported: list[DigestError]) -> None:
        """Release some of the oldest finished copies, and raise the error of a copy with a dropped `Done`."""
        if pinned.is_watching:
            pinned.release(4)
        if unreported:
            with contextlib.suppress(IndexError):  # another thread has taken it
                raise unreported.pop(0)

    @property
    def addresses(self) -> tuple[int, int]:
        """Addresses of the source's and of the destination's digests."""
        assert self._memory is not None
        start = int(self._memory.ctypes.data)
        return start, start + 8 * self.count

    def __enter__(self) -> Proof:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End of the enqueueing.  If it failed, kernels may still write to the memory, so the memory is not reused."""
        if kind is not None:
            self._pinned = None

    def watch(self, done: _core.Done) -> None:
        """Keep the memory until the copy is done, even if its `Done` is dropped.  For a captured copy, the caller keeps it."""
        done.proof = self
        if not done.captured:
            self._is_asked = False
            if self._pinned:
                self._pinned.watch(done)

    def __call__(self) -> None:
        self._is_asked = True
        if self._pinned:
            self._pinned.release()
        self._compare(self._where)

    def _compare(self, where: Callable[[Sequence[int]], str]) -> None:
        assert self._memory is not None
        src, dst = self._memory[: self.count], self._memory[self.count : 2 * self.count]
        wrong = np.flatnonzero(src != dst)
        if wrong.size:
            pairs = tuple(map(int, wrong))
            first = pairs[0]
            ids = [side[first] for side in self._pairs.ids() if side is not None]
            named = f"pair {first} ({ids[0]} → {ids[1]})" if len(ids) > 1 else f"pair {first}"
            lines = [
                f"{self.title}: {len(pairs)} of {self.count} pairs differ, the first is {named}: the source's digest is "
                f"{int(src[first]):#018x}, the destination's {int(dst[first]):#018x}",
                where(pairs),
            ]
            raise DigestError("\n".join(filter(None, lines)), pairs=pairs)

    def __del__(self) -> None:
        if self._memory is None:
            return
        try:
            if not self._is_asked:  # the copy is done: it is watched until then
                self._compare(lambda _: "")
        except DigestError as error:
            self._unreported.append(error.with_traceback(None))  # the traceback would keep the pools alive
        finally:
            if self._pinned:
                self._pinned.give(self._memory)


class _Pinned:
    """Pinned memory for digests: reusable pieces with sizes of powers of two, and the copies that still write to some."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: dict[int, list[npt.NDArray[np.uint64]]] = {}
        self._slabs: list[Slab] = []
        self._watched: deque[_core.Done] = deque()

    def take(self, count: int) -> npt.NDArray[np.uint64]:
        size = max(512, 1 << max(count - 1, 0).bit_length())
        with self._lock:
            free = self._free.setdefault(size, [])
            if not free:
                slab = Slab(round_up(8 * size, mmap.PAGESIZE))
                _core.host_register(slab.address, round_up(8 * size, mmap.PAGESIZE))
                self._slabs.append(slab)
                free.append(np.asarray(slab)[: 8 * size].view(np.uint64))
            memory = free.pop()
        memory[:count] = 0
        return memory

    def give(self, memory: npt.NDArray[np.uint64]) -> None:
        with self._lock:
            self._free[memory.size].append(memory)

    @property
    def is_watching(self) -> bool:
        """True if there are copies to check.  Other threads may add or remove some at the same time."""
        return bool(self._watched)

    def watch(self, done: _core.Done) -> None:
        with self._lock:
            self._watched.append(done)

    def release(self, most: int = 64) -> None:
        """Stop watching the oldest copies that are done."""
        ready: list[_core.Done] = []  # not dropped with the lock held: whoever drops the last one compares, and gives memory back
        with self._lock, contextlib.suppress(CudaError):  # of an older copy: whoever waits for that is told
            while self._watched and len(ready) < most and self._watched[0].query():
                ready.append(self._watched.popleft())


pinned = _Pinned()
