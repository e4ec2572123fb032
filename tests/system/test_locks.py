"""Locks and fork: a child has no thread that could release a lock held at the fork."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvbm
from kvbm import store
from kvbm.compile import nvrtc
from kvbm.copy import tables
from kvbm.errors import BuildError
from kvbm.layout import spec
from kvbm.system.locks import Lock
from memory import Bound

SHAPE = kvbm.BlockShape(nl=2, no=2, nh=2, nt=2, hd=8, dtype="float16")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")


@contextlib.contextmanager
def held(lock: Any) -> Iterator[None]:
    """Another thread holds the lock."""
    has, end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has.wait()
    yield
    end.set()
    thread.join()


def in_child(call: Callable[[], object]) -> int:
    """The status of a forked child that makes a call: 0, or the signal that ends a child that waits forever."""
    child = os.fork()
    if not child:
        status = 1
        try:
            signal.alarm(5)
            call()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def of_a_range_of_layers() -> tuple[Lock, Callable[[], object]]:
    src, dst = Bound("nhd", SHAPE, 6), Bound("universal", SHAPE, 6, dst=True)
    move = kvbm.Transfer(src.pool, dst.pool)
    return move._executor.lock, lambda: move.copy([1], [2], layers=range(1))  # met for the first time


def of_the_compiler() -> tuple[Lock, Callable[[], object]]:
    def find() -> None:
        os.environ["KVBM_NVRTC"] = "1"
        with contextlib.suppress(BuildError):
            nvrtc.find()

    return nvrtc._lock, find


def of_the_tables() -> tuple[Lock, Callable[[], object]]:
    return tables.lock, tables.reload


def of_the_operators() -> tuple[Lock, Callable[[], object]]:
    operators = pytest.importorskip("kvbm.torch.operators")
    return operators._routes_lock, operators.check_ids


@pytest.mark.parametrize("case", [of_a_range_of_layers, of_the_compiler, of_the_tables, of_the_operators])
def test_a_child_of_a_process_in_which_a_thread_held_the_lock(
    case: Callable[[], tuple[Lock, Callable[[], object]]],
) -> None:
    lock, call = case()
    with held(lock):
        assert in_child(call) == 0
    with lock:  # the parent's works as before
        assert in_child(call) == 0


@pytest.mark.quick
def test_a_child_reads_properties_that_a_thread_was_computing(tmp_path: Path) -> None:
    """Before Python 3.12 all objects of a class share the lock of a cached property."""
    pool = kvbm.Pool.allocate("nhd", SHAPE, 2)
    store.save(tmp_path / "blocks", pool)
    stored, layout = store.read(tmp_path / "blocks"), spec.parse('order: "b l o t h d"')
    for one, name in ((stored, "digests"), (layout, "fingerprint"), (layout.resolve(SHAPE, 3), "section"), (pool, "steps")):
        lock = getattr(vars(type(one))[name], "lock", None)
        with contextlib.nullcontext() if lock is None else held(lock):
            assert in_child(lambda one=one, name=name: getattr(one, name)) == 0, name  # type: ignore[misc]
        vars(one).pop(name, None)
        getattr(one, name)  # the parent's works as before


def test_a_thread_that_forks_keeps_its_lock() -> None:
    lock = Lock()

    def still_held() -> None:
        taken: list[bool] = []
        thread = threading.Thread(target=lambda: taken.append(lock._lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        assert taken == [False]

    with lock:
        assert in_child(still_held) == 0


def test_no_other_locks() -> None:
    """Modules of kvbm must not use locks of `threading`: in some child such a lock would be held forever."""
    source = Path(kvbm.__file__).parent
    above = ("bench", "cli", "integrations", "link", "reshard", "store", "testing", "wire")
    files = [file for file in source.rglob("*.py") if file.relative_to(source).parts[0] not in above and file.name != "locks.py"]
    assert len(files) > 40
    assert not [
        file.name for file in files if re.search(r"threading\.(R?Lock|Condition|Semaphore)\b", file.read_text())
    ]
