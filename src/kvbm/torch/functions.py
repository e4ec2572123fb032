"""The public functions; they call the operators.

They skip the operator if the dispatcher would only pass the tensors on (`_nobody_listens`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._arguments import require_a
from ..errors import BindError, DTypeError, KvbmError
from ..layout.layout import Layout
from ..layout.shapes import BlockShape
from ..memory.allocation import bits_of
from ..memory.array_checks import layout_name, reads_as, shape_text
from ..planner.cast import Cast, as_cast
from ..pool.pool import Pool
from .batches import KINDS, any_requires_grad, dtype_name, plain_table, raise_named, torch_dtype, wants_gradient
from .fences import fence, keep
from .operators import CONVERT, CONVERT_, PLAIN, PLAIN_, run, run_


def convert(
    tensors: Sequence[torch.Tensor] | torch.Tensor,
    src: str | Path | Layout,
    dst: str | Path | Layout,
    shape: str | BlockShape,
    *,
    stream: Any = None,
    cast: Cast = None,
) -> list[torch.Tensor]:
    """Convert blocks from one layout into new tensors of another: the operator ``kvbm::convert``.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        One tensor per allocation of the source's layout, in table order, all on one device.  The layout's order gives each shape.
        A single tensor is a list of one.  Records of several planes are bytes, in any shape with the blocks as the first axis.
    src, dst : str, Path or Layout
        Layouts: names, or paths of YAML files, which are read once per process.  A `Layout` must have been loaded from a file.
    shape : str or BlockShape
        Sizes of a block, or a text that `kvbm.load_shape` reads.  Without a dtype (``"nl=2,no=2,nh=4,nt=16,hd=32"``), that of the
        tensors is used.
    stream : optional
        A stream for the copy, fenced on both sides (see `fence`).  Default: torch's current stream.  Not allowed inside
        ``torch.compile``.
    cast : {"amax"} or kvbm.Scale, optional
        Change the format of values, as for `kvbm.Transfer`.  Then `shape` must have a dtype: that of the result where its layout
        has no planes.

    Returns
    -------
    list of torch.Tensor
        One tensor per allocation of the destination's layout, with the same blocks in the same order.  The dtype is that of the
        inputs, or of `shape` with a cast; with several planes, that of the plane.

    Raises
    ------
    BindError, DTypeError
        The tensors do not fit.  The message names the operator, the input, and what to do.
    LayoutError, PlanError, SpecError
        There is no copy between the two layouts, or no such layout or shape.
    AcceleratorError
        A CUDA call failed.

    Notes
    -----
    Gradients are supported, of any order, except for layouts of several planes and for casts.  Autocast does not change dtypes.

    Examples
    --------
    >>> import torch, kvbm.torch
    >>> layers = [torch.randn(2, 6, 16, 4, 8) for _ in range(3)]  # [l] o b t h d
    >>> blocks = kvbm.torch.convert(layers, "vllm/flash_attn_nhd", "universal", "nl=3,no=2,nh=4,nt=16,hd=8")
    >>> len(blocks), tuple(blocks[0].shape)  # [b] h l o t d
    (6, (4, 3, 2, 16, 8))
    """
    names = (layout_name("convert: src", src), layout_name("convert: dst", dst), shape_text("convert: shape", shape))
    how = _cast_text("convert", cast)
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if stream is None and _nobody_listens(tensors):
        out = run(tensors, *names, how, plain_table)
        if out is not None:
            return out
    given = _list("convert", "tensors", tensors)
    if torch.compiler.is_compiling():
        _refuse_stream("convert", stream)
    elif stream is not None and given:
        with _named("convert"), fence(stream, *given):
            out = convert(given, *names, cast=cast)
        keep(out, torch.cuda.current_stream(given[0].device))
        return out
    operator = CONVERT if _autograd_looks(given) else PLAIN
    return list(operator(given, *names) if how is None else operator(given, *names, how))


def convert_(
    tensors: Sequence[torch.Tensor] | torch.Tensor,
    out: Sequence[torch.Tensor] | torch.Tensor,
    src: str | Path | Layout,
    dst: str | Path | Layout,
    shape: str | BlockShape,
    src_ids: Any = None,
    dst_ids: Any = None,
    *,
    stream: Any = None,
    cast: Cast = None,
) -> None:
    """Convert blocks into existing tensors: the operator ``kvbm::convert_``.

    Parameters
    ----------
    tensors, out : sequence of torch.Tensor
        One tensor per allocation of each layout, in table order, all on one device.  Bits are copied, so dtypes of one byte may
        differ if one of them is uint8 or int8.
    src, dst, shape, stream
        As for `convert`.
    src_ids, dst_ids : torch.Tensor or sequence of int, optional
        One axis of int32 or int64: block ``src_ids[i]`` is copied into block ``dst_ids[i]``; -1 skips a pair.  Default:
        0, 1, 2, … on that side.  Ids on the CPU are checked, and you may change them after the call.  Ids on the GPU are read when
        the kernel runs, so a graph can be replayed with other ids; see `check_ids`.
    cast : {"amax"} or kvbm.Scale, optional
        Change the format of values, as for `kvbm.Transfer`.  Tensors of a layout without planes have their own dtype.

    Raises
    ------
    BindError, DTypeError, LayoutError, PlanError, SpecError, AcceleratorError
        As `convert`; also if ids are out of range or repeated, memory overlaps, or a tensor requires a gradient.  Nothing was
        written.

    Examples
    --------
    >>> import torch, kvbm.torch
    >>> cache, stored = torch.arange(48.0).view(1, 6, 1, 4, 2, 1), torch.zeros(1, 3, 4, 1, 2, 1)
    >>> kvbm.torch.convert_(cache, stored, "vllm/LBHNC", "vllm/LBNHC", "nl=1,no=2,nh=1,nt=4,hd=1", [5, 0], [2, 1])
    >>> stored[0, 2].flatten().tolist()
    [40.0, 41.0, 42.0, 43.0, 44.0, 45.0, 46.0, 47.0]
    """
    names = (layout_name("convert_: src", src), layout_name("convert_: dst", dst), shape_text("convert_: shape", shape))
    ids = (_ids("src_ids", src_ids), _ids("dst_ids", dst_ids))
    how = _cast_text("convert_", cast)
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if isinstance(out, torch.Tensor):
        out = [out]
    listed = [[one] for one in ids if one is not None]
    if stream is None and _nobody_listens(tensors, out, *listed) and run_(tensors, out, *names, *ids, how, plain_table):
        return
    given, into = _list("convert_", "tensors", tensors), _list("convert_", "out", out)
    _list("convert_", "ids", [one for one in ids if one is not None])
    if torch.compiler.is_compiling():
        _refuse_stream("convert_", stream)
    elif stream is not None and (given or into):
        used = [*given, *into, *(one for one in ids if one is not None and one.is_cuda)]
        with _named("convert_"), fence(stream, *used):
            convert_(given, into, *names, *ids, cast=cast)
        return
    operator = CONVERT_ if _autograd_looks(given, into) else PLAIN_
    operator(given, into, *names, *ids, *(() if how is None else (how,)))


def reinterpret(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View a tensor as another dtype of one byte: fp8 as uint8 or int8, or back.  No memory is copied.

    Raises
    ------
    DTypeError
        A dtype has another width, or both are formats of fp8, as their values would differ.
    BindError
        The tensor requires a gradient, which integers do not have.

    Examples
    --------
    >>> reinterpret(torch.tensor([0x38], dtype=torch.uint8), torch.float8_e4m3fn).float().tolist()
    [1.0]
    """
    require_a(torch.Tensor, "reinterpret: tensor", tensor, "a tensor")
    require_a(torch.dtype, "reinterpret: dtype", dtype, "a torch.dtype")
    if dtype.itemsize != 1 or tensor.dtype.itemsize != 1 or not reads_as(dtype_name(tensor.dtype), dtype_name(dtype)):
        raise DTypeError(
            f"reinterpret: expected dtypes of one byte, one of them uint8 or int8 at least, got {dtype_name(tensor.dtype)} as "
            f"{dtype_name(dtype)}; .to({dtype}) converts values"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise BindError(f"reinterpret: the tensor requires a gradient, and as {dtype_name(dtype)} it has none; call .detach()")
    return tensor.view(dtype)


def tensors(pool: Pool) -> list[torch.Tensor]:
    """A pool's arrays as tensors on the same memory, in table order.  It also works for GPU memory that the pool owns.

    Keep the pool open while you use the tensors.

    Examples
    --------
    >>> import kvbm
    >>> shape = kvbm.BlockShape(nl=2, no=2, nh=4, nt=16, hd=8, dtype="bfloat16")
    >>> tensors(kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), shape, 6))[0].dtype
    torch.bfloat16
    """
    require_a(Pool, "pool", pool, "a kvbm.Pool")
    pool.require_open()
    kinds = [pool.resolved.kinds[kind].dtype for kind in pool.resolved.kind_of_entry]
    return [_tensor(array, pool.device).view(torch_dtype(kind)) for array, kind in zip(pool.arrays, kinds, strict=True)]


def _tensor(array: Any, device: str) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, np.ndarray):
        if array.dtype.isbuiltin != 1:  # dtypes of ml_dtypes: view their bits
            array = array.view(f"u{array.itemsize}")
        return torch.from_numpy(array)
    return torch.as_tensor(bits_of(array), device=device)


