"""Digests of blocks where they lie: a pool's section bound to the kernels that sum its cells up."""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import _core
from .arrays import describe, flat_integers
from .digest import Keys, Told, alone
from .errors import BindError, CudaError, DigestError, MissingKernelError
from .locks import Lock
from .lower import Launch, Steps
from .memory import Slab, find_ranges
from .prepare import digest_copies
from .shapes import round_up
from .streams import framework_of, framework_stream

if TYPE_CHECKING:
    from .pool import Pool
    from .selection import PoolSection

__all__ = ["CopyDigests", "Digester", "Proof", "digest_array", "fused_copies", "unit_positions"]

_MOST = (1 << 31) - 1


class Digester:
    """Digests the blocks, or units, of one section of a pool, which keeps it.

    Parameters
    ----------
    part : PoolSection
    keys : Keys
        Of the same coordinates.
    """

    def __init__(self, part: PoolSection, keys: Keys) -> None:
        pool = part.pool
        self.title = f"digest of {pool.layout.name}"
        self.device = -1 if pool.device == "cpu" else int(pool.device.partition(":")[2])
        self.framework = framework_of(pool.arrays[0])
        self.num_ids, self.units = part.num_ids, part.of.units
        self.unit_tokens = pool.shape.nt // self.units
        table = _core.Table(pool.steps.shorten(pool.addresses, pool.num_blocks), self.device)
        copies = copies_of(part, keys)
        for kernel in dict.fromkeys(copy.kernel for copy in copies) if self.device >= 0 else ():
            _core.warm(kernel, self.device)
        self.route = _core.Route(
            self.device, table, table, self.num_ids, _MOST, direct=(), limits=(), digests=(copies, ())
        )

    def digest(
        self, pool: Pool, ids: Any, tokens: Any, out: Any, stream: Any, wait: Any
    ) -> npt.NDArray[np.uint64] | _core.Done:
        most = self.num_ids if ids is None else _MOST
        try:
            pairs = _core.Pairs(ids, None, self.num_ids, most, False, self.device)
        except BindError as error:  # of the source ids of a copy: here there is no other side
            raise BindError(str(error).replace("src_ids", "ids")) from None
        if tokens is None and self.units > 1:
            tokens = unit_positions(ids, pairs, self.units, self.unit_tokens)
        positions = None if tokens is None else _core.Positions(tokens, len(pairs), self.device)
        if self.device < 0:
            for name, given in (("stream", stream), ("wait", wait)):
                if given is not None:
                    raise BindError(
                        f"{name}: the pool is on the CPU, where digests are done when the call returns; leave {name} out"
                    )
            found: npt.NDArray[np.uint64] = np.zeros(len(pairs), np.uint64) if out is None else out
            address, _, _ = digest_array(found, len(pairs), -1, () if out is None else (pool,))
            self.route.digest(pairs, positions, address)
            return found
        if stream is None:
            stream = framework_stream(self.framework, self.device)
        if out is not None:
            address, far, keep = digest_array(out, len(pairs), self.device, (pool,))
            return self.route.digest(pairs, positions, address, far, stream, wait, (pool, keep))
        found = np.zeros(len(pairs), np.uint64)
        done = self.route.digest(pairs, positions, found.ctypes.data, True, stream, wait, (pool, found))
        if done.captured:
            _captured.append(done)  # its graph, if that is ever launched, writes to this memory
            raise BindError(
                f"{self.title}: the stream captures a graph, whose digests are there after a replay; pass out=, an array for "
                "them"
            )
        done.synchronize()
        return found


def copies_of(part: PoolSection, keys: Keys, steps: Steps | None = None) -> list[_core.Copy]:
    """The launches that digest a section by themselves."""
    pool = part.pool
    ready = alone(part.of, keys, pool.alignment, f"digest of {pool.layout.name}", turns=pool.device != "cpu")
    return digest_copies(ready, keys.lanes, pool.steps if steps is None else steps)


#: What graphs write to that nobody was given.
_captured: list[_core.Done] = []


