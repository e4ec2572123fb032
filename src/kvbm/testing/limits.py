"""Call functions that may raise an exception or hang, and report both as one exception with a sentence.

A kernel runs on a thread, not in a process: it may be any function, including closures and lambdas, gets its arguments unchanged,
and the overhead is small.  However, Python cannot stop a thread.  One that hangs runs until the process ends, and neither delays
that end (it is a daemon) nor changes its exit code (`_park_at_exit`).  Its core, and the GPU that it waits for, cannot be used for
further measurements.  Times on the CPU can differ from those on the main thread: OpenMP keeps helper threads for each thread that
calls it, and glibc returns large freed memory of such a thread to the system sooner.

`Deadline` tells a kernel that hangs from one that is slow, as docs/howto/testing.md says: by the processor time of all threads,
because a kernel may leave its work to a pool of them.  Nothing shows whether a GPU computes, and a thread that waits for it may use
a core: there the limit is time by the clock, without the seconds in which threads were ready and got no core.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import ctypes
import functools
import itertools
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from .._arguments import imported, is_real, quoted
from ..system.clock import Events
from ..system.machine import cuda
from .data import device_index

T = TypeVar("T")

#: Seconds between two queries of an event: at first, and at most.
SHORT_NAP, LONG_NAP = 20e-6, 2e-3

#: Most seconds of a call that is slow and does not hang, in limits.
MOST = 10

#: A call that uses a smaller part of a core computes nearly nothing: a thread that polls for something uses some per cent.
NEARLY_NOTHING = 0.1

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

    Raises `KernelFailure` if the function raised an exception, did not return in time, or the GPU was not done in time.
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

    return run(work, limit_s, on_gpu=device >= 0)


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
            raise KernelFailure(f"{self.what} {error_text(error)}") from error


def end_if_forked(pid: int) -> None:
    """End this process unless it is the one with that id."""
    if os.getpid() != pid:
        os._exit(0)


def error_text(error: BaseException, own_file: str = __file__) -> str:
    """An exception as a short text: class, message, and the place where it was raised outside the file `own_file`."""
    place = ""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__)[1:] if not frame.filename.startswith("<frozen")
    ]
    if frames := list(itertools.dropwhile(lambda frame: frame.filename == own_file, frames)):
        # The deepest line in the kernel's file: deeper lines may be far inside a library.
        own = [frame for frame in frames if frame.filename == frames[0].filename][-1]
        place = f" (line {own.lineno} of {own.filename.rpartition('/')[2]})"
    try:
        text = str(error).strip()
    except BaseException as other:
        text = f"(its message cannot be read: {type(other).__name__})"
    return f"{type(error).__name__}{': ' + text if text else ''}{place}"


class Deadline:
    """A time limit, which moves while a call is slow, and the progress for its message.

    Made by the thread that waits for the call.  With `on_gpu`, processor time says nothing about the call, because a GPU does
    its work.  `progress` is the number of calls made, and of all calls.  It has `passed` when the caller no longer waits, so
    that a thread that returns late ends.  `pid` is the id of the process.
    """

    def __init__(self, limit_s: float, on_gpu: bool) -> None:
        self.limit_s, self.on_gpu = limit_s, on_gpu
        self.progress: tuple[int, int] | None = None
        self.passed = False
        self.pid = os.getpid()
        self._strangers = _given_up_tasks() | {str(threading.get_native_id())}
        self._lock = threading.Lock()  # the call and the one that waits for it may look at the same time
        self._lost, self._computes = 0.0, False
        self._seen = _Use.now()
        self._end = self._seen.at + limit_s
        self._last = self._seen.at + MOST * limit_s

    @property
    def left(self) -> float:
        """Remaining seconds.  Where none are left, the end moves if the call is slow and does not hang."""
        with self._lock:
            if not self.passed and time.monotonic() >= self._end:
                self._look()
            return self._end - time.monotonic()

    def _look(self) -> None:
        now = _Use.now()
        ran, waited = now.since(self._seen, self._strangers)
        self._computes = not self.on_gpu and ran + waited > NEARLY_NOTHING * (now.at - self._seen.at)
        if now.at < self._last and (self._computes or self.on_gpu):
            self._end = min(self._end + waited if self.on_gpu else now.at + self.limit_s, self._last)
            self._lost += waited
            self._seen = now

    def give_up(self) -> set[str]:
        """The caller waits no longer.  Returns the threads that computed since the last look."""
        self.passed = True
        return _Use.now().busy(self._seen) - self._strangers

    def missed(self, what: str, *, returns: bool = False) -> KernelFailure:
        """What to report: `what` did not happen, as a clause: ``"it did not return"``.

        If single calls return, they do not hang.
        """
        limit = f"its limit of {self.limit_s:g} s"
        calls = f" (after {self.progress[0]} of {self.progress[1]} calls)" if self.progress else ""
        advice = "; limit_s= (kvbm smoke: --limit) gives it more time"
        least = 0.1 * self.limit_s
        if self._computes:
            lost = f", except for {self._lost:.1f} s in which it waited for a core" if self._lost > least else ""
            return KernelFailure(
                f"the kernel is too slow: {what} within {MOST} times {limit}{calls}: it computed all the time{lost}{advice}"
            )
        more = self._end - self._last + (MOST - 1) * self.limit_s
        did = "waited" if self.on_gpu else "computed or waited"
        longer = f", and {more:.1f} s more in which it {did} for a core" if more > least else ""
        still = "" if returns or self.on_gpu else ", and no longer computes"
        return KernelFailure(
            f"the kernel {'is too slow' if returns else 'hangs'}: {what} within {limit}{longer}{calls}{still}{advice}"
        )


class _Use(NamedTuple):
    """Use of the processor until a moment of the monotonic clock.

    All threads of this process `ran` for so many seconds, also those that have ended.  `tasks` are, for each thread, the
    seconds that it computed, and those that it waited for a core; empty if Linux does not count them.
    """

    at: float
    ran: float
    tasks: dict[str, tuple[float, float]]

    @classmethod
    def now(cls) -> _Use:
        return cls(time.monotonic(), time.process_time(), _tasks())

    def since(self, before: _Use, strangers: set[str]) -> tuple[float, float]:
        """Seconds that threads other than `strangers` computed, together, and that one of them waited for a core, at most."""
        more = {
            task: (ran - before.tasks.get(task, (0.0, 0.0))[0], waited - before.tasks.get(task, (0.0, 0.0))[1])
            for task, (ran, waited) in self.tasks.items()
        }
        others = sum(ran for task, (ran, _) in more.items() if task in strangers)
        waits = [waited for task, (_, waited) in more.items() if task not in strangers]
        return self.ran - before.ran - others, max(waits, default=0.0)

    def busy(self, before: _Use) -> set[str]:
        """Threads that computed for more than nearly nothing."""
        least = NEARLY_NOTHING * (self.at - before.at)
        return {task for task, (ran, _) in self.tasks.items() if ran - before.tasks.get(task, (0.0, 0.0))[0] > least}


def _tasks() -> dict[str, tuple[float, float]]:
    found = {}
    with contextlib.suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # it may have ended
                ran, waited, *_ = (task / "schedstat").read_text(encoding="ascii").split()
                found[task.name] = int(ran) / 1e9, int(waited) / 1e9
    return found


#: Calls that were given up, with the threads that work for them: they are no sign that another call computes.
_given_up: dict[threading.Thread, set[str]] = {}


def _given_up_tasks() -> set[str]:
    for thread in list(_given_up):
        if not thread.is_alive():
            _given_up.pop(thread, None)
    return set().union(*_given_up.values())


def run(work: Callable[[Deadline], T], limit_s: float, *, on_gpu: bool) -> T:
    """Run ``work(deadline)`` on a thread with the context of this one (context variables, and torch's modes).

    It is given up after `limit_s` seconds if it hangs.  While it is slow, it has up to `MOST` times as long.  If a GPU does its
    work, processor time is no sign that it computes.  Exceptions of `work` are raised here, and `KernelFailure` if the time
    limit has passed.
    """
    deadline = Deadline(limit_s, on_gpu)
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
        _given_up[thread] = deadline.give_up() | {str(thread.native_id)}
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
    torch = imported("torch")
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
    """Events on the current stream of torch or CuPy, else on the default stream.  The device is made current for this thread."""

    def __init__(self, device: int) -> None:
        from cuda.core import Device

        self.device = device
        Device(device).set_current()
        self.events = Events(_current_stream(device))
        self._driver = self.events.driver

    def finish(self, deadline: Deadline) -> None:
        """Wait for all work in the stream.

        Raises `KernelFailure`: the deadline has passed, or the work failed on the GPU.
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
    torch, cupy = imported("torch"), imported("cupy")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_stream(device).cuda_stream)
    if cupy is not None:
        with cupy.cuda.Device(device):
            return int(cupy.cuda.get_current_stream().ptr)
    return 0
