"""The folder in which kvbm keeps files between runs, and a way to write a file completely or not at all.

The build imports this module before any package is installed.  So platformdirs is imported only in `folder`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path


def folder() -> Path:
    """The user's cache folder: $KVBM_CACHE_DIR, or ``kvbm`` in the system's (``$XDG_CACHE_HOME``, ``~/.cache``).

    Raises
    ------
    RuntimeError
        There is no home folder.
    """
    if own := os.environ.get("KVBM_CACHE_DIR"):
        return Path(own)
    from platformdirs import user_cache_path

    path = user_cache_path("kvbm", appauthor=False)
    # The XDG standard says to ignore a relative $XDG_CACHE_HOME.  Without a home folder the path begins with "~".
    return path if path.is_absolute() else Path("~", ".cache", "kvbm").expanduser()


#: How often a folder is made again that another process has removed meanwhile, because it was empty.
_TRIES = 30


def _pause() -> None:
    """Up to a millisecond: who removes it may run in step with this thread."""
    time.sleep(random.random() * 1e-3)


def _make(folder: Path) -> None:
    """Make a folder, and those above it."""
    for left in reversed(range(_TRIES)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, FileNotFoundError):  # it was there, and is gone; or one above it is
            if not left or (folder.exists() and not folder.is_dir()):
                raise
            _pause()
        else:
            return


def _create(file: Path, mode: int) -> None:
    """Make an empty file of a new name."""
    for left in reversed(range(_TRIES)):
        try:
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        except FileNotFoundError:  # its folder was removed
            if not left:
                raise
            _pause()
            _make(file.parent)
        else:
            return


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, new: bool = False, durable: bool = False, mode: int = 0o666, follow: bool = True
) -> Iterator[Path]:
    """Yield an empty file beside `path`.  At the end it is renamed to `path`; after an exception it is removed.

    Its name is unique, also among machines and containers that share the folder.  Of several concurrent writers the last one
    wins.  If `path` is a symlink, its target is replaced, or the link itself without `follow`.  A durable file has no name until
    the end, if the system supports that (O_TMPFILE): a process that is killed while it writes leaves no file behind.

    Parameters
    ----------
    path : path
        The file to write.  Missing folders are created.
    new : bool
        `path` must not exist.  Of several concurrent writers exactly one succeeds.
    durable : bool
        The contents and the name are on the disk when the context ends.
    mode : int
        Permissions of the file, before the umask.
    follow : bool
        False in folders that others write to: a link there could name any file of this user.

    Yields
    ------
    Path
        The file to write to, or to replace with another file.

    Raises
    ------
    FileExistsError
        `new` is true and `path` exists, or `path` is not a regular file (it is not changed).
    OSError
        The file cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "file")
    >>> with replacing(path) as part:
    ...     _ = part.write_text("whole")
    >>> path.read_text()
    'whole'
    """
    result = Path(os.path.realpath(path) if follow else path)
    if (follow or not result.is_symlink()) and result.exists() and (new or not result.is_file()):
        what = "already there" if result.is_file() else "already there, and no regular file: it is not replaced"
        raise FileExistsError(errno.EEXIST, what, str(path))
    _make(result.parent)
    part = result.with_name(f".kvbm-{secrets.token_hex(8)}.tmp")  # short, because the name of `path` may have the maximum length
    nameless = _nameless(result.parent, mode) if durable else -1
    try:
        if nameless < 0:
            _create(part, mode)
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
    """A descriptor of a file without a name; -1 if the system does not support that."""
    if not hasattr(os, "O_TMPFILE"):
        return -1
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_RDWR, mode)
    except OSError:  # the ordinary file will raise the same error
        return -1
    if not _by_number(handle).exists():  # no /proc
        os.close(handle)
        return -1
    return handle


def _by_number(handle: int) -> Path:
    return Path("/proc/self/fd", str(handle))


def _name(handle: int, path: Path) -> None:
    folder = os.open(path.parent, os.O_RDONLY)  # with a folder, Python calls linkat, which follows the link
    try:
        os.link(_by_number(handle), path, src_dir_fd=folder, follow_symlinks=True)
    except OSError as error:  # the error names the user's path
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
