"""The clock of all measurements: the time between two events on a GPU's stream, or by the CPU's clock.

`kvbm bench`, `kvbm tune`, `kvbm demo`, `kvbm.testing` and the studies in benchmarks/ measure with it.

The GPU clock uses cuda.core and cuda.bindings, so no framework is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from ..errors import CudaError
from .machine import cuda

#: The measured call.  It enqueues its work on the stream (None on the CPU) and need not wait for it.
Call = Callable[[Any], object]

#: Nanoseconds that the GPU is kept busy before the clock starts: long enough for the launch to be in the queue by then, and
#: finite, so that a call that waits for its stream can return.
SHORTEST_DELAY, LONGEST_DELAY = 20_000, 100_000

#: One thread that reads the clock until the given nanoseconds are over.  The driver compiles it for the GPU.
DELAY_PTX = b"""\
.version 7.0
.target sm_70
.address_size 64

.visible .entry kvbm_bench_delay(.param .u64 nanoseconds)
{
    .reg .pred %again;
    .reg .b64 %wanted, %start, %now, %passed;

    ld.param.u64 %wanted, [nanoseconds];
    mov.u64 %start, %globaltimer;
WAIT:
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %start;
    setp.lt.u64 %again, %passed, %wanted;
    @%again bra WAIT;
    ret;
}
"""


class Timed(NamedTuple):
    """Seconds of a call, over all timed calls.

    Attributes
    ----------
    median, least, most : float
        Seconds.
    how : {"events", "replay", "clock"}
        Between events around the call, around the replay of a captured graph, or by the CPU's clock.
    """

    median: float
    least: float
    most: float
    how: str

    @classmethod
    def of(cls, seconds: Sequence[float], how: str) -> Timed:
        return cls(statistics.median(seconds), min(seconds), max(seconds), how)


class Events:
    """Events with timing on one stream.  `close` destroys them.

    Parameters
    ----------
    stream : int
        Handle of a CUDA stream of the device that is current for this thread.
    """

    def __init__(self, stream: int) -> None:
        from cuda.bindings import driver

        self.driver, self.stream = driver, driver.CUstream(stream)
        self._events: list[Any] = []

    def make(self) -> Any:
        """A new event."""
        self._events.append(cuda(self.driver.cuEventCreate(0), "making an event"))  # 0: with timing
        return self._events[-1]

    def record(self, event: Any) -> None:
        cuda(self.driver.cuEventRecord(event, self.stream), "recording an event")

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two events that are done."""
        return float(cuda(self.driver.cuEventElapsedTime(begin, end), "reading the clock")) / 1e3

    def abandon(self) -> None:
        """Keep the events for the life of the process: their stream hangs, and to destroy them would wait for it."""
        self._events.clear()

    def close(self) -> None:
        events, self._events = self._events, []
        for event in events:
            self.driver.cuEventDestroy(event)


