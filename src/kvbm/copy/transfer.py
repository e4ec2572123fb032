"""Transfers: copy blocks from one pool into another.  The strategies are in `executor`."""

from __future__ import annotations

import weakref
from typing import Any

from .. import _core
from .._arguments import flag
from ..digest.cells import Model
from ..errors import BindError
from ..planner.cast import Cast, Scale, as_cast
from ..pool.pool import Pool, part_of
from ..pool.section import PoolSection
from . import autotune
from .executor import Executor, Layers, require_usable
from .strategies import CHOICES
from .strategies import Strategy as Strategy


class Transfer:
    """Copies blocks from one pool into another, many times, on streams, while a model runs.

    Parameters
    ----------
    src_pool, dst_pool : Pool or PoolSection
        Each is on a GPU or in host memory.  If one is on a GPU, host memory must be pinned.  Both may be the same pool if no block
        is both read and written.  The transfer keeps both alive.  Of a section (`Pool.section`, `Pool.units`) only that part is
        copied.
    strategy : {"auto", "aside", "direct", "staged", "engine"}
        ``direct``: one kernel reads and writes both sides, also pinned memory and the memory of another GPU.  ``staged``: a kernel
        packs blocks into a ring on the GPU and the copy engine copies them from the ring, or the reverse.  ``engine``: the copy
        engine alone copies the runs that are contiguous on both sides.  ``auto``: the strategy that was measured to be the fastest
        on this machine (`explain`).  ``aside``: as ``auto``, but ``direct`` only if nothing else is possible.  A direct kernel
        between a GPU and host memory occupies multiprocessors while it waits for PCIe, and slows a model down.
    max_sms : int, optional
        Multiprocessors that kernels may use.  Default: 16 if host memory is involved, else all.
    chunk_bytes : int, optional
        Bytes of one of the three slots of the ring for staged copies; at least one block.  Default: 32 MiB.
    verify : bool
        Digest the source before each copy and the destination after it, by kernels that share no loop with the copy, and compare
        the digests.  `Done.synchronize` raises `DigestError` if they differ.  It costs one read of each side.
    model : kvbm.Model, optional
        Which layers and heads of a model the source holds, for `digests`.
    cast : {"amax"} or kvbm.Scale, optional
        Change the format of values: quantise bfloat16, float16 or float32, or the reverse.  ``"amax"``: each group of elements of a
        layout with scales has the scale of its largest value.  A `Scale` in addition gives scales to planes that have none, and
        those of the tensor for NVFP4: one, or one for each layer, also for K and V.  Planes of the same format on both sides are
        copied.  Default: no value changes, and different formats are an error.  Digests of a copy that casts are those of the
        quantised bits.

    Raises
    ------
    BindError
        The pools do not fit each other, the GPU cannot access the host memory, or an option cannot be honoured.
    LayoutError, PlanError
        There is no copy between the two layouts.
    CudaError
        The ring could not be allocated.
    CudaUnavailableError
        There is no GPU.

    Notes
    -----
    Any number of threads may copy at the same time, on any streams.  Staged copies of one transfer share its ring, so they run one
    after the other; use a second transfer for copies that must not wait for each other.  Keep the transfer alive as long as CUDA
    graphs that captured its copies.

    Examples
    --------
    >>> offload = Transfer(engine_pool, host_pool)  # doctest: +SKIP
    >>> done = offload.copy([7, 3], [0, 1], stream=stream)  # doctest: +SKIP
    >>> done.wait(other_stream)  # doctest: +SKIP
    """

    def __init__(
        self, src_pool: Pool | PoolSection, dst_pool: Pool | PoolSection, strategy: Strategy = "auto",
        max_sms: int | None = None, chunk_bytes: int | None = None, *, verify: bool = False, model: Model | None = None,
        cast: Cast = None,
    ) -> None:  # fmt: skip
        src, dst = part_of(src_pool, "source"), part_of(dst_pool, "destination")
        scale = as_cast(cast)
        self._executor = _begun(Executor(src, dst, strategy, max_sms, chunk_bytes, keeps=True, model=model, cast=scale))
        self._verifies = verify if type(verify) is bool else flag("verify", verify)  # type: ignore[redundant-expr]
        if self._verifies and scale is not None:
            raise BindError("verify: it compares the bits of both sides, and cast changes them; take digests= of the copy instead")
        whole = self._executor.routes.get(None)
        self._whole = None if whole is None else whole.route

    @property
    def device(self) -> int:
        """The CUDA device that runs the copies; -1 between two pools in host memory."""
        return self._executor.device

    def copy(
        self, src_ids: Any = None, dst_ids: Any = None, *, layers: Layers = None, stream: Any = None, wait: Any = None,
        digests: Any = None, tokens: Any = None,
    ) -> _core.Done:  # fmt: skip
        """Enqueue a copy of blocks: block ``src_ids[i]`` is copied into block ``dst_ids[i]``.

        Parameters
        ----------
        src_ids, dst_ids : int, sequence of int, NumPy array, CPU or CUDA tensor, optional
            int32 or int64.  If an id is -1 on either side, its pair is skipped.  Default: 0, 1, 2, … on that side.  Ids in host
            memory are checked before the call returns, and you may change them afterwards.  Ids on the GPU are read when the
            kernel runs, so a captured graph can be replayed with other ids; keep the tensor until then.  An id on the GPU that is
            out of range is skipped, and only `Done.synchronize` raises the error: keep the `Done`, because waiting for a stream or
            for a later copy does not.
        layers : range or (range, range), optional
            The layers to copy.  A pair gives the layers of the source and of the destination, if their numbers differ.  Of a
            section, its layers are numbered from 0.
        stream : optional
            The stream of the copy: an object with ``__cuda_stream__`` (cuda.core, torch, CuPy), a cuda.bindings handle or an int.
            Default: the current stream of torch or CuPy.  Not allowed between two pools in host memory: there the copy is complete
            when the call returns.
        wait : optional
            What the copy waits for: an event, a stream, the `Done` of another copy, or a list of them.
        digests : array, optional
            Receives the digest of each pair's block: contiguous uint64 or int64, one item per pair, on the transfer's device or
            pinned.  Skipped pairs get 0.  The copy kernel computes digests if it can (`explain`); if not, a second kernel does.
        tokens : int, sequence of int, array or tensor, optional
            For `digests`: the position of each block's first token in its sequence, as for `Pool.digest`.

        Returns
        -------
        Done
            It has ``wait(stream)``, ``synchronize()`` and ``query()``.

        Raises
        ------
        BindError
            Ids are out of range, repeated in the destination, or both read and written.  There are no such layers, or a plane has
            one element for all of them.  Nothing was enqueued.
        PlanError
            There is no copy of these layers, or no digest of their blocks: both are planned at the first call.
        CudaError
            A call of the driver failed.
        """
        if digests is None and not self._verifies:
            if tokens is not None:
                raise BindError("tokens: only digests use positions; pass digests=, or leave tokens out")
            executor = self._executor
            route = self._whole if layers is None and not executor.closed else None
            if route is None:
                route = executor.found(layers)
            if stream is None or executor.on_host:
                stream = executor.stream(stream, wait)
            return route.copy(src_ids, dst_ids, stream, wait)
        return self._executor.copy_digested(src_ids, dst_ids, layers, stream, wait, digests, tokens, self._verifies)

    def explain(self, num_blocks: int | None = None, *, layers: Layers = None) -> str:
        """Say which kernels and strategy run for a copy of `num_blocks` blocks, and why.  Default: for several numbers of blocks.

        After `verify` or `digests` was used, it also says how the digests are computed and what `verify` costs.
        """
        return self._executor.explain(num_blocks, layers, self._verifies)

    def stats(self) -> dict[str, int]:
        """Counters of what was enqueued so far.

        Returns
        -------
        dict
            ``copies``; ``blocks`` (without skipped pairs); ``bytes``; ``direct``, ``staged`` and ``engine``: copies by strategy;
            ``submissions``: kernel launches and calls of the copy engine.
        """
        return self._executor.stats()

    def close(self) -> None:
        """Release the ring.  The call waits for the copies that use it.  Later copies raise an error.

        If another thread is enqueueing a copy at this moment, that copy is completed, and the ring is released after it.
        """
        self._executor.close()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Transfer({self._executor.title}, {self._executor.direction}, strategy={self._executor.strategy})"


