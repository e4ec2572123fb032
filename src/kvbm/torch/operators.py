"""The operators ``kvbm::convert`` and ``kvbm::convert_``: what the dispatcher calls, for real tensors, fake ones, and gradients.

They are defined through `torch.library.Library` and not through ``custom_op``, whose wrappers cost 12 to 28 µs a call.  Each
has a twin with an underscore in front, which autograd does not look at: compiled code calls it where no gradient is wanted.
The functions call neither where the dispatcher would only carry the tensors over, one by one (`_nobody_listens`).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np
import torch

from .. import _core
from ..contract import (
    Caller,
    Seen,
    Side,
    Size,
    Sized,
    block_shape,
    layout_name,
    named,
    reads_as,
    require,
    require_copy,
    require_device,
    require_dtype,
    shape_text,
    side_of,
)
from ..errors import BindError, CudaError, CudaUnavailableError, DTypeError, KvbmError
from ..planner import plan
from ..pool import Array, Pool
from ..shapes import ITEMSIZE, PACKED, BlockShape
from ..transfer import prepare, require_disjoint, torch_stream
from .fences import fence, keep

__all__ = ["AcceleratorError", "check_ids", "convert", "convert_", "reinterpret", "tensors"]

_RuntimeError: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)  # torch 2.8 and newer

#: Batches of block ids on the GPU whose pools are remembered.
_MOST_ROUTES = 64
_MOST_SIZES = 1024


class AcceleratorError(CudaError, _RuntimeError):  # type: ignore[misc, valid-type]
    """A CUDA call that failed inside an operator: PyTorch's ``AcceleratorError``, and kvbm's `CudaError`.

    Attributes
    ----------
    code, error_code : int
        The ``CUresult``.
    name : str
        Its name.
    """

    def __init__(self, message: str, *, code: int = 0, name: str = "") -> None:
        super().__init__(message, code=code, name=name)
        self.error_code = code


# ---- what a call needs to know, remembered ---------------------------------------------------------------------------


class _Face:
    """Two layouts, a block shape, dtypes and a device: everything about a call but its number of blocks."""

    def __init__(
        self, operator: str, names: tuple[str, str, str], dtypes: tuple[torch.dtype, torch.dtype], device: torch.device
    ) -> None:
        src, dst, text = names
        self.dtypes, self.device = (_name(dtypes[0]), _name(dtypes[1])), device
        self.torch_dtype = dtypes[0]
        self.index = (device.index or 0) if device.type == "cuda" else -1
        self.shape = block_shape(text, self.dtypes[0])
        self.src, self.dst = side_of(src, self.shape), side_of(dst, self.shape)
        if self.src.layout.planes or self.dst.layout.planes:  # dtypes of their own, which the gates compare
            require_copy(self.src, self.dst)
        else:
            for what, dtype in zip(("input", "output"), self.dtypes, strict=True):
                require_dtype(f"{operator}: {what} #0", dtype, self.shape.dtype)
        #: Whether values that have gradients are read as integers, which have none.
        self.hides_gradients = dtypes[0].is_floating_point and self.shape.dtype not in _FLOATS
        self._batches: dict[tuple[int, int], _Batch] = {}

    def empty(self, kind: tuple[tuple[int, ...], tuple[int, ...], str, int]) -> torch.Tensor:
        """A tensor of a kind: of its own dtype, or else that of the inputs."""
        shape, strides, dtype, _ = kind
        return torch.empty_strided(
            shape, strides, dtype=_torch_dtype(dtype) if dtype else self.torch_dtype, device=self.device
        )

    def batch(self, src_blocks: Size, dst_blocks: Size) -> _Batch:
        if not (isinstance(src_blocks, int) and isinstance(dst_blocks, int)):
            return _Batch(self, src_blocks, dst_blocks)
        found = self._batches.get((src_blocks, dst_blocks))
        if found is None:
            if len(self._batches) >= _MOST_SIZES:
                self._batches.clear()
            found = self._batches[src_blocks, dst_blocks] = _Batch(self, src_blocks, dst_blocks)
        return found


_FLOATS = frozenset(name for name in ITEMSIZE if "float" in name)


class _Batch:
    """A face with its numbers of blocks: what the tensors must be, and the launches."""

    def __init__(self, face: _Face, src_blocks: Size, dst_blocks: Size) -> None:
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
            if first.is_contiguous():  # then a tensor like it has the same strides, and is made in half the time
                return [first, *[torch.empty_like(first) for _ in range(count - 1)]]
        return [face.empty(kinds[which[i] if which else 0]) for i in range(count)]

    def copies(self, src_alignment: int, dst_alignment: int) -> tuple[_core.Copy, ...]:
        found = self._copies.get((src_alignment, dst_alignment))
        if found is None:
            blocks = (self.src_blocks, self.dst_blocks)
            made = plan(self.face.src.layout, self.face.dst.layout, self.face.shape, num_blocks=blocks)
            found = tuple(prepare(made, src_alignment, dst_alignment, device=self.face.index))
            self._copies[src_alignment, dst_alignment] = found
        return found

    def run(self, src: _Table, dst: _Table, pairs: _core.Pairs) -> None:
        """Copy: on the CPU now, on a GPU in the order of the current stream."""
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
        self, src: _Table, dst: _Table, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor]
    ) -> bool:
        """Whether inputs and outputs are the same blocks; an error where they overlap otherwise."""
        if not _core.tables_clash(src[0], self._nbytes[0], dst[0], self._nbytes[1]):
            return False
        pools = self.pools(tensors, out)
        pools[1].require_distinct()
        return require_disjoint(*pools)

    def pools(self, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> tuple[Pool, Pool]:
        """The slow and thorough way of looking at both sides."""
        face = self.face
        made = []
        for side, given in ((self.src, tensors), (self.dst, out)):
            found = [
                Array(*_seen(tensor)[:3], side.dtype(index), str(face.device), False)
                for index, tensor in enumerate(given)
            ]
            made.append(Pool.trusted(side.side.layout, face.shape, found, given))
        return made[0], made[1]


_Table = tuple[_core.Table, int]
_KINDS = frozenset((torch.Tensor, torch.nn.Parameter))
_faces: dict[Any, _Face] = {}
_batches: dict[Any, _Batch] = {}  # by what real tensors have; faces are for symbols, too
_names: dict[torch.dtype, str] = {}


def _name(dtype: torch.dtype) -> str:
    found = _names.get(dtype)
    if found is None:
        found = _names[dtype] = str(dtype).removeprefix("torch.")
    return found


def _face(operator: str, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor], *names: str) -> _Face:
    first = tensors[0] if tensors else out[0]
    other = out[0].dtype if out else first.dtype
    key = (*names, first.dtype, other, first.device)
    found = _faces.get(key)
    if found is None:
        if len(_faces) >= _MOST_SIZES:
            _faces.clear()
        found = _faces[key] = _Face(operator, names, (first.dtype, other), first.device)  # type: ignore[arg-type]
    return found


def _remembered(key: Any, batch: _Batch) -> _Batch:
    if len(_batches) >= _MOST_SIZES:
        _batches.clear()
    _batches[key] = batch
    return batch


def _seen(tensor: torch.Tensor) -> Seen:
    """A tensor as the contract looks at it; a fake one has no address."""
    if tensor.layout is not torch.strided:
        raise BindError(f"expected strided tensors, got one of layout {_name_of(tensor.layout)}; call .to_dense()")
    size = tensor.element_size()
    real = tensor.device.type in ("cpu", "cuda") and not _is_fake(tensor)
    return Seen(
        tensor.data_ptr() if real else 0,
        tuple(tensor.shape),
        tuple(stride * size for stride in tensor.stride()),
        _name(tensor.dtype),
        str(tensor.device),
        False,
        tensor.storage_offset(),
    )


def _name_of(layout: Any) -> str:
    return str(layout).removeprefix("torch.")


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def _blocks(who: Caller, side: Side, tensors: Sequence[torch.Tensor]) -> Size:
    if side.arrays_a_block and len(tensors) % side.arrays_a_block == 0:
        return len(tensors) // side.arrays_a_block
    return side.blocks(who, [tensor.shape for tensor in tensors[:1]] + [()] * (len(tensors) - 1))


def _table(
    who: Caller, tensors: Sequence[torch.Tensor], sized: Sized, elements: Any, face: _Face, dtype: str
) -> _Table:
    """The addresses of tensors that are as they must be: looked at from C, and one by one where something is not."""
    found = _core.strided_tensors(tensors, sized.arrays, elements, sized.which, dtype, face.index)
    if found is not None:
        return found
    seen = _require(who, tensors, sized, face)
    addresses = np.array([array.address for array in seen], np.uint64)
    bits = int(np.bitwise_or.reduce(addresses)) | 16
    return _core.Table(addresses, face.index, upload=False), bits & -bits


def _plain_table(
    tensors: Sequence[torch.Tensor], sized: Sized, elements: Any, face: _Face, dtype: str
) -> _Table | None:
    """The addresses of tensors that are as they must be, of no subclass, and of which autograd need not know.

    One thing is not asked, as it would cost as much as all the rest: whether a tensor is ``torch._neg_view`` of another.  What
    PyTorch itself makes of that kind, imaginary parts of conjugates, has strides that no layout has.
    """
    return _core.strided_tensors(
        tensors, sized.arrays, elements, sized.which, dtype, face.index, _KINDS, not torch.is_grad_enabled()
    )


def _require(who: Caller, tensors: Sequence[torch.Tensor], sized: Sized, face: _Face) -> list[Seen]:
    seen = [_seen(tensor) for tensor in tensors]
    if seen:
        require_device(who(0), seen[0].device, "input #0", str(face.device))
    require(who, seen, sized)
    return seen


def _wants_gradient(*lists: Sequence[torch.Tensor]) -> bool:
    return any(tensor.requires_grad for tensors in lists for tensor in tensors)


# What torch.library itself asks; older versions have only the slow way.
_any_requires_grad = getattr(torch._C, "_any_requires_grad", _wants_gradient)


def _raise(operator: str, error: KvbmError) -> NoReturn:
    """The error with the operator's name; a CUDA call that failed as the framework's exception."""
    if isinstance(error, CudaError) and not isinstance(error, CudaUnavailableError | AcceleratorError):
        raise AcceleratorError(f"{operator}: {error}", code=error.code, name=error.name) from error
    raise named(operator, error)


# ---- kvbm::convert ---------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("kvbm", "DEF")
_STRIDES = "needs_exact_strides" if hasattr(torch.Tag, "needs_exact_strides") else "needs_fixed_stride_order"
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, _STRIDES))
_INPUT, _OUTPUT = Caller("convert", "input"), Caller("convert", "output")

for _twin in ("", "_"):
    _LIBRARY.define(f"{_twin}convert(Tensor[] tensors, str src, str dst, str shape) -> Tensor[]", tags=_TAGS)


def _batch(tensors: Sequence[torch.Tensor], src: str, dst: str, shape: str) -> _Batch:
    face = _face("convert", tensors, (), src, dst, shape)
    blocks = _blocks(_INPUT, face.src, tensors)
    return face.batch(blocks, blocks)


def _known(tensors: Sequence[torch.Tensor], src: str, dst: str, shape: str) -> _Batch:
    """The batch of real tensors, by what was passed."""
    if not tensors:
        return _batch(tensors, src, dst, shape)
    first = tensors[0]
    key = (src, dst, shape, first.dtype, first.device, first.shape, len(tensors))
    return _batches.get(key) or _remembered(key, _batch(tensors, src, dst, shape))


def _convert(tensors: list[torch.Tensor], src: str, dst: str, shape: str) -> list[torch.Tensor]:
    try:
        batch = _known(tensors, src, dst, shape)
        if batch.src_blocks == 0:
            _require(_INPUT, tensors, batch.src, batch.face)
            return batch.outputs()
        source = _table(_INPUT, tensors, batch.src, batch.src_elements, batch.face, batch.face.dtypes[0])
        return _filled(batch, source)
    except KvbmError as error:
        _raise("convert", error)


def _convert_plain(tensors: Sequence[torch.Tensor], src: str, dst: str, shape: str) -> list[torch.Tensor] | None:
    """The same without a dispatcher, or None where it must be asked or something is wrong."""
    try:
        batch = _known(tensors, src, dst, shape)
        source = _plain_table(tensors, batch.src, batch.src_elements, batch.face, batch.face.dtypes[0])
        return None if source is None else _filled(batch, source)
    except KvbmError as error:
        _raise("convert", error)


def _filled(batch: _Batch, source: _Table) -> list[torch.Tensor]:
    out = batch.outputs()
    batch.run(
        source,
        _table(_OUTPUT, out, batch.dst, batch.dst_elements, batch.face, batch.face.dtypes[0]),
        _core.Pairs(None, None, batch.src_blocks, batch.dst_blocks),
    )
    return out


def _fake_convert(tensors: list[torch.Tensor], src: str, dst: str, shape: str) -> list[torch.Tensor]:
    try:
        batch = _batch(tensors, src, dst, shape)
        _require(_INPUT, tensors, batch.src, batch.face)
        return batch.outputs()
    except KvbmError as error:
        _raise("convert", error)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    """For the adjoint of a permutation, which is its inverse: the names suffice, no tensor is kept."""
    tensors, src, dst, shape = inputs
    face = _face("convert", tensors, (), src, dst, shape)
    for side in (face.src, face.dst):
        if side.layout.planes:
            index = next((i for i, tensor in enumerate(tensors) if tensor.requires_grad), 0)
            raise BindError(
                f"convert: input #{index} requires a gradient, and {side} has planes of several dtypes, which have none; call "
                ".detach()"
            )
    if face.hides_gradients:
        index = next((i for i, tensor in enumerate(tensors) if tensor.requires_grad), 0)
        raise BindError(
            f"convert: input #{index} requires a gradient, and the shape reads it as {face.shape.dtype}: integers have none; "
            f"pass dtype={face.dtypes[0]}, or .detach()"
        )
    ctx.names, ctx.num_inputs = (dst, src, shape), len(tensors)
    ctx.outputs = [(one.shape, one.stride()) for one in output]
    ctx.set_materialize_grads(False)
    if not torch.compiler.is_compiling() and output and not any(map(_is_fake, output[:1])):
        _prime(output, *ctx.names)


def _prime(tensors: Sequence[torch.Tensor], src: str, dst: str, shape: str) -> None:
    """Plan the way back now, so that the first backward takes no longer than the others."""
    batch = _batch(tensors, src, dst, shape)
    if batch.src_blocks:
        for copy in batch.copies(16, 16):
            if batch.face.index >= 0:
                _core.warm(copy.kernel, batch.face.index)


def _adjoint(ctx: Any, grads: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    known = next((grad for grad in grads if grad is not None), None)
    if known is None:
        return [None] * ctx.num_inputs, None, None, None
    whole = []
    for grad, (shape, strides) in zip(grads, ctx.outputs, strict=True):
        if grad is None:
            empty = torch.empty_strided(shape, strides, dtype=known.dtype, device=known.device)
            whole.append(empty.zero_())
        elif grad.stride() == strides:
            whole.append(grad)
        else:  # such as the expanded ones of sum(): laid out as the operator wants them
            empty = torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device)
            whole.append(empty.copy_(grad))
    again = _CONVERT if torch.is_grad_enabled() else _PLAIN  # a gradient of the gradient may be wanted, or not
    return again(whole, *ctx.names), None, None, None


# ---- kvbm::convert_ --------------------------------------------------------------------------------------------------

for _twin in ("", "_"):
    _LIBRARY.define(
        f"{_twin}convert_(Tensor[] tensors, Tensor(a!)[] out, str src, str dst, str shape, Tensor? src_ids=None, "
        "Tensor? dst_ids=None) -> ()",
        tags=_TAGS,
    )
_INPUT_, _OUTPUT_ = Caller("convert_", "input"), Caller("convert_", "output")


def _batch_(tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor], src: str, dst: str, shape: str) -> _Batch:
    face = _face("convert_", tensors, out, src, dst, shape)
    return face.batch(_blocks(_INPUT_, face.src, tensors), _blocks(_OUTPUT_, face.dst, out))


def _known_(tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor], src: str, dst: str, shape: str) -> _Batch:
    if not tensors or not out:
        return _batch_(tensors, out, src, dst, shape)
    first, into, sizes = tensors[0], out[0], (len(tensors), len(out))
    key = (src, dst, shape, first.dtype, first.device, first.shape, into.dtype, into.shape, *sizes)
    return _batches.get(key) or _remembered(key, _batch_(tensors, out, src, dst, shape))


def _require_ids(face: _Face, *ids: torch.Tensor | None) -> None:
    for what, given in zip(("src_ids", "dst_ids"), ids, strict=True):
        if given is None:
            continue
        if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
            raise BindError(
                f"convert_: {what}: expected one axis of int32 or int64, got shape {tuple(given.shape)} of {_name(given.dtype)}"
            )
        if not given.is_cpu:
            require_device(f"convert_: {what}", str(given.device), "input #0", str(face.device))


def _convert_(
    tensors: list[torch.Tensor],
    out: list[torch.Tensor],
    src: str,
    dst: str,
    shape: str,
    src_ids: torch.Tensor | None = None,
    dst_ids: torch.Tensor | None = None,
) -> None:
    try:
        batch = _known_(tensors, out, src, dst, shape)
        face = batch.face
        _require_ids(face, src_ids, dst_ids)
        if batch.src_blocks == 0 or batch.dst_blocks == 0:
            _require(_INPUT_, tensors, batch.src, face)
            _require(_OUTPUT_, out, batch.dst, face)
            _core.Pairs(src_ids, dst_ids, batch.src_blocks, batch.dst_blocks, device=face.index)
            return
        source = _table(_INPUT_, tensors, batch.src, batch.src_elements, face, face.dtypes[0])
        target = _table(_OUTPUT_, out, batch.dst, batch.dst_elements, face, face.dtypes[1])
        _fill(batch, tensors, out, source, target, src_ids, dst_ids)
    except KvbmError as error:
        _raise("convert_", error)


def _convert_plain_(
    tensors: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    src: str,
    dst: str,
    shape: str,
    src_ids: torch.Tensor | None,
    dst_ids: torch.Tensor | None,
) -> bool:
    """The same without a dispatcher; False where it must be asked or something is wrong, and nothing is done."""
    try:
        batch = _known_(tensors, out, src, dst, shape)
        face = batch.face
        _require_ids(face, src_ids, dst_ids)
        source = _plain_table(tensors, batch.src, batch.src_elements, face, face.dtypes[0])
        target = source and _plain_table(out, batch.dst, batch.dst_elements, face, face.dtypes[1])
        if source is None or target is None:
            return False
        _fill(batch, tensors, out, source, target, src_ids, dst_ids)
        return True
    except KvbmError as error:
        _raise("convert_", error)


def _fill(
    batch: _Batch,
    tensors: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    source: _Table,
    target: _Table,
    src_ids: torch.Tensor | None,
    dst_ids: torch.Tensor | None,
) -> None:
    if (src_ids is not None and src_ids.is_cuda) or (dst_ids is not None and dst_ids.is_cuda):
        stream = torch.cuda.current_stream(batch.face.device)
        _note(_route(batch, tensors, out, source, target).copy(src_ids, dst_ids, stream), batch.face.device)
    else:
        same = batch.shares_blocks(source, target, tensors, out)
        batch.run(source, target, _core.Pairs(src_ids, dst_ids, batch.src_blocks, batch.dst_blocks, same))
    # Autograd is told that they were written: whoever saved one for a backward is told, too.
    torch.autograd.graph.increment_version(out)


def _fake_convert_(
    tensors: list[torch.Tensor],
    out: list[torch.Tensor],
    src: str,
    dst: str,
    shape: str,
    src_ids: torch.Tensor | None = None,
    dst_ids: torch.Tensor | None = None,
) -> None:
    try:
        batch = _batch_(tensors, out, src, dst, shape)
        _require_ids(batch.face, src_ids, dst_ids)
        _require(_INPUT_, tensors, batch.src, batch.face)
        _require(_OUTPUT_, out, batch.dst, batch.face)
        if (
            src_ids is not None and dst_ids is not None
        ):  # perhaps a compiler's symbols; real ids are looked at by `_core.Pairs`
            torch._check(
                src_ids.shape[0] == dst_ids.shape[0],
                lambda: "convert_: ids: expected as many source as destination ids",
            )
    except KvbmError as error:
        _raise("convert_", error)


def _refuse_gradients(
    tensors: list[torch.Tensor], out: list[torch.Tensor], src: str, dst: str, shape: str, *ids: torch.Tensor | None
) -> None:
    """What autograd calls: the operator has no gradient, so none may be asked for."""
    if torch.is_grad_enabled() and _any_requires_grad(tensors, out):
        for what, given in (("input", tensors), ("output", out)):
            for index, tensor in enumerate(given):
                if tensor.requires_grad:
                    raise BindError(
                        f"convert_: {what} #{index} requires a gradient, and an operator that writes into tensors has none; use "
                        "kvbm.torch.convert, or torch.no_grad()"
                    )
    _PLAIN_(tensors, out, src, dst, shape, *ids)


# ---- block ids on the GPU --------------------------------------------------------------------------------------------


_Route = _core.Route
_routes: OrderedDict[Any, _Route] = OrderedDict()
_routes_lock = threading.Lock()

#: Copies of which nobody has asked yet what their kernels noted: those in flight, those in graphs, and those that were wrong.
_unasked: list[tuple[_core.Done, torch.device]] = []


def _note(done: _core.Done, device: torch.device) -> None:
    with _routes_lock:
        _unasked.append((done, device))
        if len(_unasked) > _MOST_ROUTES:
            _unasked[:] = [one for one in _unasked if one[0].captured or one[0].is_wrong or not one[0].query()]


def _route(
    batch: _Batch, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor], source: _Table, target: _Table
) -> _Route:
    """The route for these addresses, made where it is not known.  Copies keep theirs, for as long as they are in `_unasked`."""
    key = (batch, tuple(tensor.data_ptr() for tensor in tensors), tuple(tensor.data_ptr() for tensor in out))
    found = _routes.get(key) or _Route(
        batch.face.index, source[0], target[0], batch.src_blocks, batch.dst_blocks,
        direct=batch.copies(source[1], target[1]), same_pool=batch.shares_blocks(source, target, tensors, out),
    )  # fmt: skip
    with _routes_lock:
        found = _routes.setdefault(key, found)
        _routes.move_to_end(key)
        while len(_routes) > _MOST_ROUTES:
            _routes.popitem(last=False)
    return found


def check_ids() -> None:
    """Wait for the copies that had block ids on the GPU, and raise what their kernels noted.

    An id on the GPU cannot be looked at before the copy.  One that is out of range is skipped; this says so afterwards.
    Of graphs the current stream is waited for: that of their replays, or one that waits for theirs.

    Raises
    ------
    BindError
        The position of a pair that named a block which is not there: of the first such copy, and at the next call of the
        next one.
    """
    with _routes_lock:
        asked = list(_unasked)
    try:
        for device in {device for done, device in asked if done.captured}:
            torch.cuda.current_stream(device).synchronize()
        for one in asked:
            one[0].synchronize()
            if not one[0].captured:
                with _routes_lock:
                    _unasked[:] = [other for other in _unasked if other is not one]
    except KvbmError as error:
        _raise("convert_", error)


# ---- registration ----------------------------------------------------------------------------------------------------

for _twin in ("", "_"):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(f"{_twin}convert", _convert, _key)
        _LIBRARY.impl(f"{_twin}convert_", _convert_, _key)
    torch.library.register_fake(f"kvbm::{_twin}convert", _fake_convert, lib=_LIBRARY)
    torch.library.register_fake(f"kvbm::{_twin}convert_", _fake_convert_, lib=_LIBRARY)
torch.library.register_autograd("kvbm::convert", _adjoint, setup_context=_remember, lib=_LIBRARY)
_LIBRARY.impl("convert_", _refuse_gradients, "Autograd")
_CONVERT, _CONVERT_ = torch.ops.kvbm.convert.default, torch.ops.kvbm.convert_.default
_PLAIN, _PLAIN_ = torch.ops.kvbm._convert.default, torch.ops.kvbm._convert_.default


# ---- the functions ---------------------------------------------------------------------------------------------------


def convert(
    tensors: Sequence[torch.Tensor] | torch.Tensor,
    src: str = "nhd",
    dst: str = "universal",
    shape: str | BlockShape = "",
    *,
    stream: Any = None,
) -> list[torch.Tensor]:
    """Convert blocks from one layout into new tensors of another: the operator ``kvbm::convert``.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        One an allocation of the source's layout, in table order, each shaped as its order says; on one device.  A tensor
        alone is a list of one.  Records of several planes are bytes, in any shape whose first axis is the blocks.
    src, dst : str
        Layouts, by name or by the path of a YAML file (which is read once in a process).
    shape : str or BlockShape
        As `kvbm.load_shape` reads it.  Sizes without a dtype (``"nl=2,no=2,nh=4,nt=16,hd=32"``) take the tensors'.
    stream : optional
        A stream to copy on, fenced on both sides (see `fence`).  Not given: torch's current one.  Not inside
        ``torch.compile``.

    Returns
    -------
    list of torch.Tensor
        One an allocation of the destination's layout, holding the same blocks in the same order; of the dtype of the inputs,
        or of its plane's where a layout has several.

    Raises
    ------
    BindError, DTypeError
        Tensors that do not fit: the sentence names the operator, the input and the remedy.
    LayoutError, PlanError, SpecError
        There is no copy between the two layouts, or no such layout or shape.
    AcceleratorError
        A CUDA call failed.

    Notes
    -----
    Gradients flow, to any order: the adjoint of a permutation is its inverse; not through layouts of several planes.
    Autocast leaves dtypes alone.

    Examples
    --------
    >>> import torch, kvbm.torch
    >>> layers = [torch.randn(2, 6, 16, 4, 8) for _ in range(3)]  # [l] o b t h d
    >>> blocks = kvbm.torch.convert(layers, "vllm/flash_attn_nhd", "universal", "nl=3,no=2,nh=4,nt=16,hd=8")
    >>> len(blocks), tuple(blocks[0].shape)  # [b] h l o t d
    (6, (4, 3, 2, 16, 8))
    """
    names = (layout_name("convert: src", src), layout_name("convert: dst", dst), shape_text("convert: shape", shape))
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if stream is None and _nobody_listens(tensors):
        out = _convert_plain(tensors, *names)
        if out is not None:
            return out
    given = _list("convert", "tensors", tensors)
    if torch.compiler.is_compiling():
        _refuse_stream("convert", stream)
    elif not given:
        return _nothing(names)
    elif stream is not None:
        with _named("convert"), fence(stream, *given):
            out = convert(given, *names)
        keep(out, torch.cuda.current_stream(given[0].device))
        return out
    operator = _CONVERT if _autograd_looks(given) else _PLAIN
    return list(operator(given, *names))


def convert_(
    tensors: Sequence[torch.Tensor] | torch.Tensor,
    out: Sequence[torch.Tensor] | torch.Tensor,
    src: str = "nhd",
    dst: str = "universal",
    shape: str | BlockShape = "",
    src_ids: Any = None,
    dst_ids: Any = None,
    *,
    stream: Any = None,
) -> None:
    """Convert blocks into tensors that are there already: the operator ``kvbm::convert_``.

    Parameters
    ----------
    tensors, out : sequence of torch.Tensor
        One an allocation of each layout, in table order, on one device.  Bits are copied, so one byte wide dtypes may
        differ where one of them is uint8 or int8.
    src, dst, shape, stream
        As for `convert`.
    src_ids, dst_ids : torch.Tensor or sequence of int, optional
        One axis of int32 or int64: block ``src_ids[i]`` is copied into block ``dst_ids[i]``; -1 skips a pair.  Not given:
        0, 1, 2, … on that side.  Ids on the CPU are checked, and may be changed at once.  Ids on the GPU are read when the
        kernel runs, so that a graph can be replayed with others; see `check_ids`.

    Raises
    ------
    BindError, DTypeError, LayoutError, PlanError, SpecError, AcceleratorError
        As `convert`; ids that are out of range or repeated, memory that overlaps, gradients.  Nothing was written.

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
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    if isinstance(out, torch.Tensor):
        out = [out]
    listed = [[one] for one in ids if one is not None]
    if stream is None and _nobody_listens(tensors, out, *listed) and _convert_plain_(tensors, out, *names, *ids):
        return
    given, into = _list("convert_", "tensors", tensors), _list("convert_", "out", out)
    if torch.compiler.is_compiling():
        _refuse_stream("convert_", stream)
    elif not given and not into:
        _nothing(names)
        return
    elif stream is not None:
        used = [*given, *into, *(one for one in ids if one is not None and one.is_cuda)]
        with _named("convert_"), fence(stream, *used):
            convert_(given, into, *names, *ids)
        return
    operator = _CONVERT_ if _autograd_looks(given, into) else _PLAIN_
    operator(given, into, *names, *ids)


