"""Caches for calls of the operators: layouts, sizes and launches for given arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from .. import _core
from .._arguments import quoted
from ..compile.prepare import prepare
from ..copy.executor import require_disjoint
from ..errors import BindError, CudaError, CudaUnavailableError, KvbmError, PlanError
from ..layout.shapes import ITEMSIZE, PACKED
from ..matching.match import names_of_strides
from ..memory.array_checks import (
    Caller,
    Side,
    Size,
    Sized,
    format_of,
    formats_of,
    named,
    require,
    require_copy,
    require_device,
    require_dtype,
    require_formats,
    require_one_format,
    sides_of,
)
from ..memory.array_info import Array, span
from ..memory.liveness import has_memory
from ..memory.streams import torch_stream
from ..planner.cast import Scale, as_cast
from ..planner.plan import plan
from ..pool.pool import Pool

_RuntimeError: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)  # torch 2.8 and newer

#: Sizes of the caches of batches, faces and their sizes.
_MOST_SIZES = 1024


class AcceleratorError(CudaError, _RuntimeError):  # type: ignore[misc, valid-type]
    """A CUDA call failed inside an operator.  It is both PyTorch's ``AcceleratorError`` and kvbm's `CudaError`.

    Attributes
    ----------
    code, error_code : int
        The ``CUresult``.
    name : str
        Name of the code.
    """

    def __init__(self, message: str, *, code: int = 0, name: str = "") -> None:
        super().__init__(message, code=code, name=name)
        self.error_code = code


class Face:
    """Two layouts, block shapes, dtypes, a cast and a device: everything about a call except its number of blocks.

    `dtypes` are those of the first input and of the first output; None for outputs that the operator makes.
    """

    def __init__(
        self, operator: str, names: tuple[str, str, str], dtypes: tuple[torch.dtype, torch.dtype | None],
        device: torch.device, cast: str | None = None,
    ) -> None:  # fmt: skip
        self.cast, self.device = cast_of(cast), device
        self.index = (device.index or 0) if device.type == "cuda" else -1
        found, into = dtype_name(dtypes[0]), None if dtypes[1] is None else dtype_name(dtypes[1])
        self.src, self.dst = sides_of(*names, found, into, self.cast)
        #: Dtype of new tensors, where the layout has no planes.
        self.torch_dtype = dtypes[0] if self.cast is None else torch_dtype(self.dst.shape.dtype)
        self.dtypes = found, into or dtype_name(self.torch_dtype)
        self.shape = self.src.shape
        self.has_planes = bool(self.src.layout.planes or self.dst.layout.planes)
        if self.has_planes or self.cast is not None:  # planes have their own dtypes, which the gates compare
            require_copy(self.src, self.dst, self.cast)
        else:
            for what, dtype in zip(("input", "output"), self.dtypes, strict=True):
                require_dtype(f"{operator}: {what} #0", dtype, self.shape.dtype)
            formats = [{"": name} if (name := format_of(dtype, self.shape.dtype)) else {} for dtype in self.dtypes]
            require_one_format(operator, *formats)
        #: True if values with gradients are read as integers, which have no gradients.
        self.hides_gradients = dtypes[0].is_floating_point and self.shape.dtype not in _FLOATS
        self._batches: dict[tuple[int, int], Batch] = {}
        self._alike: set[tuple[tuple[torch.dtype, ...], tuple[torch.dtype, ...]]] = set()  # dtypes of all tensors that passed

    def require_formats(self, operator: str, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
        """Raise `DTypeError` if tensors of one plane are of two formats of one byte, or of another one than a cast reads or writes.

        Each tensor may have a dtype of its own.
        """
        dtypes = tuple(tensor.dtype for tensor in tensors), tuple(tensor.dtype for tensor in out)
        if dtypes not in self._alike:
            found = []
            for what, side, of in zip(("inputs", "outputs"), (self.src, self.dst), dtypes, strict=True):
                blocks = max(len(of) // side.arrays_a_block, 1) if side.arrays_a_block else 1
                resolved = side.layout.resolve(side.shape, blocks)
                held = {one.plane: one.dtype for one in resolved.section.accesses}
                found.append((formats_of(resolved, [dtype_name(one) for one in of], f"{operator}: {what}"), held))
            require_formats(operator, *found, casts=self.cast is not None)
            if len(self._alike) >= _MOST_SIZES:
                self._alike.clear()
            self._alike.add(dtypes)

    def empty(self, kind: tuple[tuple[int, ...], tuple[int, ...], str, int]) -> torch.Tensor:
        """A new tensor of a kind, with the kind's dtype or else that of the inputs."""
        shape, strides, dtype, _ = kind
        return torch.empty_strided(
            shape, strides, dtype=torch_dtype(dtype) if dtype else self.torch_dtype, device=self.device
        )

    def batch(self, src_blocks: Size, dst_blocks: Size) -> Batch:
        if not (isinstance(src_blocks, int) and isinstance(dst_blocks, int)):
            return Batch(self, src_blocks, dst_blocks)
        found = self._batches.get((src_blocks, dst_blocks))
        if found is None:
            if len(self._batches) >= _MOST_SIZES:
                self._batches.clear()
            found = self._batches[src_blocks, dst_blocks] = Batch(self, src_blocks, dst_blocks)
        return found


