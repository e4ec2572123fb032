"""Copy between an engine's paged blocks and LMCache's objects.  LMCache is not imported."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakIdKeyDictionary

from ... import _core
from ...copy.transfer import Transfer
from ...errors import BindError
from ...layout import spec as layouts
from ...layout.layout import Layout
from ...layout.shapes import BlockShape
from ...memory.array_info import View
from ...pool.pool import Pool

__all__ = ["FORMATS", "Copies", "Form"]

#: Most pairs of pools that are cached for later copies.
_MOST_PAIRS = 512


class Form(NamedTuple):
    """The shape of an engine's tensors."""

    table: str  # axes of the list of tensors, slowest first; empty for one tensor
    dims: str  # dimensions of a tensor.  ``s`` is the slots of all blocks; ``1`` is a dimension of one element.
    #: Bytes of a token's scale, if a block has all values first and then all scales; else 0.  In an object the scale of a token
    #: is behind its values, as LMCache's compiled kernels write it.
    scale: int = 0


#: Name of an ``EngineKVFormat`` → form.  If K and V of a head are adjacent, they are one plane: ``d`` has the elements of both.
FORMATS = {
    "NB_NL_TWO_BS_NH_HS": Form("", "b l o t h d"),
    "NB_NL_TWO_NH_BS_HS": Form("", "b l o h t d"),
    "NL_X_TWO_NB_BS_NH_HS": Form("l", "o b t h d"),
    "NL_X_TWO_NB_NH_BS_HS": Form("l", "o b h t d"),
    "NL_X_NB_TWO_BS_NH_HS": Form("l", "b o t h d"),
    "NL_X_NB_TWO_NH_BS_HS": Form("l", "b o h t d"),
    "TWO_X_NL_X_NBBS_NH_HS": Form("o l", "s h d"),
    "TWO_X_NL_X_NB_BS_NH_HS": Form("o l", "b t h d"),
    "NL_X_NB_BS_HS": Form("l", "b t d"),
    "NL_X_NBBS_ONE_HS": Form("l", "s 1 d"),
    "NL_X_NB_NH_BS_TWO_HS": Form("l", "b h t d"),
    "NL_X_NB_BS_NH_TWO_HS": Form("l", "b t h d"),
    "NL_X_NB_NH_BS_CS": Form("l", "b h t d"),
    "NL_X_NB_BS_NH_CS": Form("l", "b t h d"),
    "NL_X_NB_BS_NH_HS": Form("l", "b t h d"),
    "NL_X_NB_BSV_BSS": Form("l", "b t d", scale=4),
}

#: Bytes of a token where blocks have scales: LMCache itself tells this format from others by them.
_SCALED = 132


class _Memory(NamedTuple):
    """Arrays of one shape: their addresses, dimensions, sizes and strides (in elements)."""

    addresses: tuple[int, ...]
    table: str
    dims: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: int  # CUDA device, or -1 for the host
    scale: int  # as `Form.scale`


