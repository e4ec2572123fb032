"""A file that is open for reading: everything that is read of it is of one file, whatever gets its name meanwhile."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from .._arguments import quoted
from ..errors import BindError, NotEnoughMemoryError

__all__ = ["Opened", "mapped", "path_of"]

#: Bytes that Linux reads in one call, at most.
_MOST_BYTES = 0x7FFFF000


def path_of(name: str, given: Any) -> Path:
    """A path that is legal in a file system."""
    with contextlib.suppress(Exception):  # the object's own code may raise anything
        found = Path(given)
        if b"\0" not in os.fsencode(found):
            return found
    raise BindError(f"{name}: expected a path, got {quoted(given)}")


def mapped(number: int, size: int, path: object, access: int = mmap.ACCESS_DEFAULT) -> mmap.mmap:
    """Map a file; `NotEnoughMemoryError` if the process has no room for it."""
    try:
        return mmap.mmap(number, size, access=access)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise NotEnoughMemoryError(
            f"{path}: to map its {size} bytes: {error}. Raise the limits of the process (`ulimit -v`), or use fewer blocks"
        ) from None


class Opened:
    """A regular file, open for reading.  `close` or the last reference closes it.

    `path` names it in messages.  With `number`, a descriptor that now belongs to this object, it is not opened by its path.
    `size` are its bytes when it was opened, and `place` are its device and inode.  Raises `BindError` if it is not a regular
    file.
    """

    def __init__(self, path: Path, number: int | None = None) -> None:
        self.path, self._number = path, -1
        if number is None:
            if not stat.S_ISREG(path.stat().st_mode):  # to open a device may have effects
                raise BindError(f"{path}: expected a regular file")
            number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO that took its place would wait
        self._number = number
        found = os.fstat(self._number)
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise BindError(f"{path}: expected a regular file")
        self.size, self.place = found.st_size, (found.st_dev, found.st_ino)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.path} is open in this process and cannot be pickled or copied; pass its path instead")

    def close(self) -> None:
        """Close the file.  A second call does nothing."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __del__(self) -> None:
        self.close()

    def _open(self) -> int:
        if self._number < 0:
            raise BindError(f"{self.path} is closed; expected an open file: read it again")
        return self._number

    def require_size(self) -> None:
        """Raise `BindError` if the file has another size than when it was opened."""
        if (now := os.fstat(self._open()).st_size) != self.size:
            raise BindError(f"{self.path}: {self._cut()}: it has {now:,} bytes now")

    def _cut(self) -> str:
        return f"expected the {self.size:,} bytes that it had when it was opened; another program has cut or extended it"

    def fill(self, into: Any, at: int) -> None:
        """Read bytes from `at` on, until a buffer is full.

        Raises `BindError` if the file ends before: another program has cut it.
        """
        left, number = memoryview(into).cast("B"), self._open()
        while len(left):
            count = os.preadv(number, [left[:_MOST_BYTES]], at)
            if not count:
                raise BindError(f"{self.path}: {self._cut()}: it ends at byte {at:,}")
            left, at = left[count:], at + count

    def map(self) -> mmap.mmap:
        """Map the file, read-only.  If another program cuts it later, access to its lost part ends the process (SIGBUS)."""
        self.require_size()
        return mapped(self._open(), self.size, self.path, access=mmap.ACCESS_READ)

    def is_at(self, path: Path) -> bool:
        """True if a path is this file, and not one that has replaced it."""
        try:
            found = path.stat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.place
