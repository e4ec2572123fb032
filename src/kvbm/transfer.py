"""Transfers: a plan and two pools become launches.  The room where describing and launching meet, through a kernel's name."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _core
from .errors import BindError, DTypeError, MissingKernelError
from .planner import MAX_INNER, MAX_OUTER, Form, Part, Plan, plan
from .pool import Pool, as_ids

__all__ = ["convert", "current_stream", "prepare"]


@functools.cache
def _built() -> tuple[frozenset[str], tuple[Form, ...]]:
    """Names of all built kernels, and the forms of those of one part, the leanest first."""
    names = _core.kernel_names()
    single = (Form.parse(name)[0] for name in names if "__" not in name)
    return frozenset(names), tuple(sorted(single, key=lambda form: (form.inner, form.outer, form.kind)))


def _available(part: Part, wanted: Form) -> Form:
    """The kernel to run a part with: the one made for it, else one with modes to spare, else rows of single elements."""
    _, forms = _built()
    candidates = [wanted]
    if wanted.kind == "tile":
        candidates.append(Form("rows", wanted.outer, len(part.inner), 0, wanted.element))
    for candidate in candidates:
        if candidate in forms:
            return candidate
        for form in forms:
            if form.runs(candidate):
                return form
    if wanted.outer > MAX_OUTER or wanted.modes > MAX_INNER:
        advice = f"kernels have at most {MAX_OUTER} and {MAX_INNER}; convert by way of a layout whose order is nearer to both"
    else:
        advice = (
            "put the layout's file into a folder, set KVBM_LAYOUTS to it and rebuild (`kvbm codegen --layouts DIR --out DIR` "
            "shows what would be built)"
        )
    raise MissingKernelError(
        f"no built kernel runs {wanted.name}: it has {wanted.outer} modes that pick a chunk and {wanted.inner} inside; {advice}"
    )


def prepare(made: Plan, src_alignment: int, dst_alignment: int) -> list[_core.Copy]:
    """The launches that a plan takes: one, or one a half where K and V have no kernel in common.

    Parameters
    ----------
    made : Plan
    src_alignment, dst_alignment : int
        What divides every base address of each side.

    Raises
    ------
    MissingKernelError
        A plan with more modes than any built kernel.
    """
    forms = made.forms(src_alignment, dst_alignment)
    names, _ = _built()
    joined = "__".join(form.name for form in forms)
    if joined in names:
        parts = [part.arguments(form) for part, form in zip(made.parts, forms, strict=True)]
        return [_core.Copy(joined, parts, made.src_id, made.dst_id)]
    copies = []
    for part, wanted in zip(made.parts, forms, strict=True):
        form = _available(part, wanted)
        copies.append(_core.Copy(form.name, [part.arguments(form)], made.src_id, made.dst_id))
    return copies


class _Bound:
    """A plan bound to two pools.  It holds neither of them, so that a cache of these keeps no memory alive."""

    def __init__(self, src: Pool, dst: Pool) -> None:
        require_compatible(src, dst)
        self.plan = plan(src.layout, dst.layout, src.shape, num_blocks=(src.num_blocks, dst.num_blocks))
        self.same_pool = require_disjoint(src, dst)
        self.copies = prepare(self.plan, src.alignment, dst.alignment)
        self.src_table, self.dst_table = src.table(), dst.table()
        if src.device != "cpu":
            for copy in self.copies:  # now, and not beside a running model
                _core.warm(copy.kernel, int(src.device.partition(":")[2]))


_bound: weakref.WeakKeyDictionary[Pool, weakref.WeakKeyDictionary[Pool, _Bound]] = weakref.WeakKeyDictionary()


def _bind(src: Pool, dst: Pool) -> _Bound:
    targets = _bound.setdefault(src, weakref.WeakKeyDictionary())
    bound = targets.get(dst)
    if bound is None:
        bound = targets[dst] = _Bound(src, dst)
    return bound


def require_compatible(src: Pool, dst: Pool) -> None:
    """Two pools between which blocks can move: one block shape, one device, a destination that may be written."""
    title = f"{src.layout.name} → {dst.layout.name}"
    if src.shape.dtype != dst.shape.dtype:
        raise DTypeError(
            f"{title}: the source holds {src.shape.dtype}, the destination {dst.shape.dtype}; a copy converts no dtype"
        )
    if src.shape != dst.shape:
        raise BindError(f"{title}: expected pools of one block shape, got {src.shape} and {dst.shape}")
    if src.device != dst.device:
        raise BindError(f"{title}: the source is on {src.device}, the destination on {dst.device}; expected one device")
    if dst.readonly:
        raise BindError(f"{title}: the destination is read-only")


def require_disjoint(src: Pool, dst: Pool) -> bool:
    """False where the pools share no memory, True where they are the same blocks of one layout; else an error."""
    if src is dst:
        return True
    a, b = src.spans, dst.spans
    # Of the spans of the other side that start before this one ends (they are sorted), does any end behind its start?
    before = np.searchsorted(b[:, 0], a[:, 1], side="left")
    reach = np.maximum.accumulate(b[:, 1])
    clash = np.nonzero((before > 0) & (reach[np.maximum(before, 1) - 1] > a[:, 0]))[0]
    if not clash.size:
        return False
    if src.layout == dst.layout and src.num_blocks == dst.num_blocks and np.array_equal(src.addresses, dst.addresses):
        return True
    raise BindError(
        f"{src.layout.name} → {dst.layout.name}: source and destination overlap in memory at address {int(a[clash[0], 0]):#x}; "
        "a block would be read after it was overwritten. Convert into memory of its own"
    )


def current_stream(pool: Pool) -> int:
    """The stream that the pool's framework is on: torch's or CuPy's current one for the pool's device.

    Raises
    ------
    BindError
        Arrays of neither: there is no stream to assume.
    """
    index = int(pool.device.partition(":")[2])
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    first = pool.arrays[0]
    if torch is not None and isinstance(first, torch.Tensor):
        return int(torch.cuda.current_stream(index).cuda_stream)
    if cupy is not None and isinstance(first, cupy.ndarray):
        with cupy.cuda.Device(index):
            return int(cupy.cuda.get_current_stream().ptr)
    raise BindError(
        f"stream: {type(first).__name__} has no current stream; pass stream= (an object with __cuda_stream__, or a handle)"
    )


def convert(src_pool: Pool, dst_pool: Pool, src_ids: Any = None, dst_ids: Any = None, *, stream: Any = None) -> None:
    """Copy blocks from one pool into another, each in its own layout.

    Parameters
    ----------
    src_pool, dst_pool : Pool
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
    bound = _bind(src_pool, dst_pool)
    src, dst = as_ids(src_ids, "src_ids"), as_ids(dst_ids, "dst_ids")
    n = _count_pairs(src, dst, src_pool, dst_pool)
    if n == 0:
        return
    _core.check_ids(src, dst, n, src_pool.num_blocks, dst_pool.num_blocks, bound.same_pool)
    run(bound.copies, bound.src_table, bound.dst_table, src, dst, n, src_pool, stream)