class Copies:
    """Copies between paged blocks and objects.  Pools on the same memory are cached for later copies.

    An object holds whole blocks: ``[2, layers, tokens, heads * size]``, or ``[layers, tokens, heads * size]`` for one plane.
    On a GPU copies are enqueued on torch's current stream.
    """

    def __init__(self) -> None:
        self._transfers = functools.lru_cache(_MOST_PAIRS)(_transfer)
        self._pointers: Any = WeakIdKeyDictionary()

    def copy(
        self, paged: Any, objects: Sequence[Any], block_ids: Any, device: torch.device, desc: Any, chunk: int,
        name: str, skip: int, *, to_objects: bool,
    ) -> None:  # fmt: skip
        """Copy blocks into objects, or back.

        `paged` is a tensor, a list of them or a tensor of pointers, on `device` and as `desc` says, LMCache's
        ``PageBufferShapeDesc``; `name` is that of the ``EngineKVFormat``.  `objects` are tensors, or addresses, of `chunk`
        tokens each.  `block_ids` are those of the first object, then of the next, and so on; the first `skip` of them are not
        copied.

        Raises `BindError` if the format is not known, or tensors or objects do not have it.
        """
        form = FORMATS.get(name)
        if form is None:
            raise BindError(f"LMCache: engine format {name}: expected one of {', '.join(FORMATS)}; where others lie is not known")
        tokens = int(desc.bs)
        if tokens < 1 or chunk < 1 or chunk % tokens or skip < 0:
            raise BindError(f"LMCache: expected objects of whole blocks, got {chunk} tokens and blocks of {tokens}, {skip} to skip")
        each = chunk // tokens
        memory = self._memory(paged, form, desc, name, -1 if device.type == "cpu" else device.index or 0)
        ids = block_ids if isinstance(block_ids, torch.Tensor) else torch.tensor(block_ids, dtype=torch.int64)
        ids = ids.to(torch.int64).reshape(-1)
        if len(ids) > each * len(objects):
            raise BindError(f"LMCache: expected at most {each} blocks an object, got {len(ids)} for {len(objects)} objects")
        for index, obj in enumerate(objects):
            first, end = max(index * each, skip), min((index + 1) * each, len(ids))
            if first >= end:
                continue
            there = torch.arange(first - index * each, end - index * each, device=ids.device)
            transfer = self._transfers(memory, tokens, _address(obj, memory, each), each, to_objects)
            here = ids[first:end]
            if not to_objects:
                here = _once(here)
            stream = {} if transfer.device < 0 else {"stream": torch.cuda.current_stream(transfer.device)}
            transfer.copy(*((here, there) if to_objects else (there, here)), **stream)

    def _memory(self, paged: Any, form: Form, desc: Any, name: str, device: int) -> _Memory:
        if isinstance(paged, torch.Tensor) and paged.ndim == 1 and paged.dtype in (torch.int64, torch.uint64):
            return _of_pointers(self._listed(paged), form, desc, name, device)
        return _of_tensors(paged, form, int(desc.bs), name, device)

    def _listed(self, pointers: torch.Tensor) -> tuple[int, ...]:
        """The pointers in a tensor.  A tensor on a GPU is read once, and again only after torch has written it."""
        version = -1 if pointers.is_inference() else pointers._version
        known: tuple[int, tuple[int, ...]] | None = self._pointers.get(pointers)
        if known is None or known[0] != version or pointers.device.type == "cpu":
            known = self._pointers[pointers] = version, tuple(int(one) for one in pointers.view(torch.int64).tolist())
        return known[1]


def _once(ids: torch.Tensor) -> torch.Tensor:
    """Ids with repetitions replaced by -1, except the last one: null blocks occur several times.  Ids on a GPU are not changed."""
    if ids.device.type != "cpu" or len(ids.unique()) == len(ids):
        return ids
    found = ids.clone()
    seen: set[int] = set()
    for at in range(len(ids) - 1, -1, -1):
        if int(ids[at]) in seen:
            found[at] = -1
        seen.add(int(ids[at]))
    return found


def _of_pointers(addresses: tuple[int, ...], form: Form, desc: Any, name: str, device: int) -> _Memory:
    sizes = {"l": desc.nl, "o": 2, "b": desc.nb, "t": desc.bs, "h": desc.nh, "d": desc.hs}
    dims = form.dims.replace("s", "b t").replace("1 ", "").split()
    shape = [int(sizes[axis]) for axis in dims]
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    block = int(desc.block_stride_elems or 0)
    if block > 0 and block != strides[0]:
        if form.table != "l" or dims[0] != "b" or "o" in dims:
            raise BindError(f"LMCache: engine format {name}: expected blocks that follow each other, got {block} elements apart")
        strides[0] = block
    expected = math.prod(int(sizes[axis]) for axis in form.table.split())
    if len(addresses) != expected:
        raise BindError(f"LMCache: engine format {name}: expected {expected} pointers, got {len(addresses)}")
    return _Memory(addresses, form.table, " ".join(dims), tuple(shape), tuple(strides), int(desc.element_size), device, form.scale)


