"""Make calls of the fake driver fail, one after the other, each in a separate process."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvbm import BindError, CudaError

#: What the driver counts as alive.
LIVE = ("events", "streams", "allocations", "pinned allocations", "modules", "mappings")

#: Whose failure may change nothing: a slot whose event cannot be recorded is not used again; an allocation's ends save questions;
#: whether an older copy is done is asked again.
ADVICE = ("cuEventRecord", "cuPointerGetAttributes", "cuEventQuery")

#: After whose failure one thing of a kind may be left, but no module: a slot that a copy may still read, an event that the next
#: copy could not take yet.
_LOST = ("cuEventRecord", "cuEventQuery")


def in_child(call: Callable[[], Any], limit: int = 60) -> str:
    """The output of a function that runs in a separate process."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(limit)
            os.write(writable, str(call()).encode())
            status = 0
        except BaseException as error:
            os.write(writable, f"{type(error).__name__}: {error!s:.2000}".encode())
        finally:
            os._exit(status)
    os.close(writable)
    with os.fdopen(readable) as stream:
        said = stream.read()
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"status {os.waitstatus_to_exitcode(status)}: {said}"
    return said


def every_call(
    title: str,
    call: Callable[[], None],
    again: Callable[[], None] | None = None,
    *,
    verifies: bool = False,
    step: Callable[[], int] = lambda: 1,
    most: int = 1 << 30,
) -> Counter[str]:
    """Make one driver call after the other fail.  Each time an error is raised, the next try is right, and nothing leaks.

    Parameters
    ----------
    title : str
        Text for failures of the test.
    call : callable
        The action.  If it only waits for work that is already enqueued, it sets ``fake_fail_at`` to 0.
    again : callable, optional
        The action after a failure, with a check of its result.  Default: `call`.
    verifies : bool
        True if copies verify.  A copy that was not completely enqueued may still write digests, so their memory is not reused.
    step : callable
        Distance to the next call that fails.
    most : int
        Largest number of a failing call.

    Returns
    -------
    Counter
        Names of the calls that failed.
    """
    found, clean, number = Counter[str](), list[int](), 0
    while number < most:
        try:
            name, *left = in_child(lambda number=number: _attempt(call, again or call, number)).split()
        except AssertionError as error:
            raise AssertionError(f"{title}: call {number}: {error}") from None
        live = [int(n) for n in left]
        if number and name == "-":
            break
        if number:
            found[name] += 1
            for kind, now, was in zip((*LIVE, "registrations"), live, clean, strict=True):
                lost = (name in _LOST and kind != "modules") or (verifies and kind == "registrations")
                assert now <= was + lost, f"{title}: after {name} (call {number}) failed: {now} {kind}, without: {was}"
        else:
            clean = live
        number += step() if number else 1
    return found


def _attempt(call: Callable[[], None], again: Callable[[], None], number: int) -> str:
    """Make call `number` fail (0: none), and try again; return its name, and the live objects."""
    driver = ctypes.CDLL("libcuda.so.1")

    def count(name: str) -> ctypes.c_long:
        return ctypes.c_long.in_dll(driver, name)

    raised = ""
    count("fake_fail_at").value = number
    try:
        call()
    except (CudaError, BindError, MemoryError) as error:
        raised = f"{type(error).__name__}: {error}"
    count("fake_fail_at").value = 0
    name = (ctypes.c_char_p.in_dll(driver, "fake_failed").value or b"").decode()
    try:
        for _ in range(2):
            again()
        gc.collect()
        assert count("illegal").value == 0, "memory without a grant is touched"
        assert count("pushes").value == count("pops").value, "a context was left on a thread"
        assert count("broken_captures").value == 0, "a capture was broken"
        assert bool(raised) == bool(name) or name in ADVICE, "it failed without an exception"
    except BaseException as error:
        raise AssertionError(f"{name} failed ({raised}): {type(error).__name__}: {error}") from error
    live = (ctypes.c_long * len(LIVE)).in_dll(driver, "live")
    return f"{name or '-'} {' '.join(map(str, live))} {count('registered').value}"
