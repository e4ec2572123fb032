"""Direct links: a rank copies out of a peer's pool, which it has opened, into its own, without chunks.

Only for peers on one host.  The owner lends its blocks and digests them.  The reader copies and compares.  Nobody writes to the
memory of another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from .._arguments import quoted
from ..compile.prepare import digest_copies, prepare, warm
from ..digest.cells import alone, fused
from ..digest.run import fused_copies
from ..errors import BindError, CudaError, KvbmError
from ..layout.grammar import parse, write
from ..layout.layout import Layout
from ..layout.shapes import BlockShape
from ..memory.allocation import find_ranges
from ..memory.numa import pci_address
from ..memory.shared import file_of, opened_arrays
from ..planner.plan import between
from ..pool.pool import Pool
from ..pool.section import PoolSection
from ..reshard.casting import meaning_of
from ..reshard.messages import Message
from ..reshard.packer import Packer
from ..reshard.sequence import NONE, Ids, Span
from ..system.machine import device_of
from ..wire import Slab
from .sums import Sums

#: Most arrays of a pool that is lent: their places are part of a card.
_MOST_ARRAYS = 1024

#: Most characters and opening brackets of a layout's text in a card.
_MOST_TEXT, _MOST_BRACKETS = 2 << 10, 64

#: Most characters of the address of a GPU in a card.
_MOST_ADDRESS = 64

#: Default multiprocessors of a copy out of another GPU.  More do not make NVLink faster (benchmarks/NOTES.md), and would keep a
#: model's kernels from them.
_SMS_ACROSS = 16

#: Most ids of a launch that only digests.
_MOST_IDS = (1 << 31) - 1

#: Bytes that a call copies on the CPU, where it returns when they are copied: other transfers wait meanwhile.
_PIECE_BYTES = 4 << 20


# ---- what a card says of a pool ------------------------------------------------------------------------------------


class Shared(NamedTuple):
    """How a peer opens a pool."""

    layout: str
    num_blocks: int
    #: Memory: the number of its memory file, or the digits of its CUDA IPC handle; its bytes; its address in the owner.
    pieces: tuple[tuple[str, int, int], ...]
    #: For each allocation of the layout's table: its piece, and its first byte there.
    places: tuple[tuple[int, int], ...]
    gpu: str = ""  # PCI address of the GPU that has the memory; empty for host memory, or if it is not known


def shared(pool: Pool, *, scales: bool = False) -> Shared:
    """How peers on this host open a pool; `BindError` says why they cannot.  `scales`: tell which planes hold them."""
    if pool.addresses.size > _MOST_ARRAYS:
        raise BindError(f"it has {pool.addresses.size} arrays, and at most {_MOST_ARRAYS} are lent")
    if any(step.opaque for access in pool.resolved.accesses for step in access.steps):
        raise BindError("its layout promises no order of some axes")
    text = told(pool.layout, scales=scales)
    if pool.device == "cpu":
        gpu, files = "", [file_of(int(begin), int(end)) for begin, end in pool.spans]
        pieces = {begin: (str(file), end - begin, begin) for file, begin, end in files}
    else:
        device = device_of(pool.device)
        gpu = pci_address(device)
        ranges = find_ranges(pool.spans.tolist(), (), functools.partial(_core.memory_range, pinned=False))
        if ranges is None:
            raise BindError("the driver does not know its memory")
        try:
            pieces = {begin: (_core.ipc_handle(device, begin).hex(), end - begin, begin) for begin, end in ranges}
        except CudaError as error:
            raise BindError(f"its memory has no CUDA IPC handle, as that of expandable segments and sleep mode: {error}") from None
    begins = np.array(sorted(pieces), np.uint64)
    at = np.searchsorted(begins, pool.addresses, side="right") - 1
    places = zip(at.tolist(), (pool.addresses - begins[at]).tolist(), strict=True)
    return Shared(text, pool.num_blocks, tuple(pieces[int(begin)] for begin in begins), tuple(places), gpu)


def told(layout: Layout, *, scales: bool) -> str:
    """The text of a layout in a card; `BindError` if it is too long."""
    text = write(layout, scales=scales)
    if not _is_short(text):
        raise BindError(
            f"its layout's text has {len(text)} characters: at most {_MOST_TEXT}, and {_MOST_BRACKETS} brackets, are told"
        )
    return text


def read_layout(text: Any, name: str) -> Layout:
    """The layout that a card tells; `BindError` if it is none."""
    if not isinstance(text, str) or not _is_short(text):
        raise BindError(f"card: expected the text of a layout, got {quoted(text, 60)}")
    try:
        return parse(text, "a peer's card", name)
    except KvbmError as error:
        raise BindError(f"card: expected the text of a layout: {error}") from None


def _is_short(layout: str) -> bool:
    """True if a layout's text takes little time to read, whatever it says."""
    return len(layout) <= _MOST_TEXT and layout.count("[") + layout.count("{") <= _MOST_BRACKETS


