"""The current streams of frameworks."""

from __future__ import annotations

import sys
from typing import Any

from .._arguments import imported
from ..errors import BindError


def framework_of(array: object) -> str:
    """The framework of an array: ``torch``, ``cupy``, ``numpy``."""
    return type(array).__module__.partition(".")[0]


def torch_stream(index: int) -> int:
    """Handle of torch's current stream on a GPU.  torch must already use this GPU."""
    raw = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:  # Inductor and Triton use it, too: without a Stream object it takes a tenth of the time
        return int(raw(index))
    return int(sys.modules["torch"].cuda.current_stream(index).cuda_stream)


def framework_stream(framework: str, index: int) -> Any:
    """The framework's current stream on a GPU, as an object: the handle of a default stream does not name its GPU."""
    module = imported(framework)
    if framework == "torch" and module is not None:
        return module.cuda.current_stream(index)
    if framework == "cupy" and module is not None:
        with module.cuda.Device(index):
            return module.cuda.get_current_stream()
    raise BindError(
        f"stream: arrays of {framework} have no current stream; pass stream= (an object with __cuda_stream__, or a handle)"
    )


def require_no_stream(why: str, **given: Any) -> None:
    """Raise `BindError` for a stream, or something to wait for, on the CPU: ``stream: the pool is …; leave stream out``."""
    for name, one in given.items():
        if one is not None:
            raise BindError(f"{name}: {why}; leave {name} out")