def fused_copies(
    made: list[tuple[Launch, list[Told]]] | str, lanes: int, src_steps: Steps, dst_steps: Steps
) -> list[_core.Copy] | str:
    """The launches that copy and digest, or why there are none."""
    try:
        return made if isinstance(made, str) else digest_copies(made, lanes, src_steps, dst_steps)
    except MissingKernelError as error:
        return str(error)


def unit_positions(ids: Any, pairs: _core.Pairs, units: int, tokens: int) -> npt.NDArray[np.int64]:
    """Where the first token of each unit stands in its block; `ids` are those of the pairs' source, as they were given.

    Raises
    ------
    BindError
        Ids on a GPU, which the host does not read.
    """
    given = ids if isinstance(ids, np.ndarray) else pairs.ids()[0]
    if given is None:
        raise BindError(
            "tokens: ids of units on a GPU do not tell the host where in its block a unit stands; pass tokens=, the position of "
            "each unit's first token"
        )
    numbers = np.atleast_1d(given).astype(np.int64)
    return np.where(numbers < 0, 0, numbers % units) * tokens


def digest_array(array: Any, count: int, device: int, pools: Iterable[Pool]) -> tuple[int, bool, Any]:
    """Where digests are written: the address, whether kernels on a GPU write to host memory, and what keeps the memory.

    Raises
    ------
    BindError
        No contiguous array of `count` 64-bit integers that may be written, or one that lies elsewhere than the kernels reach, or
        in one of the pools.
    """
    address, where, owner = flat_integers(array, count) or _described(array, count)
    end = address + 8 * count
    if where != device and (where >= 0 or not _is_pinned(address, end)):
        on, found = ("cpu" if index < 0 else f"cuda:{index}" for index in (device, where))
        raise BindError(f"digests: expected memory on {on}, or pinned host memory, got an array on {found}")
    for pool in pools:
        if pool.meets(address, end):
            raise BindError(f"digests: expected memory of its own, got an array that lies in the memory of {pool!r}")
    return address, where != device, (array, owner)


def _described(array: Any, count: int) -> tuple[int, int, Any]:
    """`flat_integers` of any array, or what is wrong with it."""
    told = describe(array, "digests")
    if told.dtype not in ("uint64", "int64") or told.shape != (count,) or (count > 1 and told.strides != (8,)):
        raise BindError(
            f"digests: expected a contiguous array of {count} uint64 or int64, got shape {told.shape} of {told.dtype}"
        )
    if told.readonly:
        raise BindError("digests: expected an array that may be written, got a read-only one")
    return told.address, -1 if told.device == "cpu" else int(told.device.partition(":")[2]), told.owner


def _is_pinned(begin: int, end: int) -> bool:
    """Whether GPUs reach host memory; what lies behind the end of a registration they do not."""
    behind = _core.memory_range(begin)[1]  # usually the driver is asked once
    return end <= behind or find_ranges([(begin, end)], (), _core.memory_range) is not None


@dataclass
class CopyDigests:
    """The launches that digest a copy: in place of its own, or why there are none; and each side's by itself."""

    direct: list[_core.Copy] | str
    permute: list[_core.Copy] | str
    both: tuple[list[_core.Copy], list[_core.Copy]]

    @property
    def copies(self) -> list[_core.Copy]:
        fused = [copy for made in (self.direct, self.permute) if not isinstance(made, str) for copy in made]
        return [*fused, *self.both[0], *self.both[1]]

    def options(self, of_dst: bool) -> dict[str, Any]:
        """As a `Route` takes them; `of_dst`: what is not fused digests the destination."""
        direct, permute = ([] if isinstance(made, str) else made for made in (self.direct, self.permute))
        return {"sum_direct": direct, "sum_permute": permute, "digests": self.both, "digests_dst": of_dst}

    def explain(self, strategies: Iterable[str], of_dst: bool) -> list[str]:
        """How copies by each of these strategies are digested: a sentence each."""
        side = "destination when the copy is done" if of_dst else "source before the copy"
        ways = {"direct": self.direct, "staged": self.permute, "engine": "the copy engine computes nothing"}
        said = []
        for name in strategies:
            made = ways[name]
            if not isinstance(made, str):
                but = ", but for batches in which pairs are skipped" if name == "staged" else ""
                said.append(f"Digests are fused into {name} copies ({_kernels(made)}){but}.")
            else:
                said.append(
                    f"Digests of {name} copies are taken by a pass of their own ({_kernels(self.both[of_dst])}) over the {side}: "
                    f"{made}."
                )
        return said

    def explain_verify(self, nbytes: str, places: Sequence[str]) -> str:
        """What it takes to verify a copy; `nbytes` a block, and the sides that lie across a link from the kernels."""
        across = f"; the {' and the '.join(places)} {'is' if len(places) == 1 else 'are'} read across the link" if places else ""
        kernels = " and ".join(dict.fromkeys(map(_kernels, self.both)))
        return (
            f"verify digests the source before the copy and the destination after it, each by a pass of its own ({kernels}): "
            f"{nbytes} a block are read once more on either side{across}."
        )


