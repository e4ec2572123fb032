"""Ways for bytes between two processes of a machine: NIXL, gloo, kvbm's wires and links on them, and what engines do."""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import spec, wire
from ..errors import KvbmError
from ..pool import Pool
from ..reshard import Endpoint, Placement, Span
from ..shapes import BlockShape
from .check import WrongCopyError
from .clock import Timed
from .measure import random_pool
from .race import Runner

__all__ = ["ASKED", "DECODE", "LIMIT", "PREFILL", "WAYS", "Pair"]

#: Layouts and tokens a block of both sides: what an engine keeps, and what another one does.
PREFILL, DECODE = ("vllm/flash_attn_nhd", 16), ("vllm/flash_attn_hnd", 64)

#: Seconds after which the other process is taken for dead.
LIMIT = 120.0


class Setting(NamedTuple):
    """What both processes are told."""

    model: BlockShape
    tokens: int
    folder: str
    sends: bool

    @property
    def nbytes(self) -> int:
        return self.tokens * replace(self.model, nt=1).nbytes


class Memory:
    """What a side has, made when it is first asked for: bytes in one piece, and a pool."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.stack = setting, contextlib.ExitStack()

    @functools.cached_property
    def bytes(self) -> Any:
        """As many as the largest message, and a cell beyond for answers."""
        held = np.zeros(self.setting.nbytes + 64, np.uint8)
        if self.setting.sends:
            held[:] = np.frombuffer(np.random.default_rng(1).bytes(held.size), np.uint8)
        else:
            held[::4096] = 1  # pages are there
        return held

    @functools.cached_property
    def pool(self) -> Pool:
        return self._pool(*(PREFILL if self.setting.sends else DECODE))

    @functools.cached_property
    def landing(self) -> Pool:
        """What engines let blocks arrive in: as the sender has them."""
        return self._pool(*PREFILL) if not self.setting.sends else self.pool

    def _pool(self, name: str, nt: int) -> Pool:
        shape = replace(self.setting.model, nt=nt)
        seed = 3 if self.setting.sends else 4
        return self.stack.enter_context(
            random_pool(spec.load(name), shape, self.setting.tokens // nt, "cpu", seed=seed)
        )

    def table(self, nt: int) -> Any:
        """Which blocks a message of all tokens takes, in which order."""
        return np.random.default_rng(nt).permutation(self.setting.tokens // nt)


class Way(Protocol):
    """A way for bytes, one side of it.

    Attributes
    ----------
    copies : bool
        The receiver has all tokens in its pool at the end, and not the bytes in one piece.
    pieces : int
        Descriptors, or chunks, of the message that went last.
    """

    memory: Memory
    copies: bool = False
    pieces: int = 1

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def card(self) -> Any:
        """What the other side needs to meet this one."""

    def meet(self, card: Any) -> None:
        """Connect."""

    def send(self, tokens: int) -> None:
        """Send that much; return when the other side has said that it is there."""

    def take(self, tokens: int) -> None:
        """Wait for that much, and say that it is there."""

    def close(self) -> None:
        """Give back what it has."""

    def nbytes(self, tokens: int) -> int:
        return tokens * self.memory.setting.nbytes // self.memory.setting.tokens


class ByNixl(Way):
    """NIXL itself: one transfer of one descriptor a side, its note, and a note back."""

    def __init__(self, memory: Memory) -> None:
        from ..wire.agents import Agent

        super().__init__(memory)
        self.agent = Agent(f"{type(self).__name__} {memory.setting.sends}", "UCX")
        self.places = self.regions()
        descriptors = self.agent.nixl.get_reg_descs([(*place, 0, "") for place in self.places], "DRAM")
        self.agent.nixl.register_memory(descriptors)

    def regions(self) -> list[tuple[int, int]]:
        return [(self.memory.bytes.ctypes.data, self.memory.bytes.nbytes)]

    def card(self) -> Any:
        return self.agent.nixl.get_agent_metadata(), self.places

    def meet(self, card: Any) -> None:
        metadata, self.far = card
        name = self.agent.nixl.add_remote_agent(metadata)
        self.peer = name.decode() if isinstance(name, bytes) else name

    def send(self, tokens: int) -> None:
        here, there = ((place[0][0], self.nbytes(tokens), 0) for place in (self.places, self.far))
        handle = self.agent.post("WRITE", ("DRAM", here), ("DRAM", there), self.peer, b"put")
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
    """What engines do with NIXL: a descriptor a block, layer, K and V, into blocks of the sender's, which torch then permutes."""

    copies = True

    def regions(self) -> list[tuple[int, int]]:
        arrays = self.memory.landing.arrays
        return [(array.ctypes.data, array.nbytes) for array in arrays]

    def meet(self, card: Any) -> None:
        super().meet(card)
        if self.memory.setting.sends:
            self.sides = [
                self.agent.nixl.prep_xfer_dlist(to, self.agent.nixl.get_xfer_descs(self.blocks(places), "DRAM"))
                for to, places in (("NIXL_INIT_AGENT", self.places), (self.peer, self.far))
            ]

    def blocks(self, places: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
        """Every block's K, and V, of every layer; arrays have K before V."""
        number = self.memory.setting.tokens // PREFILL[1]
        return [
            (address + (half * number + block) * (nbytes // 2 // number), nbytes // 2 // number, 0)
            for block in range(number)
            for address, nbytes in places
            for half in (0, 1)
        ]

    def send(self, tokens: int) -> None:
        each = 2 * len(self.places)
        blocks = self.memory.table(PREFILL[1])[: tokens // PREFILL[1]]
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
        table = torch.from_numpy(self.memory.table(DECODE[1])[: tokens // DECODE[1]])
        for landed, kept in zip(self.memory.landing.arrays, self.memory.pool.arrays, strict=True):
            src, dst = (torch.from_numpy(array.view(np.uint16)) for array in (landed, kept))
            two, _, nt, nh, hd = src.shape
            some = src[:, : tokens // nt].reshape(two, -1, DECODE[1], nh, hd).permute(0, 1, 3, 2, 4)
            dst.view(torch.int16).index_copy_(1, table, some.view(torch.int16))
        self.answer()


class ByGloo(Way):
    """gloo itself: one tensor, and a byte back."""

    def __init__(self, memory: Memory) -> None:
        import torch
        import torch.distributed as distributed

        super().__init__(memory)
        self.store = distributed.FileStore(f"{memory.setting.folder}/gloo", -1)
        self.tensor = torch.from_numpy(memory.bytes)

    def meet(self, card: Any) -> None:  # noqa: ARG002
        import torch.distributed as distributed

        self.group = distributed.ProcessGroupGloo(self.store, 1 - self.memory.setting.sends, 2)

    def send(self, tokens: int) -> None:
        self.group.send([self.tensor[: self.nbytes(tokens)]], 1, 0).wait()
        self.group.recv([self.tensor[-1:]], 1, 1).wait()

    def take(self, tokens: int) -> None:
        self.group.recv([self.tensor[: self.nbytes(tokens)]], 0, 0).wait()
        self.group.send([self.tensor[-1:]], 0, 1).wait()


def carrier(kind: str, name: str, path: str) -> Any:
    """A wire between processes; the path is that of a file where two ends find each other."""
    if kind == "mapped":
        return wire.mapped(carrier("nixl", name, path))
    if kind == "nixl":
        return wire.nixl(name, drop_seconds=1)
    import torch.distributed

    return wire.torch(name, torch.distributed.FileStore(path, -1), drop_seconds=1)


class ByWire(Way):
    """A put of one of kvbm's wires, its note, and a note back."""

    def __init__(self, kind: str, memory: Memory) -> None:
        super().__init__(memory)
        self.kind = kind
        side = "near" if memory.setting.sends else "far"
        self.wire = carrier(kind, side, f"{memory.setting.folder}/wire")
        self.wire.register(wire.Slab.of(memory.bytes))

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
    """A link, end to end: chunks are packed, put, unpacked into blocks of another layout and size, and proven by their digests."""

    copies = True

    def __init__(self, kind: str, memory: Memory) -> None:
        super().__init__(memory)
        sends, model = memory.setting.sends, memory.setting.model
        self.nt = (PREFILL if sends else DECODE)[1]
        name = "prefill" if sends else "decode"
        place = Placement("tp1", model=model, nt=self.nt, name=name)
        of_wire = carrier(kind, name, f"{memory.setting.folder}/link")
        self.end = Endpoint(name, place, 0, memory.pool, wire=of_wire)
        self.number = 0

    def card(self) -> Any:
        return self.end.card()

    def meet(self, card: Any) -> None:
        self.link = self.end.meet([card])

    def send(self, tokens: int) -> None:
        before = self.link.stats()["chunks_sent"]
        self._go(self.link.send, tokens)
        self.pieces = int(self.link.stats()["chunks_sent"] - before)

    def take(self, tokens: int) -> None:
        self._go(self.link.receive, tokens)

    def _go(self, call: Callable[[str, Span], Any], tokens: int) -> None:
        self.number += 1
        table = self.memory.table(self.nt)[: tokens // self.nt]
        call(str(self.number), Span(table, range(tokens))).synchronize(LIMIT)

    def close(self) -> None:
        self.end.close()


#: Name → what it is, and what it stands beside.
WAYS: dict[str, tuple[Callable[[Memory], Way], str]] = {
    "NIXL": (ByNixl, ""),
    "wire.nixl": (functools.partial(ByWire, "nixl"), "NIXL"),
    "link by NIXL": (functools.partial(ByLink, "nixl"), "NIXL"),
    "link, mapped": (functools.partial(ByLink, "mapped"), "NIXL"),
    "as engines do": (AsEngines, "NIXL"),
    "gloo": (ByGloo, ""),
    "wire.torch": (functools.partial(ByWire, "torch"), "gloo"),
    "link by gloo": (functools.partial(ByLink, "torch"), "gloo"),
}

#: What a wire's put must reach of what carries it.
ASKED = {"wire.nixl": 0.9, "wire.torch": 0.9}


def serve(pipe: Any, setting: Setting) -> None:
    """The other process: makes ways, and takes what comes by them."""
    memory = Memory(setting)
    ways: dict[str, Way] = {}
    with contextlib.suppress(EOFError):
        while True:
            what, name, *given = pipe.recv()
            try:
                if what == "make":
                    ways[name] = WAYS[name][0](memory)
                    pipe.send(("ok", ways[name].card()))
                elif what == "meet":
                    ways[name].meet(*given)
                    pipe.send(("ok", None))
                elif what == "sum":
                    pipe.send(("ok", found(memory, ways[name], *given)))
                else:
                    tokens, count = given
                    pipe.send(("ok", None))
                    for _ in range(count):
                        ways[name].take(tokens)
            except Exception as error:
                pipe.send(("error", f"{type(error).__name__}: {error}"))
    closing = [threading.Thread(target=way.close, daemon=True) for way in ways.values()]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(8)


def found(memory: Memory, way: Way, tokens: int) -> int:
    """A sum of what came, which then is forgotten."""
    if not way.copies:
        held = memory.bytes[: way.nbytes(tokens)]
        told = zlib.crc32(held)
        held[:] = 0
        return told
    ids = memory.table(DECODE[1])[: tokens // DECODE[1]]
    told = sum(map(int, memory.pool.digest(ids, tokens=range(0, tokens, DECODE[1])))) % (1 << 64)
    for array in memory.pool.arrays:
        array[:] = 0
    return told


def wanted(memory: Memory, way: Way, tokens: int) -> int:
    """The same of what was sent."""
    if not way.copies:
        return zlib.crc32(memory.bytes[: way.nbytes(tokens)])
    ids = memory.table(PREFILL[1])[: tokens // PREFILL[1]]
    return sum(map(int, memory.pool.digest(ids, tokens=range(0, tokens, PREFILL[1])))) % (1 << 64)


class Pair:
    """The process that sends, which is the caller's, and one that receives."""

    def __init__(self, model: BlockShape, tokens: int, folder: str) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # of both processes: NIXL writes to where the CSV goes
        logging.getLogger("nixl").setLevel(logging.WARNING)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        setting = Setting(model, tokens, folder, True)
        self.process = context.Process(target=serve, args=(theirs, setting._replace(sends=False)), daemon=True)
        self.process.start()
        theirs.close()
        self.memory = Memory(setting)
        self.ways: dict[str, Way] = {}

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.pipe.close()  # the other process closes its ends as this one does: a link says good-bye
        for way in self.ways.values():
            with contextlib.suppress(KvbmError):
                way.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self.answer()

    def answer(self) -> Any:
        if not self.pipe.poll(LIMIT):
            raise KvbmError("bench link: the other process does not answer")
        what, value = self.pipe.recv()
        if what != "ok":
            raise KvbmError(f"bench link: the other process: {value}")
        return value

    def open(self, name: str) -> None:
        """Make both sides of a way, and connect them."""
        way = WAYS[name][0](self.memory)
        self.ways[name] = way
        card = self.ask("make", name)
        self.pipe.send(("meet", name, way.card()))  # at once with this side: gloo's two sides wait for each other
        way.meet(card)
        self.answer()

    def check(self, name: str, tokens: int) -> None:
        """Send once, and compare.

        Raises
        ------
        WrongCopyError
            Something else came.
        """
        self.seconds(name, tokens, 1)
        if self.ask("sum", name, tokens) != wanted(self.memory, self.ways[name], tokens):
            raise WrongCopyError(f"{name}: {tokens} tokens: what came is not what was sent")

    def seconds(self, name: str, tokens: int, count: int) -> list[float]:
        self.ask("take", name, tokens, count)
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self.ways[name].send(tokens)
            times.append(time.perf_counter() - start)
        return times

    def runner(self, name: str, tokens: int) -> Runner:
        def run(iters: int, warmup: int) -> Timed:
            return Timed.of(self.seconds(name, tokens, warmup + iters)[warmup:], "clock")

        return run
