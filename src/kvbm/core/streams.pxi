# streams.pxi: Handles of the streams of any framework.

cdef enum StreamKind:
    HANDLE = 1    # an int, or has __index__
    PROTOCOL      # has __cuda_stream__
    BINDING       # cuda.bindings: CUstream, cudaStream_t
    TORCH         # torch.cuda.Stream: cuda_stream, an attribute in C; its __cuda_stream__ is a method in Python
    CUPY          # cupy.cuda.Stream before 14: ptr

cdef dict _kind_of = {}  # type -> StreamKind


cdef int _stream_kind(stream) except -1:
    kind = type(stream)
    root = str(kind.__module__).partition(".")[0]
    # bool is a subclass of int, but as a stream it is a mistake.
    if isinstance(stream, bool) or stream is None:
        pass
    elif isinstance(stream, int):
        return HANDLE
    elif root == "torch" and hasattr(kind, "cuda_stream"):
        return TORCH
    elif hasattr(kind, "__cuda_stream__"):
        return PROTOCOL
    elif root == "cuda" and kind.__name__ in ("CUstream", "cudaStream_t"):  # not other handles, such as events
        return BINDING
    elif root == "cupy" and hasattr(stream, "ptr"):
        return CUPY
    elif root == "numpy" and hasattr(kind, "__index__") and getattr(stream, "shape", None) == ():
        return HANDLE
    raise TypeError(
        f"stream: expected an int handle, an object with __cuda_stream__ (cuda.core, torch, CuPy) or a handle of "
        f"cuda.bindings, got {kind.__module__}.{kind.__qualname__}"
    )


def stream_handle(stream):
    """Handle of a CUDA stream as an int.

    Parameters
    ----------
    stream : int or object
        A handle; an object with ``__cuda_stream__`` (cuda.core, torch, CuPy); or a handle of cuda.bindings.  Keep it
        alive while the handle is used.

    Returns
    -------
    int
        0 is the legacy default stream.

    Raises
    ------
    TypeError
        It is none of these, or the version of its protocol is not 0.
    BindError
        The handle is not a 64-bit unsigned integer.

    Examples
    --------
    >>> stream_handle(2)
    2
    """
    return _handle_of(stream)


def stream_device(stream):
    """The GPU of a CUDA stream; -1 for a default stream, which may belong to any GPU, and for an unknown context."""
    cdef uint64_t handle = _handle_of(stream)
    cdef int status, device = -1
    with nogil:
        status = kvbm_stream_device(handle, &device)
    check(status, "asking which GPU a stream is of")
    return device


@cython.final
cdef class Stream:
    """A CUDA stream of a GPU.  It is ordered with the legacy default stream, as streams are by default.

    Parameters
    ----------
    device : int
        Ordinal of the GPU.
    """

    cdef readonly int device
    cdef readonly uint64_t handle

    def __init__(self, int device):
        cdef int status
        if self.handle:
            raise TypeError("a Stream is initialised once")
        self.device = device
        with nogil:
            status = kvbm_stream_make(device, &self.handle)
        check(status, "making a stream")

    def __cuda_stream__(self):
        return 0, self.handle

    def __dealloc__(self):
        if self.handle:
            with nogil:
                kvbm_stream_drop(self.device, self.handle)


def is_captured(stream, int device):
    """Whether a graph captures a CUDA stream.  `device`: its GPU, or that of a default stream."""
    cdef uint64_t handle = _handle_of(stream)
    cdef int status, found = 0
    with nogil:
        status = kvbm_stream_is_captured(device, handle, &found)
    check(status, "asking whether a graph captures a stream")
    return found != 0


cdef uint64_t _handle_of(stream) except? 0xFFFFFFFFFFFFFFFF:
    if type(stream) is int:
        try:
            return PyLong_AsUnsignedLongLong(stream)
        except OverflowError:
            raise BindError(f"stream: expected a handle of 64 bits, got {stream}") from None
    if type(stream) is Stream:
        return (<Stream> stream).handle
    kind = _kind_of.get(type(stream))
    if kind is None:
        kind = _stream_kind(stream)
        _kind_of[type(stream)] = kind
    if kind == PROTOCOL:
        answer = stream.__cuda_stream__()
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(f"stream: expected __cuda_stream__() to return (0, handle), got {answer!r}")
        version, handle = answer
        if version != 0:
            raise TypeError(f"stream: expected version 0 of the __cuda_stream__ protocol, got {version!r}")
        handle = int(handle)
    elif kind == TORCH:
        handle = int(stream.cuda_stream)
    elif kind == CUPY:
        handle = int(stream.ptr)
    else:
        handle = int(stream)
    if not 0 <= handle < 1 << 64:
        raise BindError(f"stream: expected a handle of 64 bits, got {handle}")
    return handle
