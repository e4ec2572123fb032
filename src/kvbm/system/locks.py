"""Locks that a forked child finds free."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any


class Lock:
    """A reentrant lock.  After a fork it is free in the child, unless the forking thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _made.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def free(self) -> None:
        """Release it if a thread holds it that does not exist in this process."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_made: weakref.WeakSet[Lock] = weakref.WeakSet()


def _free() -> None:
    for lock in _made:
        lock.free()
    if sys.version_info < (3, 12):  # until then a cached property has a lock, which all objects of its class share
        for one in _cached_properties():
            one.lock = threading.RLock()


def _cached_properties() -> Iterator[Any]:
    """The cached properties of kvbm's classes."""
    for name, module in tuple(sys.modules.items()):
        if name.partition(".")[0] == "kvbm":
            for owner in tuple(vars(module).values()):
                if isinstance(owner, type) and owner.__module__ == name:
                    yield from (one for one in vars(owner).values() if isinstance(one, functools.cached_property))


os.register_at_fork(after_in_child=_free)
