"""The executor of a transfer: two pools bound for copies, the strategies, and the choice of one per batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import number, quoted
from ..compile.prepare import copies_of, digest_copies, engine_copies, kernel_notes, launches_of, prepare, warm
from ..digest.cells import Model, Selection, alike, alone, fused, keys_of
from ..digest.run import CopyDigests, Proof, fused_copies
from ..errors import BindError, DigestError, DTypeError, LayoutError, MissingKernelError, PlanError
from ..layout.region import Section
from ..memory.array_checks import require_formats
from ..memory.array_info import find_overlap
from ..memory.streams import framework_of, framework_stream, require_no_stream, torch_stream
from ..planner.cast import CastPart, Scale, bits_of
from ..planner.lowering import Launch, Steps
from ..planner.plan import Plan, between_layers, size_text
from ..pool.digester import digest_array, unit_positions
from ..pool.pool import Pool
from ..pool.section import PoolSection
from ..system.locks import Lock
from ..system.machine import device_of
from . import cost_model, tables
from .cost_model import CHUNK_BYTES, Way
from .diff import where_different
from .strategies import CHOICES, STRATEGIES

#: Default multiprocessors of a kernel that works on host memory: more do not make PCIe faster.
HOST_SMS = 16

#: Slots of a staged copy: one is filled, one is emptied, one waits.
SLOTS = 3

#: Alignment of every slot (bytes).
_SLOT_ALIGNMENT = 16

#: Runs from which on the copy engine moves the slots of a cast (bytes).
_SHORT_RUN = 64 << 10

#: Hint: how to give another GPU's kernels access to memory that is not from cuMemAlloc.
_GRANT = (
    " (grant it before the transfer is made, by cuMemSetAccess or cuMemPoolSetAccess; torch does so at its first own copy from "
    "{src} to {dst})"
)

#: Sentence on copies by `cuMemcpyPeerAsync`.
_BY_PEER = "the copy engine copies one range per call (cuMemcpyPeerAsync): memory without a grant needs it."

Layers = range | tuple[range, range] | None


def _mean_run(made: Plan) -> int:
    """Average bytes of a contiguous run."""
    return made.nbytes // sum(part.nbytes // part.run_bytes for part in made.parts)


@dataclass(frozen=True)
class _End:
    """A transfer's data of a pool; it does not keep the pool alive."""

    section: Section
    device: str
    alignment: int
    addresses: npt.NDArray[np.uint64]
    steps: Steps
    framework: str
    whole: Section
    choices: tuple[Selection, ...]

    @classmethod
    def of(cls, part: PoolSection) -> _End:
        pool = part.pool
        return cls(
            part.of, pool.device, pool.alignment, pool.addresses, pool.steps, framework_of(pool.arrays[0]),
            pool.resolved.section, part.choices,
        )  # fmt: skip

    @property
    def slot_bytes(self) -> int:
        """Bytes of a packed block."""
        return self.section.packed().accesses[0].block[0]

    @property
    def index(self) -> int:
        """CUDA device ordinal, -1 for the host."""
        return device_of(self.device)

    @property
    def table(self) -> npt.NDArray[np.uint64]:
        """The table as kernels read it."""
        table: npt.NDArray[np.uint64] = self.steps.shorten(self.addresses, self.section.num_blocks)
        return table

    @property
    def bases(self) -> npt.NDArray[np.uint64]:
        """The table for the copy engine: one base if allocations lie at equal steps."""
        return self.addresses if self.steps.whole is None else self.addresses[:1]