def read_shared(given: Any) -> Shared:
    """Check what a card says.  Raises `BindError` if it is malformed."""
    kinds = {"layout": str, "num_blocks": int, "pieces": list, "places": list}
    if not isinstance(given, dict) or any(type(given.get(key)) is not kind for key, kind in kinds.items()):
        raise BindError(f"card: expected a shared pool with {', '.join(kinds)}, got {quoted(given, 60)}")
    pieces, places = given["pieces"], given["places"]
    if not _is_short(given["layout"]) or not 0 < given["num_blocks"] < 1 << 31:
        raise BindError("card: expected a shared pool with a layout and blocks")
    for piece in pieces:
        if not isinstance(piece, list) or [type(one) for one in piece] != [str, int, int] or not all(
            0 < one < 1 << 63 for one in piece[1:]
        ):
            raise BindError(f"card: expected handle, bytes and address of shared memory, got {quoted(piece, 60)}")
    for place in places:
        if not isinstance(place, list) or [type(one) for one in place] != [int, int] or not (
            0 <= place[0] < len(pieces) and 0 <= place[1] < pieces[place[0]][1]
        ):
            raise BindError(f"card: expected a piece and a byte of it, got {quoted(place, 60)}")
    if not 0 < len(places) <= _MOST_ARRAYS:
        raise BindError(f"card: expected at most {_MOST_ARRAYS} arrays, got {len(places)}")
    used, distinct = {piece for piece, _ in places}, {(handle, begin) for handle, _, begin in pieces}
    if not len(pieces) == len(used) == len(distinct):
        raise BindError(f"card: expected pieces of shared memory that arrays use, each once, got {len(pieces)} for {len(used)}")
    gpu = given.get("gpu", "")  # cards of earlier versions have none
    if not isinstance(gpu, str) or len(gpu) > _MOST_ADDRESS:
        raise BindError(f"card: expected the PCI address of a GPU, got {quoted(gpu, 60)}")
    return Shared(given["layout"], given["num_blocks"], tuple(map(tuple, pieces)), tuple(map(tuple, places)), gpu)


def opened(shared_pool: Shared, shape: BlockShape, name: str, lend: Callable[[str, int, int], Slab]) -> Pool:
    """A peer's pool in this process.  It is read-only.  `lend` opens a piece by handle, bytes and address."""
    layout = parse(shared_pool.layout, "a peer's card", name)
    resolved = layout.resolve(shape, shared_pool.num_blocks)
    if len(shared_pool.places) != resolved.table_size:
        raise BindError(f"{name}: expected {resolved.table_size} arrays, its card has {len(shared_pool.places)}")
    for (piece, first), kind in zip(shared_pool.places, resolved.kind_of_entry, strict=True):
        if first + resolved.kinds[kind].extent > shared_pool.pieces[piece][1]:
            raise BindError(f"{name}: its card names bytes behind the end of its memory")
    slabs = [lend(*piece) for piece in shared_pool.pieces]
    arrays = opened_arrays(resolved, [(slabs[piece], first) for piece, first in shared_pool.places])
    return Pool(layout, shape, arrays, num_blocks=shared_pool.num_blocks)


