"""Ways to move bytes between two processes of a machine: memcpy, NIXL, gloo or NCCL, kvbm's wires and links, the engines' way."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvbm import _core, wire
from kvbm.bench.check import WrongCopyError
from kvbm.bench.measure import Memory, View, device_of, random_pool, read, write
from kvbm.errors import KvbmError
from kvbm.layout import spec
from kvbm.layout.shapes import BlockShape
from kvbm.pool.pool import Pool
from kvbm.reshard import Endpoint, Placement, Span
from kvbm.system.clock import Timed

from .race import Asked, Runner

__all__ = ["DECODE", "LIMIT", "PREFILL", "Pair", "ways_of"]

#: Layout and tokens per block of both sides.
PREFILL, DECODE = ("vllm/flash_attn_nhd", 16), ("vllm/flash_attn_hnd", 64)

#: Timeout in seconds for the other process.
LIMIT = 120.0

#: The thread's default stream.
_OWN_STREAM = 2


class Setting(NamedTuple):
    """The parameters of a process.

    Attributes
    ----------
    place : str
        Place of its memory: ``"cpu"`` or ``"cuda:N"``.
    options : mapping
        Options of `Endpoint`.
    """

    model: BlockShape
    tokens: int
    folder: str
    sends: bool
    place: str = "cpu"
    options: Mapping[str, int] = {}

    @property
    def nbytes(self) -> int:
        return self.tokens * replace(self.model, nt=1).nbytes


class Side:
    """The memory of a process, allocated at first use: bytes in one piece, and a pool.

    Attributes
    ----------
    device : int
        CUDA device ordinal; -1 on the CPU.  The device is made current for this thread.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting, self.stack = setting, contextlib.ExitStack()
        self._tables: dict[int, Any] = {}
        self.device = device_of(setting.place)
        if self.device >= 0:
            from cuda.core import Device

            Device(self.device).set_current()

    @functools.cached_property
    def bytes(self) -> Memory:
        """Memory for the largest message, and 64 further bytes for answers."""
        held = Memory(self.setting.nbytes + 64, self.setting.place)
        self.stack.callback(held.close)
        held.fill(1 if self.setting.sends else 2)
        return held

    @property
    def kind(self) -> str:
        """NIXL's name for the kind of memory."""
        return "DRAM" if self.device < 0 else "VRAM"

    def tensor(self, array: Any) -> Any:
        """An array of this side as a torch tensor.  Elements of two bytes become int16."""
        import torch

        if self.device >= 0:
            found = torch.as_tensor(array, device=self.setting.place)
        else:
            found = torch.from_numpy(array.view(np.int16) if array.itemsize == 2 else array)
        return found.view(torch.int16) if found.element_size() == 2 else found

    @functools.cached_property
    def flat(self) -> Any:
        """`bytes` as a torch tensor."""
        held = self.bytes
        return self.tensor(held.array if self.device < 0 else View(self.device, held.address, [held.nbytes], [1], "|u1"))

    def wait(self) -> None:
        """Wait for all work of torch on this device."""
        if self.device >= 0:
            import torch

            torch.cuda.synchronize(self.device)

    @functools.cached_property
    def pool(self) -> Pool:
        return self._pool(*(PREFILL if self.setting.sends else DECODE))

    @functools.cached_property
    def landing(self) -> Pool:
        """The pool in which blocks arrive as in engines: with the sender's layout."""
        return self._pool(*PREFILL) if not self.setting.sends else self.pool

    def _pool(self, name: str, nt: int) -> Pool:
        shape, seed = replace(self.setting.model, nt=nt), 3 if self.setting.sends else 4
        made = random_pool(spec.load(name), shape, self.setting.tokens // nt, self.setting.place, seed=seed)
        return self.stack.enter_context(made)

    def table(self, nt: int) -> Any:
        """The blocks of a message with all tokens, in order."""
        if nt not in self._tables:
            self._tables[nt] = np.random.default_rng(nt).permutation(self.setting.tokens // nt)
        return self._tables[nt]

    # ---- comparison ------------------------------------------------------------------------------------------------

    def sum_of(self, way: Way, tokens: int) -> int:
        """A checksum of what was sent or received: a CRC of the bytes, or a digest of the tokens."""
        if not way.copies:
            return zlib.crc32(read(self.device, *self._bytes_of(tokens)).data)
        nt = (PREFILL if self.setting.sends else DECODE)[1]
        stream = None if self.device < 0 else _OWN_STREAM
        found = self.pool.digest(self.table(nt)[: tokens // nt], tokens=range(0, tokens, nt), stream=stream)
        return sum(map(int, found)) % (1 << 64)

    def forget(self, way: Way, tokens: int) -> None:
        """Overwrite the received data with zeros."""
        pieces = [self._bytes_of(tokens)] if not way.copies else extents(self.pool)
        for starts, sizes in pieces:
            write(self.device, starts, sizes, np.zeros(int(sizes.sum()), np.uint8))

    def _bytes_of(self, tokens: int) -> tuple[Any, Any]:
        nbytes = tokens * replace(self.setting.model, nt=1).nbytes
        return np.array([self.bytes.address]), np.array([nbytes])


def extents(pool: Pool) -> list[tuple[Any, Any]]:
    """Address and bytes of each array of a pool."""
    allocations = pool.layout.resolve(pool.shape, pool.num_blocks).allocations
    return [(np.array([at]), np.array([one.nbytes])) for at, one in zip(pool.addresses.tolist(), allocations, strict=True)]


class Way(Protocol):
    """One side of a way to move bytes.

    Attributes
    ----------
    copies : bool
        True if the receiver has all tokens in its pool at the end; False if it has the bytes in one piece.
    pieces : int
        Number of descriptors or chunks of the last message.
    """

    side: Side
    copies: bool = False
    pieces: int = 1

    def __init__(self, side: Side) -> None:
        self.side = side

    def card(self) -> Any:
        """The data that the other side needs to connect."""

    def meet(self, card: Any) -> None:
        """Connect to the other side."""

    def send(self, tokens: int) -> None:
        """Send a message, and return when it has arrived.  If this side cannot know that, it waits for the other side's answer."""

    def take(self, tokens: int) -> None:
        """Wait for a message, and confirm its arrival."""

    def close(self) -> None:
        """Release all resources."""

    def nbytes(self, tokens: int) -> int:
        return tokens * self.side.setting.nbytes // self.side.setting.tokens


class ByMemcpy(Way):
    """The driver's copy from GPU to GPU into the other process's memory: the fastest way."""

    def card(self) -> Any:
        return None if self.side.setting.sends else _core.ipc_handle(self.side.device, self.side.bytes.address)

    def meet(self, card: Any) -> None:
        self.far = _core.ipc_open(self.side.device, card) if self.side.setting.sends else 0

    def send(self, tokens: int) -> None:
        dst, src = (np.array([at], np.uint64) for at in (self.far, self.side.bytes.address))
        _core.memcpy_batch(dst, src, self.nbytes(tokens), 1, self.side.device, _OWN_STREAM)
        _core.synchronize(self.side.device, _OWN_STREAM)

    def close(self) -> None:
        if self.far:
            _core.ipc_close(self.side.device, self.far)


class ByNixl(Way):
    """Plain NIXL: one transfer with one descriptor per side, its notification, and a notification back."""

    def __init__(self, side: Side) -> None:
        from kvbm.wire._nixl import Agent

        super().__init__(side)
        self.agent = Agent(f"{type(self).__name__} {side.setting.sends}", "UCX")
        self.number = max(side.device, 0)
        self.places = [(*place, self.number) for place in self.regions()]
        descriptors = self.agent.nixl.get_reg_descs([(*place, "") for place in self.places], side.kind)
        self.agent.nixl.register_memory(descriptors)

    def regions(self) -> list[tuple[int, int]]:
        return [(self.side.bytes.address, self.side.bytes.nbytes)]

    def card(self) -> Any:
        return self.agent.nixl.get_agent_metadata(), self.places, self.side.kind

    def meet(self, card: Any) -> None:
        metadata, self.far, self.far_kind = card
        name = self.agent.nixl.add_remote_agent(metadata)
        self.peer = name.decode() if isinstance(name, bytes) else name

    def send(self, tokens: int) -> None:
        here, there = ((at, self.nbytes(tokens), number) for [(at, _, number)] in (self.places, self.far))
        handle = self.agent.post("WRITE", (self.side.kind, here), (self.far_kind, there), self.peer, b"put")
        while handle is not None and not self.agent.check("WRITE", handle):
            pass
        if handle is not None:
            self.agent.release(handle)
        self.hear()

    def take(self, tokens: int) -> None:  # noqa: ARG002
        self.hear()
        self.answer()

    def hear(self) -> None:
        end = time.monotonic() + LIMIT
        while not self.agent.nixl.get_new_notifs():
            if time.monotonic() > end:
                raise TimeoutError("NIXL: nothing comes")

    def answer(self) -> None:
        self.agent.nixl.send_notif(self.peer, b"it is there")

    def close(self) -> None:
        del self.agent.nixl


class AsEngines(ByNixl):
    """NIXL as in engines: one descriptor per block, layer, K and V, into blocks with the sender's layout, which torch permutes."""

    copies = True

    def regions(self) -> list[tuple[int, int]]:
        return [(int(at[0]), int(nbytes[0])) for at, nbytes in extents(self.side.landing)]

    def meet(self, card: Any) -> None:
        super().meet(card)
        if self.side.setting.sends:
            nixl = self.agent.nixl
            self.sides = [
                nixl.prep_xfer_dlist(to, nixl.get_xfer_descs(self.blocks(places), kind))
                for to, places, kind in (
                    ("NIXL_INIT_AGENT", self.places, self.side.kind),
                    (self.peer, self.far, self.far_kind),
                )
            ]

    def blocks(self, places: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Descriptors of K and V of every block and layer.  In an array, K is before V."""
        count = self.side.setting.tokens // PREFILL[1]
        return [
            (address + (half * count + block) * (nbytes // 2 // count), nbytes // 2 // count, number)
            for block in range(count)
            for address, nbytes, number in places
            for half in (0, 1)
        ]

    def send(self, tokens: int) -> None:
        each = 2 * len(self.places)
        blocks = self.side.table(PREFILL[1])[: tokens // PREFILL[1]]
        here = (blocks[:, None] * each + np.arange(each)).ravel()
        there = np.arange(here.size)
        self.pieces = here.size
        nixl = self.agent.nixl
        handle = nixl.make_prepped_xfer("WRITE", self.sides[0], here.tolist(), self.sides[1], there.tolist(), b"put")
        state = nixl.transfer(handle)
        while state != "DONE":
            state = nixl.check_xfer_state(handle)
        nixl.release_xfer_handle(handle)
        self.hear()

    def take(self, tokens: int) -> None:
        import torch

        self.hear()
        table = torch.from_numpy(self.side.table(DECODE[1])[: tokens // DECODE[1]])
        for landed, kept in zip(self.side.landing.arrays, self.side.pool.arrays, strict=True):
            src, dst = self.side.tensor(landed), self.side.tensor(kept)
            two, _, nt, nh, hd = src.shape
            some = src[:, : tokens // nt].reshape(two, -1, DECODE[1], nh, hd).permute(0, 1, 3, 2, 4)
            dst.index_copy_(1, table.to(dst.device), some)
        self.side.wait()
        self.answer()


class ByTorch(Way):
    """A plain process group of gloo or NCCL: one tensor, and some bytes back."""

    def __init__(self, side: Side) -> None:
        import torch.distributed as distributed

        super().__init__(side)
        self.store = distributed.FileStore(f"{side.setting.folder}/group", -1)

    def meet(self, card: Any) -> None:  # noqa: ARG002
        import torch.distributed as distributed

        of = distributed.ProcessGroupGloo if self.side.device < 0 else distributed.ProcessGroupNCCL
        self.group = of(self.store, 1 - self.side.setting.sends, 2)

    def send(self, tokens: int) -> None:
        self.group.send([self.side.flat[: self.nbytes(tokens)]], 1, 0).wait()
        self.group.recv([self.side.flat[-64:]], 1, 1).wait()
        self.side.wait()

    def take(self, tokens: int) -> None:
        self.group.recv([self.side.flat[: self.nbytes(tokens)]], 0, 0).wait()
        self.group.send([self.side.flat[-64:]], 0, 1).wait()
        self.side.wait()

    def close(self) -> None:
        if self.side.device >= 0:  # NCCL's destructor may wait forever for a peer that has ended
            self.group.abort()


def carrier(kind: str, side: Side, name: str, path: str) -> Any:
    """A wire between processes.  `path` is a file through which the two ends find each other."""
    if kind == "mapped":
        return wire.mapped(carrier("nixl", side, name, path))
    if kind == "nixl":
        return wire.nixl(name, drop_seconds=1)
    import torch.distributed

    store = torch.distributed.FileStore(path, -1)
    return wire.torch(name, store, backend="gloo" if side.device < 0 else "nccl", drop_seconds=1)


class ByWire(Way):
    """A put on one of kvbm's wires, its note, and a note back."""

    def __init__(self, kind: str, side: Side) -> None:
        super().__init__(side)
        self.kind = kind
        self.wire = carrier(kind, side, "near" if side.setting.sends else "far", f"{side.setting.folder}/wire")
        self.wire.register(wire.Slab(side.bytes.address, side.bytes.nbytes, side.setting.place, side.bytes))

    def card(self) -> Any:
        return self.wire.card()

    def meet(self, card: Any) -> None:
        self.peer = self.wire.connect(card)

    def send(self, tokens: int) -> None:
        part = wire.Slice(0, self.nbytes(tokens))
        op = self.wire.put(self.peer, part, part, b"put")
        self.hear()
        while not op.query():
            pass

    def take(self, tokens: int) -> None:  # noqa: ARG002
        self.hear()
        self.wire.note(self.peer, b"it is there")

    def hear(self) -> None:
        end = time.monotonic() + LIMIT
        while not self.wire.poll():
            if time.monotonic() > end:
                raise TimeoutError(f"{self.kind}: nothing comes")

    def close(self) -> None:
        self.wire.close()


class ByLink(Way):
    """A link, end to end: chunks are packed, put, unpacked into blocks of another layout and size, and verified by digests."""

    copies = True

    def __init__(self, kind: str, side: Side, *, direct: bool = False) -> None:
        super().__init__(side)
        told = side.setting
        self.nt = (PREFILL if told.sends else DECODE)[1]
        name = "prefill" if told.sends else "decode"
        place = Placement("tp1", model=told.model, nt=self.nt, name=name)
        of_wire = carrier(kind, side, name, f"{told.folder}/link{direct:d}")
        self.end = Endpoint(name, place, 0, side.pool, wire=of_wire, direct=direct, **told.options)
        self.number = 0

    def card(self) -> Any:
        return self.end.card()

    def meet(self, card: Any) -> None:
        self.link = self.end.meet([card])
        self.path = ", ".join(dict.fromkeys(self.link.paths.values()))

    def send(self, tokens: int) -> None:
        before = self.link.stats()["chunks_sent"]
        self._go(self.link.send, tokens)
        self.pieces = int(self.link.stats()["chunks_sent"] - before)

    def take(self, tokens: int) -> None:
        self._go(self.link.receive, tokens)

    def _go(self, call: Callable[[str, Span], Any], tokens: int) -> None:
        self.number += 1
        table = self.side.table(self.nt)[: tokens // self.nt]
        call(str(self.number), Span(table, range(tokens))).synchronize(LIMIT)

    def close(self) -> None:
        self.end.close()


class Known(NamedTuple):
    """A measured way.

    Attributes
    ----------
    make : callable
        Creates one side.
    beside : str
        Name of the way with which its speed is compared; empty if it is not compared.
    asked : tuple of (int, float)
        Required ratio by least number of bytes.
    needs_two : bool
        True if it needs two GPUs: NCCL does not accept one GPU twice.
    """

    make: Callable[[Side], Way]
    beside: str
    asked: tuple[tuple[int, float], ...] = ()
    needs_two: bool = False

    def asked_of(self, nbytes: int) -> Asked:
        return next((ratio for least, ratio in reversed(self.asked) if nbytes >= least), None)


#: Of a memcpy by CUDA IPC; rings by NIXL of NIXL's own transfer.
_DIRECT = ((60_000_000, 0.55), (300_000_000, 0.8), (2_000_000_000, 0.93))
_BY_NIXL = ((60_000_000, 0.25), (300_000_000, 0.6), (2_000_000_000, 0.85))
_MAPPED = ((60_000_000, 0.3), (300_000_000, 0.6), (2_000_000_000, 0.8))

ON_CPU = {
    "NIXL": Known(ByNixl, ""),
    "wire.nixl": Known(functools.partial(ByWire, "nixl"), "NIXL", ((0, 0.9),)),
    "link by NIXL": Known(functools.partial(ByLink, "nixl"), "NIXL"),
    "link, mapped": Known(functools.partial(ByLink, "mapped"), "NIXL"),
    "link, direct": Known(functools.partial(ByLink, "mapped", direct=True), "NIXL"),
    "as engines do": Known(AsEngines, "NIXL"),
    "gloo": Known(ByTorch, ""),
    "wire.torch": Known(functools.partial(ByWire, "torch"), "gloo", ((0, 0.9),)),
    "link by gloo": Known(functools.partial(ByLink, "torch"), "gloo"),
}

ON_GPUS = {
    "memcpy": Known(ByMemcpy, ""),
    "NIXL": Known(ByNixl, "memcpy"),
    "wire.nixl": Known(functools.partial(ByWire, "nixl"), "NIXL"),
    "link by NIXL": Known(functools.partial(ByLink, "nixl"), "NIXL", _BY_NIXL),
    "link, mapped": Known(functools.partial(ByLink, "mapped"), "memcpy", _MAPPED),
    "link, direct": Known(functools.partial(ByLink, "mapped", direct=True), "memcpy", _DIRECT),
    "as engines do": Known(AsEngines, "NIXL"),
    "NCCL": Known(ByTorch, "memcpy", needs_two=True),
    "wire.torch": Known(functools.partial(ByWire, "torch"), "NCCL", needs_two=True),
    "link by NCCL": Known(functools.partial(ByLink, "torch"), "NCCL", needs_two=True),
}

#: All ways by device type and name.
WAYS = {"cpu": ON_CPU, "cuda": ON_GPUS}


def ways_of(place: str) -> dict[str, Known]:
    """The ways between memory of ``"cpu"``, or of ``"cuda:N"``."""
    return WAYS[place.partition(":")[0]]


def serve(pipe: Any, setting: Setting) -> None:
    """The main function of the other process: create ways, and send or receive messages on them."""
    side = Side(setting)
    ways: dict[str, Way] = {}
    with contextlib.suppress(EOFError):
        while True:
            what, name, *given = pipe.recv()
            try:
                if what == "make":
                    ways[name] = ways_of(setting.place)[name].make(side)
                    pipe.send(("ok", ways[name].card()))
                elif what == "meet":
                    ways[name].meet(*given)
                    pipe.send(("ok", None))
                elif what == "sum":
                    pipe.send(("ok", side.sum_of(ways[name], *given)))
                    side.forget(ways[name], *given)
                else:
                    tokens, count = given
                    pipe.send(("ok", None))
                    for _ in range(count):
                        getattr(ways[name], what)(tokens)
            except Exception as error:
                pipe.send(("error", f"{type(error).__name__}: {error}"))
    closing = [threading.Thread(target=way.close, daemon=True) for way in ways.values()]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(8)


class Pair:
    """The caller's process, which sends, and another one that receives; or the other way round."""

    def __init__(
        self,
        model: BlockShape,
        tokens: int,
        folder: str,
        places: tuple[str, str] = ("cpu", "cpu"),
        options: Mapping[str, int] = {},
        *,
        receives: bool = False,
    ) -> None:
        self.turns = ("take", "send") if receives else ("send", "take")
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # for both processes: NIXL logs to stdout, where the CSV goes
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # suppress NCCL's advice about process groups
        logging.getLogger("nixl").setLevel(logging.WARNING)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        ends = (Setting(model, tokens, folder, place == 0, places[place], options) for place in (0, 1))
        near, far = sorted(ends, key=lambda end: end.sends == receives)
        self.process = context.Process(target=serve, args=(theirs, far), daemon=True)
        self.process.start()
        theirs.close()
        self.side = Side(near)
        self.ways: dict[str, Way] = {}

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()  # the other process closes its ends at the same time: links end with a message to each other
        for way in self.ways.values():
            with contextlib.suppress(KvbmError):
                way.close()
        self.side.stack.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self.answer()

    def answer(self) -> Any:
        if not self.pipe.poll(LIMIT):
            raise KvbmError("link: the other process does not answer")
        what, value = self.pipe.recv()
        if what != "ok":
            raise KvbmError(f"link: the other process: {value}")
        return value

    def open(self, name: str) -> None:
        """Create both sides of a way, and connect them."""
        way = ways_of(self.side.setting.place)[name].make(self.side)
        self.ways[name] = way
        card = self.ask("make", name)
        self.pipe.send(("meet", name, way.card()))  # at the same time as this side: gloo's two sides wait for each other
        try:
            way.meet(card)
        finally:
            self.answer()

    def check(self, name: str, tokens: int) -> None:
        """Send once, and compare the checksums.

        Raises
        ------
        WrongCopyError
            The received data differ from the sent data.
        """
        self.seconds(name, tokens, 1)
        if self.ask("sum", name, tokens) != self.side.sum_of(self.ways[name], tokens):
            raise WrongCopyError(f"{name}: {tokens} tokens: what came is not what was sent")

    def seconds(self, name: str, tokens: int, count: int) -> list[float]:
        mine, other = self.turns
        self.ask(other, name, tokens, count)
        times = []
        for _ in range(count):
            start = time.perf_counter()
            getattr(self.ways[name], mine)(tokens)
            times.append(time.perf_counter() - start)
        return times

    def runner(self, name: str, tokens: int) -> Runner:
        def run(iters: int, warmup: int) -> Timed:
            return Timed.of(self.seconds(name, tokens, warmup + iters)[warmup:], "clock")

        return run