class Executor:
    """Everything that a transfer needs except the pools, so that a cache of executors keeps no memory alive."""

    def __init__(
        self, src_part: PoolSection, dst_part: PoolSection, strategy: str, max_sms: int | None, chunk_bytes: int | None,
        *, keeps: bool, model: Model | None = None, cast: Scale | None = None, like: Executor | None = None,
    ) -> None:  # fmt: skip
        src, dst = src_part.pool, dst_part.pool
        self.whole = src_part.is_whole and dst_part.is_whole
        self.cast = cast
        if self.whole:
            require_compatible(src, dst, cast)
        else:
            require_usable(src, dst)
        formats = [
            (part.pool.formats, {one.plane: one.dtype for one in part.of.accesses}) for part in (src_part, dst_part)
        ]
        require_formats(f"{src.layout.name} → {dst.layout.name}", *formats, casts=cast is not None)
        self.src, self.dst = _End.of(src_part), _End.of(dst_part)
        self.title = f"{src.layout.name} → {dst.layout.name}"
        self.strategy = strategy
        self.same_pool = require_disjoint(src, dst)
        if self.same_pool and self.src.section.units != self.dst.section.units:
            raise BindError(
                f"{self.title}: source and destination share memory; blocks have {self.src.section.units} units on one side and "
                f"{self.dst.section.units} on the other, so overlaps cannot be checked; use equal units"
            )
        self.keep = (src, dst) if keeps else None
        self.parts = (src_part, dst_part) if keeps else None
        self.on_host = src.device == dst.device == "cpu"
        self.gathers = self.src.index >= 0
        self.device = self.src.index if self.gathers else self.dst.index  # -1: no GPU
        self.max_sms, self.bounded = _max_sms(self, max_sms), max_sms is not None
        self.chunk_bytes = chunk_bytes
        self.model = model
        self.unreported: list[DigestError] = []
        self.captured: list[_core.Done] = []  # copies in graphs that verify: each replay writes to their memory
        self.lock = Lock()
        self.ring: _core.Ring | None = None
        self.routes: dict[Any, _Route] = {}
        self.closed = False
        self.by_peer = False  # True if the copy engine must use the only call that needs no grant
        self.unreached = "" if self.on_host else self._unreached(src, dst)
        self.cuts = np.zeros(0, np.uint64) if self.on_host else np.union1d(src.cuts, dst.cuts)
        # Both tables are on the device that runs the kernels.
        ends = ((self.src, src), (self.dst, dst))
        self.tables: Sequence[_core.Table] = like.tables if like else [
            _core.Table(end.table, self.device, watch=pool.watch) for end, pool in ends
        ]
        self.src_table, self.dst_table = self.tables

    def begin(self) -> None:
        """Plan the copy of all layers.  It looks up measured speeds, so whoever wants them measured does so before."""
        if self.src.section.count("l") == self.dst.section.count("l"):
            self.routes[None] = self._route(None)
        elif self.strategy != "auto" or self.chunk_bytes is not None:
            _check_strategy(self)

    def close(self) -> None:
        """Release the ring.  Waits for the copies that use it."""
        with self.lock:
            self.closed = True
            self.routes.clear()
            ring, self.ring = self.ring, None
        if ring is not None:
            ring.close()

    @property
    def direction(self) -> str:
        """``h2h``, ``d2d``, ``d2h``, ``h2d`` or ``p2p``."""
        src, dst = self.src.index, self.dst.index
        if src >= 0 and dst >= 0:
            return "d2d" if src == dst else "p2p"
        return ("d" if src >= 0 else "h") + "2" + ("d" if dst >= 0 else "h")

    def _unreached(self, src: Pool, dst: Pool) -> str:
        """Why kernels cannot access both sides; empty if they can.  Unpinned memory raises an error: no strategy can copy it."""
        for pool, what in ((src, "source"), (dst, "destination")):
            if pool.device == "cpu" and not pool.pinned:
                raise BindError(
                    f"{self.title}: the {what} is in host memory that GPUs cannot access; allocate it with "
                    "Pool.allocate(..., device='pinned'), or call its pool's pin()"
                )
            if pool.device == f"cuda:{self.device}" or (found := _core.find_ungranted(self.device, pool.spans)) is None:
                continue
            array = int(np.argsort(pool.addresses, kind="stable")[found[0]])
            why = f"array {array} of the {what} lies in {found[1]} that is not granted to cuda:{self.device}"
            if pool.device == "cpu":
                raise BindError(f"{self.title}: {why}; call cuMemSetAccess or cuMemPoolSetAccess, or use Pool.pin()")
            self.by_peer = True
            reaches = _core.enable_peer(self.device, self.dst.index)
            return f"{why}{_GRANT.format(src=src.device, dst=dst.device) if reaches else ''}"
        if self.direction != "p2p" or _core.enable_peer(self.device, self.dst.index):
            return ""
        return "this machine has no peer access between them"

    def route(self, layers: Layers) -> _Route:
        """The route of these layers; planned on first use."""
        if layers is None and not self.closed and None not in self.routes:
            how = "pass" if self.keep else "kvbm.convert copies all: use pool.section(l=…), or pass to Transfer(…).copy"
            counts = " and ".join(str(end.section.count("l")) for end in (self.src, self.dst))
            raise BindError(
                f"{self.title}: the pools hold {counts} layers; {how} "
                "layers=(range of the source, range of the destination)"
            )
        return self._kept(layers, lambda: self._route(layers))

    def digested(self, layers: Layers) -> _Route:
        """The route with the launches of digests; planned on first use."""

        def make() -> _Route:
            plain = self.route(layers)
            more = self._digests(layers, plain)
            warm(more.copies, self.device)
            return replace(plain, route=plain.make(**more.options(self._digests_dst(plain.plan))), digests=more)

        return self._kept(("digests", layers), make)

    def _kept(self, key: Any, make: Callable[[], _Route]) -> _Route:
        """The route of this key, or a new one, which is kept."""
        found = self.routes.get(key)
        if found is None:
            with self.lock:
                if self.closed:
                    raise BindError(f"{self.title}: the transfer is closed")
                found = self.routes.get(key)  # another thread may have created it
                if found is None:
                    found = self.routes[key] = make()
        return found

    def _digests_dst(self, plan: Plan) -> bool:
        """Which side separate digests read: True for the destination.  Of a cast, the quantised side."""
        if plan.casts:
            return any(part.quantises for part in plan.casts)
        return not (self.on_host or self.gathers)

    def _digests(self, layers: Layers, found: _Route) -> CopyDigests:
        """The launches that digest a copy: fused into its kernels, and separate ones for each side."""
        src, dst, steps, casts = self.src, self.dst, found.steps, bool(found.plan.casts)
        ours, theirs = src.section, dst.section
        named = dst if casts and self._digests_dst(found.plan) else src  # of a cast: the side that is digested
        keys = keys_of(named.whole, self.model, named.choices)
        if layers is not None:
            of_src, of_dst = layers if isinstance(layers, tuple) else (layers, layers)
            ours, theirs = ours.select("l", of_src), theirs.select("l", of_dst)
            keys = keys.select("l", of_src if named is src else of_dst)

        def by_itself(section: Section, end: _End) -> list[_core.Copy]:
            return digest_copies(alone(section, keys, end.alignment, self.title, turns=self.device >= 0), keys.lanes, end.steps)

        def joined(
            sides: tuple[Section, Section], alignments: tuple[int, int], ends: tuple[Steps, Steps], sm_limited: bool
        ) -> list[_core.Copy] | str:
            if self.on_host and any(_has_small_cells(part) for part in found.plan.casts):
                return "on the CPU that is faster for codes of 4 bits, and for scales of 8"
            made = fused(*sides, keys, alignments, self.title, found.plan.cast, sm_limited=sm_limited)
            return fused_copies(made, keys.lanes, *ends, sm_limited=sm_limited)

        direct = joined((ours, theirs), (src.alignment, dst.alignment), (src.steps, dst.steps), self.max_sms > 0)
        slot = steps[0].dst if self.gathers else steps[1].src
        ends = (ours, slot) if self.gathers else (slot, theirs)
        permute = [] if self.on_host else joined(ends, *self._beside_slots(src if self.gathers else dst), self.bounded)
        if casts:
            both = ([], by_itself(theirs, dst)) if named is dst else (by_itself(ours, src), [])
            slots: list[_core.Copy] = []
            is_in_slots = self.direction in ("d2h", "h2d") and self.gathers == (named is dst)  # the quantised bits
            if isinstance(permute, str) and is_in_slots:
                slots = digest_copies(alone(slot, keys, _SLOT_ALIGNMENT, self.title, turns=True), keys.lanes)
            return CopyDigests(direct, permute, both, slots)
        mine, its = alike(ours, theirs)
        return CopyDigests(direct, permute, (by_itself(mine, src), [] if self.unreached else by_itself(its, dst)))

    def _route(self, layers: Layers) -> _Route:
        src, dst = self.src, self.dst
        try:
            made = between_layers(src.section, dst.section, self.title, layers, self.cast)
        except LayoutError as error:  # of a selection of layers
            raise BindError(f"{self.title}: layers: {error}") from None
        except PlanError as error:
            if layers is not None and "layers:" in str(error):
                raise BindError(str(error)) from None
            raise
        _check_strategy(self)
        alignments, blocks = (src.alignment, dst.alignment), (src.section.num_ids, dst.section.num_ids)
        launches: list[Launch] = []
        if self.on_host:
            launches = launches_of(made, alignments, False, -1)
            direct = copies_of(made, launches, src.steps, dst.steps)
            make = functools.partial(
                _core.Route, -1, self.src_table, self.dst_table, *blocks, direct=direct, same_pool=self.same_pool,
                keep=self.keep,
            )  # fmt: skip
            return _Route(made, make(), direct, "the host's kernels copy on all cores", launches, (made, made), make)
        steps = made.staged(gathers=self.gathers)
        move = steps[1].flat(None, dst.steps.whole) if self.gathers else steps[0].flat(src.steps.whole, None)
        runs = made if made.casts else made.flat(src.steps.whole, dst.steps.whole)
        slot_block = (steps[0].dst if self.gathers else steps[1].src).accesses[0].block[0]
        move_runs = engine_copies(move)
        all_runs = [] if made.casts else engine_copies(runs)
        # Do not look up kernels that no batch uses: they may have to be compiled.
        is_aside = self.strategy == "aside" and bool(move_runs or all_runs)
        if made.casts and self.strategy != "direct" and self.direction in ("d2h", "h2d") and move_runs:
            is_aside = True  # a cast stores short words, which are slow across PCIe
        takes_direct = not self.unreached and self.strategy in ("direct", *CHOICES) and not is_aside
        if takes_direct:
            launches = launches_of(made, alignments, self.max_sms > 0, self.device)
        direct = copies_of(made, launches, src.steps, dst.steps)
        ways = {"direct": Way(_mean_run(made), len(direct)), "staged": Way(_mean_run(move)), "engine": Way(_mean_run(runs))}
        possible = {"direct": not self.unreached and not is_aside, "staged": bool(move_runs), "engine": bool(all_runs)}
        limits, why = self._limits({name: way for name, way in ways.items() if possible[name]}, made.nbytes)
        # Every destination is written once, so no batch has more pairs than blocks: a strategy for larger batches needs no ring.
        # Batches with ids on the GPU may be larger, and use the last remaining strategy.
        most = blocks[1]
        limits = limits[: 1 + next((i for i, (pairs, _) in enumerate(limits) if pairs >= most), len(limits))]
        if self.chunk_bytes is not None and self.chunk_bytes < slot_block:
            raise BindError(
                f"{self.title}: chunk_bytes: expected at least one block of {slot_block} bytes, got {self.chunk_bytes}"
            )
        ring = self._take_ring() if any(name == "staged" for _, name in limits) else None
        permute: list[_core.Copy] = []
        if ring is not None:
            packing, moving = steps if self.gathers else steps[::-1]
            alignments, ends = self._beside_slots(src if self.gathers else dst)
            # Without a limit: inside device memory a kernel on the whole GPU takes very little time.
            staged = launches_of(packing, alignments, self.bounded, self.device)
            permute = copies_of(packing, staged, *ends)
            launches += staged
            if self._moves_by_kernel(made, move):  # on few multiprocessors, between slots and the pool in host memory
                (one, other), (first, second) = self._beside_slots(dst if self.gathers else src)
                move_runs = prepare(
                    moving, one, other, sm_limited=True, device=self.device, src_steps=first, dst_steps=second
                )
        warm([*direct, *permute, *(copy for copy in move_runs if copy.kernel)], self.device)
        make = functools.partial(
            _core.Route, self.device, self.src_table, self.dst_table, *blocks, direct=direct, permute=permute,
            moves=move_runs, runs=all_runs, src_bases=src.bases, dst_bases=dst.bases, cuts=self.cuts,
            gathers=self.gathers, slot_block_bytes=slot_block, ring=ring, max_sms=self.max_sms,
            same_pool=self.same_pool, crosses=self.direction == "p2p",
            limits=[(pairs, STRATEGIES.index(name)) for pairs, name in limits], may_choose=self.strategy in CHOICES,
            keep=self.keep, by_peer=self.by_peer,
        )  # fmt: skip
        return _Route(made, make(), direct, why, launches, steps, make, move_runs)

    def _moves_by_kernel(self, made: Plan, move: Plan) -> bool:
        """True if a kernel moves the slots of a cast: the copy engine is slow at short runs, and a direct cast at short words."""
        is_short = _mean_run(move) < _SHORT_RUN
        return bool(made.casts) and is_short and self.strategy != "aside" and not self.unreached

    def _beside_slots(self, end: _End) -> tuple[tuple[int, int], tuple[Steps, Steps]]:
        """Alignments and steps of a copy between a pool and slots, of source and destination."""
        if end is self.src:
            return (end.alignment, _SLOT_ALIGNMENT), (end.steps, Steps())
        return (_SLOT_ALIGNMENT, end.alignment), (Steps(), end.steps)

    def _limits(self, ways: dict[str, Way], block_bytes: int) -> cost_model.Choice:
        """The strategy for each number of pairs, and why.  Leaves out strategies with too many modes for the copy engine."""
        if not (ways if self.strategy in CHOICES else self.strategy in ways):
            raise MissingKernelError(
                f"{self.title}: strategy={self.strategy!r}: the loop nest has more modes than the copy engine supports; "
                "use strategy='direct' between pools that one GPU can access"
            )
        if self.strategy not in CHOICES:
            return cost_model.Choice(((0, self.strategy),), "it was asked for")
        if len(ways) > 1 and "engine" in ways and ways["engine"].run_bytes < cost_model.ENGINE_RUN:
            del ways["engine"]
        chunk_bytes = self.chunk_bytes or CHUNK_BYTES
        return tables.limits(self.direction, self.device, ways, block_bytes, chunk_bytes)

    def _take_ring(self) -> _core.Ring:
        """The ring that all ranges of layers share.  The block of a range is never larger than the whole block."""
        if self.ring is None:
            largest = max(end.slot_bytes for end in (self.src, self.dst))
            self.ring = _core.Ring(self.device, self.chunk_bytes or max(CHUNK_BYTES, largest), SLOTS)
        return self.ring

    def found(self, layers: Any) -> _core.Route:
        """The route of these layers, for `Transfer.copy`; planned on first use."""
        if layers is not None:
            require_layers(layers)
        return (self.routes.get(layers) or self.route(layers)).route

    def copy_digested(
        self, src_ids: Any, dst_ids: Any, layers: Layers, stream: Any, wait: Any, out: Any, tokens: Any, verifies: bool
    ) -> _core.Done:
        """`Transfer.copy` with digests: they are written to `out`, or compared on both sides."""
        require_layers(layers)
        found = self.routes.get(("digests", layers)) or self.digested(layers)
        if verifies and self.unreached:
            raise BindError(f"{self.title}: verify: the destination is digested by a kernel, and {self.unreached}")
        if self.on_host or stream is None:
            stream = self.stream(stream, wait)
        route, units = found.route, self.src.section
        pairs = route.pairs_of(src_ids, dst_ids)
        count = len(pairs)
        if tokens is None and units.units > 1:
            tokens = unit_positions(src_ids, pairs, units.units, units.shape.nt // units.units)
        positions = None if tokens is None else _core.Positions(tokens, count, self.device)
        address, far, keep = 0, False, None
        if out is not None:
            address, far, keep = digest_array(out, count, self.device, self.keep or ())
        Proof.settle(self.unreported)
        if not verifies:
            return route.copy_digested(pairs, positions, address, far, (0, 0), stream, wait, (keep, self.keep))
        assert self.parts is not None  # a transfer keeps them, and only transfers verify
        where = functools.partial(where_different, *self.parts, pairs, layers)
        with Proof(self.title, count, self.device, self.unreported, pairs, where) as proof:
            kept = (keep, proof, self.keep)
            done = route.copy_digested(pairs, positions, address, far, proof.addresses, stream, wait, kept)
        proof.watch(done)
        if done.captured:
            self.captured.append(done)
        return done

    def stream(self, stream: Any, wait: Any) -> Any:
        """The default stream of a copy; None on the host."""
        if self.on_host:
            if stream is not None or wait is not None:
                require_no_stream("the pools are on the CPU, where the call waits for the copy", stream=stream, wait=wait)
        elif stream is None:
            stream = self._current_stream()
        return stream

    def _current_stream(self) -> Any:
        end = self.src if self.gathers else self.dst
        if end.framework == "torch" and self.direction != "p2p":  # on one GPU a default stream's handle says all
            return torch_stream(end.index)
        return framework_stream(end.framework, end.index)

    def stats(self) -> dict[str, int]:
        total = dict.fromkeys(("copies", "blocks", "bytes", *STRATEGIES, "submissions"), 0)
        for found in list(self.routes.values()):
            copies, blocks, submissions = found.route.counters()
            total["copies"] += sum(copies)
            total["blocks"] += sum(blocks)
            total["bytes"] += sum(blocks) * found.plan.nbytes
            total["submissions"] += submissions
            for name, count in zip(STRATEGIES, copies, strict=True):
                total[name] += count
        return total

    def explain(self, num_blocks: int | None, layers: Layers, verifies: bool = False) -> str:
        require_layers(layers)
        count = None if num_blocks is None else number("num_blocks", num_blocks, 1, 1 << 31)
        found = self.route(layers)
        where = {
            "h2h": "from host memory to host memory",
            "d2d": f"on {self.src.device}",
            "d2h": f"from {self.src.device} to pinned host memory",
            "h2d": f"from pinned host memory to {self.dst.device}",
            "p2p": f"from {self.src.device} to {self.dst.device}",
        }[self.direction]
        lines = [f"{self.title}, {where}."]
        if not self.on_host:
            for blocks in [1, 4, 16, 64, 256] if count is None else [count]:
                name = found.route.choose(blocks)
                lines.append(
                    f"{blocks} block{'s' if blocks > 1 else ''} ({size_text(blocks * found.plan.nbytes)}): {name}."
                )
            lines += [f"Why: {found.why}.", *self._how(found)]
        else:
            lines.append(f"{found.why[0].upper()}{found.why[1:]}.")
            lines += kernel_notes(found.launches, -1)
        if verifies or ("digests", layers) in self.routes:
            lines += self._how_digested(self.digested(layers), verifies)
        return "\n".join([*lines, found.plan.explain(on_host=self.on_host)])

    def _how_digested(self, found: _Route, verifies: bool) -> list[str]:
        assert found.digests
        names = dict.fromkeys(found.route.choose(1 << power) for power in range(24))
        sentences = found.digests.explain(names, self._digests_dst(found.plan))
        if verifies and self.unreached:
            sentences.append(f"verify is refused: the destination is digested by a kernel, and {self.unreached}.")
        elif verifies:
            far = [name for name, end in (("source", self.src), ("destination", self.dst)) if end.index != self.device]
            sentences.append(found.digests.explain_verify(size_text(found.plan.nbytes), far))
        return sentences

    def _how(self, found: _Route) -> list[str]:
        """A sentence on each strategy, and notes on its kernels."""
        budget = f" on at most {self.max_sms} multiprocessors" if self.max_sms else ""
        sentences = [f"direct is left out: {self.unreached}."] if self.unreached else []
        if self.by_peer:
            sentences.append(_BY_PEER)
        if found.copies:
            many = f"{len(found.copies)} launches" if len(found.copies) > 1 else "one launch"
            names = " and ".join(dict.fromkeys(copy.kernel for copy in found.copies if copy.kernel))
            sentences.append(f"direct is {many} of {names}{budget}: it reads and writes both pools.")
        if self.ring is not None:
            mover = "another kernel" if found.moves and found.moves[0].kernel else "the copy engine"
            order = (
                f"a kernel packs blocks into a slot and {mover} copies them from it"
                if self.gathers
                else f"{mover} fills a slot and a kernel unpacks the blocks from it"
            )
            sentences.append(
                f"staged goes through {self.ring.slots} slots of {size_text(self.ring.slot_bytes)} on cuda:{self.device}: {order}."
            )
        sentences += kernel_notes(found.launches, self.device)
        return sentences


@dataclass
class _Route:
    """An executor's launches for all layers, or for a range of them."""

    plan: Plan
    route: _core.Route
    copies: Sequence[_core.Copy]  # the launches of a direct copy
    why: str  # why the strategies were chosen
    #: The kernels of direct copies and of a staged copy's step on the GPU, as they were planned.
    launches: Sequence[Launch]
    steps: tuple[Plan, Plan]  # the two steps of a staged copy; on the host, the plan twice
    make: Callable[..., _core.Route]  # makes a `_core.Route` of the same launches, with those of digests in addition
    #: What moves the slots of a staged copy: loop nests for the copy engine, or kernels.
    moves: Sequence[_core.Copy] = ()
    digests: CopyDigests | None = None  # the launches of digests


def _max_sms(executor: Executor, asked: object) -> int:
    if asked is None:
        return HOST_SMS if executor.direction in ("d2h", "h2d") else 0
    if isinstance(asked, bool) or not isinstance(asked, int) or not 0 < asked < 1 << 31:
        raise BindError(f"max_sms: expected a number of multiprocessors from 1 on, got {quoted(asked)}")
    if executor.on_host:
        raise BindError("max_sms: both pools are in host memory, so no GPU is used; leave it out")
    if executor.strategy == "engine":
        raise BindError("max_sms: the copy engine uses no multiprocessor; leave it out")
    return asked


def _has_small_cells(part: CastPart) -> bool:
    """True for a cast that does not digest on the CPU, because of many small cells (``kRuns`` in ``cuda/cast.cuh``)."""
    return bits_of(part.formats[part.quantises]) == 4 or (part.scales is not None and bits_of(part.formats[2]) == 8)


def _check_strategy(executor: Executor) -> None:
    """Raise `BindError` for a strategy or chunk size that cannot be honoured."""
    if not isinstance(executor.strategy, str) or str.__str__(executor.strategy) not in (*CHOICES, *STRATEGIES):  # type: ignore[redundant-expr]
        raise BindError(f"strategy: expected 'auto', 'aside', 'direct', 'staged' or 'engine', got {quoted(executor.strategy)}")
    if executor.on_host and executor.strategy in ("aside", "staged", "engine"):
        raise BindError(f"strategy: {executor.strategy!r} needs a GPU, and both pools are in host memory; leave it out")
    if executor.cast is not None and executor.strategy == "engine":
        raise BindError("strategy: 'engine' moves bytes as they are, and cast changes them; leave one of the two out")
    if executor.strategy == "direct" and executor.unreached:
        raise BindError(
            f"strategy: 'direct' needs a kernel on {executor.src.device} that can access {executor.dst.device}, and "
            f"{executor.unreached}; use 'staged' or 'engine'"
        )
    chunk: object = executor.chunk_bytes
    if chunk is not None:
        if executor.on_host or executor.strategy in ("direct", "engine"):
            raise BindError(
                f"chunk_bytes: only staged copies use chunks, and strategy is {executor.strategy!r}; leave it out"
            )
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise BindError(f"chunk_bytes: expected a number of bytes, got {quoted(chunk)}")


def require_layers(layers: Any) -> None:
    """Raise `BindError` unless these are None, a range, or a tuple of two ranges."""
    both = layers if type(layers) is tuple and len(layers) == 2 else (layers, layers)
    if layers is not None and not all(type(one) is range for one in both):
        raise BindError(f"layers: expected range(first, last) or a tuple of two of them, got {quoted(layers)}")


def require_usable(src: Any, dst: Any) -> None:
    """Check before every copy that both pools are open, and have the memory that they were bound to."""
    if not (isinstance(src, Pool) and isinstance(dst, Pool)):
        what, pool = ("destination", dst) if isinstance(src, Pool) else ("source", src)
        raise BindError(
            f"the {what}: expected a kvbm.Pool or a section of one, got {type(pool).__name__}; bind arrays with kvbm.Pool"
        )
    src.require_open()
    dst.require_open()
    if dst.readonly:
        raise BindError(f"{src.layout.name} → {dst.layout.name}: the destination is read-only")


def require_compatible(src: Pool, dst: Pool, cast: Scale | None = None) -> None:
    """Check that blocks can be copied: equal block shapes except for layers, and a writable destination."""
    require_usable(src, dst)
    title = f"{src.layout.name} → {dst.layout.name}"
    # The planes of layouts may all have their own dtypes.  Then the shape's has no meaning, and the plan compares the planes.
    both_use = src.layout.uses_shape_dtype and dst.layout.uses_shape_dtype
    if src.shape.dtype != dst.shape.dtype and both_use and cast is None:
        raise DTypeError(
            f"{title}: the source holds {src.shape.dtype}, the destination {dst.shape.dtype}; a copy converts no dtype, unless "
            "kvbm.convert or kvbm.Transfer is told to: cast='amax' for a layout with scales, cast=kvbm.Scale(1.0) without"
        )
    if replace(src.shape, nl=1, dtype=dst.shape.dtype) != replace(dst.shape, nl=1):
        raise BindError(
            f"{title}: expected pools of one block shape, got {src.shape} and {dst.shape}; for different numbers of tokens "
            "use units of both (pool.units), for different heads use sections (pool.section)"
        )


def require_disjoint(src: Pool, dst: Pool) -> bool:
    """False if the pools share no memory, True if they are the same blocks in one layout; else raises an error."""
    if src is dst:
        return True
    a, b = src.spans, dst.spans
    # Spans are sorted: of those of the other side that start before this one ends, does any end after its start?
    before = np.searchsorted(b[:, 0], a[:, 1], side="left")
    reach = np.maximum.accumulate(b[:, 1])
    clash = np.nonzero((before > 0) & (reach[np.maximum(before, 1) - 1] > a[:, 0]))[0]
    if not clash.size:
        return False
    blocks = [(pool.layout, pool.shape, pool.num_blocks) for pool in (src, dst)]
    if blocks[0] == blocks[1] and np.array_equal(src.addresses, dst.addresses):
        return True
    # Their extents overlap.  Views of one tensor may still share no byte of an element, such as K and V of every page.
    ours, theirs = src.resolved, dst.resolved
    kind_of = [*ours.kind_of_entry, *(kind + len(ours.kinds) for kind in theirs.kind_of_entry)]
    shared = find_overlap(
        np.concatenate([src.addresses, dst.addresses]), [*ours.kinds, *theirs.kinds], kind_of,
        [0] * len(ours.kinds) + [1] * len(theirs.kinds),
    )  # fmt: skip
    if shared is None:
        return False
    one, other = sorted(shared)
    raise BindError(
        f"{src.layout.name} → {dst.layout.name}: source and destination overlap in memory: array {one} of the source and array "
        f"{other - src.addresses.size} of the destination share bytes near {int(dst.addresses[other - src.addresses.size]):#x};"
        " a block would be read after it was overwritten. Use separate memory for the destination"
    )


def current_stream(pool: Pool) -> int:
    """The current stream of the pool's framework (torch or CuPy) on the pool's device.

    Raises `BindError` if the arrays belong to neither framework, so there is no default stream.
    """
    framework = framework_of(pool.arrays[0])
    return _core.stream_handle(framework_stream(framework, device_of(pool.device)))