# ---- both sides ----------------------------------------------------------------------------------------------------


#: Size of the caches of what all sequences of some tokens have in common.
_MOST_TOKENS = 32


class _Units(NamedTuple):
    """Units or single tokens of a message."""

    number: int  # which of the messages that `Packer.listed` returns
    single: bool
    message: Message  # the message, with the layers that are exchanged
    at: Ids  # positions


def _units(packer: Packer, peer: int, span: Span, origin: int, layers: range) -> Iterator[_Units]:
    """What a rank exchanges with a peer, of some tokens and layers."""
    for number, (message, listed) in enumerate(packer.listed(span, origin)):
        some = message.of_layers(layers)
        if packer.peer(message) == peer and some is not None:
            for single in (False, True):
                if listed.at[single].size:
                    yield _Units(number, single, some, listed.at[single])


class Pass:
    """Launches under way, and the sums of their digests."""

    def __init__(self) -> None:
        self._begun: list[tuple[_core.Done | None, Sums | None, bool]] = []
        self.total = self.cast = 0  # the digests of what was read; of what was written, if it was quantised

    def add(self, done: _core.Done | None, digests: Sums | None, *, is_cast: bool = False) -> None:
        """Launches of which `done` is the end; None on the CPU, where they have ended.  All are enqueued."""
        if digests is not None:
            digests.is_enqueued = True
        self._begun.append((done, digests, is_cast))

    @property
    def dones(self) -> list[_core.Done]:
        """The end of the launch that is next to end, if it is not known yet."""
        return [done for done, *_ in self._begun[:1] if done is not None]

    def query(self) -> bool:
        """True if all is done."""
        while self._begun and (self._begun[0][0] is None or self._begun[0][0].query()):
            _, digests, is_cast = self._begun.pop(0)
            found = 0 if digests is None else int(digests.memory.sum(dtype=np.uint64))
            self.total = (self.total + (0 if is_cast else found)) % (1 << 64)
            self.cast = (self.cast + (found if is_cast else 0)) % (1 << 64)
        return not self._begun

    def synchronize(self) -> None:
        for done, *_ in self._begun:
            if done is not None:
                done.synchronize()


def _digest_copies(section: PoolSection, packer: Packer, message: Message, single: bool, side: int) -> list[_core.Copy]:
    """The launches that digest a section of a pool as the cells of a message.  `side`: whose format the pool has."""
    pool = section.pool
    _, keys = packer.keys(message, single, side)
    cells = alone(section.of, keys, pool.alignment, f"digest of {pool.layout.name}", turns=packer.device >= 0)
    copies = digest_copies(cells, keys.lanes, pool.steps)
    warm(copies, packer.device)
    return copies


def _digesting(
    section: PoolSection, table: _core.Table, packer: Packer, message: Message, single: bool, side: int
) -> _core.Route:
    """The route of `_digest_copies`."""
    copies = _digest_copies(section, packer, message, single, side)
    return _core.Route(packer.device, table, table, section.num_ids, _MOST_IDS, direct=(), limits=(), digests=(copies, ()))


def _digest(
    route: _core.Route, packer: Packer, num_ids: int, ids: Ids, at: Ids, into: Pass, order: Mapping[str, Any], keep: Any,
    *, is_cast: bool = False,
) -> None:  # fmt: skip
    """Enqueue a pass over blocks or units that only digests them."""
    found = Sums(ids.size, packer.device >= 0)
    pairs = _core.Pairs(ids, None, num_ids, _MOST_IDS, False, packer.device)
    positions = _core.Positions(at, at.size, packer.device)
    if packer.device < 0:
        route.digest(pairs, positions, found.address)
        into.add(None, found, is_cast=is_cast)
        return
    keep = keep, found
    into.add(route.digest(pairs, positions, found.address, True, order["stream"], order["wait"], keep), found, is_cast=is_cast)


# ---- the owner -----------------------------------------------------------------------------------------------------


