"""Transfers: copies of blocks from one pool into another."""

from __future__ import annotations

import weakref
from typing import Any

from . import _core
from .digest import Model
from .errors import BindError
from .mover import Layers, Mover, part_of, require_usable
from .pool import Pool
from .selection import PoolSection

__all__ = ["Transfer", "convert"]


class Transfer:
    """Copies blocks from one pool into another, again and again: beside a running model, on streams.

    Parameters
    ----------
    src_pool, dst_pool : Pool or PoolSection
        Each on a GPU, or in host memory: pinned, unless both are in host memory.  They may be the same pool if no block is
        both read and written.  The transfer keeps them.  Of sections (`Pool.section`, `Pool.units`) only these are copied.
    strategy : {"auto", "direct", "staged", "engine"}
        ``direct``: one kernel, also on pinned memory and on another GPU's.  ``staged``: a kernel packs blocks into a ring on
        the GPU and the copy engine takes them from there, or the reverse.  ``engine``: runs that are contiguous on both sides,
        merged, by the copy engine alone.  ``auto``: whichever this machine was measured to be fastest with (`explain`).
    max_sms : int, optional
        Multiprocessors that kernels may use.  Not given: 16 where host memory is involved, else all.
    chunk_bytes : int, optional
        Size of one of the three slots of the ring that staged copies use; at least one block, 32 MiB if not given.
    verify : bool
        Digest the source before and the destination after each copy, by kernels that share no loop with the copy's, and compare
        both: `Done.synchronize` raises `DigestError` where they differ.  It costs a read of either side.
    model : kvbm.Model, optional
        Which layers and heads of a whole model the source holds, for `digests`.

    Raises
    ------
    BindError
        Pools that do not fit each other, host memory that the GPU does not reach, an option that cannot be honoured.
    LayoutError, PlanError
        There is no copy between the two layouts.
    CudaError, CudaUnavailableError
        The ring could not be allocated; no GPU.

    Notes
    -----
    Any number of threads may copy at once, on any streams.  Staged copies of one transfer share its ring and so run one after
    the other; make another transfer for copies that must not wait for each other.  Keep the transfer as long as graphs that
    it was captured into.

    Examples
    --------
    >>> offload = Transfer(engine_pool, host_pool)  # doctest: +SKIP
    >>> done = offload.copy([7, 3], [0, 1], stream=stream)  # doctest: +SKIP
    >>> done.wait(other_stream)  # doctest: +SKIP
    """

    def __init__(
        self,
        src_pool: Pool | PoolSection,
        dst_pool: Pool | PoolSection,
        strategy: str = "auto",
        max_sms: int | None = None,
        chunk_bytes: int | None = None,
        *,
        verify: bool = False,
        model: Model | None = None,
    ) -> None:
        src, dst = part_of(src_pool, "source"), part_of(dst_pool, "destination")
        self._mover = Mover(src, dst, strategy, max_sms, chunk_bytes, keeps=True, transfer=Transfer, model=model)
        self._verifies = verify
        self._pools = (src.pool, dst.pool)

    @property
    def device(self) -> int:
        """The CUDA device whose kernels and streams copies take; -1 between two pools in host memory."""
        return self._mover.device

    def copy(
        self,
        src_ids: Any = None,
        dst_ids: Any = None,
        *,
        layers: Layers = None,
        stream: Any = None,
        wait: Any = None,
        digests: Any = None,
        tokens: Any = None,
    ) -> _core.Done:
        """Enqueue a batch: block ``src_ids[i]`` is copied into block ``dst_ids[i]``.

        Parameters
        ----------
        src_ids, dst_ids : int, sequence of int, NumPy array, CPU or CUDA tensor, optional
            int32 or int64; -1 skips a pair.  Not given: 0, 1, 2, … on that side.  Ids in host memory are checked and may be
            changed at once.  Ids on the GPU are read when the kernel runs, so that a captured graph can be replayed with
            others; keep them until then.  One that is out of range there is skipped, and `Done.synchronize` says so: keep the
            `Done`, as a stream or a later copy that is waited for tells nothing.
        layers : range or (range, range), optional
            The layers to copy: on both sides, or of the source and of the destination where the pools hold other layers.
        stream : optional
            Where the copy is ordered: an object with ``__cuda_stream__`` (cuda.core, torch, CuPy), a cuda.bindings handle or
            an int.  Not given: torch's or CuPy's current stream.  Not for two pools in host memory, where the copy is done
            when the call returns.
        wait : optional
            What must be done before: an event, a stream, the `Done` of another copy, or a list of them.
        digests : array, optional
            Takes the digest of what each pair copies: contiguous uint64 or int64, one a pair, on the transfer's device or pinned; 0
            for pairs that are skipped.  Kernels digest what passes through them where they can (`explain`), else one reads a side.
        tokens : int, sequence of int, array or tensor, optional
            With `digests`: the position of each block's first token in its sequence, as for `Pool.digest`.

        Returns
        -------
        Done
            ``wait(stream)``, ``synchronize()`` and ``query()``.

        Raises
        ------
        BindError
            Ids that are out of range, repeated in the destination, or read and written.  Nothing has been enqueued.
        CudaError
            A call of the driver failed.
        """
        src, dst = self._pools
        if src.asked or dst.asked:
            require_usable(src, dst)
        if digests is None and not self._verifies:
            if tokens is not None:
                raise BindError("tokens: positions are for digests; pass digests=, or leave tokens out")
            done = self._mover.copy(src_ids, dst_ids, layers, stream, wait)
        else:
            done = self._mover.copy_digested(src_ids, dst_ids, layers, stream, wait, digests, tokens, self._verifies)
        if dst.asked:
            dst.written()
        return done

    def explain(self, num_blocks: int | None = None, *, layers: Layers = None) -> str:
        """What runs, and why, for batches of so many blocks (not given: of several sizes)."""
        return self._mover.explain(num_blocks, layers)

    def stats(self) -> dict[str, int]:
        """What has been enqueued so far.

        Returns
        -------
        dict
            ``copies``, ``blocks`` (without those that were skipped), ``bytes``; copies by strategy: ``direct``, ``staged``,
            ``engine``; ``submissions``: kernels and calls of the copy engine.
        """
        return self._mover.stats()

    def close(self) -> None:
        """Give back the ring; waits for the copies that use it.  Further copies are refused.

        A copy that another thread is enqueueing at this moment goes through, and the ring is given back later.
        """
        mover = self._mover
        with mover.lock:
            mover.closed = True
            mover.routes.clear()
            ring, mover.ring = mover.ring, None
        if ring is not None:
            ring.close()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Transfer({self._mover.title}, {self._mover.direction}, strategy={self._mover.strategy})"


