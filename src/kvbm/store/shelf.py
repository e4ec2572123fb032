"""A rank's part of a folder: write blocks of host memory to files and read them, with digests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from ..copy.transfer import Transfer
from ..digest.cells import Model
from ..errors import BindError, KvbmError
from ..layout.layout import Layout
from ..pool.pool import Pool
from .folder import Folder, Part, cover, touch
from .keys import Content

__all__ = ["Shelf", "Shelved"]

#: Bytes that a thread reads or writes at a time.
_STEP_BYTES = 32 << 20

Ids = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]

#: A file of a unit, and which one had its name when it was opened.
Used = tuple[Part, tuple[int, int] | None]


class _Desk:
    """The memory of one thread: units in the layout of the files, and the copies from and to the host's blocks.

    Both have the ids of pieces: blocks or units, of whichever has fewer tokens.
    """

    def __init__(self, layout: Layout, host: Pool, unit: int, rows: int) -> None:
        self.pool = Pool.allocate(layout, replace(host.shape, nt=unit), rows)
        piece = min(unit, host.shape.nt)
        part, own = (pool if pool.shape.nt == piece else pool.units(piece) for pool in (host, self.pool))
        self.out, self.back, self.pieces = Transfer(part, own), Transfer(own, part), own

    def close(self) -> None:
        self.out.close()
        self.back.close()
        self.pool.close()


@dataclass
class Shelved:
    """The result of writing or reading some units of the `blocks` of host memory.

    `digests` are those of the blocks, as from `Pool.digest`.  `good` is true for each block that was read or written
    completely, and `why` is the reason for one that was not.  `nbytes` were read or written.
    """

    blocks: Ids
    digests: Sums
    good: npt.NDArray[np.bool_]
    nbytes: int = 0
    why: str = ""


class Shelf:
    """Writes blocks of host memory to files and reads them from files, for one rank.

    Each block of `host` consists of whole units, or a unit of whole blocks; else a `BindError` is raised.  `each` is the number
    of units of a block, and `joined` that of blocks of a unit: one of them is 1.  `heads` are those of the model in `host`, and
    `step` is the most units that are written or read at a time.  Several threads may use it at the same time, and at most
    `threads` work at the same time.  Each has separate memory.
    """

    def __init__(self, content: Content, host: Pool, heads: range, verify: bool = True, threads: int = 4) -> None:
        shape, unit = content.shape, content.shape.nt
        if host.shape.nt % unit and unit % host.shape.nt:
            raise BindError(
                f"unit_tokens: expected a number that divides the blocks of {host.shape.nt} tokens, or a multiple of them, got "
                f"{unit}"
            )
        if replace(host.shape, nt=unit, nh=shape.nh) != shape or len(heads) != host.shape.nh:
            raise BindError(f"folder: expected blocks with all heads as {shape}, got {host.shape}, heads {heads}")
        if (host.layout.planes or content.values) and host.layout != content.layout:
            raise BindError(f"folder: expected blocks in the layout {content.layout.name}, got {host.layout.name}")
        self.part, self.verify, self.unit = Part(heads[0], heads[-1] + 1), verify, unit
        self.each, self.joined = max(1, host.shape.nt // unit), max(1, unit // host.shape.nt)
        self._model = Model(heads=tuple(heads), nh=shape.nh)
        blocks = min(_STEP_BYTES // host.resolved.block_bytes, host.num_blocks)
        self.step = max(1, blocks // self.joined) * self.each
        self._threads = threads
        self._desks: SimpleQueue[_Desk] = SimpleQueue()
        for _ in range(threads):
            self._desks.put(_Desk(content.layout, host, unit, self.step))

    def _pieces_of(self, blocks: Ids) -> Ids:
        """The pieces of blocks of host memory, one after the other."""
        found: Ids = (blocks[:, None] * self.each + np.arange(self.each)).reshape(-1)
        return found

    def _blocks_of(self, row: int) -> slice:
        """The places among the blocks of a call of those that share tokens with a unit."""
        first = row * self.joined // self.each
        return slice(first, first + self.joined)

    def close(self) -> None:
        """Wait for what runs, and free the memory.  Later calls raise `BindError`."""
        for _ in range(self._threads):
            desk = self._desks.get()
            desk.close()
            self._desks.put(desk)

    @contextlib.contextmanager
    def _desk(self) -> Iterator[_Desk]:
        desk = self._desks.get()
        try:
            yield desk
        finally:
            self._desks.put(desk)

    def _block_digests(self, desk: _Desk, blocks: Ids) -> Sums:
        """Digests of the host's blocks, computed from their units."""
        pieces = np.arange(len(blocks) * self.each)
        sums: Sums = desk.pieces.digest(pieces, tokens=pieces % self.each * self.unit)
        found: Sums = sums.reshape(len(blocks), self.each).sum(axis=1, dtype=np.uint64)
        return found

    def write(self, folder: Folder, blocks: Ids, digests: Sums, names: Sequence[str], firsts: Sequence[int]) -> Shelved:
        """Write blocks of host memory: whole units, at most `step`.

        Units whose heads are in files already are left as they are.  A unit of a block with another digest than in `digests` is
        not written.  `names` and `firsts` have, for each unit in order, its name and the position of its first token.
        """
        done = Shelved(blocks, np.zeros(len(blocks), np.uint64), np.ones(len(blocks), np.bool_))
        todo = [row for row, name in enumerate(names) if not folder.holds(name, self.part)]
        if not todo:
            return done
        with self._desk() as desk:
            rows, pieces = np.arange(len(names)), self._pieces_of(blocks)
            desk.out.copy(pieces, np.arange(len(pieces))).synchronize()
            own = desk.pool.digest(rows)
            heads = [
                desk.pool.section(h=head).digest(rows, model=self._model)
                for head in range(self.part.last - self.part.first)
            ]
            done.digests = self._block_digests(desk, blocks)  # after the units' digests: if it is right, so are they
            if (wrong := done.digests != digests).any():
                done.good &= ~wrong
                done.why = f"{int(wrong.sum())} blocks of host memory are not what was stored there"
            for row in todo:
                its = self._blocks_of(row)
                if not done.good[its].all():
                    done.good[its] = False
                    continue
                try:
                    row_heads = [int(head[row]) for head in heads]
                    done.nbytes += folder.write(
                        names[row], self.part, firsts[row], desk.pool.arrays[row], int(own[row]), row_heads
                    )
                except OSError as error:
                    done.good[its], done.why = False, f"{error}"
        return done

    def read(
        self, folder: Folder, blocks: Ids, names: Sequence[str], firsts: Sequence[int],
        wanted: contextlib.AbstractContextManager[bool] | None = None,
    ) -> Shelved:  # fmt: skip
        """Read blocks into host memory.  The parameters are those of `write`.

        Host memory is written inside `wanted`, and only if it is true: while files are read, the blocks may be reused.

        A unit that does not exist, or has another digest than when it was stored, raises no error: its block is not good.  Files
        with wrong contents are removed.
        """
        done = Shelved(blocks, np.zeros(len(blocks), np.uint64), np.ones(len(blocks), np.bool_))
        with self._desk() as desk:
            rows = np.arange(len(names))
            expected, used = np.zeros(len(names), np.uint64), []
            for row, name in enumerate(names):
                parts: list[Used] = []
                used.append(parts)
                try:
                    expected[row] = self._fetch(folder, name, desk.pool.arrays[row], parts, firsts[row])
                except OSError as error:  # another process may have removed the file
                    self._refuse(done, row, str(error), folder, name)
                except KvbmError as error:
                    self._refuse(done, row, str(error), folder, name, parts[-1:])
            done.digests = self._block_digests(desk, blocks)  # before they are compared
            if self.verify:
                found = desk.pool.digest(rows, model=self._model)
                for row in np.flatnonzero(found != expected).tolist():
                    if done.good[self._blocks_of(row)].all():
                        why = f"{folder.home(names[row])}: digest: expected {expected[row]:#018x}, got {found[row]:#018x}"
                        self._refuse(done, row, why, folder, names[row], used[row])
            pieces = self._pieces_of(blocks[done.good])
            good = np.flatnonzero(np.repeat(done.good, self.each))
            done.nbytes = len(pieces) * desk.pool.resolved.block_bytes // self.joined
            with wanted or contextlib.nullcontext(True) as is_wanted:
                if is_wanted:
                    desk.back.copy(good, pieces).synchronize()
                else:
                    done.good[:] = False
        return done

    def _refuse(self, done: Shelved, row: int, why: str, folder: Folder, name: str, parts: Sequence[Used] = ()) -> None:
        done.good[self._blocks_of(row)] = False
        done.why = done.why or why
        for part, place in parts:
            if place is not None:  # else it was not opened
                folder.drop(name, part, place)

    def _fetch(self, folder: Folder, name: str, into: npt.NDArray[Any], parts: list[Used], first: int) -> int:
        """Read this rank's heads of a unit; return their expected digest.  The files that were used are added to `parts`."""
        taken = cover(folder.parts(name), *self.part)
        if taken is None:
            raise BindError(f"{folder.home(name)}: heads {self.part.first} to {self.part.last - 1}: some are in no file")
        total = 0
        for part, begin, end in taken:
            parts.append((part, None))
            stored, digests = folder.open(name, part)
            parts[-1] = part, stored.file.place
            [entry] = stored.blocks.values()
            data = into[begin - self.part.first : end - self.part.first].reshape(-1).view(np.uint8).data
            step = data.nbytes // (end - begin)
            stored.file.fill(data, entry.begin + (begin - part.first) * step)
            total += sum(digests[begin - part.first : end - part.first])
            touch(stored.path, first)
            stored.close()
        return total % (1 << 64)