def _of_tensors(paged: Any, form: Form, tokens: int, name: str, device: int) -> _Memory:
    listed = [paged] if isinstance(paged, torch.Tensor) else list(paged)
    tensors = [one for entry in listed for one in (entry if isinstance(entry, list | tuple) else [entry])]
    what = f"LMCache: engine format {name}"
    if not tensors or (not form.table and len(tensors) > 1):
        raise BindError(f"{what}: expected {'tensors' if form.table else 'one tensor'}, got {len(tensors)}")
    first = tensors[0]
    for tensor in tensors:
        same = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if same != (first.shape, first.stride(), first.dtype, first.device):
            raise BindError(f"{what}: expected tensors of one shape, strides, dtype and device")
    shape, strides, dims = list(first.shape), list(first.stride()), form.dims.split()
    if name in ("NL_X_NB_NH_BS_TWO_HS", "NL_X_NB_BS_NH_TWO_HS") and len(shape) == 5 and strides[3] == shape[4]:
        shape[3:], strides[3:] = [shape[3] * shape[4]], [strides[4]]
    if len(shape) != len(dims) or any(axis == "1" and size > 1 for axis, size in zip(dims, shape, strict=False)):
        raise BindError(f"{what}: expected the dimensions {form.dims}, got {tuple(first.shape)}")
    if "1" in dims:
        at = dims.index("1")
        del shape[at], strides[at], dims[at]
    if dims[0] == "s":
        if shape[0] % tokens:
            raise BindError(f"{what}: expected slots of whole blocks of {tokens} tokens, got {shape[0]}")
        dims[:1], shape[:1], strides[:1] = ["b", "t"], [shape[0] // tokens, tokens], [strides[0] * tokens, strides[0]]
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    return _Memory(addresses, form.table, " ".join(dims), tuple(shape), tuple(strides), first.element_size(), device, form.scale)


class _Object(NamedTuple):
    """An object: its address and its device."""

    address: int
    device: int


def _address(obj: Any, memory: _Memory, each: int) -> _Object:
    if isinstance(obj, int):
        return _Object(obj, -1 if memory.device < 0 else _core.pointer_device(obj))
    sizes = _sizes(memory)
    expected = math.prod(size for axis, size in sizes.items() if axis != "b") * each
    if obj.numel() != expected or not obj.is_contiguous() or obj.element_size() != memory.itemsize:
        raise BindError(
            f"LMCache: expected a contiguous object of {expected} elements of {memory.itemsize} bytes, got {tuple(obj.shape)} of "
            f"{obj.dtype}, strides {obj.stride()}"
        )
    return _Object(obj.data_ptr(), -1 if obj.device.type == "cpu" else obj.device.index or 0)


def _sizes(memory: _Memory) -> dict[str, int]:
    """Extents per axis, including the axes of the list."""
    sizes = dict(zip(memory.dims.split(), memory.sizes, strict=True))
    if "o" in memory.table:
        sizes["o"] = 2
    if "l" in memory.table:
        sizes["l"], rest = divmod(len(memory.addresses), sizes["o"] if "o" in memory.table else 1)
        if rest:
            raise BindError(f"LMCache: expected tensors of K, then as many of V, got {len(memory.addresses)}")
    return sizes


def _transfer(memory: _Memory, tokens: int, obj: _Object, each: int, to_objects: bool) -> Transfer:
    sizes = _sizes(memory)
    if sizes["t"] != tokens:
        raise BindError(f"LMCache: expected blocks of {tokens} tokens, got {sizes['t']}")
    if memory.scale:
        return _scaled(memory, sizes, obj, each, to_objects)
    dtype = {1: "uint8", 2: "uint16", 4: "uint32"}.get(memory.itemsize)
    if dtype is None:
        raise BindError(f"LMCache: expected elements of 1, 2 or 4 bytes, got {memory.itemsize}")
    shape = BlockShape(sizes["l"], sizes.get("o", 1), sizes.get("h", 1), tokens, sizes["d"], dtype)
    order = sorted(range(len(memory.sizes)), key=lambda at: -memory.strides[at] if memory.sizes[at] > 1 else 0)
    # Dimensions of one element come after the others, as their strides have no meaning; the elements of a head are last.
    dims = memory.dims.split()
    order = [at for at in order if dims[at] != "d"] + [dims.index("d")]
    extents = tuple(memory.sizes[at] for at in order)
    strides = tuple(memory.strides[at] for at in order)
    if strides[-1] != 1 and extents[-1] > 1:
        raise BindError(f"LMCache: expected the elements of a head behind each other, got strides {memory.strides}")
    layout = _layout(memory.table, " ".join(dims[at] for at in order), extents, strides, memory.itemsize)
    paged = Pool(layout, shape, [_array(at, extents, strides, dtype, memory.device) for at in memory.addresses])
    axes = [axis for axis in "olbthd" if axis in sizes]
    inner = tuple(each if axis == "b" else sizes[axis] for axis in axes)
    steps = tuple(math.prod(inner[at + 1 :]) for at in range(len(inner)))
    chunk = Pool(_order(" ".join(axes)), shape, [_array(obj.address, inner, steps, dtype, obj.device)])
    return Transfer(paged, chunk) if to_objects else Transfer(chunk, paged)


def _scaled(memory: _Memory, sizes: dict[str, int], obj: _Object, each: int, to_objects: bool) -> Transfer:
    """As `_transfer`, for blocks with all values first and then all scales, and objects with both side by side per token."""
    width, tokens = sizes["d"], sizes["t"]
    if (width, memory.itemsize) != (_SCALED, 1) or memory.strides[1:] != (width, 1):
        raise BindError(
            f"LMCache: values and scales apart: expected contiguous blocks of {_SCALED} bytes a token, got {width} elements of "
            f"{memory.itemsize} bytes and strides {memory.strides}"
        )
    shape = BlockShape(sizes["l"], 1, 1, tokens, width - memory.scale, "uint8")
    extents, strides = (sizes["b"], tokens * width), (memory.strides[0], 1)
    apart = [_array(at, extents, strides, "uint8", memory.device) for at in memory.addresses]
    paged = Pool(_planes("[l] b <value scale>", "t d", "t", f"{{b: {strides[0]} B}}"), shape, apart)
    inner = (sizes["l"], each, tokens, width)
    steps = tuple(math.prod(inner[at + 1 :]) for at in range(len(inner)))
    chunk = Pool(_planes("l b t <value scale>", "d"), shape, [_array(obj.address, inner, steps, "uint8", obj.device)])
    return Transfer(paged, chunk) if to_objects else Transfer(chunk, paged)


@functools.lru_cache(256)
def _planes(order: str, value: str, scale: str = "", pitch: str = "{}") -> Layout:
    """A layout of values of a byte, and of a word per token."""
    planes = f"value: {{order: {value}, dtype: uint8}}, scale: {{{f'order: {scale}, ' if scale else ''}dtype: uint32}}"
    return layouts.parse(f'order: "{order}"\nplanes: {{{planes}}}\npitch: {pitch}', name="LMCache blocks")


@functools.lru_cache(256)
def _order(order: str) -> Layout:
    return layouts.parse(f'order: "{order}"', name="LMCache object")


@functools.lru_cache(256)
def _layout(table: str, dims: str, sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Layout:
    """The layout of tensors with these dimensions and strides."""
    pitches, expected = [], 1
    for axis, size, stride in reversed(list(zip(dims.split(), sizes, strides, strict=True))):
        if size > 1 and stride != expected:
            pitches.append(f"{axis}: {stride * itemsize} B")
            expected = stride
        expected *= size
    order = f"[{table}] {dims}" if table else dims
    text = f'order: "{order}"' + (f"\npitch: {{{', '.join(pitches)}}}" if pitches else "")
    return layouts.parse(text, name="LMCache blocks")


def _array(address: int, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: int) -> Any:
    found = np.dtype(dtype)
    steps = tuple(stride * found.itemsize for stride in strides)
    if device >= 0:
        return View(None, address, sizes, steps, found.str)
    nbytes = found.itemsize + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return np.ndarray(sizes, found, memoryview(memory), 0, steps)
