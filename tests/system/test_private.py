"""Folders for code that is run: what other users could have put there is not read."""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbm.system.private import PrivateFolder

#: A user that is not this one; files are given to it.
OTHER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="files are given to another user, which only root may do")


def kept(folder: Path, text: bytes = b"mine") -> Path:
    with PrivateFolder(folder, make=True) as private:
        private.write("code", text)
    return folder


def read(folder: Path) -> bytes:
    with PrivateFolder(folder) as private:
        return private.read("code", 100)


def test_what_was_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any path to the folder; the folders that are made are private."""
    folder = kept(tmp_path / "a" / "b")
    assert read(folder) == b"mine" and [one.name for one in folder.iterdir()] == ["code"]
    assert [one.stat().st_mode & 0o777 for one in (folder, folder.parent, folder / "code")] == [0o700, 0o700, 0o600]
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "absolute").symlink_to(tmp_path / "link")
    (folder / "up").symlink_to("../../a/./b")
    monkeypatch.chdir(tmp_path)
    for path in ("link/b", "absolute/b", "a/b/up", "a/../a/b", "./a//b", "a/b/up/up"):
        assert read(Path(path)) == b"mine", path
        assert read(tmp_path / path) == b"mine", path
    kept(Path("link/c"))
    assert read(tmp_path / "a" / "c") == b"mine"


def test_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")
    (tmp_path / "none").mkdir(0o700)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "none"):
        with pytest.raises(NotADirectoryError):
            read(path)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="Too many levels"):
        read(tmp_path / "loop")


@pytest.mark.parametrize("depth", range(4))
def test_a_folder_above_that_others_can_write_is_refused(tmp_path: Path, depth: int) -> None:
    """In it they can put another folder in the place of this one; but not with the sticky bit."""
    folder = kept(tmp_path / "a" / "b" / "c")
    wide = [tmp_path, *(tmp_path.joinpath(*"abc"[:many]) for many in (1, 2, 3))][depth]
    for mode, is_right in ((0o777, False), (0o770, False), (0o1777, depth < 3), (0o755, True)):
        wide.chmod(mode)
        if is_right:
            assert read(folder) == b"mine"
            kept(folder)
            continue
        for call in (read, kept):
            with pytest.raises(PermissionError, match=f"{wide} can be written by others .*code from there is not run"):
                call(folder)


@as_root
@pytest.mark.parametrize("what", ["a", "a/b", "a/b/code", "link"])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, what: str) -> None:
    folder = kept(tmp_path / "a" / "b")
    (tmp_path / "link").symlink_to("a")
    os.chown(tmp_path / what, OTHER, -1, follow_symlinks=False)
    with pytest.raises((PermissionError, ValueError), match=f"belongs to user {OTHER}"):
        read(tmp_path / "link" / "b" if what == "link" else folder)


def test_files_that_are_no_private_files_are_refused(tmp_path: Path) -> None:
    folder = kept(tmp_path / "a")
    code = folder / "code"
    code.chmod(0o666)
    with pytest.raises(ValueError, match="code can be written by others"):
        read(folder)
    for make in (code.mkdir, lambda: os.mkfifo(code), lambda: code.symlink_to("other")):
        code.unlink()
        make()
        with pytest.raises(ValueError, match=r"no regular file|a symlink"):
            read(folder)
        code.rmdir() if code.is_dir() else None
        code.touch()
    code.unlink()
    kept(folder, bytes(101))
    with pytest.raises(ValueError, match="more than 100 bytes"):
        read(folder)


def test_what_others_could_have_written_inside_is_found(tmp_path: Path) -> None:
    folder = kept(kept(tmp_path / "a") / "b").parent
    with PrivateFolder(folder) as private:
        private.require_private_inside()
        for path in (folder / "b", folder / "b" / "code"):
            before = path.stat().st_mode
            path.chmod(0o777)
            with pytest.raises(PermissionError, match=f"{path} can be written by others"):
                private.require_private_inside()
            path.chmod(before)
        private.require_private_inside()


def at_calls(acts: dict[int, Callable[[], Any]], call: Callable[[], Any]) -> int:
    """Run a function, and others when it makes its calls of these numbers; return the number of calls."""
    count = 0

    def step(*_: Any) -> None:
        nonlocal count
        count += 1
        if act := acts.get(count):
            sys.setprofile(None)
            act()
            sys.setprofile(step)

    sys.setprofile(step)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@as_root
@pytest.mark.slow
def test_another_folder_in_its_place_at_any_step_is_not_read(tmp_path: Path) -> None:
    """Whoever may rename above it puts a folder of his there, and takes it away, at any two steps."""
    from kvbm.compile import nvrtc

    key, cubin = bytes(32), {name: b"\x7fELF" + bytes(14) + b"\xbe\0" + name.encode() for name in ("mine", "theirs")}
    for name, code in cubin.items():
        whole = nvrtc._MAGIC + key + hashlib.sha256(key + code).digest() + code
        with PrivateFolder(tmp_path / name / "nvrtc", make=True) as private:
            private.write("code", whole)
    for one in (tmp_path / "theirs", tmp_path / "theirs" / "nvrtc", tmp_path / "theirs" / "nvrtc" / "code"):
        os.chown(one, OTHER, -1)
    place = tmp_path / "cache"

    def put(name: str) -> Callable[[], None]:
        def act() -> None:
            other = "theirs" if name == "mine" else "mine"
            if place.exists():
                place.rename(tmp_path / other)
            (tmp_path / name).rename(place)

        return act

    found: list[Any] = []

    def look() -> None:
        try:
            found.append(nvrtc._read(place / "nvrtc" / "code", key))
        except (OSError, ValueError):
            found.append(None)

    put("mine")()
    calls = at_calls({}, look)
    assert found == [cubin["mine"]]
    rng = random.Random(0)
    for _ in range(400):
        first, last = sorted(rng.sample(range(1, calls), 2))
        at_calls({first: put("theirs"), last: put("mine")}, look)
        if (tmp_path / "mine").exists():  # it ended before the last step
            put("mine")()
    assert {bytes(one) for one in found if one} == {cubin["mine"]}