class CpuClock:
    """Times calls that are finished when they return."""

    device = -1
    stream = None

    def time(self, call: Call, *, iters: int, warmup: int = 3) -> Timed:
        """Seconds of ``call(None)``."""
        for _ in range(warmup):
            call(None)
        seconds = []
        for _ in range(iters):
            start = time.perf_counter()
            call(None)
            seconds.append(time.perf_counter() - start)
        return Timed.of(seconds, "clock")

    def synchronize(self) -> None:
        """Does nothing: no work is ever pending."""

    def close(self) -> None:
        """Does nothing: no resources are held."""

    def __enter__(self) -> CpuClock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GpuClock:
    """Times calls on its own stream.

    Parameters
    ----------
    device : int
        CUDA device ordinal.  The device becomes current for this thread.

    Attributes
    ----------
    device : int
    stream : cuda.core.Stream
        It has ``__cuda_stream__``, so kvbm, torch and CuPy accept it.

    Raises
    ------
    CudaError, CudaUnavailableError
        There is no such GPU, or no driver.

    Examples
    --------
    >>> with GpuClock(0) as clock:  # doctest: +SKIP
    ...     clock.time(lambda stream: move.copy(src_ids, dst_ids, stream=stream), iters=30).median
    """

    def __init__(self, device: int = 0) -> None:
        from cuda.core import Device, ObjectCode

        from .. import _core

        _core.device_info(device)  # raises kvbm's error if there is no such GPU
        self.device = device
        gpu = Device(device)
        gpu.set_current()
        self.stream = gpu.create_stream()
        self._events = Events(_core.stream_handle(self.stream))
        self._driver, self._handle = self._events.driver, self._events.stream
        self._delay = ObjectCode.from_ptx(DELAY_PTX).get_kernel("kvbm_bench_delay")
        self._pair: tuple[Any, ...] = (self._events.make(), self._events.make())

    def delay(self, nanoseconds: int) -> None:
        """Keep the stream busy for this time, on one thread of one multiprocessor."""
        import numpy as np
        from cuda.core import LaunchConfig, launch

        launch(self.stream, LaunchConfig(grid=1, block=1), self._delay, np.uint64(nanoseconds))

    def time(self, call: Call, *, iters: int, warmup: int = 3) -> Timed:
        """Seconds of ``call(stream)`` on the GPU.

        If the host takes longer than `LONGEST_DELAY` to enqueue the call, the rest of that time is included.
        """
        return self._time(call, iters, warmup, "events")

    def replay(self, calls: Sequence[Call], *, iters: int, warmup: int = 3) -> Timed:
        """Seconds of the replay of a graph.  Each call is captured into its own graph; the graphs take turns.

        Use several calls on different memory, so that the memory is not in the caches.

        Raises
        ------
        CudaError
            A call cannot be captured.
        """
        with contextlib.ExitStack() as stack:
            graphs = itertools.cycle([stack.enter_context(self._captured(call)) for call in calls])
            launch = self._driver.cuGraphLaunch
            return self._time(
                lambda _: cuda(launch(next(graphs), self._handle), "replaying a graph"),
                iters,
                max(warmup, len(calls)),  # the first launch of a graph also uploads it
                "replay",
            )

    def synchronize(self) -> None:
        """Wait for the stream.  Raises the error of work that failed on it."""
        cuda(self._driver.cuStreamSynchronize(self._handle), "waiting for the measured copies")

    def close(self) -> None:
        """Wait for the stream, then release the events and the stream."""
        if self._pair:
            self.synchronize()
            self._pair = ()
            self._events.close()
            self.stream.close()

    def __enter__(self) -> GpuClock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error of the GPU, waiting fails with the same error.  The first error is kept.
        with contextlib.suppress(CudaError) if kind else contextlib.nullcontext():
            self.close()

    def _time(self, call: Call, iters: int, warmup: int, how: str) -> Timed:
        begin, end = self._pair
        enqueuing = []
        for _ in range(warmup):
            start = time.perf_counter_ns()
            call(self.stream)
            enqueuing.append(time.perf_counter_ns() - start)
            self.synchronize()
        delay = min(max(2 * min(enqueuing, default=LONGEST_DELAY), SHORTEST_DELAY), LONGEST_DELAY)
        seconds = []
        for _ in range(iters):
            self.delay(delay)
            self._events.record(begin)
            call(self.stream)
            self._events.record(end)
            cuda(self._driver.cuEventSynchronize(end), "waiting for the measured copy")
            seconds.append(self._events.seconds(begin, end))
        return Timed.of(seconds, how)

    @contextlib.contextmanager
    def _captured(self, call: Call) -> Iterator[Any]:
        """The call, captured as an executable graph."""
        driver = self._driver
        # Relaxed mode: a call may allocate (a table, a ring) while it is captured.
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        cuda(driver.cuStreamBeginCapture(self._handle, mode), "capturing a graph")
        try:
            call(self.stream)
        except BaseException:
            driver.cuStreamEndCapture(self._handle)  # end the capture mode of the stream; the graph is incomplete
            raise
        graph = cuda(driver.cuStreamEndCapture(self._handle), "capturing a graph")
        try:
            executable = cuda(driver.cuGraphInstantiate(graph, 0), "making a graph executable")
            try:
                yield executable
            finally:
                self.synchronize()
                driver.cuGraphExecDestroy(executable)
        finally:
            driver.cuGraphDestroy(graph)
