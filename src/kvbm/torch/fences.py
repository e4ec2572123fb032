"""Fences between the framework's stream and the library's: events on the GPU, and never a host that waits.

A copy on a stream of its own needs two orders that nobody else establishes: it must not start before the work that the
framework has enqueued so far, and the framework must not go on before it is done.  And the memory that it touches must not
be given to another tensor meanwhile.  `before`, `after` and `keep` are these three; `fence` is all of them around a block.
Events alone are used, so all of it can be captured into a graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .. import _core
from ..contract import require_device
from ..errors import BindError

__all__ = ["after", "before", "fence", "keep"]


def stream_of(stream: Any, device: torch.device) -> torch.cuda.Stream:
    """Any stream as torch's, after a look at the device it is of.

    Raises
    ------
    BindError
        A stream of another device than the tensors.
    TypeError
        What is no stream.
    """
    if device.type != "cuda":
        raise BindError(
            f"stream: the tensors are on {device}, where a copy is done when the call returns; leave stream out"
        )
    if isinstance(stream, torch.cuda.Stream):
        _require_home(stream.device.index, device)
        return stream
    handle = _core.stream_handle(stream)
    home = getattr(stream, "device_id", None)  # CuPy
    if home is None:
        home = getattr(getattr(stream, "device", None), "device_id", None)  # cuda.core
    if home is None and handle > 2:  # the default streams are of whichever device is current
        home = _home_of(handle)
    if isinstance(home, int) and home >= 0:
        _require_home(home, device)
    found = torch.cuda.ExternalStream(handle, device=device)
    found.owner = stream  # whoever holds this one holds the caller's
    return found


def _require_home(index: int, device: torch.device) -> None:
    require_device("stream", f"cuda:{index}", "the tensors", str(device))


def _home_of(handle: int) -> int | None:
    """The device of a raw handle, where the driver can be asked (CUDA 12.8 and newer)."""
    from cuda.bindings import driver

    ask = getattr(driver, "cuStreamGetDevice", None)
    if ask is None:
        return None
    status, index = ask(driver.CUstream(handle))
    return int(index) if int(status) == 0 else None


def before(stream: torch.cuda.Stream, current: torch.cuda.Stream | None = None) -> None:
    """Let `stream` wait for all that the framework's stream (torch's current one) has been given so far."""
    current = current if current is not None else torch.cuda.current_stream(stream.device)
    if current != stream:
        stream.wait_stream(current)


def after(stream: torch.cuda.Stream, current: torch.cuda.Stream | None = None) -> None:
    """Let the framework's stream wait for all that `stream` has been given so far."""
    current = current if current is not None else torch.cuda.current_stream(stream.device)
    if current != stream:
        current.wait_stream(stream)


def keep(tensors: Iterable[torch.Tensor], stream: torch.cuda.Stream) -> None:
    """Keep the tensors' memory from other tensors until `stream` is done with all that it has been given so far.

    PyTorch gives memory that is freed to the next tensor of the stream it was allocated on, in that stream's order; it does
    not know of other streams unless it is told.  Each storage is told once.  Streams that are not torch's it is never told of:
    it would record an event there when the memory is freed, and the stream may be gone by then, which ends the process.
    torch's current stream waits for such a stream at once instead.
    """
    if isinstance(stream, torch.cuda.ExternalStream):
        current = torch.cuda.current_stream(stream.device)
        after(stream, current)
        stream = current
    told = set()
    for tensor in tensors:
        storage = tensor.untyped_storage().data_ptr()
        if tensor.is_cuda and storage not in told:
            told.add(storage)
            tensor.record_stream(stream)


@contextlib.contextmanager
def fence(stream: Any, *tensors: torch.Tensor, device: Any = None) -> Iterator[torch.cuda.Stream]:
    """Run a block on another stream, fenced on both sides.

    Parameters
    ----------
    stream : torch.cuda.Stream, or any stream that `kvbm.convert` takes
        Where the block's work is enqueued: it is torch's current stream inside.
    *tensors : torch.Tensor
        What the block reads and writes of other streams; kept until it is done.
    device : optional
        Which GPU's streams are fenced.  Not given: that of the first tensor, else of the stream.

    Yields
    ------
    torch.cuda.Stream
        The stream, as torch's.

    Raises
    ------
    BindError
        A stream of another device than the tensors, or tensors that are on no GPU.

    Examples
    --------
    >>> with fence(side, *cache, *stored):  # doctest: +SKIP
    ...     kvbm.torch.convert_(cache, stored, "vllm/flash_attn_nhd", "universal", shape="llama-3.1-8b")
    """
    if tensors:
        home = tensors[0].device
    elif device is not None:
        home = torch.device(device)
    elif isinstance(stream, torch.cuda.Stream):
        home = stream.device
    else:
        home = torch.device("cuda", torch.cuda.current_device())
    side = stream_of(stream, home)
    current = torch.cuda.current_stream(home)
    before(side, current)
    try:
        with torch.cuda.stream(side):
            yield side
    finally:
        after(side, current)
        keep(tensors, current)  # which is done when `side` is; memory that was allocated there needs nothing more
