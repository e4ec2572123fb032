"""Read blocks of a file into memory.  A file that another program cuts is an error here; with a mapped one it is a signal."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..layout.overlap import reach
from ..layout.resolved import Piece, Resolved

if TYPE_CHECKING:
    from ..layout.layout import Layout
    from ..layout.shapes import BlockShape
    from ..pool.pool import Pool
    from .open_file import Opened

__all__ = ["Source"]

#: Threads that read at the same time, and the bytes that one of them reads at a time.
_THREADS, _PIECE_BYTES = 4, 2 << 20


class _Read(NamedTuple):
    """Bytes of a file from `at` on, and where in which array of a pool they belong."""

    at: int
    entry: int
    begin: int
    size: int


class Begin(Protocol):
    """Begins to read blocks `ids` into blocks `rows` of a pool; the result waits until they are there."""

    def __call__(self, ids: Sequence[int], rows: Sequence[int], *, now: bool = False) -> Callable[[], None]: ...


class Source:
    """The blocks of a file: `num_blocks` of them, `resolved` at these sizes."""

    def __init__(
        self, file: Opened, layout: Layout, shape: BlockShape, resolved: Resolved, offsets: Sequence[int]
    ) -> None:
        self.layout, self.shape, self.resolved, self.num_blocks = layout, shape, resolved, resolved.num_blocks
        self._file, self._offsets = file, offsets

    def fill(self, pool: Pool, ids: Sequence[int], rows: Sequence[int]) -> None:
        """Read blocks `ids` into blocks `rows` of a pool of the same layout and shape in host memory.

        Bytes of the pool that belong to no element may be changed.  Raises `BindError` if another program has cut the file.
        """
        with self.reading(pool) as begin:
            begin(ids, rows, now=True)()

    @contextlib.contextmanager
    def reading(self, pool: Pool) -> Iterator[Begin]:
        """A function that begins a `fill`, and returns one that waits for it and raises its errors.

        ``now=True``: the caller waits at once, so a few reads are done by the function itself.  At the end no thread reads.
        """
        pool.require_open()
        views: dict[int, memoryview] = {}

        def view(entry: int) -> memoryview:
            if entry not in views:
                size = pool.resolved.kinds[pool.resolved.kind_of_entry[entry]].extent
                views[entry] = memoryview((ctypes.c_uint8 * size).from_address(int(pool.addresses[entry])))
            return views[entry]

        def act(reads: Iterable[_Read]) -> None:
            for at, entry, first, size in reads:
                self._file.fill(view(entry)[first : first + size], at)

        threads = ThreadPoolExecutor(_THREADS, "kvbm file")  # threads start when they are needed

        def begin(ids: Sequence[int], rows: Sequence[int], *, now: bool = False) -> Callable[[], None]:
            wanted = {read for run in _joined(ids, rows) for read in self._reads(pool.resolved, *run)}
            pieces = list(_pieces(wanted))
            if now and len(pieces) < 3:
                act(itertools.chain.from_iterable(pieces))
                return lambda: None
            waited: list[Future[None]] = []
            for piece in pieces:
                try:
                    waited.append(threads.submit(act, piece))
                except RuntimeError as error:
                    if "shutdown" not in str(error):
                        raise
                    act(piece)  # the main thread has ended: no thread starts any more

            def wait() -> None:
                for one in waited:
                    one.result()

            return wait

        try:
            yield begin
        finally:
            threads.shutdown(cancel_futures=True)

    def same_inside(self, resolved: Resolved) -> bool:
        """True if a block is arranged there as it is here, so that `fill` fits: a pitch may depend on the number of blocks."""
        return _inside(self.resolved) == _inside(resolved)

    def _reads(self, into: Resolved, first: int, row: int, count: int) -> Iterator[_Read]:
        """What to read for `count` consecutive blocks."""
        for one, other in zip(_places(self.resolved, first, count), _places(into, row, count), strict=True):
            (entry, begin, size), (into_entry, into_begin, into_size) = one, other
            yield _Read(self._offsets[entry] + begin, into_entry, into_begin, min(size, into_size))


def _joined(ids: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First id, first row and number of consecutive ids that go to consecutive rows."""
    start = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or (ids[at] - ids[at - 1], rows[at] - rows[at - 1]) != (1, 1):
            yield ids[start], rows[start], at - start
            start = at