#: By the pools, then by what of them is meant.
_movers: weakref.WeakKeyDictionary[Pool, weakref.WeakKeyDictionary[Pool, dict[Any, Mover]]] = (
    weakref.WeakKeyDictionary()
)


def _bind(src: Pool | PoolSection, dst: Pool | PoolSection) -> Mover:
    ours, theirs = (given if isinstance(given, Pool) else given.pool for given in (src, dst))
    targets = _movers.setdefault(ours, weakref.WeakKeyDictionary())
    parts = targets.setdefault(theirs, {})
    # Of two threads that make one at once the faster one's stays: what graphs and copies read lives as long as the pools.
    key = None if src is ours and dst is theirs else (part_of(src, "source").of, part_of(dst, "destination").of)
    mover = parts.get(key)
    if mover is None:
        made = Mover(
            part_of(src, "source"), part_of(dst, "destination"), "auto", None, None, keeps=False, transfer=Transfer
        )
        mover = parts.setdefault(key, made)
    return mover


def convert(
    src_pool: Pool | PoolSection,
    dst_pool: Pool | PoolSection,
    src_ids: Any = None,
    dst_ids: Any = None,
    *,
    stream: Any = None,
) -> None:
    """Copy blocks from one pool into another, each in its own layout.

    Parameters
    ----------
    src_pool, dst_pool : Pool or PoolSection
        On one device.  They may be the same pool if no block is both read and written.
    src_ids, dst_ids : sequence of int, NumPy array or CPU tensor, optional
        Pair ``i`` copies block ``src_ids[i]`` into ``dst_ids[i]``.  Not given: 0, 1, 2, … on that side, as many as the
        other side has ids, or all blocks.  -1 skips a pair.
    stream : optional
        Where a GPU copy is ordered: an object with ``__cuda_stream__`` (cuda.core, torch, CuPy), a cuda.bindings handle or
        an int.  Not given: torch's or CuPy's current stream for their arrays.  The call returns once the copy is in the
        stream; ids may be changed at once.  On the CPU the copy is done when the call returns.

    Raises
    ------
    BindError
        Pools that do not fit each other, ids that are out of range, repeated in the destination, or read and written.
        The destination is untouched.
    LayoutError, PlanError
        There is no copy between the two layouts.
    CudaError
        The launch failed.

    Examples
    --------
    >>> convert(engine_pool, storage_pool, src_ids=[7, 3], dst_ids=[0, 1])  # doctest: +SKIP
    """
    src = src_pool.pool if isinstance(src_pool, PoolSection) else src_pool
    dst = dst_pool.pool if isinstance(dst_pool, PoolSection) else dst_pool
    require_usable(src, dst)
    _bind(src_pool, dst_pool).copy(src_ids, dst_ids, None, stream, None)
    dst.written()
