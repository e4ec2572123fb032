"""The operators ``kvbm::convert`` and ``kvbm::convert_``: their functions for real tensors, for fake tensors, and for gradients.

They are defined with `torch.library.Library`, because the wrappers of ``custom_op`` cost 12 to 28 µs per call.  Each has a twin
with a leading underscore that autograd ignores: compiled code calls it if no gradient is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from .. import _core
from ..errors import BindError, KvbmError
from ..memory.array_checks import Caller, block_shape, require_device, side_of
from ..memory.array_info import describe
from ..system.locks import Lock
from .batches import (
    KNOWN,
    Batch,
    Face,
    Look,
    Table,
    any_requires_grad,
    count_blocks,
    dtype_name,
    face_of,
    is_fake,
    raise_named,
    remembered,
    require_all,
    table_of,
)

#: Size of the cache of pools for copies with block ids on the GPU.
_MOST_ROUTES = 64

# ---- kvbm::convert ---------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("kvbm", "DEF")
_STRIDES = "needs_exact_strides" if hasattr(torch.Tag, "needs_exact_strides") else "needs_fixed_stride_order"
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, _STRIDES))
_INPUT, _OUTPUT = Caller("convert", "input"), Caller("convert", "output")
_INPUT_, _OUTPUT_ = Caller("convert_", "input"), Caller("convert_", "output")

for _twin in ("", "_"):
    _LIBRARY.define(
        f"{_twin}convert(Tensor[] tensors, str src, str dst, str shape, str? cast=None) -> Tensor[]", tags=_TAGS
    )


#: The outputs of a call: None where the operator makes them.
_Out = Sequence[torch.Tensor] | None


def _batch(tensors: Sequence[torch.Tensor], out: _Out, src: str, dst: str, shape: str, cast: str | None = None) -> Batch:
    who = _INPUT if out is None else _INPUT_
    face = face_of(who.operator, tensors, out, src, dst, shape, cast=cast)
    blocks = count_blocks(who, face.src, tensors)
    return face.batch(blocks, blocks if out is None else count_blocks(_OUTPUT_, face.dst, out))


def _known(tensors: Sequence[torch.Tensor], out: _Out, src: str, dst: str, shape: str, cast: str | None) -> Batch:
    if not tensors or (out is not None and not out):
        return _batch(tensors, out, src, dst, shape, cast)
    first, into = tensors[0], () if out is None else (out[0].dtype, out[0].shape, len(out))
    key = (src, dst, shape, cast, first.dtype, first.device, first.shape, len(tensors), *into)
    return KNOWN.get(key) or remembered(key, _batch(tensors, out, src, dst, shape, cast))


def run(
    tensors: Sequence[torch.Tensor], src: str, dst: str, shape: str, cast: str | None = None, look: Look = table_of
) -> list[torch.Tensor] | None:
    """Convert without the dispatcher.  None, and nothing is done, if `look` refuses the tensors."""
    try:
        batch = _known(tensors, None, src, dst, shape, cast)
        face = batch.face
        if batch.src_blocks == 0 and look is table_of:
            require_all(_INPUT, tensors, batch.src, face)
            return batch.outputs()
        source = look(_INPUT, tensors, batch.src, batch.src_elements, face, face.dtypes[0])
        if source is None:
            return None
        out = batch.outputs()
        if cast is not None:
            face.require_formats("convert", tensors, out)
        target = table_of(_OUTPUT, out, batch.dst, batch.dst_elements, face, face.dtypes[1])
        batch.run(source, target, _core.Pairs(None, None, batch.src_blocks, batch.dst_blocks))
        return out
    except KvbmError as error:
        raise_named("convert", error)


def _fake_convert(
    tensors: list[torch.Tensor], src: str, dst: str, shape: str, cast: str | None = None
) -> list[torch.Tensor]:
    try:
        batch = _batch(tensors, None, src, dst, shape, cast)
        require_all(_INPUT, tensors, batch.src, batch.face)
        out = batch.outputs()
        if cast is not None:
            batch.face.require_formats("convert", tensors, out)
        return out
    except KvbmError as error:
        raise_named("convert", error)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    """Save the names for the backward pass, the inverse permutation.  No tensor is kept."""
    tensors, src, dst, shape, *rest = inputs  # torch drops an argument that is its default, and may put it back
    cast = rest[0] if rest else None
    face = face_of("convert", tensors, None, src, dst, shape, cast=cast)
    planes = next((side for side in (face.src, face.dst) if side.layout.planes), None)
    why = ""
    if cast is not None:
        why = ", and a cast has none; call .detach()"
    elif planes is not None:
        why = f", and {planes} has planes of several dtypes, which have none; call .detach()"
    elif face.hides_gradients:
        why = f", but the shape reads it as {face.shape.dtype}, and integers have none; pass dtype={face.dtypes[0]}, or .detach()"
    if why:
        index = next((i for i, tensor in enumerate(tensors) if tensor.requires_grad), 0)
        raise BindError(f"convert: input #{index} requires a gradient{why}")
    ctx.names, ctx.num_inputs = (dst, src, shape), len(tensors)
    ctx.outputs = [(one.shape, one.stride()) for one in output]
    ctx.set_materialize_grads(False)
    if not torch.compiler.is_compiling() and output and not any(map(is_fake, output[:1])):
        _prime(output, *ctx.names)


def _prime(tensors: Sequence[torch.Tensor], src: str, dst: str, shape: str) -> None:
    """Plan the backward pass now, so that the first one takes no longer than the others."""
    batch = _batch(tensors, None, src, dst, shape)
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
        else:  # such as the expanded gradients of sum(): make them contiguous for the operator
            empty = torch.empty_strided(shape, strides, dtype=grad.dtype, device=grad.device)
            whole.append(empty.copy_(grad))
    again = CONVERT if torch.is_grad_enabled() else PLAIN  # a second-order gradient may be needed, or not
    return again(whole, *ctx.names), None, None, None


# ---- kvbm::convert_ --------------------------------------------------------------------------------------------------

for _twin in ("", "_"):
    _LIBRARY.define(
        f"{_twin}convert_(Tensor[] tensors, Tensor(a!)[] out, str src, str dst, str shape, Tensor? src_ids=None, "
        "Tensor? dst_ids=None, str? cast=None) -> ()",
        tags=_TAGS,
    )


def _require_ids(face: Face, *ids: torch.Tensor | None) -> None:
    for what, given in zip(("src_ids", "dst_ids"), ids, strict=True):
        if given is None:
            continue
        if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
            raise BindError(
                f"convert_: {what}: expected one axis of int32 or int64, got shape {tuple(given.shape)} of "
                f"{dtype_name(given.dtype)}"
            )
        if not given.is_cpu:
            require_device(f"convert_: {what}", str(given.device), "input #0", str(face.device))


def run_(
    tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor], src: str, dst: str, shape: str,
    src_ids: torch.Tensor | None = None, dst_ids: torch.Tensor | None = None, cast: str | None = None,
    look: Look = table_of,
) -> bool:  # fmt: skip
    """As `run`, into existing tensors.  False if `look` refuses the tensors."""
    try:
        batch = _known(tensors, out, src, dst, shape, cast)
        face = batch.face
        _require_ids(face, src_ids, dst_ids)
        if (batch.src_blocks == 0 or batch.dst_blocks == 0) and look is table_of:
            require_all(_INPUT_, tensors, batch.src, face)
            require_all(_OUTPUT_, out, batch.dst, face)
            _core.Pairs(src_ids, dst_ids, batch.src_blocks, batch.dst_blocks, device=face.index)
            return True
        source = look(_INPUT_, tensors, batch.src, batch.src_elements, face, face.dtypes[0])
        target = source and look(_OUTPUT_, out, batch.dst, batch.dst_elements, face, face.dtypes[1])
        if source is None or target is None:
            return False
        if face.has_planes or cast is not None:
            face.require_formats("convert_", tensors, out)
        _fill(batch, tensors, out, source, target, src_ids, dst_ids)
        return True
    except KvbmError as error:
        raise_named("convert_", error)


def _run_(*given: Any) -> None:
    run_(*given)


def _fill(
    batch: Batch, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor], source: Table, target: Table,
    src_ids: torch.Tensor | None, dst_ids: torch.Tensor | None,
) -> None:  # fmt: skip
    if (src_ids is not None and src_ids.is_cuda) or (dst_ids is not None and dst_ids.is_cuda):
        stream = torch.cuda.current_stream(batch.face.device)
        _note(_route(batch, tensors, out, source, target).copy(src_ids, dst_ids, stream), batch.face.device)
    else:
        same = batch.shares_blocks(source, target, tensors, out)
        batch.run(source, target, _core.Pairs(src_ids, dst_ids, batch.src_blocks, batch.dst_blocks, same))
    # Tell autograd that they were written: a backward pass that saved one of them then raises an error.
    torch.autograd.graph.increment_version(out)


def _fake_convert_(
    tensors: list[torch.Tensor], out: list[torch.Tensor], src: str, dst: str, shape: str,
    src_ids: torch.Tensor | None = None, dst_ids: torch.Tensor | None = None, cast: str | None = None,
) -> None:  # fmt: skip
    try:
        batch = _batch(tensors, out, src, dst, shape, cast)
        _require_ids(batch.face, src_ids, dst_ids)
        require_all(_INPUT_, tensors, batch.src, batch.face)
        require_all(_OUTPUT_, out, batch.dst, batch.face)
        if batch.face.has_planes or cast is not None:
            batch.face.require_formats("convert_", tensors, out)
        if src_ids is not None and dst_ids is not None:  # their sizes may be symbols; `_core.Pairs` checks real ids
            torch._check(
                src_ids.shape[0] == dst_ids.shape[0],
                lambda: "convert_: ids: expected as many source as destination ids",
            )
    except KvbmError as error:
        raise_named("convert_", error)


def _refuse_gradients(
    tensors: list[torch.Tensor], out: list[torch.Tensor], src: str, dst: str, shape: str, *rest: Any
) -> None:
    """Called by autograd.  Raises an error if a tensor requires a gradient, as the operator has none."""
    if torch.is_grad_enabled() and any_requires_grad(tensors, out):
        for what, given in (("input", tensors), ("output", out)):
            for index, tensor in enumerate(given):
                if tensor.requires_grad:
                    raise BindError(
                        f"convert_: {what} #{index} requires a gradient, and an operator that writes into tensors has none; use "
                        "kvbm.torch.convert, or torch.no_grad()"
                    )
    PLAIN_(tensors, out, src, dst, shape, *rest)


# ---- block ids on the GPU --------------------------------------------------------------------------------------------


_Route = _core.Route
_routes: OrderedDict[Any, _Route] = OrderedDict()
_routes_lock = Lock()

#: Copies whose ids `check_ids` has not checked yet: running copies, copies in graphs, and copies with wrong ids.
_unasked: list[tuple[_core.Done, torch.device]] = []


def _note(done: _core.Done, device: torch.device) -> None:
    with _routes_lock:
        _unasked.append((done, device))
        if len(_unasked) > _MOST_ROUTES:
            _unasked[:] = [one for one in _unasked if one[0].captured or one[0].is_wrong or not one[0].query()]


def _route(
    batch: Batch, tensors: Sequence[torch.Tensor], out: Sequence[torch.Tensor], source: Table, target: Table
) -> _Route:
    """The route for these addresses, from the cache or new.  Copies keep their route while they are in `_unasked`."""
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
    """Wait for the copies that had block ids on the GPU, and raise an error if an id was out of range.

    An id on the GPU cannot be checked before the copy.  The kernel skips a pair with an id that is out of range.  For graphs, this
    waits for the current stream: replay them on that stream, or make it wait for the replays.

    Raises
    ------
    BindError
        An id was out of range.  The message has the position of the pair in the first such copy.  The next call reports the next
        copy.
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
        raise_named("convert_", error)


