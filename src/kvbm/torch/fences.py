"""Fences between the framework's stream and another stream.  They use events on the GPU; the host does not wait.

A copy on a separate stream needs three things.  It must start after the work that the framework has enqueued (`before`).  The
framework must continue only after the copy (`after`).  The memory of the copy must not be reused for another tensor meanwhile
(`keep`).  `fence` does all three around a ``with`` block.  All of it can be captured into a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .. import _core
from .._arguments import listed, quoted, require_a
from ..errors import BindError, CudaUnavailableError
from ..memory.array_checks import require_device


def stream_of(stream: Any, device: torch.device) -> torch.cuda.Stream:
    """Any stream as a torch stream.  Its device is checked.

    Raises
    ------
    BindError
        The stream belongs to another device than the tensors.
    TypeError
        The object is not a stream.
    """
    if device.type != "cuda":
        raise BindError(f"stream: the tensors are on {device}, where the call waits for the copy; leave stream out")
    if isinstance(stream, torch.cuda.Stream):
        _require_home(stream.device.index, device)
        return stream
    handle = _core.stream_handle(stream)
    home = getattr(stream, "device_id", None)  # CuPy
    if home is None:
        home = getattr(getattr(stream, "device", None), "device_id", None)  # cuda.core
    if home is None and handle > 2:  # the default streams belong to the current device
        home = _home_of(handle)
    if isinstance(home, int) and home >= 0:
        _require_home(home, device)
    found = torch.cuda.ExternalStream(handle, device=device)
    found.owner = stream  # keeps the caller's stream alive
    return found


def _require_home(index: int, device: torch.device) -> None:
    require_device("stream", f"cuda:{index}", "the tensors", str(device))


def _home_of(handle: int) -> int | None:
    """The device of a raw handle, if the driver can tell (CUDA 12.8 and newer)."""
    from cuda.bindings import driver

    ask = getattr(driver, "cuStreamGetDevice", None)
    if ask is None:
        return None
    status, index = ask(driver.CUstream(handle))
    return int(index) if int(status) == 0 else None


def before(stream: torch.cuda.Stream, current: torch.cuda.Stream | None = None) -> None:
    """Make `stream` wait for all work that is enqueued in the framework's stream (torch's current one)."""
    current = _streams(stream, current)
    if current != stream:
        stream.wait_stream(current)


def after(stream: torch.cuda.Stream, current: torch.cuda.Stream | None = None) -> None:
    """Make the framework's stream wait for all work that is enqueued in `stream`."""
    current = _streams(stream, current)
    if current != stream:
        current.wait_stream(stream)


def _streams(stream: Any, current: Any) -> torch.cuda.Stream:
    """The framework's stream.  Raises `BindError` unless both are streams of torch."""
    require_a(torch.cuda.Stream, "stream", stream, "a torch.cuda.Stream")
    if current is None:
        return torch.cuda.current_stream(stream.device)
    require_a(torch.cuda.Stream, "current", current, "a torch.cuda.Stream")
    found: torch.cuda.Stream = current
    return found


def keep(tensors: Iterable[torch.Tensor], stream: torch.cuda.Stream) -> None:
    """Prevent reuse of the tensors' memory until `stream` has done all work that is enqueued in it.

    PyTorch reuses freed memory in the order of the stream on which it was allocated.  It must be told of other streams; this is
    done once per storage.  It is not told of streams that torch did not create: it would record an event on the stream when the
    memory is freed, and if the stream no longer exists then, the process ends.  Instead, torch's current stream waits for such a
    stream at once.
    """
    tensors = listed("tensors", tensors, "tensors")
    for tensor in tensors:
        require_a(torch.Tensor, "tensors", tensor, "tensors")
    require_a(torch.cuda.Stream, "stream", stream, "a torch.cuda.Stream")
    if isinstance(stream, torch.cuda.ExternalStream):
        current = torch.cuda.current_stream(stream.device)
        after(stream, current)
        stream = current
    recorded = set()
    for tensor in tensors:
        storage = tensor.untyped_storage().data_ptr()
        if tensor.is_cuda and storage not in recorded:
            recorded.add(storage)
            tensor.record_stream(stream)


@contextlib.contextmanager
def fence(stream: Any, *tensors: torch.Tensor, device: Any = None) -> Iterator[torch.cuda.Stream]:
    """Run a ``with`` block on another stream, fenced on both sides.

    Parameters
    ----------
    stream : torch.cuda.Stream, or any stream that `kvbm.convert` accepts
        The stream for the block's work.  It is torch's current stream inside the block.
    *tensors : torch.Tensor
        Tensors of other streams that the block reads or writes.  Their memory is kept until the work is done.
    device : optional
        The GPU.  Default: that of the first tensor, else that of the stream.

    Yields
    ------
    torch.cuda.Stream
        The stream as a torch stream.

    Raises
    ------
    BindError
        The stream belongs to another device than the tensors, or the tensors are not on a GPU.

    Examples
    --------
    >>> with fence(side, *cache, *stored):  # doctest: +SKIP
    ...     kvbm.torch.convert_(cache, stored, "vllm/flash_attn_nhd", "universal", shape="llama-3.1-8b")
    """
    for tensor in tensors:
        require_a(torch.Tensor, "tensors", tensor, "tensors")
    if tensors:
        home = tensors[0].device
    elif device is not None:
        try:
            home = torch.device(device)
        except (RuntimeError, TypeError, ValueError, OverflowError):
            raise BindError(f"device: expected a GPU such as 'cuda:0', got {quoted(device)}") from None
    elif isinstance(stream, torch.cuda.Stream):
        home = stream.device
    elif torch.cuda.is_available():
        home = torch.device("cuda", torch.cuda.current_device())
    else:
        raise CudaUnavailableError("fence: this machine has no GPU that torch can use, or this torch has no CUDA")
    side = stream_of(stream, home)
    current = torch.cuda.current_stream(home)
    before(side, current)
    try:
        with torch.cuda.stream(side):
            yield side
    finally:
        after(side, current)
        keep(tensors, current)  # it waits for `side`, so memory that was allocated on `side` needs nothing more
