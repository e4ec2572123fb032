"""Cases of `reshard_oracle` sent in chunks of wire format 1, and a reader of chunks that follows only docs/reference/wire.md.

Messages are described in the specification's terms.  The reader finds elements by NumPy and struct, without kvbm.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import digest_oracle
import reshard_oracle
from kvbm.reshard.packer import NUM_CELLS
from reshard_oracle import Case, Engine, Run

# ---- the reader --------------------------------------------------------------------------------------------------------

FIELDS = ("digest", "magic", "version", "reserved", "plan", "key", "epoch", "source", "destination", "mark")
FIELDS = (*FIELDS, "chunk", "chunks", "units", "nbytes")
ORDER = "loht"


@dataclass(frozen=True)
class Told:
    """The facts of a message that both sides know.

    Attributes
    ----------
    planes : dict of str to (dict of str to list of int, int)
        Name → axes with their coordinates in the model, without ``t``; and bytes of an element, or of two elements of four bits.
    counts : dict of str to int
        Number of layers and heads of the model.
    offsets, units, tokens : list of int
        Tokens of a unit that are sent; positions of the units and of the single tokens.
    """

    planes: dict[str, tuple[dict[str, list[int]], int]]
    counts: dict[str, int]
    offsets: list[int]
    units: list[int]
    tokens: list[int]


def unit(sides: list[tuple[int, int, int]], distance: int) -> int:
    """Tokens of a unit, from ``(nt, every, k)`` of both sides and the distance of their origins."""
    for g in range(min(nt * k for nt, _, k in sides), 0, -1):
        turns = [(every, every * k) for _, every, k in sides]
        chain = sorted({1, g, *(x for turn in turns if g % turn[1] == 0 for x in turn)})
        if (
            distance % g == 0
            and all(
                (g % (every * k) == 0 and nt * k % g == 0) or (every % g == 0 and nt % g == 0) for nt, every, k in sides
            )
            and all(b % a == 0 for a, b in zip(chain, chain[1:], strict=False))
        ):
            return g
    raise AssertionError


def trailer(data: bytes) -> dict[str, Any]:
    return dict(zip(FIELDS, struct.unpack("<Q4sHHQQQHHIIIII", data[-64:]), strict=True))


def canonical(axis: str) -> tuple[int, str]:
    return ORDER.index(axis) if axis in ORDER else 5 if axis == "d" else 4, axis


def sizes(told: Told) -> tuple[int, int]:
    """Bytes of a unit, and of a single token."""
    found = []
    for tokens in (len(told.offsets), 1):
        held = [
            item * tokens * int(np.prod([len(some) for some in axes.values()])) for axes, item in told.planes.values()
        ]
        found.append(sum(-(-one // 16) * 16 for one in held))
    return found[0], found[1]


def cut(told: Told, most: int, least: int = 1 << 20) -> list[tuple[range, range]]:
    """The units and single tokens of each chunk."""
    u, v = sizes(told)
    total = len(told.units) * u + len(told.tokens) * v
    n = max(1, min(most, max(least, total // 4)) // u)
    found = []
    first = 0
    while first < len(told.units):
        found.append((range(first, min(first + n, len(told.units))), range(0)))
        first += n
    left = len(told.tokens)
    if left and found and len(found[-1][0]) * u + left * v <= most:
        return [*found[:-1], (found[-1][0], range(left))]
    first = 0
    while first < left:
        found.append((range(0), range(first, min(first + most // v, left))))
        first += most // v
    return found


def planes_of(
    told: Told, data: bytes, units: range, tokens: range
) -> Iterator[tuple[str, list[str], np.ndarray, list[int], int]]:
    """Name, axes, bytes ``[*axes, item]`` and positions along ``t`` of every plane of every unit; the unit's position."""
    at = 0
    for start, offsets in [*((told.units[i], told.offsets) for i in units), *((told.tokens[i], [0]) for i in tokens)]:
        for name in sorted(told.planes):
            held, item = told.planes[name]
            axes = sorted([*held, "t"], key=canonical)
            shape = [len(offsets) if axis == "t" else len(held[axis]) for axis in axes]
            count = int(np.prod(shape)) * item
            found = np.frombuffer(data, np.uint8, count, at).reshape(*shape, item)
            at += -(-count // 16) * 16
            yield name, axes, found, [start + offset for offset in offsets], start
    assert at == len(data) - 64


def digest(told: Told, data: bytes, units: range, tokens: range) -> int:
    """The kvbm-digest-1 of a chunk's contents, plane by plane."""
    total = 0
    lanes = _lanes(told)
    firsts = dict(
        zip(sorted(told.planes), np.cumsum([0, *(lanes[name] for name in sorted(told.planes))]), strict=False)
    )
    for name, axes, found, positions, _ in planes_of(told, data, units, tokens):
        held = dict(told.planes[name][0])
        order = [axis for axis in axes if axis != "t"]
        rows = np.moveaxis(found, axes.index("t"), 0)
        along = _along(told, name)
        if along:  # rows go along the last axis
            assert order[-1] == along
            rows = rows.reshape(*rows.shape[:-2], -1)
            order = order[:-1]
        cell = int(np.gcd(rows.shape[-1], 16))
        cells = rows.reshape(*rows.shape[:-1], -1, cell)
        place = np.arange(cells.shape[-2], dtype=np.uint64)
        count = cells.shape[-2]
        for axis in reversed(order):
            step = np.asarray(held[axis], np.uint64) * np.uint64(count)
            place = np.add.outer(step, place)
            count *= told.counts.get(axis, len(held[axis]))
        keys = np.asarray(positions, np.uint64).reshape(-1, *[1] * place.ndim) * np.uint64(sum(lanes.values())) + place
        total += int(digest_oracle.of_cells(cells, keys + np.uint64(firsts[name])).sum(dtype=np.uint64))
    return total % (1 << 64)


def _along(told: Told, name: str) -> str:
    """The axis of a plane's rows."""
    own = [axis for axis, some in told.planes[name][0].items() if axis not in "loh" and len(some) > 1]
    return max(own, key=canonical, default="")


def _lanes(told: Told) -> dict[str, int]:
    """Number of the model's cells per token, for each plane."""
    found = {}
    for name, (held, item) in told.planes.items():
        along = _along(told, name)
        row = item * (len(held[along]) if along else 1)
        rest = [told.counts.get(axis, len(some)) for axis, some in held.items() if axis != along]
        found[name] = int(np.prod(rest)) * row // int(np.gcd(row, 16))
    return found


def mark(tokens: range, origins: tuple[int, int], layers: range, most: int, least: int = 1048576) -> int:
    said = struct.pack("<7Q", tokens.start, max(tokens.start, tokens.stop), *origins, layers.start, layers.stop, most)
    if least != 1048576:
        said += struct.pack("<Q", least)
    return int.from_bytes(hashlib.sha256(said).digest()[:4], "little")


# ---- cases -------------------------------------------------------------------------------------------------------------


def engine(mesh: Any, nt: int, layouts: str, **options: Any) -> Engine:
    """An engine with one layout."""
    given: dict[str, Any] = {"heads": None, "tokens": None, "every": 1, "bounds": (0, 3), "group": (0, 1, 2), **options}
    return Engine(mesh, nt=nt, layouts=(layouts,), **given)


def case(src: Engine, dst: Engine, sizes: Any, tokens: range, layers: range | None = None, seed: int = 1) -> Case:
    nl, no, nh, hd, dtype = sizes
    told = []
    for side in (src, dst):
        entries = -(-tokens.stop // side.nt)
        told.append(
            reshard_oracle.Told(tuple(tuple(range(entries))[::-1] for _ in range(side.world)), (0,) * side.world)
        )
    blocks = [-(-tokens.stop // side.nt) + 1 for side in (src, dst)]
    return Case(
        seed, nl, no, nh, hd, dtype, src, dst, ((tokens, *told),), (blocks[0], blocks[1]), layers, False, False, False, None, (0, 0)
    )  # fmt: skip


def is_sendable(case: Case) -> bool:
    """True if all tokens that are sent have blocks, and the tables of a side begin at the same position."""
    for tokens, *sides in case.sequences:
        for side, told in enumerate(sides):
            if len(set(told.origins)) > 1:
                return False
            if (side == 0 or case.gather) and len(tokens) and any(-1 in table for table in told.tables):
                return False
    return not case.clear_tail


def told_of(run: Run, made: Any, message: Any, tokens: range, origin: int, layers: range | None) -> Told:
    """A message in the specification's terms.  Only the unit's tokens come from a plan; the oracle's rules give the rest."""
    case = run.case
    src, dst = case.engines if made.src.name == run.places[0].name else (case.dst, case.dst)
    own = set(case.dst.holds_layers(message.dst))
    both = [x for m in message.l for x in m.coordinates("first")]  # whose share it is, is the plan's
    assert set(both) <= own & set(src.holds_layers(message.src)) and both == sorted(both)
    held = {
        "l": [x for x in both if layers is None or x in layers],
        "h": sorted(set(src.holds_heads(message.src, case.nh)) & set(dst.holds_heads(message.dst, case.nh))),
        "o": list(range(case.no)),
    }
    planes = {}
    for name, (others, items, itemsize, _) in run.scene.sides[1][message.dst].planes.items():
        planes[name] = ({axis: held[axis] if axis in held else items[axis].tolist() for axis in others}, itemsize)
    g = message.t.tokens
    positions = np.arange(tokens.start, tokens.stop)
    common = src.holds_tokens(message.src, positions) & dst.holds_tokens(message.dst, positions)
    starts = [p for p in range(origin % g, tokens.stop - g + 1, g) if p >= tokens.start]
    inside = {p for start in starts for p in range(start, start + g)}
    mine = set(positions[common].tolist())
    units = [start for start in starts if mine & set(range(start, start + g))]
    offsets = sorted({p - start for start in units for p in mine & set(range(start, start + g))}) or [0]
    return Told(planes, {"l": case.nl, "h": case.nh}, offsets, units, sorted(mine - inside))


Slots = Callable[[int], Any]


class Carried:
    """A case whose sequences were packed and can be unpacked, with the bytes of every chunk.

    Parameters
    ----------
    run : Run
    room : callable
        Called with a number of bytes; returns a slot.
    stream : optional
    finish : callable
        Waits for the end of a call.
    max_sms : int, optional
    """

    def __init__(
        self,
        run: Run,
        room: Slots,
        rng: random.Random,
        *,
        stream: Any = None,
        finish: Callable[[Any], None] = lambda done: done.synchronize(),
        max_sms: int | None = None,
    ) -> None:
        self.run, self.room, self.rng, self.finish, self.max_sms = run, room, rng, finish, max_sms
        self.options = {} if stream is None else {"stream": stream}

    def __call__(self, read: Callable[[Any], bytes], verify: str) -> None:
        from kvbm import reshard

        case = self.run.case
        for number, step in enumerate(self.run.steps):
            made = step.made
            pools = self.run.pools[0 if number == 0 else 1], self.run.pools[1]
            packers: list[dict[int, Any]] = [
                {
                    rank: reshard.Packer(made, rank, pools[side][rank], side=name, max_sms=self.max_sms)
                    for rank in {getattr(m, name) for m in made.messages}
                }
                for side, name in enumerate(("src", "dst"))
            ]
            for index, (tokens, *sides) in enumerate(case.sequences):
                told = sides if number == 0 else [sides[1], sides[1]]
                origins = [one.origins[0] for one in told]
                most, cuts = 16 << 20, []
                for again in (False, True):  # first to know how large a unit is
                    cuts = [
                        {
                            rank: reshard.Cut(
                                packer,
                                self.span(told[side], rank, tokens),
                                origin=origins[1 - side],
                                layers=case.layers,
                                most=most,
                            )
                            for rank, packer in packers[side].items()
                        }
                        for side in (0, 1)
                    ]
                    largest = max(
                        (
                            part.lane.nbytes
                            for cut in cuts[0].values()
                            for both in cut._parts.values()
                            for part in both
                            if part
                        ),
                        default=16,
                    )
                    most = most if again else self.rng.choice([largest, 2 * largest + 16, 5 * largest, 16 << 20])
                self._carry(made, cuts, tokens, index, origins, most, read, verify)

    def span(self, told: Any, rank: int, tokens: range) -> Any:
        import kvbm

        return kvbm.Span(told.tables[rank], tokens, told.origins[rank])

    def _carry(
        self, made: Any, cuts: Any, tokens: range, index: int, origins: list[int], most: int, read: Any, verify: str
    ) -> None:
        key, epoch = f"sequence-{index}", 7 + index
        slots = {}
        for rank, one in cuts[0].items():
            mine = {(peer, chunk.number): self.room(chunk.size) for peer, some in one.chunks.items() for chunk in some}
            order = self.rng.sample(list(mine), len(mine))
            while order:
                now, order = order[:3], order[3:]
                self.finish(one.pack({at: mine[at] for at in now}, key=key, epoch=epoch, **self.options))
            for (peer, number), slot in mine.items():
                slots[rank, peer, number] = slot
                self._check(made, one.chunks[peer][number], bytes(read(slot)), tokens, origins, most, key, epoch)
        for rank, one in cuts[1].items():
            expected = {(peer, chunk.number) for peer, some in one.chunks.items() for chunk in some}
            assert expected == {(src, number) for src, dst, number in slots if dst == rank}
            order = self.rng.sample(sorted(expected), len(expected))
            while order:
                now, order = order[:2], order[2:]
                given = {(peer, number): slots[peer, rank, number] for peer, number in now}
                self.finish(one.unpack(given, key=key, epoch=epoch, verify=verify, **self.options))

    def _check(
        self, made: Any, chunk: Any, data: bytes, tokens: range, origins: list[int], most: int, key: str, epoch: int
    ) -> None:
        """Compare the bytes of a chunk with the specification, element by element."""
        case, message = self.run.case, chunk.message
        told = told_of(self.run, made, message, tokens, origins[0], case.layers)
        units, singles = cut(told, most)[chunk.number]
        assert (units, singles, len(cut(told, most))) == (chunk.units, chunk.tokens, chunk.of), str(chunk)
        u, v = sizes(told)
        layers = range(case.nl) if case.layers is None else case.layers
        found = trailer(data)
        assert found == {
            "digest": digest(told, data, units, singles),
            "magic": b"KVBM",
            "version": 1,
            "reserved": 0,
            "plan": int(made.fingerprint, 16),
            "key": int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little"),
            "epoch": epoch,
            "source": message.src,
            "destination": message.dst,
            "mark": mark(tokens, (origins[0], origins[1]), layers, most),
            "chunk": chunk.number,
            "chunks": chunk.of,
            "units": len(units),
            "nbytes": len(units) * u + len(singles) * v,
        }
        sequence = int(key.rpartition("-")[2])
        for name, axes, got, positions, _ in planes_of(told, data, units, singles):
            others, _, itemsize, _ = self.run.scene.sides[1][message.dst].planes[name]
            held = told.planes[name][0]
            grid = [np.asarray([sequence]), np.asarray(positions), *(np.asarray(held[axis]) for axis in others)]
            want = reshard_oracle.values(case, name, others, np.ix_(*grid), itemsize)[0]
            where = ["t", *others]
            want = want.transpose([*(where.index(axis) for axis in axes), len(where)])
            assert np.array_equal(got, want), f"{case}: {chunk}: plane {name!r}"


def far_cells(address: int, nbytes: int, count: int) -> tuple[int, Any]:
    """The same units, with the largest possible ids."""
    at = NUM_CELLS - 1 - (count - 1) * (nbytes // 16)
    return address - 16 * at, np.arange(at, NUM_CELLS, nbytes // 16, dtype=np.int64)