#: Executors of a pair of pools from which on the oldest casts are forgotten: a caller may compute a scale for each batch.
_MOST_SCALES = 32

#: Keys: the pools, then their sections.
_executors: weakref.WeakKeyDictionary[Pool, weakref.WeakKeyDictionary[Pool, dict[Any, Executor]]] = (
    weakref.WeakKeyDictionary()
)


def _begun(executor: Executor) -> Executor:
    """The executor with its plan.  The strategies are measured before, if it has a choice and this machine was not measured yet."""
    given: object = executor.strategy
    if isinstance(given, str) and given in CHOICES:  # `begin` refuses anything else
        autotune.ensure(executor.direction, executor.device)
    executor.begin()
    return executor


def _bind(src: Pool | PoolSection, dst: Pool | PoolSection, cast: Scale | None) -> Executor:
    ours, theirs = (given if isinstance(given, Pool) else given.pool for given in (src, dst))
    targets = _executors.setdefault(ours, weakref.WeakKeyDictionary())
    parts = targets.setdefault(theirs, {})
    # If two threads create one at the same time, the first one is kept: what graphs and copies read lives as long as the pools.
    key: Any = None if src is ours and dst is theirs else (part_of(src, "source").of, part_of(dst, "destination").of)
    if cast is not None:
        key = (key, cast)
    executor = parts.get(key)
    if executor is None:
        like = next(iter(list(parts.values())), None)
        made = Executor(part_of(src, "source"), part_of(dst, "destination"), "auto", None, None, keeps=False, cast=cast, like=like)
        executor = parts.setdefault(key, _begun(made))
        if cast is not None and len(parts) > _MOST_SCALES:
            # Graphs read the tables, which the first executor keeps, and the rings.
            for old, one in list(parts.items())[1:-1]:
                if one.cast is not None and one.ring is None:
                    parts.pop(old, None)
                    break
    return executor


