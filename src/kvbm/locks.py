"""Locks that a forked child finds free."""

from __future__ import annotations

import os
import threading
import weakref

__all__ = ["Lock"]


class Lock:
    """A reentrant lock.  A forked child lacks the thread that may have held it: there it is free, unless that thread forked."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _made.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def free(self) -> None:
        """Take it from a thread that is no more."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


_made: weakref.WeakSet[Lock] = weakref.WeakSet()


def _free() -> None:
    for lock in _made:
        lock.free()


os.register_at_fork(after_in_child=_free)