class Lender:
    """Digests what is lent of a pool, for each peer."""

    def __init__(self, packer: Packer) -> None:
        self._packer = packer
        self._routes: dict[tuple[Message, bool], tuple[_core.Route, int, int]] = {}
        #: Peer, tokens, origins and layers → number of the message and kind of the units, their route, and their positions.
        self._shapes: dict[tuple[Any, ...], list[tuple[int, bool, _core.Route, int, Ids]]] = {}

    def table(self, span: Span) -> Ids:
        """The span's table up to its last token; -1 for what is no block of the pool."""
        table, blocks = span.table[: self._packer.entries(span)[1]], self._packer.pool.num_blocks
        if _core.blocks_fit(table, blocks, False):
            return table
        return np.where((table >= 0) & (table < blocks), table, -1)

    def digest(self, peer: int, span: Span, origin: int, layers: range, order: Mapping[str, Any]) -> Pass:
        """Begin to digest what a peer reads of a sequence.  When it is done, the blocks are complete."""
        packer, found = self._packer, Pass()
        packer.require_usable()
        listed, key = packer.listed(span, origin), (peer, span.tokens, span.origin, origin, layers)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= _MOST_TOKENS:
                self._shapes.clear()
            shape = self._shapes[key] = []
            for number, single, message, at in _units(packer, peer, span, origin, layers):
                route, num_ids, first = self._routes.get((message, single)) or self._made(message, single)
                shape.append((number, single, route, num_ids, at + first))
        for number, single, route, num_ids, at in shape:
            _digest(route, packer, num_ids, listed[number][1].ids[single], at, found, order, packer)
        return found

    def _made(self, message: Message, single: bool) -> tuple[_core.Route, int, int]:
        packer, section = self._packer, self._packer.part(message, single)
        made = _digesting(section, packer.table, packer, message, single, 0), section.num_ids, packer.keys(message, single)[0]
        self._routes[message, single] = made
        return made


# ---- the reader ----------------------------------------------------------------------------------------------------


class _Launches(NamedTuple):
    """Launches between a section of the peer's pool and one of this rank's."""

    copies: _core.Route  # copies with digests; of a cast, only copies
    digests: _core.Route  # digests of the peer's pool
    written: _core.Route | None  # digests of this rank's pool, if copies quantise
    far_ids: int
    own_ids: int
    nbytes: int
    first: int


class Part(NamedTuple):
    """What one launch copies of a sequence, or only digests in the peer's pool, before the peer's table is known."""

    launches: _Launches
    is_copied: bool
    own: Ids  # ids in this rank's pool
    at: Ids  # positions of the sequence
    #: Of each pair: the entry of the peer's table, and the number in the entry's block.
    entries: Ids
    rests: Ids
    each: int  # ids per block of the peer's pool

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return self.is_copied * len(self.own) * self.launches.nbytes

    def some(self, at: Ids, is_copied: bool) -> Part:
        """The pairs of some positions in its arrays."""
        own, places, entries, rests = self.own[at], self.at[at], self.entries[at], self.rests[at]
        return self._replace(is_copied=is_copied, own=own, at=places, entries=entries, rests=rests)


class Piece(NamedTuple):
    """Pairs that one launch copies, or only digests in the peer's pool."""

    part: Part
    far: Ids


