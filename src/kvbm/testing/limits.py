"""Call functions that may raise an exception or hang, and report both as one exception with a sentence.

A kernel runs on a separate thread, not in a process.  So it may be any function, including closures and lambdas, gets its
arguments unchanged, and the overhead is small.  However, Python cannot stop a thread.  A thread that hangs runs until the process
ends, and does not delay that end (it is a daemon).  Its CPU core, and the GPU that it waits for, cannot be used for further
measurements in this process.

On the CPU, times can differ from those on the main thread in two ways.  OpenMP keeps a pool of helper threads for each thread that
calls it, and waits differently if all of them outnumber the cores.  And glibc returns large freed memory of such a thread to the
system sooner.  A kernel that writes into given memory on one core takes as long as on the main thread.

On a GPU a call returns before its work is done.  An event is polled for the work, so a kernel that never ends is detected, too.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from .data import device_index

__all__ = ["Blamed", "Gpu", "KernelFailure", "call", "require_limit", "run"]

T = TypeVar("T")

#: Seconds between two queries of an event: at first, and at most.
SHORT_NAP, LONG_NAP = 20e-6, 2e-3

#: Seconds after the limit in which a thread may itself report that the GPU hangs.
GRACE = 1.0


class KernelFailure(Exception):  # noqa: N818  (internal: users see only its sentence)
    """A kernel under test raised, hung, or made the GPU fail; the message is one sentence."""


def require_limit(limit_s: float) -> None:
    """Raise ValueError unless `limit_s` is a positive number."""
    if not limit_s > 0:
        raise ValueError(f"limit_s: expected a number of seconds above 0, got {limit_s!r}")


def call(function: Callable[[Any], T], data: Any, limit_s: float) -> T:
    """Call ``function(data)`` and wait until the GPU has done its work.

    Raises
    ------
    KernelFailure
        The function raised an exception, did not return in time, or the GPU was not done in time.
    """
    device = device_index(data)

    def work(deadline: Deadline) -> T:
        if device < 0:
            with Blamed():
                return function(data)
        with Gpu(device) as gpu:
            with Blamed():
                result = function(data)
            gpu.finish(deadline)
            return result

    return run(work, limit_s)


class Blamed:
    """Converts exceptions of a ``with`` block, including `SystemExit`, to `KernelFailure`.

    A process that the kernel has forked ends here, so that it does not continue its parent's work.
    """

    def __init__(self, what: str = "the kernel raised") -> None:
        self.what, self.pid = what, os.getpid()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end_if_forked(self.pid)
        if error is not None and not isinstance(error, KernelFailure):
            raise KernelFailure(f"{self.what} {said(error)}") from error


def end_if_forked(pid: int) -> None:
    """End this process unless it is the one with that id."""
    if os.getpid() != pid:
        os._exit(0)


def said(error: BaseException, ours: str = __file__) -> str:
    """An exception as a short text: class, message, and the place where it was raised outside the file `ours`."""
    place = ""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith("<frozen")
    ]
    if frames := list(itertools.dropwhile(lambda frame: frame.filename == ours, frames)):
        # The deepest line in the kernel's file: deeper lines may be far inside a library.
        own = [frame for frame in frames if frame.filename == frames[0].filename][-1]
        place = f" (line {own.lineno} of {own.filename.rpartition('/')[2]})"
    try:
        text = str(error).strip()
    except BaseException as other:
        text = f"(its message cannot be read: {type(other).__name__})"
    return f"{type(error).__name__}{': ' + text if text else ''}{place}"


class Deadline:
    """A time limit, and the progress for its message.

    Attributes
    ----------
    limit_s : float
        Seconds.
    progress : tuple of two int, or None
        Number of calls made, and of all calls.
    pid : int
        Id of the process.
    passed : bool
        True if the caller no longer waits, so that a thread that returns late ends.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.progress: tuple[int, int] | None = None
        self.passed = False
        self.pid = os.getpid()
        self._end = time.monotonic() + limit_s

    @property
    def left(self) -> float:
        """Remaining seconds."""
        return self._end - time.monotonic()

    def missed(self, what: str) -> KernelFailure:
        progress = f" (after {self.progress[0]} of {self.progress[1]} calls)" if self.progress else ""
        return KernelFailure(f"the kernel hangs: {what} within its limit of {self.limit_s:g} s{progress}")