def reinterpret(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same bytes as another dtype of one byte: fp8 as uint8 or int8, or back.  A view; no memory is touched.

    Raises
    ------
    DTypeError
        Another width, or two formats of fp8, whose values would not be the same.
    BindError
        A gradient is asked of integers.

    Examples
    --------
    >>> reinterpret(torch.tensor([0x38], dtype=torch.uint8), torch.float8_e4m3fn).float().tolist()
    [1.0]
    """
    if dtype.itemsize != 1 or tensor.dtype.itemsize != 1 or not reads_as(_name(tensor.dtype), _name(dtype)):
        raise DTypeError(
            f"reinterpret: expected dtypes of one byte, one of them uint8 or int8 at least, got {_name(tensor.dtype)} as "
            f"{_name(dtype)}; .to({dtype}) converts values"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise BindError(
            f"reinterpret: the tensor requires a gradient, and as {_name(dtype)} it has none; call .detach()"
        )
    return tensor.view(dtype)


def tensors(pool: Pool) -> list[torch.Tensor]:
    """A pool's arrays as tensors on the same memory, in table order; the pool's own GPU memory, too.

    Keep the pool open as long as they are used.

    Examples
    --------
    >>> import kvbm
    >>> shape = kvbm.BlockShape(nl=2, no=2, nh=4, nt=16, hd=8, dtype="bfloat16")
    >>> tensors(kvbm.Pool.allocate(kvbm.load("vllm/LBHNC"), shape, 6))[0].dtype
    torch.bfloat16
    """
    pool.require_open()
    kinds = [pool.resolved.kinds[kind].dtype for kind in pool.resolved.kind_of_entry]
    return [
        _tensor(array, pool.device).view(_torch_dtype(kind)) for array, kind in zip(pool.arrays, kinds, strict=True)
    ]


def _torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype of a name: pairs of 4 bits as torch has them, or as bytes."""
    found: torch.dtype = getattr(torch, f"{name}_x2" if name in PACKED else name, torch.uint8)
    return found


def _tensor(array: Any, device: str) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, np.ndarray):
        if array.dtype.isbuiltin != 1:  # those of ml_dtypes: their bits
            array = array.view(f"u{array.itemsize}")
        return torch.from_numpy(array)
    return torch.as_tensor(array, device=device)