class Reader:
    """Copies of what a rank receives from one peer's pool: `far`, opened.  `gpu` is the PCI address of its GPU.

    A cast takes place in these copies, in one pass over the bytes of the peer's format.  If the peer cast before, it
    would take a pass more, and memory.  The peer's digest is that of its blocks: this rank digests them, too, after the
    copy.
    """

    def __init__(self, packer: Packer, peer: int, far: Pool, gpu: str = "") -> None:
        made = packer.made
        if made.casts and made.layouts and meaning_of(far.layout) != meaning_of(made.layouts[0]):
            raise BindError(f"{made.title}: its card tells of two layouts of its pool")
        self.packer, self._peer, self.far = packer, peer, far
        is_across = packer.device >= 0 and gpu != pci_address(packer.device)
        self._limits = dict.fromkeys([packer.max_sms or (_SMS_ACROSS if is_across and not made.casts else 0), packer.max_sms])
        self._table = _core.Table(far.steps.shorten(far.addresses, far.num_blocks), packer.device)
        self._launches: dict[tuple[Message, bool], _Launches] = {}
        #: Tokens, origins and layers → number of the message and kind of the units, their parts without ids; entries of the table.
        self._shapes: dict[tuple[range, int, int, range], tuple[list[tuple[int, bool, Part]], int]] = {}

    def parts(self, span: Span, origin: int, layers: range) -> list[Part]:
        """What is copied of a sequence, and what is only digested because this rank has no block for it.

        `origin` is the position at which the peer's block table begins.  Raises `BindError` if the span does not fit,
        or no turn of the peer begins there.
        """
        packer, found, listed = self.packer, list[Part](), self.packer.listed(span, origin)
        for number, single, part in self._shape(span, origin, layers)[0]:
            one = listed[number][1]
            own, launches = one.ids[single], part.launches
            each = len(own) if packer.device >= 0 else max(_PIECE_BYTES // max(launches.nbytes, 1), 1)
            whole = Part(launches, True, own, *part[3:])
            if len(own) <= each and one.has_all[single]:
                found.append(whole)
                continue
            for is_copied in (True, False):
                some = np.flatnonzero((own >= 0) == is_copied)
                found += [whole.some(some[begin : begin + each], is_copied) for begin in range(0, len(some), each)]
        return found

    def _shape(self, span: Span, origin: int, layers: range) -> tuple[list[tuple[int, bool, Part]], int]:
        """What all sequences of these tokens have in common; cached."""
        key = span.tokens, span.origin, origin, layers
        found = self._shapes.get(key)
        if found is None:
            packer, parts, needed = self.packer, list[tuple[int, bool, Part]](), 0
            lent = span if origin == span.origin else Span(NONE, span.tokens, origin)  # its table is not read
            for number, single, message, at in _units(packer, self._peer, span, origin, layers):
                far, launches = packer.ends(message)[1], self._launches_of(message, single)
                far.require_origin(origin)
                of = 1 if single else message.t.src_slots
                entries, rests = np.divmod(far.slots(lent, at), far.nt)
                part = Part(launches, True, NONE, at + launches.first, entries, rests // of, far.nt // of)
                parts.append((number, single, part))
                needed = -(-far.extent(lent)[1] // far.nt)
            if len(self._shapes) >= _MOST_TOKENS:
                self._shapes.clear()
            found = self._shapes[key] = parts, needed
        return found

    def pieces(self, parts: list[Part], table: Ids) -> list[Piece]:
        """The pairs of some parts, with the peer's block table of the sequence.

        Raises `BindError` if the table lacks a block for some of the tokens, or names one that the peer's pool does not
        have.
        """
        return [Piece(part, self._blocks(part, table) * part.each + part.rests) for part in parts]

    def foreseen(self, parts: list[Part], span: Span, layers: range) -> int | None:
        """Entries of the peer's table, if what `parts` returned for the span's own origin is one copy with digests.

        None if more is to do: nothing begins before the table is known.
        """
        packer = self.packer
        if packer.made.casts or not parts or not all(part.is_copied for part in parts):
            return None
        if packer.device < 0 and sum(part.nbytes for part in parts) > _PIECE_BYTES:
            return None
        return self._shape(span, span.origin, layers)[1]

    def _blocks(self, part: Part, table: Ids) -> Ids:
        name = f"{self.packer.made.src.name} rank {self._peer}"
        if (needed := int(part.entries.max()) + 1) > len(table):
            raise BindError(f"{name}: its tokens need {needed} blocks, got a table of {len(table)}")
        blocks: Ids = table[part.entries]
        wrong = np.flatnonzero((blocks < 0) | (blocks >= self.far.num_blocks))
        if wrong.size:
            entry, token = part.entries[wrong[0]], part.at[wrong[0]] - part.launches.first
            raise BindError(
                f"{name}: table[{entry}] is {table[entry]}: expected 0 to {self.far.num_blocks - 1}; its table has no block for "
                f"some of the tokens from {token} on"
            )
        return blocks

    @property
    def quantises(self) -> bool:
        """True if this rank's pool has the smaller format."""
        made = self.packer.made
        return bool(made.casts) and made.coded == self.packer.side

    def begin(self, piece: Piece, into: Pass, order: Mapping[str, Any], *, copies: bool = True) -> None:
        """Enqueue a piece, or only its digests in the peer's pool."""
        packer, (part, far), on_gpu = self.packer, piece, self.packer.device >= 0
        launches, casts, keep = part.launches, bool(packer.made.casts), (packer, self)
        digest = functools.partial(_digest, packer=packer, at=part.at, into=into, order=order, keep=keep)
        if not (copies and part.is_copied):
            digest(launches.digests, num_ids=launches.far_ids, ids=far)
            return
        found = None if casts else Sums(far.size, on_gpu)
        pairs = _core.Pairs(far, part.own, launches.far_ids, launches.own_ids, False, packer.device)
        positions = _core.Positions(part.at, part.at.size, packer.device)
        streams, address = (order.get("stream"), order.get("wait")), 0 if found is None else found.address
        done = launches.copies.copy_digested(pairs, positions, address, on_gpu, (0, 0), *streams, (*keep, found))
        into.add(done if on_gpu else None, found)
        if casts:  # the peer's blocks are digested after the copy: a change before is found
            digest(launches.digests, num_ids=launches.far_ids, ids=far)
        if launches.written is not None:
            digest(launches.written, num_ids=launches.own_ids, ids=part.own, is_cast=True)

    def _launches_of(self, message: Message, single: bool) -> _Launches:
        found = self._launches.get((message, single))
        if found is None:
            found = self._launches.setdefault((message, single), self._made(message, single))  # callers' threads ask, too
        return found

    def _made(self, message: Message, single: bool) -> _Launches:
        packer, far, casts = self.packer, self.far, bool(self.packer.made.casts)
        own, (slots, chosen) = packer.part(message, single), message.part(0, single=single)
        peer_section = far.units(slots).section(l=chosen["l"], h=chosen["h"], t=chosen["t"])
        title = f"{far.layout.name} → {own.pool.layout.name}, direct"
        digests = _digesting(peer_section, self._table, packer, message, single, 0 if casts else 1)
        first, keys = packer.keys(message, single)
        sections, sides = (peer_section.of, own.of), (far, own.pool)
        alignments, steps = [side.alignment for side in sides], [side.steps for side in sides]
        for max_sms in self._limits:  # the default limit holds only for copies that digest within it
            limited = max_sms > 0
            made = None if casts else fused(*sections, keys, tuple(alignments), title, sm_limited=limited)  # type: ignore[arg-type]
            sums = None if made is None else fused_copies(made, keys.lanes, *steps, sm_limited=limited)
            if isinstance(sums, list):
                break
        copies = sums if isinstance(sums, list) else prepare(
            between(*sections, title, cast=packer.made.cast_of(message) if casts else None), *alignments,
            sm_limited=limited, device=packer.device, src_steps=steps[0], dst_steps=steps[1],
        )  # fmt: skip
        warm(copies, packer.device)
        route = _core.Route(
            packer.device, self._table, packer.table, peer_section.num_ids, own.num_ids, direct=copies,
            sum_direct=copies if isinstance(sums, list) else (), max_sms=max_sms,
            # Of what was written: the peer's memory may change between two passes.
            digests=((), [] if casts else _digest_copies(own, packer, message, single, 1)), digests_dst=True,
        )  # fmt: skip
        written = _digesting(own, packer.table, packer, message, single, 1) if self.quantises else None
        return _Launches(route, digests, written, peer_section.num_ids, own.num_ids, peer_section.of.block_bytes, first)