def run(work: Callable[[Deadline], T], limit_s: float) -> T:
    """Run `work` on a thread with the context of this one (context variables, and torch's modes), for at most `limit_s` seconds.

    Exceptions of `work` are raised here.

    Raises
    ------
    KernelFailure
        The time limit has passed.
    """
    deadline = Deadline(limit_s)
    outcome: list[tuple[bool, Any]] = []
    context, restore = contextvars.copy_context(), _torch_state()

    def target() -> None:
        try:
            with restore():
                outcome.append((True, context.run(work, deadline)))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=target, name="kvbm.testing kernel", daemon=True)
    thread.start()
    thread.join(min(limit_s + GRACE, threading.TIMEOUT_MAX))
    if not outcome:
        deadline.passed = True
        raise deadline.missed("it did not return")
    ok, value = outcome[0]
    if not ok:
        raise value
    result: T = value
    return result


def _torch_state() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The state of torch per thread: gradients, inference, autocast, number of threads, current GPU and stream."""
    torch = sys.modules.get("torch")
    if torch is None:
        return contextlib.nullcontext
    threads = torch.get_num_threads()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextlib.contextmanager
    def restore() -> Iterator[None]:
        torch.set_num_threads(threads)  # the default of a new thread is the number of cores
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            if stream is not None:
                stack.enter_context(torch.cuda.device(stream.device))
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return restore


class Gpu:
    """Events on the current stream of torch or CuPy, else on the default stream.

    It uses cuda.bindings, so no framework is needed.

    Parameters
    ----------
    device : int
        CUDA device ordinal; made current for this thread.
    """

    def __init__(self, device: int) -> None:
        from cuda.bindings import driver
        from cuda.core import Device

        from ..machine import cuda

        self.device = device
        Device(device).set_current()
        self._driver, self._check = driver, cuda
        self.stream = driver.CUstream(_current_stream(device))
        self._events: list[Any] = []

    def event(self) -> Any:
        """A new event with timing."""
        self._events.append(self._check(self._driver.cuEventCreate(0), "making an event"))
        return self._events[-1]

    def record(self, event: Any) -> None:
        self._check(self._driver.cuEventRecord(event, self.stream), "recording an event")

    def finish(self, deadline: Deadline) -> None:
        """Wait for all work in the stream.

        Raises
        ------
        KernelFailure
            The deadline has passed, or the work failed on the GPU.
        """
        event = self.event()
        try:
            self.record(event)
            nap = SHORT_NAP
            while (status := self._driver.cuEventQuery(event)[0]) == self._driver.CUresult.CUDA_ERROR_NOT_READY:
                if deadline.left <= 0:
                    self._events.clear()  # destroying them would wait
                    raise deadline.missed("it returned, but the GPU was not done with its work")
                time.sleep(nap)
                nap = min(2 * nap, LONG_NAP)
            self._check((status,), "running the kernel")
        except KernelFailure:
            raise
        except Exception as error:
            raise KernelFailure(f"the GPU failed while running the kernel: {error}") from error

    def milliseconds(self, begin: Any, end: Any) -> float:
        """Milliseconds between two events that are done."""
        return float(self._check(self._driver.cuEventElapsedTime(begin, end), "reading the clock"))

    def overwrite(self, nbytes: int) -> None:
        """Write `nbytes` bytes to new memory in stream order, to clear the L2 cache."""
        address = self._check(self._driver.cuMemAlloc(nbytes), "allocating memory to clear the cache with")
        try:
            self._check(self._driver.cuMemsetD8Async(address, 0, nbytes, self.stream), "clearing the cache")
        finally:
            self._driver.cuMemFree(address)  # waits for the memset

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: object) -> None:
        events, self._events = self._events, []
        for event in events:
            self._driver.cuEventDestroy(event)


def _current_stream(device: int) -> int:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_stream(device).cuda_stream)
    if cupy is not None:
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)
    return 0