def _list(operator: str, what: str, tensors: Any) -> list[torch.Tensor]:
    if not isinstance(tensors, (list, tuple)):
        raise BindError(f"{operator}: {what}: expected a list of tensors, got a {type(tensors).__name__}")
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise BindError(f"{operator}: {what}: #{index} is a {type(tensor).__name__}; expected a torch.Tensor")
        if tensor.is_nested:  # most attributes of a nested tensor raise an error of torch
            raise BindError(
                f"{operator}: {what}: #{index} is a nested tensor; expected a dense one: pass its parts, tensor.unbind()"
            )
    return list(tensors)


def _cast_text(operator: str, cast: Any) -> str | None:
    """The cast as the operators take it."""
    if cast is None:
        return None
    with _named(operator):
        scale = as_cast(cast)
    return None if scale is None else scale.text


def _ids(what: str, ids: Any) -> torch.Tensor | None:
    if ids is None or isinstance(ids, torch.Tensor):
        return ids
    try:
        made = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BindError(f"convert_: {what}: expected block ids: {error}") from None
    return made.to(torch.int64) if made.numel() == 0 else made


def _listeners() -> tuple[Callable[[], Any], ...]:
    """Functions that tell if something is called between an operator and its kernel: modes, tracers, torch.func, the profiler.

    PyTorch has no public names for them.  If one is missing, it is assumed that something is always called.
    """
    names = (
        "_len_torch_dispatch_stack", "_len_torch_function_stack", "_functorch.peek_interpreter_stack",
        "_get_tracing_state", "_autograd._profiler_enabled",
    )  # fmt: skip
    try:
        return tuple(attrgetter(name)(torch._C) for name in names)
    except AttributeError:
        return (lambda: True,)


_LISTENERS = _listeners()


def _nobody_listens(*lists: Any) -> bool:
    """True if the dispatcher would only pass plain tensors to the kernel, which costs 0.1 to 0.2 µs per tensor.

    The tensors themselves are checked later, in C.
    """
    if torch.compiler.is_compiling():
        return False
    for listens in _LISTENERS:
        if listens():
            return False
    return all(type(one) in (list, tuple) and one and type(one[0]) in KINDS and not one[0].is_nested for one in lists)


def _autograd_looks(*lists: Sequence[torch.Tensor]) -> bool:
    """True if the operator must be called: a gradient is needed, or the call is being exported or traced."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() or (torch.is_grad_enabled() and wants_gradient(*lists))
    return torch.is_grad_enabled() and bool(any_requires_grad(*lists))


def _refuse_stream(operator: str, stream: Any) -> None:
    if stream is not None:
        raise BindError(f"{operator}: stream: inside torch.compile the compiler orders the work; leave stream out")


class _named:  # noqa: N801  (used as a function)
    """Adds the operator's name to errors of a ``with`` block."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, KvbmError):
            raise_named(self.operator, error)