_FLOATS = frozenset(name for name in ITEMSIZE if "float" in name)


class Batch:
    """A face with its numbers of blocks: the required tensors, and the launches."""

    def __init__(self, face: Face, src_blocks: Size, dst_blocks: Size) -> None:
        self.face = face
        self.src_blocks, self.dst_blocks = src_blocks, dst_blocks
        self.src, self.dst = face.src.sized(src_blocks), face.dst.sized(dst_blocks)
        self.src_elements, self.dst_elements = self.src.elements(), self.dst.elements()
        concrete = isinstance(src_blocks, int) and isinstance(dst_blocks, int)
        self._nbytes = (self.src.nbytes, self.dst.nbytes) if concrete else (0, 0)
        self._copies: dict[tuple[int, int], tuple[_core.Copy, ...]] = {}

    def outputs(self) -> list[torch.Tensor]:
        which, kinds, face, count = self.dst.which, self.dst_elements, self.face, int(self.dst.arrays)
        if which is None and count:
            first = face.empty(kinds[0])
            if first.is_contiguous():  # then a tensor like it has the same strides, and takes half the time to create
                return [first, *[torch.empty_like(first) for _ in range(count - 1)]]
        return [face.empty(kinds[which[i] if which else 0]) for i in range(count)]

    def copies(self, src_alignment: int, dst_alignment: int) -> tuple[_core.Copy, ...]:
        found = self._copies.get((src_alignment, dst_alignment))
        if found is None:
            blocks = (self.src_blocks, self.dst_blocks)
            src, dst, cast = self.face.src, self.face.dst, self.face.cast
            made = plan(src.layout, dst.layout, (src.shape, dst.shape), num_blocks=blocks, cast=cast)
            found = tuple(prepare(made, src_alignment, dst_alignment, device=self.face.index))
            self._copies[src_alignment, dst_alignment] = found
        return found

    def run(self, src: Table, dst: Table, pairs: _core.Pairs) -> None:
        """Copy: on the CPU at once, on a GPU in the order of the current stream."""
        face = self.face
        copies = self.copies(src[1], dst[1])
        if face.index < 0:
            for copy in copies:
                copy.run(src[0], dst[0], pairs)
            return
        stream = torch_stream(face.index)
        for copy in copies:
            copy.launch(src[0], dst[0], pairs, face.index, stream)

    def shares_blocks(
        self, src: Table, dst: Table, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor]
    ) -> bool:
        """True if inputs and outputs are the same blocks.  Raises an error if they overlap in another way."""
        if not _core.tables_clash(src[0], self._nbytes[0], dst[0], self._nbytes[1]):
            return False
        pools = self.pools(tensors, out)
        pools[1].require_distinct()
        return require_disjoint(*pools)

    def pools(self, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> tuple[Pool, Pool]:
        """Pools of both sides: the slow check of all arguments, with detailed errors."""
        src, dst = (
            Pool.trusted(side.side.layout, side.side.shape, [_seen(tensor) for tensor in given], given)
            for side, given in ((self.src, tensors), (self.dst, out))
        )
        return src, dst


Table = tuple[_core.Table, int]
#: Functions that make a table of tensors: `table_of` or `plain_table`.
Look = Callable[[Caller, Sequence[torch.Tensor], Sized, Any, Face, str], Table | None]
KINDS = frozenset((torch.Tensor, torch.nn.Parameter))
_faces: dict[Any, Face] = {}
KNOWN: dict[Any, Batch] = {}  # keys from real tensors; faces also have symbolic sizes
_names: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as ``bfloat16``; cached."""
    found = _names.get(dtype)
    if found is None:
        found = _names[dtype] = str(dtype).removeprefix("torch.")
    return found


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype of a name.  Pairs of 4 bits have torch's packed dtype, or are bytes."""
    found: torch.dtype = getattr(torch, f"{name}_x2" if name in PACKED else name, torch.uint8)
    return found


def cast_of(text: str | None) -> Scale | None:
    """The cast that the operators are given as a text: None, or `Scale.text`."""
    if text is None or text == "amax":
        return as_cast(text)
    try:
        given = json.loads(text, object_pairs_hook=_halves)
    except (ValueError, RecursionError):
        raise PlanError(
            f"cast: expected 'amax', or JSON such as 0.5, [0.5, 0.25] or {{\"k\": 0.5, \"v\": 0.25}}, got {quoted(text)}"
        ) from None
    return Scale(**given) if isinstance(given, dict) else Scale(given)


def _halves(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The scales of K and of V in the text of a cast."""
    found = dict(pairs)
    if len(pairs) != 2 or found.keys() != {"k", "v"} or None in found.values():  # Scale would take None for its default
        raise ValueError
    return found


def face_of(
    operator: str, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None, *names: str,
    cast: str | None = None,
) -> Face:  # fmt: skip
    """The face of a call; one of its two lists has a tensor.  Without `out` the operator makes the outputs."""
    first = tensors[0] if tensors or not out else out[0]
    other = out[0].dtype if out else None if cast is not None and out is None else first.dtype
    key = (*names, cast, first.dtype, other, first.device)
    found = _faces.get(key)
    if found is None:
        if len(_faces) >= _MOST_SIZES:
            _faces.clear()
        found = _faces[key] = Face(operator, names, (first.dtype, other), first.device, cast)  # type: ignore[arg-type]
    return found


def remembered(key: Any, batch: Batch) -> Batch:
    """Store the batch in `KNOWN` under this key, and return it."""
    if len(KNOWN) >= _MOST_SIZES:
        KNOWN.clear()
    KNOWN[key] = batch
    return batch


def _seen(tensor: torch.Tensor) -> Array:
    """A tensor's description for the contract; a fake tensor has no address."""
    if tensor.layout is not torch.strided:
        raise BindError(f"expected strided tensors, got one of layout {_name_of(tensor.layout)}; call .to_dense()")
    size = tensor.element_size()
    real = tensor.device.type in ("cpu", "cuda") and not is_fake(tensor)
    shape, strides = tuple(tensor.shape), tuple(stride * size for stride in tensor.stride())
    if real and not has_memory(tensor, tensor.data_ptr(), span(shape, strides, size)):
        raise BindError(f"a tensor of shape {shape} has less memory than that: its storage was freed or resized; pass a new tensor")
    return Array(
        tensor.data_ptr() if real else 0, shape, strides, dtype_name(tensor.dtype), str(tensor.device), False,
        tensor.storage_offset(),
    )  # fmt: skip


def _name_of(layout: Any) -> str:
    return str(layout).removeprefix("torch.")


def is_fake(tensor: torch.Tensor) -> bool:
    """True for a compiler's tensor, which has no memory."""
    return isinstance(tensor, torch._subclasses.FakeTensor)


def count_blocks(who: Caller, side: Side, tensors: Sequence[torch.Tensor]) -> Size:
    """The number of blocks that a list of tensors holds."""
    if side.arrays_a_block and len(tensors) % side.arrays_a_block == 0:
        return len(tensors) // side.arrays_a_block
    return side.blocks(who, [tensor.shape for tensor in tensors[:1]] + [()] * (len(tensors) - 1))


def table_of(
    who: Caller, tensors: Sequence[torch.Tensor], sized: Sized, elements: Any, face: Face, dtype: str
) -> Table:
    """The addresses of correct tensors.  They are checked in C; if something is wrong, one by one in Python."""
    found = _core.strided_tensors(tensors, sized.arrays, elements, sized.which, dtype, face.index)
    if found is not None:
        return found
    seen = require_all(who, tensors, sized, face)
    addresses = np.array([array.address for array in seen], np.uint64)
    bits = int(np.bitwise_or.reduce(addresses)) | 16
    return _core.Table(addresses, face.index, upload=False), bits & -bits


def plain_table(
    _: Caller, tensors: Sequence[torch.Tensor], sized: Sized, elements: Any, face: Face, dtype: str
) -> Table | None:
    """The addresses of correct tensors without a subclass that autograd need not know of; else None.

    One property is not checked, as it would cost as much as all others: whether a tensor is ``torch._neg_view`` of another.  Those
    that PyTorch creates, imaginary parts of conjugates, have strides that no layout has.
    """
    return _core.strided_tensors(
        tensors, sized.arrays, elements, sized.which, dtype, face.index, KINDS, not torch.is_grad_enabled()
    )


def require_all(who: Caller, tensors: Sequence[torch.Tensor], sized: Sized, face: Face) -> list[Array]:
    """Check tensors one by one.  Raises an error that names the wrong one."""
    seen = [_seen(tensor) for tensor in tensors]
    if seen:
        require_device(who(0), seen[0].device, "input #0", str(face.device))
    if all(type(n) is int for one in seen for n in (*one.shape, *one.strides)):  # symbols of a compiler fit nothing
        side = sized.side
        who = who._replace(fitting=lambda: names_of_strides(seen, side.shape, side.layout.name))
    require(who, seen, sized)
    return seen


def wants_gradient(*lists: Sequence[torch.Tensor]) -> bool:
    """True if a tensor requires a gradient.  A compiler can trace this function."""
    return any(tensor.requires_grad for tensors in lists for tensor in tensors)


# The function that torch.library uses; older versions have only the slow one.
any_requires_grad = getattr(torch._C, "any_requires_grad", wants_gradient)


def raise_named(operator: str, error: KvbmError) -> NoReturn:
    """The error with the operator's name; a CUDA call that failed as the framework's exception."""
    if isinstance(error, CudaError) and not isinstance(error, CudaUnavailableError | AcceleratorError):
        raise AcceleratorError(f"{operator}: {error}", code=error.code, name=error.name) from error
    raise named(operator, error)
