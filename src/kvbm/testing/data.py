"""Inputs and outputs of kernels, for arrays of any framework: leaves, copies, values.

torch is looked up in `sys.modules`: data can be torch's only if torch has been imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import imported
from ..errors import BindError


def is_array(value: Any) -> bool:
    """True for a tensor or an array of torch, NumPy or CuPy."""
    return _is_tensor(value) or isinstance(value, np.ndarray) or hasattr(value, "__cuda_array_interface__")


def _is_tensor(value: Any) -> bool:
    torch = imported("torch")
    return torch is not None and issubclass(type(value), torch.Tensor)  # an object may lie of its class


def _require_storage(tensor: Any) -> None:
    """Raise `BindError` if a tensor reaches beyond its storage, which was freed or resized: torch itself would crash.

    Tensors that say nothing of a storage (sparse, fake) are torch's own matter.
    """
    try:
        held, at = tensor.untyped_storage().nbytes(), tensor.storage_offset()
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    except (NotImplementedError, RuntimeError):
        return
    needed = (at + last + 1) * tensor.element_size() if tensor.numel() else 0
    if tensor.device.type in ("cpu", "cuda") and held < needed:
        raise BindError(
            f"a tensor of shape {tuple(tensor.shape)}: expected a storage of {needed} bytes or more, got {held}: it was freed or "
            "resized; pass a tensor that has its memory"
        )


def leaves(data: Any, where: str = "", around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The items of nested tuples, lists and dicts, depth first, each with its place: ``[0]['x']``.

    Raises ValueError if a container contains itself: `around` has the ids of the containers around `data`.
    """
    if not isinstance(data, dict | list | tuple):
        yield where, data
        return
    if id(data) in around:
        raise ValueError(f"{where}: a {type(data).__name__} that contains itself")
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield from leaves(value, f"{where}[{key!r}]", (*around, id(data)))


def _map(function: Callable[[Any], Any], data: Any) -> Any:
    if isinstance(data, dict):
        made_dict = copy.copy(data)  # a defaultdict keeps its factory
        made_dict.update({key: _map(function, value) for key, value in data.items()})
        return made_dict
    if isinstance(data, list | tuple):
        made = [_map(function, value) for value in data]
        return type(data)(*made) if hasattr(data, "_fields") else type(data)(made)
    return function(data)


def clone(data: Any) -> Any:
    """Copy all arrays to new memory with the same strides.  Other objects are passed on unchanged."""
    return _map(_clone, data)


def require_room(data: Any, copies: int = 1) -> None:
    """Raise `NotEnoughMemoryError` unless host memory has room for so many copies of the data that is in host memory."""
    from ..memory.allocation import require_memory

    if device_index(data) < 0:
        require_memory(copies * nbytes(data), "copies of the kernel's input", "use smaller inputs, or a machine with more memory")


def _clone(value: Any) -> Any:
    if _is_tensor(value):
        import torch

        _require_storage(value)
        # Copy as bytes: not every operation supports the packed and the 8-bit types.
        plain = value.detach().view(torch.uint8) if value.element_size() == 1 else value.detach()
        made = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
        return made.copy_(plain).view(value.dtype).requires_grad_(value.requires_grad)
    if isinstance(value, np.ndarray) or (is_array(value) and hasattr(value, "copy")):
        return value.copy(order="K")
    return value


def nbytes(data: Any) -> int:
    """Bytes of all arrays."""
    return sum(int(value.nbytes) for _, value in leaves(data) if is_array(value))


def device_index(data: Any) -> int:
    """Number of the GPU that holds the data; -1 if none does."""
    for _, value in leaves(data):
        if _is_tensor(value):
            if value.device.type == "cuda":
                return int(value.device.index or 0)
        elif is_array(value) and not isinstance(value, np.ndarray):
            from ..memory.array_info import describe
            from ..system.machine import device_of

            return device_of(describe(value).device)
    return -1


def dtype_name(value: Any) -> str:
    """The name of a dtype of any framework, such as ``float16``."""
    return str(value.dtype).removeprefix("torch.") if hasattr(value, "dtype") else np.asarray(value).dtype.name


def values(value: Any) -> npt.NDArray[Any]:
    """The values as a NumPy array on the host: bfloat16 and fp8 as float32, packed 4-bit values as bytes."""
    if _is_tensor(value):
        import torch

        _require_storage(value)
        value = value.detach().resolve_conj().resolve_neg()
        name = dtype_name(value)
        if name.startswith(("float4", "uint4", "int4")):
            value = value.view(torch.uint8)
        elif name == "bfloat16" or name.startswith("float8"):
            value = value.to(torch.float32)
        value = value.cpu().numpy()
    elif not isinstance(value, np.ndarray) and is_array(value):
        value = value.get()
    array: npt.NDArray[Any] = np.asarray(value)
    return array if array.dtype.kind in "biufc" else array.astype(np.float32)
