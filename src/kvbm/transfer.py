"""Transfers: a plan and two pools become launches.  The room where describing and launching meet, through a kernel's name."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _core, runtime, tuner, tuning
from .errors import BindError, DTypeError, MissingKernelError, PlanError
from .layout import Layout
from .lower import Kernels, Launch, Steps, engine_arguments, lower
from .nest import Kernel, kernel_name, parse_kernel
from .planner import Plan, plan, size_text
from .pool import Pool
from .shapes import BlockShape
from .tuning import CHUNK_BYTES, Way

__all__ = ["Transfer", "convert", "current_stream", "prepare", "torch_stream"]

#: Multiprocessors of a kernel that works on host memory, where the caller does not say: more do not make PCIe faster.
HOST_SMS = 16

#: Slots of a staged copy: one is filled, one is emptied, one is between.
SLOTS = 3

#: What divides the address of every slot.
_SLOT_ALIGNMENT = 16

#: Shorter runs are not given to the copy engine unless the caller asks: each costs half a microsecond of the processor, which
#: a measurement on an idle machine does not show.
ENGINE_RUN = 256 << 10

_STRATEGIES = ("direct", "staged", "engine")

#: How memory that is not cuMemAlloc's is opened to another GPU's kernels.
_GRANT = (
    " (grant it before the transfer is made, by cuMemSetAccess or cuMemPoolSetAccess; torch does so at its first own copy from "
    "{src} to {dst})"
)

Layers = range | tuple[range, range] | None


@functools.cache
def _kernels_on(device: int) -> Kernels:
    """The kernels of a CUDA device, or of the host (-1)."""
    names = _core.kernel_names()
    single = (parse_kernel(name)[0] for name in names if "__" not in name)
    forms = sorted(single, key=lambda form: (form.few, form.inner, form.outer, form.kind))
    return Kernels(frozenset(names), tuple(forms), functools.partial(_compiles, device), device >= 0)


def _compiles(device: int, kernel: Kernel) -> bool:
    """Whether a kernel that is not built is there after all, compiled at run time."""
    if device < 0 or not _core.num_images() or not runtime.is_known_kind(kernel) or runtime.why_not(device):
        return False
    runtime.kernel(kernel_name(kernel), device)
    return True


def _launches(made: Plan, alignments: tuple[int, int], few: bool, device: int) -> list[Launch]:
    """What a plan takes on a GPU, or on the host (-1)."""
    try:
        return lower(made.launches(*alignments, pages=device >= 0 and not few), _kernels_on(device), few=few)
    except MissingKernelError as error:
        raise MissingKernelError(f"{error}; {runtime.PERMANENT}") from None


def _notes(launches: Sequence[Launch], device: int) -> list[str]:
    """What there is to say about kernels that were not built for the copy."""
    said, missing = [], False
    for launch in {launch.kernel: launch for launch in launches}.values():
        if (origin := runtime.origin(launch.name, device)) is not None:
            said.append(f"{origin}.")
        elif launch.wanted and launch.kernel != launch.wanted:
            wanted = kernel_name(launch.wanted)
            said.append(f"{launch.name} runs in place of {wanted}, which is not built in: {_cost(launch)}.")
            missing = True
    if missing:
        why = runtime.why_not(device) if device >= 0 and _core.num_images() else ""
        said.append(f"{why}. {runtime.PERMANENT}." if why else f"{runtime.PERMANENT}.")
    return said


def _cost(launch: Launch) -> str:
    [wanted], [has] = launch.wanted, launch.kernel
    if wanted.kind == "tile" and has.kind != "tile":
        return f"{wanted.element}-byte elements move one by one, not in tiles, at a fraction of the speed"
    more = has.outer - wanted.outer + has.modes - wanted.modes
    text = f"it has {more} mode{'s' if more != 1 else ''} more than needed, and each costs every word a division"
    return text + (", and its teams share one large CTA a multiprocessor" if has.few else "")


def steps_of(pool: Pool) -> Steps:
    """What is regular about a pool's addresses.

    An engine's blocks lie side by side in each layer's tensor, and a store's in one range of memory.  A short table fits
    a kernel's parameters, while that of all blocks comes from memory before the first byte does.
    """
    table = pool.addresses.astype(np.int64)
    each, _ = pool.resolved.id_steps
    if pool.resolved.apart:
        return Steps(None, _only(np.diff(table)) if not each else None)
    if not each:  # blocks inside the allocations
        return Steps(None, _only(np.diff(table)))
    if each * pool.num_blocks != table.size:  # b is not the slowest
        return Steps()
    by_block = table.reshape(pool.num_blocks, -1)
    block = _only(np.diff(by_block, axis=0))
    return Steps(block, _only(np.diff(by_block[0])) if block is not None else None)


def _only(steps: npt.NDArray[np.int64]) -> int | None:
    """The one value of all steps, 0 where there is none; None if they differ."""
    if not steps.size:
        return 0
    first = int(steps.flat[0])
    return first if bool((steps == first).all()) else None


def prepare(
    made: Plan,
    src_alignment: int,
    dst_alignment: int,
    *,
    few: bool = False,
    device: int = -1,
    src_steps: Steps = Steps(),  # noqa: B008  (immutable)
    dst_steps: Steps = Steps(),  # noqa: B008
) -> list[_core.Copy]:
    """The launches that a plan takes: one, or one a half where K and V have no kernel in common, or where it has many modes.

    Parameters
    ----------
    made : Plan
    src_alignment, dst_alignment : int
        What divides every base address of each side.
    few : bool
        Take kernels that keep to as many multiprocessors as they are told.
    device : int
        CUDA device ordinal: what is not built is compiled for it, if that is possible.  -1: built kernels alone, as the host's.
    src_steps, dst_steps : Steps
        How each side's table was shortened, if it was.

    Raises
    ------
    MissingKernelError
        A plan of so many modes that it would take thousands of launches.
    BuildError
        NVRTC refused a kernel.
    """
    src_id, dst_id = (
        of_plan if steps.block is None else (0, steps.block)
        for of_plan, steps in ((made.parts[0].src_id, src_steps), (made.parts[0].dst_id, dst_steps))
    )

    return [
        _core.Copy(launch.name, launch.arguments(src_steps, dst_steps), src_id, dst_id)
        for launch in _launches(made, (src_alignment, dst_alignment), few, device)
    ]


def _runs(made: Plan) -> list[_core.Copy]:
    """A plan's loop nests in bytes, as the copy engine takes them; none: one has too many modes."""
    ids = made.parts[0].src_id, made.parts[0].dst_id
    return [_core.Copy(None, told, *ids) for told in engine_arguments(made.parts)]