def _list(operator: str, what: str, tensors: Any) -> list[torch.Tensor]:
    if not isinstance(tensors, (list, tuple)):
        raise BindError(f"{operator}: {what}: expected a list of tensors, got a {type(tensors).__name__}")
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise BindError(f"{operator}: {what}: #{index} is a {type(tensor).__name__}; expected a torch.Tensor")
    return list(tensors)


def _ids(what: str, ids: Any) -> torch.Tensor | None:
    if ids is None or isinstance(ids, torch.Tensor):
        return ids
    try:
        made = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BindError(f"convert_: {what}: expected block ids: {error}") from None
    return made.to(torch.int64) if made.numel() == 0 else made


def _listeners() -> tuple[Callable[[], Any], ...]:
    """Questions after whoever is called between an operator and its kernel: modes, tracers, torch.func, the profiler.

    PyTorch has no public names for them: where one is missing, somebody is taken to listen always.
    """
    names = (
        "_len_torch_dispatch_stack",
        "_len_torch_function_stack",
        "_functorch.peek_interpreter_stack",
        "_get_tracing_state",
        "_autograd._profiler_enabled",
    )
    try:
        return tuple(attrgetter(name)(torch._C) for name in names)
    except AttributeError:
        return (lambda: True,)


_LISTENERS = _listeners()


