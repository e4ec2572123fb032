"""Call functions that may raise an exception or hang, and report both as one exception with a sentence.

A kernel runs on a separate thread, not in a process.  So it may be any function, including closures and lambdas, gets its
arguments unchanged, and the overhead is small.  However, Python cannot stop a thread.  A thread that hangs runs until the process
ends, and neither delays that end (it is a daemon) nor changes its exit code (`_park_at_exit`).  Its CPU core, and the GPU that it
waits for, cannot be used for further measurements in this process.

On the CPU, times can differ from those on the main thread in two ways.  OpenMP keeps a pool of helper threads for each thread that
calls it, and waits differently if all of them outnumber the cores.  And glibc returns large freed memory of such a thread to the
system sooner.  A kernel that writes into given memory on one core takes as long as on the main thread.

A limit is in the machine's time: seconds in which threads of this process were ready and got no core do not count, up to nine
times the limit.  So a kernel on a busy machine is slow, and does not hang.

On a GPU a call returns before its work is done.  An event is polled for the work, so a kernel that never ends is detected, too.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from .._arguments import is_real, quoted
from ..system.clock import Events, cuda
from .data import device_index

__all__ = ["Blamed", "Gpu", "KernelFailure", "call", "require_limit", "run"]

T = TypeVar("T")

#: Seconds between two queries of an event: at first, and at most.
SHORT_NAP, LONG_NAP = 20e-6, 2e-3

#: Most seconds of waiting for a core that are added to a limit, in limits.
MOST_LOST = 9

#: Seconds after the limit in which a thread may itself report that the GPU hangs.
GRACE = 1.0


class KernelFailure(Exception):  # noqa: N818  (internal: users see only its sentence)
    """A kernel under test raised, hung, or made the GPU fail; the message is one sentence."""


def require_limit(limit_s: float) -> None:
    """Raise ValueError unless `limit_s` is a positive number."""
    if not is_real(limit_s) or not limit_s > 0:
        raise ValueError(f"limit_s: expected a number of seconds above 0, got {quoted(limit_s)}")


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
        self._before = _waits()
        self._end = time.monotonic() + limit_s

    @property
    def lost(self) -> float:
        """Seconds in which the thread of this process that waited longest was ready to run and got no core."""
        waits = _waits()
        return max((after - self._before.get(name, 0.0) for name, after in waits.items()), default=0.0)

    @property
    def left(self) -> float:
        """Remaining seconds: those of the limit, and those that the machine took for other work."""
        left = self._end - time.monotonic()
        return left if left > 0 else left + min(self.lost, MOST_LOST * self.limit_s)

    def missed(self, what: str) -> KernelFailure:
        progress = f" (after {self.progress[0]} of {self.progress[1]} calls)" if self.progress else ""
        lost = self.lost
        busy = f", and {lost:.1f} s more in which its threads waited for a core" if lost > 0.1 * self.limit_s else ""
        return KernelFailure(f"the kernel hangs: {what} within its limit of {self.limit_s:g} s{busy}{progress}")


def _waits() -> dict[str, float]:
    """For each thread of this process, the seconds that it waited for a core; nothing if Linux does not count them."""
    found = {}
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended
                found[task.name] = int((task / "schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return found


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

    thread = threading.Thread(target=target, name=_NAME, daemon=True)
    _watch_exit()
    thread.start()
    thread.join(min(limit_s + GRACE, threading.TIMEOUT_MAX))
    while thread.is_alive() and (left := deadline.left) > -GRACE:
        thread.join(min(left + GRACE + SHORT_NAP, threading.TIMEOUT_MAX))
    if not outcome:
        deadline.passed = True
        raise deadline.missed("it did not return")
    ok, value = outcome[0]
    if not ok:
        raise value
    result: T = value
    return result


_NAME = "kvbm.testing kernel"


@functools.cache
def _watch_exit() -> None:
    atexit.register(_park_at_exit)


def _park_at_exit() -> None:
    """Let the process end with its own exit code although a kernel still runs.

    Python before 3.14 ends such a thread when it next asks for the interpreter, by unwinding its stack.  Destructors of PyTorch
    forbid that, and C++ then ends the whole process with SIGABRT.  From here on a thread in this state sleeps instead.
    """
    if not any(thread.name == _NAME and thread.is_alive() for thread in threading.enumerate()):
        return
    with contextlib.suppress(OSError, AttributeError):  # without the C++ library no such destructor exists
        set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
        set_terminate.argtypes, set_terminate.restype = [ctypes.c_void_p], ctypes.c_void_p
        set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


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

    Parameters
    ----------
    device : int
        CUDA device ordinal; made current for this thread.
    """

    def __init__(self, device: int) -> None:
        from cuda.core import Device

        self.device = device
        Device(device).set_current()
        self.events = Events(_current_stream(device))
        self._driver = self.events.driver

    def finish(self, deadline: Deadline) -> None:
        """Wait for all work in the stream.

        Raises
        ------
        KernelFailure
            The deadline has passed, or the work failed on the GPU.
        """
        event = self.events.make()
        try:
            self.events.record(event)
            nap = SHORT_NAP
            while (status := self._driver.cuEventQuery(event)[0]) == self._driver.CUresult.CUDA_ERROR_NOT_READY:
                if deadline.left <= 0:
                    self.events.abandon()
                    raise deadline.missed("it returned, but the GPU was not done with its work")
                time.sleep(nap)
                nap = min(2 * nap, LONG_NAP)
            cuda((status,), "running the kernel")
        except KernelFailure:
            raise
        except Exception as error:
            raise KernelFailure(f"the GPU failed while running the kernel: {error}") from error

    def overwrite(self, nbytes: int) -> None:
        """Write `nbytes` bytes to new memory in stream order, to clear the L2 cache."""
        address = cuda(self._driver.cuMemAlloc(nbytes), "allocating memory to clear the cache with")
        try:
            cuda(self._driver.cuMemsetD8Async(address, 0, nbytes, self.events.stream), "clearing the cache")
        finally:
            self._driver.cuMemFree(address)  # waits for the memset

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.events.close()


def _current_stream(device: int) -> int:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_stream(device).cuda_stream)
    if cupy is not None:
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)
    return 0