def _mean_run(made: Plan) -> int:
    """Bytes that stay together, on average."""
    return made.nbytes // sum(part.nbytes // part.run_bytes for part in made.parts)


@dataclass(frozen=True)
class _End:
    """What a transfer knows of a pool without keeping it alive."""

    layout: Layout
    shape: BlockShape
    num_blocks: int
    device: str
    alignment: int
    step: int | None
    slot_bytes: int  # of a block, packed
    addresses: npt.NDArray[np.uint64]
    steps: Steps
    framework: str

    @classmethod
    def of(cls, pool: Pool) -> _End:
        framework = type(pool.arrays[0]).__module__.partition(".")[0]
        return cls(
            pool.layout, pool.shape, pool.num_blocks, pool.device, pool.alignment, pool.step,
            pool.resolved.section.packed().accesses[0].block[0], pool.addresses, steps_of(pool), framework,
        )  # fmt: skip

    @property
    def index(self) -> int:
        """CUDA device ordinal, -1 for the host."""
        return -1 if self.device == "cpu" else int(self.device.partition(":")[2])

    @property
    def table(self) -> npt.NDArray[np.uint64]:
        """The table as kernels read it."""
        table: npt.NDArray[np.uint64] = self.steps.shorten(self.addresses, self.num_blocks)
        return table

    @property
    def bases(self) -> npt.NDArray[np.uint64]:
        """The table as the copy engine counts it: one base where allocations lie at a step."""
        return self.addresses if self.step is None else self.addresses[:1]


