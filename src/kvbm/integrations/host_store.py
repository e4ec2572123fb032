"""An engine's blocks in host memory, each with the digest that it had when it was stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..copy.transfer import Strategy, Transfer
from ..copy.zeros import Zeros
from ..errors import BindError
from ..planner.cast import Cast
from ..pool.pool import Pool

__all__ = ["Copying", "HostStore", "Ids"]

Ids = npt.NDArray[np.int64]


@dataclass
class Copying:
    """A running copy of blocks `ids` of the engine and `units` of the host.

    It keeps the memory of the copy until the copy is done.  For a load, `expected` are the digests of the units when they were
    stored, and `refused` is true for units that were not copied, because they were not stored or have changed.  `digests`
    (int64) has one row per copy; the rows add up to the digests of the copied blocks.  `dones` is what the copies return.
    """

    ids: Ids
    units: Ids
    expected: npt.NDArray[np.uint64]
    refused: npt.NDArray[np.bool_]
    digests: torch.Tensor | None
    dones: list[Any] = field(default_factory=list)

    def synchronize(self) -> None:
        """Wait until the copies are done, and raise their errors."""
        for done in self.dones:
            done.synchronize()

    def is_done(self) -> bool:
        """True if the copies are done.  It does not wait."""
        return all(done.query() for done in self.dones)

    def found(self) -> npt.NDArray[np.uint64]:
        """The digests of the copied blocks.  The copies must be done."""
        assert self.digests is not None
        found: npt.NDArray[np.uint64] = self.digests.numpy().view(np.uint64).sum(0, dtype=np.uint64)
        return found


class HostStore:
    """Copies an engine's blocks to host memory and back, and finds blocks that have changed there.

    Parameters
    ----------
    engine, host : Pool
        The two pools.  A block of `host` is called a unit.
    verify : bool
        Keep a digest of each unit, and compare it with the digest of what is loaded.
    strategy, cast
        As for `Transfer`.  With a cast `host` has quantised values, and digests are those of the quantised units.
    digests, known : arrays of uint64 and of bool, optional
        Memory for the digest of each unit when it was stored, and for a flag: True for units that were stored.

    Attributes
    ----------
    out, back : Transfer
        The copies from the engine, and to the engine.
    zeros : Zeros
        Writes zeros into blocks of the engine.

    Notes
    -----
    A load has three steps: `load`, then `Copying.synchronize`, then `wrong`.  The caller writes zeros into the wrong blocks before
    it tells anyone that the load has ended.  On the CPU, units are compared before they are copied, so that the contents of a wrong
    unit never reach the engine.
    """

    def __init__(
        self, engine: Pool, host: Pool, *, verify: bool = True, strategy: Strategy = "auto",
        digests: npt.NDArray[np.uint64] | None = None, known: npt.NDArray[np.bool_] | None = None, cast: Cast = None,
    ) -> None:  # fmt: skip
        self.engine, self.host, self.verify = engine, host, verify
        self.out = Transfer(engine, host, strategy, cast=cast)
        self.back = Transfer(host, engine, strategy, cast=cast)
        self.zeros = Zeros(engine)
        self.digests = np.zeros(host.num_blocks, np.uint64) if digests is None else digests
        self.known = np.zeros(host.num_blocks, np.bool_) if known is None else known
        self.on_gpu = engine.device != "cpu"
        #: Bytes of a unit, without padding.
        self.nbytes = host.resolved.block_bytes

    def store(self, ids: Sequence[int] | Ids, units: Sequence[int] | Ids, stream: Any = None) -> Copying:
        """Begin to copy blocks of the engine to units.  Call `stored` when the copy is done.

        Until then the units are unknown: what they held before is lost.
        """
        copying = self._copying(ids, units, 1)
        self.known[copying.units] = False
        options = self._options(copying, 0, stream)
        copying.dones.append(self.out.copy(copying.ids, copying.units, **options))
        return copying

    def stored(self, copying: Copying) -> None:
        """Keep the digests of a copy that is done.  Its units are known from now on."""
        if copying.digests is not None:
            self.digests[copying.units] = copying.found()
        self.known[copying.units] = True

    def changed(self, units: Sequence[int] | Ids) -> npt.NDArray[np.bool_]:
        """For each unit: True if it was not stored, or if host memory no longer holds what was stored."""
        at = self._checked_units(units)
        wrong: npt.NDArray[np.bool_] = ~self.known[at]
        if self.verify and at.size:
            wrong |= self.host.digest(at) != self.digests[at]
        return wrong

    def load(
        self, units: Sequence[int] | Ids, ids: Sequence[int] | Ids, parts: Iterable[range | None] = (None,),
        stream: Any = None,
    ) -> Iterator[Copying]:  # fmt: skip
        """Begin to copy units to blocks of the engine, one part per step: a range of layers, None for all.

        Yields the same object each time.  A unit that was not stored is not copied.  On the CPU neither is one that has
        changed.
        """
        steps = list(parts)
        copying = self._copying(ids, units, len(steps))
        copying.refused = ~self.known[copying.units] if self.on_gpu else self.changed(copying.units)
        into = np.where(copying.refused, -1, copying.ids)
        for row, layers in enumerate(steps):
            if layers is None or layers:
                options = self._options(copying, row, stream)
                copying.dones.append(self.back.copy(copying.units, into, layers=layers, **options))
            yield copying

    def wrong(self, copying: Copying) -> npt.NDArray[np.bool_]:
        """For each block of a load that is done: True if it does not hold what was stored."""
        wrong = copying.refused.copy()
        if copying.digests is not None:
            wrong |= copying.found() != copying.expected
        return wrong

    def close(self) -> None:
        """Free the memory of the copies, not the pools.  Wait for the copies before."""
        self.out.close()
        self.back.close()
        self.zeros.close()

    def _checked_units(self, units: Sequence[int] | Ids) -> Ids:
        found: Ids = np.asarray(units, np.int64)
        if found.size and (found.min() < 0 or found.max() >= self.host.num_blocks):
            raise BindError(
                f"host memory: expected blocks from 0 to {self.host.num_blocks - 1}, got {found.min()} to {found.max()}"
            )
        return found

    def _copying(self, ids: Sequence[int] | Ids, units: Sequence[int] | Ids, steps: int) -> Copying:
        at = self._checked_units(units)
        digests = torch.zeros(steps, at.size, dtype=torch.int64, pin_memory=self.on_gpu) if self.verify else None
        return Copying(np.asarray(ids, np.int64), at, self.digests[at], np.zeros(at.size, np.bool_), digests)

    def _options(self, copying: Copying, row: int, stream: Any) -> dict[str, Any]:
        options = {} if stream is None else {"stream": stream}
        if copying.digests is not None:
            options["digests"] = copying.digests[row]
        return options
