"""The file tier beside the device: ``python -m benchmarks tier --folder DIR``.

`Shelf`, with which the engines' tiers write blocks of host memory to files and read them, beside the device's own rate in the same
folder: one large file, written and read by as many threads.  Plain files of the size of a unit stand between the two: they show
what the number of files costs.  A store ends when the files are written, and once more when they are on the disk (fsync).  A load
is measured from the page cache, and from the disk after the cache has dropped the files.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from kvbm.bench.check import WrongCopyError
from kvbm.bench.measure import random_pool
from kvbm.cli.values import numbers
from kvbm.layout import spec
from kvbm.layout.shapes import BlockShape, load_shape
from kvbm.planner.plan import size_text
from kvbm.pool.pool import Pool
from kvbm.store.folder import Folder
from kvbm.store.keys import LAYOUT, Chain, Content
from kvbm.store.shelf import Shelf, Shelved

from .race import COLUMNS, row_of
from .section import Note, Row, note, stamp, write_rows

__all__ = ["CASES", "Device", "Files", "Tier", "measure", "tier"]

#: What is timed, in the order of the rows.
CASES = ("store", "store to the disk", "load from the cache", "load from the disk")

#: Bytes that a thread reads or writes at a time.
STEP_BYTES = 8 << 20

Bytes = npt.NDArray[np.uint8]


class Files:
    """Plain files of one size, written and read by some threads.

    Parameters
    ----------
    folder : Path
        An empty folder, which is created.
    data : array of uint8
        The bytes of all files.
    count : int
        Number of files.
    threads : int
    """

    def __init__(self, folder: Path, data: Bytes, count: int, threads: int) -> None:
        self.folder, self._data = folder, data
        self._found = np.zeros_like(data)
        self._threads = ThreadPoolExecutor(threads)
        self._each = data.size // count
        # Whole files if there are enough of them; else each thread has a part of each file.
        size = self._each if count >= threads else -(-self._each // threads // 4096) * 4096
        self._parts = [
            (file, at, min(at + size, self._each)) for file in range(count) for at in range(0, self._each, size)
        ]
        self._names = [folder / str(file) for file in range(count)]
        folder.mkdir()

    @property
    def paths(self) -> list[Path]:
        """The files."""
        return self._names

    def store(self) -> None:
        """Write all files."""
        self._map(self._write, self._parts)

    def load(self) -> None:
        """Read all files."""
        self._map(self._read, self._parts)

    def forget(self) -> None:
        """Overwrite what was read before."""
        self._found[:] = 0

    def check(self) -> None:
        """Raise `WrongCopyError` if what was read differs."""
        if not np.array_equal(self._found, self._data):
            raise WrongCopyError(f"tier: {self.folder.name}: what was read is not what was written")

    def sync(self) -> None:
        """Wait until all files are on the disk."""
        self._map(_synced, self.paths)

    def drop(self) -> bool:
        """Drop the files from the page cache; False if some pages are still there, as on tmpfs."""
        return not any(self._map(_dropped, self.paths))

    def clear(self) -> None:
        """Remove all files."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def close(self) -> None:
        """Wait for the threads."""
        self._threads.shutdown()

    def _map(self, call: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return list(self._threads.map(call, items))

    def _piece(self, data: Bytes, part: tuple[int, int, int]) -> memoryview:
        file, begin, end = part
        return data[file * self._each + begin : file * self._each + end].data

    def _write(self, part: tuple[int, int, int]) -> None:
        with _opened(self._names[part[0]], os.O_WRONLY | os.O_CREAT) as file:
            at, left = part[1], self._piece(self._data, part)
            while left:
                done = os.pwrite(file, left[:STEP_BYTES], at)
                at, left = at + done, left[done:]

    def _read(self, part: tuple[int, int, int]) -> None:
        with _opened(self._names[part[0]], os.O_RDONLY) as file:
            at, left = part[1], self._piece(self._found, part)
            while left:
                done = os.preadv(file, [left[:STEP_BYTES]], at)
                if not done:
                    raise WrongCopyError(f"tier: {self._names[part[0]]} is cut short")
                at, left = at + done, left[done:]


class Device(Files):
    """One large file."""

    def __init__(self, folder: Path, data: Bytes, threads: int) -> None:
        super().__init__(folder, data, 1, threads)


class Tier(Files):
    """A file tier, as the engines have it: blocks are written and read in pieces, by some threads, and verified.

    Parameters
    ----------
    folder : Path
        An empty folder, which is created.
    pool : Pool
        The blocks in host memory.
    threads : int
    """

    def __init__(self, folder: Path, pool: Pool, data: Bytes, threads: int) -> None:
        super().__init__(folder, data, pool.num_blocks, threads)
        shape = pool.shape
        content = Content("benchmark", "benchmark", tuple(range(shape.nl)), shape)
        self._pool, self._tier = pool, Folder(folder, content)
        self._shelf = Shelf(content, pool, range(shape.nh), threads=threads)
        self._units = Chain(shape.nt, list(range(pool.num_blocks * shape.nt))).keys(0, pool.num_blocks * shape.nt)
        step = max(1, min(self._shelf.step, -(-pool.num_blocks // threads)))
        self._pieces = [np.arange(pool.num_blocks)[at : at + step] for at in range(0, pool.num_blocks, step)]
        self._digests = pool.digest(np.arange(pool.num_blocks))

    @property
    def paths(self) -> list[Path]:
        return sorted(self.folder.rglob("*.safetensors"))

    def store(self) -> None:
        self._require(self._map(self._write_piece, self._pieces))

    def load(self) -> None:
        self._require(self._map(self._read_piece, self._pieces))

    def forget(self) -> None:
        for array in self._pool.arrays:
            array.view(np.uint8)[...] = 0

    def check(self) -> None:
        if not np.array_equal(self._pool.digest(np.arange(self._pool.num_blocks)), self._digests):
            raise WrongCopyError(f"tier: {self.folder.name}: what was read is not what was written")

    def close(self) -> None:
        super().close()
        self._shelf.close()

    def _named(self, ids: npt.NDArray[np.int64]) -> tuple[list[str], list[int]]:
        return [self._units[block] for block in ids], [int(block) * self._pool.shape.nt for block in ids]

    def _write_piece(self, ids: npt.NDArray[np.int64]) -> Shelved:
        return self._shelf.write(self._tier, ids, self._digests[ids], *self._named(ids))

    def _read_piece(self, ids: npt.NDArray[np.int64]) -> Shelved:
        return self._shelf.read(self._tier, ids, *self._named(ids))

    def _require(self, found: Iterable[Shelved]) -> None:
        nbytes = 0
        for done in found:
            nbytes += done.nbytes
            if not done.good.all():
                raise WrongCopyError(f"tier: {done.why}")
        if nbytes < self._data.size:  # units that are there are not written again
            raise WrongCopyError(f"tier: {self.folder}: expected {self._data.size} bytes to be moved, got {nbytes}")


@contextlib.contextmanager
def _opened(path: Path, how: int) -> Iterator[int]:
    file = os.open(path, how | os.O_CLOEXEC, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _synced(path: Path) -> None:
    with _opened(path, os.O_RDONLY) as file:
        os.fsync(file)


def _dropped(path: Path) -> int:
    """Drop a file that is on the disk from the page cache; return the number of its pages that are still there."""
    with _opened(path, os.O_RDONLY) as file:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file, 0, access=mmap.ACCESS_READ) as pages:
            found = np.zeros(-(-len(pages) // mmap.PAGESIZE), np.uint8)
            view = np.frombuffer(pages, np.uint8)
            address, size = view.ctypes.data, view.size
            del view  # else the mapping could not be closed
            # To read with RWF_NOWAIT would not do: it begins to read the page that it asks for.
            if ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (address, size, found.ctypes.data))):
                return 0  # nobody can say
            return int(np.count_nonzero(found & 1))


def measure(folder: Path, shape: BlockShape, counts: Iterable[int], threads: int, iters: int, note: Note) -> Iterator[Row]:
    """Rows of each case of `CASES`: the tier and plain files, beside the device.

    Parameters
    ----------
    folder : Path
        A folder on the device.  Files are written into a new folder inside, which is removed.
    shape : BlockShape
        The shape of a unit.
    counts : iterable of int
        Numbers of units.
    threads : int
        Threads of each of the three.
    iters : int
        Rounds, in which the three take turns.
    note : callable
        Called with a line if the page cache cannot drop files.

    Raises
    ------
    WrongCopyError
        What was read is not what was written.
    OSError
        The disk is full, or the folder is not writable.
    """
    end = stamp("cpu")
    for count in counts:
        with contextlib.ExitStack() as stack:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="kvbm-tier-")))
            pool = stack.enter_context(random_pool(spec.load(LAYOUT), shape, count, "cpu"))
            data = np.concatenate([array.reshape(-1).view(np.uint8) for array in pool.arrays])
            ways: dict[str, Files] = {
                "device": Device(home / "device", data, threads),
                "plain files": Files(home / "files", data, count, threads),
                "kvbm": Tier(home / "kvbm", pool, data, threads),
            }
            for way in ways.values():
                stack.callback(way.close)
            for row in _rows(ways, count, data.size, iters, note):
                yield {**row, **end}


def _rows(ways: dict[str, Files], count: int, nbytes: int, iters: int, note: Note) -> Iterator[Row]:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    is_dropped = True
    for _ in range(iters):
        for by, way in ways.items():
            way.clear()
            start = time.perf_counter()
            way.store()
            times["store", by].append(time.perf_counter() - start)
            way.sync()
            times["store to the disk", by].append(time.perf_counter() - start)
        for case in ("load from the cache", "load from the disk"):
            for by, way in ways.items():
                way.forget()
                if case == "load from the disk":
                    is_dropped &= way.drop()
                start = time.perf_counter()
                way.load()
                times[case, by].append(time.perf_counter() - start)
                way.check()
    if not is_dropped:
        note("tier: the page cache kept files (as on tmpfs): `load from the disk` is no figure of a disk")
    for case in CASES:
        for by in ways:
            name = f"{case}, units of {size_text(nbytes // count)}"
            yield row_of(name, by, count, nbytes, times[case, by], "device", times[case, "device"], None)


@click.command()
@click.option("--folder", default=".", show_default=True, help="A folder on the device to measure.",
              type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path))  # fmt: skip
@click.option("--shape", "shape_text", default="llama-3.1-8b", show_default=True, metavar="SHAPE",
              help="Shape of a unit, such as llama-3.1-8b,nt=64.")  # fmt: skip
@click.option("--num-blocks", "counts", default="256", show_default=True, callback=numbers, metavar="N,...",
              help="Numbers of units.")  # fmt: skip
@click.option("--threads", default=4, show_default=True, type=click.IntRange(1), help="Threads; 4 are those of vLLM's tier.")
@click.option("--iters", default=5, show_default=True, type=click.IntRange(1), help="Rounds.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="CSV file to write.  [default: stdout]")  # fmt: skip
def tier(
    folder: Path, shape_text: str, counts: tuple[int, ...], threads: int, iters: int, out: Path | None
) -> None:
    """Measure how blocks are written to files and read from files, beside the device's own rate."""
    shape = load_shape(shape_text)
    write_rows(measure(folder, shape, counts, threads, iters, note), COLUMNS, "cpu", shape, out, "tier")