class _Mover:
    """Everything that a transfer needs, apart from the pools themselves: a cache of these keeps no memory alive."""

    def __init__(
        self, src: Pool, dst: Pool, strategy: str, max_sms: int | None, chunk_bytes: int | None, *, keeps: bool
    ) -> None:
        require_compatible(src, dst)
        self.src, self.dst = _End.of(src), _End.of(dst)
        self.title = f"{src.layout.name} → {dst.layout.name}"
        self.strategy = strategy
        self.same_pool = require_disjoint(src, dst)
        self.keep = (src, dst) if keeps else None
        self.on_host = src.device == dst.device == "cpu"
        self.gathers = self.src.index >= 0
        self.device = self.src.index if self.gathers else self.dst.index  # -1: none
        self.max_sms, self.bounded = _max_sms(self, max_sms), max_sms is not None
        self.chunk_bytes = chunk_bytes
        self.lock = threading.Lock()
        _made.add(self)
        self.ring: _core.Ring | None = None
        self.routes: dict[Any, _Route] = {}
        self.closed = False
        self.by_peer = False  # whether the copy engine has to cross by the one call that needs no grant
        self.unreached = "" if self.on_host else self._unreached(src, dst)
        self.cuts = np.zeros(0, np.uint64) if self.on_host else np.union1d(src.cuts, dst.cuts)
        # Kernels read both tables where they run.
        self.src_table, self.dst_table = (_core.Table(end.table, self.device) for end in (self.src, self.dst))
        if self.src.shape == self.dst.shape:
            self.routes[None] = self._route(None)
        elif strategy != "auto" or chunk_bytes is not None:
            _check_strategy(self)

    @property
    def direction(self) -> str:
        """``h2h``, ``d2d``, ``d2h``, ``h2d`` or ``p2p``."""
        src, dst = self.src.index, self.dst.index
        if src >= 0 and dst >= 0:
            return "d2d" if src == dst else "p2p"
        return ("d" if src >= 0 else "h") + "2" + ("d" if dst >= 0 else "h")

    def _unreached(self, src: Pool, dst: Pool) -> str:
        """Why kernels do not reach both sides, empty if they do; the copy engine needs pinned memory, too."""
        for pool, what in ((src, "source"), (dst, "destination")):
            if pool.device == "cpu" and not pool.pinned:
                raise BindError(
                    f"{self.title}: the {what} is in host memory that GPUs do not reach; allocate it with "
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
        found = self.routes.get(layers)
        if found is None:
            if layers is None and not self.closed:
                raise BindError(
                    f"{self.title}: the pools hold {self.src.shape.nl} and {self.dst.shape.nl} layers; say which by "
                    "layers=(range of the source, range of the destination)"
                )
            with self.lock:
                if self.closed:
                    raise BindError(f"{self.title}: the transfer is closed")
                found = self.routes.get(layers)  # another thread may have been faster
                if found is None:
                    found = self.routes[layers] = self._route(layers)
        return found

    def _route(self, layers: Layers) -> _Route:
        src, dst = self.src, self.dst
        try:
            made = plan(
                src.layout,
                dst.layout,
                (src.shape, dst.shape),
                num_blocks=(src.num_blocks, dst.num_blocks),
                layers=layers,
            )
        except PlanError as error:
            if layers is not None and "layers:" in str(error):
                raise BindError(str(error)) from None
            raise
        _check_strategy(self)
        whole = functools.partial(
            prepare, made, src.alignment, dst.alignment, device=self.device, src_steps=src.steps, dst_steps=dst.steps
        )
        blocks = src.num_blocks, dst.num_blocks
        if self.on_host:
            direct = whole()
            route = _core.Route(
                -1, self.src_table, self.dst_table, *blocks, direct=direct, same_pool=self.same_pool, keep=self.keep
            )
            return _Route(made, route, direct, "the host's kernels copy on all cores")
        # Kernels that no batch takes are not looked for: they may have to be compiled.
        direct = whole(few=self.max_sms > 0) if not self.unreached and self.strategy in ("auto", "direct") else []
        steps = made.staged(gathers=self.gathers)
        move = steps[1].flat(None, dst.step) if self.gathers else steps[0].flat(src.step, None)
        runs = made.flat(src.step, dst.step)
        slot_block = (steps[0].dst if self.gathers else steps[1].src).accesses[0].block[0]
        move_runs, all_runs = _runs(move), _runs(runs)
        ways = {
            "direct": Way(_mean_run(made), len(direct)),
            "staged": Way(_mean_run(move)),
            "engine": Way(_mean_run(runs)),
        }
        possible = {"direct": not self.unreached, "staged": bool(move_runs), "engine": bool(all_runs)}
        limits, why = self._limits({name: way for name, way in ways.items() if possible[name]}, made.nbytes)
        # Every destination is written once, so no batch keeps more pairs than there are: what would be taken beyond needs no
        # ring.  Batches whose ids lie on the GPU may be larger, and take the last strategy that is left.
        most = dst.num_blocks
        limits = limits[: 1 + next((i for i, (pairs, _) in enumerate(limits) if pairs >= most), len(limits))]
        if self.chunk_bytes is not None and self.chunk_bytes < slot_block:
            raise BindError(
                f"{self.title}: chunk_bytes: expected at least one block of {slot_block} bytes, got {self.chunk_bytes}"
            )
        ring = self._take_ring() if any(name == "staged" for _, name in limits) else None
        permute: list[_core.Copy] = []
        if ring is not None:
            few = self.bounded  # between device memory and device memory a kernel on all of the GPU is over in no time
            slot = _SLOT_ALIGNMENT
            if self.gathers:
                permute = prepare(steps[0], src.alignment, slot, few=few, device=self.device, src_steps=src.steps)
            else:
                permute = prepare(steps[1], slot, dst.alignment, few=few, device=self.device, dst_steps=dst.steps)
        for kernel in dict.fromkeys(copy.kernel for copy in (*direct, *permute)):  # now, and not beside a running model
            _core.warm(kernel, self.device)
        route = _core.Route(
            self.device,
            self.src_table,
            self.dst_table,
            *blocks,
            direct=direct,
            permute=permute,
            moves=move_runs,
            runs=all_runs,
            src_bases=src.bases,
            dst_bases=dst.bases,
            cuts=self.cuts,
            gathers=self.gathers,
            slot_block_bytes=slot_block,
            ring=ring,
            max_sms=self.max_sms,
            same_pool=self.same_pool,
            crosses=self.direction == "p2p",
            limits=[(pairs, _STRATEGIES.index(name)) for pairs, name in limits],
            may_choose=self.strategy == "auto",
            keep=self.keep,
            by_peer=self.by_peer,
        )
        return _Route(made, route, direct, why)

    def _limits(self, ways: dict[str, Way], block_bytes: int) -> tuning.Choice:
        """Up to how many pairs which strategy is taken, and why; not one that the copy engine lacks the modes for."""
        if not (ways if self.strategy == "auto" else self.strategy in ways):
            raise MissingKernelError(
                f"{self.title}: strategy={self.strategy!r}: the loop nest has more modes than the copy engine is fed with; "
                "use strategy='direct' between pools that one GPU reaches"
            )
        if self.strategy != "auto":
            return tuning.Choice(((0, self.strategy),), "it was asked for")
        if len(ways) > 1 and "engine" in ways and ways["engine"].run_bytes < ENGINE_RUN:
            del ways["engine"]
        chunk_bytes = self.chunk_bytes or CHUNK_BYTES
        return tuner.limits(self.direction, self.device, ways, block_bytes, chunk_bytes, Transfer)

    def _take_ring(self) -> _core.Ring:
        """The ring that all ranges of layers share; a range's block is never larger than the whole one."""
        if self.ring is None:
            largest = max(end.slot_bytes for end in (self.src, self.dst))
            self.ring = _core.Ring(self.device, self.chunk_bytes or max(CHUNK_BYTES, largest), SLOTS)
        return self.ring

    def copy(self, src_ids: Any, dst_ids: Any, layers: Layers, stream: Any, wait: Any) -> _core.Done:
        try:
            found = self.routes.get(layers) or self.route(layers)
        except TypeError:
            raise BindError(f"layers: expected range(first, last) or a tuple of two of them, got {layers!r}") from None
        if self.keep is not None and (self.keep[0].closed or self.keep[1].closed):
            for pool in self.keep:
                pool.require_open()
        if self.on_host:
            for name, given in (("stream", stream), ("wait", wait)):
                if given is not None:
                    raise BindError(
                        f"{name}: the pools are on the CPU, where the copy is done when the call returns; leave {name} out"
                    )
        elif stream is None:
            stream = self._current_stream()
        return found.route.copy(src_ids, dst_ids, stream, wait)

    def _current_stream(self) -> Any:
        end = self.src if self.gathers else self.dst
        return _current_stream(end.framework, end.index)

    def stats(self) -> dict[str, int]:
        total = dict.fromkeys(("copies", "blocks", "bytes", *_STRATEGIES, "submissions"), 0)
        for found in list(self.routes.values()):
            copies, blocks, submissions = found.route.counters()
            total["copies"] += sum(copies)
            total["blocks"] += sum(blocks)
            total["bytes"] += sum(blocks) * found.plan.nbytes
            total["submissions"] += submissions
            for name, count in zip(_STRATEGIES, copies, strict=True):
                total[name] += count
        return total

    def explain(self, num_blocks: int | None, layers: Layers) -> str:
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
            counts = [num_blocks] if num_blocks else [1, 4, 16, 64, 256]
            for count in counts:
                name = found.route.choose(count)
                lines.append(
                    f"{count} block{'s' if count > 1 else ''} ({size_text(count * found.plan.nbytes)}): {name}."
                )
            lines += [f"Why: {found.why}.", *self._how(found)]
        else:
            lines.append(f"{found.why[0].upper()}{found.why[1:]}.")
            lines += _notes(_launches(found.plan, (self.src.alignment, self.dst.alignment), False, -1), -1)
        return "\n".join([*lines, found.plan.explain()])

    def _how(self, found: _Route) -> list[str]:
        """What each strategy does, in a sentence, and what there is to say about its kernels."""
        budget = f" on at most {self.max_sms} multiprocessors" if self.max_sms else ""
        said, made = [f"direct is left out: {self.unreached}."] if self.unreached else [], found.plan
        if self.by_peer:
            said.append("the copy engine takes one range a call (cuMemcpyPeerAsync): memory without a grant needs it.")
        launches = []
        if found.copies:
            many = f"{len(found.copies)} launches" if len(found.copies) > 1 else "one launch"
            names = " and ".join(dict.fromkeys(copy.kernel for copy in found.copies if copy.kernel))
            said.append(f"direct is {many} of {names}{budget}: it reads and writes both pools.")
            launches += _launches(made, (self.src.alignment, self.dst.alignment), self.max_sms > 0, self.device)
        if self.ring is not None:
            order = (
                "a kernel packs blocks into a slot and the copy engine takes them from there"
                if self.gathers
                else "the copy engine fills a slot and a kernel unpacks the blocks from there"
            )
            said.append(
                f"staged goes through {self.ring.slots} slots of {size_text(self.ring.slot_bytes)} on cuda:{self.device}: {order}."
            )
            step = made.staged(gathers=self.gathers)[0 if self.gathers else 1]
            ends = (self.src.alignment, _SLOT_ALIGNMENT) if self.gathers else (_SLOT_ALIGNMENT, self.dst.alignment)
            launches += _launches(step, ends, self.bounded, self.device)
        said += _notes(launches, self.device)
        return said


_made: weakref.WeakSet[_Mover] = weakref.WeakSet()


def _unlock() -> None:
    """In a forked child, which lacks the thread that may have held a lock."""
    for mover in _made:
        mover.lock = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


@dataclass
class _Route:
    """A mover's way for all layers, or for a range of them."""

    plan: Plan
    route: _core.Route
    copies: Sequence[_core.Copy]
    why: str


def _max_sms(mover: _Mover, asked: object) -> int:
    if asked is None:
        return HOST_SMS if mover.direction in ("d2h", "h2d") else 0
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise BindError(f"max_sms: expected a number of multiprocessors from 1 on, got {asked!r}")
    if mover.on_host:
        raise BindError("max_sms: both pools are in host memory, where no GPU copies; leave it out")
    if mover.strategy == "engine":
        raise BindError("max_sms: the copy engine uses no multiprocessor; leave it out")
    return asked


def _check_strategy(mover: _Mover) -> None:
    """An explicit strategy or chunk size that cannot be honoured is an error."""
    if mover.strategy not in ("auto", *_STRATEGIES):
        raise BindError(f"strategy: expected 'auto', 'direct', 'staged' or 'engine', got {mover.strategy!r}")
    if mover.on_host and mover.strategy in ("staged", "engine"):
        raise BindError(f"strategy: {mover.strategy!r} needs a GPU, and both pools are in host memory; leave it out")
    if mover.strategy == "direct" and mover.unreached:
        raise BindError(
            f"strategy: 'direct' needs a kernel on {mover.src.device} to reach {mover.dst.device}, and {mover.unreached}; "
            "use 'staged' or 'engine'"
        )
    chunk: object = mover.chunk_bytes
    if chunk is not None:
        if mover.on_host or mover.strategy in ("direct", "engine"):
            raise BindError(
                f"chunk_bytes: only staged copies go through chunks, and strategy is {mover.strategy!r}; leave it out"
            )
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
            raise BindError(f"chunk_bytes: expected a number of bytes, got {chunk!r}")


class Transfer:
    """Copies blocks from one pool into another, again and again: beside a running model, on streams.

    Parameters
    ----------
    src_pool, dst_pool : Pool
        Each on a GPU, or in host memory: pinned, unless both are in host memory.  They may be the same pool if no block is
        both read and written.  The transfer keeps them.
    strategy : {"auto", "direct", "staged", "engine"}
        ``direct``: one kernel, also on pinned memory and on another GPU's.  ``staged``: a kernel packs blocks into a ring on
        the GPU and the copy engine takes them from there, or the reverse.  ``engine``: runs that are contiguous on both sides,
        merged, by the copy engine alone.  ``auto``: whichever this machine was measured to be fastest with (`explain`).
    max_sms : int, optional
        Multiprocessors that kernels may use.  Not given: 16 where host memory is involved, else all.
    chunk_bytes : int, optional
        Size of one of the three slots of the ring that staged copies use; at least one block, 32 MiB if not given.

    Raises
    ------
    BindError
        Pools that do not fit each other, host memory that the GPU does not reach, an option that cannot be honoured.
    LayoutError, PlanError
        There is no copy between the two layouts.
    CudaError, CudaUnavailableError
        The ring could not be allocated; no GPU.

    Notes
    -----
    Any number of threads may copy at once, on any streams.  Staged copies of one transfer share its ring and so run one after
    the other; make another transfer for copies that must not wait for each other.  Keep the transfer as long as graphs that
    it was captured into.

    Examples
    --------
    >>> offload = Transfer(engine_pool, host_pool)  # doctest: +SKIP
    >>> done = offload.copy([7, 3], [0, 1], stream=stream)  # doctest: +SKIP
    >>> done.wait(other_stream)  # doctest: +SKIP
    """

    def __init__(
        self,
        src_pool: Pool,
        dst_pool: Pool,
        strategy: str = "auto",
        max_sms: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self._mover = _Mover(src_pool, dst_pool, strategy, max_sms, chunk_bytes, keeps=True)
        self._pools = (src_pool, dst_pool)

    def copy(
        self, src_ids: Any = None, dst_ids: Any = None, *, layers: Layers = None, stream: Any = None, wait: Any = None
    ) -> _core.Done:
        """Enqueue a batch: block ``src_ids[i]`` is copied into block ``dst_ids[i]``.

        Parameters
        ----------
        src_ids, dst_ids : int, sequence of int, NumPy array, CPU or CUDA tensor, optional
            int32 or int64; -1 skips a pair.  Not given: 0, 1, 2, … on that side.  Ids in host memory are checked and may be
            changed at once.  Ids on the GPU are read when the kernel runs, so that a captured graph can be replayed with
            others; keep them until then.  One that is out of range there is skipped, and `Done.synchronize` says so.
        layers : range or (range, range), optional
            The layers to copy: on both sides, or of the source and of the destination where the pools hold other layers.
        stream : optional
            Where the copy is ordered: an object with ``__cuda_stream__`` (cuda.core, torch, CuPy), a cuda.bindings handle or
            an int.  Not given: torch's or CuPy's current stream.  Not for two pools in host memory, where the copy is done
            when the call returns.
        wait : optional
            What must be done before: an event, a stream, the `Done` of another copy, or a list of them.

        Returns
        -------
        Done
            ``wait(stream)``, ``synchronize()`` and ``query()``.

        Raises
        ------
        BindError
            Ids that are out of range, repeated in the destination, or read and written.  Nothing has been enqueued.
        CudaError
            A call of the driver failed.
        """
        _require_usable(*self._pools)
        done = self._mover.copy(src_ids, dst_ids, layers, stream, wait)
        self._pools[1].written()
        return done

    def explain(self, num_blocks: int | None = None, *, layers: Layers = None) -> str:
        """What runs, and why, for batches of so many blocks (not given: of several sizes)."""
        return self._mover.explain(num_blocks, layers)

    def stats(self) -> dict[str, int]:
        """What has been enqueued so far.

        Returns
        -------
        dict
            ``copies``, ``blocks`` (without those that were skipped), ``bytes``; copies by strategy: ``direct``, ``staged``,
            ``engine``; ``submissions``: kernels and calls of the copy engine.
        """
        return self._mover.stats()

    def close(self) -> None:
        """Give back the ring; waits for the copies that use it.  Further copies are refused.

        A copy that another thread is enqueueing at this moment goes through, and the ring is given back later.
        """
        mover = self._mover
        with mover.lock:
            mover.closed = True
            mover.routes.clear()
            ring, mover.ring = mover.ring, None
        if ring is not None:
            ring.close()

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Transfer({self._mover.title}, {self._mover.direction}, strategy={self._mover.strategy})"


_movers: weakref.WeakKeyDictionary[Pool, weakref.WeakKeyDictionary[Pool, _Mover]] = weakref.WeakKeyDictionary()


def _bind(src: Pool, dst: Pool) -> _Mover:
    targets = _movers.setdefault(src, weakref.WeakKeyDictionary())
    # Of two threads that make one at once the faster one's stays: what graphs and copies read lives as long as the pools.
    return targets.get(dst) or targets.setdefault(dst, _Mover(src, dst, "auto", None, None, keeps=False))


def require_compatible(src: Pool, dst: Pool) -> None:
    """Two pools between which blocks can move: one block shape but for the layers, a destination that may be written."""
    _require_usable(src, dst)
    title = f"{src.layout.name} → {dst.layout.name}"
    if src.shape.dtype != dst.shape.dtype:
        raise DTypeError(
            f"{title}: the source holds {src.shape.dtype}, the destination {dst.shape.dtype}; a copy converts no dtype"
        )
    if replace(src.shape, nl=1) != replace(dst.shape, nl=1):
        raise BindError(f"{title}: expected pools of one block shape, got {src.shape} and {dst.shape}")


def _require_usable(src: Any, dst: Any) -> None:
    """Two pools that are as they were when they were bound, before every copy."""
    if not (isinstance(src, Pool) and isinstance(dst, Pool)):
        what, pool = ("destination", dst) if isinstance(src, Pool) else ("source", src)
        raise BindError(f"the {what}: expected a kvbm.Pool, got {type(pool).__name__}; bind arrays with kvbm.Pool")
    src.require_open()
    dst.require_open()
    if dst.readonly:
        raise BindError(f"{src.layout.name} → {dst.layout.name}: the destination is read-only")


def require_disjoint(src: Pool, dst: Pool) -> bool:
    """False where the pools share no memory, True where they are the same blocks of one layout; else an error."""
    if src is dst:
        return True
    a, b = src.spans, dst.spans
    # Of the spans of the other side that start before this one ends (they are sorted), does any end behind its start?
    before = np.searchsorted(b[:, 0], a[:, 1], side="left")
    reach = np.maximum.accumulate(b[:, 1])
    clash = np.nonzero((before > 0) & (reach[np.maximum(before, 1) - 1] > a[:, 0]))[0]
    if not clash.size:
        return False
    blocks = [(pool.layout, pool.shape, pool.num_blocks) for pool in (src, dst)]
    if blocks[0] == blocks[1] and np.array_equal(src.addresses, dst.addresses):
        return True
    raise BindError(
        f"{src.layout.name} → {dst.layout.name}: source and destination overlap in memory at address {int(a[clash[0], 0]):#x}; "
        "a block would be read after it was overwritten. Convert into memory of its own"
    )


def current_stream(pool: Pool) -> int:
    """The stream that the pool's framework is on: torch's or CuPy's current one for the pool's device.

    Raises
    ------
    BindError
        Arrays of neither: there is no stream to assume.
    """
    framework = type(pool.arrays[0]).__module__.partition(".")[0]
    return _core.stream_handle(_current_stream(framework, int(pool.device.partition(":")[2])))


def torch_stream(index: int) -> int:
    """Handle of torch's current stream on a GPU that it uses already."""
    raw = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:  # what Inductor and Triton ask: without a Stream object, a tenth of the time
        return int(raw(index))
    return int(sys.modules["torch"].cuda.current_stream(index).cuda_stream)


def _current_stream(framework: str, index: int) -> Any:
    """As the framework's object: a default stream's handle does not tell of which GPU it is."""
    module = sys.modules.get(framework)
    if framework == "torch" and module is not None:
        return module.cuda.current_stream(index)
    if framework == "cupy" and module is not None:
        with module.cuda.Device(index):
            return module.cuda.get_current_stream()
    raise BindError(
        f"stream: arrays of {framework} have no current stream; pass stream= (an object with __cuda_stream__, or a handle)"
    )


def convert(src_pool: Pool, dst_pool: Pool, src_ids: Any = None, dst_ids: Any = None, *, stream: Any = None) -> None:
    """Copy blocks from one pool into another, each in its own layout.

    Parameters
    ----------
    src_pool, dst_pool : Pool
        On one device.  They may be the same pool if no block is both read and written.
    src_ids, dst_ids : sequence of int, NumPy array or CPU tensor, optional
        Pair ``i`` copies block ``src_ids[i]`` into ``dst_ids[i]``.  Not given: 0, 1, 2, … on that side, as many as the
        other side has ids, or all blocks.  -1 skips a pair.
    stream : optional
        Where a GPU copy is ordered: an object with ``__cuda_stream__`` (cuda.core, torch, CuPy), a cuda.bindings handle or
        an int.  Not given: torch's or CuPy's current stream for their arrays.  The call returns once the copy is in the
        stream; ids may be changed at once.  On the CPU the copy is done when the call returns.

    Raises
    ------
    BindError
        Pools that do not fit each other, ids that are out of range, repeated in the destination, or read and written.
        The destination is untouched.
    LayoutError, PlanError
        There is no copy between the two layouts.
    CudaError
        The launch failed.

    Examples
    --------
    >>> convert(engine_pool, storage_pool, src_ids=[7, 3], dst_ids=[0, 1])  # doctest: +SKIP
    """
    _require_usable(src_pool, dst_pool)
    _bind(src_pool, dst_pool).copy(src_ids, dst_ids, None, stream, None)
    dst_pool.written()
