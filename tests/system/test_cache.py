"""The folders in which kvbm keeps files, and atomic writes by several processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvbm.system import cache


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_replacing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    with cache.replacing(path) as part:
        part.write_text("new")
        assert not path.exists() and part.parent == path.parent
    assert path.read_text() == "new"

    def interrupted() -> None:
        with cache.replacing(path) as half:
            half.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert path.read_text() == "new" and names(path.parent) == ["file"]


def test_names_that_no_other_writer_has(tmp_path: Path) -> None:
    """Process ids may be equal in two containers."""
    path = tmp_path / "file"
    with cache.replacing(path) as one, cache.replacing(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one" and names(tmp_path) == ["file"]


@pytest.mark.parametrize("links", [True, False])
def test_exactly_one_makes_a_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def none(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    if not links:
        monkeypatch.setattr(os, "link", none)
    path, start = tmp_path / "file", threading.Barrier(4)

    def write(number: int) -> int | None:
        try:
            with cache.replacing(path, new=True) as part:
                part.write_text(str(number))
                start.wait()
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(4) as pool:
        (winner,) = [number for number in pool.map(write, range(4)) if number is not None]
    assert path.read_text() == str(winner) and names(tmp_path) == ["file"]
    with pytest.raises(FileExistsError, match="already there"), cache.replacing(path, new=True):
        pytest.fail("it was there before")


def test_a_folder_that_is_removed_while_a_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others remove a folder when it is empty.  Red: "No such file", or "File exists" for the folder that was just removed."""
    folder, left, calls = tmp_path / "a" / "b", {"open": 3, "mkdir": 3}, {"open": os.open, "mkdir": os.mkdir}

    def open_(path: Any, *more: Any) -> int:
        if str(path).endswith(".tmp") and left["open"]:
            left["open"] -= 1
            folder.rmdir()
            folder.parent.rmdir()
        return int(calls["open"](path, *more))

    def mkdir(path: Any, *more: Any) -> None:
        if Path(path) == folder and left["mkdir"]:
            left["mkdir"] -= 1
            raise FileExistsError(17, os.strerror(17), str(path))  # it was there, and is gone when it is looked at
        calls["mkdir"](path, *more)

    monkeypatch.setattr("os.open", open_)
    monkeypatch.setattr("os.mkdir", mkdir)
    with cache.replacing(folder / "file") as part:
        part.write_text("whole")
    assert (folder / "file").read_text() == "whole" and left == {"open": 0, "mkdir": 0}
    with pytest.raises(OSError, match="file"), cache.replacing(folder / "file" / "below"):
        pass


def test_a_symlink_is_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/file")
    for new in (True, False):
        with cache.replacing(tmp_path / "link", new=new) as part:
            part.write_text(f"new={new}")
        assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "file").read_text() == f"new={new}"


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "fifo", tmp_path / "folder", Path("/dev/null")):
        with pytest.raises(OSError, match="no regular file"), cache.replacing(path):
            pytest.fail("it was to be refused")
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_names_as_long_as_names_can_be(tmp_path: Path) -> None:
    with cache.replacing(tmp_path / ("n" * 255), durable=True) as part:
        part.write_text("long")
    assert names(tmp_path) == ["n" * 255]
    with pytest.raises(OSError, match=r"too long: '.*nnn'"), cache.replacing(tmp_path / ("n" * 256)):
        pytest.fail("it was to be refused")


def test_permissions(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        for name, mode, want in (("a", 0o666, 0o640), ("b", 0o600, 0o600)):
            with cache.replacing(tmp_path / name, mode=mode) as part:
                part.write_text("x")
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == want
    finally:
        os.umask(mask)


def test_the_build_imports_it_with_nothing_installed() -> None:
    code = (
        "import sys; sys.modules['platformdirs'] = None\n"
        "from kvbm.system import cache\nfrom kvbm.compile import nvcc\nprint(cache.replacing.__name__)"
    )
    source = Path(cache.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(source)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
