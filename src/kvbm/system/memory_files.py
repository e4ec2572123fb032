"""Memory files: memory that other processes of this host can map, by the number of its descriptor."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from ..errors import BindError

#: The link of a descriptor that may be opened in another process: only memory files of kvbm have it.
LINK: Final = "/memfd:kvbm {} (deleted)"


def memory_file(what: str, nbytes: int) -> int:
    """Create a memory file that peers on this host can map; return its descriptor.  Its size is sealed, so mappings stay valid."""
    file = os.memfd_create(f"kvbm {what}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(file)
        raise
    return file


def open_memory_file(pid: int, number: int, what: str, nbytes: int) -> int:
    """Open a memory file of another process, as `memory_file` made it.  Raises `BindError` for any other file."""
    path, link = Path(f"/proc/{pid}/fd/{number}"), LINK.format(what)
    if str(path.readlink()) != link:
        raise BindError("its card names a file that is no memory of kvbm")
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        is_file = str(Path(f"/proc/self/fd/{file}").readlink()) == link and os.fstat(file).st_size == nbytes
        if not is_file or fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK == 0:
            raise BindError("its card names a file that is no memory of kvbm of this size")
    except BaseException:
        os.close(file)
        raise
    return file
