"""Where kvbm keeps files between runs, and how a file is written: whole or not at all.

The build imports this with nothing installed: platformdirs is imported where the folder is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

__all__ = ["folder", "replacing"]


def folder() -> Path:
    """The user's cache folder: $KVBM_CACHE_DIR, or ``kvbm`` in the one of the system (``$XDG_CACHE_HOME``, ``~/.cache``).

    Raises
    ------
    RuntimeError
        There is no home.
    """
    if own := os.environ.get("KVBM_CACHE_DIR"):
        return Path(own)
    from platformdirs import user_cache_path

    path = user_cache_path("kvbm", appauthor=False)
    # A relative $XDG_CACHE_HOME is to be ignored, says the standard; without a home the path begins with "~".
    return path if path.is_absolute() else Path("~", ".cache", "kvbm").expanduser()


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, new: bool = False, durable: bool = False, mode: int = 0o666
) -> Iterator[Path]:
    """Yield an empty file beside `path`; it gets that name at the end, or is removed on an exception.

    Its name is unique, also among machines and containers that share the folder: of several writers at once the last one's
    file stays.  A symlink is followed, and its target replaced.  A durable file has no name until the end where the system has
    such files, so that a process that is killed while it writes leaves nothing behind.

    Parameters
    ----------
    path : path
        What to write.  Folders that are missing are made.
    new : bool
        Nothing may have the name: of several writers at once exactly one succeeds.
    durable : bool
        Contents and name are on the disk before this returns.
    mode : int
        Permissions of the file, before the umask.

    Yields
    ------
    Path
        The file to write to, or to put another one in place of.

    Raises
    ------
    FileExistsError
        `new`, and the name is taken.
    OSError
        `path` is there and no regular file (it is left alone); it cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "file")
    >>> with replacing(path) as part:
    ...     _ = part.write_text("whole")
    >>> path.read_text()
    'whole'
    """
    result = Path(os.path.realpath(path))
    if result.exists() and (new or not result.is_file()):
        what = "already there" if result.is_file() else "already there, and no regular file: it is not replaced"
        raise FileExistsError(errno.EEXIST, what, str(path))
    result.parent.mkdir(parents=True, exist_ok=True)
    part = result.with_name(f".kvbm-{secrets.token_hex(8)}.tmp")  # short: the name may be as long as names can be
    nameless = _nameless(result.parent, mode) if durable else -1
    try:
        if nameless < 0:
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
            yield part
        else:
            yield _by_number(nameless)
        if durable:
            _sync(part if nameless < 0 else _by_number(nameless))
        if nameless >= 0:
            _name(nameless, result if new else part)
        if new and nameless < 0:
            _take_name(part, result)
        elif not new:
            part.replace(result)
    finally:
        if nameless >= 0:
            os.close(nameless)
        part.unlink(missing_ok=True)
    if durable:
        _sync(result.parent)


def _nameless(folder: Path, mode: int) -> int:
    """A descriptor of a file without a name; -1 where there are none."""
    if not hasattr(os, "O_TMPFILE"):
        return -1
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR, mode)
    except OSError:  # whatever it is, an ordinary file says it
        return -1
    if not _by_number(handle).exists():  # no /proc
        os.close(handle)
        return -1
    return handle


def _by_number(handle: int) -> Path:
    return Path("/proc/self/fd", str(handle))


def _name(handle: int, path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # with a folder Python calls linkat, which follows the link
    try:
        os.link(_by_number(handle), path, src_dir_fd=folder, follow_symlinks=True)
    except OSError as error:  # with the name that a user knows
        what = "already there" if isinstance(error, FileExistsError) else error.strerror
        raise OSError(error.errno, what, str(path)) from None
    finally:
        os.close(folder)


def _take_name(part: Path, result: Path) -> None:
    try:
        os.link(part, result)
    except FileExistsError:
        raise FileExistsError(errno.EEXIST, "already there", str(result)) from None
    except OSError:  # a file system without links: an empty file takes the name first
        os.close(os.open(result, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        part.replace(result)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
