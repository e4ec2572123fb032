"""A rank's part in a tier: blocks of host memory to files, and from files, with their digests; nothing of vLLM is imported."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import spec as layouts
from ...digest import Model
from ...errors import BindError, DigestError, KvbmError
from ...pool import Pool
from ...shapes import BlockShape
from ...transfer import Transfer
from .tier import LAYOUT, KvbmTier, Part, cover, touch

__all__ = ["Shelf", "Shelved"]

#: Bytes that are read, or written, by a thread at a time.
_STEP_BYTES = 32 << 20

Ids = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]


class _Desk:
    """Memory of one thread's: units in the order of the files, and the copies to and from the host's blocks."""

    def __init__(self, host: Pool, unit: int, rows: int) -> None:
        self.pool = Pool.allocate(layouts.load(LAYOUT), replace(host.shape, nt=unit), rows)
        part = host if unit == host.shape.nt else host.units(unit)
        self.out, self.back = Transfer(part, self.pool), Transfer(self.pool, part)


@dataclass
class Shelved:
    """What became of some units.

    Attributes
    ----------
    blocks : numpy.ndarray of int64
        Blocks of the host memory that they are of.
    digests : numpy.ndarray of uint64
        Of these blocks, as `Pool.digest` has them.
    good : numpy.ndarray of bool
        Which blocks were read, or written, as a whole.
    nbytes : int
        That were read, or written.
    why : str
        What was wrong with the first one that is not good.
    """

    blocks: Ids
    digests: Sums
    good: npt.NDArray[np.bool_]
    nbytes: int = 0
    why: str = ""


class Shelf:
    """Writes blocks of host memory to files, and reads them from there, for one rank; any number of threads may at once.

    Parameters
    ----------
    shape : BlockShape
        Of a unit of the whole model.
    host : Pool
        Blocks of whole units.
    heads : range
        The heads of the model that it holds.
    verify : bool
        Compare digests.
    threads : int
        Of which each has memory of its own.

    Raises
    ------
    BindError
        Blocks that are not of such units.
    """

    def __init__(self, shape: BlockShape, host: Pool, heads: range, verify: bool = True, threads: int = 4) -> None:
        unit = shape.nt
        if host.shape.nt % unit:
            raise BindError(
                f"unit_tokens: expected a number that divides the blocks of {host.shape.nt} tokens, got {unit}"
            )
        if replace(host.shape, nt=unit, nh=shape.nh) != shape or host.layout.planes or len(heads) != host.shape.nh:
            raise BindError(f"folder: expected blocks with all heads as {shape}, got {host.shape}, heads {heads}")
        self.part, self.verify, self.unit = Part(heads[0], heads[-1] + 1), verify, unit
        self.each = host.shape.nt // unit
        self._model = Model(heads=tuple(heads), nh=shape.nh)
        blocks = max(1, _STEP_BYTES // host.shape.nbytes)
        self.step = min(blocks, host.num_blocks) * self.each
        self._desks: SimpleQueue[_Desk] = SimpleQueue()
        for _ in range(threads):
            self._desks.put(_Desk(host, unit, self.step))

    @contextlib.contextmanager
    def _desk(self) -> Iterator[_Desk]:
        desk = self._desks.get()
        try:
            yield desk
        finally:
            self._desks.put(desk)

    def _own(self, desk: _Desk, blocks: Ids) -> Sums:
        """Digests of the host's blocks, of the units that they consist of."""
        rows = np.arange(len(blocks) * self.each)
        units: Sums = desk.pool.digest(rows, tokens=rows % self.each * self.unit)
        found: Sums = units.reshape(len(blocks), self.each).sum(axis=1, dtype=np.uint64)
        return found

    def write(
        self, tier: KvbmTier, blocks: Ids, digests: Sums | None, names: Sequence[str], firsts: Sequence[int]
    ) -> Shelved:
        """Write blocks of the host's; what is there already is left as it is.

        Parameters
        ----------
        tier : KvbmTier
        blocks : array of int64
            At most `step` units.
        digests : array of uint64
            What they must have; of others nothing is written.
        names, firsts : sequence
            Of their units, in order: what they are called, and the position of the first token.
        """
        done = Shelved(blocks, np.zeros(len(blocks), np.uint64), np.ones(len(blocks), np.bool_))
        todo = [row for row, name in enumerate(names) if not (tier.home(name) / self.part.name).exists()]
        if not todo:
            return done
        with self._desk() as desk:
            rows = np.arange(len(names))
            desk.out.copy((blocks[:, None] * self.each + np.arange(self.each)).reshape(-1), rows).synchronize()
            places = np.asarray(firsts, np.int64)
            own = desk.pool.digest(rows)
            heads = [
                desk.pool.section(h=head).digest(rows, tokens=places, model=self._model)
                for head in range(self.part.last - self.part.first)
            ]
            done.digests = self._own(desk, blocks)  # after the others: what they say is of the same bytes
            if (wrong := done.digests != digests).any():
                done.good &= ~wrong
                done.why = f"{int(wrong.sum())} blocks of host memory are not what was stored there"
            for row in todo:
                if not done.good[row // self.each]:
                    continue
                try:
                    row_heads = [int(head[row]) for head in heads]
                    done.nbytes += tier.write(
                        names[row], self.part, firsts[row], desk.pool.arrays[row], int(own[row]), row_heads
                    )
                except OSError as error:
                    done.good[row // self.each], done.why = False, f"{error}"
        return done

    def read(self, tier: KvbmTier, blocks: Ids, names: Sequence[str], firsts: Sequence[int]) -> Shelved:
        """Read blocks of the host's; parameters as for `write`.

        A unit that is not there, or whose digest is not that of the store, is no error: its block is not good.  Its files are
        removed.
        """
        done = Shelved(blocks, np.zeros(len(blocks), np.uint64), np.ones(len(blocks), np.bool_))
        with self._desk() as desk:
            rows = np.arange(len(names))
            expected, used = np.zeros(len(names), np.uint64), []
            for row, name in enumerate(names):
                parts: list[Part] = []
                used.append(parts)
                try:
                    expected[row] = self._fetch(tier, name, desk.pool.arrays[row], parts, firsts[row])
                except OSError as error:  # another process may have removed it
                    self._refuse(done, row, str(error), tier, name)
                except KvbmError as error:
                    self._refuse(done, row, str(error), tier, name, parts[-1:])
            done.digests = self._own(desk, blocks)  # before what is compared: so it is of what was right
            if self.verify:
                found = desk.pool.digest(rows, tokens=np.asarray(firsts, np.int64), model=self._model)
                for row in np.flatnonzero(found != expected).tolist():
                    if done.good[row // self.each]:
                        why = f"{tier.home(names[row])}: digest: expected {expected[row]:#018x}, got {found[row]:#018x}"
                        self._refuse(done, row, why, tier, names[row], used[row])
            units = (blocks[:, None] * self.each + np.arange(self.each))[done.good].reshape(-1)
            good = np.repeat(done.good, self.each)
            done.nbytes = len(units) * desk.pool.shape.nbytes
            desk.back.copy(rows[good], units).synchronize()
        return done

    def _refuse(self, done: Shelved, row: int, why: str, tier: KvbmTier, name: str, parts: Sequence[Part] = ()) -> None:
        done.good[row // self.each] = False
        done.why = done.why or why
        for part in parts:
            tier.drop(name, part)

    def _fetch(self, tier: KvbmTier, name: str, into: npt.NDArray[Any], parts: list[Part], first: int) -> int:
        """Read this rank's heads of a unit, and the digest that they must have; `parts` gets the files that were looked at."""
        taken = cover(tier.parts(name), *self.part)
        if taken is None:
            raise BindError(f"{tier.home(name)}: heads {self.part.first} to {self.part.last - 1}: some are in no file")
        total = 0
        for part, begin, end in taken:
            parts.append(part)
            stored, digests = tier.open(name, part)
            [entry] = stored.blocks.values()
            data = into[begin - self.part.first : end - self.part.first].reshape(-1).view(np.uint8).data
            step = data.nbytes // (end - begin)
            with stored.path.open("rb", buffering=0) as file:
                file.seek(entry.begin + (begin - part.first) * step)
                while len(data):
                    if not (count := file.readinto(data)):
                        raise DigestError(f"{stored.path}: cut short")
                    data = data[count:]
            total += sum(digests[begin - part.first : end - part.first])
            touch(stored.path, first)
        return total % (1 << 64)