def _nobody_listens(*lists: Any) -> bool:
    """Whether the dispatcher would do no more than carry plain tensors to the kernel, which costs 0.1 to 0.2 µs each.

    What all the tensors are is asked later, in C.
    """
    if torch.compiler.is_compiling():
        return False
    for listens in _LISTENERS:
        if listens():
            return False
    return all(type(one) in (list, tuple) and one and type(one[0]) in _KINDS for one in lists)


def _autograd_looks(*lists: Sequence[torch.Tensor]) -> bool:
    """Whether the operator itself must be called: a gradient is wanted, or it goes into a file."""
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting() or (torch.is_grad_enabled() and _wants_gradient(*lists))
    return torch.is_grad_enabled() and bool(_any_requires_grad(*lists))


def _refuse_stream(operator: str, stream: Any) -> None:
    if stream is not None:
        raise BindError(f"{operator}: stream: inside torch.compile the compiler orders the work; leave stream out")


def _nothing(names: tuple[str, str, str]) -> list[torch.Tensor]:
    """No tensors: no blocks, where both layouts have a tensor a block."""
    shape = block_shape(names[2], "uint8")
    for what, name in zip(("input", "output"), names, strict=False):
        side = side_of(name, shape)
        if not side.arrays_a_block:
            raise BindError(
                f"convert: {what}s: {side} expects {side.count} arrays, got none; for no blocks pass arrays with 0 of them, "
                "which tell the device"
            )
    return []


class _named:  # noqa: N801  (used as a function)
    """Errors of a block carry the operator's name."""

    def __init__(self, operator: str) -> None:
        self.operator = operator

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, KvbmError):
            _raise(self.operator, error)
