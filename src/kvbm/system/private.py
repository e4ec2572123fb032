"""A folder that only this user and root can write: files in it may hold code.

The build imports this module before any package is installed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

_PATH = getattr(os, "O_PATH", os.O_RDONLY)
_MOST_LINKS = 40


class PrivateFolder:
    """An open folder that no other user (except root) can write, below folders in which no other user can put another in its place.

    What is read and written is in the folder that was checked, whatever is renamed above it: its path is resolved once, folder by
    folder.  It is a context manager.

    Parameters
    ----------
    path : Path
        The folder.  A symlink in it must be of this user or root.
    make : bool
        Create missing folders, with access for this user only.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        There is no such folder.
    PermissionError
        The folder or one above it belongs to another user.  Or others can write it; above it, a folder with the sticky bit is
        allowed.  The message says which.
    """

    def __init__(self, path: Path, *, make: bool = False) -> None:
        self.path = path
        self._number = self._resolved(path, make)

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def _resolved(self, path: Path, make: bool) -> int:
        whole = str(Path.cwd() / path) if _PATH != os.O_RDONLY else os.path.realpath(path)
        todo, links, here = [word for word in reversed(whole.split("/")) if word], 0, Path("/")
        folder = os.open("/", _PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _require_private(folder, here, is_last=not todo)
            while todo:
                name = todo.pop()
                at = _opened(folder, name, make)
                try:
                    found = os.fstat(at)
                    if stat.S_ISLNK(found.st_mode):
                        links += 1
                        _require_owner(found, here / name)
                        if links > _MOST_LINKS:
                            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                        target = os.readlink("", dir_fd=at)
                        todo += [word for word in reversed(target.split("/")) if word]
                        if not target.startswith("/"):
                            continue
                        name, above = "/", os.open("/", _PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                        os.close(at)
                        at = above
                    folder, at = at, folder
                finally:
                    os.close(at)
                here /= name
                _require_private(folder, here, is_last=not todo)
        except BaseException:
            os.close(folder)
            raise
        return folder

    def require_private_inside(self) -> None:
        """Raise PermissionError for a file or folder in it, at any depth, that another user could have written."""
        for here, folders, files, number in os.fwalk(".", dir_fd=self._number, follow_symlinks=False):
            for name in (*folders, *files):
                found, where = os.stat(name, dir_fd=number, follow_symlinks=False), self.path / here / name
                if stat.S_ISLNK(found.st_mode):
                    _require_owner(found, where)
                elif why := _exposed(found, where):
                    raise PermissionError(errno.EPERM, why, str(where))

    def read(self, name: str, most: int) -> bytes:
        """The contents of a file, of at most `most` bytes.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        ValueError
            It is not a regular file, is larger, belongs to another user, or others can write it.
        OSError
            It cannot be read.
        """
        try:
            number = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._number)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise ValueError(f"{name} is a symlink") from None
            raise
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{name} is no regular file")
            if why := _exposed(found, name):
                raise ValueError(why)
            with os.fdopen(number, "rb", closefd=False) as file:
                data = file.read(most + 1)
        finally:
            os.close(number)
        if len(data) > most:
            raise ValueError(f"{name} has more than {most:,} bytes")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a file, completely or not at all.  If two processes write it, the last one wins.

        Raises
        ------
        OSError
            It cannot be written.
        """
        part = f".kvbm-{secrets.token_hex(8)}.tmp"
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(part, how, 0o600, dir_fd=self._number), "wb") as file:
                file.write(data)
            os.replace(part, name, src_dir_fd=self._number, dst_dir_fd=self._number)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part, dir_fd=self._number)


def _opened(folder: int, name: str, make: bool) -> int:
    """A descriptor of a folder or symlink in a folder."""
    try:
        return os.open(name, _PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.open(name, _PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


def _require_private(number: int, where: Path, *, is_last: bool) -> None:
    found = os.fstat(number)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(where))
    _require_owner(found, where)
    if (is_last or not found.st_mode & stat.S_ISVTX) and (why := _exposed(found, where)):
        raise PermissionError(errno.EPERM, why, str(where))


def _require_owner(found: os.stat_result, where: Path) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, _exposed(found, where), str(where))


def _exposed(found: os.stat_result, where: Path | str) -> str:
    """Why another user (except root) could have written a folder or file; empty if none could."""
    if found.st_uid not in (os.geteuid(), 0):
        why = f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    elif found.st_mode & 0o022:
        why = f"can be written by others (mode {found.st_mode & 0o7777:o}; if all in it is yours: chmod go-w)"
    else:
        return ""
    return f"{where} {why}: code from there is not run"