def _kernels(copies: Sequence[_core.Copy]) -> str:
    many = f"{len(copies)} launches" if len(copies) > 1 else "one launch"
    return f"{many} of {' and '.join(dict.fromkeys(copy.kernel or 'the copy engine' for copy in copies))}"


class Proof:
    """The digests of both sides of a copy that verifies, and their comparison, which `Done.synchronize` calls.

    Only the copy's `Done` keeps it, and with it the memory: what nobody has asked for when the `Done` is gone, the next copy tells.

    Parameters
    ----------
    title : str
        Of the copy, for errors.
    count : int
        Pairs.
    device : int
        Where kernels run; -1: the host.
    untold : list of DigestError
        Takes what was found of a copy whose `Done` was dropped.
    pairs : Pairs
        The copy's.
    where : callable
        Says where some of the pairs differ.
    """

    _memory: npt.NDArray[np.uint64] | None = None
    _is_asked = True  # before there is a copy to ask about, too

    def __init__(
        self,
        title: str,
        count: int,
        device: int,
        untold: list[DigestError],
        pairs: _core.Pairs,
        where: Callable[[Sequence[int]], str],
    ) -> None:
        self.title, self.count = title, count
        self._pairs, self._where, self._untold = pairs, where, untold
        self._pinned = pinned if device >= 0 else None
        self._memory = self._pinned.take(2 * count) if self._pinned else np.zeros(2 * count, np.uint64)

    @staticmethod
    def settle(untold: list[DigestError]) -> None:
        """Keep the oldest copies that are done no longer, a few at a time; raise what was found of one that nobody waits for."""
        if pinned.is_watching:
            pinned.release(4)
        if untold:
            with contextlib.suppress(IndexError):  # another thread's copy was faster
                raise untold.pop(0)

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the source's and of the destination's."""
        assert self._memory is not None
        start = int(self._memory.ctypes.data)
        return start, start + 8 * self.count

    def __enter__(self) -> Proof:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Of the enqueueing: where that failed some of it may still write the memory, which nobody gets again."""
        if kind is not None:
            self._pinned = None

    def watch(self, done: _core.Done) -> None:
        """Keep the memory until the copy is done, whoever drops what waits for it; a captured one's the caller keeps."""
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
            if not self._is_asked:  # and the copy is done: until then it is watched
                self._compare(lambda _: "")
        except DigestError as error:
            self._untold.append(error.with_traceback(None))  # whose frames have the pools
        finally:
            if self._pinned:
                self._pinned.give(self._memory)


class _Pinned:
    """Pinned memory for digests: pieces of powers of two that are used again, and the copies that still write some."""

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
        """Whether there are copies to ask; another thread's may just have come or gone."""
        return bool(self._watched)

    def watch(self, done: _core.Done) -> None:
        with self._lock:
            self._watched.append(done)

    def release(self, most: int = 64) -> None:
        """Watch those of the oldest copies no longer that are done."""
        ready: list[_core.Done] = []  # not dropped with the lock held: whoever drops the last one compares, and gives memory back
        with self._lock, contextlib.suppress(CudaError):  # of an older copy: whoever waits for that is told
            while self._watched and len(ready) < most and self._watched[0].query():
                ready.append(self._watched.popleft())


pinned = _Pinned()