def _count_pairs(src: Any, dst: Any, src_pool: Pool, dst_pool: Pool) -> int:
    if src is not None and dst is not None:
        if len(src) != len(dst):
            raise BindError(f"ids: expected as many source as destination ids, got {len(src)} and {len(dst)}")
        return len(src)
    if src is None and dst is None and src_pool.num_blocks != dst_pool.num_blocks:
        raise BindError(
            f"ids: the pools hold {src_pool.num_blocks} and {dst_pool.num_blocks} blocks; say which by src_ids and dst_ids"
        )
    return len(src) if src is not None else len(dst) if dst is not None else src_pool.num_blocks


def run(
    copies: Sequence[_core.Copy],
    src_table: Any,
    dst_table: Any,
    src_ids: Any,
    dst_ids: Any,
    n: int,
    pool: Pool,
    stream: Any,
) -> None:
    """Launch prepared copies on the pool's device, in order."""
    if pool.device == "cpu":
        if stream is not None:
            raise BindError(
                "stream: the pools are on the CPU, where the copy is done when the call returns; leave stream out"
            )
        for copy in copies:
            copy.run(src_table, dst_table, src_ids, dst_ids, n)
        return
    handle = _core.stream_handle(stream) if stream is not None else current_stream(pool)
    device = int(pool.device.partition(":")[2])
    for copy in copies:
        copy.launch(src_table, dst_table, src_ids, dst_ids, n, device, handle)