def convert(
    src_pool: Pool | PoolSection, dst_pool: Pool | PoolSection, src_ids: Any = None, dst_ids: Any = None, *,
    stream: Any = None, cast: Cast = None,
) -> None:  # fmt: skip
    """Copy blocks from one pool into another and convert them to the destination's layout.

    Parameters
    ----------
    src_pool, dst_pool : Pool or PoolSection
        Both on one device.  They may be the same pool if no block is both read and written.
    src_ids, dst_ids : sequence of int, NumPy array or CPU tensor, optional
        Pair ``i`` copies block ``src_ids[i]`` into ``dst_ids[i]``.  If an id is -1 on either side, its pair is skipped.  Default:
        0, 1, 2, … on that side, as many as the other side has ids, or all blocks.
    stream : optional
        The stream of a GPU copy: an object with ``__cuda_stream__`` (cuda.core, torch, CuPy), a cuda.bindings handle or an int.
        Default: the current stream of torch or CuPy for their arrays.  The call returns after the copy was enqueued, and you may
        change the ids then.  On the CPU the copy is complete when the call returns.
    cast : {"amax"} or kvbm.Scale, optional
        Change the format of values, as for `Transfer`.  Default: no value changes, and different formats are an error.

    Raises
    ------
    BindError
        The pools do not fit each other, or ids are out of range, repeated in the destination, or both read and written.
        The destination is unchanged.
    LayoutError, PlanError
        There is no copy between the two layouts.
    CudaError
        The launch failed.

    Examples
    --------
    >>> convert(engine_pool, storage_pool, src_ids=[7, 3], dst_ids=[0, 1])  # doctest: +SKIP
    """
    src: Any = src_pool.pool if isinstance(src_pool, PoolSection) else src_pool
    dst: Any = dst_pool.pool if isinstance(dst_pool, PoolSection) else dst_pool
    if not (isinstance(src, Pool) and isinstance(dst, Pool)):
        require_usable(src, dst)  # says which one it is
    executor = _bind(src_pool, dst_pool, as_cast(cast))
    executor.found(None).copy(src_ids, dst_ids, executor.stream(stream, None))
