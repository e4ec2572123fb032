"""Pools whose elements encode their place in a sequence, so that each side of a trial can check them independently."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from ..copy.transfer import convert
from ..layout import spec
from ..layout.shapes import BlockShape
from ..pool.pool import Pool
from ..system.machine import device_of
from ..wire import Slab
from ..wire.protocol import move

#: Blocks that are encoded or compared at a time.
STAGE = 16

#: Blocks of a pool that the sequence does not use.
SPARE = 3

#: The seed from which both sides of a trial make the same elements.
_SEED = 16

Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Side:
    """The configuration of one side."""

    engine: str
    device: str  # ``"cpu"`` or ``"cuda:N"``
    layout: str  # a name, or the path of a file
    nt: int  # tokens per block

    def __str__(self) -> str:
        return f"{self.device}, {self.layout}, {self.nt} tokens per block"

    def as_json(self) -> dict[str, Any]:
        return {"host": platform.node(), "device": self.device, "layout": self.layout, "tokens_per_block": self.nt}


class Coded:
    """A pool whose words encode their place in the sequence.  Words have 8 bytes, or fewer if 8 does not divide a row's bytes.

    `tokens` is the length of the longest sequence.  `busy` is called from time to time during long work.
    """

    def __init__(self, side: Side, shape: BlockShape, tokens: int, busy: Callable[[], None]) -> None:
        self.shape, self.busy = shape, busy
        count = -(-tokens // shape.nt)
        spare = count + SPARE
        self.pool = Pool.allocate(spec.load(side.layout), shape, spare, side.device)
        try:
            self._stage = Pool.allocate(spec.load("universal"), shape, min(STAGE, count), side.device)
        except BaseException:
            self.pool.close()
            raise
        random = np.random.default_rng(_SEED)
        self.table = np.random.default_rng([_SEED, shape.nt]).permutation(spare)[:count]
        row = shape.hd * shape.itemsize // shape.pack
        word = math.gcd(row, 8)
        heads = shape.nh, shape.nl, shape.no
        most = int(np.iinfo(f"uint{8 * word}").max)
        self._token_seed = int(random.integers(1 << 62))
        self._place = random.integers(0, most, (*heads, 1, 1), np.dtype(f"u{word}"), endpoint=True)
        self._word = random.integers(0, most, (1, 1, 1, 1, row // word), self._place.dtype, endpoint=True)
        self._token = np.random.default_rng(self._token_seed).integers(
            0, most, (1, 1, 1, count * shape.nt, 1), self._place.dtype, endpoint=True
        )
        self._host = np.empty((*heads, shape.nt, row // word), self._place.dtype)
        self._device = device_of(side.device)

    def code(self, block: int) -> Words:
        """The correct contents of a block of the sequence, with axes h, l, o, t and word."""
        nt = self.shape.nt
        found: Words = self._place ^ self._token[:, :, :, block * nt : (block + 1) * nt] ^ self._word
        return found

    def fill(self) -> None:
        """Write the whole sequence."""
        self._write(self.code)

    def spoil(self) -> None:
        """Write other data than the sequence: every bit is inverted."""
        self._write(lambda block: np.invert(self.code(block)))

    def _write(self, code: Callable[[int], Words]) -> None:
        for first in range(0, len(self.table), self._stage.num_blocks):
            table = self.table[first : first + self._stage.num_blocks]
            for number in range(len(table)):
                self._host[...] = code(first + number)
                move(self._slab(number), 0, self._host_slab, 0, self._host.nbytes)
                self.busy()
            convert(self._stage, self.pool, range(len(table)), table)
            self._settle()

    def wrong(self, tokens: int) -> str:
        """Describe the differences in the first `tokens` tokens of the sequence; empty if all are correct."""
        for first in range(0, -(-tokens // self.shape.nt), self._stage.num_blocks):
            table = self.table[first : first + self._stage.num_blocks]
            convert(self.pool, self._stage, table, range(len(table)))
            self._settle()
            for number in range(len(table)):
                move(self._host_slab, 0, self._slab(number), 0, self._host.nbytes)
                begin = (first + number) * self.shape.nt
                differ = (self._host != self.code(first + number))[:, :, :, : max(tokens - begin, 0)]
                self.busy()
                if differ.any():
                    h, layer, o, t, _ = np.argwhere(differ)[0]
                    last, kv = min(begin + self.shape.nt, tokens) - 1, "KV"[o] if self.shape.no == 2 else f"o {o}"
                    return (
                        f"{np.count_nonzero(differ):,} words of tokens {begin}–{last} are wrong, the first in layer {layer}, {kv}, "
                        f"head {h}, token {begin + t}"
                    )
        return ""

    def _slab(self, number: int) -> Slab:
        return Slab.of(self._stage.arrays[number])

    @property
    def _host_slab(self) -> Slab:
        return Slab(int(self._host.ctypes.data), self._host.nbytes)

    def _settle(self) -> None:
        if self._device >= 0:
            _core.synchronize(self._device)

    def close(self) -> None:
        self._stage.close()
        self.pool.close()