def _pieces(reads: Iterable[_Read]) -> Iterator[list[_Read]]:
    """The reads in lists of about `_PIECE_BYTES`.  Those that continue each other are joined, and long ones are cut."""
    joined: list[_Read] = []
    for read in sorted(reads):
        last = joined[-1] if joined else None
        if last and (last.at + last.size, last.entry, last.begin + last.size) == read[:3]:
            joined[-1] = last._replace(size=last.size + read.size)
        else:
            joined.append(read)
    piece: list[_Read] = []
    room = _PIECE_BYTES
    for at, entry, begin, size in joined:
        done = 0
        while done < size:
            count = min(size - done, room)
            piece.append(_Read(at + done, entry, begin + done, count))
            done, room = done + count, room - count
            if not room:
                yield piece
                piece, room = [], _PIECE_BYTES
    if piece:
        yield piece


class _Order(NamedTuple):
    """Where blocks lie: axes that select allocations, slower axes than ``b`` in an allocation, ``b``, and one block."""

    tables: tuple[Piece, ...]
    outer: tuple[Piece, ...]
    block: Piece
    inner: tuple[Piece, ...]
    base: tuple[int, int]  # bytes and table entries of its start
    item_bytes: int  # bytes of the innermost item
    half: int | None  # which half of axis 'o' it is for


def _orders(resolved: Resolved) -> Iterator[_Order]:
    """The orders of all planes.  Planes of a record around which ``b`` lies are one: their record is read."""
    for part in resolved.planes:
        for index, pieces in enumerate(part.orders):
            half = index if len(part.orders) == 2 else None
            own, tables = [piece for piece in pieces if not piece.table], [piece for piece in pieces if piece.table]
            block = next(piece for piece in pieces if piece.term.axes == ("b",))
            at = len(own) if block.table else own.index(block)
            outer, inner = tuple(own[at + 1 :]), own[:at]
            around = len(own) - sum(not term.planes for term in resolved.layout.orders[0].inner)
            if resolved.record and at >= around:
                base = (0, part.bases[index][1])
                yield _Order(tuple(tables), outer, block, tuple(inner[around:]), base, resolved.record, None)
                return
            yield _Order(tuple(tables), outer, block, tuple(inner), part.bases[index], part.shape.itemsize, half)


def _inside(resolved: Resolved) -> list[object]:
    return [
        (
            [(piece.term, piece.divisor, piece.extent, piece.stride) for piece in order.inner],
            [(piece.term, piece.divisor, piece.extent) for piece in (*order.tables, *order.outer) if piece is not order.block],
            order.block.stride,
            order.item_bytes,
        )
        for order in _orders(resolved)
    ]


def _places(resolved: Resolved, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """The bytes of `count` consecutive blocks: allocation, first byte, number of bytes.

    Their order depends on layout and shape alone.
    """
    for tables, outer, block, inner, (byte, entry), item_bytes, half in _orders(resolved):
        steps = [(piece.extent, piece.stride) for piece in inner]
        size = reach(steps, item_bytes)
        if not block.table:
            byte, size = byte + first * block.stride, size + (count - 1) * block.stride
        of_table = [[index * piece.table for index in _taken(piece, first, count, half)] for piece in tables]
        of_outer = [[index * piece.stride for index in _taken(piece, first, count, half)] for piece in outer]
        for entries in itertools.product(*of_table):
            for nbytes in itertools.product(*of_outer):
                yield entry + sum(entries), byte + sum(nbytes), size


def _taken(piece: Piece, first: int, count: int, half: int | None) -> range:
    """The indices of a piece that these blocks take."""
    if piece.term.axes == ("b",):
        return range(first, first + count)
    return range(half, half + 1) if half is not None and piece.term.axes == ("o",) else range(piece.extent)