# ---- no tensors, or unsupported ones ---------------------------------------------------------------------------------


def _refuse(who: Caller, tensors: Sequence[torch.Tensor], *names: str) -> None:
    """Raise an error, unless there are no tensors because there are no blocks, and both layouts have one tensor per block."""
    try:
        for index, tensor in enumerate(tensors):
            describe(tensor, who(index))
        if tensors:
            raise BindError(f"{who.operator}: expected plain tensors of the CPU or of a CUDA GPU")
        shape = block_shape(names[2], "uint8")
        for what, name in zip(("input", "output"), names, strict=False):
            side = side_of(name, shape)
            if not side.arrays_a_block:
                raise BindError(
                    f"{what}s: {side} expects {side.count} arrays, got none; for no blocks pass arrays with 0 blocks, which give "
                    "the device"
                )
    except KvbmError as error:
        raise_named(who.operator, error)


def _convert_elsewhere(tensors: list[torch.Tensor], *names: str) -> list[torch.Tensor]:
    _refuse(_INPUT, tensors, *names)
    return []


def _convert_elsewhere_(tensors: list[torch.Tensor], out: list[torch.Tensor], *names: Any) -> None:
    _refuse(_INPUT_ if tensors else _OUTPUT_, [*tensors, *out], *names[:3])


# ---- registration ----------------------------------------------------------------------------------------------------

for _twin in ("", "_"):
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(f"{_twin}convert", run, _key)
        _LIBRARY.impl(f"{_twin}convert_", _run_, _key)
    _LIBRARY.impl(f"{_twin}convert", _convert_elsewhere, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{_twin}convert_", _convert_elsewhere_, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvbm::{_twin}convert", _fake_convert, lib=_LIBRARY)
    torch.library.register_fake(f"kvbm::{_twin}convert_", _fake_convert_, lib=_LIBRARY)
torch.library.register_autograd("kvbm::convert", _adjoint, setup_context=_remember, lib=_LIBRARY)
_LIBRARY.impl("convert_", _refuse_gradients, "Autograd")
CONVERT, CONVERT_ = torch.ops.kvbm.convert.default, torch.ops.kvbm.convert_.default
PLAIN, PLAIN_ = torch.ops.kvbm._convert.default, torch.ops.kvbm._convert_.default
